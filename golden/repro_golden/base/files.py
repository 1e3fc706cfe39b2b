"""Files that somebody else made: whole, plain ones, and nothing that has no end. Folders that change places."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from repro_golden.base.errors import ReproError

__all__ = ["exchanged", "open_regular", "read_regular", "scratch_folder", "sweep"]


def open_regular(path: Path) -> BinaryIO:
    """Open a file for reading, without waiting.

    Raises:
        ReproError: it is a pipe, a device, a socket or a folder.
        OSError: it is not there, or may not be read.
    """
    # O_NONBLOCK: a pipe opens at once, and is then seen to be one
    handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise ReproError(f"{path} is no regular file: give a file, or write what it holds to one first")
    return os.fdopen(handle, "rb")


def read_regular(path: Path) -> bytes:
    """All of a file.

    Raises:
        ReproError: it is a pipe or a device, which may have no end, or larger than memory.
        OSError: there is none, or it cannot be read.
    """
    try:
        with open_regular(path) as file:
            return file.read()
    except MemoryError:
        raise ReproError(f"{path} is larger than memory: it is damaged, or no file of repro's") from None


_EXCHANGE = 2
_HERE = -100


def exchanged(one: Path, other: Path) -> bool:
    """Whether two folders have taken each other's names: a process that is killed leaves both names whole."""
    exchange = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)  # Linux has it
    return exchange is not None and not exchange(_HERE, os.fsencode(one), _HERE, os.fsencode(other), _EXCHANGE)


# -- scratch folders that never outlive their process for long: a lock tells the next one what a killed one left


@contextlib.contextmanager
def scratch_folder(base: Path, what: str = "") -> Iterator[Path]:
    """A folder below `base`, removed on every exit, together with those of processes that were killed.

    Args:
        base: Where it is made; on the disk of what will be moved out of it.
        what: A word in its name, for whoever looks.
    """
    base.mkdir(parents=True, exist_ok=True)
    sweep(base)
    made = Path(tempfile.mkdtemp(prefix=".new-", dir=base))  # a sweeper passes over it until it is locked
    with (made / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        folder = made.rename(base / f"{what}{made.name.removeprefix('.new')}")
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def sweep(base: Path) -> None:
    """Remove the scratch folders below `base` that nobody holds a lock on: their processes are gone."""
    for folder in base.iterdir():
        if folder.name.startswith("."):
            continue
        with contextlib.suppress(OSError), (folder / "lock").open("r+") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
