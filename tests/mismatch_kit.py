"""Traces with both sides' log-probs, made without training."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import torch
from trace_kit import RAM, write

from repro_golden.trace import Row, Trace
from repro_golden.trace.signals import Signals

__all__ = ["NAN", "RAM", "Sample", "column", "step_rows", "traced"]

NAN = math.nan
Sample = Sequence[tuple[float, float, int]]
"""A response: each token as the trainer's log-prob, the rollout engine's, and its mask."""


def column(phase: str, name: str, values: Sequence[float], dtype: str = "float32") -> Row:
    """The row that a recorder makes of a column."""
    signals = Signals()
    signals.take("forward" if phase == "grad" else phase, name, torch.tensor(values, dtype=getattr(torch, dtype)))
    (row,) = signals.rows()
    row.phase = phase
    return row


def step_rows(samples: Sequence[Sample], name: str = "log_probs") -> list[Row]:
    """The columns of a step."""
    tokens = [token for sample in samples for token in sample]
    return [
        column("input", "response_lengths", [len(sample) for sample in samples], "int64"),
        column("input", "loss_mask", [token[2] for token in tokens], "int64"),
        column("input", "rollout_log_probs", [token[1] for token in tokens]),
        column("forward", name, [token[0] for token in tokens]),
    ]


def traced(folder: Path, steps: Sequence[Sequence[Row]]) -> Trace:
    """A finished trace of some steps."""
    return Trace(write(folder, steps))
