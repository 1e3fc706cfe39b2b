"""Scratch folders that never outlive their process for long: a lock tells the next one what a killed one left."""

from __future__ import annotations

import contextlib
import fcntl
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

__all__ = ["scratch_folder"]


@contextlib.contextmanager
def scratch_folder(base: Path, what: str = "") -> Iterator[Path]:
    """A folder below `base`, removed on every exit, together with those of processes that were killed.

    Args:
        base: Where it is made; on the disk of what will be moved out of it.
        what: A word in its name, for whoever looks.
    """
    base.mkdir(parents=True, exist_ok=True)
    _sweep(base)
    made = Path(tempfile.mkdtemp(prefix=".new-", dir=base))  # a sweeper passes over it until it is locked
    with (made / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        folder = made.rename(base / f"{what}{made.name.removeprefix('.new')}")
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def _sweep(base: Path) -> None:
    """Remove the folders nobody holds a lock on: their processes are gone."""
    for folder in base.iterdir():
        if folder.name.startswith("."):
            continue
        with contextlib.suppress(OSError), (folder / "lock").open("r+") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
