"""The signals of a step: packed many at a time, they are what they are one by one."""

from __future__ import annotations

from dataclasses import replace

import torch
from hypothesis import given
from hypothesis import strategies as st

from repro_golden.fingerprint.backends.cpu import content
from repro_golden.fingerprint.collector import Collector
from repro_golden.fingerprint.definition import reference
from repro_golden.fingerprint.recipe import recipes_of
from repro_golden.trace.frames import pack, unpack
from repro_golden.trace.model import PHASES
from repro_golden.trace.signals import Signals
from repro_golden.trace.step import Step
from repro_golden.trace.writer import metric_row

DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.uint8, torch.complex128])
SHAPES = st.lists(st.integers(0, 5), max_size=3).map(tuple)


@st.composite
def groups(draw: st.DrawFn) -> tuple[str, str, dict[str, torch.Tensor]]:
    """Tensors that are taken in one call: of one dtype or several, some not contiguous, few or many."""
    dtypes = draw(st.lists(DTYPES, min_size=1, max_size=2))
    shapes = draw(st.lists(SHAPES, min_size=1, max_size=20))
    held = {}
    for k, shape in enumerate(shapes):
        tensor = (torch.arange(2 * torch.Size(shape).numel() or 2) + k).to(dtypes[k % len(dtypes)])
        tensor = tensor[: torch.Size(shape).numel()].reshape(shape)
        held[f"tensor {k}"] = tensor.transpose(0, -1) if draw(st.booleans()) and tensor.ndim > 1 else tensor
    return draw(st.sampled_from(PHASES)), draw(st.sampled_from(["", "exp_avg/"])), held


@given(st.lists(groups(), min_size=1, max_size=3, unique_by=lambda g: g[:2]), st.integers(1, 3))
def test_packed_together_or_one_by_one(taken: list[tuple[str, str, dict[str, torch.Tensor]]], steps: int) -> None:
    """A step's frame holds the same bytes whether its rows were made or not, in the first step and in later ones."""
    late = [metric_row("loss", "late", -0.0)]
    for step in range(steps):
        signals = Signals()
        for phase, name, tensors in taken:
            signals.take(phase, name, tensors)
            signals.take(phase, f"{name}metric", 0.5)
        rows = signals.rows()
        packing = Step(packs=True)
        signals.into(packing)
        assert packing.rows and all(row in rows for row in packing.rows)
        for row in late:
            packing.add(row)
        assert packing.end(step, "label") == pack(step, [*rows, *late], "label")


@given(groups(), st.integers(2, 4))
def test_what_was_read_before_is_read_anew(taken: tuple[str, str, dict[str, torch.Tensor]], steps: int) -> None:
    """A list like one before has the lanes of its own bytes, wherever it lies; so has what was written in place."""
    phase, name, tensors = taken
    for step in range(steps):
        tensors = {key: tensor.clone() for key, tensor in tensors.items()} if step % 2 else tensors
        for tensor in tensors.values():
            tensor.add_(1)
        signals = Signals()
        signals.take(phase, name, tensors)
        expected = {name + key: reference(content(tensor).tobytes()) for key, tensor in tensors.items()}
        assert {row.name: row.lanes for row in signals.rows()} == expected


def test_many_short_lists_leave_a_long_one_known() -> None:
    """Signals that a program shows one by one, each of another shape, do not make a step's long lists unknown."""
    tensors = [torch.ones(3) for _ in range(9)]
    Collector().add(tensors)
    for size in range(200):
        Collector().add([torch.ones(size)])
    assert recipes_of(9).find(tensors, (True, False)) is not None


def test_rows_may_be_changed_on_their_way() -> None:
    """What was not packed many at a time passes through the change that is asked for, and is kept."""
    signals = Signals()
    signals.take("loss", "norm", torch.ones(()))
    signals.take("grad", "", {str(k): torch.ones(3) for k in range(9)})
    step = Step(packs=True)
    signals.into(step, lambda row: replace(row, name=f"{row.name} changed"))
    assert [r.name for r in step.rows] == ["norm changed"]
    number, rows, label = unpack(step.end(4)[16:])
    assert (number, label, [r.name for r in rows[:2]], len(rows)) == (4, "", ["norm changed", "0"], 10)
