"""From shapes and steps to work: which stretches of memory are mixed as which words of which canonical tensor.

A plan knows no tensor and no device: addresses are counted from the tensor's first byte. It is made once for each
shape and placement and kept.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from repro_golden.base.errors import ReproError
from repro_golden.fingerprint.placement import Part, Placement
from repro_golden.fingerprint.share import Run, union

__all__ = ["EDGES_MAX", "Cover", "Plan", "Span", "cover", "fitting", "plan_parts", "plan_view", "plan_window"]

EDGES_MAX = 1024
"""Runs of one tensor that may begin or end inside a word. Their bytes travel raw; with more, gathering is cheaper."""

_SPANS_MAX = 4096  # more stretches than this are copied together first
_SCATTERED_MIN = 4096  # bytes of a scattered span where there are several: with fewer, copying them first is faster

Ints = tuple[int, ...]


class Span(NamedTuple):
    """`rows` stretches of `words` words, and `tail` bytes after the (only) row, that end the canonical content.

    Of a scattered span the elements of a row are no neighbours in memory, and each of its words is put together of
    several.

    Attributes:
        offset: Where the first row lies in memory, in bytes from the tensor's first.
        rows: How many.
        words: Whole words of a row.
        stride: Bytes between rows in memory.
        first: Canonical index of the first word.
        step: Words between rows in the canonical content.
        tail: Bytes of the last word, 0 where it is whole.
        item: Bytes of an element of a scattered span; 0 where rows are stretches of memory.
        pitch: Bytes between the elements of a scattered row.
    """

    offset: int
    rows: int
    words: int
    stride: int
    first: int
    step: int
    tail: int
    item: int = 0
    pitch: int = 0


class Cut(NamedTuple):
    """`size` bytes at `offset` in memory that are bytes `at` of the canonical content, less than a word."""

    offset: int
    size: int
    at: int


@dataclass(frozen=True)
class Plan:
    """What to read of one tensor for one canonical tensor."""

    spans: tuple[Span, ...]
    cuts: tuple[Cut, ...]


@dataclass(frozen=True)
class Cover:
    """What one canonical tensor gets of a local one: its bytes' runs, and the size of its content."""

    name: str
    shape: Ints
    nbytes: int
    runs: tuple[Run, ...]


class _Rows(NamedTuple):
    source: int
    target: int
    length: int
    rows: int
    stride: int
    step: int


class _Dim(NamedTuple):
    size: int
    source: int  # bytes between two in memory
    target: int  # and in the canonical content


def _dims(size: Sequence[int], source: Sequence[int], target: Sequence[int]) -> list[_Dim]:
    """The fewest dimensions that a box of `size` has, the last first (steps in bytes)."""
    merged: list[_Dim] = []
    for n, s, t in reversed([d for d in zip(size, source, target, strict=True) if d[0] > 1]):
        if merged and s == merged[-1].size * merged[-1].source and t == merged[-1].size * merged[-1].target:
            merged[-1] = merged[-1]._replace(size=merged[-1].size * n)
        else:
            merged.append(_Dim(n, s, t))
    return merged


def _each(dims: Sequence[_Dim]) -> Iterator[tuple[int, int]]:
    """Where each element of these dimensions begins, in memory and in the canonical content."""
    for index in itertools.product(*(range(d.size) for d in dims)):
        places = list(zip(index, dims, strict=True))
        yield sum(i * d.source for i, d in places), sum(i * d.target for i, d in places)


def _stretches(size: Sequence[int], source: Sequence[int], target: Sequence[int], item: int) -> Iterator[_Rows]:
    """The fewest rows of equal stretches that a box of `size` is, in memory and in the canonical content (bytes)."""
    if 0 in size:
        return
    length, dims = item, _dims(size, source, target)
    if dims and dims[0][1:] == (item, item):
        length, dims = length * dims[0].size, dims[1:]
    rows = dims[0] if dims else _Dim(1, 0, 0)
    for at, to in _each(dims[1:]):
        yield _Rows(at, to, length, rows.size, rows.source, rows.target)


