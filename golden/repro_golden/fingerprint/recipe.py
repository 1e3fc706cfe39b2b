"""What is to be done with a list of tensors, before any of it is done: kept for the next step, which asks again.

Slots, words and kept tensors are numbered from zero for each list; the collector knows where its own begin.
"""

from __future__ import annotations

import operator
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from repro_golden.fingerprint.backends.backend import BUFFER, JOB, Backend, Table
from repro_golden.fingerprint.definition import frame
from repro_golden.fingerprint.distributed import missing
from repro_golden.fingerprint.kinds import NONE, PLAIN_TENSORS, dtype_name, kind_of
from repro_golden.fingerprint.placement import Placement
from repro_golden.fingerprint.plan import Cover, Plan, fitting, plan_parts, plan_view, plan_window
from repro_golden.fingerprint.views import carried, in_words, sketch_offsets, sketch_positions, views

__all__ = ["Entry", "Recipe", "Work", "recipes_of", "start"]


@dataclass(slots=True)
class Entry:
    """One tensor: where its results will be found.

    Attributes:
        dtype: Its dtype.
        nbytes: Bytes of its local content.
        slots: The slots its lanes are summed in: one, or one for each of `covers`.
        covers: What each canonical tensor gets of it; None for a whole tensor.
        measured: Whether statistics are taken.
        frame: What its lanes are bound to (`definition.frame`), for a whole tensor.
        sketch: Stretches of the gathered words.
        cuts: Bytes of words that are not whole: place in `slots`, gathered word, byte of the content, how many.
        kept: Number of its kept bytes, or None.
    """

    dtype: torch.dtype
    nbytes: int
    slots: range
    covers: tuple[Cover, ...] | None
    measured: bool
    frame: bytes
    sketch: list[tuple[int, int]] = field(default_factory=list)
    cuts: list[tuple[int, int, int, int]] = field(default_factory=list)
    kept: int | None = None


@dataclass(frozen=True)
class Recipe:
    """Everything but the reading: the jobs [n, 12] and words to gather [m, 2] of a list, and how much they fill.

    `frames` holds what each tensor's lanes are bound to; None unless every tensor is whole in one slot of its own.
    `sketched` holds the bytes of each tensor's sketch; None unless they are also of items of one size, and not kept.
    `owners` says which tensor of the list each job, and each word, is of.
    """

    entries: list[Entry]
    frames: list[bytes] | None
    sketched: list[int] | None
    jobs: Table
    table: Table
    owners: tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]
    slots: int
    words: int
    kept: int

    def moved(self, bytes_: npt.NDArray[np.int64]) -> Recipe:
        """The recipe of tensors that look the same and lie so many bytes further, each."""
        tables = (self.jobs.copy(), self.table.copy())
        for table, owners in zip(tables, self.owners, strict=True):
            table[:, 0] += bytes_[owners]
        return replace(self, jobs=tables[0], table=tables[1])


_FEW = 8
"""Shorter lists are kept apart, or the many of a step would drive out its long ones; the compiler's check is of long
ones."""
_LOW = 1 << 32
"""Addresses below it may be offsets into a memory that was given back: no program's memory lies there, mostly."""
_layout, _looks = operator.attrgetter("layout"), operator.attrgetter("dtype", "shape", "device")


