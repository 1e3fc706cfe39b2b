"""Whether the machine had room while a child lived: judged from outside, because a full disk takes no message.

Free bytes and free inodes of every file system that a child may write to are sampled while it lives: what filled a disk
may be gone, with the folder it lay in, before anybody looks. The kernel's count of processes that were killed for want
of memory is read before and after, and so is that of processes and threads that could not be made.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import tempfile
import threading
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from repro_golden.base.errors import MachineFailureError, ShortageError

__all__ = ["FULL", "DiskWatch", "reserved"]

FULL = (errno.ENOSPC, errno.EDQUOT)
"""What a disk, or a quota of it, that is full answers."""

_TICK = 0.02
"""Seconds between two samples."""
_NEEDED = 4 << 20
"""Bytes that must be free before a child starts, on the disks that it cannot do without."""
_LOW = 1 << 20
"""Free bytes below which a write may have failed: programs write in blocks of up to about so many."""
_FEW = 16
"""Likewise of inodes."""
_TRIAL = 1 << 16
"""Bytes that are written to see whether a quota is used up, of which `statvfs` knows nothing."""
_RESERVED = 1 << 20
"""Bytes that a log has before it needs them."""
_HOMES = ("TMPDIR", "TMP", "TEMP", "HOME", "XDG_CACHE_HOME", "HF_HOME", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")
"""Variables that name folders which programs write to unasked."""


@dataclass
class _Room:
    """What was free on one file system.

    Attributes:
        folder: A folder of it, for messages.
        free: Bytes, at the last sample.
        inodes: Likewise.
        full: Whether it was full, or filling so fast that it may have been, at some sample.
    """

    folder: Path
    free: int
    inodes: int
    full: bool = False

    def sample(self) -> None:
        with contextlib.suppress(OSError):  # the folder is gone; others of its disk may not be
            free, inodes = _free(self.folder)
            # at the pace of the last tick it is full by the next one
            self.full |= free <= max(_LOW, self.free - free) or inodes <= max(_FEW, self.inodes - inodes)
            self.free, self.inodes = free, inodes


class DiskWatch:
    """Watches for the length of a block; what it saw is asked inside it, when a run has failed.

    Args:
        needed: Folders that a run cannot do without.
        variables: The environment, which names folders that programs write to unasked.
        counts: The files in which the kernel counts what `_TOLD` names; by default those of our own group.
        folders: Those that the program is told of. Nobody knows whether it writes there, so that a disk of them that
            cannot be written to from the start, such as one of data, is not watched.
    """

    def __init__(
        self,
        needed: Iterable[Path],
        variables: Mapping[str, str],
        counts: Mapping[str, Path] | None = None,
        folders: Iterable[Path] = (),
    ) -> None:
        named = [Path(variables[name]) for name in _HOMES if variables.get(name)]
        self._needed = [*needed, Path(tempfile.gettempdir())]
        self._rooms: dict[int, _Room] = {}
        for folder in (*self._needed, *named, Path("/dev/shm")):  # noqa: S108 - it is watched, not written to
            with contextlib.suppress(OSError):
                self._rooms.setdefault(folder.stat().st_dev, _Room(folder, *_free(folder)))
        for folder in folders:
            with contextlib.suppress(OSError):
                room = _Room(folder, *_free(folder))
                if room.free > _LOW and room.inodes > _FEW and not os.statvfs(folder).f_flag & os.ST_RDONLY:
                    self._rooms.setdefault(folder.stat().st_dev, room)
        self._files = counts or {"oom_kill": _memory_events(), "max": _of_group("pids", "pids.events", "pids.events")}
        self._counts = {name: _count(file, name) for name, file in self._files.items()}
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="disk watch", daemon=True)

    def __enter__(self) -> DiskWatch:
        """Begin.

        Raises:
            MachineFailureError: there is no room to begin with.
        """
        for folder in self._needed:
            room = self._rooms.get(folder.stat().st_dev) if folder.exists() else None
            if room and (room.free < _NEEDED or room.inodes <= _FEW):
                raise MachineFailureError(f"no space left on the disk of {folder} ({_told(room)}): {_FIX}")
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """End."""
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._over.wait(_TICK):
            for room in self._rooms.values():
                room.sample()

    def blame(self) -> None:
        """Raise where the machine may be why a run failed.

        Raises:
            MachineFailureError: a disk was full at some time of the block or is, or a process was killed for memory,
                or could not be made.
        """
        for room in self._rooms.values():
            room.sample()
            if room.full:
                raise ShortageError(
                    f"no space was left on the disk of {room.folder} while the program ran ({_told(room)} now): {_FIX}"
                )
            if (number := _refusal(room.folder)) is not None:
                raise MachineFailureError(f"cannot write to {room.folder} ({os.strerror(number)}): {_FIX}")
        for name, file in self._files.items():
            if _count(file, name) > self._counts[name]:
                raise ShortageError(f"{_TOLD[name]} and run again")


_FIX = "free some space and run the same command again"


def _told(room: _Room) -> str:
    return f"{room.inodes} inodes free" if room.inodes <= _FEW else f"{room.free / (1 << 20):.1f} MiB free"


def _free(folder: Path) -> tuple[int, int]:
    """Free bytes and inodes. What has no such limit says that it has none at all, and counts as having plenty."""
    stats = os.statvfs(folder)
    root = os.geteuid() == 0
    plenty = 1 << 62
    return (
        (stats.f_bfree if root else stats.f_bavail) * stats.f_frsize if stats.f_blocks else plenty,
        (stats.f_ffree if root else stats.f_favail) if stats.f_files else plenty,
    )


def _refusal(folder: Path) -> int | None:
    """The error of a small write to a folder, if that is of a full disk or quota. The file never has a name."""
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(_TRIAL))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        return error.errno if error.errno in FULL else None
    return None


# -- memory and processes

_TOLD = {
    "oom_kill": "a process was killed for want of memory while the program ran: free memory",
    "max": "a process or a thread was one too many while the program ran: raise pids.max of its control group",
}
"""What it means that the kernel has counted one more."""


def _memory_events() -> Path:
    file = _of_group("memory", "memory.oom_control", "memory.events")
    return file if file.is_file() else Path("/proc/vmstat")  # the whole machine's


def _of_group(controller: str, old: str, new: str) -> Path:
    """The file in which the kernel counts for this process's control group (version 2, then 1)."""
    base = Path("/sys/fs/cgroup")
    with contextlib.suppress(OSError):
        groups = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines()]
        for _, names, path in sorted(groups, key=lambda group: group[0] != "0"):
            folder, name = (base / controller, old) if controller in names else (base, new)
            for file in (folder / path.lstrip("/") / name, folder / name):
                if file.is_file():
                    return file
    return base / new


def _count(file: Path, name: str) -> int:
    """How many there were; 0 where nobody counts."""
    with contextlib.suppress(OSError, ValueError):
        for line in file.read_text(encoding="utf-8").splitlines():
            if line.startswith(f"{name} "):
                return int(line.split()[1])
    return 0


# -- room for a child's last words


@contextlib.contextmanager
def reserved(log: IO[bytes]) -> Iterator[None]:
    """Room behind the end of a log for the block, so that what a child says of a full disk can still be written.

    Where the file system does not reserve, nothing is.
    """
    keep_size = 1
    with contextlib.suppress(OSError, AttributeError):
        end = ctypes.c_int64(os.fstat(log.fileno()).st_size)
        ctypes.CDLL(None).fallocate(log.fileno(), keep_size, end, ctypes.c_int64(_RESERVED))
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            os.ftruncate(log.fileno(), os.fstat(log.fileno()).st_size)  # gives back what was not used
