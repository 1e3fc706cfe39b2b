"""The observer that a replay hands to the trainer: it fingerprints each signal as it passes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from repro_golden.errors import ReproError
from repro_golden.fingerprint import dtype_name, scan
from repro_golden.fingerprint.tensors import content
from repro_golden.trace import Row, dump_path
from repro_golden.trace.writer import TraceWriter, metric_row

__all__ = ["Recorder", "plant_one_ulp", "row_of"]

_KEEPS_VALUES = ("input", "forward", "loss")


def row_of(phase: str, name: str, value: torch.Tensor | float, placement: object = None) -> Row:
    """The trace row of one signal. One-dimensional signals before the backward pass keep all their values.

    Raises:
        ReproError: `value` is neither a tensor nor a float.
    """
    if isinstance(value, (int, float)):
        return metric_row(phase, name, float(value))
    if not isinstance(value, torch.Tensor):
        raise ReproError(f"signal {name!r} is a {type(value).__name__}: observe takes tensors and floats")
    found = scan(value)
    keep = value.ndim <= 1 and phase in _KEEPS_VALUES
    # by position: this runs for every tensor of every step
    return Row(
        phase,
        name,
        dtype_name(value.dtype),
        tuple(value.shape),
        found.lanes,
        found.nonfinite,
        found.absmax,
        found.l2,
        b"" if keep else found.sketch,
        content(value).tobytes() if keep else None,
        None if placement is None else str(placement),
    )


def plant_one_ulp(value: torch.Tensor) -> None:
    """Move the first element by one unit in the last place, in place: the negative control of a golden run.

    Raises:
        ReproError: a value that cannot be changed in place.
    """
    flat = value.detach().view(-1) if value.is_contiguous() else None
    if flat is None or flat.numel() == 0:
        raise ReproError("the negative control needs a non-empty contiguous tensor")
    with torch.no_grad():
        if flat.is_floating_point():
            flat[0] = torch.nextafter(flat[0], torch.full_like(flat[0], float("inf")))
        else:
            flat[0] = flat[0] + 1


class Recorder:
    """Called as ``observe(phase, name, value, placement=None)``; `end_step` closes a step.

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

    def __call__(self, phase: str, name: str, value: torch.Tensor | float, placement: object = None) -> None:
        """Take one signal."""
        if (self.plant or self.dump) and isinstance(value, torch.Tensor):
            self._at((self.step, phase, name), value)
        self.writer.add(row_of(phase, name, value, placement))

    def _at(self, at: tuple[int, str, str], value: torch.Tensor) -> None:
        if at == self.plant:
            plant_one_ulp(value)
        if at in self.dump:
            path = dump_path(self.writer.directory, *at)
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(content(value).tobytes())

    def end_step(self, step: int) -> str:
        """Close the step under way and return its root."""
        record = self.writer.end_step(step)
        self.step = step + 1
        return record.root
