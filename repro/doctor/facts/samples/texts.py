"""Whether what a model wrote is text at all: measures of one response, and of a rollout's responses together.

The measures know no language. A response is garbled for one of four reasons, each a state that weights which were not
loaded, or mapped to other layers, end in: bytes that are no characters; one character, or the same few tokens, again
and again; letters of many scripts mixed; tokens of which hardly any comes twice, as if drawn by chance.
"""

from __future__ import annotations

import bisect
import math
import unicodedata
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from repro.doctor.artefacts.kinds import Rollout
from repro.doctor.facts.samples.train_columns import evenly, token_ids
from repro_golden.base.checks import Where
from repro_golden.dumps.archive.bounds import shown
from repro_golden.dumps.rollout.arrays import numbers
from repro_golden.dumps.rollout.files import RolloutDump
from repro_golden.dumps.run.records import number_of

__all__ = [
    "BROKEN",
    "CLEAN",
    "FRESH",
    "FRESH_WINDOW",
    "LOOP",
    "LOOP_BYTES",
    "LOOP_TOKENS",
    "SCRIPTS",
    "SINGLE",
    "SINGLE_LEAST",
    "Garble",
    "ResponseVerdict",
    "began",
    "broken_share",
    "compression",
    "fresh_share",
    "garbled_where",
    "groups_of",
    "judge",
    "judged",
    "loop_share",
    "response_tokens",
    "reward_of",
    "scripts_mixed",
    "single_character",
    "single_token",
]

BROKEN = 0.1
"""More of a text's characters are none: a character cut at the end of a response makes three of them at most."""

LOOP = 0.9
"""More of the 8-grams of tokens came before. Tables, logs and JSON lists stay below 0.85, as their values differ."""
LOOP_TOKENS = 128
"""Responses of fewer tokens are not judged by loops."""
COMPRESSED = 0.03
"""Deflate leaves less of a text: English and source leave a quarter to a half, JSON lists a tenth."""
LOOP_BYTES = 1024
"""Texts of fewer bytes are not judged by compression."""

SINGLE = 0.9
"""More of a response is one character, or one token: no sentence, table or number with its words comes near."""
SINGLE_LEAST = 16
"""Responses of fewer characters, or tokens, are not judged by this: `1111` is an answer."""

SCRIPTS = 4
"""So many writing systems mixed: Chinese with English and Greek letters of mathematics are two."""
SWITCHES = 24
"""And so many changes from one to another; a list of greetings in ten languages has as many lines as changes."""
PER_SWITCH = 8.0
"""And no more letters than these between two changes: languages that follow each other run for longer."""

FRESH = 0.85
"""More of a window of tokens are distinct. Prose has 0.5 to 0.7 of 256, source 0.3 to 0.5, mathematics less."""
FRESH_WINDOW = 256

CLEAN = 0.1
"""Of a rollout that is in order, no more responses are garbled: long answers loop now and then."""

_TEXT = 20_000
_TOKENS = 20_000
_KEPT = frozenset("\n\r\t\f\v\u200b\u200c\u200d\ufe0f")
_NGRAM = 8
_SAMPLES = 256

# the first code point of each range, and its family; '' for what belongs to none
_RANGES = (
    (0x41, "latin"), (0x5B, ""), (0x61, "latin"), (0x7B, ""), (0xC0, "latin"), (0x2B0, ""), (0x400, "cyrillic"),
    (0x530, "armenian"), (0x590, "hebrew"), (0x600, "arabic"), (0x700, ""), (0x750, "arabic"), (0x780, ""),
    (0x900, "indic"), (0xE00, "thai"), (0xF00, "tibetan"), (0x1000, "burmese"), (0x10A0, "georgian"),
    (0x1100, "hangul"), (0x1200, "ethiopic"), (0x13A0, ""), (0x1780, "khmer"), (0x1800, ""), (0x1E00, "latin"),
    (0x1F00, ""), (0x3040, "han"), (0x3130, "hangul"), (0x3190, ""), (0x3400, "han"), (0xA000, ""),
    (0xAC00, "hangul"), (0xD7B0, ""), (0xF900, "han"), (0xFB00, ""), (0x20000, "han"), (0x32000, ""),
)  # fmt: skip
_STARTS = [start for start, _ in _RANGES]


class ResponseVerdict(NamedTuple):
    """One response: why it is garbled ('' where it is not), and whether its text shows that, not its tokens alone.

    `single` is whether it is one character or token again and again.
    """

    reason: str
    by_text: bool
    single: bool = False


