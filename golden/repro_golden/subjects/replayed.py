"""What a replay consumes and what it writes: dumps for the trainer, and rows from what the trainer made of them."""

from __future__ import annotations

import dataclasses
import struct
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np

from repro_golden.base.errors import ReproError
from repro_golden.base.systems import System
from repro_golden.case.file import Case, TrainerSubject
from repro_golden.dumps.rollout.arrays import numbers
from repro_golden.dumps.rollout.files import RolloutDump, read_rollout_dump, write_rollout_dump
from repro_golden.dumps.run.folder import RunFolder
from repro_golden.dumps.values import Tensor
from repro_golden.recording.tap import perturbed_by_one_ulp
from repro_golden.store.rollouts import INDEX, RolloutSet
from repro_golden.trace import Row
from repro_golden.trace.model import METRIC
from repro_golden.trace.signals import Signals
from repro_golden.trace.writer import metric_row

__all__ = ["ReplayedRows", "replayed_dumps"]

_PLANTED = "rollout_log_probs"
"""The input column whose one-ULP change is made in the dumps themselves, and so goes through the trainer."""


def replayed_dumps(
    source: Path,
    system: System,
    count: int,
    scratch: Path,
    perturbation: Sequence[Any] | None,
    allow: Sequence[str] = (),
) -> Path:
    """The folder of dumps ``{rollout_id}.pt`` that a trainer loads.

    Args:
        source: The case's rollouts: dumps, or ours, of which dumps are made.
        system: Whose form they must have.
        count: How many are needed.
        scratch: The run's own folder.
        perturbation: ``[step, phase, name]`` of a signal that gets a one-ULP change.
        allow: Classes whose objects dumps may hold.

    Raises:
        ReproError: too few, or no rollouts.
    """
    planted = perturbation is not None and (perturbation[1], perturbation[2]) == ("input", _PLANTED)
    ours = (source / INDEX).exists()
    if not ours and not planted:
        for number in range(count):
            if not (source / f"{number}.pt").is_file():
                raise ReproError(
                    f"{source} has no {number}.pt, and {count} rollouts are replayed: put dumps there as 0.pt, "
                    "1.pt, ... (`repro rollout record`), or lower case.steps"
                )
        return source
    folder = scratch / "rollouts"
    folder.mkdir()
    for number in range(count):
        path = source / f"{number}.pt"
        dump = _converted(source, number, system) if ours else read_rollout_dump(path, system=system, allow=allow)
        if planted and number == 0:
            _perturb(dump)
        write_rollout_dump(folder / f"{number}.pt", dump)
    return folder


def _converted(source: Path, number: int, system: System) -> RolloutDump:
    from repro_golden.store.dump_conversion import from_rollout

    dump, _ = from_rollout(RolloutSet(source).read(number), system)
    return dump


def _perturb(dump: RolloutDump) -> None:
    """Move the first log-prob that counts by one ULP of float32; of a sample that is not removed, a finite one."""
    for sample in sorted(dump.samples, key=lambda s: (s.get("index") is None, s.get("index") or 0)):
        values, counted = _numbers(sample.get(_PLANTED)), _numbers(sample.get("loss_mask"))
        if values is None or values.ndim != 1 or sample.get("remove_sample"):
            continue
        known = np.isfinite(values) & (True if counted is None or len(counted) != len(values) else counted != 0)
        if known.any():
            at = int(known.argmax())
            values[at] = np.nextafter(np.float32(values[at]), np.float32(np.inf))
            sample[_PLANTED] = _like(sample[_PLANTED], values)
            return
    raise ReproError("the negative control needs a rollout with log-probs: record them with the rollouts")


def _numbers(held: Any) -> Any:
    """A field as fp64 [tokens], whole numbers and others among them; None where it holds none."""
    if isinstance(held, (list, tuple)):
        try:
            return np.array([float(number) for number in held])
        except (OverflowError, TypeError, ValueError):
            return None
    array = numbers(held)
    return None if array is None else array.astype(np.float64)


