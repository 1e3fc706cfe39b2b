"""Ray's memory monitor killed processes."""

from __future__ import annotations

import re
from collections.abc import Iterator

from repro.doctor.artefacts.kinds import Log
from repro.doctor.artefacts.log_lines import below, said, times
from repro.doctor.rule import Found, Rule

__all__ = ["RULE"]

_SEEN = (
    "killed due to the node running low on memory",
    "Workers (tasks / actors) killed due to memory pressure (OOM)",
    "ray.exceptions.OutOfMemoryError",
    "RayOutOfMemoryError",
)
_USED = re.compile(r"was ([\d.]{1,12} ?[KMGT]i?B / [\d.]{1,12} ?[KMGT]i?B)")
_NAME = re.compile(r"\bname=([^,\s]{1,120})")


def _check(log: Log) -> Iterator[Found]:
    hits = said(log, *_SEEN)
    if not hits:
        return
    text = " ".join(below(log, hits[0], 8))
    used, name = _USED.search(text), _NAME.search(text)
    which = f" {name[1]}" if name else " processes"
    full = f" at {used[1]} of the node's memory" if used else ", the node's memory being nearly full"
    yield Found(f"Ray killed{which}{full}{times(log, *_SEEN)}", log.where(hits[0]))


RULE = Rule(
    id="ray-oom",
    title="Processes that Ray's memory monitor killed",
    inputs=(Log,),
    severity="error",
    certainty="certain",
    why="CPU memory ran out, which GPU settings do not change, and Ray ended the newest task for it",
    cure="give the node more memory, or need less: fewer samples at a time, no CPU copy of weights that nobody uses, a "
    "smaller object store; RAY_memory_usage_threshold only moves the limit",
    sources=("ray-project/ray doc/source/ray-core/scheduling/ray-oom-prevention.rst",),
    check=_check,
    phrases=_SEEN,
)
