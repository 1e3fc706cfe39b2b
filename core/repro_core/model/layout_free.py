"""Which elements of a rank's tensor are which elements of the tensors that every layout shares.

One description serves three ends: cutting a rank's tensor out of whole ones (`take`), joining whole ones from all
ranks' (`Joining`), and telling an observer what a rank's tensor holds (`Local.data`). So they cannot disagree.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

__all__ = [
    "BITS",
    "Box",
    "Flat",
    "Ints",
    "Joining",
    "LayoutError",
    "Local",
    "box",
    "padding",
    "same_bits",
    "stack",
    "take",
]

Ints = tuple[int, ...]
Flat = tuple[int, int]
"""The elements ``[start, stop)`` of a flattened tensor."""
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integers of as many bytes as an element has, to compare bits by."""


class LayoutError(ValueError):
    """Tensors that do not fit a model or its layout, in one line that names the tensor."""


class Box(NamedTuple):
    """A box of elements of a rank's tensor that is a box of one canonical tensor.

    The element at index k of the box is number ``start + sum(k * step)`` of the rank's tensor and number
    ``at + sum(k * to)`` of the canonical one, both counted row-major.

    Attributes:
        name: The canonical tensor's.
        shape: The canonical tensor's.
        size: The box's extents.
        start: The local element that it begins with.
        step: Local elements between neighbours along each dimension.
        at: The canonical element that it begins with.
        to: Canonical elements between neighbours along each dimension.
    """

    name: str
    shape: Ints
    size: Ints
    start: int
    step: Ints
    at: int
    to: Ints


@dataclass(frozen=True)
class Local:
    """What a rank's tensor of `shape` holds. Elements in no box are padding: they stand for nothing."""

    shape: Ints
    boxes: tuple[Box, ...]

    def data(self, prefix: str = "", flat: Flat | None = None) -> dict[str, Any]:
        """It as plain data, for ``placement`` of `repro_core.Observe`.

        Args:
            prefix: stands before the canonical names.
            flat: the observed tensor is this slice of the flattened one, such as a distributed optimizer's shard.
        """
        parts = [{**part._asdict(), "name": prefix + part.name} for part in self.boxes]
        return {"shape": self.shape, "parts": parts} | ({} if flat is None else {"flat": flat})


def box(name: str, shape: Sequence[int], at: Sequence[int], size: Sequence[int]) -> Local:
    """A rank's tensor that is one box of a canonical one: `size` elements from index `at`."""
    to = _steps(shape)
    first = sum(k * step for k, step in zip(at, to, strict=True))
    return Local(tuple(size), (Box(name, tuple(shape), tuple(size), 0, _steps(size), first, to),))


def padding(shape: Sequence[int]) -> Local:
    """Elements that stand for nothing."""
    return Local(tuple(shape), ())


def stack(pieces: Sequence[Local]) -> Local:
    """Pieces of one width, stacked along their first dimension."""
    boxes: list[Box] = []
    before = 0
    for piece in pieces:
        boxes += [part._replace(start=part.start + before) for part in piece.boxes]
        before += math.prod(piece.shape)
    return Local((sum(piece.shape[0] for piece in pieces), *pieces[0].shape[1:]), tuple(boxes))


def take(local: Local, canonical: Mapping[str, Tensor]) -> Tensor:
    """The rank's tensor, bit for bit from whole ones; its padding is 0.

    Args:
        local: what it holds.
        canonical: the whole tensors that its boxes name, of the shapes they give.

    Raises:
        LayoutError: they differ in dtype.
    """
    names = list(dict.fromkeys(part.name for part in local.boxes))
    first, *others = (canonical[name] for name in names)
    if any(other.dtype != first.dtype for other in others):
        raise LayoutError(f"{', '.join(names)}: one tensor of the layout, so they must have one dtype")
    out = first.new_zeros(local.shape)
    for part in local.boxes:
        _view(out, part.size, part.start, part.step).copy_(
            _view(canonical[part.name].contiguous(), part.size, part.at, part.to)
        )
    return out


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are equal bit for bit: NaN equals itself, and 0.0 is not -0.0."""
    same = a.shape == b.shape and a.dtype == b.dtype
    return same and torch.equal(a.view(BITS[a.element_size()]), b.view(BITS[b.element_size()]))


class Joining:
    """Canonical tensors that fill up from the tensors of many ranks.

    Args:
        shapes: of the canonical tensors by name.
    """

    def __init__(self, shapes: Mapping[str, Ints]) -> None:
        self.shapes = shapes
        self._found: dict[str, tuple[Tensor, Tensor]] = {}

    def add(self, local: Local, tensor: Tensor, flat: Flat | None = None) -> None:
        """Copy what a rank's tensor holds.

        Args:
            local: what the whole of it holds.
            tensor: it, or the slice `flat` of it.
            flat: see `Local.data`.

        Raises:
            LayoutError: an element was there already with other bits or in another dtype.
        """
        tensor, have = tensor.detach().contiguous(), None
        if flat is not None:
            have = torch.zeros(math.prod(local.shape), dtype=torch.bool, device=tensor.device)
            have[flat[0] : flat[1]] = True
            whole = tensor.new_zeros(len(have))
            whole[flat[0] : flat[1]] = tensor.reshape(-1)
            tensor = whole
        for part in local.boxes:
            new = _view(tensor, part.size, part.start, part.step)
            self._fill(part, new, None if have is None else _view(have, part.size, part.start, part.step))

    def finish(self) -> dict[str, Tensor]:
        """The whole tensors.

        Raises:
            LayoutError: elements are missing.
        """
        for name, shape in self.shapes.items():
            count = math.prod(shape)
            held = int(self._found[name][1].sum()) if name in self._found else 0
            if name not in self._found or held < count:
                raise LayoutError(f"{name}: {count - held} of its {count} elements are on no rank: give every rank's")
        return {name: self._found[name][0] for name in self.shapes}

    def _fill(self, part: Box, new: Tensor, have: Tensor | None) -> None:
        if part.name not in self._found:
            whole = torch.zeros(part.shape, dtype=new.dtype, device=new.device)
            self._found[part.name] = whole, torch.zeros(part.shape, dtype=torch.bool, device=new.device)
        whole, filled = self._found[part.name]
        if whole.dtype != new.dtype:
            raise LayoutError(f"{part.name}: {new.dtype} on one rank and {whole.dtype} on another")
        # Bits, not values: NaN would differ from itself, and -0.0 would pass for 0.0.
        kind = BITS[new.element_size()]
        old, seen = _view(whole.view(kind), part.size, part.at, part.to), _view(filled, part.size, part.at, part.to)
        bits = new.view(kind)
        here = torch.ones_like(seen) if have is None else have
        if bool((here & seen & (old != bits)).any()):
            raise LayoutError(f"{part.name}: two ranks hold the same elements of it, and they differ")
        old.copy_(torch.where(here, bits, old))
        seen |= here


def _view(tensor: Tensor, size: Ints, start: int, step: Ints) -> Tensor:
    return tensor.as_strided(size, step, tensor.storage_offset() + start)


def _steps(shape: Sequence[int]) -> Ints:
    """Row-major steps, in elements, of a contiguous tensor."""
    return tuple(math.prod(shape[k + 1 :]) for k in range(len(shape)))
