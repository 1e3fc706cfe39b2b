"""Runs of a case in fresh processes: a trainer that fails is one line that names a file with its output."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from repro_golden.base.errors import ReproError
from repro_golden.case.file import Case
from repro_golden.replay.children import ChildFailure, Run, RunResult
from repro_golden.repository.checkout import Place
from repro_golden.subjects import launch
from repro_golden.trace import Trace, seal

__all__ = ["Say", "one_line", "run_children", "train"]

Say = Callable[[str], None]
"""Receives a line of progress."""


def run_children(
    case: Case, place: Place, runs: Sequence[Run], log: Path, cancel: threading.Event | None = None
) -> list[RunResult]:
    """`launch`, with a failing trainer as one line that names a file which holds its output.

    Raises:
        ReproError: the trainer failed.
    """
    with one_line(case):
        return launch(case, place, runs, log, cancel=cancel)


@contextlib.contextmanager
def one_line(case: Case) -> Iterator[None]:
    """Let a failing trainer be one line that names a file which holds its output.

    Raises:
        ReproError: the trainer failed.
    """
    try:
        yield
    except ChildFailure as failure:
        raise ReproError(f"the trainer of {case.name} failed: {_kept_log(failure)}") from None


def train(case: Case, place: Place, run: Run, log: Path, cancel: threading.Event | None = None) -> Trace:
    """Make one observed run in a fresh process and return its sealed trace.

    Raises:
        ReproError: the trainer failed, in one line with the file that holds its output.
    """
    assert run.trace is not None
    run_children(case, place, [run], log, cancel)
    seal(Path(run.trace))
    return Trace(Path(run.trace))


def _kept_log(failure: ChildFailure) -> str:
    """The failure's line, with its output copied out of the scratch folder that is about to go."""
    handle, path = tempfile.mkstemp(prefix="repro-trainer-", suffix=".log")
    os.close(handle)
    shutil.copyfile(failure.log, path)
    return str(ChildFailure(failure.stage, failure.step, failure.message, path))