@dataclass(frozen=True)
class Garble:
    """A rollout's responses.

    Attributes:
        judged: How many were long enough to be judged; where some are one character or token again and again, which
            short responses are judged by, all that have a response.
        garbled: The places of the garbled ones among the samples, with why.
        by_text: How many of those their text shows.
        fresh: Share of distinct tokens in windows over all responses, one after the other, where each is too short.
        single: How many of the garbled ones are one character or token again and again.
    """

    judged: int
    garbled: tuple[tuple[int, str], ...]
    by_text: int
    fresh: float | None
    single: int = 0

    @property
    def share(self) -> float:
        """Of those that were judged."""
        return len(self.garbled) / self.judged if self.judged else 0.0


def broken_share(text: str) -> float:
    """How much of a text is no character: U+FFFD, control, unassigned and private code points, lone surrogates."""
    if not text:
        return 0.0
    bad = sum(
        1 for c in text if c == "\ufffd" or (c not in _KEPT and unicodedata.category(c) in ("Cc", "Cn", "Co", "Cs"))
    )
    return bad / len(text)


def compression(text: str) -> float:
    """How much of a text's bytes deflate leaves; 1 for an empty one."""
    raw = text.encode("utf-8", "replace")
    return min(1.0, len(zlib.compress(raw, 6)) / len(raw)) if raw else 1.0


def loop_share(tokens: Sequence[int] | npt.NDArray[np.int64]) -> float:
    """How many of the n-grams came before in the same tokens; 0 where there are not two of them."""
    ids = np.asarray(tokens, np.int64)
    count = ids.size - _NGRAM + 1
    if count < 2:
        return 0.0
    grams = np.lib.stride_tricks.sliding_window_view(ids, _NGRAM)
    return 1.0 - len(np.unique(grams, axis=0)) / count


def single_character(text: str) -> tuple[str, float]:
    """The most frequent character of a text, and its share; white space does not count. '' and 0 for a short text."""
    counts = Counter(c for c in text if not c.isspace())
    if counts.total() < SINGLE_LEAST:
        return "", 0.0
    character, count = counts.most_common(1)[0]
    return character, count / counts.total()


def single_token(tokens: Sequence[int] | npt.NDArray[np.int64]) -> tuple[int, float]:
    """The most frequent of tokens, and its share; -1 and 0 for a few tokens."""
    ids = np.asarray(tokens, np.int64)
    if ids.size < SINGLE_LEAST:
        return -1, 0.0
    values, counts = np.unique(ids, return_counts=True)
    most = int(counts.argmax())
    return int(values[most]), float(counts[most] / ids.size)


def scripts_mixed(text: str) -> tuple[int, int, int]:
    """How many writing systems have two letters or more, how often one follows another, and how many letters."""
    counts: dict[str, int] = {}
    switches, last = 0, ""
    for c in text:
        family = _RANGES[bisect.bisect_right(_STARTS, ord(c)) - 1][1] if ord(c) >= _STARTS[0] else ""
        if not family:
            continue
        counts[family] = counts.get(family, 0) + 1
        switches += bool(last) and family != last
        last = family
    return sum(count >= 2 for count in counts.values()), switches, sum(counts.values())


def fresh_share(tokens: Sequence[int] | npt.NDArray[np.int64]) -> float | None:
    """How many tokens of a window are distinct, the mean over all whole windows; None where there is none."""
    ids = np.asarray(tokens, np.int64)
    whole = ids.size // FRESH_WINDOW
    if not whole:
        return None
    windows = ids[: whole * FRESH_WINDOW].reshape(whole, FRESH_WINDOW)
    return float(np.mean([len(np.unique(part)) / FRESH_WINDOW for part in windows]))


def judge(text: str, tokens: Sequence[int] | npt.NDArray[np.int64] | None) -> ResponseVerdict | None:
    """Whether one response is garbled.

    Args:
        text: Of it; '' where only tokens are known.
        tokens: Of it; None where only the text is known.

    Returns:
        None where it is too short to be judged.
    """
    text = text[:_TEXT]
    ids = None if tokens is None else np.asarray(tokens, np.int64)[:_TOKENS]
    verdict = _single(text, ids)
    if verdict is not None:
        return verdict
    if len(text) < SINGLE_LEAST and (ids is None or ids.size < LOOP_TOKENS):
        return None
    broken = broken_share(text)
    if broken > BROKEN and broken * len(text) > 3:
        return ResponseVerdict(f"{broken:.0%} of its characters are none (U+FFFD or control characters)", True)
    families, switches, letters = scripts_mixed(text)
    if families >= SCRIPTS and switches >= SWITCHES and letters <= PER_SWITCH * switches:
        return ResponseVerdict(f"it changes {switches} times between {families} writing systems", True)
    if len(text.encode("utf-8", "replace")) >= LOOP_BYTES and (left := compression(text)) < COMPRESSED:
        return ResponseVerdict(f"it repeats itself: deflate leaves {left:.1%} of it", True)
    if ids is not None and ids.size >= LOOP_TOKENS and (loop := loop_share(ids)) > LOOP:
        return ResponseVerdict(f"it repeats itself: {loop:.0%} of its 8-grams of tokens came before", bool(text))
    fresh = None if ids is None else fresh_share(ids)
    if fresh is not None and fresh > FRESH:
        return ResponseVerdict(f"{fresh:.0%} of its tokens are distinct, in windows of {FRESH_WINDOW}", False)
    return ResponseVerdict("", False)


