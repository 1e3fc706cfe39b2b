"""Which entries of two sequences are the same: in order where that goes, then what only moved."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from difflib import SequenceMatcher

from repro_golden.recording.operations.stream import OBSERVED, Operation, Stream

__all__ = ["aligned", "matched", "under_names"]


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
