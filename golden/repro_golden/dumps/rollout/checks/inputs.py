"""What the checks of a rollout dump look at, and where they come from."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import Any

import numpy as np

from repro_golden.base.checks import Found, Where
from repro_golden.dumps.archive.bounds import shown
from repro_golden.dumps.rollout.arrays import Array, numbers
from repro_golden.dumps.rollout.files import RolloutDump

__all__ = [
    "EMPTY",
    "EXPERTS",
    "GROUPS",
    "NAN",
    "SAMPLE",
    "STALE",
    "Batch",
    "TrainBatch",
    "batch_of",
    "noted",
    "said",
]

SAMPLE = "THUDM/slime@624b824a8 slime/utils/types.py:418 (Sample)"
EXPERTS = "THUDM/slime@624b824a8 slime/observability/rollout_data_utils.py:58-95"
STALE = "slime guide: Troubleshooting (stale weights in async mode)"
EMPTY = "slime guide: Troubleshooting (verify no empty prompts or responses)"
GROUPS = "Miles FAQ (samples of a rollout)"
NAN = "radixark/miles@31f1ca961 miles/backends/training_utils/loss_hub/losses.py:198 (nan_to_num)"


def noted(sample: int | None, field: str, message: str) -> Found:
    """What a rule says of a field of one sample, or with None of the whole dump."""
    return Found(message, Where(item=field, sample=sample))


def said(value: Any) -> str:
    """A value out of a file in one safe line: numbers as they are, text quoted and short, of all else its type."""
    if isinstance(value, float | np.floating | np.integer | bool) or value is None:
        return str(value)
    return shown(value) if not isinstance(value, int) or value.bit_length() <= 64 else "a huge number"


class Batch:
    """A dump under check.

    Args:
        dump: It.
        group_size: Samples of a prompt (--n-samples-per-prompt); None where that is not known.
        layers: Layers that routed experts must have; None where that is not known.
        topk: Experts of a token; None where that is not known.
    """

    def __init__(self, dump: RolloutDump, group_size: int | None, layers: int | None, topk: int | None) -> None:
        self.dump, self.group_size, self.layers, self.topk = dump, group_size, layers, topk

    @property
    def samples(self) -> list[dict[str, Any]]:
        """The samples, each with every field."""
        return self.dump.samples

    def column(self, name: str) -> Iterator[tuple[int, Any]]:
        """Position and value of a field in the samples that have it."""
        for number, sample in enumerate(self.samples):
            if sample.get(name) is not None:
                yield number, sample[name]

    @cached_property
    def experts(self) -> dict[int, Array | None]:
        """Routed experts by position, as integers [tokens - 1, layers, top-k]; None where they are no such array."""
        arrays: dict[int, Array | None] = {}
        for number, value in self.column("rollout_routed_experts"):
            array = numbers(value, wide=False)  # they are large
            arrays[number] = array if array is not None and array.ndim == 3 and array.dtype.kind in "iu" else None
        return arrays


class TrainBatch(Batch):
    """A dump of samples that are trained on: no evaluation."""


def batch_of(dump: RolloutDump, group_size: int | None, layers: int | None, topk: int | None) -> Batch:
    """A dump under check, as what it is; the arguments are those of `Batch`."""
    return (Batch if dump.evaluation else TrainBatch)(dump, group_size, layers, topk)
