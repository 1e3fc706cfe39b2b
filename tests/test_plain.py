"""Recording without NumPy: the same bits as the fast path gives, in process and in a real environment that lacks it."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import environment
from hypothesis import given
from hypothesis import strategies as st
from packaging.requirements import Requirement
from torch import Tensor
from view_kit import CPU, DEVICE, DTYPES, View, in_a_cold_process, view

from repro_golden.base.errors import ReproError
from repro_golden.fingerprint import Collector, Placement, Scan, dtype_name, reference
from repro_golden.fingerprint.placement import box, padding, shard, stack, whole
from repro_golden.fingerprint.plain import PlainCollector
from repro_golden.trace import Trace
from repro_golden.trace.signals import collector

torch.set_num_threads(1)

half = pytest.mark.filterwarnings("ignore:ComplexHalf support")


def scans(
    kind: type[Collector] | type[PlainCollector],
    tensors: Sequence[Tensor],
    placements: Sequence[Placement | None] | None = None,
    *,
    keep: bool = False,
) -> list[list[Scan]]:
    collector = kind()
    collector.add(tensors, placements, keep=keep)
    return collector.finish().result()


def equal(results: Sequence[Any], expected: Sequence[Any]) -> None:
    """In every bit but the last ones of l2."""
    assert [replace(s, l2=0.0) for s in results] == [replace(s, l2=0.0) for s in expected]
    assert all(math.isclose(a.l2, b.l2, rel_tol=1e-12) for a, b in zip(results, expected, strict=True))


def same(
    tensors: Sequence[Tensor], placements: Sequence[Placement | None] | None = None, *, keep: bool = False
) -> list[list[Scan]]:
    """What the plain collector finds, equal to what the fast one does."""
    plainly, expected = (scans(kind, tensors, placements, keep=keep) for kind in (PlainCollector, Collector))
    for ours, theirs in zip(plainly, expected, strict=True):
        equal(ours, theirs)
    return plainly


# -- the same bits


@st.composite
def given_views(draw: st.DrawFn) -> View:
    """A view of any dtype, shape, strides and offset over bytes among which NaN, infinity and extremes are common."""
    shape = draw(st.lists(st.integers(0, 6), max_size=3))
    strides = draw(st.lists(st.integers(0, 5), min_size=len(shape), max_size=len(shape)))
    dtype, seed = draw(st.sampled_from(DTYPES)), draw(st.integers(0, 99))
    plain = view(dtype, shape, strides, draw(st.integers(0, 9)), seed)
    if dtype == torch.bool or draw(st.booleans()):
        return plain
    raw = np.random.default_rng(seed).choice(np.array([0, 1, 0x7C, 0x7F, 0x80, 0xF0, 0xFF], np.uint8), len(plain.raw))
    return plain._replace(raw=raw.tobytes())


@half
@given(st.lists(st.tuples(given_views(), st.integers(0, 2)), min_size=1, max_size=3), st.booleans())
def test_any_tensors_have_the_same_bits(drawn: list[tuple[View, int]], keep: bool) -> None:
    """Lanes, statistics but for l2's last bits, sketch and values are the fast path's, and memory stays as it is."""
    tensors = [v.on(CPU) for v, _ in drawn]
    lazy = [(lambda t: t, Tensor.conj, lambda t: t.conj().imag)[k if v.dtype.is_complex else 0] for v, k in drawn]
    tensors = [look(t) for look, t in zip(lazy, tensors, strict=True)]
    scans = same(tensors, keep=keep)
    for t, (v, _), (scan,) in zip(tensors, drawn, scans, strict=True):
        if not t.is_conj() and not t.is_neg():
            assert scan.lanes == reference(v.content()) and scan.values == (v.content() if keep else None)
        assert bytes(torch.empty(0, dtype=torch.uint8).set_(t.untyped_storage()).tolist()) == v.raw


@half
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
def test_tensors_of_many_stretches(dtype: torch.dtype) -> None:
    """Tensors that are read in several stretches, whole rows and parts of rows, at any alignment, on any device."""
    layouts = [([140_001], [1], 3), ([301, 503], [503, 1], 0), ([301, 503], [1, 301], 1), ([7001, 9], [11, 1], 2),
               ([3, 40_007], [40_007, 1], 1), ([2, 33_001], [0, 2], 0), ([50_000, 3], [1, 50_000], 0)]  # fmt: skip
    for layout in layouts:
        v = view(dtype, *layout)
        for keep in (False, True):
            ((scan,),) = same([v.on(CPU)], keep=keep)
            equal(scans(PlainCollector, [v.on(DEVICE)], keep=keep)[0], [scan])
        assert (scan.lanes, scan.values) == (reference(v.content()), v.content())


@st.composite
def layouts(draw: st.DrawFn) -> Placement:
    """Boxes of several canonical tensors and padding, stacked in any order, or a slice of that as a flat buffer."""
    row = draw(st.lists(st.integers(1, 5), max_size=2))
    pieces = [padding((n, *row)) for n in draw(st.lists(st.integers(0, 3), max_size=2))]
    for name in "xyz"[: draw(st.integers(0 if pieces else 1, 3))]:
        rows, before, after = draw(st.tuples(*[st.integers(0, 4)] * 3))
        shape = (before + rows + after, *(n + 1 for n in row))
        pieces.append(box(name, shape, (before, *(0 for _ in row)), (rows, *row)))
    p = stack(draw(st.permutations(pieces)))
    start, stop = sorted(draw(st.tuples(*[st.integers(0, math.prod(p.shape))] * 2)))
    return p.flat(start, stop) if draw(st.booleans()) else p


@given(layouts(), st.sampled_from([d for d in DTYPES if d.itemsize != 1]), st.integers(0, 9), st.booleans())
def test_any_placements_have_the_same_shares(p: Placement, dtype: torch.dtype, seed: int, keep: bool) -> None:
    """Shares, their statistics and their cut words are the fast path's, of any layout and slice of a flat buffer."""
    steps = [math.prod(p.shape[k + 1 :]) for k in range(len(p.shape))]
    same([view(dtype, p.shape, steps, seed, seed).on(CPU)], [p], keep=keep)


