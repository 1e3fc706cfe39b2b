"""The rollout samples that a log shows: is what the model writes text at all?"""

from __future__ import annotations

import re
from collections.abc import Iterator

from repro.doctor.artefacts.kinds import Hit, Log
from repro.doctor.facts.texts import SINGLE, judge, single_character
from repro.doctor.rule import Found, Rule
from repro.doctor.rules.step1.garbled_first_rollout import CURE, SOURCES, WHY
from repro_golden.base.errors import ReproError
from repro_golden.dumps.run.regular import open_regular

__all__ = ["RULE"]

_LINES = 8
_LONGEST = 1 << 16
_TAIL = 128
"""The last characters, which are the response's own: what stands before them is the prompt, however long."""

_PHRASES = ("First rollout sample", "Finish rollout")
_SAMPLE = re.compile(
    r"(?:First rollout sample|Finish rollout): (?:text_preview=(?P<preview>.*?)(?:, label=.*)?|\[(?P<quote>['\"])"
    r"(?P<text>.*?)(?:(?P=quote)\], label: .*)?)$"
)
_CUT = re.compile(r"\.\.\.<truncated chars=\d+>$")
_ESCAPE = re.compile(r"\\(?:x([0-9a-f]{2})|u([0-9a-f]{4})|(n|t|r|\\|'|\"))")
_ESCAPED = {"n": "\n", "t": "\t", "r": "\r"}


def _check(log: Log) -> Iterator[Found]:
    lines = sorted({hit for phrase in _PHRASES for hit in log.hits.get(phrase, ())})[:_LINES]
    for number, hit in enumerate(lines, 1):
        text = _text(_line(log, hit))
        verdict = judge(text, None)
        reason = verdict.reason if verdict is not None else ""
        if not reason and len(tail := text[-_TAIL:]) == _TAIL:
            character, share = single_character(tail)
            reason = f"{share:.0%} of its last {_TAIL} characters are {character!r}" if share > SINGLE else ""
        if reason:
            which = (
                "the first rollout sample in the log" if number == 1 else f"rollout sample number {number} of the log"
            )
            yield Found(f"{which} is garbled: {reason}", log.where(hit))
            return


def _line(log: Log, hit: Hit) -> str:
    """A line as long as it is, up to 64 KiB; what the log's reader kept of it where it cannot be read again."""
    try:
        with open_regular(log.path) as file:
            file.seek(hit.offset)
            line = file.readline(_LONGEST).decode("utf-8", "replace").rstrip("\r\n")
    except (OSError, ReproError):
        return hit.text
    return (
        line if any(phrase in line for phrase in _PHRASES) else hit.text
    )  # of a packed log, offsets are unpacked ones


def _text(line: str) -> str:
    """Prompt and response that a line shows; '' for a line in another form."""
    found = _SAMPLE.search(line)
    if found is None:
        return ""
    if found["preview"] is not None:
        return _CUT.sub("", found["preview"]).replace("\\n", "\n")
    return _ESCAPE.sub(
        lambda one: chr(int(one[1] or one[2], 16)) if one[1] or one[2] else _ESCAPED.get(one[3], one[3]), found["text"]
    )


RULE = Rule(
    id="garbled-log",
    title="Samples in a log that are no text",
    inputs=(Log,),
    severity="warning",
    certainty="likely",
    why=WHY,
    cure=CURE,
    sources=(*SOURCES, "THUDM/slime@624b824a8 slime/rollout/sglang_rollout.py:421"),
    check=_check,
    phrases=_PHRASES,
)
