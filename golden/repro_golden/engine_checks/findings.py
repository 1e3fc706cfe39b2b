"""What checks of a rollout engine found, and what must come out of them."""

from __future__ import annotations

import random
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

from repro_golden.base.canonical import decode_float, encode_float
from repro_golden.base.errors import ReproError
from repro_golden.case.tables import CHECKS, Expected, known_name

if TYPE_CHECKING:
    from torch import Tensor

    from repro_golden.recording.weight_pieces import Held

__all__ = [
    "Answer",
    "Difference",
    "Engine",
    "EngineCheck",
    "Likeness",
    "Made",
    "NotApplicableError",
    "Outcome",
    "Part",
    "Plan",
    "Sampling",
    "compare",
    "exit_code",
    "expectations",
    "joined",
    "said",
]


# -- how the responses of a rollout engine differ: the first place, and how far apart. Bits are compared

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
        values = {k: v if v is None else encode_float(v) for k, v in (("a", self.a), ("b", self.b))}
        return asdict(self) | values

    @classmethod
    def from_mapping(cls, raw: Mapping[str, Any]) -> Difference:
        """The inverse of `to_mapping`."""
        values = {k: raw[k] if raw[k] is None else decode_float(raw[k]) for k in ("a", "b")}
        return cls(**{**raw, **values})

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
        ReproError: a pair of which neither has tokens, or log-probs of all tokens: likewise.
    """
    if not rows or not len(rows) == len(a) == len(b):
        raise ValueError(f"{len(rows)} prompts, {len(a)} and {len(b)} responses cannot be compared")
    pairs = list(zip(rows, a, b, strict=True))
    for row, x, y in pairs:
        if not x.tokens and not y.tokens:
            raise ReproError(f"the engine answered prompt {row} with no token: there is nothing to compare")
        if all(len(side.log_probs) < len(side.tokens) for side in (x, y)):
            lacking = f"{len(x.log_probs)} log-probs for {len(x.tokens)} tokens"
            raise ReproError(f"the engine gave {lacking} of its answer to prompt {row}: not all could be compared")
    return joined([_pair(row, x, y) for row, x, y in pairs])


def joined(likenesses: Sequence[Likeness]) -> Likeness:
    """Several as one; the first difference is that of the first that has one."""
    gaps = [likeness.widest for likeness in likenesses if likeness.widest is not None]
    return Likeness(
        next((likeness.first for likeness in likenesses if likeness.first), None),
        sum(likeness.prompts for likeness in likenesses),
        sum(likeness.values for likeness in likenesses),
        sum(likeness.differing for likeness in likenesses),
        max(gaps, default=None),
    )


def _pair(row: int, a: Answer, b: Answer) -> Likeness:
    differences: list[Difference] = []
    values = 0
    if a.prompt_log_probs is not None or b.prompt_log_probs is not None:
        x, y = list(a.prompt_log_probs or ()), list(b.prompt_log_probs or ())
        for k in range(max(len(x), len(y))):
            values += 1
            _note(differences, row, k + 1, "prompt log-probs", x[k : k + 1], y[k : k + 1])
    for k in range(max(len(a.tokens), len(b.tokens))):
        values += 1
        if list(a.tokens[k : k + 1]) != list(b.tokens[k : k + 1]):
            _note(differences, row, k, "tokens", a.tokens[k : k + 1], b.tokens[k : k + 1])
            break
        values += 1
        _note(differences, row, k, "log-probs", a.log_probs[k : k + 1], b.log_probs[k : k + 1])
    gaps = [difference.gap for difference in differences if difference.gap is not None]
    return Likeness(differences[0] if differences else None, 1, values, int(bool(differences)), max(gaps, default=None))


def _note(
    differences: list[Difference], row: int, position: int, part: Part, a: Sequence[float], b: Sequence[float]
) -> None:
    """Add the difference between two values, each a list that is empty where a side has none."""
    if len(a) != len(b) or part == "tokens":
        first, other = (side[0] if side else None for side in (a, b))
        differences.append(Difference(row, position, part, first, other))
    elif a and struct.pack("<d", a[0]) != struct.pack("<d", b[0]):
        from repro_golden.trace.tensor_difference import measure  # NumPy, which nobody needs to read a case

        unit: Literal["fp32", "fp64"] = "fp32" if _single(a[0]) and _single(b[0]) else "fp64"
        code, dtype = ("<f", "float32") if unit == "fp32" else ("<d", "float64")
        size = measure(dtype, struct.pack(code, a[0]), struct.pack(code, b[0]), 1)
        differences.append(Difference(row, position, part, a[0], b[0], size.max_abs, size.max_ulp, unit))


def _single(value: float) -> bool:
    """Whether a number is one of fp32."""
    try:
        back: float = struct.unpack("<f", struct.pack("<f", value))[0]
    except OverflowError:
        return False
    return back == value or value != value  # a NaN is one


# -- what checks of a rollout engine found, and what must come out of them

Outcome = Literal["equal", "differs", "not applicable", "failed"]


class NotApplicableError(Exception):
    """The engine cannot do what a check needs."""


class Made(NamedTuple):
    """What a check that was made found.

    Attributes:
        likeness: Of what was sampled.
        text: In one line.
        outcome: Where samples alone do not decide it.
    """

    likeness: Likeness
    text: str
    outcome: Outcome | None = None


@dataclass(frozen=True)
class EngineCheck:
    """What one check of an engine found. It is no `Proof`: whether its outcome is wanted is for who asked to say.

    Attributes:
        name: See `CHECKS`.
        outcome: Of comparing bits.
        expected: What must come out.
        detail: In one line.
        likeness: What was compared; None where nothing was.
    """

    name: str
    outcome: Outcome
    expected: Expected
    detail: str
    likeness: Likeness | None = None

    @classmethod
    def from_mapping(cls, raw: Mapping[str, Any]) -> EngineCheck:
        """The inverse of `to_mapping`."""
        likeness = Likeness.from_mapping(raw["likeness"]) if raw["likeness"] else None
        return cls(raw["name"], raw["outcome"], raw["expected"], raw["text"], likeness)

    @property
    def passed(self) -> bool:
        """Whether it is what must come out; what does not apply never is not."""
        if self.outcome == "not applicable":
            return True
        return self.outcome != "failed" and self.expected in (self.outcome, "any")

    def to_mapping(self) -> dict[str, Any]:
        """JSON types."""
        return {
            "name": self.name,
            "outcome": self.outcome,
            "expected": self.expected,
            "text": self.detail,
            "fits": self.passed,
            "likeness": self.likeness.to_mapping() if self.likeness else None,
        }


def expectations(changed: Mapping[str, str]) -> dict[str, Expected]:
    """What must come out of each check, where some of it is not the rule.

    Raises:
        ReproError: an unknown check, or something that cannot come out.
    """
    expected = dict(CHECKS)
    for name, word in changed.items():
        if word not in ("equal", "differs", "any"):
            raise ReproError(f"{name} cannot be expected to be {word!r}: say equal, differs or any")
        expected[known_name(name)] = word  # type: ignore[assignment]
    return expected


def exit_code(findings: Sequence[EngineCheck]) -> Literal[0, 1, 2, 3]:
    """2 where a check could not be made; else 1 where one does not fit; else 3 where none applied at all."""
    if any(finding.outcome == "failed" for finding in findings):
        return 2
    if not all(finding.passed for finding in findings):
        return 1
    return 0 if any(finding.outcome != "not applicable" for finding in findings) else 3


def said(likeness: Likeness, what: str) -> str:
    """How alike two ways of sampling are, in one line; `what` names the ways."""
    if likeness.equal:
        return f"{what}: {likeness.values} values of {likeness.prompts} responses are equal"
    widest = "" if likeness.widest is None else f", log-probs by at most {likeness.widest:.3g}"
    return f"{what}: {likeness.differing} of {likeness.prompts} responses differ{widest}"


# -- what is sampled to check a rollout engine, and as much of such an engine as the checks need


@dataclass(frozen=True)
class Sampling:
    """How responses are sampled: the fields are those of `repro_core.rollout.engine.Sampling`."""

    max_response_len: int
    temperature: float
    eos_id: int = 0
    ignore_eos: bool = True
    prompt_log_probs: bool = True
    routed_experts: bool = False


class Engine(Protocol):
    """As much of `repro_core.rollout.engine.RolloutEngine` as the checks need; it says what its methods raise."""

    weight_version: str
    separate: bool

    def identity(self) -> dict[str, Any]: ...  # noqa: D102 - see the class
    def generate(  # noqa: D102
        self, prompts: Sequence[Sequence[int]], sampling: Any, seeds: Sequence[int] | None
    ) -> Sequence[Answer]: ...
    def update(self, tensors: Iterable[tuple[str, Tensor]], version: str) -> None: ...  # noqa: D102
    def held(self) -> Sequence[Held]: ...  # noqa: D102
    def flush_cache(self) -> None: ...  # noqa: D102
    def release_memory(self) -> None: ...  # noqa: D102
    def resume_memory(self) -> None: ...  # noqa: D102


_LEAST_IDS = 3


@dataclass(frozen=True)
class Plan:
    """What is sampled.

    Attributes:
        prompts: How many, at least as many as the largest batch.
        alone: How many of these, from the first on, are also sampled alone.
        shortest: Tokens of the shortest prompt.
        longest: Tokens of the longest.
        response: Tokens sampled to each; the end of sequence ends none.
        temperature: Where seeds matter; elsewhere it is 0.
        seed: What prompts, order and seeds are drawn from.
        vocabulary: How many ids there are; None for as many as the engine's embedding has. The first and the last are
            in no prompt: SGLang shows the last as the first.
        scale: Standard deviation of the noise by which weights are changed.
    """

    prompts: int = 32
    alone: int = 8
    shortest: int = 3
    longest: int = 40
    response: int = 16
    temperature: float = 1.0
    seed: int = 1
    vocabulary: int | None = None
    scale: float = 0.02

    def __post_init__(self) -> None:
        """Refuse a plan by which nothing would be sampled.

        Raises:
            ReproError: it has no prompt, or too few ids.
        """
        if self.prompts < 1 or (self.vocabulary is not None and self.vocabulary < _LEAST_IDS):
            raise ReproError(
                f"a plan needs a prompt and a vocabulary of at least {_LEAST_IDS} ids, of which the first and the last "
                f"are in no prompt: this one has {self.prompts} prompts and a vocabulary of {self.vocabulary}"
            )

    def drawn(self, vocabulary: int) -> list[list[int]]:
        """The prompts, no two of which begin alike where the vocabulary allows it: none is another's cached prefix."""
        rng = random.Random(f"repro rollout checks {self.seed}")

        def below(count: int) -> int:
            return int(rng.random() * count)  # the one draw that all versions of Python make alike

        ids = list(range(1, vocabulary - 1))
        prompts = []
        for number in range(self.prompts):
            k = number % len(ids)
            other = k + below(len(ids) - k)
            ids[k], ids[other] = ids[other], ids[k]
            length = self.shortest + below(self.longest - self.shortest + 1)
            prompts.append([ids[k], *(1 + below(vocabulary - 2) for _ in range(length - 1))])
        return prompts

    def seeds(self, *, other: bool = False) -> list[int]:
        """One for each prompt; others that share none with them."""
        first = (self.seed + (1 if other else 0)) * 1_000_003
        return [first + k for k in range(self.prompts)]
