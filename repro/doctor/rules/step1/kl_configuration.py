"""KL of the first step above 1: policy and reference are not the same model."""

from __future__ import annotations

from collections.abc import Iterator

from repro.doctor.artefacts.kinds import Launch, Series
from repro.doctor.facts.curves import first_kl, kl_where
from repro.doctor.rule import Found, Rule

__all__ = ["RULE"]

_CONFIGURATION = 1.0


def _check(series: Series, launch: Launch | None) -> Iterator[Found]:
    kl = first_kl(series)
    if kl is None or kl[2] <= _CONFIGURATION:
        return
    load, ref = (launch.value(flag) if launch else None for flag in ("--load", "--ref-load"))
    named = f": --load {load}, --ref-load {ref}" if load and ref and load != ref else ""
    yield Found(
        f"KL of the first step is {kl[2]:.3g}, above {_CONFIGURATION:g}: policy and reference are not the same "
        f"model{named}",
        kl_where(series, kl),
    )


RULE = Rule(
    id="kl-configuration",
    title="KL of the first step above 1",
    inputs=(Series,),
    uses=(Launch,),
    severity="error",
    certainty="likely",
    why="the run trains towards, or from, weights that are not those it was meant to start with",
    cure="check that --load and --ref-load hold the same weights and were converted with this model's arguments "
    "(rotary base, layer numbers at pipeline stages, tied embeddings), then parallelism and precision",
    sources=("Miles guide: Debugging", "slime guide: Debugging", "Relax guide: Debugging"),
    check=_check,
)  # fmt: skip
