"""Requests that engines took back because their KV cache was full."""

from __future__ import annotations

from collections.abc import Iterator

from repro.doctor.artefacts.kinds import Launch, Log
from repro.doctor.artefacts.log_lines import argument, said, times
from repro.doctor.rule import Found, Rule

__all__ = ["RULE"]

_SEEN = ("KV cache pool is full. Retract requests.", "Decode out of memory happened")
_FEWEST = 10


def _check(log: Log, launch: Launch | None) -> Iterator[Found]:
    hits = said(log, *_SEEN)
    if sum(log.counts.get(phrase, 0) for phrase in _SEEN) < _FEWEST or not hits:
        return
    now = argument("sglang_mem_fraction_static", launch, log)
    yield Found(
        f"engines took requests back for want of KV cache{times(log, *_SEEN)}",
        log.where(hits[0]),
        cure=f"raise --sglang-mem-fraction-static (now {now}) as far as training leaves room, or fewer requests at a "
        "time (--sglang-server-concurrency)"
        if now
        else "",
    )


RULE = Rule(
    id="kv-cache-full",
    title="Requests that engines took back for want of KV cache",
    inputs=(Log,),
    uses=(Launch,),
    severity="note",
    certainty="certain",
    why="what they had generated is computed again, so rollouts take longer",
    cure="raise --sglang-mem-fraction-static as far as training leaves room, or fewer requests at a time "
    "(--sglang-server-concurrency)",
    sources=("sgl-project/sglang python/sglang/srt/managers/scheduler.py",),
    check=_check,
    phrases=_SEEN,
)
