"""Many tensors at once: which backend reads each, what is read of it, and what comes of it."""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from repro_golden.base.canonical import xxh3_128_hexdigest
from repro_golden.fingerprint.backends import gpu
from repro_golden.fingerprint.backends.backend import Backend, Results
from repro_golden.fingerprint.backends.cpu import Cpu
from repro_golden.fingerprint.backends.gpu import stream_id
from repro_golden.fingerprint.definition import MASK, Lanes
from repro_golden.fingerprint.distributed import local_of
from repro_golden.fingerprint.in_flight import settle
from repro_golden.fingerprint.kinds import dtype_name
from repro_golden.fingerprint.placement import read
from repro_golden.fingerprint.recipe import Entry, Recipe, Work, recipes_of, start
from repro_golden.fingerprint.share import Edge, Share, complete
from repro_golden.fingerprint.views import Scan

__all__ = ["Batch", "Block", "Collector", "Pending", "backend_for", "gpu_ready"]


class _Lane:
    """One backend of a collector, and how much it has been asked for."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self.slots = self.words = self.kept = 0

    def advance(self, done: Recipe | Work) -> None:
        """Begin the next list's numbers after this one's."""
        self.slots += done.slots
        self.words += done.words
        self.kept += done.kept


@dataclass(slots=True)
class Batch:
    """Entries of one backend, and where their numbers begin; `recipe` is what they are all of, if they are."""

    lane: _Lane
    entries: list[Entry]
    recipe: Recipe | None
    slots: int
    words: int
    kept: int

    @classmethod
    def of(cls, lane: _Lane, recipe: Recipe) -> Batch:
        """The entries of a recipe that is being carried out."""
        return cls(lane, recipe.entries, recipe, lane.slots, lane.words, lane.kept)

    @property
    def frames(self) -> list[bytes] | None:
        """What each tensor's lanes are bound to; None unless every tensor is whole."""
        return self.recipe.frames if self.recipe else None


class Block(NamedTuple):
    """The scans of a list of whole tensors, together: [n] each, of `lanes` [n, 2].

    `sketches` are the bytes of all sketches, one after the other; `lengths` says how many each has.
    """

    lanes: npt.NDArray[np.uint64]
    nonfinite: npt.NDArray[np.int64]
    absmax: npt.NDArray[np.float64]
    l2: npt.NDArray[np.float64]
    sketches: bytes
    lengths: list[int]


class Pending:
    """Results that may still be on their way home."""

    def __init__(
        self, batches: list[Batch], waits: dict[int, tuple[Callable[[], bool], Callable[[], Results]]]
    ) -> None:
        self._batches, self._waits = batches, waits
        self._homes: dict[int, _Home] = {}  # of whole lanes

    def ready(self) -> bool:
        """Whether `result` would return at once."""
        return all(ready() for ready, _ in self._waits.values())

    def wait(self) -> None:
        """Wait until all 128-bit sums are on the host."""
        for _, wait in self._waits.values():
            wait()

    def result(self) -> list[list[Scan]]:
        """For each tensor, in the order added: its scan, or one for each canonical tensor it holds a part of."""
        return [scans for batch in self._batches for scans in self.scans(batch)]

    def block(self, batch: Batch) -> Block | None:
        """The scans of one call of `add`; None unless all its tensors were whole, of items of one size and not kept."""
        recipe = batch.recipe
        if recipe is None or recipe.sketched is None:
            return None
        results = self._waits[id(batch.lane)][1]()
        rows = slice(batch.slots, batch.slots + len(recipe.entries))
        item = min(recipe.entries[0].dtype.itemsize, 8)
        words = results.words[batch.words : batch.words + recipe.words].astype(f"<u{item}").tobytes()
        figures = (results.nonfinite[rows], results.absmax[rows], np.sqrt(results.squares[rows]))
        return Block(results.lanes[rows], *figures, words, recipe.sketched)

    def scans(self, batch: Batch) -> list[list[Scan]]:
        """What `result` has for one call of `add`."""
        home = self._home(batch)
        return [_scans(entry, batch, home) for entry in batch.entries]

    def _home(self, batch: Batch) -> _Home:
        """The numbers of a batch that a recipe is all of; of any other those of its whole lane, made once."""
        results = self._waits[id(batch.lane)][1]()
        if batch.recipe is not None:
            return _Home(results, batch.slots, batch.recipe.slots, batch.words, batch.recipe.words)
        home = self._homes.get(id(batch.lane))
        if home is None:
            home = self._homes[id(batch.lane)] = _Home(results, 0, len(results.lanes), 0, len(results.words))
        return home

    def fingerprints(self) -> list[str]:
        """For each tensor, in the order added, its fingerprint.

        Raises:
            ReproError: a tensor of which other processes hold parts.
        """
        out: list[str] = []
        digest = xxh3_128_hexdigest
        for batch in self._batches:
            results = self._waits[id(batch.lane)][1]()
            if batch.frames is not None:
                raw = results.lanes[batch.slots : batch.slots + len(batch.frames)].tobytes()
                out += [digest(f + raw[k : k + 16]) for f, k in zip(batch.frames, range(0, len(raw), 16), strict=True)]
                continue
            home = self._home(batch)
            for entry in batch.entries:
                first = _scans(entry, batch, home)[0]
                out.append(first.share.fingerprint if first.share else digest(entry.frame + first.lanes.to_bytes()))
        return out


