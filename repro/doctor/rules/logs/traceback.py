"""An exception that no other rule explains: its last line."""

from __future__ import annotations

import re
from collections.abc import Iterator

from repro.doctor.artefacts.kinds import Hit, Log
from repro.doctor.artefacts.log_lines import below, goes_on, said
from repro.doctor.rule import Found, Rule

__all__ = ["RULE"]

_HEAD = "Traceback (most recent call last):"
_PREFIX = re.compile(r"^(?:\([^()]*(?:\([^()]*\))?[^()]* pid=\d+[^)]*\) ?|\[rank\d+\]: ?|\[[^\]]*\] \S+:\d+ - )+")
_LAST = re.compile(r"^(?:[A-Za-z_][\w.]*)(?:: .*|)$")
_ENDED = ("KeyboardInterrupt", "SystemExit", "CancelledError", "asyncio.exceptions.CancelledError", "GeneratorExit")
_MOST, _LOOKED_AT = 3, 20


def _check(log: Log) -> Iterator[Found]:
    hits = said(log, _HEAD)[-_LOOKED_AT:]
    explained = _explained() if hits else ()
    told: set[str] = set()
    for hit in hits:
        lines = below(log, hit, 150)
        last = _last_line(lines)
        if not last or last in told or last.startswith(_ENDED):
            continue
        end = lines.index(next(line for line in lines if last in line))
        if any(phrase in line for line in lines[: end + 3] for phrase in explained):
            continue
        told.add(last)
        yield Found(
            f"an exception: {last[:240]}",
            log.where(Hit(hit.line + end, hit.offset, last)),
            severity="note" if goes_on(log, hit) else None,
        )
        if len(told) == _MOST:
            return


def _explained() -> tuple[str, ...]:
    """What other rules look for and say more about."""
    from repro.doctor.catalogue import catalogue

    return tuple(
        phrase
        for rule in catalogue().values()
        if rule.id != "traceback" and rule.severity == "error" and Log in rule.inputs
        for phrase in rule.phrases
        # a line of a key stands for one rule among many, and that of a weight sync for none that explains an error
        if phrase not in ("KeyError: ", "Timer update_weights start")
    )


def _last_line(lines: list[str]) -> str:
    """The line that names the exception: the first one behind the frames that is not indented."""
    head = lines[0].find(_HEAD)
    width = len(_PREFIX.sub("", lines[0])) - len(lines[0]) + head if head >= 0 else 0
    seen = False
    for line in lines[1:]:
        bare = _PREFIX.sub("", line)
        if bare.startswith(("File ", "  ")) or not bare:
            seen = True
        elif seen and _LAST.match(bare) and not bare.startswith(("File", "During")):
            return bare if width >= 0 else ""
    return ""


RULE = Rule(
    id="traceback",
    title="An exception that no other rule explains",
    inputs=(Log,),
    severity="warning",
    certainty="possible",
    why="it may be what ended the run; where training goes on behind it, it may be harmless",
    cure="read the frames above it; the first exception of a run is the one that matters, later ones follow from it",
    sources=("Miles guide: Debugging",),
    check=_check,
    phrases=(_HEAD,),
)
