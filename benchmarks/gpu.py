"""The figures of docs/benchmarks/gpu.md: ``python benchmarks/gpu.py --page PAGE --commit REV`` on a GPU.

It needs torch with CUDA, Triton, NumPy, numba and xxhash. Times on the device are taken with events behind a kernel
that keeps the device busy while the host queues, so they hold no launch latency; times "until the digests are on the
host" are wall times of the whole call. Medians; both sides of a ratio alternate in one run.
"""

from __future__ import annotations

import argparse
import hashlib
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path

import torch
import triton
import triton.language as tl
import xxhash
from torch import Tensor

from repro_golden.fingerprint import Collector, fingerprints, reference
from repro_golden.fingerprint.backends.gpu import check

ROUNDS = 15
GIB = 1 << 30


@triton.jit
def read_only(pointer, out, BLOCK: tl.constexpr, ITERATIONS: tl.constexpr):  # noqa: N803
    """Read and XOR: the ceiling that a fingerprint can reach."""
    start = tl.program_id(0).to(tl.int64) * BLOCK * ITERATIONS
    i = start + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.int64)
    for _ in range(ITERATIONS):
        total ^= tl.load(pointer + i)
        i += BLOCK
    tl.store(out + tl.program_id(0), tl.xor_sum(total, 0))


def device_ms(actions: Sequence[Callable[[], object]], rounds: int = ROUNDS) -> list[float]:
    """Median milliseconds on the device of each action; the actions alternate."""
    times: list[list[float]] = [[] for _ in actions]
    for r in range(rounds + 2):
        for k, action in enumerate(actions):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize()
            torch.cuda._sleep(20_000_000)  # about 10 ms: longer than the host needs to queue
            begin.record()
            kept = action()
            end.record()
            torch.cuda.synchronize()
            del kept
            if r >= 2:
                times[k].append(begin.elapsed_time(end))
    return [statistics.median(t) for t in times]


def wall_ms(actions: Sequence[Callable[[], object]], rounds: int = 50) -> list[tuple[float, float]]:
    """Median and fastest wall milliseconds of each action; the actions alternate."""
    times: list[list[float]] = [[] for _ in actions]
    for r in range(rounds + 2):
        for k, action in enumerate(actions):
            torch.cuda.synchronize()
            began = time.perf_counter()
            action()
            torch.cuda.synchronize()
            if r >= 2:
                times[k].append((time.perf_counter() - began) * 1e3)
    return [(statistics.median(t), min(t)) for t in times]


def collect(tensors: Sequence[Tensor], statistics_too: bool = False) -> Collector:
    """Launch only."""
    collector = Collector(statistics=statistics_too)
    collector.add(tensors)
    collector.finish()
    return collector


def home_again(tensors: Sequence[Tensor]) -> None:
    """Launch, and wait for the sums."""
    collector = Collector(statistics=False)
    collector.add(tensors)
    collector.finish().wait()


def qwen_shapes() -> list[tuple[int, ...]]:
    """The 290 tensors of Qwen2.5-0.5B (its config.json: hidden 896, intermediate 4864, 24 layers, 2 KV heads of 64)."""
    hidden, inner, vocabulary, kv = 896, 4864, 151936, 128
    shapes: list[tuple[int, ...]] = [(vocabulary, hidden)]
    for _ in range(24):
        shapes += [(hidden,), (hidden,), (hidden, hidden), (hidden,), (kv, hidden), (kv,), (kv, hidden), (kv,)]
        shapes += [(hidden, hidden), (inner, hidden), (inner, hidden), (hidden, inner)]
    return [*shapes, (hidden,)]


