"""The operations of one step, as they are written and read again: JSON lines, a header first, an end last.

A line is an operation or a set of frames that later operations name by its number; what was read of tensors comes
last, because on a GPU it comes home last. Readers refuse a newer format, and a stream without its end is one that was
cut off.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from repro_golden.base.errors import ReproError

__all__ = [
    "FORMAT",
    "OBSERVED",
    "Frame",
    "Operation",
    "Phase",
    "Stream",
    "Value",
    "dump_of",
    "dump_path",
    "kept_of",
    "kept_path",
    "read_stream",
]

FORMAT = 1
OBSERVED = "observe"
"""Name of the entries that are no operation: the trainer showed a signal."""

Phase = Literal["input", "forward", "backward", "optimizer"]


@dataclass(frozen=True, slots=True)
class Frame:
    """One call of a Python stack.

    Attributes:
        file: Relative to the checkout, where it lies in it; else as Python knows it.
        line: Of the call, from 1.
        function: Its qualified name.
    """

    file: str
    line: int
    function: str


@dataclass(frozen=True, slots=True)
class Value:
    """What an operation read or made.

    Attributes:
        dtype: torch's name; ``float``, ``int`` or ``bool`` for a number that was read off a tensor.
        shape: Of the tensor.
        content: 32 hex digits of its two lanes, a number's own text, or "" where the content means nothing (memory that
            nobody has written yet) or cannot be known (a collective that may still be under way).
        makers: Numbers of the operations that this content may be from: the one that made this view of it, and those
            that wrote its memory since the last that wrote all of it. Empty for what the step began with.
        name: Of an observed signal.
    """

    dtype: str
    shape: tuple[int, ...]
    content: str
    makers: tuple[int, ...] = ()
    name: str = ""

    @property
    def key(self) -> tuple[str, tuple[int, ...], str]:
        """Equal for equal bits of one dtype and shape."""
        return self.dtype, self.shape, self.content


@dataclass(frozen=True, slots=True)
class Operation:
    """One call that passed torch's dispatcher, or one observed signal.

    Attributes:
        index: Its number in the stream.
        name: Such as ``aten.add.Tensor``; `OBSERVED` for a signal.
        phase: What the trainer was at.
        module: Path of the module whose forward pass it belongs to; "" outside of one.
        arguments: All that it was given, with ``T0``, ``T1`` … in the place of tensors.
        inputs: The tensors that it was given, in that order.
        outputs: What it made, and what it changed in place.
        stack: Frames, innermost first; without torch's dispatcher and the instrument.
        forward: Of a backward operation the forward one that it belongs to, or None.
        node: Of a backward operation the autograd node, such as ``MulBackward0``.
        draws: Whether it takes random numbers.
        view: Whether it only looks at memory in another way; what it made has no content of its own here.
    """

    index: int
    name: str
    phase: Phase
    module: str
    arguments: str
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    stack: tuple[Frame, ...] = ()
    forward: int | None = None
    node: str = ""
    draws: bool = False
    view: bool = False

    @property
    def key(self) -> tuple[Any, ...]:
        """Equal for operations that did the same with the same and got the same."""
        outputs = tuple(value.key for value in self.outputs)
        return self.name, self.arguments, tuple((value.key, value.name) for value in self.inputs), outputs

    @property
    def asked(self) -> tuple[Any, ...]:
        """Equal for operations that were asked for the same with the same, whatever they got."""
        shapes = tuple((value.dtype, value.shape) for value in self.outputs)
        return self.name, self.arguments, tuple(value.key for value in self.inputs), shapes

    @property
    def look(self) -> tuple[Any, ...]:
        """Equal for operations at one place of a program, whatever the values were."""
        names = tuple(value.name for value in self.inputs)
        return self.phase, self.module, self.name, tuple((v.dtype, v.shape) for v in self.inputs), names


@dataclass(frozen=True)
class Stream:
    """The operations of one step.

    Attributes:
        operations: In the order in which they were called.
        step: The step's number.
        rank: Of the process.
        problem: Why the recording ended early; "" where it is whole.
        folder: Where it lies, and the values beside it.
        compiled: Whether functions for torch.compile were called; they ran as they are written.
        ran: Lines that ran until its end, by file, in the order of their first run; of the files that the recorder was
            told of those that were imported. None where it could not see them, or was told of none.
        kept: By content, dtype and elements, where the bytes of small results lie in `kept_path`: the first one, and
            how many.
    """

    operations: Sequence[Operation]
    step: int
    rank: int = 0
    problem: str = ""
    folder: Path = field(default=Path())
    compiled: bool = False
    ran: Mapping[str, Sequence[int]] | None = None
    kept: Mapping[tuple[str, str, int], tuple[int, int]] = field(default_factory=dict)


def dump_of(stream: Stream, index: int, kind: str, place: int) -> Path:
    """Where the bytes of an operation's input or output (`kind` is ``in`` or ``out``) lie."""
    return dump_path(stream.folder, stream.rank, index, kind, place)


