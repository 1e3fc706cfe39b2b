"""The part of a commit's diff that an explanation names, as every report shows it beside why."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from repro_bisect.axes.axis import short
from repro_golden.base.clean import visible

if TYPE_CHECKING:
    from repro_bisect.explain.result import Explanation

__all__ = ["Change", "ChangedFile", "change_in", "change_of"]

_LINES = 40
"""Lines that are shown of a change; the rest is counted."""
_AROUND = 10
"""Lines of a long hunk that are shown before and after the one that is named."""
_WIDTH = 200
_KINDS = {"+": "add", "-": "del", "@": "soft", "\\": "soft"}


@dataclass(frozen=True)
class ChangedFile:
    """What is shown of one file.

    Attributes:
        name: Its path.
        lines: Each with its kind: ``add``, ``del``, ``soft`` for what says where and how much, or empty.
    """

    name: str
    lines: Sequence[tuple[str, str]]


@dataclass(frozen=True)
class Change:
    """What is shown of a commit's diff.

    Attributes:
        point: The commit.
        files: Those that an explanation names, with the hunks around its lines.
        more: Lines of these hunks that are not shown.
    """

    point: str
    files: Sequence[ChangedFile]
    more: int

    @property
    def text(self) -> str:
        """As a diff in plain text."""
        lines = []
        for file in self.files:
            lines += [f"--- a/{file.name}", f"+++ b/{file.name}", *(line for _, line in file.lines)]
        return "\n".join(lines)

    @property
    def note(self) -> str:
        """What is left out, and where it is; empty where nothing is."""
        left = f"{self.more} more {'line' if self.more == 1 else 'lines'} of these hunks"
        return f"{left}: `git show {short(self.point)}`" if self.more else ""


def change_of(explanation: Explanation | None) -> Change | None:
    """The change that an explanation names; None where it names no line of one."""
    if explanation is None:
        return None
    return change_in(explanation.after.point, [(place.file, place.hunk, place.text) for place in explanation.places])


def change_in(point: Any, places: Iterable[tuple[str, str, str]]) -> Change | None:
    """The change around some places.

    Args:
        point: The commit.
        places: Of each the file, the hunk, as `git diff` has it, and the statement that is named; without a hunk it is
            no part of the change.
    """
    hunks: dict[tuple[str, str], str] = {}
    for file, hunk, text in places:
        if hunk:
            hunks.setdefault((file, hunk), text)
    files: dict[str, list[tuple[str, str]]] = {}
    left, more = _LINES, 0
    for (file, hunk), text in hunks.items():
        shown, hidden = _around(hunk.split("\n"), text)
        more += hidden + len(shown[left:])
        for line in shown[:left]:
            files.setdefault(file, []).append((_KINDS.get(line[:1], ""), line))
        left -= len(shown[:left])
    return (
        Change(str(point), [ChangedFile(visible(file), lines) for file, lines in files.items()], more)
        if files
        else None
    )


def _around(lines: Sequence[str], text: str) -> tuple[list[str], int]:
    """A hunk's head and its lines around the statement that is named, and how many are left out."""
    head, body = lines[:1], lines[1:]
    named = text.strip().partition("\n")[0].strip()
    at = next((k for k, line in enumerate(body) if named and line[1:].strip() == named), 0)
    begin, end = max(0, at - _AROUND), at + _AROUND + 1
    shown = [*head, *(["@@ ..."] if begin else []), *body[begin:end]]
    return [_line(line) for line in shown], len(body) - len(body[begin:end])


def _line(line: str) -> str:
    line = visible(line)
    return line if len(line) <= _WIDTH else f"{line[: _WIDTH - 1]}…"
