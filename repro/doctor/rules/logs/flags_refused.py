"""Flags that a parser refused."""

from __future__ import annotations

from collections.abc import Iterator

from repro.doctor.artefacts.kinds import Log
from repro.doctor.artefacts.log_lines import said
from repro.doctor.rule import Found, Rule

__all__ = ["RULE"]

_FATAL = (
    "error: unrecognized arguments:",
    "error: the following arguments are required:",
    "error: ambiguous option:",
    "error: argument --",
)
_IGNORED = (
    "The following arguments is not supported in the current sglang:",
    "is not a known argument, setting it anyway",
)


def _check(log: Log) -> Iterator[Found]:
    for hit in said(log, *_FATAL)[:3]:
        yield Found(
            f"a parser refused the command line: {hit.text[hit.text.find('error: ') + 7 :][:200]}", log.where(hit)
        )
    for hit in said(log, *_IGNORED)[:3]:
        at = max(hit.text.find(_IGNORED[0]), 0)
        yield Found(f"a flag has no effect here: {hit.text[at:][:200]}", log.where(hit), severity="warning")


RULE = Rule(
    id="flags-refused",
    title="Flags that a parser refused or left unused",
    inputs=(Log,),
    severity="error",
    certainty="certain",
    why="the run does not start, or without what the flag asks for",
    cure="`repro doctor` on the launch script with the trainer's `--help` beside it names the flags that do not exist",
    sources=(
        "THUDM/slime@624b824a8 slime/backends/sglang_utils/sglang_engine.py:615",
        "THUDM/slime@624b824a8 slime/utils/arguments.py:1657",
    ),
    check=_check,
    phrases=_FATAL + _IGNORED,
)