def _like(held: Any, values: Any) -> Any:
    """Log-probs in the form that the field had; of a format that float32 does not fit in, as a list of numbers."""
    if isinstance(held, np.ndarray) and held.dtype in (np.float32, np.float64):
        return values.astype(held.dtype)
    if isinstance(held, Tensor) and held.dtype in ("float32", "float64"):
        return Tensor(held.dtype, values.astype(held.array.dtype))
    return values.tolist()


class ReplayedRows:
    """The rows of what a trainer wrote, once it is shown that it trained on what it was given.

    Attributes:
        trained: How many samples of the last rollout were trained on, and how many were given.

    Args:
        system: The trainer.
        details: Folder that it writes its dumps to.
        log: Its output.
        dumps: Folder of the dumps that it was given.
        case: The case.
        perturbation: ``[step, phase, name]`` of a row that gets a one-ULP change as it is read.
    """

    def __init__(
        self, system: System, details: Path, log: Path, dumps: Path, case: Case, perturbation: Sequence[Any] | None
    ) -> None:
        subject = cast("TrainerSubject", case.subject)
        self._system, self._dumps, self._perturbation = system, dumps, perturbation
        self.trained: list[int] = []
        self._per_rollout, self._allow = subject.steps_per_rollout, subject.allow_pickle
        self._folder = RunFolder(
            system,
            details,
            log,
            case.resources.ranks,
            self._per_rollout,
            ignore=case.observe.ignore,
            allow=self._allow,
            log_start=log.stat().st_size,  # several runs share it
        )

    def ended(self) -> None:
        """The trainer has ended."""
        self._folder.ended()

    @property
    def unread(self) -> dict[str, str]:
        """What it wrote and nobody looks at, with why."""
        return self._folder.unread

    def rows(self, step: int) -> Sequence[Row] | None:
        """The rows of a step; None as long as they are not there, or where the run ended before it.

        Raises:
            ReproError: they can never be, or the trainer trained on something else.
        """
        rows = self._folder.rows(step)
        if rows is None:
            return None
        if step % self._per_rollout == 0:
            self._same_rollout(step // self._per_rollout)
        if self._perturbation is None or self._perturbation[0] != step:
            return rows
        changed = tuple(self._perturbation[1:])
        if changed == ("input", _PLANTED):  # the dumps themselves hold it
            return rows
        return [_planted(row) if (row.phase, row.name) == changed else row for row in rows]

    def _same_rollout(self, number: int) -> None:
        """Show that the samples trained on are those that were given: the flag that loads them took effect."""
        joined = self._folder.columns(number)
        if joined is None or not joined.columns["tokens"].get(None):
            raise ReproError(
                f"no train dump shows what rollout {number} was trained on: let the trainer write them (--dump-details)"
            )
        counts = Counter(_tokens(sample["tokens"]) for sample in self._given(number).samples)
        trained = joined.columns["tokens"][None]
        self.trained = [len(trained), counts.total()]
        for index, tokens in zip(joined.indices, trained, strict=True):
            counts[_tokens(tokens)] -= 1
            if counts[_tokens(tokens)] < 0:
                raise ReproError(
                    f"rollout {number} was trained on other samples than were given (sample {index}): "
                    "--load-debug-rollout-data took no effect"
                )

    def _given(self, number: int) -> RolloutDump:
        return read_rollout_dump(self._dumps / f"{number}.pt", system=self._system, allow=self._allow)


def _tokens(values: Any) -> tuple[int, ...]:
    """Token ids, whether the file has a list or a tensor of them."""
    return tuple(values.array.tolist() if isinstance(values, Tensor) else values)


def _planted(row: Row) -> Row:
    """A row with its first element one unit in the last place up."""
    if row.dtype == METRIC and row.values is not None:
        value: float = struct.unpack("<d", row.values)[0]
        return metric_row(row.phase, row.name, float(np.nextafter(value, np.inf)))
    import torch

    if row.values is None:
        return row
    value_of = torch.frombuffer(bytearray(row.values), dtype=getattr(torch, row.dtype)).reshape(row.shape)
    perturbed_by_one_ulp(value_of)
    signals = Signals()
    signals.take(row.phase, row.name, value_of)
    return dataclasses.replace(signals.rows()[0])
