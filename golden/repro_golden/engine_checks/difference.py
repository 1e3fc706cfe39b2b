"""How the responses of a rollout engine differ: the first place, and how far apart. Bits are compared."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, Protocol

from repro_golden.base.canonical import decode_float, encode_float

__all__ = ["Answer", "Difference", "Likeness", "Part", "compare", "joined"]

Part = Literal["prompt log-probs", "tokens", "log-probs"]


class Answer(Protocol):
    """One sampled response.

    Attributes:
        tokens: Ids.
        log_probs: Of each token.
        prompt_log_probs: Of the prompt's tokens from the second on; None where they were not asked for.
    """

    @property
    def tokens(self) -> Sequence[int]: ...  # noqa: D102 - see the class
    @property
    def log_probs(self) -> Sequence[float]: ...  # noqa: D102
    @property
    def prompt_log_probs(self) -> Sequence[float] | None: ...  # noqa: D102


@dataclass(frozen=True)
class Difference:
    """The first value of two that has other bits.

    Attributes:
        prompt: Number of the prompt, from 0.
        position: Of the token: in the prompt for its log-probs, else in the response, from 0.
        part: Whose values they are.
        a: The value of the first side; None where it has none, because its response ended.
        b: That of the other.
        gap: The distance of two finite log-probs; None of others, and of tokens.
        ulp: Values of `unit` between them; 0 between -0.0 and 0.0; None likewise.
        unit: ``fp32`` where both are values of it, else ``fp64``.
    """

    prompt: int
    position: int
    part: Part
    a: float | None
    b: float | None
    gap: float | None = None
    ulp: int | None = None
    unit: Literal["fp32", "fp64"] = "fp32"

    def to_mapping(self) -> dict[str, Any]:
        """JSON types; log-probs that are not finite as the hex of their bits."""
        sides = {k: v if v is None else encode_float(v) for k, v in (("a", self.a), ("b", self.b))}
        return asdict(self) | sides

    @classmethod
    def from_mapping(cls, raw: Mapping[str, Any]) -> Difference:
        """The inverse of `to_mapping`."""
        sides = {k: raw[k] if raw[k] is None else decode_float(raw[k]) for k in ("a", "b")}
        return cls(**{**raw, **sides})

    @property
    def where(self) -> str:
        """The place, in words."""
        place = "prompt token" if self.part == "prompt log-probs" else "token"
        return f"prompt {self.prompt}, {place} {self.position}, {self.part}"

    @property
    def size(self) -> str:
        """How far apart, in words; of tokens which they are."""
        if self.part == "tokens":
            return " / ".join("none" if side is None else f"{side:.0f}" for side in (self.a, self.b))
        if self.gap is None:
            return f"{self.a} / {self.b}"
        return f"{self.gap:.3g} ({self.ulp} ULP{'' if self.unit == 'fp32' else ' of ' + self.unit})"


@dataclass(frozen=True)
class Likeness:
    """What comparing responses found.

    Attributes:
        first: The first difference, by prompt and then by token; None where all bits are equal.
        prompts: How many were compared.
        values: How many tokens and log-probs were compared, pairs that differ included.
        differing: How many prompts differ.
        widest: The largest gap between log-probs of the same tokens after the same tokens; None where none is known.
    """

    first: Difference | None
    prompts: int
    values: int
    differing: int
    widest: float | None

    @property
    def equal(self) -> bool:
        """Whether all bits are."""
        return self.first is None

    def to_mapping(self) -> dict[str, Any]:
        """JSON types."""
        return asdict(self) | {"first": self.first.to_mapping() if self.first else None}

    @classmethod
    def from_mapping(cls, raw: Mapping[str, Any]) -> Likeness:
        """The inverse of `to_mapping`."""
        return cls(**{**raw, "first": Difference.from_mapping(raw["first"]) if raw["first"] else None})


def compare(rows: Sequence[int], a: Sequence[Answer], b: Sequence[Answer]) -> Likeness:
    """Compare responses pair by pair.

    What follows the first differing token of a response has another past, and is not compared.

    Args:
        rows: The number of each pair's prompt.
        a: One response to each.
        b: Another one to each.

    Raises:
        ValueError: lists of other lengths, or no pair at all: nothing was compared, which is no agreement.
    """
    if not rows or not len(rows) == len(a) == len(b):
        raise ValueError(f"{len(rows)} prompts, {len(a)} and {len(b)} responses cannot be compared")
    return joined([_pair(row, x, y) for row, x, y in zip(rows, a, b, strict=True)])


def joined(found: Sequence[Likeness]) -> Likeness:
    """Several as one; the first difference is that of the first that has one."""
    gaps = [one.widest for one in found if one.widest is not None]
    return Likeness(
        next((one.first for one in found if one.first), None),
        sum(one.prompts for one in found),
        sum(one.values for one in found),
        sum(one.differing for one in found),
        max(gaps, default=None),
    )


def _pair(row: int, a: Answer, b: Answer) -> Likeness:
    found: list[Difference] = []
    values = 0
    if a.prompt_log_probs is not None or b.prompt_log_probs is not None:
        x, y = list(a.prompt_log_probs or ()), list(b.prompt_log_probs or ())
        for k in range(max(len(x), len(y))):
            values += 1
            _note(found, row, k + 1, "prompt log-probs", x[k : k + 1], y[k : k + 1])
    for k in range(max(len(a.tokens), len(b.tokens))):
        values += 1
        if list(a.tokens[k : k + 1]) != list(b.tokens[k : k + 1]):
            _note(found, row, k, "tokens", a.tokens[k : k + 1], b.tokens[k : k + 1])
            break
        values += 1
        _note(found, row, k, "log-probs", a.log_probs[k : k + 1], b.log_probs[k : k + 1])
    gaps = [one.gap for one in found if one.gap is not None]
    return Likeness(found[0] if found else None, 1, values, int(bool(found)), max(gaps, default=None))


def _note(found: list[Difference], row: int, position: int, part: Part, a: Sequence[float], b: Sequence[float]) -> None:
    """Add the difference between two values, each a list that is empty where a side has none."""
    if len(a) != len(b) or part == "tokens":
        first, other = (side[0] if side else None for side in (a, b))
        found.append(Difference(row, position, part, first, other))
    elif a and struct.pack("<d", a[0]) != struct.pack("<d", b[0]):
        from repro_golden.trace.tensor_difference import measure  # NumPy, which nobody needs to read a case

        unit: Literal["fp32", "fp64"] = "fp32" if _single(a[0]) and _single(b[0]) else "fp64"
        code, dtype = ("<f", "float32") if unit == "fp32" else ("<d", "float64")
        size = measure(dtype, struct.pack(code, a[0]), struct.pack(code, b[0]), 1)
        found.append(Difference(row, position, part, a[0], b[0], size.max_abs, size.max_ulp, unit))


def _single(value: float) -> bool:
    """Whether a number is one of fp32."""
    try:
        back: float = struct.unpack("<f", struct.pack("<f", value))[0]
    except OverflowError:
        return False
    return back == value or value != value  # a NaN is one