def test_placements_of_many_stretches() -> None:
    """Columns, rows and a fused layout of tensors that are read in several stretches; transposed ones too."""
    for dtype in (torch.uint8, torch.bfloat16, torch.float32, torch.complex128):
        t = view(dtype, [801, 403], [403, 1]).on(CPU)
        fused = stack([shard("q", (1200, 403), 0, 1, 3), whole("k", (400, 403)), padding((1, 403))])
        columns = shard("w", (801, 806), 1, 1, 2)
        same([t, t, t.T.contiguous().T], [fused, columns if dtype.itemsize > 2 else None, fused])


def test_a_default_device_changes_nothing() -> None:
    """Whatever device a program makes its tensors on by default, both collectors find the same."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(40, 50, generator=generator)
    tensors = [x, x.T, x > 0, x.to(torch.float8_e4m3fn), x.bfloat16()[0, 1:], x.to(torch.complex64).conj()]
    expected = same(tensors)
    with torch.device("meta"):
        assert same(tensors) == expected


def test_threads_do_not_matter() -> None:
    """Every bit of a scan, the last of l2 too, is the same with any number of torch's threads."""
    x = torch.randn(300, 801, generator=torch.Generator().manual_seed(1))
    tensors = [x, x.T, x.bfloat16(), x.to(torch.float8_e4m3fn)]
    expected = scans(PlainCollector, tensors)
    torch.set_num_threads(3)
    try:
        assert scans(PlainCollector, tensors) == expected
    finally:
        torch.set_num_threads(1)


@pytest.mark.filterwarnings("ignore:.*(quantized tensor|Sparse CSR)")
def test_refusals_are_the_same() -> None:
    """What the fast path refuses is refused with the same words."""
    ones = torch.ones(4)
    for tensor, placement in [
        (ones.to_sparse(), None),
        (torch.empty(3, device="meta"), None),
        (torch.empty(8, dtype=torch.quint8), None),
        (ones, whole("x", (5,))),
        (ones, stack([whole("x", (2,)), whole("x", (2,))])),
    ]:
        words = []
        for kind in (PlainCollector, Collector):
            with pytest.raises(ReproError) as refused:
                scans(kind, [tensor], [placement])
            words.append(str(refused.value))
        assert words[0] == words[1]


@pytest.mark.whole
def test_memory_is_bounded() -> None:
    """Reading a tensor of 128 MiB takes a few MiB more, whatever its strides."""
    out = in_a_cold_process("""
        import re, torch
        from pathlib import Path
        from repro_golden.fingerprint.plain import PlainCollector
        torch.set_num_threads(1)
        peak = lambda: int(re.search(r"VmHWM:\\s*(\\d+)", Path("/proc/self/status").read_text())[1]) >> 10
        def scan(t):
            collector = PlainCollector()
            collector.add([t])
            return collector.finish().result()
        x = torch.ones(4096, 8192)
        scan(x[:64]), scan(x[:64].T)
        before = peak()
        scan(x), scan(x.T), scan(x[:, 1:])
        print(peak() - before)
    """)
    assert int(out) <= 4


def test_the_fast_path_is_taken_where_it_can_be() -> None:
    """With NumPy the fast collector serves, and without it, where nothing else is told, the plain one."""
    assert type(collector()) is Collector
    out = in_a_cold_process("""
        import sys
        sys.modules["numpy"] = None
        from repro_golden.trace.signals import collector
        print(type(collector()).__name__)
    """)
    assert out == "PlainCollector\n"


