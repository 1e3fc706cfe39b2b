"""Engines whose memory was released and not taken back before they generate."""

from __future__ import annotations

from collections.abc import Iterator

from repro.doctor.artefacts.kinds import Log
from repro.doctor.artefacts.log_lines import said, times
from repro.doctor.rule import Found, Rule

__all__ = ["RULE"]

_RELEASE, _RESUME = '/release_memory_occupation HTTP/1.1" 200', '/resume_memory_occupation HTTP/1.1" 200'
_REFUSED = ('/resume_memory_occupation HTTP/1.1" 500', '/resume_memory_occupation HTTP/1.1" 400')
_ERRORS = ("Server Error: ", "Client Error: ")
_GENERATE = '"POST /generate HTTP/1.1" 200'


def _check(log: Log) -> Iterator[Found]:
    failed = said(log, *_REFUSED)
    failed += [hit for hit in said(log, *_ERRORS) if "/resume_memory_occupation" in hit.text]
    if failed:
        yield Found(
            f"an engine could not take its memory back{times(log, *_REFUSED)}",
            log.where(min(failed)),
            severity="error",
            certainty="certain",
        )
        return
    released = said(log, _RELEASE)
    if released and not log.counts.get(_RESUME):
        served = [hit for hit in said(log, _GENERATE) if hit.line > released[0].line]
        if served:
            yield Found("an engine released its memory, never took it back, and generates", log.where(served[0]))


RULE = Rule(
    id="buffers-released",
    title="An engine that generates after its memory was released and not taken back",
    inputs=(Log,),
    severity="warning",
    certainty="likely",
    why="buffers that no weight sync writes (rotary tables, scales) hold whatever was there: rollouts are gibberish",
    cure="call resume_memory_occupation for weights and KV cache before generating, and make the model re-create its "
    "non-persistent buffers; compare a rollout before the first release with one after it",
    sources=(
        "Miles guide: Debugging", "slime guide: Debugging", "Relax guide: Debugging",
        "THUDM/slime@624b824a8 slime/backends/sglang_utils/sglang_engine.py:328",
    ),
    check=_check,
    phrases=(_RELEASE, _RESUME, *_REFUSED, *_ERRORS, _GENERATE),
)  # fmt: skip
