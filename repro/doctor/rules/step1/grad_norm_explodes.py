"""Gradient norms that leave their level and stay above it."""

from __future__ import annotations

from collections.abc import Iterator

from repro.doctor.artefacts.kinds import Launch, Series
from repro.doctor.facts.curves import curve, number, rises, setting
from repro.doctor.rule import Found, Rule

__all__ = ["RULE"]

_USUAL_CLIP = 1.0
"""Megatron's own; a first level below it says little, as first updates may be small."""


def _check(series: Series, launch: Launch | None) -> Iterator[Found]:
    clip = number(setting(launch, series, "--clip-grad")) or 0.0
    rise = rises(curve(series, "step", "grad_norm"), least=clip, least_first=clip or _USUAL_CLIP)
    if rise is not None:
        yield Found(
            f"the gradient norm leaves its level of {rise.level:.3g} at update {rise.at.number} and reaches "
            f"{rise.top:.3g}",
            series.where("step", rise.at.number, "grad_norm", rise.at.value),
        )


RULE = Rule(
    id="grad-norm-explodes",
    title="Gradient norm ten times its level (of the first updates, a hundred) for three updates in a row",
    inputs=(Series,),
    uses=(Launch,),
    severity="warning",
    certainty="likely",
    why="clipped or not, updates now follow a few samples, and the run seldom comes back by itself",
    cure="check the chat template first: data that has it already, fed to a run that applies it again, does this; then "
    "--clip-grad 1.0, a lower --lr (1e-6), and the rewards of the rollouts before it; `repro bisect` finds the commit "
    "where the same run did not do it before",
    sources=("Miles FAQ", "slime guide: Troubleshooting", "Relax guide: Debugging"),
    check=_check,
)  # fmt: skip