class Collector:
    """Takes tensors of any device as they pass; `finish` brings all their results home in one copy per device.

    On a GPU nothing waits: kernels are put on the tensor's current stream, so what the stream does to the tensor
    afterwards comes too late to be seen. On the CPU all is read before `add` returns; where it lies in pinned memory,
    once the GPU has made all copies that it was asked for.
    """

    def __init__(self, *, statistics: bool = True) -> None:
        """Collect lanes, and with `statistics` also non-finite count, absmax, l2 and sketch."""
        self._statistics = statistics
        self._lanes: dict[tuple[torch.device, int], _Lane] = {}
        self._batches: list[Batch] = []

    def add(
        self, tensors: Sequence[torch.Tensor], placements: Sequence[object] | None = None, *, keep: bool = False
    ) -> Batch | None:
        """Read tensors of any dtype, shape, strides and device.

        Args:
            tensors: What to read.
            placements: For each, None or what `placement.read` takes. DTensors need none.
            keep: Also bring all their bytes home.

        Returns:
            What `Pending.block` takes; None where these tensors' results do not lie together.

        Raises:
            ReproError: a tensor without a content, or a placement that does not fit (see `distributed` and `plan`).
        """
        before = len(self._batches)
        how = (self._statistics, keep)
        recipes = recipes_of(len(tensors))
        recipe = recipes.find(tensors, how) if placements is None else None
        if recipe is None:
            recipe = self._read(tensors, placements or [None] * len(tensors), keep=keep)
            if recipe is not None and placements is None:
                recipes.put(tensors, how, recipe)
        elif recipe.entries:
            lane = self._lane(tensors[0].device)
            if lane.backend.device.type == "cpu":
                settle(tensors)
            for tensor in tensors if keep else ():
                lane.backend.keep(tensor)
            start(lane.backend, recipe.jobs, recipe.table, lane.slots)
            self._batches.append(Batch.of(lane, recipe))
            lane.advance(recipe)
        return self._batches[-1] if len(self._batches) == before + 1 else None

    def finish(self) -> Pending:
        """Start the way home. The collector is spent."""
        lanes = {id(lane): lane for lane in self._lanes.values()}
        return Pending(self._batches, {key: lane.backend.finish(lane.slots) for key, lane in lanes.items()})

    def _read(self, tensors: Sequence[torch.Tensor], placements: Sequence[object], *, keep: bool) -> Recipe | None:
        """Read a list for the first time; its recipe, if one backend reads all of it where it lies."""
        works: dict[int, tuple[_Lane, Work]] = {}
        entries: list[tuple[_Lane, Entry]] = []
        for tensor, placed in zip(tensors, placements, strict=True):
            local, placement = local_of(tensor)
            lane = self._lane(local.device)
            settle((local,))
            _, work = works.setdefault(id(lane), (lane, Work(lane.backend, lane.slots)))
            entry = work.add(local, placement if placed is None else read(placed), statistics=self._statistics,
                             sketch=self._statistics and not keep)  # fmt: skip
            if keep:
                lane.backend.keep(local)
                entry.kept, work.kept = work.kept, work.kept + 1
            entries.append((lane, entry))
        recipe = None
        for lane, work in works.values():
            recipe = work.recipe([entry for other, entry in entries if other is lane])
            start(lane.backend, recipe.jobs, recipe.table, lane.slots)
            if len(works) == 1:
                self._batches.append(Batch.of(lane, recipe))
        if len(works) > 1:  # in the order of the list
            self._batches += [Batch(lane, [entry], None, lane.slots, lane.words, lane.kept) for lane, entry in entries]
        for lane, work in works.values():
            lane.advance(work)
        return recipe if len(works) == 1 and not work.copied else None

    def _lane(self, device: torch.device) -> _Lane:
        """The backend of a device; on a GPU that of the current stream."""
        stream = stream_id(device)
        lane = self._lanes.get((device, stream))
        if lane is None:
            backend = backend_for(device)
            home = (backend.device, stream if backend.device == device else 0)
            lane = self._lanes[device, stream] = self._lanes.get(home) or _Lane(backend)
        return lane


