"""Whether a trainer took the flags that it was given, by what its own parsers say (`attach.entry`).

slime's parser ignores flags that it does not know, so a misspelt one, or one that a commit does not have yet, would
pass for a run that it never was.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["Parsed", "read_parsers"]

_ENGINE = ("--sglang-", "--router-")
"""Flags of the rollout engine, which no parser looks at where nothing is sampled (slime/utils/arguments.py:1607)."""


@dataclass(frozen=True)
class Parsed:
    """What the processes at a trainer's entry points made of their command lines.

    Attributes:
        processes: How many there were.
        refused: Of the flags that were added: those that no parser has, or that came to another value, and why.
        ignored: Flags of the user's own that no parser has, with the nearest one that there is, or ''.
        overridden: Variables that had other values than asked for, with theirs.
        outside: Modules that came from the user's checkout, not from the commit under test.
    """

    processes: int
    refused: Mapping[str, str] = field(default_factory=dict)
    ignored: Mapping[str, str] = field(default_factory=dict)
    overridden: Mapping[str, str] = field(default_factory=dict)
    outside: Sequence[str] = ()


_UNKNOWN = "no parser of it has this flag"


def read_parsers(
    folder: Path, added: Sequence[Sequence[str]], variables: Mapping[str, str], more: Sequence[str] = ()
) -> Parsed:
    """Read what parsers said.

    Args:
        folder: Where they wrote it; one file for each process.
        added: The flags that were added, each with its value if it has one.
        variables: Those that were asked for.
        more: Words that were added for the user: their flags must be known, whatever becomes of their values.
    """
    refused: dict[str, str] = {}
    ignored: dict[str, str] = {}
    overridden: dict[str, str] = {}
    outside: dict[str, None] = {}
    files = sorted(folder.glob("parsers-*.jsonl"))
    parsed = 0
    for path in files:
        first, *rest = _lines(path)
        said = [one for one in rest if "options" in one]
        if not said:
            continue  # a launcher that reads no command line of its own
        parsed += 1
        outside |= dict.fromkeys(said[-1].get("outside", ()))
        known = {option for one in said for option in one["options"]}
        loose = any(one["abbreviates"] for one in said)
        for flag, *value in added:
            if why := _refusal(flag, value, said, known):
                refused.setdefault(flag, why)
        for flag in (word.partition("=")[0] for word in more if word.startswith("--")):
            if flag not in known:
                near = difflib.get_close_matches(flag, sorted(known), 1)
                refused.setdefault(flag, _UNKNOWN + (f": did you mean {near[0]}?" if near else ""))
        for flag in first["own"]:
            if flag.startswith(_ENGINE):
                continue
            if flag not in known and not (loose and any(option.startswith(flag) for option in known)):
                near = difflib.get_close_matches(flag, sorted(known), 1)
                ignored.setdefault(flag, near[0] if near else "")
        for name, asked in variables.items():
            if (has := first["variables"].get(name)) != asked:
                overridden.setdefault(name, "" if has is None else has)
    return Parsed(parsed, refused, ignored, overridden, list(outside))


def _refusal(flag: str, value: Sequence[str], said: Sequence[Mapping[str, Any]], known: set[str]) -> str:
    """Why a flag took no effect; '' where it did."""
    if flag not in known:
        return _UNKNOWN
    found = [one["values"][flag] for one in said if flag in one["values"]]
    if not value:
        # a flag without a value is a switch; one that says another thing is left to the trainer
        return "" if found[-1] is not False else "it came to nothing"
    return "" if found[-1] == value[0] else f"it came to {found[-1]!r}"


def _lines(path: Path) -> list[dict[str, Any]]:
    """The lines that are whole: the process may be writing its last."""
    found = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            found.append(json.loads(line))
        except ValueError:
            break
    return found or [{"own": [], "variables": {}}]
