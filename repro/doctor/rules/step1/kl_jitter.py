"""KL of the first step below 1e-4: jitter of kernels."""

from __future__ import annotations

from collections.abc import Iterator

from repro.doctor.artefacts.kinds import Launch, Series
from repro.doctor.facts.curves import first_kl, kl_where, replays_routing
from repro.doctor.rule import Found, Rule

__all__ = ["RULE"]

_ROUNDING = 1e-8
"""What the order of a mean's sum makes of equal log-probs: the bound of slime's and Miles' own CI."""
_JITTER = 1e-4


def _check(series: Series, launch: Launch | None) -> Iterator[Found]:
    kl = first_kl(series)
    if kl is not None and _ROUNDING < kl[2] < _JITTER and not replays_routing(launch, series):
        yield Found(
            f"KL of the first step is {kl[2]:.3g}, not 0: jitter of kernels, which can be lived with",
            kl_where(series, kl),
        )


RULE = Rule(
    id="kl-jitter",
    title="KL of the first step above 0, but below 1e-4",
    inputs=(Series,),
    uses=(Launch,),
    severity="note",
    certainty="likely",
    why="two passes over the same weights gave other bits, so no run can be reproduced bit by bit",
    cure="nothing, if runs need not be reproduced; else --attention-backend flash and --deterministic-mode",
    sources=("Miles guide: Debugging", "slime guide: Debugging", "Relax guide: Debugging",
             "THUDM/slime@624b824a8 slime/backends/megatron_utils/model.py:900"),
    check=_check,
)  # fmt: skip
