"""Temporary folders as large as a model, of which none stays behind for long: not even those of killed processes."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import tempfile
import zlib
from collections.abc import Iterator
from pathlib import Path

__all__ = ["fresh_folder", "scratch_folder"]

_PREFIX = "repro-scratch"


def fresh_folder(kind: str, parent: str | os.PathLike[str] | None = None, *, shared: bool = False) -> Path:
    """A new empty folder, named after this process. What processes that are gone have left beside it is removed.

    Args:
        kind: of its content, such as ``held``.
        parent: where; None is among temporary files.
        shared: whether another user's process is to read and write in it.

    Raises:
        OSError: it cannot be made.
    """
    place = Path(tempfile.gettempdir() if parent is None else parent)
    _sweep(place)
    folder = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}-{kind}-{_space()}-{os.getpid()}-", dir=place))
    if shared:
        # Not sticky: what the other user writes must be ours to remove.
        folder.chmod(0o777)
    return folder


@contextlib.contextmanager
def scratch_folder(kind: str, parent: str | os.PathLike[str] | None = None, *, shared: bool = False) -> Iterator[Path]:
    """`fresh_folder`, gone afterwards."""
    folder = fresh_folder(kind, parent, shared=shared)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _space() -> str:
    """Where process ids mean something: this machine, and this container of it. A folder may be shared among many."""
    try:
        space = str(Path("/proc/self/ns/pid").stat().st_ino)
    except OSError:
        space = "0"
    # Short and plain: SGLang makes something of words in a checkpoint's path.
    return f"{zlib.crc32(f'{socket.gethostname()} {space}'.encode()):08x}"


def _sweep(place: Path) -> None:
    """Remove the folders of this user's processes of this machine that are gone."""
    for folder in place.glob(f"{_PREFIX}-*"):
        parts = folder.name.split("-")
        if len(parts) < 6 or parts[3] != _space() or not parts[4].isdecimal() or _lives(int(parts[4])):
            continue
        with contextlib.suppress(OSError):
            if folder.lstat().st_uid == os.getuid() and not folder.is_symlink():
                shutil.rmtree(folder, ignore_errors=True)


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:  # another user's
        return True
    return True
