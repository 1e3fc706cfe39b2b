"""Text edits anchored on the code as it is. An anchor that is missing or ambiguous is an error, never a no-op."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from repro_golden.base.errors import ReproError

__all__ = ["Edit", "anchored", "apply"]


@dataclass(frozen=True)
class Edit:
    """Replace the one occurrence of `old` in a file by `new`.

    Attributes:
        path: The file, relative to the trainer's folder.
        old: Its anchor.
        new: What stands there afterwards.
    """

    path: str
    old: str
    new: str


def anchored(edits: Iterable[Edit], files: Mapping[str, str]) -> bool:
    """Whether every anchor stands exactly once in its file."""
    return all(files.get(e.path, "").count(e.old) == 1 for e in edits)


def apply(edits: Iterable[Edit], files: Mapping[str, str]) -> dict[str, str]:
    """The files after the edits, in their order.

    Raises:
        ReproError: an anchor does not stand exactly once: the trainer has changed since the edit was written.
    """
    out = dict(files)
    for edit in edits:
        count = out.get(edit.path, "").count(edit.old)
        if count != 1:
            first = edit.old.strip().splitlines()[0]
            raise ReproError(
                f"the demo's anchor {first!r} stands {count} times in {edit.path} of the installed trainer: "
                "reinstall repro-harness, or bring repro/demo/culprits.py up to date with the trainer"
            )
        out[edit.path] = out[edit.path].replace(edit.old, edit.new)
    return out
