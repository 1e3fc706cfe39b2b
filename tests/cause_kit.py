"""Recordings made by hand: operations that compute integers, so that contents are what they would be."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from repro_bisect.explain.cause import Cause, find_cause
from repro_golden.recording.operations.stream import OBSERVED, Frame, Operation, Stream, Value

PRIME = (1 << 61) - 1
SIGNAL = ("loss", "loss")


@dataclass(frozen=True)
class Ref:
    """A tensor of a tape: which memory, and how it looks at it (0: as it is)."""

    memory: int
    look: int = 0


class Tape:
    """Runs operations on integers and notes them as the recorder does: contents, and who may have made them.

    An operation's line stands for its place in the source.
    """

    def __init__(self) -> None:
        self.operations: list[Operation] = []
        self._memory: list[int] = []
        self._wrote: dict[int, int] = {}
        self._made: dict[Ref, int] = {}

    def given(self, number: int) -> Ref:
        """A tensor that the step begins with."""
        self._memory.append(number % PRIME)
        return Ref(len(self._memory) - 1)

    def number(self, ref: Ref) -> int:
        """What a tensor holds."""
        held = self._memory[ref.memory]
        return held if not ref.look else (held * (2 * ref.look + 1) + ref.look) % PRIME

    def seen(self, ref: Ref, name: str = "") -> Value:
        """What an operation that reads a tensor notes of it."""
        makers = [self._made.get(ref), self._wrote.get(ref.memory)]
        known = tuple(dict.fromkeys(maker for maker in makers if maker is not None))
        return Value("int", (3,), f"{self.number(ref):x}", known, name)

    def do(self, name: str, *reads: Ref, makes: int, line: int, arguments: str = "", **more: Any) -> Ref:
        """An operation that makes a new tensor."""
        entry = self._entry(name, reads, line, arguments, more)
        made = self.given(makes)
        self._noted(entry, made, (Value("int", (3,), f"{makes % PRIME:x}"),))
        return made

    def add(self, a: Ref, b: Ref, line: int, **more: Any) -> Ref:
        """A + b."""
        return self.do("aten.add.Tensor", a, b, makes=self.number(a) + self.number(b), line=line, **more)

    def mul(self, a: Ref, b: Ref, line: int, **more: Any) -> Ref:
        """A * b."""
        return self.do("aten.mul.Tensor", a, b, makes=self.number(a) * self.number(b), line=line, **more)

    def scale(self, a: Ref, k: float, line: int, **more: Any) -> Ref:
        """K * a."""
        return self.do("aten.mul.Scalar", a, makes=int(self.number(a) * k), line=line, arguments=f"T0, {k}", **more)

    def neg(self, a: Ref, line: int, **more: Any) -> Ref:
        """-a."""
        return self.do("aten.neg.default", a, makes=-self.number(a), line=line, **more)

    def clone(self, a: Ref, line: int) -> Ref:
        """A copy."""
        return self.do("aten.clone.default", a, makes=self.number(a), line=line)

    def view(self, a: Ref, look: int, line: int) -> Ref:
        """The same memory, looked at in another way."""
        seen = Ref(a.memory, look)
        entry = self._entry("aten.view.default", (a,), line, f"T0, {look}", {"view": True})
        self.operations.append(replace(entry, outputs=(Value("int", (3,), ""),)))
        self._made[seen] = entry.index
        return seen

    def add_(self, a: Ref, b: Ref, line: int, name: str = "aten.add_.Tensor") -> Ref:
        """A += b, in memory that others look at too; `a` is no view."""
        entry = self._entry(name, (a, b), line, "T0, T1", {})
        self._memory[a.memory] = (self._memory[a.memory] + self.number(b)) % PRIME
        self._noted(entry, a, (Value("int", (3,), f"{self._memory[a.memory]:x}"),))
        return a

    def behind(self, a: Ref, number: int) -> None:
        """Something that is not recorded writes."""
        self._memory[a.memory] = number

    def item(self, a: Ref, line: int) -> int:
        """A number that Python gets."""
        entry = self._entry("aten._local_scalar_dense.default", (a,), line, "T0", {})
        self.operations.append(replace(entry, outputs=(Value("int", (), str(self.number(a))),)))
        return self.number(a)

    def show(self, a: Ref, signal: tuple[str, str] = SIGNAL) -> None:
        """The trainer shows a signal."""
        phase, name = signal
        index = len(self.operations)
        self.operations.append(Operation(index, OBSERVED, "forward", "", f"{phase} {name}", (self.seen(a, name),), ()))

    def stream(self) -> Stream:
        """The recording."""
        return Stream(self.operations, 0)

    def _entry(self, name: str, reads: Sequence[Ref], line: int, arguments: str, more: dict[str, Any]) -> Operation:
        stack = (Frame("train.py", line, "step"),)
        text = arguments or ", ".join(f"T{k}" for k in range(len(reads)))
        values = tuple(self.seen(ref) for ref in reads)
        fields: dict[str, Any] = {"phase": "forward", "module": "", "stack": stack} | more
        return Operation(len(self.operations), name, arguments=text, inputs=values, outputs=(), **fields)

    def _noted(self, entry: Operation, made: Ref, outputs: tuple[Value, ...]) -> None:
        self.operations.append(replace(entry, outputs=outputs))
        self._made[made] = self._wrote[made.memory] = entry.index


def touching(stream: Stream, *lines: int) -> Callable[[Operation], bool]:
    """As `source.Sources.touched`: an operation of these lines, or one whose forward operation is of them."""

    def touched(operation: Operation) -> bool:
        stack = operation.stack
        if operation.forward is not None:
            stack = (*stream.operations[operation.forward].stack, *stack)
        return any(frame.line in lines for frame in stack)

    return touched


def cause(
    a: Tape, b: Tape, before: Sequence[int] = (), after: Sequence[int] = (), signal: tuple[str, str] | None = SIGNAL
) -> Cause:
    """What is found when a change touched these lines."""
    streams = a.stream(), b.stream()
    named = find_cause(*streams, signal, (touching(streams[0], *before), touching(streams[1], *after)))
    assert named is not None
    return named


def line(operation: Operation | None) -> int | None:
    """The line that asked for an operation."""
    return operation.stack[0].line if operation and operation.stack else None


def lines(cause: Cause) -> tuple[str, int | None, int | None]:
    """Kind, and the lines of both sides."""
    return cause.kind, line(cause.before), line(cause.after)
