"""The GPU's backend: kernels on the tensor's own stream, results that stay on the device, one pinned copy home.

Its memory comes from a pool of its own and is used again for every step, so the trainer's allocator never sees it.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from repro_golden.base.errors import ReproError
from repro_golden.fingerprint.backends.backend import BUFFER, Order, Results, Run, Table, split
from repro_golden.fingerprint.definition import C1, MASK, reference
from repro_golden.fingerprint.kinds import BF16, F16, F32, NONE, luts
from repro_golden.fingerprint.views import carried

__all__ = ["Gpu", "check", "own_memory", "stream_id"]

_PIECE = 1 << 15  # words (256 KiB) that one program takes
_BLOCK = 256  # words
_ROW = 1 << 11  # a row of so many words is a piece by itself
_REGISTERS = {F32: 40, BF16: 48, F16: 48}
_KEPT, _BYTES = 256, 24 << 20  # tables of jobs, and of words, that stay on the device, and their bytes
_TURNS = 6  # those of the last turns stay also beyond that: a step is one, and each file and number that it brings late
_MOST = 4  # times as many in any case, for what is asked for may never be read
_ROOM = 1 << 16  # results that a step's chunk holds at first


class Shape(NamedTuple):
    """How a program works."""

    block: int  # words at a time
    unroll: int  # blocks in flight
    warps: int
    registers: int | None  # at most: with more of them fewer programs run at once
    ptx: bool  # as in `_triton.pieces`


def shape(kind: int, rows: int, ptx: bool) -> Shape:
    """For a kind of numbers, in a stretch or in rows; `ptx`: the device has what `_triton.pieces` writes out."""
    ptx = ptx and kind != NONE  # without statistics memory is the bound, and odd starts were slower with it
    if rows:
        return Shape(_BLOCK, 2, 4, None, ptx)
    if kind == NONE:
        return Shape(_BLOCK, 16, 4, None, ptx)
    return Shape(_BLOCK // 2, 8, 4, _REGISTERS.get(kind) if ptx else None, ptx)


class _Chunk:
    """Room for results: int64 [size] on the device and, pinned, on the host."""

    def __init__(self, device: torch.device, size: int) -> None:
        with own_memory(device):
            self.device = torch.empty(size, dtype=torch.int64, device=device)
            self.host = torch.empty(size, dtype=torch.int64, device="cpu", pin_memory=device.type == "cuda")
        self.used = 0


_Made = TypeVar("_Made")


class _Look(NamedTuple):
    """What the kernel is compiled for."""

    kind: int
    rows: int  # whether of rows
    aligned: int  # bytes
    item: int  # see `plan.Span`
    across: int  # whether elements of several rows are neighbours rather than those of one


class _Prepared(NamedTuple):
    table: torch.Tensor
    pieces: int
    order: Order
    launches: list[tuple[int, int, _Look]]  # begin and end
    width: int  # results of a piece


class _Tables(Generic[_Made]):
    """What lies on the device for the last tables that were asked for: a step asks for most of the one before's again.

    Args:
        make: Puts a table on the device.
        size: Bytes on the device of what it made.
    """

    def __init__(self, make: Callable[[Table], _Made], size: Callable[[_Made], int]) -> None:
        self._make, self._size = make, size
        self._kept: OrderedDict[bytes, tuple[_Made, int]] = OrderedDict()  # and the turn that asked for it last
        self._bytes = self._turn = 0

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._kept)

    def of(self, table: Table) -> _Made:
        """What was made of a table with this content."""
        key = table.tobytes()
        made, _ = self._kept.pop(key, (None, 0))
        if made is None:
            made = self._make(table)
            self._bytes += self._size(made)
        self._kept[key] = made, self._turn
        self._drop(_MOST)
        return made

    def read(self) -> None:
        """Results are read: what the last turns did not ask for goes, the oldest first, where there is too much."""
        self._turn += 1
        self._drop(1, before=self._turn - _TURNS)

    def _drop(self, times: int, before: float = math.inf) -> None:
        """Let the oldest go as long as there is so many times too much, of those that were asked for before a turn."""
        while len(self._kept) > times * _KEPT or (self._bytes > times * _BYTES and len(self._kept) > 1):
            key, (made, last) = next(iter(self._kept.items()))
            if last >= before:
                break
            self._bytes -= self._size(made)  # kernels in flight read it in stream order, so its memory may go now
            del self._kept[key]


class _Memory:
    """What the backends of one stream and one thread share: all they do with it happens in one order."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.free: list[_Chunk] = []
        self._size = _ROOM
        self.prepared = _Tables(self._prepare, lambda ready: ready.table.nbytes)
        self.fetched = _Tables(self.upload, lambda table: table.nbytes)
        self.compiled: dict[object, Any] = {}
        self.ptx = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
        self.bounce: torch.Tensor | None = None
        self._luts: torch.Tensor | None = None

    def chunk(self, words: int) -> _Chunk:
        """A chunk with room for at least `words`."""
        self._size = max(self._size, 1 << (words - 1).bit_length())
        while self.free:
            if len((chunk := self.free.pop()).host) >= self._size:
                return chunk
        return _Chunk(self.device, self._size)

    def take_back(self, chunks: list[_Chunk]) -> None:
        """Chunks of a step that is read. One that needed several gets a chunk for all the next time: one copy home."""
        self._size = max(self._size, 1 << (sum(c.used for c in chunks) - 1).bit_length() if chunks else 0)
        self.free += chunks
        self.prepared.read()
        self.fetched.read()

    def _prepare(self, jobs: Table) -> _Prepared:
        """Jobs as pieces on the device."""
        pieces = split(jobs, _PIECE, _ROW)
        looks = _looks(pieces)
        order = np.lexsort(looks.T)
        pieces, looks = pieces[order], looks[order]
        bounds = [0, *(np.flatnonzero(np.any(np.diff(looks, axis=0), axis=1)) + 1).tolist(), len(pieces)]
        launches = [(a, b, _Look(*looks[a].tolist())) for a, b in itertools.pairwise(bounds)]
        width = 5 if np.any(pieces[:, 8]) else 2
        return _Prepared(self.upload(pieces), len(pieces), Order.of(pieces[:, 7]), launches, width)

    def upload(self, table: npt.NDArray[np.generic]) -> torch.Tensor:
        """The table on the device."""
        with own_memory(self.device):
            host = torch.from_numpy(np.ascontiguousarray(table))
            return host.pin_memory().to(self.device, non_blocking=True) if self.device.type == "cuda" else host.clone()

    def tables(self) -> torch.Tensor:
        """`kinds.luts` on the device."""
        tables = luts()
        if self._luts is None or len(self._luts) != len(tables):
            self._luts = self.upload(tables)
        return self._luts