# -- a real environment

PROGRAM = """
import atexit, sys
foreign = {"numpy", "numba", "xxhash", "pyarrow", "triton", "llvmlite"}
atexit.register(lambda: print(sorted({name.split(".")[0] for name in sys.modules} & foreign)))  # after the recorder's
import torch
from torch import nn
import repro_golden

torch.set_num_threads(1)
torch.manual_seed(0)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.wide = nn.Linear(300, 200)
        self.low = nn.Linear(200, 5, dtype=torch.bfloat16)
        self.conv = nn.Conv1d(1, 3, 2)
        self.turned = nn.Parameter(torch.randn(5, 3).T)
        self.complex = nn.Parameter(torch.randn(3, dtype=torch.complex64))

    def forward(self, x):
        h = self.low(torch.tanh(self.wide(x)).bfloat16()).float()
        out = self.conv(h[:, None]).sum((1, 2)) + (h @ self.turned.T).sum(1)
        return out + torch.view_as_real(self.complex).square().sum()

model = Net()
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
for step in range(3):
    optimizer.zero_grad()
    x = torch.randn(8, 300)
    y = model(x)
    repro_golden.observe("mask", x > 0)
    repro_golden.observe("eight", x[:, ::3].T.to(torch.float8_e4m3fn))
    repro_golden.column("y", y)
    y.square().mean().backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
"""

SHARDED = """
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

torch.set_num_threads(1)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 3)).to(torch.bfloat16)
dist.init_process_group("gloo")
for module in (model[0], model):
    fully_shard(module, mesh=dist.device_mesh.init_device_mesh("cpu", (2,)))
optimizer = torch.optim.AdamW(model.parameters())
torch.manual_seed(dist.get_rank())
for step in range(3):
    optimizer.zero_grad()
    model(torch.randn(4, 6, dtype=torch.bfloat16)).square().mean().backward()
    optimizer.step()
dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of an environment that holds torch, what torch requires, and nothing else."""
    folder = tmp_path_factory.mktemp("bare")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    (site,) = folder.glob("lib/python*/site-packages")
    wanted, linked = ["torch"], set()
    while wanted:
        name = wanted.pop()
        if name in linked:
            continue
        linked.add(name)
        package = metadata.distribution(name)
        for top in {file.parts[0] for file in package.files or ()} - {"..", "__pycache__"}:
            if not (site / top).exists():
                (site / top).symlink_to(str(package.locate_file(top)))
        required = [Requirement(text) for text in package.requires or ()]
        wanted += [r.name for r in required if r.marker is None or r.marker.evaluate({"extra": ""})]
    return folder / "bin" / "python"


def recorded(folder: Path, python: Path | str, program: str, *launcher: str) -> tuple[Trace, str]:
    """The trace of a program under this Python, and what it printed."""
    folder.mkdir()
    (folder / "train.py").write_text(program)
    command = [sys.executable, "-m", "repro", "trace", "--out", "trace", "--", str(python), *launcher, "train.py"]
    done = subprocess.run(
        command, cwd=folder, env=environment() | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=300,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0 and "recording stopped" not in done.stderr, done.stderr
    return Trace(folder / "trace"), done.stdout


def same_traces(with_numpy: Trace, without: Trace) -> None:
    assert len(with_numpy.steps) == 3 and with_numpy.complete and without.complete
    assert [s.root for s in without.steps] == [s.root for s in with_numpy.steps]
    assert [s.metrics for s in without.steps] == [s.metrics for s in with_numpy.steps]
    for k in range(3):
        equal(without.rows(k), with_numpy.rows(k))


@pytest.mark.whole
def test_a_program_without_numpy(tmp_path: Path, bare: Path) -> None:
    """Where there is torch and no NumPy, a program has the same trace, and nothing of the instrument's is imported."""
    missing = subprocess.run([str(bare), "-c", "import numpy"], capture_output=True, text=True, check=False)
    assert "No module named 'numpy'" in missing.stderr
    fast, _ = recorded(tmp_path / "fast", sys.executable, PROGRAM)
    plain, out = recorded(tmp_path / "plain", bare, PROGRAM)
    assert out == "[]\n"
    same_traces(fast, plain)
    assert "numpy" in fast.header.identity["environment"] and "numpy" not in plain.header.identity["environment"]


@pytest.mark.whole
def test_shards_without_numpy(tmp_path: Path, bare: Path) -> None:
    """FSDP2 on two ranks without NumPy: the shards of both add up to the same trace."""
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    fast, _ = recorded(tmp_path / "fast", sys.executable, SHARDED, *launcher)
    plain, _ = recorded(tmp_path / "plain", bare, SHARDED, *launcher)
    same_traces(fast, plain)
