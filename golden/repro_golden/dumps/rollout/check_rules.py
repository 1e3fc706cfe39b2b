"""What a check of a rollout dump is: a rule with its reason and cure, and what it finds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, NamedTuple

import numpy as np

from repro_golden.dumps.archive.bounds import shown
from repro_golden.dumps.rollout.arrays import Array, numbers
from repro_golden.dumps.rollout.files import RolloutDump

__all__ = ["Batch", "Finding", "Found", "Rule", "Severity", "said"]

Severity = Literal["error", "warning", "note"]


@dataclass(frozen=True)
class Finding:
    """One thing that a rule found.

    Attributes:
        rule: The rule's id.
        severity: error: the trainer refuses it, or trains on something wrong; warning: likely a mistake; note: worth
            knowing.
        sample: Position of the sample in the dump; None where it is about the whole dump.
        field: The field that it is about.
        message: What was found, with the numbers.
    """

    rule: str
    severity: Severity
    sample: int | None
    field: str
    message: str


class Found(NamedTuple):
    """What a rule's function says: `Finding` without what the rule knows itself."""

    sample: int | None
    field: str
    message: str


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
        found: dict[int, Array | None] = {}
        for number, value in self.column("rollout_routed_experts"):
            array = numbers(value, wide=False)  # they are large
            found[number] = array if array is not None and array.ndim == 3 and array.dtype.kind in "iu" else None
        return found


@dataclass(frozen=True)
class Rule:
    """A rule that dumps are checked by.

    Attributes:
        id: Its name.
        severity: Of what it finds.
        why: What goes wrong in the trainer.
        cure: What to do.
        check: Finds.
        evaluation: Whether it holds for evaluations too, which nothing is trained on.
    """

    id: str
    severity: Severity
    why: str
    cure: str
    check: Callable[[Batch], Iterator[Found]]
    evaluation: bool = True
