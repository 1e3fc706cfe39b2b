"""The GPU's kernels against the reference and the CPU: on a GPU where there is one, else in Triton's interpreter.

The interpreter is chosen when Triton is imported, so without a GPU one test runs this file in a process of its own.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from examples_kit import at_most
from hypothesis import given
from hypothesis import strategies as st
from view_kit import CPU, CUDA, DEVICE, DTYPES, INTERPRETED, QUANTIZED, View, agree, observe, view

from repro_golden.base.errors import ReproError
from repro_golden.fingerprint import Collector, dtype_name, fingerprint, merge, scan
from repro_golden.fingerprint.backends import gpu
from repro_golden.fingerprint.backends.backend import Table
from repro_golden.fingerprint.backends.gpu import Gpu, _memory, _Tables
from repro_golden.fingerprint.kinds import NONE, WIDTHS
from repro_golden.fingerprint.placement import box, padding, stack
from repro_golden.fingerprint.tensors import Singles

NO_KERNELS = "kernels need a GPU or Triton's interpreter"
kernels = pytest.mark.skipif(not (CUDA or INTERPRETED), reason=NO_KERNELS)
# the interpreter computes in NumPy, which warns of NaN and overflow where a GPU goes on
pytestmark = pytest.mark.filterwarnings("ignore:(invalid value|overflow) encountered|All-NaN slice:RuntimeWarning")


@contextlib.contextmanager
def work_in(piece: int, block: int, buffer: int = 1 << 24) -> Iterator[None]:
    """Other sizes of pieces, blocks (words) and buffer (bytes), with nothing prepared before or left after."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("repro_golden.fingerprint.backends.gpu._PIECE", piece)
        patch.setattr("repro_golden.fingerprint.backends.gpu._BLOCK", block)
        patch.setattr("repro_golden.fingerprint.recipe.BUFFER", buffer)
        _memory.cache_clear()
        yield
    _memory.cache_clear()


@pytest.fixture(scope="module", autouse=True)
def _several_pieces() -> Iterator[None]:
    """The interpreter is slow: with small pieces and blocks, small tensors have several."""
    with work_in(256, 64) if INTERPRETED else contextlib.nullcontext():
        yield


