"""The operation that began a difference, from the recordings of one step in two versions. Pure: no git, no torch.

An operation did the same in both if it has the same name and arguments, read the same bits and made the same bits. From
the first signal that differs, the way leads back through operations that did not, to those that read only bits which
the other version has too: there the difference begins. Harmless changes of structure are not on that way, or end in
bits that the other version has.
"""

from __future__ import annotations

import re
from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import SequenceMatcher
from typing import Literal

from repro_golden.recording.operations.stream import OBSERVED, Operation, Stream, Value
from repro_golden.trace.families import plain

__all__ = ["Cause", "Kind", "Touches", "aligned", "find_cause", "matched", "under_names"]

Kind = Literal["operation", "arguments", "structure", "gap", "inputs", "random"]
"""``operation``: the same was asked and something else came out. ``arguments``: something else was asked of the same
operation. ``structure``: other operations, or in another order. ``gap``: what an operation read was written by nothing
that was recorded. ``inputs``: the step began with other values. ``random``: other random numbers were drawn."""

Touches = Callable[[Operation], bool]
"""Whether an operation's source, or that of a caller of it, is among what a change touched."""

_UNTOUCHED = 2
"""Rank from which on an operation's source is not what the change touched."""
_WINDOW = 4000
"""Operations behind the cause in which a pair is looked for whose results can be compared."""


@dataclass(frozen=True)
class Cause:
    """Where a difference begins.

    Attributes:
        kind: What differs.
        before: The operation of the first version; None where it has none in this place.
        after: That of the second.
        gap: The operations between which something unseen wrote, where that is the cause.
        pair: Operations of both whose first results have one shape, to measure the difference by; None without.
        side: Which of both the answer stands in: the one whose source was touched.
        others: Further operations at which the difference begins too.
    """

    kind: Kind
    before: Operation | None
    after: Operation | None
    gap: tuple[Operation | None, Operation] | None
    pair: tuple[Operation, Operation] | None
    side: Literal["before", "after"]
    others: Sequence[Operation] = ()

    @property
    def operation(self) -> Operation:
        """The one that is named first."""
        first, second = (self.before, self.after) if self.side == "before" else (self.after, self.before)
        operation = first or second
        assert operation is not None, "a cause has an operation"
        return operation


def find_cause(
    a: Stream, b: Stream, signal: tuple[str, str] | None, touches: tuple[Touches, Touches] | None = None
) -> Cause | None:
    """Where the difference of two recordings of one step begins; None where none of their operations differ.

    Args:
        a: The first version's.
        b: The second's.
        signal: Phase and name of the first signal that differs, where the way begins. None takes all operations, and
            so does one that neither shows: a number that the program printed.
        touches: For each version, whether an operation's source is what the change touched. Of several beginnings those
            come first.
    """
    keys = [o.key for o in a.operations], [o.key for o in b.operations]
    ordered = dict(aligned(*keys))
    pairs = matched(*keys, ordered)
    if len(pairs) == len(a.operations) == len(b.operations) == len(ordered):
        return None
    if signal is not None and not any(_shows(stream, signal) for stream in (a, b)):
        signal = None
    back = {j: i for i, j in pairs.items()}
    sides = _Side(a, pairs, set(pairs) - set(ordered), b), _Side(b, back, set(back) - set(ordered.values()), a)
    touched = touches or (_nothing, _nothing)
    beginnings = [side.beginnings(signal, touch) for side, touch in zip(sides, touched, strict=True)]
    return _joined(sides, beginnings, touched)


def _nothing(_: Operation) -> bool:
    return False


_OPENS = ("aten.set_.source_Storage", "aten.from_file")
"""Operations that look at bytes which no tensor held: those of a data loader's workers, of a file."""


_READS = ("aten._local_scalar_dense", "aten.equal", "aten.nonzero", "aten.is_nonzero")
"""Operations by which Python sees what a tensor holds."""


_WRITES = re.compile(r"_(\.|\Z)|\.\w*out\Z")
"""Names of operations that write to what they are given: which memory that is makes another operation."""


