"""Processes that load torch where the recorder does not get in: what they train is in no trace.

A Python that was started with ``-I``, ``-E`` or ``-S``, or with an environment of its own, reads no ``PYTHONPATH``.
From outside it is known by torch's library among the files that it has mapped. Every process that the recorder is in
says so by a file before it loads torch. A child between its fork and its exec has its parent's files mapped, so one
look alone says nothing. On systems without ``/proc`` nothing is seen of this.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path

from repro_golden.base.errors import ReproError
from repro_golden.base.processes import descendants

__all__ = ["Unseen"]

_EVERY = 0.25
"""Seconds between two looks; importing torch takes longer."""
_LIBRARY = "libtorch_python"


class Unseen:
    """The processes of a program that have torch loaded, as far as they were met.

    Args:
        raw: Folder of the raw records.
    """

    def __init__(self, raw: Path) -> None:
        self._raw = raw
        self._met: set[tuple[int, int]] = set()
        self._loaded: dict[tuple[int, int], str] = {}

    @contextlib.contextmanager
    def watch(self, root: int) -> Iterator[None]:
        """Look now and then, in a thread of its own, for as long as the block runs.

        Args:
            root: Number of the process that was started.
        """
        done = threading.Event()

        def run() -> None:
            while not done.wait(_EVERY):
                self._look(root)

        thread = threading.Thread(target=run, name="repro-unseen", daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()

    def _look(self, root: int) -> None:
        """Take note of who has torch loaded now and had it at the last look; numbers return, with another start."""
        before, self._met = self._met, set()
        for number in descendants([root]):
            process = number, _start(number)
            if process in self._loaded or not _has_torch(number):
                continue
            self._met.add(process)
            if process in before:
                self._loaded[process] = _command(number)

    def check(self) -> None:
        """Raise where one of them was not recorded.

        Raises:
            ReproError: with its command line.
        """
        arrived = {int(path.name.partition("-")[2]) for path in self._raw.glob("armed-*")}
        if not any(self._raw.glob("rank-*.json")):
            return  # nothing was recorded at all, which is said in other words
        for (number, _), command in sorted(self._loaded.items()):
            if number not in arrived:
                raise ReproError(
                    f"a process of the program uses torch unseen ({command}): what it trains is in no trace; start it "
                    "without -I, -E and -S, and hand PYTHONPATH, REPRO_TRACE and REPRO_INSTRUMENT on to it"
                )


def _has_torch(number: int) -> bool:
    with contextlib.suppress(OSError):
        return _LIBRARY in Path(f"/proc/{number}/maps").read_text(errors="replace")
    return False


def _start(number: int) -> int:
    """When a process was started, in ticks of the system's clock."""
    with contextlib.suppress(OSError, IndexError):
        return int(Path(f"/proc/{number}/stat").read_bytes().rpartition(b")")[2].split()[19])
    return 0


def _command(number: int) -> str:
    with contextlib.suppress(OSError):
        argv = Path(f"/proc/{number}/cmdline").read_bytes().split(b"\0")
        return b" ".join(argv).decode(errors="replace").strip()[:200]
    return f"process {number}"
