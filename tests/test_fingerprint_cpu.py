"""Fingerprints on the CPU: the same with any threads, in forks, of very large tensors, in bounded memory."""

from __future__ import annotations

import itertools
import math
import os
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from view_kit import CUDA, in_a_cold_process

from repro_golden.fingerprint import Lanes, add, fingerprint, merge, reference, scan, shares
from repro_golden.fingerprint.backends import _numba, cpu
from repro_golden.fingerprint.backends import backend as backends
from repro_golden.fingerprint.backends.cpu import Cpu
from repro_golden.fingerprint.collector import backend_for
from repro_golden.fingerprint.kinds import kind_of, luts
from repro_golden.fingerprint.placement import box

torch.set_num_threads(1)

M = (1 << 64) - 1
LARGE = (1 << 31) + (1 << 22) + 5


def less(a: Lanes, b: Lanes) -> Lanes:
    return Lanes((a.a - b.a) & M, (a.b - b.b) & M)


# -- work and threads


@st.composite
def jobs(draw: st.DrawFn) -> list[int]:
    """A job over 4 KiB: one stretch with a tail, or several rows that may overlap, or rows of scattered elements."""
    rows = draw(st.integers(1, 7))
    words, tail = draw(st.integers(0 if rows == 1 else 1, 60)), draw(st.integers(0, 7)) if rows == 1 else 0
    offset, stride = draw(st.integers(0, 99)), draw(st.integers(0, 500))
    first, step = draw(st.integers(0, 2**40)), draw(st.integers(0, 99))
    item, pitch = draw(st.sampled_from([(0, 0), *itertools.product((1, 2, 4, 8), (0, 1, 2, 6, 9))]))
    if item:
        words, tail, stride = words % 30, 0, stride % 9
    slot = draw(st.integers(0, 3))
    return [offset, rows, words, stride, first, step, tail, slot, *kind_of(torch.uint8), item, pitch]


