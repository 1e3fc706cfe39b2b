"""What only a real GPU shows of the fingerprints made on it: streams, memory, and that nothing waits."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from view_kit import CUDA, DEVICE, observe

from repro_golden.fingerprint import Collector, fingerprint
from repro_golden.fingerprint.backends.gpu import _memory

pytestmark = pytest.mark.skipif(not CUDA, reason="needs a CUDA GPU")


def some() -> list[Tensor]:
    """Tensors that are read where they lie and one that is copied together first, on the GPU."""
    flat = torch.arange(3_000_000, dtype=torch.float32, device=DEVICE)
    return [
        flat,
        flat[1:].bfloat16(),
        flat[:40_000].reshape(200, 200).T,
        torch.ones((), dtype=torch.int8, device=DEVICE),
    ]


def busy() -> None:
    """About a second of work for the current stream."""
    torch.cuda._sleep(1 << 31)


def test_the_allocator_and_the_random_numbers_are_left_alone() -> None:
    """What is allocated and drawn after a collector has the addresses and the values it has without one."""

    def train(collect: Callable[[list[Tensor]], object]) -> list[object]:
        torch.cuda.manual_seed(7)
        draws, held = [], []
        for count in (100, 70_000, 5_000_000, 300, 20_000_000, 70_000):
            t = torch.randn(count, device=DEVICE)
            draws.append((t.data_ptr(), t[:5].tolist()))
            collect([t, t[:100].reshape(10, 10).T])
            held.append(t if count % 200 else t[::2].clone())
        return [*draws, torch.cuda.get_rng_state(DEVICE).tolist(), torch.get_rng_state().tolist()]

    plain = [train(lambda _: None) for _ in range(2)][1]  # the first time fills the allocator's cache
    retries = torch.cuda.memory_stats(DEVICE)["num_alloc_retries"]
    _memory.cache_clear()
    assert [train(lambda t: observe(t).result()) for _ in range(2)] == [plain, plain]
    assert torch.cuda.memory_stats(DEVICE)["num_alloc_retries"] == retries


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_nothing_waits_for_the_gpu() -> None:
    """From the second step on, `add` and `finish` return while the stream is busy; `ready` says when all is there."""
    tensors = some()
    first = observe(tensors).result()
    torch.cuda.set_sync_debug_mode("error")
    try:
        busy()
        pending = observe(tensors)
        assert not torch.cuda.current_stream().query() and not pending.ready()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert pending.result() == first and pending.ready()


def test_what_the_stream_does_later_is_not_seen() -> None:
    """A tensor that is changed in place after `add` keeps the fingerprint it had then."""
    tensors = some()
    before = observe(tensors).result()
    busy()
    collector = Collector()
    collector.add(tensors, keep=True)
    for t in tensors:
        t.add_(1)
    assert collector.finish().result() == before


@pytest.mark.parametrize("again", [False, True], ids=["first", "once-more"])
def test_what_is_on_its_way_to_the_host_is_waited_for(again: bool) -> None:
    """A copy to pinned memory that the GPU has not made yet is read when it is there, as the program will find it."""
    source, target = torch.randn(1 << 20, device=DEVICE), torch.zeros(1 << 20).pin_memory()
    if again:  # by then it is known how such a tensor is read
        fingerprint(target)
        fingerprint(target)
    busy()
    target.copy_(source, non_blocking=True)
    assert fingerprint(target) == fingerprint(source)


def test_any_stream_serves() -> None:
    """What one stream has prepared, and has not come to yet, another may use at once."""
    tensors = some()
    expected = observe([t.clone() for t in tensors]).result()
    _memory.cache_clear()
    torch.cuda.synchronize()
    pending = []
    for work in (busy, lambda: None):
        with torch.cuda.stream(torch.cuda.Stream()):
            work()
            pending.append(observe(tensors))
    assert [p.result() for p in pending[::-1]] == [expected, expected]


def test_finish_waits_for_every_stream_of_its_collector() -> None:
    """Tensors may be added on any streams; `finish` on yet another brings what all of them found."""
    tensors = some()
    expected = observe([t.clone() for t in tensors]).result()
    torch.cuda.synchronize()
    collector = Collector()
    for t in tensors:
        with torch.cuda.stream(torch.cuda.Stream()):
            busy()
            collector.add([t], keep=True)
    assert collector.finish().result() == expected


def test_more_than_2_31_elements() -> None:
    """Tensors of more than 2^31 elements, contiguous or not, have the CPU's fingerprint and their copy's."""
    t = torch.zeros((1 << 32) + 5, dtype=torch.uint8, device=DEVICE)
    t[:9], t[-9:], t[1 << 31 :][:9] = 1, 2, 3
    assert fingerprint(t[: (1 << 31) + 5]) == fingerprint(t[: (1 << 31) + 5].cpu())
    assert fingerprint(t) == fingerprint(t.cpu())
    rows = t[: 1 << 32].view(1 << 16, 1 << 16)[:, 8:-8]
    assert fingerprint(rows) == fingerprint(rows.contiguous())


def test_without_triton_the_cpu_serves(tmp_path: Path) -> None:
    """Where Triton fails to import, one warning says so and tensors have the same fingerprints."""
    (tmp_path / "triton.py").write_text("raise ImportError('broken here')")
    script = """
import warnings, torch
from repro_golden.fingerprint import fingerprint
t = torch.arange(90_000, dtype=torch.float32).reshape(300, 300)
with warnings.catch_warnings(record=True) as seen:
    warnings.simplefilter("always")
    assert all(fingerprint(u.cuda()) == fingerprint(u) for u in (t, t.T, t[:, 1:]))
assert [w.category for w in seen] == [RuntimeWarning] and "broken here" in str(seen[0].message), seen
"""
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run([sys.executable, "-c", script], env=os.environ | {"PYTHONPATH": path}, capture_output=True,
                          text=True, check=False)  # fmt: skip
    assert done.returncode == 0, done.stderr
