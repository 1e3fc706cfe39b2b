from __future__ import annotations

import itertools
import math
import struct
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor

from repro_golden.fingerprint import Lanes, add, bind, dtype_name, fingerprint, reference, scan
from repro_golden.fingerprint.views import SKETCH, sketch_positions

torch.set_num_threads(1)

FP8 = (
    torch.float8_e4m3fn,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2,
    torch.float8_e5m2fnuz,
    torch.float8_e8m0fnu,
)
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.uint16, torch.int32, torch.uint32, torch.int64, torch.uint64)
DTYPES = (torch.bool, *INTEGERS, *FP8, *FLOATS, torch.complex64, torch.complex128)
M = (1 << 64) - 1


def from_bytes(raw: bytes, dtype: torch.dtype) -> Tensor:
    """A flat tensor over these bytes; for bool each byte is cut to its lowest bit."""
    if dtype == torch.bool:
        raw = bytes(b & 1 for b in raw)
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8).view(dtype) if raw else torch.empty(0, dtype=dtype)


def plain(content: bytes, first_word: int = 0) -> Lanes:
    """psum128 with Python's integers, written from the definition's words."""
    c1, c2, c3, c4 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB, 0xFF51AFD7ED558CCD
    a = b = 0
    for i in range(0, len(content), 8):
        word = int.from_bytes(content[i : i + 8], "little")
        key = (first_word + i // 8 + 1) * c1 & M
        z = word ^ key
        z = (z ^ z >> 33) * c2 & M
        z = (z ^ z >> 29) * c3 & M
        z ^= z >> 32
        x, y = z * c1 & M, (z ^ key) * c4 & M
        a, b = (a + (x ^ x >> 32)) & M, (b + (y ^ y >> 32)) & M
    return Lanes(a, b)


def elements(t: Tensor) -> bytes:
    """Row-major bytes, gathered element by element from the storage."""
    item, storage = t.element_size(), bytes(t.untyped_storage().tolist())
    offsets = (
        t.storage_offset() + sum(i * s for i, s in zip(index, t.stride(), strict=True))
        for index in itertools.product(*map(range, t.shape))
    )
    return b"".join(storage[o * item : (o + 1) * item] for o in offsets)


@st.composite
def views(draw: st.DrawFn) -> Tensor:
    """A view of any dtype: 0 to 3 dimensions, empty ones too, strides 0 to 4 in any order, any storage offset."""
    shape = draw(st.lists(st.integers(0, 5), max_size=3))
    strides = draw(st.lists(st.integers(0, 4), min_size=len(shape), max_size=len(shape)))
    offset = draw(st.integers(0, 9))
    dtype = draw(st.sampled_from(DTYPES))
    span = offset + sum((n - 1) * s for n, s in zip(shape, strides, strict=True) if n) + 1
    size = span * torch.empty(0, dtype=dtype).element_size()
    raw = draw(st.binary(min_size=size, max_size=size))
    return from_bytes(raw, dtype).as_strided(shape, strides, offset)


def same(a: Tensor, b: Tensor) -> bool:
    return fingerprint(a) == fingerprint(b)


# -- the definition


@given(st.binary(max_size=70), st.integers(0, 2**40))
def test_the_reference_is_the_definition(content: bytes, first_word: int) -> None:
    """The NumPy reference equals the definition carried out in Python's integers, at any place in a tensor."""
    assert reference(content, first_word) == plain(content, first_word)


@given(views())
def test_any_view_has_the_reference_fingerprint(t: Tensor) -> None:
    """The fast path equals the reference over row-major bytes, whatever dtype, shape, strides and storage offset."""
    raw = elements(t)
    assert scan(t).lanes == reference(raw)
    assert fingerprint(t) == bind(reference(raw), dtype_name(t.dtype), t.shape) == fingerprint(t.clone())


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
def test_every_tail_and_alignment(dtype: torch.dtype) -> None:
    """Every dtype agrees with the reference for 0 to 19 elements from offsets 0 to 8: each tail, each alignment."""
    rng = np.random.default_rng(1)
    flat = from_bytes(rng.bytes(28 * torch.empty(0, dtype=dtype).element_size()), dtype)
    whole = elements(flat)
    for count, offset in itertools.product(range(20), range(9)):
        item = flat.element_size()
        assert scan(flat[offset : offset + count]).lanes == reference(whole[offset * item : (offset + count) * item])


@pytest.mark.parametrize("count", [4096, 65_537, 300_003])
def test_large_tensors_agree_with_the_reference(count: int) -> None:
    """Large tensors, contiguous or transposed, bf16 or fp32, have the reference's lanes."""
    generator = torch.Generator().manual_seed(count)
    for dtype in (torch.bfloat16, torch.float32):
        x = torch.randn(count, generator=generator).to(dtype)
        assert scan(x).lanes == reference(x.view(torch.uint8).numpy().tobytes())
        y = x[: count // 3 * 3].reshape(3, -1).T
        assert scan(y).lanes == reference(y.contiguous().view(torch.uint8).numpy().tobytes())


@pytest.mark.parametrize(
    "t",
    [
        torch.tensor([1 + 2j, -0.0 + 3j]).conj(),
        torch.tensor([1 + 2j, 5 - 0j]).conj().imag,
        torch.ones(3).expand(4, 3),
        torch.nn.Parameter(torch.arange(6.0).reshape(2, 3)).T,
        torch.arange(24.0).reshape(2, 3, 4).permute(2, 0, 1)[1::2],
        torch.tensor(1.5),
        torch.empty(0, 3),
    ],
    ids=["conjugate", "negative", "expanded", "parameter", "permuted", "0-d", "empty"],
)
def test_lazy_views_stand_for_their_values(t: Tensor) -> None:
    """Lazy conjugates and negatives, expansions, permutations and parameters are hashed by the values they show."""
    shown = t.detach().resolve_conj().resolve_neg().contiguous().clone()
    assert same(t, shown) and scan(t) == scan(shown)
    assert scan(t).lanes == reference(elements(shown))


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
def test_one_element_of_a_matrix(dtype: torch.dtype) -> None:
    """A slice of one element, whose stride torch leaves at the row's length, is hashed like the element itself."""
    matrix = from_bytes(bytes(range(1, 65)) * 4, dtype)[:9].reshape(3, 3)
    assert fingerprint(matrix[1:2, 2]) == fingerprint(matrix[1, 2].clone().reshape(1))
    assert fingerprint(matrix[1:2, 2:3]) == fingerprint(matrix[1, 2].clone().reshape(1, 1))


# -- algebra


@given(st.binary(max_size=200), st.lists(st.integers(0, 25), max_size=5), st.randoms(use_true_random=False))
def test_shards_add_up(content: bytes, cuts: list[int], random: object) -> None:
    """Shards cut at words add up to the whole in any order, empty ones included; no shards are empty content."""
    edges = sorted({0, len(content), *(min(8 * c, len(content)) for c in cuts)})
    shares = [reference(content[a:b], a // 8) for a, b in itertools.pairwise(edges)]
    random.shuffle(shares)  # type: ignore[attr-defined]
    assert add(shares) == reference(content)
    assert add([]) == reference(b"") == Lanes(0, 0)


@given(st.lists(st.tuples(st.integers(0, M), st.integers(0, M)), max_size=4))
def test_lanes_are_a_group_modulo_2_64(pairs: list[tuple[int, int]]) -> None:
    """`add` sums each lane modulo 2^64, in groups as at once, and 16 bytes hold a lane pair exactly."""
    shares = [Lanes(*p) for p in pairs]
    assert add(shares) == Lanes(sum(a for a, _ in pairs) % 2**64, sum(b for _, b in pairs) % 2**64)
    assert add([add(shares[:2]), add(shares[2:])]) == add(shares)
    assert all(Lanes.from_bytes(s.to_bytes()) == s and len(s.to_bytes()) == 16 for s in shares)


# -- every change is seen


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
def test_every_single_bit_counts(dtype: torch.dtype) -> None:
    """Flipping any one bit of a tensor gives another fingerprint in both lanes, and no two flips give the same."""
    count = max(1, 40 // torch.empty(0, dtype=dtype).element_size())
    base = np.random.default_rng(2).bytes(count * torch.empty(0, dtype=dtype).element_size())
    base = bytes(b & 1 for b in base) if dtype == torch.bool else base
    seen = [scan(from_bytes(base, dtype)).lanes]
    for bit in range(0, 8 * len(base), 8 if dtype == torch.bool else 1):
        flipped = bytearray(base)
        flipped[bit // 8] ^= 1 << bit % 8
        seen.append(scan(from_bytes(bytes(flipped), dtype)).lanes)
    assert len({s.a for s in seen}) == len({s.b for s in seen}) == len(seen)


@given(st.lists(st.integers(-(2**63), 2**63 - 1), min_size=2, max_size=12), st.data())
def test_swapped_words_are_seen(words: list[int], data: st.DataObject) -> None:
    """Swapping two unequal words changes the fingerprint; swapping equal ones does not."""
    i, j = data.draw(st.tuples(*[st.integers(0, len(words) - 1)] * 2))
    swapped = list(words)
    swapped[i], swapped[j] = swapped[j], swapped[i]
    assert same(torch.tensor(words), torch.tensor(swapped)) == (words[i] == words[j])


@given(st.lists(st.floats(width=32), min_size=1, max_size=9), st.permutations(range(9)), st.integers(0, 8))
def test_signs_order_and_length_are_seen(values: list[float], order: list[int], at: int) -> None:
    """A flipped sign (of 0 and NaN too), a permutation, an inserted equal pair and zero padding are all seen."""
    x = torch.tensor(values, dtype=torch.float32)
    at %= len(values)
    negated = x.clone()
    negated[at] = -negated[at]
    assert not same(x, negated)
    permuted = x[[i for i in order if i < len(values)]]
    assert same(x, permuted) == (x.view(torch.int32).tolist() == permuted.view(torch.int32).tolist())
    assert not same(x, torch.cat([x[:at], x[at : at + 1], x[at : at + 1], x[at:]]))
    assert not same(x, torch.cat([x, torch.zeros(1)]))


@given(st.integers(2, 6), st.integers(2, 6), st.binary(min_size=144, max_size=144))
def test_shape_and_transposition_are_seen(rows: int, columns: int, raw: bytes) -> None:
    """A reshape keeps the lanes and changes the fingerprint; a transposition that moves a bit changes the lanes."""
    x = from_bytes(raw, torch.float32)[: rows * columns].reshape(rows, columns)
    for other in (x.reshape(-1), x.reshape(1, rows, columns), x.reshape(rows, columns, 1)):
        assert scan(other).lanes == scan(x).lanes and not same(other, x)
    assume(elements(x) != elements(x.T))
    assert scan(x).lanes != scan(x.T).lanes and not same(x, x.T)


def test_equal_bytes_of_another_dtype_or_shape_differ() -> None:
    """All dtypes over the same zero bytes, all shapes of no elements, and a 0-d tensor, have distinct fingerprints."""
    every_dtype = [torch.zeros(16, dtype=torch.uint8).view(d) for d in DTYPES]
    empties = [torch.empty(shape) for shape in [(0,), (0, 0), (0, 1), (1, 0), (12, 0), (0, 0, 1), (0, 1, 0)]]
    singles = [torch.zeros(shape) for shape in [(), (1,), (1, 1), (1, 1, 1)]]
    seen = [fingerprint(t) for t in [*every_dtype, *empties, *singles]]
    assert len(set(seen)) == len(seen)


SHAPES = st.lists(st.integers(0, 12), max_size=4)


@given(SHAPES, SHAPES, *[st.sampled_from(["int8", "int16", "float16"])] * 2)
def test_dtype_and_shape_are_bound_without_ambiguity(a: list[int], b: list[int], x: str, y: str) -> None:
    """Over equal lanes, fingerprints are equal only for equal dtypes and shapes; digits never run together."""
    assert (bind(Lanes(1, 2), x, a) == bind(Lanes(1, 2), y, b)) == ((x, a) == (y, b))
    assert not same(torch.zeros(11, 1), torch.zeros(1, 11))


@pytest.mark.parametrize("dtype", [*FLOATS, *FP8[:1], FP8[2]], ids=dtype_name)
def test_zeros_and_nans_are_told_apart_by_their_bits(dtype: torch.dtype) -> None:
    """-0.0 is not 0.0, and NaN bit patterns of a format have a fingerprint each."""
    size = torch.empty(0, dtype=dtype).element_size()
    zero, negative = bytes(size), bytes(size - 1) + b"\x80"
    assert not same(from_bytes(zero, dtype), from_bytes(negative, dtype))
    if size <= 2:
        patterns = [i.to_bytes(size, "little") for i in range(256**size)][-300:]
    else:
        top = {4: 0x7FC00000, 8: 0x7FF8000000000000}[size]
        patterns = [((top + k) | s << (8 * size - 1)).to_bytes(size, "little") for k in range(300) for s in (0, 1)]
    nans = [p for p in patterns if from_bytes(p, dtype).to(torch.float64).isnan().item()][:150]
    assert len(nans) > 1
    assert len({fingerprint(from_bytes(p, dtype)) for p in nans}) == len(nans)


def test_signs_of_both_halves_of_a_word_are_mixed() -> None:
    """Tensors whose negatives collided when the first fold was by half a word are told apart."""
    x = torch.tensor([8903.0, 31393.0, -19812.0, -14709.0])
    assert not same(x, -x) and not same(x.view(torch.complex64), (-x).view(torch.complex64))


# -- known unsound hashes: a collision of each, which ours tells apart

ONES, TWO_ROWS = torch.ones(128, 128), torch.arange(6.0).reshape(2, 3)
NAN_A, NAN_B = (from_bytes(struct.pack("<I", bits), torch.float32) for bits in (0x7FC00000, 0x7FC00001))
UNSOUND: dict[str, tuple[Callable[[Tensor], object], Tensor, Tensor]] = {
    "XOR sum, equal pairs cancel": (lambda t: int(torch.hash_tensor(t)), ONES, torch.zeros(128, 128)),
    "XOR sum, blind to order": (lambda t: int(torch.hash_tensor(t)), torch.arange(9.0), torch.arange(9.0).flip(0)),
    "XOR sum, blind to shape": (lambda t: int(torch.hash_tensor(t)), ONES[:2, :8], ONES[:4, :4]),
    "XOR sum, inserted pair": (lambda t: int(torch.hash_tensor(t)), ONES[0, :3], ONES[0, :5]),
    "L1 norm, blind to sign": (lambda t: float(t.abs().sum()), torch.tensor([1.0, 2.0]), torch.tensor([1.0, -2.0])),
    "L1 norm, blind to order": (lambda t: float(t.abs().sum()), torch.tensor([1.0, 2.0]), torch.tensor([2.0, 1.0])),
    "L2 norm": (lambda t: float(t.norm()), torch.tensor([3.0, 4.0]), torch.tensor([5.0, 0.0])),
    "sum": (lambda t: float(t.sum()), torch.tensor([1.0, 1e20]), torch.tensor([2.0, 1e20])),
    "first row": (lambda t: tuple(t[0].tolist()), TWO_ROWS, TWO_ROWS.clone().index_put((torch.tensor(1),), ONES[0, 0])),
    "cast to fp32, from fp64": (
        lambda t: scan(t.float()).lanes,
        torch.tensor([1.0], dtype=torch.float64),
        torch.tensor([1.0 + 2**-40], dtype=torch.float64),
    ),
    "cast to fp32, other dtype": (lambda t: scan(t.float()).lanes, ONES[:2], ONES[:2].bfloat16()),
    "cast to fp64, other dtype": (lambda t: scan(t.double()).lanes, ONES[:2], ONES[:2].double()),
    "cast to bf16": (lambda t: scan(t.bfloat16()).lanes, ONES[:1], ONES[:1] + 2**-12),
    "NaN as equal": (lambda t: scan(t.nan_to_num(7.0)).lanes, NAN_A, NAN_B),
    "-0.0 as 0.0": (lambda t: scan(t + 0.0).lanes, torch.tensor([0.0]), torch.tensor([-0.0])),
    "bytes without dtype": (lambda t: scan(t).lanes, torch.tensor([1.0]), torch.tensor([1.0]).view(torch.int32)),
    "bytes without shape": (lambda t: scan(t).lanes, TWO_ROWS, TWO_ROWS.reshape(3, 2)),
}


@pytest.mark.parametrize("name", UNSOUND)
def test_unsound_hashes_collide_where_ours_does_not(name: str) -> None:
    """Each known unsound hash is blind to a pair of unequal tensors that the fingerprint tells apart."""
    unsound, a, b = UNSOUND[name]
    assert unsound(a) == unsound(b)
    assert not same(a, b)


# -- statistics and sketch


def check_statistics(t: Tensor) -> None:
    values = t.to(torch.float64).reshape(-1).tolist()
    finite = [abs(v) for v in values if math.isfinite(v)]
    scanned = scan(t)
    assert scanned.nonfinite == len(values) - len(finite)
    assert scanned.absmax == max(finite, default=0.0)
    assert math.isclose(scanned.l2, math.sqrt(math.fsum(v * v for v in finite)), rel_tol=1e-12)
    assert type(scanned.nonfinite) is int and type(scanned.absmax) is type(scanned.l2) is float


@given(st.sampled_from([*FLOATS, *FP8]), st.lists(st.floats(-1e100, 1e100) | st.just(math.nan), max_size=20), st.data())
def test_statistics_are_right(dtype: torch.dtype, values: list[float], data: st.DataObject) -> None:
    """Non-finite count, largest finite magnitude and l2 equal a plain computation, with NaN, infinities and none."""
    values += data.draw(st.lists(st.sampled_from([math.inf, -math.inf, -0.0, 5e-324]), max_size=3))
    t = torch.tensor(values, dtype=torch.float64).to(dtype)
    check_statistics(t)
    check_statistics(t[1:])
    check_statistics(t.reshape(-1, 1).expand(-1, 2))


@pytest.mark.parametrize("dtype", [torch.bool, *INTEGERS, *FP8, torch.float16, torch.bfloat16], ids=dtype_name)
def test_statistics_over_every_pattern(dtype: torch.dtype) -> None:
    """Statistics are right for every 8- or 16-bit pattern of a format (a sample for wider integers)."""
    size = torch.empty(0, dtype=dtype).element_size()
    raw = bytes(range(256)) if size == 1 else np.arange(65536, dtype="<u2").tobytes()
    check_statistics(from_bytes(raw, dtype))
    check_statistics(from_bytes(raw[-40 * size :], dtype))


@given(st.integers(0, 3000))
def test_a_sketch_is_the_values_at_fixed_positions(count: int) -> None:
    """Sketch positions depend on the count alone, lie inside, and are all of a small tensor; the sketch is raw."""
    positions = sketch_positions(count).tolist()
    assert positions == sorted(positions) == sketch_positions(count).tolist()
    assert all(0 <= p < count for p in positions) and len(positions) == min(count, SKETCH)
    assert count > SKETCH or positions == list(range(count))
    x = torch.arange(count, dtype=torch.int32) - 7
    assert scan(x).sketch == struct.pack(f"<{len(positions)}i", *(p - 7 for p in positions))