def read_ceiling(x: Tensor, *beside: Callable[[], object]) -> list[float]:
    """Median milliseconds on the device of the fastest way to read an int64 tensor; those of actions beside follow."""
    scratch = torch.empty(1 << 21, dtype=torch.int64, device="cuda")

    def ceiling(block: int, iterations: int, warps: int) -> Callable[[], object]:
        grid = (len(x) // (block * iterations),)
        return lambda: read_only[grid](x, scratch, block, iterations, num_warps=warps)

    reads = [ceiling(b, i, w) for b, i, w in ((1024, 8, 4), (1024, 16, 8), (2048, 8, 8), (2048, 16, 8), (1024, 32, 8))]
    times = device_ms([*reads, x.sum, *beside])
    return [min(times[: len(reads) + 1]), *times[len(reads) + 1 :]]


def large() -> list[list[str]]:
    """4 GiB in one tensor, beside what reading it costs."""
    x = torch.randint(-(2**63), 2**63 - 1, (4 * GIB // 8,), device="cuda")
    best, ours, measured, hashed = read_ceiling(
        x, lambda: collect([x]), lambda: collect([x], True), lambda: torch.hash_tensor(x)
    )
    size = x.numel() * 8

    def row(what: str, ms: float, goal: str) -> list[str]:
        return [what, f"{best / ms:.1%} of the read ceiling", f"{size / ms / 1e6:,.0f} GB/s, {ms:.3f} ms", goal]

    small = x[: GIB // 8]
    host = small.cpu()
    view = memoryview(host.numpy()).cast("B")
    copy, again, sha = (statistics.median(_seconds(f, 3)) for f in (
        small.cpu, lambda: xxhash.xxh3_128_digest(view), lambda: hashlib.sha256(view[: GIB // 4])))  # fmt: skip
    there = ours / 4  # ms for 1 GiB
    x32 = x.view(torch.float32).normal_()  # what training has: numbers, and none that is not finite
    with_f32, without = device_ms([lambda: collect([x32], True), lambda: collect([x32])], 7)
    bf16 = x.view(torch.bfloat16).normal_()
    strange = bf16.clone()
    strange[:: 1 << 15] = float("nan")
    with_bf16, with_nan = device_ms([lambda: collect([bf16], True), lambda: collect([strange], True)], 7)
    return [
        ["read ceiling, 4 GiB", f"{size / best / 1e6:,.0f} GB/s", "fastest of six read-only kernels", ""],
        row("fingerprint, 4 GiB int64", ours, "at least 95 %"),
        row("fingerprint of the same as fp32 numbers", without, ""),
        row("with statistics, int64", measured, ""),
        row("with statistics, fp32", with_f32, "at least 90 %"),
        row("with statistics, bf16", with_bf16, "at least 90 %"),
        row("with statistics, bf16 with a NaN in every 64 KiB", with_nan, ""),
        row("torch.hash_tensor (unsound)", hashed, ""),
        ["`.cpu()` + xxh3_128, 1 GiB", f"{(copy + again) * 1e3 / there:,.0f}x the fingerprint's time",
         f"{(copy + again) * 1e3:,.0f} ms, of which hashing {again * 1e3:,.0f}", ""],
        ["`.cpu()` + sha256, 1 GiB", f"{(copy + 4 * sha) * 1e3 / there:,.0f}x the fingerprint's time",
         f"{(copy + 4 * sha) * 1e3:,.0f} ms (hashed a quarter, times 4)", ""],
    ]  # fmt: skip


def _seconds(action: Callable[[], object], rounds: int) -> list[float]:
    times = []
    for _ in range(rounds):
        began = time.perf_counter()
        action()
        times.append(time.perf_counter() - began)
    return times


def many() -> list[list[str]]:
    """The 290 tensors of a small model."""
    tensors = [torch.randn(s, device="cuda").bfloat16() for s in qwen_shapes()]
    size = sum(t.numel() * 2 for t in tensors)
    whole = torch.cat([t.reshape(-1) for t in tensors])
    ours, measured, single, loop = device_ms(
        [lambda: collect(tensors), lambda: collect(tensors, True), lambda: collect([whole]),
         lambda: [torch.hash_tensor(t) for t in tensors]]
    )  # fmt: skip
    (sums, sums_best), (digests, digests_best), (hashed, _) = wall_ms(
        [
            lambda: home_again(tensors),
            lambda: fingerprints(tensors),
            lambda: torch.stack([torch.hash_tensor(t) for t in tensors]).tolist(),
        ]
    )

    def home() -> list[bytes]:
        return [xxhash.xxh3_128_digest(t.view(-1).view(torch.uint8).cpu().numpy()) for t in tensors]

    def signed() -> list[bytes]:
        return [hashlib.sha256(t.view(-1).view(torch.uint8).cpu().numpy()).digest() for t in tensors]

    at_home, at_home_signed = (statistics.median(_seconds(f, 3)) * 1e3 for f in (home, signed))
    return [
        ["290 bf16 tensors (Qwen2.5-0.5B), on the device", f"{ours:.3f} ms",
         f"{size / ours / 1e6:,.0f} GB/s; as one tensor {single:.3f} ms", "under 0.3 ms"],
        ["the same until the 128-bit sums are on the host", f"{sums:.3f} ms",
         f"wall time of the whole call; the fastest of 50 {sums_best:.3f} ms; it varies with the host",
         "under 0.6 ms"],
        ["the same until dtype and shape are bound in, as text", f"{digests:.3f} ms",
         f"wall time of `fingerprints(tensors)`; the fastest of 50 {digests_best:.3f} ms", ""],
        ["the same with statistics, on the device", f"{measured:.3f} ms", f"{measured / ours:.2f}x without", ""],
        ["torch.hash_tensor in a loop (unsound)", f"{loop / ours:.1f}x on the device",
         f"{loop:.2f} ms; until on the host {hashed:.2f} ms, {hashed / digests:.1f}x", ""],
        ["`.cpu()` + xxh3_128 each", f"{at_home / digests:,.0f}x until on the host", f"{at_home:,.0f} ms", ""],
        ["`.cpu()` + sha256 each", f"{at_home_signed / digests:,.0f}x until on the host",
         f"{at_home_signed:,.0f} ms", ""],
    ]  # fmt: skip


def strided() -> list[list[str]]:
    """Tensors that do not lie in one piece, or not at a word."""
    x = torch.randn(8192, 65536, device="cuda").bfloat16()  # 1 GiB
    flat = x.view(-1)
    views = [x, x[:, :32768], flat[1:], x.t(), x.view(torch.float32).t(), x[:, ::2]]
    whole, columns, shifted, turned, turned32, skipping, copied, measured = device_ms(
        [*((lambda v=v: collect([v])) for v in views), lambda: collect([x.t().contiguous()]),
         lambda: collect([x.t()], True)], 7,
    )  # fmt: skip
    return [
        ["half of the columns of 1 GiB bf16, no copy", f"{whole / 2 / columns:.2f}x the speed of a whole tensor",
         f"{columns:.3f} ms", "at least 0.8x"],
        ["1 GiB that begins at an odd element, no copy", f"{whole / shifted:.2f}x", f"{shifted:.3f} ms",
         "at least 0.8x"],
        ["1 GiB transposed, no copy", f"{whole / turned:.2f}x",
         f"{turned:.3f} ms; fp32 {turned32:.3f}; with statistics {measured:.3f}; of `contiguous()` {copied:.3f}",
         "at least 0.4x"],
        ["every second column of it, no copy", f"{whole / 2 / skipping:.2f}x", f"{skipping:.3f} ms", ""],
    ]  # fmt: skip


def agreement() -> list[list[str]]:
    """Bits: the reference and the CPU against the GPU, and the tests that need one."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randint(0, 256, ((1 << 26) + 5,), dtype=torch.uint8, generator=generator)
    assert fingerprints([x.cuda()]) == fingerprints([x])
    collector = Collector()
    collector.add([x.cuda()])
    assert collector.finish().result()[0][0].lanes == reference(x.numpy().tobytes())
    tests = [f"tests/test_{n}.py" for n in ("fingerprint_gpu", "fingerprint_cuda", "fingerprint", "placement")]
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests], capture_output=True, text=True
    )
    last = run.stdout.strip().splitlines()[-1] if run.stdout.strip() else run.stderr[-300:]
    print(run.stdout[-6000:], file=sys.stderr)
    return [
        ["GPU, CPU and reference agree", "yes" if run.returncode == 0 else "NO", f"pytest: {last.strip('= ')}", "yes"]
    ]


def main() -> None:
    """Measure and write the page."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--page", type=Path, default=Path(__file__).parent.parent / "docs" / "benchmarks" / "gpu.md")
    parser.add_argument("--commit", default="unknown")
    options = parser.parse_args()
    check(torch.device("cuda", 0))
    rows = [*agreement(), *large(), *many(), *strided()]
    properties = torch.cuda.get_device_properties(0)
    driver = subprocess.run(
        ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"], capture_output=True, text=True
    )
    lines = [
        "# Benchmarks on a GPU",
        "",
        "Written by `python benchmarks/gpu.py` on a machine with one. Medians; ratios side by side in one run.",
        "",
        f"- {properties.name}, {properties.total_memory / GIB:.0f} GiB, driver {' '.join(driver.stdout.split()[:1])}",
        f"- Python {platform.python_version()}, torch {torch.__version__}, Triton {triton.__version__}",
        f"- {datetime.now(UTC):%Y-%m-%d}, commit {options.commit}",
        "",
        "| what | result | how | goal |",
        "| --- | --- | --- | --- |",
        *("| " + " | ".join(row) + " |" for row in rows),
        "",
    ]
    options.page.write_text("\n".join(lines))
    print("\n".join(lines))


if __name__ == "__main__":
    main()