class _Side:
    """One version's recording, beside what is known of the other's.

    Attributes:
        operations: All of them.
        pairs: Numbers of those that the other version has too, with theirs there.
        moved: Those of them that come in another order there.
    """

    def __init__(self, stream: Stream, pairs: Mapping[int, int], moved: set[int], other: Stream) -> None:
        self.operations, self.pairs, self.moved = stream.operations, pairs, moved
        there = set(pairs.values())
        unpaired = [o for o in other.operations if o.index not in there]
        self._known = {value.key for o in other.operations for value in (*o.inputs, *o.outputs)}
        # What two different ways lead to is the same only among what differs: a number such as 0 is in every program.
        # And in one phase: the derivative of a cube is made of the square that was there before.
        self._remade = {(o.phase, value.key) for o in unpaired for value in o.outputs}
        self._looks = {(o.look, _read(o)) for o in unpaired}
        self._done = {_whole(o) for o in other.operations}
        self._ahead = _opened_ahead(stream.operations)

    def beginnings(self, signal: tuple[str, str] | None, touched: Touches) -> list[Operation]:
        """The operations at which the difference of a signal begins: the likeliest first."""
        way = self._way(signal)
        first = self._first(way, touched)
        if first and self._rank(first[0], touched) < _UNTOUCHED:
            return first
        # No tensor leads from the change to the signal, but a number that Python decided by may, or an order of calls.
        until = first[0].index if first else len(self.operations)
        decided = [o for o in self._first(self._way(None), touched) if o.index < until and touched(o)]
        if first and self._answers_otherwise(first[0]):  # it begins there, unless Python chose what is asked
            read = self._read_off(until)
            return [o for o in decided if o.index in read] + first
        reached = {maker for o in way for value in o.inputs for maker in value.makers}
        reordered = [o for o in self.operations if o.index in self.moved & reached and touched(o)]
        return decided + reordered + first

    def _first(self, way: Sequence[Operation], touched: Touches) -> list[Operation]:
        candidates = [o for o in way if o.name != OBSERVED and all(self.old(value) for value in o.inputs)]
        # what came to the bits of the other version begins nothing, whoever touched it
        new = [o for o in candidates if not self._rank(o, touched) % _UNTOUCHED]
        return sorted(new or candidates, key=lambda o: (self._rank(o, touched), o.index))

    def _answers_otherwise(self, operation: Operation) -> bool:
        """Whether the other version asks the same operation of the same values, and something else comes of it."""
        asked = (operation.look, _read(operation)) in self._looks
        return asked and not (operation.view or operation.draws)

    def _read_off(self, until: int) -> set[int]:
        """Differing operations that a number leads back to which Python read off a tensor before an operation."""
        front = [o.index for o in self._way(None) if o.index < until and o.name.startswith(_READS)]
        reached = set[int]()
        while front:
            index = front.pop()
            if index not in reached and index not in self.pairs:
                reached.add(index)
                front += [maker for value in self.operations[index].inputs for maker in value.makers]
        return reached

    def _rank(self, operation: Operation, touched: Touches) -> int:
        new = self._asks_otherwise(operation) or any(
            value.content and (operation.phase, value.key) not in self._remade for value in operation.outputs
        )
        new = new and not self._hands_on(operation) and not self._once_more(operation)
        return (0 if touched(operation) else _UNTOUCHED) + (0 if new else 1)

    def knows(self, value: Value) -> bool:
        """Whether the other version has a value too, wherever that is."""
        return value.key in self._known

    def old(self, value: Value) -> bool:
        """Whether nothing that differs made a value, or what did came to the same bits as the other version.

        A view or a copy of such a value is one too, unless the other version does something else with it there.
        """
        makers = [self.operations[maker] for maker in value.makers if maker not in self.pairs]
        if not makers or not value.content or any((o.phase, value.key) in self._remade for o in makers):
            return True
        return all(
            self._came_out(o) or ((self._hands_on(o) or self._once_more(o)) and all(self.old(v) for v in o.inputs))
            for o in makers
        )

    def _came_out(self, operation: Operation) -> bool:
        """Whether all that an operation made is among what the other version made in another way."""
        outputs = [value for value in operation.outputs if value.content]
        return bool(outputs) and all((operation.phase, value.key) in self._remade for value in outputs)

    def _once_more(self, operation: Operation) -> bool:
        """Whether the other version does the same too, to the same bits, and only less often: what it made is known."""
        reads = operation.inputs and not operation.draws and not _WRITES.search(operation.name)
        return bool(reads) and _whole(operation) in self._done

    def _hands_on(self, operation: Operation) -> bool:
        """Whether an operation only looks at what it read, or made the same bits of it, where the other has none."""
        keys = [value.key for value in operation.outputs]
        same = operation.view or (len(operation.inputs) == 1 and keys == [operation.inputs[0].key])
        return same and (operation.look, _read(operation)) not in self._looks

    def _asks_otherwise(self, operation: Operation) -> bool:
        """Whether an operation is a view that the other version takes of the same value with other arguments."""
        return (
            operation.view and operation.index not in self.pairs and (operation.look, _read(operation)) in self._looks
        )

    def _way(self, signal: tuple[str, str] | None) -> list[Operation]:
        """The differing operations that lead to a signal, in order; all of them where no signal is given.

        Of all, but for what was opened ahead: when a data loader's workers have a later step's batch is their matter.
        """
        differing = [o for o in self.operations if o.index not in self.pairs]
        if signal is None:
            return [o for o in differing if o.index not in self._ahead]
        front = [m for o in differing if o.name == OBSERVED for v in o.inputs if _is(o, v, signal) for m in v.makers]
        reached: dict[int, Operation] = {}
        while front:
            index = front.pop()
            if index in reached or index in self.pairs:
                continue
            operation = reached[index] = self.operations[index]
            front += [maker for value in operation.inputs for maker in value.makers]
            if operation.forward is not None:  # its saved tensors came from there
                front.append(operation.forward)
        return [reached[index] for index in sorted(reached)]


