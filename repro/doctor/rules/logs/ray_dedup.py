"""Ray folds lines of several processes into one: of an error that hides which ranks had it."""

from __future__ import annotations

import re
from collections.abc import Iterator

from repro.doctor.artefacts.kinds import Log
from repro.doctor.artefacts.log_lines import said
from repro.doctor.rule import Found, Rule

__all__ = ["RULE"]

_FOLDED = "x across cluster]"
_FAULT = re.compile(r"error|exception|timed? ?out|\bnan\b|killed|died", re.IGNORECASE)


def _check(log: Log) -> Iterator[Found]:
    faults = [hit for hit in said(log, _FOLDED) if _FAULT.search(hit.text)]
    if faults:
        first = faults[0]
        yield Found(f"one line tells of a fault of several processes, and not of which: {first.text}", log.where(first))


RULE = Rule(
    id="ray-dedup",
    title="Faults of several ranks that Ray shows as one line",
    inputs=(Log,),
    severity="note",
    certainty="certain",
    why="which ranks failed, and which did not, is not to be seen in the job's output",
    cure="RAY_DEDUP_LOGS=0 in the environment of `ray job submit` and of `ray start` while looking for the fault",
    sources=("Miles guide: Debugging",),
    check=_check,
    phrases=(_FOLDED,),
)
