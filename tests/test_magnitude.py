from __future__ import annotations

import math
import struct
from functools import cache
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from repro_golden.fingerprint import dtype_name
from repro_golden.trace.tensor_difference import TensorDifference, measure, policy_kl

torch.set_num_threads(1)

HALVES = {"float16": torch.float16, "bfloat16": torch.bfloat16}
WIDE = {"float32": ("<f", 32), "float64": ("<d", 64), "metric": ("<d", 64)}
OTHERS = (torch.uint64, torch.float8_e4m3fn, *HALVES.values(), torch.float32, torch.float64, torch.complex64)
NAN, INF = math.nan, math.inf


def raw(values: torch.Tensor) -> bytes:
    return values.reshape(-1).view(torch.uint8).numpy().tobytes()


@cache
def walk(dtype: str) -> list[bytes]:
    """Every finite value of a 16-bit format from the lowest up, found step by step with nextafter; one zero."""
    up = torch.tensor(INF, dtype=HALVES[dtype])
    at, values = torch.nextafter(-up, up), []
    while at.isfinite():
        values.append(raw(at))
        at = torch.nextafter(at, up)
    return values


# -- units in the last place


@pytest.mark.parametrize("dtype", HALVES)
def test_ulp_is_the_number_of_nextafter_steps(dtype: str) -> None:
    """Every pair within 30 steps around zero, the smallest normal, one and the largest value: the count of steps."""
    values = walk(dtype)
    finfo = torch.finfo(HALVES[dtype])
    zero = len(values) // 2
    assert values[zero][:1] == b"\0" and len(values) % 2 == 1
    marks = [values.index(raw(torch.tensor(v, dtype=HALVES[dtype]))) for v in (finfo.smallest_normal, 1.0, -1.0)]
    for mark in (15, zero, *marks, len(values) - 16):
        for i in range(mark - 15, mark + 16):
            pairs = range(mark - 15, mark + 16, 1 if i == mark else 4)
            assert [measure(dtype, values[i], values[j], 1).max_ulp for j in pairs] == [abs(i - j) for j in pairs]


@given(st.sampled_from(sorted(HALVES)), st.data())
def test_ulp_over_any_distance(dtype: str, data: st.DataObject) -> None:
    """The distance of any two finite 16-bit floats is the number of nextafter steps between them."""
    values = walk(dtype)
    i, j = (data.draw(st.integers(0, len(values) - 1)) for _ in range(2))
    assert measure(dtype, values[i], values[j], 1).max_ulp == abs(i - j)


@given(st.sampled_from(sorted(WIDE)), st.data())
def test_ulp_of_wide_floats(dtype: str, data: st.DataObject) -> None:
    """fp32 and fp64: nextafter is 1 away, distances are symmetric, add up along the line and mirror at zero."""
    code, width = WIDE[dtype]
    kind = np.float32 if width == 32 else np.float64
    finite = st.floats(width=width, allow_nan=False, allow_infinity=False)
    x, y, z = (kind(v) for v in sorted(data.draw(st.tuples(finite, finite, finite))))

    def ulp(p: float, q: float) -> int:
        distance = measure(dtype, struct.pack(code, p), struct.pack(code, q), 1).max_ulp
        assert distance is not None
        return distance

    assert ulp(x, z) == ulp(z, x) == ulp(x, y) + ulp(y, z)
    assert ulp(x, x) == 0 and ulp(x, -x) == 2 * ulp(x, 0.0) == 2 * ulp(x, -0.0)
    with np.errstate(over="ignore", under="ignore"):
        up = np.nextafter(y, kind(INF))
    assert np.isinf(up) or ulp(y, up) == 1


@pytest.mark.parametrize("dtype", [*HALVES, *WIDE])
def test_signed_zeros_differ_by_nothing(dtype: str) -> None:
    """0.0 and -0.0 are differing elements that lie 0 ULP, 0 absolute and 0 relative apart."""
    size = {"float16": 2, "bfloat16": 2, "float32": 4}.get(dtype, 8)
    zero, negative = bytes(size), bytes(size - 1) + b"\x80"
    assert measure(dtype, zero, negative, 1) == TensorDifference(1, 1, 1, 0, 0.0, 0.0, 0)


# -- sizes over buffers

PAIRS = st.lists(st.tuples(*[st.floats(width=32) | st.sampled_from([0.0, -0.0, 1.0, INF, NAN])] * 2), max_size=12)


