"""Gradient norms that leave their level and stay above it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from statistics import median

from repro.doctor.artefacts.kinds import Launch, Series
from repro.doctor.facts.curves import curve, number, setting
from repro.doctor.rule import Found, Rule

__all__ = ["RULE"]

_BEFORE = 5
_WINDOW = 20
_TIMES = 10.0
_STAYS = 3


def _check(series: Series, launch: Launch | None) -> Iterator[Found]:
    norms = [point for point in curve(series, "step", "grad_norm") if math.isfinite(point.value)]
    clip = number(setting(launch, series, "--clip-grad"))
    for k in range(_BEFORE, len(norms) - _STAYS + 1):
        usual = median(point.value for point in norms[max(0, k - _WINDOW) : k])
        if usual > 0 and all(point.value > max(_TIMES * usual, clip or 0.0) for point in norms[k : k + _STAYS]):
            top = max(point.value for point in norms[k:])
            yield Found(
                f"the gradient norm leaves its level of {usual:.3g} at update {norms[k].number} and reaches {top:.3g}",
                series.where("step", norms[k].number, "grad_norm", norms[k].value),
            )
            return


RULE = Rule(
    id="grad-norm-explodes",
    title="gradient norm ten times its level for three updates in a row",
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
