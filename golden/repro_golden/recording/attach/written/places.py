"""Where the program saves: a file, a part of an open one, or memory, which it may write to a file itself."""

from __future__ import annotations

import contextlib
import hashlib
import io
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["Bytes", "Place", "absolute", "bytes_in", "place_of", "position"]

_ENDS = 1 << 20
"""Bytes of a file's beginning and end that it is known by: an archive of torch ends in the checksums of its parts."""


@dataclass(frozen=True)
class Bytes:
    """What many bytes are known by: their number, and a digest of their ends."""

    size: int
    digest: bytes


@dataclass(frozen=True)
class Place:
    """Where a value was saved.

    Attributes:
        path: The file's; '' for memory.
        at: Where in it the value begins; None where that is unknown, and behind all that is there.
        end: Where it ends; for a file that is written anew nowhere.
        stream: The memory, where it is a stream that may be written to again.
        bytes: All that the memory holds by now; None where that cannot be seen.
    """

    path: str
    at: int | None = 0
    end: float = math.inf
    stream: Any = None
    bytes: Bytes | None = None


def position(file: Any) -> int | None:
    """Where the next write to a stream goes; None for what is none, and where it does not know."""
    with contextlib.suppress(Exception):  # the program's own class
        return int(_under(file).tell())
    return None


def place_of(file: Any, at: int | None) -> Place:
    """Where a value lies that was saved to a path or a stream, or that is bytes now.

    Args:
        file: The path, stream or bytes.
        at: The stream's `position` before.
    """
    if isinstance(file, (bytes, bytearray)):
        return Place("", bytes=_known(memoryview(file)))
    if isinstance(file, (str, os.PathLike)):
        return Place(absolute(file))
    if isinstance(file, io.BytesIO):
        known = None
        with contextlib.suppress(Exception), file.getbuffer() as view:  # the program's own may be closed by now
            known = _known(view)
        return Place("", at, stream=file, bytes=known)
    path, after = "", position(file)
    with contextlib.suppress(Exception):  # the program's own class
        path = _path_of(_under(file))
    return Place(path, at, math.inf if after is None else after) if path else Place("")


def bytes_in(path: str, sizes: set[int]) -> Bytes | None:
    """What a file's bytes are known by; None where it has another size than these, or cannot be read."""
    with contextlib.suppress(OSError):
        size = Path(path).stat().st_size
        if size in sizes:
            with Path(path).open("rb") as file:
                head = file.read(_ENDS)
                file.seek(max(size - _ENDS, 0))
                return Bytes(size, _digest(head, file.read(_ENDS)))
    return None


def absolute(file: Any) -> str:
    """A file's path, from the root; '' for a number of an open one."""
    return os.path.abspath(os.fsdecode(file)) if isinstance(file, (str, bytes, os.PathLike)) else ""  # noqa: PTH100


def _under(file: Any) -> Any:
    """The stream under one without a name, which `io` calls ``raw``: distributed checkpoints have such around files."""
    return file if getattr(file, "name", None) else getattr(file, "raw", file)


def _path_of(stream: Any) -> str:
    name = getattr(stream, "name", "")
    if isinstance(name, int):  # it was opened by its number
        with contextlib.suppress(OSError):
            name = os.readlink(f"/proc/self/fd/{name}")  # noqa: PTH115 - a pipe's is no path
            return name if name.startswith("/") else ""
        return ""
    return absolute(name) if name else ""


def _known(view: memoryview) -> Bytes:
    return Bytes(len(view), _digest(view[:_ENDS], view[-_ENDS:]))


def _digest(head: bytes | memoryview, tail: bytes | memoryview) -> bytes:
    digest = hashlib.blake2b(head, digest_size=16)
    digest.update(tail)
    return digest.digest()