def words_of(job: list[int]) -> list[tuple[list[int], int, int, int]]:
    """Addresses of its parts, their bytes, index and slot of each word that a job reads."""
    address, rows, words, stride, first, step, tail, slot, *_, item, pitch = job
    item, pitch = (item, pitch) if item else (8, 8)
    read = []
    for r, w in itertools.product(range(rows), range(words)):
        parts = [address + r * stride + k * pitch for k in range(8 // item * w, 8 // item * (w + 1))]
        read.append((parts, item, first + r * step + w, slot))
    return read + [([address + 8 * words], tail, first + words, slot)] * (tail > 0)


def carried_out(table: backends.Table, content: np.ndarray) -> list[list[float]]:
    """Lanes, non-finite count, absmax and sum of squares of each of 4 slots."""
    table = table.copy()
    table[:, 0] += content.ctypes.data
    sums, stats = np.zeros((len(table), 2), np.uint64), np.zeros((len(table), 3))
    _numba.run(table, luts(), sums, stats)
    slots = [table[:, 7] == slot for slot in range(4)]
    lanes = [sums[mask].sum(0, dtype=np.uint64).tolist() for mask in slots]
    return [[*lanes[k], *stats[slots[k]][:, [0, 2]].sum(0), max(stats[slots[k], 1], default=0)] for k in range(4)]


@given(st.lists(jobs(), min_size=1, max_size=5), st.integers(1, 70))
def test_split_work_is_the_same_work(given: list[list[int]], piece: int) -> None:
    """Pieces are within the limit, read the same words as the same indices, and have the same sums and figures."""
    table = np.array(given, np.int64)
    pieces = backends.split(table, piece)
    assert (pieces[:, 1] * pieces[:, 2] <= piece).all()
    before, after = ([word for job in t.tolist() for word in words_of(job)] for t in (table, pieces))
    assert sorted(before) == sorted(after)
    content = np.random.default_rng(piece).integers(0, 256, 4096, np.uint8)
    assert carried_out(table, content) == carried_out(pieces, content)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_scattered_elements_are_read_where_they_lie(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Transposed, permuted, expanded and skipping views of several pieces are read without a copy, and as one."""
    x = torch.randn(5, 800, 720, generator=torch.Generator().manual_seed(1)).mul(9).to(dtype)
    views = [x[0].T, x.permute(2, 0, 1), x.permute(0, 2, 1), x[:, :, ::2], x[0, :, :1].expand(800, 720), x[..., 5]]
    copies = [scan(v.clone(memory_format=torch.contiguous_format)) for v in views]
    monkeypatch.setattr(Cpu, "buffer", lambda _: pytest.fail("copied"))
    for read, copied in zip(map(scan, views), copies, strict=True):
        assert math.isclose(read.l2, copied.l2, rel_tol=1e-12)
        read.l2 = copied.l2  # of which the order of the sum is another
        assert read == copied


def test_threads_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every bit of a scan, the last of l2 too, is the same with any number of threads."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(1500, 1601, generator=generator) * 1e3
    tensors = [x, x.T, x[:, 1:], x.bfloat16(), x.double(), x.to(torch.float8_e4m3fn)]
    monkeypatch.setattr(cpu, "threads_of_this_process", lambda: 1)
    expected = [scan(t) for t in tensors]
    for threads in (2, 3, 8):
        monkeypatch.setattr(cpu, "threads_of_this_process", lambda n=threads: n)
        assert [scan(t) for t in tensors] == expected


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="cores cannot be assigned on this system")
def test_cores_are_shared_between_the_ranks_of_a_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process uses the cores it may run on, divided by the ranks that its launcher started, and at least one."""
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    cores = os.sched_getaffinity(0)
    assert cpu.threads_of_this_process() == len(cores)
    for ranks, threads in [("2", max(1, len(cores) // 2)), ("100000", 1), ("0", len(cores)), ("?", len(cores))]:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
        assert cpu.threads_of_this_process() == threads
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    try:
        os.sched_setaffinity(0, {min(cores)})
        assert cpu.threads_of_this_process() == 1
    finally:
        os.sched_setaffinity(0, cores)


def test_threads_that_fingerprint_at_once_do_not_meet() -> None:
    """Threads of a trainer may fingerprint at the same time, also tensors that are copied together first."""
    generator = torch.Generator().manual_seed(1)
    tensors = [torch.randn(1001, 1600, generator=generator).T for _ in range(8)]
    expected = [fingerprint(t) for t in tensors]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(fingerprint, tensors * 3)) == expected * 3


def test_a_forked_process_has_threads_of_its_own() -> None:
    """After its parent has used threads, a forked child fingerprints large tensors, and so does the parent."""
    out = in_a_cold_process("""
        import faulthandler, os, torch
        from repro_golden.fingerprint import fingerprint
        from repro_golden.fingerprint.backends import cpu
        cpu.threads_of_this_process = lambda: 3
        x = torch.arange(2_000_000, dtype=torch.float64).reshape(1000, 2000)
        expected = [fingerprint(x), fingerprint(x.T)]
        child = os.fork()
        if not child:
            faulthandler.dump_traceback_later(60, exit=True)
            torch.set_num_threads(1)  # as a DataLoader's workers do: torch's own threads are lost in a fork
        assert [fingerprint(x), fingerprint(x.T)] == expected
        if not child:
            os._exit(7)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    """)
    assert out == "7\n"


def test_a_large_tensor_has_its_fingerprint_while_python_ends() -> None:
    """At exit no pool of threads takes work any more, and a recorder still reads what the program leaves behind."""
    out = in_a_cold_process("""
        import atexit, torch
        from repro_golden.fingerprint import fingerprint
        from repro_golden.fingerprint.backends import cpu
        cpu.threads_of_this_process = lambda: 3
        x = torch.arange(2_000_000, dtype=torch.float64)
        expected = fingerprint(x)
        atexit.register(lambda: print(fingerprint(x) == expected))
    """)
    assert out == "True\n"


# -- size


def test_more_than_2_31_elements() -> None:
    """In a tensor of more than 2^31 elements, every byte counts as its word at its place."""
    content = np.zeros(LARGE, np.uint8)  # pages of zeros that take no memory
    t = torch.from_numpy(content)
    zeros, changed = shares(t)[""].lanes, {0: 1, 9: 2, (1 << 31) - 1: 3, 1 << 31: 4, LARGE - 1: 255}
    content[list(changed)] = list(changed.values())
    words = {w: content[w * 8 :][:8].tobytes() for w in {at // 8 for at in changed}}
    expected = [less(reference(raw, w), reference(bytes(8), w)) for w, raw in words.items()]
    scanned = scan(t)
    assert less(scanned.lanes, zeros) == add(expected)
    assert (scanned.nonfinite, scanned.absmax, round(scanned.l2**2)) == (0, 255, 1 + 4 + 9 + 16 + 255**2)


def test_an_expanded_tensor_of_more_than_2_31_elements() -> None:
    """An expanded tensor of more than 2^31 elements is the sum of its shards, of which the ends are the reference's."""
    row = np.random.default_rng(1).bytes(1 << 20)
    whole = torch.frombuffer(bytearray(row), dtype=torch.uint8).expand((1 << 11) + 1, -1)
    rows, width = whole.shape
    parts = [(0, 1), (1, 1000), (1000, rows - 1), (rows - 1, rows)]
    parts_ = [shares(whole[a:b], box("", whole.shape, (a, 0), (b - a, width)))[""] for a, b in parts]
    assert [parts_[k].lanes for k in (0, 3)] == [reference(row), reference(row, (rows - 1) * width // 8)]
    assert merge(parts_).lanes == scan(whole).lanes


@pytest.mark.whole
def test_memory_is_bounded() -> None:
    """A contiguous tensor is not copied, and of any other no more than the buffer holds is at a time."""
    out = in_a_cold_process("""
        import re, torch
        from pathlib import Path
        from repro_golden.fingerprint import scan
        torch.set_num_threads(1)
        peak = lambda: int(re.search(r"VmHWM:\\s*(\\d+)", Path("/proc/self/status").read_text())[1]) >> 10
        x = torch.ones(8192, 8192)  # 256 MiB
        scan(x[:1024])
        before = peak()
        scan(x)
        print(peak() - before)
        scan(x.T), scan(x[:, 1:]), scan(x.T[1:, 1:]), scan(x[:, 0].expand(8192, 8192).T)
        print(peak() - before)
    """)
    contiguous, others = map(int, out.split())
    assert contiguous <= 4 and others <= (backends.BUFFER >> 20) + 8, out


@pytest.mark.skipif(CUDA, reason="here the kernels work")
def test_without_kernels_the_cpu_serves() -> None:
    """Where the kernels do not work, one warning says why, and the CPU's backend serves."""
    device = torch.device("cuda")
    with pytest.warns(RuntimeWarning, match="made on the CPU") as seen:
        backends = [backend_for(device), backend_for(device)]
    assert len(seen) == 1 and all(type(b) is Cpu for b in backends)
