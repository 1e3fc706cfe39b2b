"""A process that crashed in native code."""

from __future__ import annotations

from collections.abc import Iterator

from repro.doctor.artefacts.kinds import Log
from repro.doctor.artefacts.log_lines import below, goes_on, said, speaker, times
from repro.doctor.rule import Found, Rule

__all__ = ["RULE"]

_SEEN = (
    "Fatal Python error: ",
    "Segmentation fault",
    "*** SIGSEGV received at",
    "*** SIGABRT received at",
    "(core dumped)",
)


def _check(log: Log) -> Iterator[Found]:
    hits = said(log, *_SEEN)
    if not hits:
        return
    hit = hits[0]
    frame = next((line.strip() for line in below(log, hit, 15) if line.strip().startswith('File "')), "")
    who = f" of {speaker(hit)}" if speaker(hit) else ""
    yield Found(
        f"a process{who} crashed in native code{times(log, *_SEEN)}{', in ' + frame[:160] if frame else ''}",
        log.where(hit),
        severity="warning" if goes_on(log, hit) else None,
    )


RULE = Rule(
    id="segfault",
    title="A process that crashed in native code",
    inputs=(Log,),
    severity="error",
    certainty="certain",
    why="it is gone without an exception, so others only see that it does not answer",
    cure="the innermost Python frame names the library; compare its version with what the trainer's image pins; "
    "PYTHONFAULTHANDLER=1 where no frame is shown",
    sources=("python/cpython Doc/library/faulthandler.rst",),
    check=_check,
    phrases=_SEEN,
)
