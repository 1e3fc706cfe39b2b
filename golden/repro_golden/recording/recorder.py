"""The observer that a replay hands to the trainer: it fingerprints each signal as it passes."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from repro_golden.recording.attach.written.raw import RawLog
from repro_golden.recording.pieces import At, Piece, keep_piece, keep_whole
from repro_golden.recording.tap import Tap
from repro_golden.trace import StepRecord, TraceWriter, dump_path
from repro_golden.trace.model import RECORDER
from repro_golden.trace.signals import Signals
from repro_golden.trace.step import Step

__all__ = ["RankWriter", "Recorder", "dump_path"]

_IN_FLIGHT = 1
"""Steps whose results may still be on their way from a GPU while the next one is trained."""


class RankWriter:
    """The raw records of one of several ranks. What the ranks hold together only `attach.gathered` knows.

    Attributes:
        rank: Whose they are.
        step: Takes the signals of the step under way.
    """

    def __init__(self, folder: Path, rank: int, ranks: int, header: Mapping[str, Any] | None) -> None:
        """Begin them.

        Args:
            folder: Where those of all ranks lie.
            rank: Whose these are.
            ranks: How many there are.
            header: The trace's, from one of them.
        """
        about = {"recorder": RECORDER, "rank": rank, "world": ranks, "header": header}
        self.rank = rank
        self._log = RawLog(folder, rank, about)
        self.step = Step(parts=True)
        self._keep = keep_piece(folder, rank)
        self._steps = 0

    def end_step(self, step: int) -> None:
        """Write the step under way."""
        self._log.append(self.step.end(step))
        self._steps += 1

    def keep(self, at: At, pieces: list[Piece]) -> None:
        """Write what this rank holds of a signal whose whole content is wanted."""
        self._keep(at, pieces)

    def close(self, end: Mapping[str, Any]) -> None:
        """Say that the run ended, and with what."""
        if end["terminal"]:
            self._log.put(".terminal", end["terminal"])
        self._log.put(".end", {"steps": self._steps, "stopped": False, **{k: end[k] for k in ("spent", "modules")}})
        self._log.close()


class Recorder:
    """Called as ``observe(phase, name, value, placement=None)``; `end_step` closes a step, `close` the trace.

    Attributes:
        writer: Where rows go.
    """

    def __init__(
        self,
        writer: TraceWriter | RankWriter,
        first_step: int,
        perturbation: Sequence[Any] | None = None,
        dump: Iterable[Sequence[Any]] = (),
    ) -> None:
        """Record from `first_step` on; `perturbation` and `dump` are what `Tap` takes."""
        self.writer = writer
        self.step = first_step
        self._tap: Tap | None = None
        if perturbation or dump:
            if isinstance(writer, RankWriter):
                self._tap = Tap(perturbation, dump, writer.keep, writer.rank)
            else:
                self._tap = Tap(perturbation, dump, keep_whole(writer.directory))
        self._signals = Signals()
        self._closed: deque[tuple[int, Signals]] = deque()

    def __call__(self, phase: str, name: str, value: object, placement: object = None) -> None:
        """Take one signal, or a mapping of them; see `Signals.take`."""
        if self._tap:
            self._tap.take(self.step, phase, name, value, placement)
        self._signals.take(phase, name, value, placement)

    def end_step(self, step: int) -> list[StepRecord]:
        """Close the step under way; the records of the steps that were written meanwhile.

        On the CPU that is this step's. From a GPU results come home while the next step is trained.
        """
        self._signals.finish()
        self._closed.append((step, self._signals))
        self._signals = Signals()
        self.step = step + 1
        return self._write(_IN_FLIGHT)

    def drain(self) -> list[StepRecord]:
        """Wait for what is on its way, and write it."""
        return self._write(0)

    def close(self, end: Mapping[str, Any]) -> None:
        """Write the trace's last line. `drain` comes first."""
        self.writer.close(end)

    def _write(self, in_flight: int) -> list[StepRecord]:
        records = []
        while self._closed and (len(self._closed) > in_flight or self._closed[0][1].ready()):
            step, signals = self._closed.popleft()
            signals.into(self.writer.step)
            if record := self.writer.end_step(step):
                records.append(record)
        return records
