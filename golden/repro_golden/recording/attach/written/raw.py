"""The raw records of one rank: a log of its steps, and small files beside it. `collect` makes a trace of all ranks'.

It needs the standard library alone, so that it can run inside a foreign trainer.
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from repro_golden.trace.model import METRIC

__all__ = ["FOUND", "NORM", "RECORDER_FAILED", "SHOWN", "RawLog", "as_metric", "cut_short", "number_of"]

RECORDER_FAILED = "the recorder failed at step"
"""How it says that a recording ended by itself, which another commit seldom cures."""


class RawLog:
    """``rank-00000.log`` with frames of steps, ``.json`` with who writes it, and what is `put` beside them.

    Attributes:
        folder: Where the records of all ranks lie.
        rank: Whose these are.
        path: The log itself.
    """

    def __init__(self, folder: Path, rank: int, about: Mapping[str, Any]) -> None:
        """Begin the records of a rank. A second process of the same rank gets files of its own, for `collect` to see.

        Args:
            folder: Where.
            rank: Whose.
            about: What `collect.Gathering` is to know of this process; JSON types.

        Raises:
            OSError: it cannot be written.
        """
        self.folder, self.rank = folder, rank
        self.path = folder / f"rank-{rank:05d}.log"
        how = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_APPEND
        try:
            self._file = os.open(self.path, how, 0o666)
        except FileExistsError:  # the instrument says what to do
            self.path = folder / f"rank-{rank:05d}-{os.getpid()}.log"
            self._file = os.open(self.path, how, 0o666)
        self._is = _identity(self._file)
        self.put(".json", about)

    def append(self, frame: bytes) -> None:
        """Add one frame; what this returned from survives a kill of the process."""
        if (
            _identity(self._file) != self._is
        ):  # the program closed it, as daemons close all, and may have opened another
            self._file = os.open(self.path, os.O_WRONLY | os.O_APPEND)
            self._is = _identity(self._file)
        view = memoryview(frame)
        while view:
            view = view[os.write(self._file, view) :]

    def put(self, suffix: str, value: Any) -> None:
        """A small file of JSON, whole or not there."""
        path = self.path.with_suffix(suffix)
        part = path.with_suffix(f"{suffix}.part")
        part.write_text(json.dumps(value), encoding="utf-8")
        part.replace(path)

    def close(self) -> None:
        """Close the log."""
        if _identity(self._file) == self._is:
            os.close(self._file)


def _identity(file: int) -> tuple[int, int] | None:
    """Which file a descriptor is of; None where it is closed."""
    try:
        about = os.fstat(file)
    except OSError:
        return None
    return about.st_dev, about.st_ino


# -- what the folder of all ranks tells


def cut_short(raw: Path) -> bool:
    """Whether a disk was full for the recorder of a rank, which then takes the right to write from its log."""
    return any(not log.stat().st_mode & stat.S_IWUSR for log in raw.glob("rank-*.log"))


# -- numbers as rows hold them: read by who recorded them, and by who puts ranks together, who needs no torch for it

NORM = "?norm"
"""In a name, before the p of a p-norm of which each rank has its shards' part."""

FOUND = "?skipped"
"""The name of a tensor that is not 0 where an optimizer left its step out: then it is the metric `skipped`."""

SHOWN = "?shown/"
"""Begins the name of a metric that was read from free text: a trace shows it and has no row of it."""


def number_of(row: Any) -> float:
    """The number in a metric's row, or in that of a tensor of one element."""
    if row.number is not None:
        return float(row.number)
    raw = bytearray(row.values or row.sketch)
    try:
        import torch  # only where a program logged a tensor
    except ImportError:
        from repro_golden.trace.tensor_difference import decode

        with contextlib.suppress(ValueError):  # a dtype that NumPy lacks
            return float(decode(row.dtype, bytes(raw)).item())
        raise
    return float(torch.frombuffer(raw, dtype=getattr(torch, row.dtype)).to(torch.float64).item())


def as_metric(row: Any, names: frozenset[str]) -> Any:
    """The row of a tensor of one number as that of a metric, where that is what was logged; None where nothing was."""
    from repro_golden.trace.writer import metric_row

    if row.name.endswith(FOUND):
        skipped = row.name.removesuffix(FOUND) + "skipped"
        return metric_row(row.phase, skipped, 1.0) if number_of(row) else None
    if row.name not in names or row.shape not in ((), (1,)) or row.dtype == METRIC:
        return row
    return metric_row(row.phase, row.name, number_of(row))
