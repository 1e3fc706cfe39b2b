"""What `collector` does, in torch alone: the same bits, more slowly, where a program's environment lacks NumPy.

Tensors pass through the CPU in stretches so short that torch carries them out in one thread: nothing depends on how
many threads the program has. l2 may differ in its last bits from that of other backends, as theirs from each other's.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

from repro_golden.base.errors import ReproError
from repro_golden.fingerprint.definition import C1, C2, C3, C4, MASK, Lanes, add
from repro_golden.fingerprint.distributed import local_of
from repro_golden.fingerprint.in_flight import settle
from repro_golden.fingerprint.kinds import BYTES, NUMBERS, dtype_name, kind_of, lut
from repro_golden.fingerprint.placement import Placement, read
from repro_golden.fingerprint.plan import Plan, Span, fitting, plan_parts, plan_window
from repro_golden.fingerprint.share import Edge, Share, complete
from repro_golden.fingerprint.views import Scan, carried, sketch_places, views

__all__ = ["PlainCollector", "PlainPending"]

_AT_ONCE = 1 << 14
"""Numbers that one call of torch takes: half of those from which on it starts threads."""
_WINDOW = 8 * _AT_ONCE
"""Bytes of a tensor that are read at a time."""


class PlainPending:
    """See `collector.Pending`: everything is there."""

    def __init__(self, scans: list[list[Scan]]) -> None:
        self._scans = scans

    def ready(self) -> bool:
        """Yes."""
        return True

    def result(self) -> list[list[Scan]]:
        """For each tensor, in the order added: its scan, or one for each canonical tensor it holds a part of."""
        return self._scans

    def block(self, batch: object) -> None:
        """There are none."""

    def scans(self, batch: object) -> None:
        """Nor are there batches."""


class PlainCollector:
    """See `collector.Collector`, with statistics. All is read before `add` returns, from a GPU too."""

    def __init__(self) -> None:
        self._scans: list[list[Scan]] = []

    def add(
        self, tensors: Sequence[torch.Tensor], placements: Sequence[object] | None = None, *, keep: bool = False
    ) -> None:
        """Read tensors; see `collector.Collector.add`.

        Raises:
            ReproError: a tensor without a content, or a placement that does not fit.
        """
        for tensor, placed in zip(tensors, placements or [None] * len(tensors), strict=True):
            local, placement = local_of(tensor)
            if local.is_cuda and torch.cuda.is_current_stream_capturing():
                raise ReproError(
                    "tensors cannot be observed while a CUDA graph is captured: observe before or after it"
                )
            settle((local,))
            self._scans.append(_scans(local, placement if placed is None else read(placed), keep=keep))

    def finish(self) -> PlainPending:
        """The results. The collector is spent."""
        return PlainPending(self._scans)


@dataclass(slots=True)
class _Sums:
    """What is known so far of one canonical tensor."""

    dtype: torch.dtype
    lanes: Lanes = field(default_factory=lambda: Lanes(0, 0))
    nonfinite: int = 0
    absmax: float = 0.0
    squares: float = 0.0
    edges: list[Edge] = field(default_factory=list)

    def take(self, raw: torch.Tensor, plan: Plan) -> None:
        """Add what `plan` says of a stretch of bytes, uint8 [n]."""
        for span in plan.spans:
            stop = span.offset + span.words * 8
            if span.words:
                words = _words(raw, span)
                self.lanes = add([self.lanes, _mixed(words, span.first, span.step)])
                self._measure(words.reshape(-1))
            if span.tail:
                self.edges.append(Edge((span.first + span.words) * 8, _bytes(raw[stop : stop + span.tail])))
        self.edges += [Edge(cut.at, _bytes(raw[cut.offset : cut.offset + cut.size])) for cut in plan.cuts]

    def scan(self, nbytes: int) -> tuple[Scan, tuple[Edge, ...]]:
        """All that is known, and the bytes that are left of words that are not whole here."""
        if self.edges:
            self._measure(torch.frombuffer(bytearray(b"".join([edge.raw for edge in self.edges])), dtype=torch.uint8))
        more, left = complete(nbytes, self.edges)
        lanes = add([self.lanes, more])
        return Scan(lanes, self.nonfinite, self.absmax, math.sqrt(self.squares), b""), left

    def _measure(self, raw: torch.Tensor) -> None:
        kind, _ = kind_of(self.dtype)
        parts = torch.split(raw.view(NUMBERS[kind]), _AT_ONCE)
        if kind == BYTES:
            counts = torch.stack([torch.bincount(part, minlength=256) for part in parts]).sum(0)
            there = lut(self.dtype)[counts > 0]
            self._figures(there[:, 0], there[:, 1], counts[counts > 0])
            return
        for part in parts:
            magnitudes = part.to(torch.float64).abs()  # not in place: it may be the program's own memory
            self._figures(magnitudes, magnitudes.square(), None)

    def _figures(self, magnitudes: torch.Tensor, squares: torch.Tensor, counts: torch.Tensor | None) -> None:
        """Add numbers with these magnitudes, each as often as `counts` says."""
        if counts is not None:
            squares = squares * counts
        odd = ~(magnitudes < math.inf)  # NaN is not less
        nonfinite = int((odd if counts is None else odd * counts).sum())
        if nonfinite:
            magnitudes, squares = magnitudes.masked_fill(odd, 0), squares.masked_fill(odd, 0)
        self.nonfinite += nonfinite
        self.absmax = max(self.absmax, float(magnitudes.max()))
        self.squares += float(squares.sum())


def _scans(tensor: torch.Tensor, placement: Placement | None, *, keep: bool) -> list[Scan]:
    """The scans of one plain tensor."""
    item, count = tensor.element_size(), tensor.numel()
    covers = (None,) if placement is None else fitting(placement, tuple(tensor.shape), item)
    sums = {"" if cover is None else cover.name: _Sums(tensor.dtype) for cover in covers}
    places = sketch_places(count) if placement is None and not keep else ()
    sketch, values = [], []
    for raw, start in _windows(tensor):
        stop = start + len(raw) // item
        for name, plan in _plans(placement, count, item, start, stop).items():
            sums[name].take(raw, plan)
        sketch += [_bytes(raw[(p - start) * item : (p - start + 1) * item]) for p in places if start <= p < stop]
        if keep:
            values.append(_bytes(raw))
    scans = []
    for cover, total in zip(covers, sums.values(), strict=True):
        scan, left = total.scan(count * item if cover is None else cover.nbytes)
        scan.sketch, scan.values = b"".join(sketch), b"".join(values) if keep else None
        if cover is not None:
            scan.name = cover.name
            scan.share = Share(dtype_name(tensor.dtype), cover.shape, cover.nbytes, scan.lanes, cover.runs, left)
        scans.append(scan)
    return scans


def _windows(tensor: torch.Tensor) -> Iterator[tuple[torch.Tensor, int]]:
    """Stretches of a tensor's row-major bytes, uint8 [n] on the CPU, and the element that each begins with."""
    source, item = carried(tensor), tensor.element_size()
    if source.is_cpu and source.is_contiguous() and not source.is_conj() and not source.is_neg():
        raw = source.as_strided((source.numel(),), (1,)).view(torch.uint8)  # of one element any stride is contiguous
        for at in range(0, len(raw), _WINDOW):
            yield raw[at : at + _WINDOW], at // item
        return
    if source.is_contiguous():
        source = source.view(-1)
    for view, start in views(source, min(_WINDOW // item, 2 * _AT_ONCE)):
        copy = torch.empty(view.shape, dtype=view.dtype, device="cpu").copy_(view)
        yield copy.view(-1).view(torch.uint8), start


def _plans(placement: Placement | None, count: int, item: int, start: int, stop: int) -> dict[str, Plan]:
    """What is to be done with the elements ``[start, stop)``. Not kept: there are as many plans as windows."""
    if placement is None:
        return {"": plan_window.__wrapped__(start * item, (stop - start) * item, count * item)}
    return plan_parts.__wrapped__(Placement((count,), placement.parts).flat(start, stop).parts, item)


def _bytes(raw: torch.Tensor) -> bytes:
    """A contiguous uint8 tensor's bytes: torch hands them out through NumPy alone."""
    return ctypes.string_at(raw.data_ptr(), len(raw))


def _words(raw: torch.Tensor, span: Span) -> torch.Tensor:
    """The words of a span, int64 [rows, words]."""
    rows = raw[span.offset :].as_strided((span.rows, span.words * 8), (span.stride, 1))
    if rows.storage_offset() % 8 or rows.data_ptr() % 8 or span.stride % 8:
        rows = rows.clone(memory_format=torch.contiguous_format)
    return rows.view(torch.int64)


def _mixed(words: torch.Tensor, first: int, step: int) -> Lanes:
    """The lanes of words, int64 [rows, words]: rows begin at word `first` and every `step` further."""
    rows, columns = (torch.arange(n, device="cpu") for n in words.shape)
    rows.mul_(_signed(step * C1)).add_(_signed((first + 1) * C1))
    keys = columns.mul_(_signed(C1)) + rows[:, None]
    z = words ^ keys
    _fold(z, 33).mul_(_signed(C2))
    _fold(z, 29).mul_(_signed(C3))
    _fold(z, 32)
    b = keys.bitwise_xor_(z).mul_(_signed(C4))
    a = z.mul_(_signed(C1))
    return Lanes(int(_fold(a, 32).sum()) & MASK, int(_fold(b, 32).sum()) & MASK)


def _fold(z: torch.Tensor, shift: int) -> torch.Tensor:
    """``z ^ (z >> shift)`` of words without a sign, in place: torch's own shift repeats the sign."""
    return z.bitwise_xor_((z >> shift).bitwise_and_(MASK >> shift))


def _signed(value: int) -> int:
    """The int64 with the same bits modulo 2^64: torch's products wrap, its arguments may not."""
    value &= MASK
    return value - (1 << 64) if value >> 63 else value