def _scattered(dims: list[_Dim], item: int) -> Plan | None:
    """Rows whose elements are no neighbours in memory; None unless they are whole words, and worth it."""
    count, pitch, _ = dims[0]
    rows, stride, step = dims[1] if len(dims) > 1 else _Dim(1, 0, 0)
    spans = math.prod(d.size for d in dims[2:])
    if count * item % 8 or spans > _SPANS_MAX or (spans > 1 and rows * count * item < _SCATTERED_MIN):
        return None
    return Plan(tuple(Span(source, rows, count * item // 8, stride, target // 8, step // 8, 0, item, pitch)
                      for source, target in _each(dims[2:])), ())  # fmt: skip


def _plan(stretches: Iterator[_Rows], source: int, target: int, nbytes: int, spans_max: float) -> Plan | None:
    """Words and cuts of some stretches, moved by `source` and `target`; None with more than `spans_max` of them."""
    spans: list[Span] = []
    cuts: list[Cut] = []
    for row in stretches:
        offset, at = row.source + source, row.target + target
        rows, stride, step = row.rows, row.stride, row.step
        if rows > 1 and (row.length % 8 or at % 8 or step % 8):
            single = [row._replace(rows=1, source=row.source + k * stride, target=row.target + k * step)
                      for k in range(rows if rows <= spans_max else 0)]  # fmt: skip
            part = _plan(iter(single), source, target, nbytes, spans_max) if single else None
            if part is None:
                return None
            spans += part.spans
            cuts += part.cuts
        else:
            head = min(-at % 8, row.length)
            words, tail = divmod(row.length - head, 8)
            if head:
                cuts.append(Cut(offset, head, at))
            last = at + row.length
            if tail and last != nbytes:
                cuts.append(Cut(offset + row.length - tail, tail, last - tail))
                tail = 0
            if words or tail:
                spans.append(Span(offset + head, rows, words, stride, (at + head) // 8, step // 8, tail))
        if len(spans) + len(cuts) > spans_max:
            return None
    return Plan(tuple(spans), tuple(cuts))


@functools.lru_cache(maxsize=1 << 14)
def plan_view(shape: Ints, strides: Ints, item: int) -> Plan | None:
    """The plan of a whole tensor with these strides (in elements); None where copying it together is better."""
    target, step = [], item
    for n in reversed(shape):
        target.append(step)
        step *= n
    box = shape, [s * item for s in strides], target[::-1]
    dims = _dims(*box) if step else []
    if dims and dims[0].source != item and item <= 8:
        return _scattered(dims, item)
    return _plan(_stretches(*box, item), 0, 0, step, _SPANS_MAX)


@functools.lru_cache(maxsize=1 << 14)
def plan_window(at: int, size: int, nbytes: int) -> Plan:
    """The plan of `size` bytes in a row that are bytes `at` and following of a content of `nbytes`."""
    plan = _plan(iter([_Rows(0, at, size, 1, 0, 0)]), 0, 0, nbytes, math.inf)
    assert plan is not None
    return plan


@functools.lru_cache(maxsize=1 << 14)
def plan_parts(parts: tuple[Part, ...], item: int) -> dict[str, Plan]:
    """The plans of a contiguous tensor's parts, by canonical name."""
    plans: dict[str, tuple[list[Span], list[Cut]]] = {}
    for p in parts:
        source, target = ([s * item for s in steps] for steps in (p.step, p.to))
        stretches = _stretches(p.size, source, target, item)
        plan = _plan(stretches, p.start * item, p.at * item, math.prod(p.shape) * item, math.inf)
        assert plan is not None
        spans, cuts = plans.setdefault(p.name, ([], []))
        spans += plan.spans
        cuts += plan.cuts
    return {name: Plan(tuple(spans), tuple(cuts)) for name, (spans, cuts) in plans.items()}


@functools.lru_cache(maxsize=1 << 12)
def cover(placement: Placement, item: int) -> tuple[Cover, ...]:
    """What each canonical tensor gets of a placement, in the order of the parts.

    Raises:
        ReproError: parts that overlap or disagree, or more runs than `EDGES_MAX` that begin or end inside a word.
    """
    runs: dict[str, list[Run]] = {}
    shapes: dict[str, Ints] = {}
    for p in placement.parts:
        if shapes.setdefault(p.name, p.shape) != p.shape:
            raise ReproError(
                f"two parts give {p.name or 'the tensor'} different shapes: {shapes[p.name]} and {p.shape}"
            )
        size = [s * item for s in p.step], [s * item for s in p.to]
        tensor_runs = runs.setdefault(p.name, [])
        for row in _stretches(p.size, *size, item):
            tensor_runs.append(Run(row.target + p.at * item, row.length, row.step, row.rows))
    out = []
    for name, shape in shapes.items():
        nbytes = math.prod(shape) * item
        if (edges := sum(_edges(run, nbytes) for run in runs[name])) > EDGES_MAX:
            raise ReproError(
                f"{name or 'a tensor'} of shape {list(shape)} is split inside an 8-byte word in {edges} places "
                f"(at most {EDGES_MAX} can be carried): gather it over the ranks of this split (all_gather, or "
                "DTensor.full_tensor) and observe the whole"
            )
        out.append(Cover(name, shape, nbytes, union(runs[name])))
    return tuple(out)


def fitting(placement: Placement, shape: Ints, item: int) -> tuple[Cover, ...]:
    """`cover` of a placement for a tensor of this shape.

    Raises:
        ReproError: also where it is a placement of another shape.
    """
    if placement.shape != shape:
        raise ReproError(f"a placement of shape {list(placement.shape)} does not fit a tensor of shape {list(shape)}")
    return cover(placement, item)


def _edges(run: Run, nbytes: int) -> int:
    """How many of its ends lie inside a word."""
    if run.stride % 8 and run.repeats > 1:
        return sum(
            _edges(Run(run.start + k * run.stride, run.length), nbytes) for k in range(min(run.repeats, EDGES_MAX + 1))
        )
    stop = run.start + run.length
    return run.repeats * (bool(run.start % 8) + bool(stop % 8 and stop != nbytes))