class _Known(NamedTuple):
    addresses: list[int]
    looks: list[object]
    guard: Callable[..., bool]
    recipe: Recipe

    def fits(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether they look as those did that it was made of, wherever they lie."""
        return self.guard(*tensors) or self.looks == _appearance(tensors)


class Recipes:
    """The recipes of the last lists, each found again by all that it rests on: dtypes, shapes, strides and addresses.

    Gradients mostly lie elsewhere in each step: a list that looks like one before is read by that one's recipe, moved.
    """

    _KEPT = 64

    def __init__(self) -> None:
        self._known: OrderedDict[tuple[object, ...], _Known] = OrderedDict()
        self._alike: OrderedDict[tuple[object, ...], _Known] = OrderedDict()
        self._seen: OrderedDict[tuple[object, ...], list[int]] = OrderedDict()

    def find(self, tensors: Sequence[torch.Tensor], how: tuple[bool, ...]) -> Recipe | None:
        """The recipe of a list that is just like one before."""
        if not tensors:
            return None
        try:
            addresses, first = list(map(torch.Tensor.data_ptr, tensors)), _first(tensors, how)
        except RuntimeError:  # a tensor without memory or a shape of its own: `distributed` says what to do
            return None
        key = (*how, len(addresses), *addresses[:1])
        known = self._known.get(key)
        if known is not None and known.addresses == addresses and known.fits(tensors):
            self._known.move_to_end(key)
            return known.recipe
        alike = self._alike.get(first)
        if alike is None or not alike.fits(tensors) or (min(addresses) < _LOW and any(map(missing, tensors))):
            return None
        moved = alike.recipe.moved(np.subtract(addresses, alike.addresses))
        if self._seen.get(key) == addresses:  # worth it from the second time on
            _put(self._known, key, alike._replace(addresses=addresses, recipe=moved), self._KEPT)
        _put(self._seen, key, addresses, self._KEPT)
        return moved

    def put(self, tensors: Sequence[torch.Tensor], how: tuple[bool, ...], recipe: Recipe) -> None:
        """Remember a recipe; not of lists with tensors that are more than memory with a shape."""
        if not tensors or (looks := _appearance(tensors)) is None:
            return
        addresses = list(map(torch.Tensor.data_ptr, tensors))
        known = _Known(addresses, looks, _guard(tensors), recipe)
        _put(self._alike, _first(tensors, how), known, self._KEPT)


_short, _long = Recipes(), Recipes()


def recipes_of(count: int) -> Recipes:
    """Where those of lists of so many tensors are."""
    return _short if count < _FEW else _long


def _first(tensors: Sequence[torch.Tensor], how: tuple[bool, ...]) -> tuple[object, ...]:
    """What tells lists apart quickly that do not look alike."""
    return (*how, len(tensors), tensors[0].requires_grad, *_looks(tensors[0]), *_looks(tensors[-1]))


_Kept = TypeVar("_Kept")


def _put(cache: OrderedDict[tuple[object, ...], _Kept], key: tuple[object, ...], value: _Kept, most: int) -> None:
    cache[key] = value
    cache.move_to_end(key)
    if len(cache) > most:
        cache.popitem(last=False)


def _appearance(tensors: Sequence[torch.Tensor]) -> list[object] | None:
    """All that a recipe rests on beside addresses; None for a list with tensors that are not plain."""
    if not set(map(type, tensors)).issubset(PLAIN_TENSORS) or set(map(_layout, tensors)) != {torch.strided}:
        return None
    if any(map(torch.Tensor.is_conj, tensors)) or any(map(torch.Tensor.is_neg, tensors)):
        return None
    return [*map(torch.Tensor.stride, tensors), *map(_looks, tensors)]


def _guard(tensors: Sequence[torch.Tensor]) -> Callable[..., bool]:
    """The compiler's own check that tensors look as they did, in one call for all of them.

    It is not a public interface of torch: where it is another one, asking each serves, and so it does for a few.
    """
    if len(tensors) < _FEW:
        return lambda *_: False
    try:
        from torch._C._dynamo.guards import TensorGuards

        guards = TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None)
        check: Callable[..., bool] = guards.check
        check(*tensors)
    except (ImportError, AttributeError, TypeError, RuntimeError):
        return lambda *_: False
    return check


class Work:
    """The jobs of a list of tensors for one backend, while the list is read."""

    def __init__(self, backend: Backend, base: int) -> None:
        """Work for `backend`, whose slot `base` is this list's slot 0."""
        self.slots = self.words = self.kept = 0
        self.copied = False
        self._backend, self._base = backend, base
        self._tensors = 0
        self._jobs: list[tuple[int, ...]] = []
        self._owners: list[int] = []
        self._fetches: list[tuple[npt.NDArray[np.int64], int, int, int]] = []  # offsets, address, bytes, tensor

    def add(self, tensor: torch.Tensor, placement: Placement | None, *, statistics: bool, sketch: bool) -> Entry:
        """Put one plain tensor in line; one that must be copied together first is done at once.

        Raises:
            ReproError: a placement that does not fit.
        """
        dtype, item, shape = tensor.dtype, tensor.element_size(), tuple(tensor.shape)
        covers = None if placement is None else fitting(placement, shape, item)
        slots = range(self.slots, self.slots + (1 if covers is None else len(covers)))
        bound = frame(dtype_name(dtype), shape) if covers is None else b""
        entry = Entry(dtype, tensor.numel() * item, slots, covers, statistics, bound)
        self.slots = slots.stop
        plans = _plans(tensor, placement, item) if tensor.device == self._backend.device else None
        if plans is None:
            self._copy(tensor, placement, entry, sketch=sketch)
        else:
            address = tensor.data_ptr()
            self._order(entry, plans, address)
            if sketch and covers is None and entry.nbytes:
                entry.sketch.append(self._fetch(sketch_offsets(shape, tensor.stride(), item), address, min(item, 8)))
        self._tensors += 1
        return entry

    def recipe(self, entries: list[Entry]) -> Recipe:
        """What is in line; the line is empty afterwards."""
        jobs, table, owners = self._take()
        whole = all(e.covers is None and not e.cuts for e in entries)
        frames = [e.frame for e in entries] if whole else None
        alike = whole and len({e.dtype.itemsize for e in entries}) == 1 and all(e.kept is None for e in entries)
        sketched = [sum(b - a for a, b in e.sketch) * min(e.dtype.itemsize, 8) for e in entries] if alike else None
        return Recipe(entries, frames, sketched, jobs, table, owners, self.slots, self.words, self.kept)

    def _order(self, entry: Entry, plans: dict[str, Plan], address: int) -> None:
        """Put the work of one tensor, or of a copied stretch of it, in line."""
        kind, lut = kind_of(entry.dtype) if entry.measured else (NONE, 0)
        for place, slot in enumerate(entry.slots):
            plan = plans.get("" if entry.covers is None else entry.covers[place].name)
            if plan is None:
                continue
            for offset, *shape, item, pitch in plan.spans:
                self._jobs.append((address + offset, *shape, slot, kind, lut, item, pitch))
                self._owners.append(self._tensors)
            for cut in plan.cuts:
                word, _ = self._fetch(np.array([cut.offset]), address, cut.size)
                entry.cuts.append((place, word, cut.at, cut.size))

    def _fetch(self, offsets: npt.NDArray[np.int64], address: int, size: int) -> tuple[int, int]:
        """Ask for the words at these offsets; says which words they will be."""
        self._fetches.append((offsets, address, size, self._tensors))
        first, self.words = self.words, self.words + len(offsets)
        return first, self.words

    def _copy(self, tensor: torch.Tensor, placement: Placement | None, entry: Entry, *, sketch: bool) -> None:
        item, buffer = tensor.element_size(), self._backend.buffer()
        self.copied = True
        self._start()  # the words are numbered in the order in which they are fetched
        positions = sketch_positions(tensor.numel()) * item
        tensor = carried(tensor)
        for view, start in views(tensor, BUFFER // item):
            count = view.numel()
            copy = buffer[: count * item].view(tensor.dtype)
            copy.view(view.shape).copy_(view)
            if placement is None:
                plans = {"": plan_window(start * item, count * item, entry.nbytes)}
                inside = positions[(positions >= start * item) & (positions < (start + count) * item)] - start * item
                if sketch and len(inside):
                    entry.sketch.append(self._fetch(in_words(inside, item), copy.data_ptr(), min(item, 8)))
            else:
                part = Placement((tensor.numel(),), placement.parts).flat(start, start + count)
                plans = plan_parts(part.parts, item)
            self._order(entry, plans, copy.data_ptr())
            self._start()  # before the buffer is used again

    def _start(self) -> None:
        jobs, table, _ = self._take()
        start(self._backend, jobs, table, self._base)

    def _take(self) -> tuple[Table, Table, tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]]:
        jobs = np.array(self._jobs, np.int64).reshape(-1, len(JOB))
        lengths = [len(f[0]) for f in self._fetches]
        table = np.empty((sum(lengths), 2), np.int64)
        if lengths:
            np.concatenate([f[0] for f in self._fetches], out=table[:, 0])
            table[:, 0] += np.repeat([f[1] for f in self._fetches], lengths)
            table[:, 1] = np.repeat([f[2] for f in self._fetches], lengths)
        owners = np.array(self._owners, np.int64), np.repeat([f[3] for f in self._fetches], lengths).astype(np.int64)
        self._jobs.clear()
        self._owners.clear()
        self._fetches.clear()
        return jobs, table, owners


def start(backend: Backend, jobs: Table, table: Table, base: int) -> None:
    """Start jobs [n, 12], whose slot 0 is slot `base`, and the gathering of words [m, 2]."""
    if len(jobs):
        backend.run(jobs, base)
    if len(table):
        backend.gather(table)


def _plans(tensor: torch.Tensor, placement: Placement | None, item: int) -> dict[str, Plan] | None:
    """How to read it where it lies; None where it must be copied together first."""
    if tensor.is_conj() or tensor.is_neg():
        return None
    if placement is not None:
        return plan_parts(placement.parts, item) if tensor.is_contiguous() else None
    if tensor.is_contiguous():
        nbytes = tensor.numel() * item
        return {"": plan_window(0, nbytes, nbytes)}
    plan = plan_view(tuple(tensor.shape), tensor.stride(), item)
    return None if plan is None else {"": plan}
