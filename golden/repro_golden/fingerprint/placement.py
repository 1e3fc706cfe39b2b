"""Which elements of a local tensor are which elements of canonical tensors: the tensors that every layout shares.

A placement is a local shape and parts. Each part is a box of elements; an affine rule says where they lie in the local
tensor and where in the canonical one, both counted row-major. Placements are plain data, so a trainer can write them
without importing anything of ours (`read`), and they compose: `shard`, `stack`, `Placement.flat`.

    qkv = stack([shard("q", (16, 8), 0, 4, 8), shard("k", (4, 8), 0, 1, 2), shard("v", (4, 8), 0, 1, 2)])
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from repro_golden.base.errors import ReproError

__all__ = ["Part", "Placement", "box", "padding", "read", "shard", "stack", "steps_of", "whole"]

Ints = tuple[int, ...]


class Part(NamedTuple):
    """A box of elements of the local tensor that is a box of one canonical tensor.

    The element at index k of the box is number ``start + sum(k * step)`` of the local tensor and number
    ``at + sum(k * to)`` of the canonical one.

    Attributes:
        name: The canonical tensor's name; empty for the name the local one is observed under.
        shape: The canonical tensor's shape.
        size: The box's extents.
        start: The local element it begins with.
        step: Local elements between neighbours along each dimension of the box.
        at: The canonical element it begins with.
        to: Canonical elements between neighbours along each dimension of the box.
    """

    name: str
    shape: Ints
    size: Ints
    start: int
    step: Ints
    at: int
    to: Ints

    @property
    def elements(self) -> int:
        """Elements of the box."""
        return math.prod(self.size)

    def window(self, start: int, stop: int) -> Iterator[Part]:
        """The parts of it whose local elements are ``[start, stop)``, renumbered from `start`.

        Its steps must fall from dimension to dimension, as those of a row-major box do.
        """
        if not self.elements:
            return
        first = self.start
        last = first + sum((n - 1) * s for n, s in zip(self.size, self.step, strict=True))
        if start <= first and last < stop:
            yield self._replace(start=first - start)
        elif first < stop and start <= last:
            n, step = self.size[0], max(1, self.step[0])
            span = last - first - (n - 1) * self.step[0]  # row k is first + k * step and reaches span further
            reached = range(max(0, -((first + span - start) // step)), min(n, (stop - 1 - first) // step + 1))
            inside = range(max(0, -((first - start) // step)), min(n, (stop - 1 - span - first) // step + 1))
            if inside:
                rows = self._replace(size=(len(inside), *self.size[1:]), start=first + inside.start * step - start)
                yield rows._replace(at=self.at + inside.start * self.to[0])
            cut = (range(reached.start, inside.start), range(inside.stop, reached.stop)) if inside else (reached,)
            for k in itertools.chain(*cut):  # at most two rows
                row = Part(self.name, self.shape, self.size[1:], first + k * self.step[0], self.step[1:],
                           self.at + k * self.to[0], self.to[1:])  # fmt: skip
                yield from row.window(start, stop)


@dataclass(frozen=True)
class Placement:
    """What a local tensor of `shape` holds. Elements in no part (padding) stand for nothing and are not looked at."""

    shape: Ints
    parts: tuple[Part, ...]

    def flat(self, start: int = 0, stop: int | None = None) -> Placement:
        """The elements ``[start, stop)`` of the local tensor, flattened: a slice of a flat buffer.

        Raises:
            ReproError: the slice reaches outside.
        """
        count = math.prod(self.shape)
        stop = count if stop is None else stop
        if not 0 <= start <= stop <= count:
            raise ReproError(f"the flat slice {start}:{stop} is not inside a tensor of {count} elements")
        parts: list[Part] = []
        for part in self.parts:
            if part.elements:
                parts += part.window(start, stop)
            elif start <= part.start <= stop:  # it still says of which tensor nothing is here
                parts.append(part._replace(start=part.start - start))
        return Placement((stop - start,), tuple(parts))

    def to_data(self) -> dict[str, Any]:
        """JSON types, the inverse of `read`."""
        return {"shape": list(self.shape), "parts": [part._asdict() for part in self.parts]}


def steps_of(shape: Sequence[int]) -> Ints:
    """Row-major steps, in elements, of a contiguous tensor."""
    steps, step = [], 1
    for n in reversed(shape):
        steps.append(step)
        step *= n
    return tuple(reversed(steps))


def box(name: str, shape: Sequence[int], at: Sequence[int], size: Sequence[int]) -> Placement:
    """A local tensor that is one box of a canonical one: `size` elements from index `at`.

    Raises:
        ReproError: the box reaches outside the canonical tensor.
    """
    shape, at, size = tuple(shape), tuple(at), tuple(size)
    if not len(shape) == len(at) == len(size) or any(
        o < 0 or n < 0 or o + n > whole for whole, o, n in zip(shape, at, size, strict=True)
    ):
        raise ReproError(
            f"the box {list(size)} at {list(at)} is not inside {name or 'a tensor'} of shape {list(shape)}"
        )
    to = steps_of(shape)
    first = sum(o * t for o, t in zip(at, to, strict=True))
    return Placement(size, (Part(name, shape, size, 0, steps_of(size), first, to),))


def whole(name: str, shape: Sequence[int]) -> Placement:
    """A local tensor that is a whole canonical one, under its canonical name."""
    return box(name, shape, [0] * len(shape), shape)


def shard(name: str, shape: Sequence[int], dim: int, rank: int, ranks: int) -> Placement:
    """The `rank`-th of `ranks` equal shards of a canonical tensor along `dim`.

    Raises:
        ReproError: the dimension does not divide; give the `box` that the rank holds.
    """
    if not 0 <= rank < ranks or not 0 <= dim < len(shape) or shape[dim] % ranks:
        raise ReproError(
            f"{name or 'a tensor'} of shape {list(shape)} has no shard {rank} of {ranks} along {dim}: give its box"
        )
    size, at = list(shape), [0] * len(shape)
    size[dim] //= ranks
    at[dim] = rank * size[dim]
    return box(name, shape, at, size)


def padding(shape: Sequence[int]) -> Placement:
    """Elements that stand for nothing, such as the rows that pad a vocabulary."""
    return Placement(tuple(shape), ())


def stack(placements: Sequence[Placement]) -> Placement:
    """Local tensors stacked along their first dimension: a fused QKV, gate and up, a padded vocabulary, a flat buffer.

    Raises:
        ReproError: nothing to stack, or rows of unequal shape.
    """
    rows = {p.shape[1:] for p in placements if p.shape}
    if len(rows) != 1 or not all(p.shape for p in placements):
        raise ReproError("stack needs placements of one or more dimensions whose rows have one shape")
    parts, before = [], 0
    for p in placements:
        parts += [part._replace(start=part.start + before) for part in p.parts]
        before += math.prod(p.shape)
    return Placement((sum(p.shape[0] for p in placements), *rows.pop()), tuple(parts))


def read(data: object) -> Placement:
    """The placement that plain data describes: ``{"shape": [...], "parts": [{"name", "shape", "size", ...}]}``.

    Where a part gives no ``start``, it is the whole local tensor at that index. With ``"flat": [start, stop]`` the
    placement is `Placement.flat` of what the rest describes.

    Raises:
        ReproError: anything that is not a placement, or that reaches outside one of its tensors.
    """
    if isinstance(data, Placement):
        return _checked(data)
    try:
        placement, flat = _read(data)
    except (KeyError, TypeError, ValueError) as error:
        raise ReproError(f"not a placement ({type(error).__name__}: {error}): see docs/reference/formats.md") from None
    placement = _checked(placement)
    return placement if flat is None else placement.flat(*flat)


def _read(data: object) -> tuple[Placement, Ints | None]:
    """The placement before it is flat, unchecked, and its stretch."""
    given = _mapping(data)
    shape, flat = _ints(given["shape"]), None
    if "flat" in given:
        flat = _ints(given["flat"])
        if len(flat) != 2:
            raise ValueError("flat is not a start and a stop")
    parts: list[Part] = []
    for raw in given["parts"]:
        if unknown := set(_mapping(raw)) - set(Part._fields):
            raise ValueError(f"{', '.join(map(repr, unknown))} is no part of a part")
        if not isinstance(name := raw.get("name", ""), str):
            raise TypeError("a name is no text")
        if "start" in raw:
            ints = [_ints(raw[key]) for key in ("shape", "size", "step", "to")]
            start, at = _ints([raw["start"], raw["at"]])
            parts.append(Part(name, ints[0], ints[1], start, ints[2], at, ints[3]))
        else:
            if _ints(raw.get("size", shape)) != shape:
                raise ValueError("a part without a start is of another size")
            parts += box(name, _ints(raw["shape"]), _ints(raw["at"]), shape).parts
    return Placement(shape, tuple(parts)), flat


def _mapping(data: object) -> Mapping[str, Any]:
    if not isinstance(data, Mapping):
        raise TypeError(f"{type(data).__name__} is no mapping")
    return data


def _ints(values: Iterable[Any]) -> Ints:
    out = tuple(values)
    if not all(isinstance(v, int) and not isinstance(v, bool) and v >= 0 for v in out):
        raise ValueError(f"{out} are not whole numbers from 0")
    return out


def _checked(placement: Placement) -> Placement:
    """Raises ReproError unless each part lies inside both its tensors and its steps fall."""
    count = math.prod(placement.shape)
    for p in placement.parts:
        if not all(isinstance(v, tuple) for v in (placement.shape, p.shape, p.size, p.step, p.to)):
            raise ReproError(f"a part of {p.name or 'the tensor'} is not made of tuples: use `read` for lists")
        every = (*p.shape, *p.size, *p.step, *p.to, p.start, p.at, count, math.prod(p.shape))
        if not all(type(v) is int and 0 <= v < 1 << 59 for v in every):
            raise ReproError(f"a part of {p.name or 'the tensor'} has a number that is not a whole one from 0 to 2^59")
        if not len(p.size) == len(p.step) == len(p.to):
            raise ReproError(f"a part of {p.name or 'the tensor'} gives {len(p.size)} sizes for {len(p.step)} steps")
        if not p.elements:
            continue
        lasts = [o + sum((n - 1) * s for n, s in zip(p.size, steps, strict=True)) for o, steps in
                ((p.start, p.step), (p.at, p.to))]  # fmt: skip
        if p.start < 0 or p.at < 0 or lasts[0] >= count or lasts[1] >= math.prod(p.shape):
            raise ReproError(f"a part of {p.name or 'the tensor'} reaches outside the local or the canonical tensor")
        inner = 0
        for n, step, to in zip(reversed(p.size), reversed(p.step), reversed(p.to), strict=True):
            if n > 1 and (step <= inner or to <= 0):
                raise ReproError(
                    f"the steps of a part of {p.name or 'the tensor'} must fall, as those of a row-major box do"
                )
            inner += (n - 1) * step
    return placement