def _opened_ahead(operations: Sequence[Operation]) -> set[int]:
    """Operations that open what none of the step reads, and those that make nothing but the tensors to open it in."""
    readers: dict[int, set[int]] = {}
    for operation in operations:
        for value in operation.inputs:
            for maker in value.makers:
                readers.setdefault(maker, set()).add(operation.index)
    opens = {o.index for o in operations if o.name.startswith(_OPENS)}
    return opens - readers.keys() | {maker for maker, read_by in readers.items() if read_by <= opens}


def _shows(stream: Stream, signal: tuple[str, str]) -> bool:
    return any(_is(o, value, signal) for o in stream.operations if o.name == OBSERVED for value in o.inputs)


def _is(operation: Operation, value: Value, signal: tuple[str, str]) -> bool:
    phase, name = signal  # of several optimizers in turn, none is numbered in its own process
    return operation.arguments.partition(" ")[0] == phase and plain(value.name) == plain(name)


def _joined(
    sides: tuple[_Side, _Side], beginnings: list[list[Operation]], touched: tuple[Touches, Touches]
) -> Cause | None:
    """One cause of what both sides know of it."""
    before, after = (operations[0] if operations else None for operations in beginnings)
    if before is None and after is None:
        return None
    side: Literal["before", "after"] = "after"
    if after is None or (before is not None and touched[0](before) and not touched[1](after)):
        side = "before"
    before, after = _partners(beginnings, before, after, side)
    if side == "after" and before and after and _left_out(sides, before, after):
        side = "before"
    others = [o for operations in beginnings for o in operations[1:] if o not in (before, after)]
    kind = _kind(sides, before, after)
    gap = None
    main, main_side = (before, sides[0]) if side == "before" else (after, sides[1])
    assert main is not None, "the side of the answer has an operation"
    if kind == "gap":
        assert before is not None, "a gap is seen in both"
        assert after is not None, "a gap is seen in both"
        new = [k for k, (v, w) in enumerate(zip(before.inputs, after.inputs, strict=True)) if v.key != w.key]
        writers = [maker for k in new for maker in main.inputs[k].makers]
        gap = (main_side.operations[max(writers)] if writers else None, main)
    return Cause(kind, before, after, gap, _pair(sides, before, after), side, others)


def _partners(
    beginnings: list[list[Operation]],
    before: Operation | None,
    after: Operation | None,
    side: str,
) -> tuple[Operation | None, Operation | None]:
    """The other version's operation in the place of the one that is named, where it has one."""
    main, others = (before, beginnings[1]) if side == "before" else (after, beginnings[0])
    if main is None:
        return before, after
    alike = [o for o in others if o.look == main.look and _read(o) == _read(main)]
    named = [o for o in others if o.name == main.name and o.phase == main.phase and o.module == main.module]
    partner = next(iter(alike or named or others), None)
    return (main, partner) if side == "before" else (partner, main)


def _left_out(sides: tuple[_Side, _Side], before: Operation, after: Operation) -> bool:
    """Whether the first version's operation is no more: the second goes on with what read its result there.

    Two that only changed places are none that was left out.
    """
    return _goes_on(sides[0], before, after) and not _goes_on(sides[1], after, before)


def _goes_on(side: _Side, operation: Operation, other: Operation) -> bool:
    """Whether an operation like `other` reads what an operation of this side made."""
    wanted = (other.name, other.phase, other.module, other.arguments)
    return operation.name != other.name and any(
        (o.name, o.phase, o.module, o.arguments) == wanted
        and any(operation.index in value.makers for value in o.inputs)
        for o in side.operations[operation.index + 1 : operation.index + _WINDOW]
    )


def _read(operation: Operation) -> tuple[object, ...]:
    return tuple(value.key for value in operation.inputs)


def _whole(operation: Operation) -> tuple[object, ...]:
    """What an operation does, to what, and what comes of it."""
    made = tuple(value.key for value in operation.outputs)
    return operation.phase, operation.look, operation.arguments, _read(operation), made


