"""A trace of what a run of slime, Miles or Relax has already written, with no recorder."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from repro_golden.base.errors import ReproError
from repro_golden.base.systems import System
from repro_golden.case.identity import Identity
from repro_golden.dumps.archive.reading import LIMIT
from repro_golden.dumps.run.files import numbered
from repro_golden.dumps.run.folder import OtherRunError, RunFolder
from repro_golden.dumps.train.files import read_train_dump
from repro_golden.trace import Header, Trace, TraceWriter, seal

__all__ = ["UNKNOWN", "system_of_folder", "trace_of_folder"]

UNKNOWN = "unknown: the trace was made from dumps"
"""What the identity of such a trace says of its host and its environment: two of them are comparable, and one with a
recorded trace is not, unless the user means to vary both."""


def trace_of_folder(
    folder: Path,
    out: Path,
    *,
    system: System | None = None,
    log: Path | None = None,
    ranks: int | None = None,
    steps_per_rollout: int | None = None,
    ignore: Sequence[str] = (),
    cp_size: int | None = None,
    grad_norm: str | None = None,
    allow: Collection[str] = (),
    limit: int = LIMIT,
) -> tuple[Trace, list[str]]:
    """Make the trace `out` of a run's folder.

    Args:
        folder: ``--dump-details``, or a folder with ``train_data`` in it.
        out: The trace's folder, new or empty.
        system: Who wrote it; told by its dumps where None.
        log: What the trainer printed.
        ranks: See `RunFolder`, as for all others.
        steps_per_rollout: Found out where None.
        ignore: As there.
        cp_size: As there.
        grad_norm: As there.
        allow: As there.
        limit: As there.

    Returns:
        The trace, which has a closing line only where the last rollout is whole, and what is worth a warning.

    Raises:
        ReproError: nothing to make a trace of, or see `RunFolder.rows`.
    """
    if not folder.is_dir():
        raise ReproError(f"there is no folder {folder}")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ReproError(f"{out} is not empty: choose another folder or remove it")
    whose = system or system_of_folder(folder, allow, limit)
    run = RunFolder(
        whose, folder, log, ranks, steps_per_rollout, ignore,
        cp_size=cp_size, grad_norm=grad_norm, allow=allow, limit=limit,
    )  # fmt: skip
    run.ended()
    rollouts = run.rollouts
    if run.log_is_silent:  # without it loss and gradient norm would be missing, and nobody told
        raise ReproError(
            f"{log} has no line of a step or rollout: is it the trainer's output? Without --log none is read"
        )
    if not rollouts:
        raise ReproError(f"{folder} holds no train dumps (train_data/N.pt), and no log or events say what was trained")
    gap = next((before + 1 for before, after in pairwise(rollouts) if after > before + 1), None)
    if gap is not None:
        raise ReproError(f"{folder} lacks rollout {gap} between {rollouts[0]} and {rollouts[-1]}")
    n = run.steps_per_rollout
    first, last = rollouts[0] * n, (rollouts[-1] + 1) * n
    problems: list[str] = []
    writer: TraceWriter | None = None
    with contextlib.ExitStack() as undo:
        for step in range(first, last):
            try:
                rows = run.rows(step)
            except OtherRunError:
                raise
            except ReproError as error:
                if step // n < rollouts[-1] or step == first:
                    raise
                problems.append(f"the run broke off in rollout {rollouts[-1]}: {error}")
                break
            assert rows is not None  # after `ended` what is missing is an error
            if writer is None:
                observe: dict[str, Any] = {"activations": [], "metrics": [], "ignore": list(ignore)}
                subject = {"kind": whose, "recorder": False, "observe": observe}
                layout = run.layout(step // n)
                identity = Identity({"recorded": UNKNOWN}, {"recorded": UNKNOWN}, layout).to_mapping()
                header = Header({"kind": whose, "dumps": True}, "", subject, identity, last - first, first)
                out.mkdir(parents=True, exist_ok=True)
                writer = TraceWriter(out, header, sealing=True)
                undo.callback(writer.let_go)
            writer.write(rows)
        assert writer is not None  # the first step was written, or its error raised
        if writer.steps == last - first and not run.broke_off:
            count = ranks or int(layout.get("ranks", 1))
            writer.close({"reason": "finished", "ranks": count, "exit": 0, "unread": dict(sorted(run.unread.items()))})
    seal(out)
    return Trace(out), [*problems, *run.problems()]


def system_of_folder(folder: Path, allow: Collection[str] = (), limit: int = LIMIT) -> System:
    """Who wrote a folder of dumps.

    Raises:
        ReproError: nothing in it tells.
    """
    for place in (folder / "train_data", folder):
        names = sorted(numbered(place), key=lambda entry: (entry[0], entry[1] or 0))
        if names:
            return read_train_dump(names[0][2], allow=allow, limit=limit).system
    if any((folder / name).exists() for name in ("events", "dashboard_columns")):
        return "miles"
    raise ReproError(f"nothing in {folder} tells who wrote it: say --system slime, miles or relax")
