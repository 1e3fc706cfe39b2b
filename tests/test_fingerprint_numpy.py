from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import warm_kit
from hypothesis import given
from hypothesis import strategies as st

from repro_golden.fingerprint import dtype_name, kinds
from repro_golden.fingerprint.backends import _numba, _numpy
from repro_golden.trace import Trace

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int8, torch.int16, torch.uint16,
          torch.int64, torch.uint64,
          torch.float8_e4m3fn, torch.float8_e8m0fnu, torch.float4_e2m1fn_x2, torch.complex64)  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
def test_numpy_serves_where_numba_is_missing(dtype: torch.dtype) -> None:
    """NumPy's loops, which read what is little, and numba's give the same bits, of lanes and of statistics."""
    memory = np.random.default_rng(1).integers(0, 256, 40_000, dtype=np.uint8)
    kind, lut = kinds.kind_of(dtype)
    at = memory.ctypes.data
    item = min(dtype.itemsize, 8)
    jobs = [[at + 3, 3, 401, 4004, 7, 501, 0, 0, kind, lut, 0, 0], [at, 1, 11, 0, 0, 0, 0, 1, kind, lut, 0, 0],
            [at + 1, 1, 0, 0, 5, 0, 0, 2, kind, lut, 0, 0], [at, 1, 3, 0, 2, 0, 5, 3, 0, 0, 0, 0],
            [at + 5, 90, 40, item, 7, 40, 0, 4, kind, lut, item, 91],
            [at + 2, 3, 400, 900, 1, 7, 0, 5, kind, lut, 1, 2],
            [at + 2, 1, 300, 0, 9, 0, 0, 6, kind, lut, item, 0]]  # fmt: skip
    lanes = []
    for module in (_numba, _numpy):
        sums, stats, words = np.zeros((7, 2), np.uint64), np.zeros((7, 3)), np.zeros(8, np.uint64)
        module.run(np.array(jobs), kinds.luts(), sums, stats)
        module.gather(np.array([[at + k, k + 1] for k in range(8)]), words)
        lanes.append((sums.tolist(), stats.tolist(), words.tolist()))
    assert lanes[0] == lanes[1]


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
@given(data=st.data())
def test_numpy_and_numba_agree_bit_for_bit(dtype: torch.dtype, data: st.DataObject) -> None:
    """Of any shape, alignment and strides a step takes the same statistics whichever of them reads it."""
    kind, lut = kinds.kind_of(dtype)
    item, rows = min(dtype.itemsize, 8), data.draw(st.integers(1, 3))
    words, tail = data.draw(st.integers(0, 9_000)), data.draw(st.integers(0, 7 // item)) * item
    scattered = data.draw(st.booleans()) and words > 0
    pitch = data.draw(st.integers(item, 3 * item)) if scattered else 0
    stride = data.draw(st.sampled_from([item, (words * 8 // item) * max(pitch, item) + tail + 3]))
    size = rows * stride + (words * 8 // item + 1) * max(pitch, item) + 64
    memory = np.random.default_rng(data.draw(st.integers(0, 9))).integers(0, 256, size, dtype=np.uint8)
    at = memory.ctypes.data + data.draw(st.integers(0, 8))
    job = [at, rows, words, stride, 3, words, 0 if scattered else tail, 0, kind, lut, item if scattered else 0, pitch]
    figures = []
    for module in (_numba, _numpy):
        sums, stats = np.zeros((1, 2), np.uint64), np.zeros((1, 3))
        module.run(np.array([job]), kinds.luts(), sums, stats)
        figures.append((sums.tolist(), stats.tolist()))
    assert figures[0] == figures[1]


@pytest.mark.parametrize(("elements", "loaded"), [(9, False), (1 << 21, True)])
def test_little_is_read_without_numba_and_much_with_it(tmp_path: Path, elements: int, loaded: bool) -> None:
    """A program of a few small steps ends before numba's loops would be there; for one of large steps they are."""
    program = (
        f"import sys, torch\np = torch.nn.Parameter(torch.ones({elements}))\no = torch.optim.SGD([p], 0.1)\n"
        "for _ in range(4):\n    p.grad = torch.ones_like(p)\n    o.step()\n"
        "print('loaded', 'repro_golden.fingerprint.backends._numba' in sys.modules)"
    )
    command = [sys.executable, "-m", "repro", "trace", "--out", "trace", "--", sys.executable, "-c", program]
    done = warm_kit.run(command, tmp_path)
    assert f"loaded {loaded}" in done.stdout, done.stderr
    assert len(Trace(tmp_path / "trace").steps) == 4