@pytest.mark.whole
@pytest.mark.skipif(CUDA or INTERPRETED, reason="the kernels run in this process")
@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
def test_the_kernels_run_in_tritons_interpreter() -> None:
    """Without a GPU, every test of the kernels in this file passes in Triton's interpreter."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")} | {"TRITON_INTERPRET": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-rs", "--tb=short", "-p", "no:cacheprovider", str(Path(__file__))]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert NO_KERNELS not in done.stdout and re.search(r"\d+ passed, 13 skipped", done.stdout), done.stdout


@pytest.mark.whole
@pytest.mark.skipif(INTERPRETED, reason="the interpreter compiles nothing")
@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
@pytest.mark.parametrize("kind", range(12))
def test_the_kernels_compile_for_a_gpu_that_is_not_here(kind: int) -> None:
    """For each kind of numbers and each way in which a piece may lie, Triton makes machine code of Hopper."""
    from triton import compile as compiled
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from repro_golden.fingerprint.backends import _triton

    scattered = [i for i in (1, 2, 4, 8) if kind == NONE or i in (WIDTHS[kind], 2 * WIDTHS[kind])]
    ways = [*itertools.product((0, 1), (1, 8, 16), [0], [0]), *itertools.product([1], [1], scattered, (0, 1))]
    for (rows, aligned, item, across), ptx in itertools.product(ways, (False, True)):
        block, unroll, warps, registers, written_out = gpu.shape(kind, rows, ptx)
        constants = {
            "KIND": kind, "WIDTH": 5 if kind else 2, "ROWS": rows, "ALIGNED": aligned, "ITEM": item, "ACROSS": across,
            "PTX": written_out, "BLOCK": block, "UNROLL": unroll, "STEP": gpu._step(block),
        }  # fmt: skip
        pointers = {"table": "*i64", "out": "*i64", "luts": "*fp64", "begin": "i32"}
        source = ASTSource(
            _triton.pieces, signature=pointers | dict.fromkeys(constants, "constexpr"), constexprs=constants
        )
        done = compiled(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps, "maxnreg": registers})
        assert "sm_90" in done.asm["ptx"]


@kernels
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
def test_every_dtype_tail_and_alignment(dtype: torch.dtype) -> None:
    """Every dtype there is, with 0 to 19 elements, from 16-byte addresses and from one element further."""
    agree([view(dtype, [count], [1], offset, seed=count) for count in range(20) for offset in (0, 1)])


@kernels
@pytest.mark.parametrize("one_by_one", [False, True])
def test_all_dtypes_in_one_collector(one_by_one: bool) -> None:
    """Tensors of all dtypes pass through one collector, in one list or each by itself."""
    agree([view(d, [17, k], [k, 1], k % 2) for k, d in enumerate(DTYPES)], one_by_one=one_by_one)


@st.composite
def views(draw: st.DrawFn) -> View:
    shape = draw(st.lists(st.integers(0, 6), max_size=3))
    strides = draw(st.lists(st.integers(0, 5), min_size=len(shape), max_size=len(shape)))
    return view(draw(st.sampled_from(DTYPES)), shape, strides, draw(st.integers(0, 9)), draw(st.integers(0, 99)))


@kernels
@at_most(30)
@given(st.lists(views(), min_size=1, max_size=4))
def test_any_views_of_mixed_dtypes(given: list[View]) -> None:
    """Views of any dtypes, shapes, strides and offsets, in one collector."""
    agree(given)


@kernels
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=dtype_name)
def test_the_largest_magnitude_is_found_wherever_it_lies(dtype: torch.dtype) -> None:
    """Of finite numbers, none, subnormals or zeros alone included, and beside one that is not finite."""
    least, most = torch.finfo(dtype).smallest_normal / 8, torch.finfo(dtype).max
    middle = 8_192 if CUDA else 640  # whole blocks of words, and some more
    tensors = [torch.zeros(2 * middle + 11, dtype=dtype, device=DEVICE).neg() for _ in range(4)]
    for place, tensor in enumerate(tensors):  # in a word of four
        tensor[::3] = least
        tensor[middle + place] = -most if place % 2 else 3.0
    tensors += [tensors[0][:middle], tensors[0][1:middle:3].contiguous(), tensors[1].clone()]
    tensors[-1][middle] = float("nan")
    expected = observe([t.to(CPU) for t in tensors], on_cpu=True).result()
    scans = observe(tensors).result()
    assert [(s[0].absmax, s[0].nonfinite) for s in scans] == [(s[0].absmax, s[0].nonfinite) for s in expected]
    assert [s[0].absmax for s in scans[:6]] == [3.0, most, 3.0, most, least, 0.0]


@kernels
@pytest.mark.parametrize("name", ["uint8", "bfloat16", "float32", "complex64"])
def test_views_of_several_pieces(name: str) -> None:
    """Flat, transposed, expanded, permuted and skipping views, and rows of a wider matrix, each of several pieces."""
    shapes = [[3001], [70, 50], [40, 96], [40, 96], [60, 72], [9, 20, 24], [900], [], [3, 0],
              [40, 32], [7, 160], [3, 20, 24], [2, 48, 64], [1200]]  # fmt: skip
    strides = [[1], [1, 70], [0, 1], [1, 0], [80, 1], [24, 300, 1], [3], [], [1, 1],
               [1, 40], [1, 7], [1, 60, 3], [3072, 1, 48], [2]]  # fmt: skip
    offsets = [3, 0, 8, 1, 5, 0, 1, 5, 0, 1, 0, 3, 0, 2]
    agree([view(getattr(torch, name), *v) for v in zip(shapes, strides, offsets, strict=True)])


@kernels
@pytest.mark.parametrize("size", [(128, 16), (64, 128), (4096, 256), (1 << 15, 1024)], ids=str)
def test_sizes_of_pieces_blocks_and_buffer_do_not_matter(size: tuple[int, int]) -> None:
    """The same results for any size of piece, block and buffer."""
    with work_in(*size, buffer=1 << 12):
        flat = itertools.product((torch.float32, torch.float16, torch.uint8, torch.int64), (0, 1))
        strided = [view(torch.float32, [30, 24], [40, 1], 1), view(torch.bfloat16, [50, 60], [1, 50])]
        agree([*(view(d, [700], [1], k) for d, k in flat), *strided, view(torch.uint8, [9, 13, 89], [1, 9, 117], 3)])


@kernels
def test_lazy_conjugates_and_negatives() -> None:
    """Lazy conjugates and negatives are read by the values they show."""
    z = torch.view_as_complex(torch.arange(1400.0, device=DEVICE).reshape(700, 2)).conj()
    assert z.is_conj() and z.imag.is_neg()
    assert observe([z, z.imag]).result() == observe([z.resolve_conj(), z.imag.resolve_neg().contiguous()]).result()


@kernels
def test_a_step_may_outgrow_its_room() -> None:
    """Kept bytes and results beyond the room that is set aside at first come home all the same."""
    with work_in(1 << 15, 1024):
        agree([*(view(torch.int64, [40_001], [1], 0, seed) for seed in range(3)), view(torch.int8, [1_100_003], [1])])


@kernels
@at_most(30)
@given(
    st.sampled_from([torch.uint8, torch.bfloat16, torch.float32]), st.sets(st.integers(0, 30), max_size=3), st.data()
)
def test_placements_with_edges(dtype: torch.dtype, cuts: set[int], data: st.DataObject) -> None:
    """Shards cut anywhere, padded ones too, give the CPU's shares; merged, they give the whole's fingerprint."""
    columns = data.draw(st.integers(1, 9))
    row, whole = columns * dtype.itemsize, view(dtype, [30, columns], [columns, 1])
    shards, placements = [], []
    for a, b in itertools.pairwise(sorted({0, 30, *cuts})):
        pad = data.draw(st.integers(0, 2))
        shards.append(
            View(dtype, whole.raw[a * row : b * row] + bytes(pad * row), [b - a + pad, columns], [columns, 1])
        )
        placements.append(stack([box("w", [30, columns], [a, 0], [b - a, columns]), padding([pad, columns])]))
    shares = [scan.share for scans in agree(shards, placements, one_by_one=data.draw(st.booleans())) for scan in scans]
    assert merge(share for share in shares if share).fingerprint == fingerprint(whole.on(CPU))


@kernels
def test_later_steps_see_what_is_there_then() -> None:
    """A later step, which uses the room and the tables of the first again, sees what has changed in place."""
    given = [view(torch.int32, [3001], [1], 1), view(torch.bfloat16, [40, 30], [1, 40]), view(torch.int8, [30], [1])]
    tensors, memory = [v.on(DEVICE) for v in given], Gpu(DEVICE)._memory
    first = observe(tensors).result()
    room, tables = list(map(id, memory.free)), list(memory.prepared)
    assert observe(tensors).result() == first
    for t in tensors:
        t.view(torch.uint8 if t.is_contiguous() else t.dtype).add_(1)
    later, copies = observe(tensors).result(), observe([t.to(CPU).clone() for t in tensors], on_cpu=True).result()
    assert [s[0].values for s in later] == [s[0].values for s in copies] != [s[0].values for s in first]
    assert [s[0].lanes for s in later] == [s[0].lanes for s in copies]
    assert list(map(id, memory.free)) == room and list(memory.prepared) == tables


def test_the_tables_of_the_last_turns_stay_and_the_oldest_others_go() -> None:
    """Tables that the device holds are bounded in number and bytes, at some more for those of the last turns."""
    made: list[int] = []

    def make(table: Table) -> Table:
        made.append(int(table[0]))
        return table

    tables = _Tables(make, lambda table: table.nbytes)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("repro_golden.fingerprint.backends.gpu._BYTES", 40)  # five tables of eight bytes
        patch.setattr("repro_golden.fingerprint.backends.gpu._TURNS", 2)
        for step in range(6):
            for number in (0, 10 + step, 20 + step):  # one of every step, and two of this
                assert tables.of(np.array([number])).tolist() == [number]
            tables.read()
        assert made.count(0) == 1 and len(made) == 13
        assert {int.from_bytes(key, "little") for key in tables} == {0, 14, 15, 24, 25}
        for number in range(9):  # more than there is room for, in each of two steps
            tables.of(np.array([100 + number]))
        tables.read()
        count = len(made)
        for number in range(9):
            tables.of(np.array([100 + number]))
        tables.read()
        assert len(made) == count and len(list(tables)) == 9
        for number in range(100):  # which nobody reads
            tables.of(np.array([200 + number]))
        assert len(list(tables)) == 20
        patch.setattr("repro_golden.fingerprint.backends.gpu._KEPT", 4)
        tables.of(np.array([200]))
        assert len(list(tables)) == 16


@kernels
def test_a_step_that_outgrew_its_room_comes_home_in_one_copy_afterwards() -> None:
    """Results of a step that needed several chunks have one chunk from the next step on, and stay right."""
    with work_in(256, 64), pytest.MonkeyPatch.context() as patch:
        patch.setattr("repro_golden.fingerprint.backends.gpu._ROOM", 16)
        tensors = [torch.arange(k + 1, dtype=torch.float32, device=DEVICE) for k in range(12)]
        expected = observe([t.to(CPU) for t in tensors], on_cpu=True).result()
        patch.setattr("repro_golden.fingerprint.collector.backend_for", Gpu)
        memory, chunks = Gpu(DEVICE)._memory, []
        for _ in range(3):
            collector = Collector()
            for t in tensors:
                collector.add([t], keep=True)
            pending = collector.finish()
            (lane,) = collector._lanes.values()
            chunks.append(len(lane.backend._chunks))  # type: ignore[attr-defined]
            assert [s[0].lanes for s in pending.result()] == [s[0].lanes for s in expected]
        assert chunks[0] > 1 and chunks[1:] == [1, 1] and len(memory.free) == 1


@kernels
@pytest.mark.filterwarnings("ignore:.*quantized tensor creation functions")
def test_quantized_tensors_are_refused() -> None:
    """Quantized tensors are refused, and the message says what to observe."""
    for dtype in QUANTIZED:
        with pytest.raises(ReproError, match=r"quantized .* observe its int_repr"):
            observe([torch.empty(8, dtype=dtype, device=DEVICE)])


@kernels
@pytest.mark.parametrize("size", [0, 1, 7, 8, 9, 4095, 70_001])
def test_tensors_read_one_by_one_have_the_same_lanes(size: int) -> None:
    """What `Singles` reads of a tensor of any size, or of a strided view of one, is what `scan` says of it."""
    generator = torch.Generator().manual_seed(size)
    bytes_ = torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator).to(DEVICE)
    tensors = [bytes_, bytes_[: size // 8 * 8].view(torch.float64), bytes_.expand(2, size).t(), bytes_[8:]]
    singles = Singles(torch.device(DEVICE))
    numbers = [singles.add(tensor) for tensor in tensors]
    assert numbers == list(range(len(tensors)))
    assert singles.result() == [(lanes.a, lanes.b) for lanes in (scan(t.cpu()).lanes for t in tensors)]
    assert size < 16 or singles.add(bytes_[1:]) is None, "which does not begin at a word"
