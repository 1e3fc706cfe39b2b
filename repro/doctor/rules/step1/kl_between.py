"""KL of the first step between jitter and a configuration error."""

from __future__ import annotations

from collections.abc import Iterator

from repro.doctor.artefacts.kinds import Launch, Series
from repro.doctor.facts.curves import first_kl, kl_where, replays_routing
from repro.doctor.rule import Found, Rule

__all__ = ["RULE"]

_JITTER = 1e-4
_REPLAYED = 5e-3
_CONFIGURATION = 1.0


def _check(series: Series, launch: Launch | None) -> Iterator[Found]:
    kl = first_kl(series)
    least = _REPLAYED if replays_routing(launch, series) else _JITTER
    if kl is not None and least <= kl[2] <= _CONFIGURATION:
        yield Found(f"KL of the first step is {kl[2]:.3g}: too much for jitter (below {least:g})", kl_where(series, kl))


RULE = Rule(
    id="kl-between",
    title="KL of the first step from 1e-4 to 1: more than jitter, less than another model",
    inputs=(Series,),
    uses=(Launch,),
    severity="warning",
    certainty="likely",
    why="policy and reference compute the same weights differently, so the KL penalty acts on an error from the start",
    cure="add --attention-backend flash; then compare precision (bf16, fp8) and parallelism of policy and reference, "
    "dropout (0), and whether --load already holds trained weights",
    sources=("Miles guide: Debugging", "slime guide: Debugging"),
    check=_check,
)  # fmt: skip
