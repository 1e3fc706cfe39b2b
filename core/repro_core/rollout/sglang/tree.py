"""Processes with all that they started, and their end."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Sequence

import psutil

__all__ = ["end_trees", "in_session", "tree"]

_TRACKER_S = 5.0


def tree(roots: Iterable[psutil.Process]) -> list[psutil.Process]:
    """These processes and everything below them; the roots come first."""
    first, below = list(roots), []
    for root in first:
        with contextlib.suppress(psutil.NoSuchProcess):
            below += root.children(recursive=True)
    return [*first, *below]


def in_session(leader: int) -> list[psutil.Process]:
    """All processes of the session that a process began, those too whose parents are gone."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.NoSuchProcess, OSError):
            if os.getsid(process.pid) == leader:
                found.append(process)
    return found


def end_trees(processes: Sequence[psutil.Process], term_s: float) -> None:
    """End processes, the first by SIGTERM, what is left by SIGKILL when the time is up, and wait until none is left.

    What they started meanwhile is ended too. multiprocessing's resource trackers end by themselves after the others,
    and remove their semaphores on the way.

    Args:
        processes: of `tree`. psutil knows them by id and start time, so a reused id is never hit.
        term_s: seconds that SIGTERM may take; 0 sends SIGKILL at once.
    """
    left = list(processes)
    if term_s > 0:
        for process in left[:1]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.terminate()
        psutil.wait_procs(left[:1], timeout=term_s)
    left += [child for child in tree(left)[len(left) :] if child not in left]
    trackers = [process for process in left if _is_tracker(process)]
    _kill([process for process in left if process not in trackers])
    _, stuck = psutil.wait_procs(trackers, timeout=_TRACKER_S)
    _kill(stuck)


def _is_tracker(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return "multiprocessing.resource_tracker" in " ".join(process.cmdline())
    return False


def _kill(processes: Sequence[psutil.Process]) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(processes, timeout=30)
