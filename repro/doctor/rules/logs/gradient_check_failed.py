"""Megatron's own check of loss and gradients ended the run."""

from __future__ import annotations

import re
from collections.abc import Iterator

from repro.doctor.artefacts.kinds import Log
from repro.doctor.artefacts.log_lines import goes_on, said, speaker, times
from repro.doctor.rule import Found, Rule

__all__ = ["RULE"]

_SEEN = (
    "found NaN in local grad norm", "found Inf in local grad norm", "found NaN in local forward loss calculation",
    "found Inf in local forward loss calculation", "found NaN in grad norm",
)  # fmt: skip
_PLACE = re.compile(r"Rank (\d{1,6}), node (\S{1,80}), device (\d{1,4}), iteration (\d{1,12})")


def _check(log: Log) -> Iterator[Found]:
    hits = said(log, *_SEEN)
    if not hits:
        return
    hit = hits[0]
    place = _PLACE.search(hit.text)
    where = f" (rank {place[1]} on {place[2]}, iteration {place[4]})" if place else ""
    who = where or (f" on {speaker(hit)}" if speaker(hit) else "")
    what = "loss" if "loss" in hit.text else "gradient"
    yield Found(
        f"Megatron found a {what} that is not finite{who}{times(log, *_SEEN)}",
        log.where(hit),
        severity="warning" if goes_on(log, hit) else None,
    )


RULE = Rule(
    id="gradient-check-failed",
    title="Megatron's check found a loss or gradient that is not finite",
    inputs=(Log,),
    severity="error",
    certainty="certain",
    why="the step cannot be applied, and the run ends",
    cure="look at that rollout's dump for non-finite log-probs, empty responses and a template applied twice; "
    "--no-check-for-nan-in-loss-and-grad skips such steps only for the time of the search",
    sources=("Miles FAQ", "NVIDIA/Megatron-LM megatron/core/distributed/param_and_grad_buffer.py"),
    check=_check,
    phrases=_SEEN,
)
