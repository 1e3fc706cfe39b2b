"""Arithmetic with a verifiable answer: additions as prompts, a rule as reward.

Prompts are a function of (seed, rollout_id) alone. Nothing is consumed, so the data position of a run *is* its
rollout_id and resuming needs no more.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

__all__ = [
    "BOS_ID",
    "CLOSENESS",
    "DIGITS",
    "ENDED",
    "EOS_ID",
    "PAD_ID",
    "VOCAB_SIZE",
    "Problem",
    "decode",
    "encode",
    "prompts",
    "reward",
]


# -- the byte tokenizer: every string has ids, and no vocabulary file is needed
# Ids 0-255 are the bytes of the UTF-8 text, followed by three specials.

PAD_ID = 256
BOS_ID = 257
EOS_ID = 258
VOCAB_SIZE = 259


def encode(text: str, bos: bool = True) -> list[int]:
    """The UTF-8 bytes of `text` as ids, with `BOS_ID` in front unless `bos` is False.

    Raises:
        UnicodeEncodeError: `text` holds a lone surrogate, which UTF-8 cannot express.
    """
    return [BOS_ID] * bos + list(text.encode("utf-8"))


def decode(ids: Iterable[int]) -> str:
    """The text of `ids`: specials are dropped, bytes that are no UTF-8 become U+FFFD.

    Raises:
        ValueError: an id that the vocabulary does not have.
    """
    raw = bytearray()
    for token in ids:
        if not 0 <= token < VOCAB_SIZE:
            raise ValueError(f"token id {token} is outside the byte vocabulary: ids go from 0 to {VOCAB_SIZE - 1}")
        if token < PAD_ID:
            raw.append(token)
    return raw.decode("utf-8", errors="replace")


# -- arithmetic with a verifiable answer: additions as prompts, a rule as reward

DIGITS = 0.2
"""Part of the reward for the share of the response that is digits."""
ENDED = 0.2
"""Part for an end of sequence behind at least one token, of whatever kind."""
CLOSENESS = 0.4
"""Part for a number near the label. The three parts sum to less than 1: only the exact answer has 1."""

_MOST_DIGITS = 18
"""Longer numbers are not near any label; the bound also keeps int() of a long response cheap and legal."""
_ZERO, _NINE = ord("0"), ord("9")


@dataclass(frozen=True)
class Problem:
    """One prompt with its answer.

    Attributes:
        prompt: such as ``3+4=``.
        label: the sum in decimal, such as ``7``.
    """

    prompt: str
    label: str


def prompts(seed: int, rollout_id: int, count: int, max_operand: int) -> list[Problem]:
    """The problems of one rollout: `count` sums whose operands are uniform in [0, max_operand].

    Draws use only `random.Random.random` of a generator seeded with a string (by SHA-512): the one method whose
    sequence Python keeps the same in all versions. A longer rollout starts with the shorter one's problems.

    Raises:
        ValueError: `count` or `max_operand` is negative.
    """
    if count < 0 or max_operand < 0:
        raise ValueError(f"count {count} and max_operand {max_operand} must not be negative")
    rng = random.Random(f"repro_core.task {seed} {rollout_id}")  # names the draw, whatever the module is called
    drawn = [int(rng.random() * (max_operand + 1)) for _ in range(2 * count)]
    return [Problem(f"{a}+{b}=", str(a + b)) for a, b in zip(drawn[::2], drawn[1::2], strict=True)]


def reward(response_tokens: Sequence[int], label: str) -> float:
    """The rule reward of one response, in [0, 1]; a pure function of ids and label.

    The response is read up to and including its first `EOS_ID`; its *body* is what stands before it.

    - 1 exactly, if the body is the label's own bytes and the end of sequence follows;
    - 0 exactly, if the body is empty. Otherwise the sum of:
    - `DIGITS` x digits in the body / length of the body;
    - `ENDED`, if the end of sequence follows;
    - `CLOSENESS` / (1 + distance), if the end of sequence follows and the body is 1 to 18 digits and nothing else;
      distance = |number - label|. Leading zeros are read over, but such a body is never exact.

    The first two parts are independent of each other, so that a uniform policy over 259 ids meets both from the
    start: were the end rewarded only behind digits, long strings of digits would win before it was ever tried.

    Raises:
        ValueError: `label` is not an integer in decimal.
    """
    tokens = list(response_tokens)
    ended = EOS_ID in tokens
    body = tokens[: tokens.index(EOS_ID)] if ended else tokens
    if ended and body == list(label.encode()):
        return 1.0
    if not body:
        return 0.0
    digits = sum(_ZERO <= token <= _NINE for token in body)
    total = DIGITS * (digits / len(body)) + ENDED * ended
    if ended and digits == len(body) <= _MOST_DIGITS:
        total += CLOSENESS / (1 + abs(int(bytes(body)) - int(label)))
    return total