def _looks(pieces: Table) -> Table:
    """The `_Look` of each piece, [n, 5]."""
    address, rows, stride, kind, item, pitch = pieces[:, [0, 1, 3, 8, 10, 11]].T
    scattered, several = item > 0, rows != 1
    begins = address | np.where(several, stride, 0)
    aligned = np.where(scattered | (begins % 8 > 0), 1, np.where(begins % 16 > 0, 8, 16))
    return np.stack([kind, scattered | several, aligned, item, scattered & several & (stride < pitch)], axis=1)


@functools.cache
def _memory(device: torch.device, stream: int, thread: int) -> _Memory:
    del stream, thread
    return _Memory(device)


@functools.cache
def _pool(device: torch.device) -> torch.cuda.MemPool:
    del device
    return torch.cuda.MemPool()


@contextlib.contextmanager
def own_memory(device: torch.device) -> Iterator[None]:
    """A block whose memory on a device comes from a pool that the program's allocator does not see."""
    if device.type == "cuda":
        with torch.cuda.device(device), torch.cuda.use_mem_pool(_pool(device)):
            yield
    else:
        yield


class Gpu:
    """See `backends.Backend`; for the stream that is current when it is made.

    Under Triton's interpreter it takes CPU tensors: so its kernels are tested anywhere.
    """

    def __init__(self, device: torch.device) -> None:
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise ReproError("tensors cannot be observed while a CUDA graph is captured: observe before or after it")
        self.device = device
        self._stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
        self._memory = _memory(device, self._stream.cuda_stream if self._stream else 0, threading.get_ident())
        self._chunks: list[_Chunk] = []
        self._runs: list[tuple[_Chunk, int, _Prepared, int]] = []
        self._words: list[tuple[_Chunk, int, int]] = []
        self._kept: list[tuple[_Chunk, int, int]] = []

    def buffer(self) -> torch.Tensor:
        """uint8 [BUFFER]; see `backends.Backend`."""
        if self._memory.bounce is None:
            with own_memory(self.device):
                self._memory.bounce = torch.empty(BUFFER, dtype=torch.uint8, device=self.device)
        return self._memory.bounce

    def run(self, jobs: Table, base: int) -> None:
        """Launch: one kernel for each kind of job and each way in which its bytes lie."""
        from repro_golden.fingerprint.backends import _triton

        ready = self._memory.prepared.of(jobs)
        tables = self._memory.tables()
        chunk, at = self._room(ready.pieces * ready.width)
        for begin, end, look in ready.launches:
            of = shape(look.kind, look.rows, self._memory.ptx)
            options = {"num_warps": of.warps} | ({"maxnreg": of.registers} if of.registers else {})
            self._launch(_triton.pieces, end - begin, ready.table, chunk.device[at:], tables, begin, options=options,
                         KIND=look.kind, WIDTH=ready.width, ROWS=look.rows, ALIGNED=look.aligned, ITEM=look.item,
                         ACROSS=look.across, PTX=of.ptx,
                         BLOCK=of.block, UNROLL=of.unroll, STEP=_step(of.block))  # fmt: skip
        self._runs.append((chunk, at, ready, base))

    def gather(self, table: Table) -> None:
        """Launch the fetching of words; see `backends.Backend`."""
        from repro_golden.fingerprint.backends import _triton

        chunk, at = self._room(len(table))
        block = 256
        fetched = self._memory.fetched.of(table)
        self._launch(_triton.gather, -(-len(table) // block), fetched, chunk.device[at:], len(table),
                     options={"num_warps": 4}, BLOCK=block)  # fmt: skip
        self._words.append((chunk, at, len(table)))

    def keep(self, tensor: torch.Tensor) -> None:
        """Copy a tensor's bytes beside the results."""
        size = tensor.numel() * tensor.element_size()
        chunk, at = self._room(-(-size // 8) or 1)
        target = chunk.device[at:].view(torch.uint8)[:size]
        if size:
            tensor = carried(tensor)
            target.view(tensor.dtype).view(tensor.shape).copy_(tensor)
        self._kept.append((chunk, at, size))

    def finish(self, slots: int) -> tuple[Callable[[], bool], Callable[[], Results]]:
        """Start the copy home: one for all results, unless a step outgrew its chunk."""
        away = self._stream is not None and stream_id(self.device) != self._stream.cuda_stream
        event = None
        with torch.cuda.stream(self._stream) if away else contextlib.nullcontext():
            for chunk in self._chunks:
                chunk.host[: chunk.used].copy_(chunk.device[: chunk.used], non_blocking=True)
            if self._stream is not None:
                event = torch.cuda.Event()  # type: ignore[no-untyped-call]
                event.record(self._stream)
        results: list[Results] = []

        def ready() -> bool:
            return bool(results) or event is None or event.query()  # type: ignore[no-untyped-call]

        def wait() -> Results:
            if not results:
                if event is not None:
                    event.synchronize()
                results.append(self._read(slots))
            return results[0]

        return ready, wait

    def _read(self, slots: int) -> Results:
        runs: list[Run] = []
        for chunk, at, ready, base in self._runs:
            rows = chunk.host[at : at + ready.pieces * ready.width].numpy().reshape(-1, ready.width)
            figures = None
            if ready.width == 5:
                figures = rows[:, 2], rows[:, 3].view(np.float64), rows[:, 4].view(np.float64)
            runs.append((ready.order, base, rows[:, :2].view(np.uint64), figures))
        words = [c.host[at : at + n].numpy().view(np.uint64) for c, at, n in self._words]
        contents = [c.host[at:].numpy().view(np.uint8)[:n].tobytes() for c, at, n in self._kept]
        results = Results.of(slots, runs, np.concatenate([np.empty(0, np.uint64), *words]), contents)
        self._memory.take_back(self._chunks)
        self._chunks, self._runs, self._words, self._kept = [], [], [], []
        return results

    def _room(self, words: int) -> tuple[_Chunk, int]:
        """Where `words` results go, at a multiple of 16 bytes."""
        words += words % 2
        if not self._chunks or self._chunks[-1].used + words > len(self._chunks[-1].host):
            self._chunks.append(self._memory.chunk(words))
            self._chunks[-1].used = 0
        chunk = self._chunks[-1]
        at, chunk.used = chunk.used, chunk.used + words
        return chunk, at

    def _launch(
        self, kernel: Any, programs: int, *arguments: object, options: dict[str, int], **constants: object
    ) -> None:
        key = (kernel, *constants.values())
        compiled = self._memory.compiled.get(key)
        with _current(self.device):
            if compiled is not None:  # arguments need no inspection: they are always alike
                compiled[(programs, 1, 1)](*arguments, *constants.values())
            else:
                self._memory.compiled[key] = kernel[(programs,)](*arguments, **constants, **options)


def _current(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """The device as the current one."""
    if device.type != "cuda" or torch.cuda.current_device() == device.index:
        return contextlib.nullcontext()
    return torch.cuda.device(device)


def stream_id(device: torch.device) -> int:
    """Which stream of the device work is put on now."""
    return torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0


def _step(block: int) -> int:
    """What the key of a word and that of the word a block further differ by, as a signed number."""
    value = block * C1 & MASK
    return value - (1 << 64) if value >> 63 else value


def check(device: torch.device) -> None:
    """Try the kernels on a small tensor; an exception says why they do not serve here."""
    if torch.version.hip is not None:
        raise RuntimeError("ROCm is not tried")
    gpu = Gpu(device)
    tensor = torch.arange(77, dtype=torch.uint8, device=device)
    at = tensor.data_ptr()
    gpu.run(np.array([[at, 1, 9, 0, 0, 0, 5, 0, *[0] * 4], [at + 3, 1, 9, 0, 0, 0, 2, 1, *[0] * 4]]), 0)
    lanes = gpu.finish(2)[1]().lanes.tolist()
    raw = bytes(range(77))
    if lanes != [list(reference(raw)), list(reference(raw[3:]))]:
        raise RuntimeError("the kernels disagree with the reference")
