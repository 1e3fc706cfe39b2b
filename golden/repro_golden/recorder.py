"""The observer that a replay hands to the trainer: it fingerprints each signal as it passes."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from repro_golden.fingerprint import content
from repro_golden.plant import plant_one_ulp
from repro_golden.signals import Signals
from repro_golden.trace import StepRecord, TraceWriter, dump_path

__all__ = ["Recorder"]

_IN_FLIGHT = 1
"""Steps whose results may still be on their way from a GPU while the next one is trained."""


class Recorder:
    """Called as ``observe(phase, name, value, placement=None)``; `end_step` closes a step, `close` the trace.

    Attributes:
        writer: Where rows go.
        plant: ``(step, phase, name)`` of the signal to change by one ULP before it is fingerprinted.
        dump: Signals whose whole content is written to ``dumps/`` beside the trace, for exact sizes.
    """

    def __init__(
        self,
        writer: TraceWriter,
        first_step: int,
        plant: Sequence[Any] | None = None,
        dump: Iterable[Sequence[Any]] = (),
    ) -> None:
        """Record from `first_step` on."""
        self.writer = writer
        self.step = first_step
        self.plant = None if plant is None else tuple(plant)
        self.dump = {tuple(d) for d in dump}
        self._signals = Signals()
        self._closed: deque[tuple[int, Signals]] = deque()

    def __call__(self, phase: str, name: str, value: object, placement: object = None) -> None:
        """Take one signal, or a mapping of them; see `Signals.take`."""
        if self.plant or self.dump:
            group = value if isinstance(value, Mapping) else {"": value}
            for key, tensor in group.items():
                if isinstance(tensor, torch.Tensor):
                    self._at((self.step, phase, name + key), tensor)
        self._signals.take(phase, name, value, placement)

    def _at(self, at: tuple[int, str, str], value: torch.Tensor) -> None:
        if at == self.plant:
            plant_one_ulp(value)
        if at in self.dump:
            path = dump_path(self.writer.directory, *at)
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(content(value).tobytes())

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
            for row in signals.rows():
                self.writer.add(row)
            records.append(self.writer.end_step(step))
        return records
