"""The fingerprint's figures for docs/benchmarks/cpu.md: its speed beside other hashes, its collisions, its avalanche.

`python benchmarks/fingerprint.py` prints them alone. Each function returns rows as benchmarks/cpu.py writes them.
"""

from __future__ import annotations

import hashlib
import math
import os
import statistics
import time
from collections.abc import Callable, Iterable, Iterator

import numpy as np
import numpy.typing as npt
import torch
import xxhash
from collisions import ODD, Array, Family, Words, lanes_of, one_bit, survey

from repro_golden.fingerprint import Collector, Lanes, bind, reference

ROUNDS = 9
BUFFER = 256 << 20
HALVES = ("low a", "high a", "low b", "high b", "16 of each")
"""The 32 bits whose collisions are counted; the last are the low 16 of both lanes, for what ties the two together."""

Times = dict[str, list[float]]


def main() -> None:
    """Print all rows, and what each family of tensors gave."""
    families = survey()
    show(["what", "result", "how", "goal"], [*speed(), *avalanche(), *birthdays(families)])
    rows = ([f.name, f"{len(f.lanes):,}", *(f"{z:+.3g}" for z in deviations(f))] for f in families)
    print("\nFamilies: tensors, and by how many sigma their collisions in 32 bits miss the expectation\n")
    show(["family", "tensors", *HALVES], rows)
    print()
    show(["what", "result", "how", "goal"], full_collisions(families))


def show(head: list[str], rows: Iterable[list[str]]) -> None:
    """Print a Markdown table."""
    for row in [head, ["---"] * len(head), *rows]:
        print("| " + " | ".join(row) + " |", flush=True)


# -- speed


