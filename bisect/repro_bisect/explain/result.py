"""What an explanation says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from repro_bisect.explain.source import Place
from repro_golden.base.canonical import mapping_of
from repro_golden.compare.coverage import Coverage
from repro_golden.compare.traces import Divergence
from repro_golden.recording.operations.stream import Operation
from repro_golden.trace.tensor_difference import TensorDifference

__all__ = ["Answer", "Explained", "Explanation", "Size", "Version"]

Answer = Literal["agree", "operation", "arguments", "structure", "gap", "inputs", "random", "environment", "unseen"]
"""What was found; see `cause.Kind`. ``agree``: nothing differs. ``environment``: the code is the same, and the
environment is not. ``unseen``: the numbers differ, and no operation does."""


@dataclass(frozen=True)
class Explained:
    """One version's operation.

    Attributes:
        name: Such as ``aten.add.Tensor``.
        phase: input, forward, backward or optimizer.
        module: Path of the module it belongs to; "" outside of one.
        node: The autograd node of a backward operation.
        arguments: What it was given; tensors as ``T0``, ``T1`` …
        inputs: dtype, shape and content of these tensors.
        outputs: Of what it made.
        place: The line that is named for it.
        stack: All lines, innermost first; of a backward operation those of its forward one first.
    """

    name: str
    phase: str
    module: str
    node: str
    arguments: str
    inputs: Sequence[str]
    outputs: Sequence[str]
    place: Place | None
    stack: Sequence[Place]

    @classmethod
    def of(cls, operation: Operation, place: Place | None, stack: Sequence[Place]) -> Explained:
        """An operation of a recording."""
        values = [[f"{v.dtype} {list(v.shape)}" for v in side] for side in (operation.inputs, operation.outputs)]
        o = operation
        return cls(o.name, o.phase, o.module, o.node, o.arguments, values[0], values[1], place, stack)


@dataclass(frozen=True)
class Size:
    """How large a difference is, where its values were read whole.

    Attributes:
        where: The operation whose results were compared.
        magnitude: Of the first result.
        histogram: ``(most, count)``: pairs at most so many representable values apart; empty where dtypes differ.
        dtypes: Of both sides.
    """

    where: str
    magnitude: TensorDifference
    histogram: Sequence[tuple[int, int]]
    dtypes: tuple[str, str]


@dataclass(frozen=True)
class Version:
    """One side.

    Attributes:
        point: The commit, version, set of flags or layout.
        subject: One line on it.
        operations: How many operations its step made.
        explained: Where the difference begins in it; None where it has nothing in that place.
    """

    point: str
    subject: str
    operations: int
    explained: Explained | None


@dataclass(frozen=True)
class Explanation:
    """Why two versions' numbers differ.

    Attributes:
        answer: What was found.
        case: The case's name.
        text: The answer in one sentence.
        divergence: The first signal that differs; None where none does.
        before: The first version.
        after: The second.
        side: The version that the answer stands in.
        gap: Where something unseen wrote: the operations before and after it, with their lines.
        size: Of the difference, where it begins.
        mentions: Where no stack crosses the change: touched lines that define what the operation's lines read.
        ran: Where there are none of these either: touched statements that ran until the step's end.
        environment: What differs between the environments, if anything does.
        others: How many further operations the difference begins at.
        rank: Whose operations these are.
        start: The step whose saved state both versions started from; None where both ran from step 0.
        looked: What was compared to find the first difference.
        written: The first signal that differs in the recorded step, where torch.compile's functions ran in that as they
            are written, and so made other numbers; None where the step has its numbers under the recorder too.
    """

    answer: Answer
    case: str
    text: str
    divergence: Divergence | None
    before: Version
    after: Version
    side: Literal["before", "after"] = "after"
    gap: tuple[str, str] | None = None
    size: Size | None = None
    mentions: Sequence[Place] = ()
    ran: Sequence[Place] = ()
    environment: Sequence[str] = ()
    others: int = 0
    rank: int = 0
    start: int | None = None
    looked: Coverage = field(default_factory=Coverage)
    written: Divergence | None = None

    @property
    def named(self) -> Explained | None:
        """The operation that is named first."""
        first, second = (self.before, self.after) if self.side == "before" else (self.after, self.before)
        return first.explained or second.explained

    @property
    def places(self) -> list[Place]:
        """The lines that are named: the answer's, then the other version's, then what they read, or what ran."""
        operations = (self.before, self.after) if self.side == "before" else (self.after, self.before)
        places = [s.explained.place for s in operations if s.explained and s.explained.place]
        return [*places, *self.mentions, *self.ran]

    def to_mapping(self) -> dict[str, Any]:
        """JSON types."""
        return mapping_of(self, "looked", looked_at=self.looked)
