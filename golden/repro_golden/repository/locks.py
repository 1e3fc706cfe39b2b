"""Locks that say who holds them: what two commands at once would spoil is done by one of them, and the other ends."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from repro_golden.base.canonical import digest
from repro_golden.base.errors import MachineFailureError, ReproError
from repro_golden.repository.checkout import Checkout

__all__ = ["held_alone"]


@contextlib.contextmanager
def held_alone(checkout: Checkout, *paths: Path) -> Iterator[None]:
    """Hold what lies at some paths of a checkout for the block, against other commands that would write there.

    The kernel lets go of a lock when its process ends, however it ends.

    Raises:
        ReproError: another process holds one of them.
        MachineFailureError: the lock cannot be made.
    """
    folder = checkout.state / "locks"
    with contextlib.ExitStack() as exits:
        for path in sorted(set(paths)):  # in one order for all, so that of several at once one goes on
            file = folder / digest("lock", str(path))
            try:
                folder.mkdir(parents=True, exist_ok=True)
                lock = exits.enter_context(file.open("a", encoding="utf-8"))
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ReproError(_taken(checkout, path, file)) from None
            except OSError as error:
                raise MachineFailureError(f"cannot lock {path} in {folder}: {error.strerror}") from error
            with contextlib.suppress(OSError):  # a full disk: then nobody learns who it is
                lock.truncate(0)
                lock.write(str(os.getpid()))
                lock.flush()
        yield


def _taken(checkout: Checkout, path: Path, lock: Path) -> str:
    name = path.relative_to(checkout.root) if path.is_relative_to(checkout.root) else path
    with contextlib.suppress(OSError):
        if number := lock.read_text(encoding="utf-8"):
            return f"{name} is being recorded by process {number}: wait for it, or end it, and run again"
    return f"{name} is being recorded by another process: wait for it, and run again"