@given(PAIRS, st.integers(0, 5))
def test_sizes_equal_a_plain_computation(pairs: list[tuple[float, float]], extra: int) -> None:
    """Counts, largest ULP, absolute and relative difference over finite pairs equal a loop in Python."""
    a, b = (struct.pack(f"<{len(pairs)}f", *side) for side in (zip(*pairs, strict=True) if pairs else ((), ())))
    total = len(pairs) + extra
    magnitude = measure("float32", a, b, total)
    differ = [(x, y) for x, y in pairs if struct.pack("<f", x) != struct.pack("<f", y)]
    finite = [(x, y) for x, y in differ if math.isfinite(x) and math.isfinite(y)]
    any_finite = any(math.isfinite(x) and math.isfinite(y) for x, y in pairs)
    ulps = [measure("float32", struct.pack("<f", x), struct.pack("<f", y), 1).max_ulp or 0 for x, y in finite]
    assert magnitude == TensorDifference(
        len(pairs),
        total,
        len(differ),
        max(ulps, default=0) if any_finite else None,
        max((abs(x - y) for x, y in finite), default=0.0) if any_finite else None,
        max((abs(x - y) / max(abs(x), abs(y), 5e-324) for x, y in finite), default=0.0) if any_finite else None,
        len(differ) - len(finite),
    )
    assert magnitude.exact == (extra == 0)


@pytest.mark.parametrize("dtype", [*HALVES, *WIDE])
def test_non_finite_pairs_have_no_size(dtype: str) -> None:
    """NaN and infinities are counted, never measured; NaNs of equal bits do not differ."""
    kind = HALVES.get(dtype, torch.float32 if dtype == "float32" else torch.float64)
    a, b = raw(torch.tensor([NAN, INF, 1.0], dtype=kind)), raw(torch.tensor([NAN, -INF, INF], dtype=kind))
    assert measure(dtype, a, b, 3) == TensorDifference(3, 3, 2, None, None, None, 2)
    assert str(measure(dtype, a, b, 3)) == "2 of 3 elements differ, 2 non-finite"


@pytest.mark.parametrize(
    "dtype",
    [torch.bool, torch.uint8, torch.int8, torch.int16, torch.uint16, torch.int32, torch.uint32, torch.int64, *OTHERS],
    ids=dtype_name,
)
@pytest.mark.parametrize("total", [5, 1000])
def test_elements_are_counted_whatever_the_dtype(dtype: torch.dtype, total: int) -> None:
    """Of five elements of any dtype that all bytes of two differ: 5 compared, 2 differ, sketch or not."""
    size = torch.empty(0, dtype=dtype).element_size()
    a, b = bytes(5 * size), bytes(size) + b"\1" * size * 2 + bytes(2 * size)
    magnitude = measure(dtype_name(dtype), a, b, total)
    assert (magnitude.elements, magnitude.differing, magnitude.total, magnitude.exact) == (5, 2, total, total == 5)


@given(st.lists(st.tuples(*[st.integers(-(2**63), 2**63 - 1)] * 2), min_size=1, max_size=8))
def test_integers_have_an_absolute_size_alone(pairs: list[tuple[int, int]]) -> None:
    """int64: the largest distance without overflow, no ULP and no relative size."""
    a, b = (struct.pack(f"<{len(pairs)}q", *side) for side in zip(*pairs, strict=True))
    gap = float(max(abs(x - y) for x, y in pairs))
    assert measure("int64", a, b, len(pairs)) == TensorDifference(
        len(pairs), len(pairs), sum(x != y for x, y in pairs), None, gap, None, 0
    )


def test_empty_and_unequal_buffers() -> None:
    """Nothing compared prints as not measured; buffers of unequal length are refused."""
    for dtype in ("float32", "int64", "bool", "bfloat16"):
        empty = measure(dtype, b"", b"", 0)
        assert str(empty) == "not measured" and (empty.elements, empty.differing) == (0, 0)
    with pytest.raises(ValueError, match="4 and 8 bytes"):
        measure("float32", bytes(4), bytes(8), 2)


def test_a_sketch_says_that_it_is_one() -> None:
    """The text names the sample and the whole, so that a sampled size is never taken for the tensor's."""
    a, b = struct.pack("<2f", 1.0, 2.0), struct.pack("<2f", 1.0, 2.5)
    assert str(measure("float32", a, b, 2)).startswith("1 of 2 elements differ, max 2097152 ULP, abs 0.5, rel 0.2")
    assert str(measure("float32", a, b, 9)).startswith("1 of 2 sampled elements differ (of 9), max")