def _single(text: str, ids: npt.NDArray[np.int64] | None) -> ResponseVerdict | None:
    """Whether a response is one character or token again and again."""
    character, share = single_character(text)
    if share > SINGLE:
        named = repr(character) if character.isprintable() else f"U+{ord(character):04X}"
        return ResponseVerdict(f"{share:.0%} of its characters are {named}", True, True)
    # tokens behind a short text are padding
    if ids is not None and (not text or len(text) >= SINGLE_LEAST):
        token, share = single_token(ids)
        if share > SINGLE:
            return ResponseVerdict(f"{share:.0%} of its tokens are {token}", bool(text), True)
    return None


def judged(dump: RolloutDump) -> Garble:
    """Judge the responses of a rollout, at most 256 of them, evenly taken."""
    verdicts: list[tuple[int, ResponseVerdict]] = []
    short: list[npt.NDArray[np.int64]] = []
    present = 0
    for place in evenly(len(dump.samples), _SAMPLES):
        sample = dump.samples[place]
        text, tokens = sample.get("response"), response_tokens(sample)
        present += bool(text) or tokens is not None
        verdict = judge(text if isinstance(text, str) else "", tokens)
        if verdict is not None:
            verdicts.append((place, verdict))
        if tokens is not None and tokens.size < FRESH_WINDOW:
            short.append(tokens)
    garbled = [(place, verdict) for place, verdict in verdicts if verdict.reason]
    single = sum(verdict.single for _, verdict in garbled)
    return Garble(
        present if single else len(verdicts),
        tuple((place, verdict.reason) for place, verdict in garbled),
        sum(verdict.by_text for _, verdict in garbled),
        fresh_share(np.concatenate(short)) if short else None,
        single,
    )


def garbled_where(rollout: Rollout, garble: Garble) -> Where:
    """The evidence for garbled responses: the first of them."""
    place = garble.garbled[0][0]
    text = rollout.dump.samples[place].get("response")
    value = shown(text[:80]) if isinstance(text, str) else ""
    return Where(str(rollout.path), item=f"sample {place} response", value=value)


def response_tokens(sample: Any) -> npt.NDArray[np.int64] | None:
    """The ids of a sample's response that were sampled (mask not 0); None where it has none."""
    ids, length = token_ids(sample.get("tokens")), sample.get("response_length")
    if ids is None or not isinstance(length, (int, np.integer)) or not 0 < length <= ids.size:
        return None
    response = ids[ids.size - int(length) :].astype(np.int64)
    mask = numbers(sample.get("loss_mask"))
    return response[mask != 0] if mask is not None and mask.shape == response.shape else response


# -- rewards of a rollout dump as the trainer takes them, and by group

T = TypeVar("T")


def reward_of(sample: Any, key: str | None) -> float | None:
    """A sample's reward as a number.

    Args:
        sample: Of a dump.
        key: ``--reward-key``; without one, a dict's only entry is its reward.

    Returns:
        None where there is none, or no finite one.
    """
    value = sample.get("reward")
    if isinstance(value, dict):
        value = value.get(key) if key is not None else next(iter(value.values())) if len(value) == 1 else None
    reward = number_of(value)
    return reward if reward is not None and math.isfinite(reward) else None


def groups_of(dump: RolloutDump, key: str | None) -> list[list[float]]:
    """The rewards of each group, in the order in which they begin; none where a sample has no group or no reward."""
    groups: dict[int, list[float]] = {}
    for sample in dump.samples:
        index, reward = sample.get("group_index"), reward_of(sample, key)
        if index is None or reward is None:
            return []
        groups.setdefault(int(index), []).append(reward)
    return list(groups.values())


def began(rollout: Rollout, seen: Callable[[RolloutDump], T | None]) -> T | None:
    """What a check sees in a rollout and did not see in the one before: a thing that stays is said once."""
    current = seen(rollout.dump)
    return None if current is None or (rollout.before is not None and seen(rollout.before) is not None) else current