def _kind(sides: tuple[_Side, _Side], before: Operation | None, after: Operation | None) -> Kind:
    if before is None or after is None or before.name != after.name:
        return "structure"
    if _read(before) == _read(after):
        if before.arguments != after.arguments:
            return "arguments"
        if before.key == after.key:  # it only moved
            return "structure"
        if before.name.startswith(_OPENS):
            return "inputs"
        return "random" if before.draws else "operation"
    if before.look != after.look or before.arguments != after.arguments:
        return "structure"
    new = [(v, w) for v, w in zip(before.inputs, after.inputs, strict=True) if v.key != w.key]
    if any(v.makers and tuple(sides[0].pairs.get(m) for m in v.makers) == w.makers for v, w in new):
        return "gap"  # the same operations made it, and it is not the same any more
    outside = all(not v.makers and not w.makers and not sides[1].knows(w) for v, w in new)
    return "inputs" if outside else "structure"


def _pair(
    sides: tuple[_Side, _Side], before: Operation | None, after: Operation | None
) -> tuple[Operation, Operation] | None:
    """Operations at one place of both programs whose results differ and have one shape: nearest to the cause."""
    if before is not None and after is not None and before.name == after.name and _comparable(before, after):
        return before, after
    starts = [min(o.index for o in (before or after, after or before) if o is not None)] * 2
    if before is not None:
        starts[0] = before.index
    if after is not None:
        starts[1] = after.index
    windows = [
        [o for o in side.operations[start : start + _WINDOW] if o.name != OBSERVED]
        for side, start in zip(sides, starts, strict=True)
    ]
    for i, j in aligned([_place(o) for o in windows[0]], [_place(o) for o in windows[1]]):
        first, second = windows[0][i], windows[1][j]
        if first.index not in sides[0].pairs and second.index not in sides[1].pairs and _comparable(first, second):
            return first, second
    return None


def _place(operation: Operation) -> tuple[object, ...]:
    return operation.phase, operation.module, operation.name, tuple(value.shape for value in operation.inputs)


def _comparable(first: Operation, second: Operation) -> bool:
    if not first.outputs or not second.outputs:
        return False
    x, y = first.outputs[0], second.outputs[0]
    read = [[value.shape for value in operation.inputs] for operation in (first, second)]
    return read[0] == read[1] and x.shape == y.shape and x.key != y.key and bool(x.content) and bool(y.content)


def aligned(a: Sequence[Hashable], b: Sequence[Hashable]) -> list[tuple[int, int]]:
    """Pairs (i, j) with a[i] == b[j], ascending in both, by sequence matching (`difflib`); ends in common come first.

    Two recordings of a step mostly agree up to one place, and seldom afterwards, so the common beginning and the common
    end are taken off before anything that takes more than linear time looks at the rest.
    """
    first, last = 0, 0
    shorter = min(len(a), len(b))
    while first < shorter and a[first] == b[first]:
        first += 1
    while last < shorter - first and a[len(a) - 1 - last] == b[len(b) - 1 - last]:
        last += 1
    pairs = [(k, k) for k in range(first)]
    numbers: dict[Hashable, int] = {}
    inner = [[numbers.setdefault(x, len(numbers)) for x in s[first : len(s) - last]] for s in (a, b)]
    for block in SequenceMatcher(None, inner[0], inner[1], autojunk=False).get_matching_blocks():
        pairs += [(first + block.a + k, first + block.b + k) for k in range(block.size)]
    return pairs + [(len(a) - k, len(b) - k) for k in range(last, 0, -1)]


def matched(a: Sequence[Hashable], b: Sequence[Hashable], ordered: Mapping[int, int]) -> dict[int, int]:
    """From entries of `a` to equal ones of `b`, each used once: those `aligned` in order, then the rest."""
    pairs = dict(ordered)
    taken = set(pairs.values())
    left: defaultdict[Hashable, deque[int]] = defaultdict(deque)
    for j, key in enumerate(b):
        if j not in taken:
            left[key].append(j)
    for i, key in enumerate(a):
        if i not in pairs and left.get(key):
            pairs[i] = left[key].popleft()
    return pairs


def under_names(stream: Stream, names: Mapping[tuple[str, str], str]) -> Stream:
    """A recording whose observed signals have other names, in the order of these.

    Args:
        stream: The recording.
        names: By phase and name.
    """
    return replace(stream, operations=[_shown(o, names) if o.name == OBSERVED else o for o in stream.operations])


def _shown(operation: Operation, names: Mapping[tuple[str, str], str]) -> Operation:
    phase, _, name = operation.arguments.partition(" ")
    inputs = [replace(value, name=names.get((phase, value.name), value.name)) for value in operation.inputs]
    inputs.sort(key=lambda value: value.name)
    return replace(operation, arguments=f"{phase} {names.get((phase, name), name)}", inputs=tuple(inputs))