class _Home:
    """Results as Python's numbers and bytes: those of some slots and words in a row."""

    def __init__(self, results: Results, slot: int, slots: int, word: int, words: int) -> None:
        figures = (results.lanes, results.nonfinite, results.absmax, results.squares)
        columns = (figure[slot : slot + slots].tolist() for figure in figures)
        self._slots: list[tuple[list[int], int, float, float]] = list(zip(*columns, strict=True))
        self._slot, self._word = slot, word
        self._words = results.words[word : word + words]
        self._packed: dict[int, bytes] = {}
        self.kept = results.kept

    def slot(self, number: int) -> tuple[list[int], int, float, float]:
        """Both lanes, non-finite count, absmax and sum of squares."""
        return self._slots[number - self._slot]

    def words(self, begin: int, end: int, item: int) -> bytes:
        """Gathered words as elements of `item` bytes; those of more than 8 were gathered in parts."""
        item = min(item, 8)
        if item not in self._packed:
            self._packed[item] = self._words.astype(f"<u{item}").tobytes()
        return self._packed[item][(begin - self._word) * item : (end - self._word) * item]


def _scans(entry: Entry, batch: Batch, home: _Home) -> list[Scan]:
    """The scans of one tensor."""
    values = None if entry.kept is None else home.kept[batch.kept + entry.kept]
    edges: dict[int, list[Edge]] = {}
    for place, word, at, size in entry.cuts:
        raw = home.words(batch.words + word, batch.words + word + 1, 8)[:size]
        edges.setdefault(place, []).append(Edge(at, raw))
    out = []
    for place, own_slot in enumerate(entry.slots):
        lanes, bad, top, squares = home.slot(batch.slots + own_slot)
        total = Lanes(*lanes)
        left: tuple[Edge, ...] = ()
        cover = None if entry.covers is None else entry.covers[place]
        if place in edges:
            more, left = complete(entry.nbytes if cover is None else cover.nbytes, edges[place])
            total = Lanes((total.a + more.a) & MASK, (total.b + more.b) & MASK)
            if entry.measured:
                edge_scan = _edge_scan(edges[place], entry.dtype)
                bad, top, squares = bad + edge_scan.nonfinite, max(top, edge_scan.absmax), squares + edge_scan.l2**2
        sketch = b""
        if cover is None and entry.sketch:
            item, first = entry.dtype.itemsize, batch.words
            sketch = b"".join([home.words(first + a, first + b, item) for a, b in entry.sketch])
        scan = Scan(total, bad, top, math.sqrt(squares), sketch, values)
        if cover is not None:
            scan.name = cover.name
            scan.share = Share(dtype_name(entry.dtype), cover.shape, cover.nbytes, total, cover.runs, left)
        out.append(scan)
    return out


def _edge_scan(edges: list[Edge], dtype: torch.dtype) -> Scan:
    """The statistics of the elements that lie in words cut in two."""
    raw = bytearray(b"".join(e.raw for e in edges))
    collector = Collector()
    collector.add([torch.frombuffer(raw, dtype=torch.uint8).view(dtype)])
    return collector.finish().result()[0][0]


@functools.cache
def gpu_ready(device: torch.device) -> bool:
    """Whether Triton works here; where it does not, one warning says why and the CPU path serves."""
    try:
        gpu.check(device)
    except Exception as error:  # noqa: BLE001 - Triton, the driver and the compiler fail in many ways
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        warnings.warn(f"fingerprints of {device} tensors are made on the CPU ({reason})", RuntimeWarning, stacklevel=2)
        return False
    return True


def backend_for(device: torch.device) -> Backend:
    """The backend that reads tensors of `device` where they lie; the CPU for those of devices without one."""
    if device.type == "cuda" and gpu_ready(device):
        return gpu.Gpu(device)
    return Cpu()
