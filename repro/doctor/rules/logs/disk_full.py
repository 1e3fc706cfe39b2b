"""A file system that is full."""

from __future__ import annotations

from collections.abc import Iterator

from repro.doctor.artefacts.kinds import Log
from repro.doctor.artefacts.log_lines import above, goes_on, said, speaker, times
from repro.doctor.rule import Found, Rule

__all__ = ["RULE"]

_SEEN = ("No space left on device", "Disk quota exceeded", "is over 95% full, available space")


def _check(log: Log) -> Iterator[Found]:
    hits = said(log, *_SEEN)
    if not hits:
        return
    hit = hits[0]
    shared = any("/dev/shm" in line for line in above(log, hit, 10))  # noqa: S108 - looked for, not written to
    who = f" for {speaker(hit)}" if speaker(hit) else ""
    nearly = _SEEN[2] in hit.text
    yield Found(
        f"a file system is {'nearly full' if nearly else 'full'}{who}{times(log, *_SEEN)}"
        + (": /dev/shm, shared memory" if shared else ""),
        log.where(hit),
        severity="warning" if nearly or goes_on(log, hit) else None,
        cure="a larger /dev/shm: `docker run --shm-size` or --ipc=host" if shared else "",
    )


RULE = Rule(
    id="disk-full",
    title="A file system that is full",
    inputs=(Log,),
    severity="error",
    certainty="certain",
    why="a checkpoint or dump that is written then is cut short, and the process that writes it fails",
    cure="make room where --save, the dumps and Ray's temporary folder (/tmp/ray) lie, and check the newest checkpoint",
    sources=("ray-project/ray src/ray/util/filesystem_monitor.cc",),
    check=_check,
    phrases=_SEEN,
)