def speed() -> list[list[str]]:
    """Throughput on one large buffer and time of many small tensors, beside other ways to read and hash them."""
    x = torch.randn(BUFFER // 4, generator=torch.Generator().manual_seed(1))
    raw, turned = x.numpy(), x.view(torch.bfloat16).view(8192, -1).T
    small = list(x[: 300 * 4096].view(300, 4096).clone().unbind())
    cores = sorted(os.sched_getaffinity(0))
    one_core, two_cores = set(cores[-1:]), set(cores[-2:])
    whole = alternate({
        "ours": (one_core, lambda: read([x])),
        "xxh3": (one_core, lambda: xxhash.xxh3_128_digest(raw)),
        "ours on two": (two_cores, lambda: read([x])),
        "measured": (one_core, lambda: read([x], measure=True)),
        "measured on two": (two_cores, lambda: read([x], measure=True)),
        "sum": (one_core, raw.view(np.uint64).sum),
        "hash_tensor": (two_cores, lambda: torch.hash_tensor(x)),
        "sha256": (one_core, lambda: hashlib.sha256(raw).digest()),
    })  # fmt: skip
    other = alternate({
        "ours": (two_cores, lambda: read([turned])),
        "copied": (two_cores, lambda: read([turned.contiguous()])),
        "xxh3": (two_cores, lambda: xxhash.xxh3_128_digest(turned.contiguous().view(torch.int16).numpy())),
    })  # fmt: skip
    many = alternate({
        "ours": (one_core, lambda: read(small)),
        "measured": (one_core, lambda: read(small, measure=True)),
        "xxh3": (one_core, lambda: [xxhash.xxh3_128_digest(t.numpy()) for t in small]),
    })  # fmt: skip
    micro = {k: f"{statistics.median(v) / len(small) * 1e6:.1f} us" for k, v in many.items()}
    count = f"{len(two_cores)} cores"
    return [
        ["fingerprint, 256 MiB of fp32, one core", *against(whole, "ours", "xxh3", "xxh3_128"), "at least 0.6x"],
        [f"fingerprint, {count}", *against(whole, "ours on two", "xxh3", "xxh3_128 on one core"), "at least 0.9x"],
        ["with statistics, one core", *against(whole, "measured", "ours", "without"), "for comparison"],
        [f"with statistics, {count}", *against(whole, "measured on two", "ours on two", "without"), "for comparison"],
        ["reading memory (NumPy's sum), one core", *against(whole, "sum", "ours", "fingerprint"), "for comparison"],
        [f"`torch.hash_tensor` (64 bits), {count}", *against(whole, "hash_tensor", "ours on two", "fingerprint"),
         "for comparison"],
        ["SHA-256, one core", *against(whole, "sha256", "ours", "fingerprint"), "for comparison"],
        [f"fingerprint, bf16 [16384, 8192] transposed, {count}",
         *against(other, "ours", "copied", "that of `contiguous()`, which copies all of it"), "for comparison"],
        [f"xxh3_128 of the same, `contiguous()`, {count}", *against(other, "xxh3", "ours", "fingerprint"),
         "for comparison"],
        ["fingerprint, 300 fp32 tensors of 16 KiB, one core", f"{micro['ours']} a tensor",
         f"with statistics {micro['measured']}; xxh3_128 {micro['xxh3']}", "for comparison"],
    ]  # fmt: skip


def read(tensors: list[torch.Tensor], *, measure: bool = False) -> None:
    """What a recorder does with tensors."""
    collector = Collector(statistics=measure)
    collector.add(tensors)
    collector.finish().result()


def alternate(contenders: dict[str, tuple[set[int], Callable[[], object]]]) -> Times:
    """Seconds of each contender on its cores, one after the other in each round; the first round warms up."""
    before = os.sched_getaffinity(0)
    times: Times = {name: [] for name in contenders}
    try:
        for _ in range(ROUNDS + 1):
            for name, (cores, call) in contenders.items():
                os.sched_setaffinity(0, cores)  # the fingerprint takes as many threads as it has cores
                began = time.perf_counter()
                call()
                times[name].append(time.perf_counter() - began)
    finally:
        os.sched_setaffinity(0, before)
    return {name: seconds[1:] for name, seconds in times.items()}


def against(times: Times, name: str, base: str, label: str) -> list[str]:
    """Result and how of one contender beside another, over `BUFFER` bytes."""
    ratios = [b / t for t, b in zip(times[name], times[base], strict=True)]
    rate, beside = (BUFFER / statistics.median(times[k]) / 1e9 for k in (name, base))
    spread = f"{min(ratios):.2f}-{max(ratios):.2f} over {ROUNDS} rounds"
    return [f"{statistics.median(ratios):.2f}x {label}", f"{rate:.1f} GB/s against {beside:.1f}; {spread}"]


# -- collisions


def collisions() -> list[list[str]]:
    """Collisions within families of similar tensors, and among all of them.

    Raises:
        RuntimeError: two distinct tensors have the same lanes.
    """
    families = survey()
    return [*full_collisions(families), *birthdays(families)]


def full_collisions(families: list[Family]) -> list[list[str]]:
    """Tensors with equal lanes; raises RuntimeError where both are."""
    for family in families:
        if same := equal_rows([family.lanes]):
            raise RuntimeError(f"{family.name}: {same} of {len(family.lanes)} distinct tensors have another's lanes")
    count = sum(len(f.lanes) for f in families)
    if same := equal_rows([f.lanes for f in families]):
        raise RuntimeError(f"{same} of {count} tensors of different families have another's lanes")
    within, pairs = (sum(n * (n - 1) // 2 for n in ns) for ns in ([len(f.lanes) for f in families], [count]))
    a, b = (sum(equal_pairs(f.lanes[:, k]) for f in families) for k in range(2))
    return [
        ["distinct tensors with equal 128-bit lanes", "none", f"{count:,} tensors of {len(families)} families: "
         f"{within:.1e} pairs within families, {pairs:.1e} in all", "none"],
        ["pairs equal in one 64-bit lane", f"{a:,} (lane a), {b:,} (lane b)",
         f"within families, where {within / 2**64:.0e} are expected", "none"],
    ]  # fmt: skip


def birthdays(families: list[Family]) -> list[list[str]]:
    """Pairs of tensors that agree in 32 bits, beside the number that random bits give."""
    count = sum(len(f.lanes) for f in families)
    expected = count * (count - 1) / 2**33
    # pairs across families meet by chance, so of a family's variance only what it has above its mean is added
    sigma = math.sqrt(expected + sum(f.expected * (f.spread - 1) for f in families))
    parts = zip(*(halves(f.lanes) for f in families), strict=True)  # one kind of bits of all families at a time
    shares = [equal_pairs(np.concatenate(bits)) / expected for bits in parts]
    ratios = ", ".join(f"{ratio:.5g} ({h})" for ratio, h in zip(shares, HALVES, strict=True))
    off = max(abs(ratio - 1) * expected / sigma for ratio in shares)
    zs = [(abs(z), h, f.name) for f in families for z, h in zip(deviations(f), HALVES, strict=True)]
    worst, half, name = max(zs)
    typical = statistics.NormalDist().inv_cdf((1 + 0.5 ** (1 / len(zs))) / 2)
    return [
        ["pairs equal in 32 bits, over the number expected", f"{min(shares):.5g}-{max(shares):.5g}",
         f"{expected:,.0f} expected, sigma {sigma / expected:.4f}; {ratios}; at most {off:.3g} sigma off",
         "within 4 sigma of 1"],
        ["the same in the worst family", f"{worst:.3g} sigma off", f"{half}, {name}; {len(zs)} counts, whose worst is "
         f"by chance beyond {typical:.1f} sigma half the time; {sum(z > 4 for z, *_ in zs)} are beyond 4",
         "within 4 sigma of 1"],
    ]  # fmt: skip


def deviations(family: Family) -> list[float]:
    """For each of `HALVES`, by how many sigma the number of pairs that agree misses the expectation."""
    return [(equal_pairs(bits) - family.expected) / family.sigma for bits in halves(family.lanes)]


def halves(lanes: Words) -> Iterator[npt.NDArray[np.uint32]]:
    """The bits of `HALVES`."""
    parts = lanes.astype("<u8").view("<u4")
    yield from parts.T
    yield parts[:, 0] & 0xFFFF | parts[:, 2] << 16


def equal_pairs(values: Array) -> int:
    """How many pairs of equal values there are."""
    values = np.sort(values)
    _, more = np.unique(values[1:][values[1:] == values[:-1]], return_counts=True)  # a value's second, third, ...
    return int((more * (more + 1) // 2).sum())


def equal_rows(parts: list[Words]) -> int:
    """How many rows equal an earlier one."""
    keys = [lanes[:, 0] * np.uint64(ODD) ^ lanes[:, 1] for lanes in parts]  # equal for equal rows and for few others
    values = np.concatenate(keys)
    values.sort()
    twice = values[1:][values[1:] == values[:-1]]
    suspects = np.concatenate([lanes[np.isin(k, twice)] for k, lanes in zip(keys, parts, strict=True)])
    return len(suspects) - len(np.unique(suspects, axis=0))


# -- avalanche


def avalanche(words: int = 1 << 14, tensors: int = 1 << 7) -> list[list[str]]:
    """How many output bits change with one input bit, in mixed words and in fingerprints."""
    rng = np.random.default_rng(2)
    low = np.concatenate([rng.integers(0, 4, words), rng.integers(-1, 2, words)]).astype(np.float32)
    shares = np.zeros((2, 2, 64, 64))  # random or of low entropy, lane, input bit, output bit
    for share, values in zip(shares, [rng.integers(0, 1 << 64, words, np.uint64), low.view(np.uint64)], strict=True):
        for part in np.array_split(values, 16):
            flips = one_bit(part[:, None]).reshape(-1, 1)
            places = np.repeat(rng.integers(0, 1 << 20, len(part)), 65)  # each word with its 64 flips at one place
            mixed = lanes_of(flips, places).reshape(-1, 65, 2)
            share += bits_of(mixed[:, :1] ^ mixed[:, 1:]).sum(axis=0).transpose(1, 0, 2) / words
    outputs = shares.mean(axis=2)
    rows = [["output bits changed by one input bit, mixed words",
             ", ".join(f"{shares[:, k].mean():.3%} (lane {'ab'[k]})" for k in range(2)),
             f"{2 * words * 64:,} flips at random places, random words and small fp32 numbers; each output bit "
             f"{outputs.min():.2%}-{outputs.max():.2%}, of each input bit {shares.min():.2%}-{shares.max():.2%} (sigma "
             f"{0.5 / math.sqrt(words):.2%})", "50 %"]]  # fmt: skip
    small = rng.integers(0, 2, (tensors // 2, 32)).astype(np.float32).view(np.uint64)
    normal = rng.standard_normal((tensors - len(small), 32), np.float32).view(np.uint64)
    content = one_bit(np.concatenate([small, normal]))
    digests = [bind(Lanes(*lanes), "float32", (32,)) for lanes in lanes_of(content.reshape(-1, 16)).tolist()]
    if digests[0] != bind(reference(content[0, 0].tobytes()), "float32", (32,)):
        raise RuntimeError("these are not the fingerprints that the definition gives")
    raw = np.frombuffer(bytes.fromhex("".join(digests)), np.uint8).reshape(tensors, -1, 16)
    changed = np.unpackbits(raw[:, :1] ^ raw[:, 1:], axis=-1)
    each, counts = changed.mean(axis=(0, 1)), changed.sum(axis=-1)
    return [*rows, ["output bits changed by one input bit, fingerprints", f"{counts.mean():.2f} of 128",
                    f"{counts.size:,} flips in fp32 tensors of 32 elements, {counts.min()}-{counts.max()}; each output "
                    f"bit {each.min():.2%}-{each.max():.2%} (sigma {0.5 / math.sqrt(counts.size):.2%})",
                    "64 of 128"]]  # fmt: skip


def bits_of(values: Words) -> npt.NDArray[np.uint8]:
    """The 64 bits of each value, lowest first, as a last axis."""
    return np.unpackbits(values.astype("<u8")[..., None].view(np.uint8), axis=-1, bitorder="little")


if __name__ == "__main__":
    main()
