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
from typing import IO, BinaryIO

from repro_golden.base.errors import ReproError

__all__ = ["exchanged", "is_still", "of_user", "open_regular", "read_regular", "scratch_folder", "size_of", "sweep"]


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


def exchanged(folder: Path, other: Path) -> bool:
    """Whether two folders have taken each other's names: a process that is killed leaves both names whole."""
    exchange = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)  # Linux has it
    return exchange is not None and not exchange(_HERE, os.fsencode(folder), _HERE, os.fsencode(other), _EXCHANGE)


def of_user(name: str) -> Iterator[Path]:
    """Folders of a name that are the user's alone and lie below no working tree: in the cache, or in what is temporary.

    All repositories of the user have them in common. The best comes first.
    """
    caches = [Path(os.environ.get("XDG_CACHE_HOME", ""))]
    with contextlib.suppress(RuntimeError):  # a user without a home
        caches.append(Path.home() / ".cache")
    temporary = Path(tempfile.gettempdir()) / f"repro-{os.getuid()}"
    for cache in [*caches, temporary]:
        folder = cache / "repro" / name
        with contextlib.suppress(OSError):
            if not cache.is_absolute() or any((above / ".git").exists() for above in folder.resolve().parents):
                continue
            cache.parent.mkdir(parents=True, exist_ok=True)
            parts = cache, folder.parent, folder
            for part in parts:
                part.mkdir(mode=stat.S_IRWXU, exist_ok=True)
            mine = all(part.stat().st_uid == os.getuid() for part in parts[cache != temporary :])
            if mine and os.access(folder, os.W_OK):
                yield folder.resolve()


# -- scratch folders that never outlive their process for long: a lock tells the next one what a killed one left

_PASSING = ".new-"
"""Begins the name of one that has no lock yet, or is being removed: ours also without one."""


@contextlib.contextmanager
def scratch_folder(base: Path, what: str = "") -> Iterator[Path]:
    """A folder below `base`, removed on every exit, together with those of processes that were killed.

    Args:
        base: Where it is made; on the disk of what will be moved out of it.
        what: A word in its name, for whoever looks.
    """
    base.mkdir(parents=True, exist_ok=True)
    sweep(base)
    with contextlib.ExitStack() as exits:
        folder = None
        while folder is None:  # a sweeper may come before the lock is held
            made = Path(tempfile.mkdtemp(prefix=_PASSING, dir=base))
            with contextlib.suppress(FileNotFoundError):
                lock = exits.enter_context((made / "lock").open("w"))
                fcntl.flock(lock, fcntl.LOCK_EX)
                if is_still(lock, made / "lock"):
                    folder = made.rename(base / f"{what}-{made.name.removeprefix(_PASSING)}")
        try:
            yield folder
        finally:
            _remove(folder)


def sweep(base: Path) -> None:
    """Remove the scratch folders below `base` that nobody holds a lock on: their processes are gone."""
    for folder in base.iterdir():
        passing = folder.name.startswith(_PASSING)
        if folder.name.startswith(".") and not passing:
            continue
        with contextlib.suppress(OSError), (folder / "lock").open("a" if passing else "r+") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if is_still(lock, folder / "lock"):
                _remove(folder)


def size_of(folder: Path) -> int:
    """Bytes of the files right in a folder, which need not be there."""
    return sum(path.stat().st_size for path in folder.glob("*"))


def is_still(lock: IO[str], path: Path) -> bool:
    """Whether an open file is still what its path names: a sweep may have removed it while we waited for its lock."""
    try:
        return os.path.samestat(path.stat(), os.fstat(lock.fileno()))
    except FileNotFoundError:
        return False


def _remove(folder: Path) -> None:
    """Remove a scratch folder whose lock is held; what another process still writes there goes with a later sweep."""
    with contextlib.suppress(OSError):
        if not folder.name.startswith(_PASSING):
            folder = folder.rename(folder.with_name(_PASSING + folder.name))
    shutil.rmtree(folder, ignore_errors=True)
