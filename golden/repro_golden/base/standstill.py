"""Processes that stand still: they wait for an answer that does not come, and would for ever."""

from __future__ import annotations

import contextlib
import subprocess
from typing import Any

__all__ = ["StandstillError", "output_of"]

_LOOKS = 20
"""How often a process is looked at before it is given up. Looks are counted: who is stopped with it does not look."""
_WORK, _BYTES = 0.003, 200.0
"""Seconds of a processor, and bytes of files, each second: one that waits takes and moves next to nothing."""


class StandstillError(Exception):
    """A process did nothing for as long as it was given."""


def output_of(process: subprocess.Popen[bytes], patience: float) -> tuple[bytes, bytes]:
    """What a process printed, once it has ended; its output and errors are pipes.

    Args:
        process: It goes on where this raises.
        patience: Seconds for which it may do nothing.

    Raises:
        StandstillError: it did nothing for longer.
    """
    work, moved, looks = 0.0, 0.0, 0
    while looks < _LOOKS:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return process.communicate(timeout=patience / _LOOKS)
        now, so_far = _done(process.pid)
        looks += 1
        if now - work > _WORK * patience or so_far - moved > _BYTES * patience:
            work, moved, looks = now, so_far, 0
    raise StandstillError


def _done(number: int) -> tuple[float, float]:
    """Seconds of processors that a process and its ended children took, and bytes that it read and wrote."""
    import psutil

    moved = 0.0
    try:
        process: Any = psutil.Process(number)
        times = process.cpu_times()
        if hasattr(process, "io_counters"):  # not on macOS
            counts = process.io_counters()
            moved = float(counts.read_chars + counts.write_chars) if hasattr(counts, "read_chars") else 0.0
    except psutil.Error:  # it has ended, and something holds its output
        return 0.0, 0.0
    return float(sum(times[:4])), moved
