"""JSON of a file that nobody vouches for: bounded, an object, and every failure one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from repro_golden.base.errors import ReproError

__all__ = ["LIMIT", "read_bytes", "read_object"]

LIMIT = 256 << 20
"""Bytes of a JSON file that are read, unless the caller says otherwise: an index of a million tensors is smaller."""


def read_bytes(path: Path, limit: int = LIMIT) -> bytes:
    """The bytes of a file.

    Raises:
        ReproError: no file, unreadable, or larger than `limit`.
    """
    try:
        if not path.is_file():
            raise ReproError(f"{path} is not a file: name the file itself")
        with path.open("rb") as file:
            raw = file.read(limit + 1)
    except (OSError, ValueError) as error:
        raise ReproError(f"{path} cannot be read: {error}") from None
    if len(raw) > limit:
        raise ReproError(f"{path} is larger than {limit >> 20} MiB: no such file of a model is")
    return raw


def read_object(path: Path, limit: int = LIMIT) -> dict[str, Any]:
    """The object that a JSON file holds; ``NaN`` and ``Infinity`` are read as Python does.

    Raises:
        ReproError: not readable, not UTF-8, not JSON, or another value than an object.
    """
    raw = read_bytes(path, limit)
    if not raw.strip():
        raise ReproError(f"{path} is empty: copy or write it again")
    try:
        value = json.loads(raw.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise ReproError(f"{path} is not JSON ({str(error)[:120]}): copy or write it again") from None
    if not isinstance(value, dict):
        raise ReproError(f"{path} holds a {type(value).__name__} where an object is expected: write it again")
    return value
