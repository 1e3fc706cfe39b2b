"""How far log-probs of an FP8 trainer and its engine are apart, where a log says so."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator

from repro.doctor.artefacts.kinds import Log
from repro.doctor.artefacts.log_lines import said
from repro.doctor.rule import Found, Rule

__all__ = ["RULE"]

_NAME = "forward_logp_max_diff"
_VALUE = re.compile(_NAME + r"\W{1,8}([+-]?(?:[0-9.]{1,24}(?:[eE][+-]?[0-9]{1,4})?|nan|inf))")
_BOUND = 1.0
"""Nats: beyond it one side gives a token more than e times the probability that the other gives it."""


def _check(log: Log) -> Iterator[Found]:
    for hit in said(log, _NAME):
        match = _VALUE.search(hit.text)
        try:
            value = float(match[1]) if match else 0.0
        except ValueError:
            continue
        if not math.isfinite(value) or abs(value) > _BOUND:
            yield Found(
                f"log-probs of trainer and engine differ by up to {value:g}, where {_BOUND:g} is already much for FP8",
                log.where(hit),
            )
            return


RULE = Rule(
    id="fp8-alignment",
    title="Log-probs of an FP8 trainer and its engine that are far apart",
    inputs=(Log,),
    severity="warning",
    certainty="likely",
    why="the policy that samples is not the one that is trained",
    cure="quantize both sides alike (the same scales and blocks), or sample in BF16 to see whether FP8 is the cause",
    sources=("Miles guide: Debugging",),
    check=_check,
    phrases=(_NAME,),
)
