"""Why no step of a program was seen: a launch that sets PYTHONPATH anew keeps the recorder from what it starts."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

__all__ = ["unseen_for"]

_SET = re.compile(
    r"""(?<![\w${"'])PYTHONPATH\s*:?=\s*(?P<value>(?:"[^"]*"|'[^']*'|\$\([^)]*\)|`[^`]*`|[^\s;&|"'`])*)"""
)
_MAKEFILES = ("GNUmakefile", "makefile", "Makefile")
"""In the order in which make looks for them."""
_MOST = 1 << 20
"""Bytes of a file that is no script."""


def unseen_for(command: Sequence[str], root: Path) -> str:
    """What may have kept the recorder from the steps of a command, with the cure.

    Args:
        command: Program and arguments.
        root: Where it ran.
    """
    where = _sets_anew(command, root)
    anew = (
        f"{where} sets PYTHONPATH anew, by which the recorder gets in: keep what it was "
        "(PYTHONPATH=src:$PYTHONPATH; $$PYTHONPATH in a Makefile); else, "
    )
    return (anew if where else "") + (
        "does it train with torch.optim (an update from torch.func's gradients, or in hooks that drop them, is not "
        "seen: give them to an optimizer of torch's), in a Python that reads PYTHONPATH, and if it goes on from a "
        "checkpoint that it finds, is there a step left to make?"
    )


def _sets_anew(command: Sequence[str], root: Path) -> str:
    """``Makefile:3``, or the command's own words; '' where nothing shows it."""
    for word in command:
        if _anew(word):
            return f"`{word}`"
    for name, text in _scripts(command, root):
        for number, line in enumerate(text.splitlines(), 1):
            if not line.lstrip().startswith("#") and _anew(line):
                return f"{name}:{number}"
    return ""


def _anew(line: str) -> bool:
    return any("PYTHONPATH" not in found["value"] for found in _SET.finditer(line))


def _scripts(command: Sequence[str], root: Path) -> Iterator[tuple[str, str]]:
    """The files of text that a command names, and make's own, but for Python's."""
    makes = Path(command[0]).name in ("make", "gmake") if command else False
    made = next((name for name in _MAKEFILES if (root / name).is_file()), "") if makes else ""
    for name in dict.fromkeys([*command, made]):
        if not name or name.endswith(".py"):
            continue
        try:
            path = root / name
            if path.is_file() and path.stat().st_size < _MOST:
                yield name, path.read_text(encoding="utf-8")
        except (OSError, ValueError):  # none that a system knows, or no text
            continue
