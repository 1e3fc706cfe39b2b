"""What the tests of fingerprints on CPU and GPU share: every dtype there is, views over random bytes, their scans."""

from __future__ import annotations

import math
import os
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
import warm_kit
from numpy.lib.stride_tricks import as_strided
from torch import Tensor

from repro_golden.fingerprint import Collector, Pending, Placement, Scan, reference
from repro_golden.fingerprint.backends.gpu import Gpu

EVERY = sorted({v for v in vars(torch).values() if isinstance(v, torch.dtype)}, key=str)
QUANTIZED = [d for d in EVERY if str(d).startswith(("torch.qint", "torch.quint"))]
DTYPES = [d for d in EVERY if d not in QUANTIZED]
CUDA = torch.cuda.is_available()
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1" and not CUDA
CPU, DEVICE = torch.device("cpu"), torch.device("cuda:0" if CUDA else "cpu")


class View(NamedTuple):
    """A strided view, made from its bytes on any device."""

    dtype: torch.dtype
    raw: bytes
    shape: Sequence[int]
    strides: Sequence[int]
    offset: int = 0

    def on(self, device: torch.device) -> Tensor:
        """The view itself. Bytes are what travels: torch cannot copy every dtype."""
        raw = torch.frombuffer(bytearray(self.raw), dtype=torch.uint8).to(device)
        return raw.view(self.dtype).as_strided(self.shape, self.strides, self.offset)

    def content(self) -> bytes:
        """Its row-major bytes, gathered by NumPy."""
        item = self.dtype.itemsize
        items = np.frombuffer(self.raw, f"V{item}")[self.offset :]
        return as_strided(items, self.shape, [s * item for s in self.strides]).tobytes()


def view(dtype: torch.dtype, shape: Sequence[int], strides: Sequence[int], offset: int = 0, seed: int = 1) -> View:
    """A view over random bytes; those of bool are 0 and 1."""
    span = offset + sum((n - 1) * s for n, s in zip(shape, strides, strict=True) if n) + 1
    top = 2 if dtype == torch.bool else 256
    raw = np.random.default_rng(seed).integers(0, top, span * dtype.itemsize, np.uint8)
    return View(dtype, raw.tobytes(), shape, strides, offset)


def observe(
    tensors: Sequence[Tensor],
    placements: Sequence[Placement] | None = None,
    *,
    keep: bool = True,
    on_cpu: bool = False,
    one_by_one: bool = False,
) -> Pending:
    """A collector's results; under the interpreter the kernels take CPU tensors."""
    with pytest.MonkeyPatch.context() as patch:
        if INTERPRETED and not on_cpu:
            patch.setattr("repro_golden.fingerprint.collector.backend_for", Gpu)
        collector = Collector()
        for k in range(len(tensors)) if one_by_one else ():
            collector.add(tensors[k : k + 1], placements and placements[k : k + 1], keep=keep)
        if not one_by_one:
            collector.add(tensors, placements, keep=keep)
        return collector.finish()


def agree(
    given: Sequence[View], placements: Sequence[Placement] | None = None, *, one_by_one: bool = False
) -> list[list[Scan]]:
    """The kernels' scans, equal to the CPU's in every bit but the last ones of l2."""
    scans = observe([v.on(DEVICE) for v in given], placements, one_by_one=one_by_one).result()
    expected = observe([v.on(CPU) for v in given], placements, on_cpu=True).result()
    for v, ours, theirs in zip(given, scans, expected, strict=True):
        assert [replace(s, l2=0.0) for s in ours] == [replace(s, l2=0.0) for s in theirs], v
        assert all(math.isclose(a.l2, b.l2, rel_tol=1e-12) for a, b in zip(ours, theirs, strict=True)), v
        if placements is None:
            assert (ours[0].lanes, ours[0].values) == (reference(v.content()), v.content()), v
    return scans


def in_a_process(script: str, *flags: str) -> str:
    """What a script prints, in a process whose memory, threads and forks are its own; cold where Python has flags."""
    done = warm_kit.run([sys.executable, *flags, "-c", textwrap.dedent(script)], Path.cwd(), timeout=120)
    assert done.returncode == 0, (done.returncode, done.stdout, done.stderr)
    return done.stdout


def in_a_cold_process(script: str) -> str:
    """The same, where nothing was imported, no thread was started and no memory was taken before."""
    return in_a_process(script, "-W", "ignore")
