from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from repro_golden.fingerprint import _numba, _numpy, dtype_name, kinds

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int8, torch.int16, torch.uint16,
          torch.int64, torch.uint64,
          torch.float8_e4m3fn, torch.float8_e8m0fnu, torch.float4_e2m1fn_x2, torch.complex64)  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
def test_numpy_serves_where_numba_is_missing(dtype: torch.dtype) -> None:
    """Without numba lanes have the same bits, and statistics are the same but for the order of a sum."""
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
        lanes.append((sums.tolist(), stats[:, :2].tolist(), words.tolist(), stats[:, 2].tolist()))
    assert lanes[0][:3] == lanes[1][:3]
    for a, b in zip(lanes[0][3], lanes[1][3], strict=True):
        assert a == b or math.isclose(a, b, rel_tol=1e-12)
