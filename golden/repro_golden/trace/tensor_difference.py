"""How far apart two buffers of one dtype are. A size is printed only when it was measured, and says over what."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from repro_golden.trace.model import DIGEST, METRIC

__all__ = ["TensorDifference", "decode", "measure", "nonzero", "policy_kl", "scalar_change", "ulp_histogram"]


@dataclass(frozen=True)
class TensorDifference:
    """The size of a difference.

    Attributes:
        elements: How many elements were compared.
        total: How many the tensor has; fewer compared means a sketch was.
        differing: How many of them have other bits.
        max_ulp: Most representable values between a pair (0 between -0.0 and 0.0); None without finite floats.
        max_abs: Largest |a - b| over finite pairs, or None when there are none.
        max_rel: Largest |a - b| / max(|a|, |b|) over finite pairs, or None likewise.
        nonfinite: Differing pairs in which a side is NaN or infinite.
        numbers: Of a metric both numbers themselves. Its change is told as a difference and a ratio: how many doubles
            lie between two numbers, one of which was perhaps printed, says nothing.
    """

    elements: int
    total: int
    differing: int
    max_ulp: int | None
    max_abs: float | None
    max_rel: float | None
    nonfinite: int
    numbers: tuple[float, float] | None = field(default=None, compare=False)

    @property
    def exact(self) -> bool:
        """Whether every element was compared."""
        return self.elements == self.total

    @property
    def only_sign_of_zero(self) -> bool:
        """Whether all that differs is 0.0 on one side and -0.0 on the other."""
        return self.differing > 0 and self.max_abs == 0 and not self.nonfinite

    def __str__(self) -> str:
        if self.elements == 0:
            return "not measured"
        if self.numbers:
            return scalar_change(*self.numbers)
        parts = [f"{self.differing} of {self.elements} elements differ"]
        if not self.exact:
            parts = [f"{self.differing} of {self.elements} sampled elements differ (of {self.total})"]
        if self.only_sign_of_zero:
            return f"{parts[0]}, in the sign of zero alone"
        if self.max_ulp is not None:
            parts.append(f"max {self.max_ulp} ULP")
        if self.max_abs is not None:
            parts.append(f"abs {self.max_abs:.3g}")
        if self.max_rel is not None:
            parts.append(f"rel {self.max_rel:.3g}")
        if self.nonfinite:
            parts.append(f"{self.nonfinite} non-finite")
        return ", ".join(parts)


def scalar_change(a: float, b: float) -> str:
    """How far a number is from what it was: ``difference -0.371, ratio 0.3495``; a word where it has no size."""
    if math.isnan(a) or math.isnan(b):
        return "NaN became other bits of NaN" if math.isnan(a) and math.isnan(b) else "NaN on one side"
    if math.isinf(a) or math.isinf(b):
        return "not finite on both sides" if math.isinf(a) and math.isinf(b) else "not finite on one side"
    if a == b:
        return "the sign of zero" if math.copysign(1.0, a) != math.copysign(1.0, b) else "difference 0"
    gap = b - a
    if a == 0:
        return f"difference {gap:+.3g}, from 0"
    ratio, over = b / a, gap / a
    near = abs(over) < _NEAR
    text = f"1 {'-' if over < 0 else '+'} {abs(over):.3g}" if near else f"{ratio:.4g}"
    return f"difference {gap:+.3g}, ratio {text}"


_NEAR = 1e-3
"""Ratios nearer to 1 are shown as their distance from it."""


# sign-magnitude formats whose ordering is that of their bits: (integer type, shift from the format to fp32 or None)
_FLOATS: dict[str, tuple[str, str]] = {
    "float64": ("<u8", "<f8"),
    "metric": ("<u8", "<f8"),
    "float32": ("<u4", "<f4"),
    "float16": ("<u2", "<f2"),
    "bfloat16": ("<u2", "bf16"),
}


def measure(dtype: str, a: bytes, b: bytes, total: int) -> TensorDifference:
    """Compare two buffers of equal length that hold elements of `dtype` (torch's name, or ``metric``).

    Args:
        dtype: Their element type. Types without an order of bits are compared as bytes or integers; digests that
            stand for tensors (`DIGEST`) are not measured, since their distance says nothing of the tensors'.
        a: The baseline's values.
        b: The other side's.
        total: Elements of the whole tensor, to tell a sketch from a full comparison.

    Raises:
        ValueError: the buffers differ in length.
    """
    if len(a) != len(b):
        raise ValueError(f"buffers of {len(a)} and {len(b)} bytes cannot be compared")
    if dtype == DIGEST:
        return TensorDifference(0, total, 0, None, None, None, 0)
    if dtype not in _FLOATS:
        return _integers(dtype, a, b, total)
    word, kind = _FLOATS[dtype]
    bits_a, bits_b = np.frombuffer(a, word), np.frombuffer(b, word)
    value_a, value_b = _values(bits_a, kind), _values(bits_b, kind)
    differ = bits_a != bits_b
    finite = np.isfinite(value_a) & np.isfinite(value_b)
    chosen = differ & finite
    ulp: int | None = None
    gap = rel = None
    if finite.any():
        steps = [_ulp(int(x), int(y), bits_a.itemsize * 8) for x, y in zip(bits_a[chosen], bits_b[chosen], strict=True)]
        ulp = max(steps, default=0)
        with np.errstate(over="ignore"):
            distance = np.abs(value_a[chosen] - value_b[chosen])
        scale = np.maximum(np.abs(value_a[chosen]), np.abs(value_b[chosen]))
        gap = float(distance.max(initial=0.0))
        rel = float(np.divide(distance, scale, out=np.zeros_like(distance), where=scale > 0).max(initial=0.0))
    numbers = (float(value_a[0]), float(value_b[0])) if dtype == METRIC and len(bits_a) == 1 else None
    return TensorDifference(
        len(bits_a), total, int(differ.sum()), ulp, gap, rel, int((differ & ~finite).sum()), numbers
    )


def _values(bits: npt.NDArray[Any], kind: str) -> npt.NDArray[np.float64]:
    if kind == "bf16":  # bf16 is the upper half of an fp32
        return (bits.astype("<u4") << np.uint32(16)).view("<f4").astype(np.float64)
    return bits.view(kind).astype(np.float64)


def decode(dtype: str, raw: bytes) -> npt.NDArray[np.float64]:
    """Raw values of a floating-point dtype, bool or integers as fp64.

    Raises:
        ValueError: a dtype that has no order, such as complex.
    """
    if dtype in _FLOATS:
        word, kind = _FLOATS[dtype]
        return _values(np.frombuffer(raw, word), kind)
    word = _WORDS.get(dtype, "|u1" if dtype in ("uint8", "bool") else "V")
    if word.startswith("V"):
        raise ValueError(f"values of {dtype} have no order")
    return np.frombuffer(raw, word).astype(np.float64)


def nonzero(raw: bytes, count: int) -> npt.NDArray[np.bool_]:
    """Which of `count` elements have a bit set, whatever their dtype: a mask as the field writes it."""
    if count == 0:
        return np.zeros(0, bool)
    mask: npt.NDArray[np.bool_] = (np.frombuffer(raw, np.uint8).reshape(count, -1) != 0).any(axis=1)
    return mask


def ulp_histogram(dtype: str, a: bytes, b: bytes) -> list[tuple[int, int]]:
    """How many pairs are how far apart: ``(most, count)`` for distances of 1, 2, up to 4 … values of the dtype.

    Pairs with equal bits and pairs that are not finite are left out, as are dtypes without an order of bits: then the
    list is empty. The two zeros are 0 apart: they count under ``most = 0``.

    Raises:
        ValueError: the buffers differ in length.
    """
    if len(a) != len(b):
        raise ValueError(f"buffers of {len(a)} and {len(b)} bytes cannot be compared")
    if dtype not in _FLOATS:
        return []
    word, kind = _FLOATS[dtype]
    bits = [np.frombuffer(raw, word) for raw in (a, b)]
    chosen = (bits[0] != bits[1]) & np.isfinite(_values(bits[0], kind)) & np.isfinite(_values(bits[1], kind))
    sign = 1 << (bits[0].itemsize * 8 - 1)
    # Python's integers: the distance of two fp64 of opposite sign does not fit 64 bits
    ordered = [[-(v & (sign - 1)) if v & sign else v for v in side[chosen].tolist()] for side in bits]
    counts = Counter(_most(abs(x - y)) for x, y in zip(*ordered, strict=True))
    return sorted(counts.items())


def _most(distance: int) -> int:
    """The power of two that bounds a distance."""
    return 0 if distance == 0 else 1 << (distance - 1).bit_length()


def _ulp(x: int, y: int, bits: int) -> int:
    """Representable values between two floats given by their bits; both zeros are one value."""
    sign = 1 << (bits - 1)
    ordered = [-(v & (sign - 1)) if v & sign else v for v in (x, y)]
    return abs(ordered[0] - ordered[1])


# integers by their value; a complex number is one element whose size has no order
_WORDS = {
    "int64": "<i8", "int32": "<i4", "int16": "<i2", "int8": "|i1", "uint16": "<u2", "uint32": "<u4", "uint64": "<u8",
    "complex32": "V4", "complex64": "V8", "complex128": "V16",
}  # fmt: skip


def _integers(dtype: str, a: bytes, b: bytes, total: int) -> TensorDifference:
    word = _WORDS.get(dtype, "|u1")
    x, y = np.frombuffer(a, word), np.frombuffer(b, word)
    differ = x != y
    if word.startswith("V"):
        return TensorDifference(len(x), total, int(differ.sum()), None, None, None, 0)
    gap = max((abs(int(p) - int(q)) for p, q in zip(x[differ], y[differ], strict=True)), default=0)
    elements = len(x) if word != "|u1" or total == 0 or len(x) <= total else total
    return TensorDifference(elements, total, int(differ.sum()), None, float(gap) if word != "|u1" else None, None, 0)


def policy_kl(
    a: npt.NDArray[np.float64], b: npt.NDArray[np.float64], mask: npt.NDArray[np.bool_] | None
) -> tuple[float, float]:
    """KL(a || b) over recorded tokens by the k1 and k3 estimators (Schulman, "Approximating KL divergence", 2020).

    Args:
        a: Log-probs of the baseline's policy, in nats, fp64 [response tokens].
        b: The other policy's, on the same tokens.
        mask: Which tokens count, bool [response tokens], or None for all.

    Returns:
        Means over unmasked tokens in fp64; NaN when there are none, or where a log-prob is not finite.
    """
    if mask is not None:
        a, b = a[mask], b[mask]
    if len(a) == 0 or not (np.isfinite(a).all() and np.isfinite(b).all()):
        return float("nan"), float("nan")
    with np.errstate(invalid="ignore", over="ignore"):
        log_ratio = b - a  # log(b/a) on samples of the policy that rolled out
        return float(-log_ratio.mean()), float((np.expm1(log_ratio) - log_ratio).mean())