def test_neighbours_of_halves_are_one_apart_throughout() -> None:
    """Over all fp16 and bf16 values at once, each and its successor lie at most, and somewhere exactly, 1 ULP apart."""
    for dtype in HALVES:
        values = walk(dtype)
        lower, upper = b"".join(values[:-1]), b"".join(values[1:])
        magnitude = measure(dtype, lower, upper, len(values) - 1)
        assert magnitude.max_ulp == 1 and magnitude.differing == magnitude.elements == len(values) - 1
        assert all(p != q for p, q in pairwise(values))


# -- KL

LOG_PROBS = st.lists(st.tuples(*[st.floats(-20, 0, width=32)] * 2, st.integers(0, 2)), max_size=12)


@given(LOG_PROBS, st.booleans())
def test_kl_is_the_mean_of_the_estimators(rows: list[tuple[float, float, int]], masked: bool) -> None:
    """k1 = mean(log a - log b) and k3 = mean(b/a - 1 - log(b/a)) over unmasked tokens; NaN when there are none."""
    a, b = (np.array([r[k] for r in rows], dtype=np.float64) for k in (0, 1))
    mask = np.array([bool(r[2]) for r in rows], dtype=bool) if masked else None
    kept = [(x, y) for x, y, m in rows if m or not masked]
    k1, k3 = policy_kl(a, b, mask)
    if not kept:
        assert math.isnan(k1) and math.isnan(k3)
        return
    assert math.isclose(k1, math.fsum(x - y for x, y in kept) / len(kept), rel_tol=1e-12, abs_tol=1e-12)
    plain = math.fsum(math.expm1(y - x) - (y - x) for x, y in kept) / len(kept)
    assert math.isclose(k3, plain, rel_tol=1e-12, abs_tol=1e-12)
    assert k3 >= 0.0 and (a.tobytes() != b.tobytes() or (k1, k3) == (0.0, 0.0))


@pytest.mark.parametrize(("x", "y"), [(-INF, -1.0), (-1.0, -INF), (-INF, -INF), (-1.0, INF), (NAN, -1.0), (-1.0, NAN)])
def test_a_log_prob_that_is_not_finite_gives_nan(x: float, y: float) -> None:
    """A NaN or infinite log-prob on either side makes both estimates NaN; masked out it plays no part."""
    a, b = np.array([x, -2.0]), np.array([y, -2.0])
    assert all(map(math.isnan, policy_kl(a, b, None)))
    assert policy_kl(a, b, np.array([False, True])) == (0.0, 0.0)


def test_the_sign_of_zero_is_called_that() -> None:
    """Elements that differ by nothing, 0.0 and -0.0, have no size; beside one that has, the most is told as ever."""
    sides = [struct.pack("<3f", *numbers) for numbers in ((0.0, -0.0, 1.0), (-0.0, 0.0, 1.0), (-0.0, 0.0, 2.0))]
    assert str(measure("float32", sides[0], sides[1], 3)) == "2 of 3 elements differ, in the sign of zero alone"
    assert str(measure("float32", sides[0], sides[1], 9)).endswith("(of 9), in the sign of zero alone")
    assert str(measure("float32", sides[0], sides[2], 3)) == "3 of 3 elements differ, max 8388608 ULP, abs 1, rel 0.5"


@pytest.mark.parametrize(
    ("a", "b", "shown"),
    [
        (0.5705564022064209, 0.19941972196102142, "difference -0.371, ratio 0.3495"),
        (-0.07745677, -0.07702231, "difference +0.000434, ratio 0.9944"),
        (1.0, 1.0 + 2**-52, "difference +2.22e-16, ratio 1 + 2.22e-16"),
        (0.0, 0.5, "difference +0.5, from 0"),
        (0.0, -0.0, "the sign of zero"),
        (math.nan, 1.0, "NaN on one side"),
        (1.0, math.inf, "not finite on one side"),
    ],
)
def test_a_metric_moves_by_a_difference_and_a_ratio(a: float, b: float, shown: str) -> None:
    """Doubles that lie between two numbers, one of them perhaps printed, are never counted at a reader."""
    size = measure("metric", struct.pack("<d", a), struct.pack("<d", b), 1)
    assert str(size) == shown
    assert "ULP" in str(measure("float64", struct.pack("<d", 1.0), struct.pack("<d", 2.0), 1))
