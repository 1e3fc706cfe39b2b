"""What the ``.metadata`` of a distributed checkpoint says of its ``.distcp`` files.

It is a pickle whose dicts have objects as keys, which our own machine refuses. Nothing of it is built here: its opcodes
are listed, and the fields ``relative_path``, ``offset`` and ``length`` that stand one after the other are taken.
"""

from __future__ import annotations

import pickletools
import re
from pathlib import Path
from typing import Any

from repro.doctor.artefacts.bounded_json import read_bytes
from repro_golden.base.errors import ReproError

__all__ = ["read_extents"]

_LIMIT = 1 << 30
_LISTED = 32 << 20
"""Bytes of a pickle whose opcodes are listed one by one (some seconds); of a larger one only names are taken."""

_NAME = re.compile(rb"__\d{1,9}_\d{1,9}\.distcp")
_FIELDS = ("relative_path", "offset", "length")
_TEXTS = frozenset({"BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8", "UNICODE"})
_NUMBERS = frozenset({"BININT", "BININT1", "BININT2", "INT", "LONG", "LONG1", "LONG4"})
_PUTS = frozenset({"PUT", "BINPUT", "LONG_BINPUT"})
_GETS = frozenset({"GET", "BINGET", "LONG_BINGET"})


def read_extents(path: Path) -> dict[str, int]:
    """How many bytes each file must have at least, by name; 0 where only its name is known.

    Raises:
        ReproError: not readable, cut short, or no pickle.
    """
    raw = read_bytes(path, _LIMIT)
    if not raw.endswith(b"."):
        raise ReproError(f"{path} is {'cut short' if raw else 'empty'}: the save was interrupted; save again")
    extents = {name.decode(): 0 for name in _NAME.findall(raw)}
    if len(raw) <= _LISTED:
        for name, end in _listed(path, raw):
            extents[name] = max(extents.get(name, 0), end)
    return extents


def _listed(path: Path, raw: bytes) -> list[tuple[str, int]]:
    """Pairs of a file's name and where one of its pieces ends."""
    memo: dict[int, Any] = {}
    recent: list[Any] = []
    ends: list[tuple[str, int]] = []
    count = 0
    try:
        for opcode, argument, _ in pickletools.genops(raw):
            name = opcode.name
            if name in _TEXTS or name in _NUMBERS:
                recent.append(argument)
            elif name in _GETS:
                recent.append(memo.get(_key(argument)))
            elif name == "MEMOIZE":
                memo[count] = recent[-1] if recent else None
                count += 1
                continue
            elif name in _PUTS:
                memo[_key(argument)] = recent[-1] if recent else None
                continue
            else:
                recent.append(None)
            if len(recent) >= 6 and tuple(recent[-6::2]) == _FIELDS:
                file, offset, length = recent[-5::2]
                if isinstance(file, str) and _size(offset) and _size(length):
                    ends.append((file, offset + length))
            del recent[:-6]
    except Exception as error:  # noqa: BLE001 - the standard library raises what it likes on bytes that are no pickle
        raise ReproError(f"{path} is damaged: its pickle breaks off ({str(error)[:100]}); save again") from None
    return ends


def _key(argument: Any) -> int:
    return int(argument)


def _size(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 62