def dump_path(folder: Path, rank: int, index: int, kind: str, place: int) -> Path:
    """The same while it is written; all ranks write into one folder."""
    return folder / f"rank-{rank:05d}-{index}-{kind}{place}.bin"


def kept_path(folder: Path, rank: int) -> Path:
    """Where a rank keeps the small results of its operations."""
    return folder / f"rank-{rank:05d}.values"


def kept_of(stream: Stream, operation: Operation) -> bytes | None:
    """The bytes of an operation's first result, where they are kept; else None."""
    result = operation.outputs[0] if operation.outputs else None
    where = stream.kept.get((result.content, result.dtype, math.prod(result.shape))) if result else None
    if where is None:
        return None
    with kept_path(stream.folder, stream.rank).open("rb") as file:
        file.seek(where[0])
        return file.read(where[1])


def read_stream(path: Path) -> Stream:
    """Read what a recorder wrote.

    Raises:
        ReproError: it is not there, or of a newer format.
    """
    try:
        lines = _lines(path)
        header = next(lines)
    except (OSError, StopIteration):
        raise ReproError(f"{path} holds no operations: the trainer made no step under the recorder") from None
    if header["format"] > FORMAT:
        raise ReproError(f"{path} has format {header['format']}, newer than {FORMAT}: update repro")
    stacks: list[tuple[Frame, ...]] = []
    entries: list[dict[str, Any]] = []
    contents: list[str] = []
    problem, compiled, ran, kept = "it was cut off", False, None, dict[tuple[str, str, int], tuple[int, int]]()
    for raw in lines:
        if "frames" in raw:
            stacks.append(tuple(Frame(*frame) for frame in raw["frames"]))
        elif "contents" in raw:
            contents = raw["contents"]
        elif "kept" in raw:
            kept = {(content, dtype, elements): (start, size) for content, dtype, elements, start, size in raw["kept"]}
        elif "end" in raw:
            problem, compiled, ran = raw["end"], raw.get("compiled", False), raw.get("ran")
        else:
            entries.append(raw)
    operations = [_operation(index, raw, stacks, contents) for index, raw in enumerate(entries)]
    return Stream(operations, header["step"], header["rank"], problem, path.parent, compiled, ran, kept)


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    with path.open(encoding="utf-8") as file:
        for line in file:
            try:
                yield json.loads(line)
            except ValueError:  # a kill cut it short
                return


def _operation(
    index: int, raw: dict[str, Any], stacks: Sequence[tuple[Frame, ...]], contents: Sequence[str]
) -> Operation:
    return Operation(
        index=index,
        name=raw["name"],
        phase=raw["phase"],
        module=raw.get("module", ""),
        arguments=raw.get("arguments", ""),
        inputs=tuple(_value(value, contents) for value in raw["in"]),
        outputs=tuple(_value(value, contents) for value in raw["out"]),
        stack=stacks[raw["stack"]] if "stack" in raw else (),
        forward=raw.get("forward"),
        node=raw.get("node", ""),
        draws=raw.get("draws", False),
        view=raw.get("view", False),
    )


def _value(raw: Sequence[Any], contents: Sequence[str]) -> Value:
    dtype, shape, content, makers, name = raw
    if isinstance(content, int):  # of a reading; a stream that was cut off has none
        content = contents[content] if 0 <= content < len(contents) else ""
    return Value(dtype, tuple(shape), content, tuple(makers), name)
