"""Losses and gradient norms in the lines of any trainer, for the rules that hold of any: that these are finite."""

from __future__ import annotations

import functools
import re

from repro.doctor.artefacts.logs.asides import aside
from repro_golden.base.printed.free_text import in_bar, in_dict
from repro_golden.base.printed.lines import CALL, NUMBER, bare
from repro_golden.base.printed.machine_numbers import words_of

__all__ = ["ANCHORS", "is_gradient_norm", "is_loss", "losses_and_norms"]

_STEMS = ("loss", "Loss", "norm", "Norm")
ANCHORS = (
    "loss/",
    *(stem + mark for stem in _STEMS for mark in (":", "=", " :", " =", "':", '":')),
    *(f"{stem} {begun}" for stem in _STEMS for begun in (*"0123456789+-.", "nan", "NaN", "NAN", "inf", "INF")),
)
"""One of them is in every line that is read here, and in few others: each line that holds one costs time."""

_LONGEST = 64 << 10
"""Characters of the longest line that is read; verl's have thousands."""
_STEM = re.compile("[Ll]oss|[Nn]orm")

_WORD = r"(?!(?i:nan|inf|infinity)\b)[A-Za-z(][\w./@()%-]{0,60}"
_UNIT, _NEXT = "[%a-zA-Z\u00b5]{1,4}", r"\s*(?:[|,;)\]]|$|- )"
_FIELD = re.compile(
    rf"(?<![^\s|,;(\[])(?P<name>{_WORD}?(?: {_WORD}?){{0,4}})(?:\s{{0,20}}[:=]\s{{0,20}}|\s{{1,8}})"
    rf"(?:(?:\w{{1,9}}\.)?{CALL}\()?(?P<value>{NUMBER})(?:[,)][^\s|]{{0,40}}\))?"
    rf"(?:{_UNIT}|\s{_UNIT}(?={_NEXT}))?(?:\s?/\s{{0,20}}\d+)?\)?(?={_NEXT}|\s+[A-Za-z])"
)
"""A name with a number, as `lm loss: NAN |`, `actor/pg_loss:np.float64(0.5) -`, `iter 3: loss 4.25, time 30.1ms`."""
_FEWEST, _SHARE, _WIDEST = 2, 0.5, 150
"""So many fields, which are so much of a line, make it one of metrics, and no sentence that speaks of them. One field
has at most so many characters."""
_ALONE = re.compile(
    r"(?:(?i:epoch|step|iter(?:ation)?)\s?[:#=]?\s?[\[(]?\d+(?:\s?/\s?\d+)?[\])]?\s?[:,|-]\s?)?"
    rf"(?P<name>{_WORD}?(?: {_WORD}?){{0,2}})\s?[:=]\s?(?P<value>{NUMBER})"
)
"""A line of one field alone, by its colon and its few words, behind a counter or none: `Epoch 2: train loss: nan`."""
_VALUE = re.compile(rf"[\s:=(]{NUMBER}")
_PREFIX = re.compile(
    r"(?:\s|\[[^\]]{0,80}\]:?|\d[\d:.,TZ/ -]{5,40}|(?:DEBUG|INFO|WARNING|ERROR)\b|[\w./]{1,80}:\d+\b|[-:|] ?)*"
)
"""What loggers put before a message."""
_STATISTICS = {"mean", "avg", "average", "total", "sum", "value"}
_NO_MEASURE = {
    "best", "min", "max", "clip", "clipped", "coef", "coeff", "weight", "scale", "threshold", "target", "limit",
}  # fmt: skip
"""Of what is set, or infinite until there is something to compare with: `best_loss`, `max_grad_norm`."""


def losses_and_norms(line: str) -> dict[str, float]:
    """The losses and gradient norms of a line of metrics; of any other line nothing.

    Such a line is a dict (alone, or behind what a logger puts before it), a progress bar with a postfix, or made of
    names with numbers: `lm loss: 1.0E+01 | grad norm: 0.6 |`, `step:1 - actor/pg_loss:0.1 - actor/grad_norm:0.5`,
    `Train loss: nan`.
    """
    stem = _STEM.search(line)
    if stem is None or len(line) > _LONGEST:
        return {}
    text = bare(line)
    of_dict = text.endswith("}")  # whose own keys stand in quotation marks
    why = aside(line[: stem.start()], stem[0], "" if of_dict else line[stem.end() :])
    if why in ("quoted", "shown"):
        return {}
    numbers = in_dict(text) if of_dict else ("=" in text and in_bar(text)) or _fields(text)
    return {name: value for name, value in numbers.items() if is_loss(name) or is_gradient_norm(name)}


def _fields(text: str) -> dict[str, float]:
    """The names with numbers that make up a line."""
    if len(_VALUE.findall(text)) * _WIDEST < _SHARE * len(text):  # most long lines end here
        return {}
    text = text[match.end() :] if (match := _PREFIX.match(text)) else text
    if alone := _ALONE.fullmatch(text):
        return {alone["name"]: float(alone["value"])}
    matches = list(_FIELD.finditer(text))
    if len(matches) < _FEWEST or sum(match.end() - match.start() for match in matches) < _SHARE * len(text):
        return {}
    return {match["name"].strip(): float(match["value"]) for match in matches}


@functools.lru_cache(4096)
def is_loss(name: str) -> bool:
    """Whether a metric is a loss that a step measured, by its name."""
    return _ends_in(name, ("loss",), ("losses",))


@functools.lru_cache(4096)
def is_gradient_norm(name: str) -> bool:
    """Whether a metric is the norm of gradients that a step measured, by its name."""
    return _ends_in(name, ("grad", "norm"), ("gradient", "norm"), ("gnorm",))


def _ends_in(name: str, *endings: tuple[str, ...]) -> bool:
    """Whether a part of a name ends in such words, a statistic behind them left out."""
    terms = words_of(name)
    if _NO_MEASURE.intersection(terms):
        return False
    parts = " ".join(word for word in terms if word not in _STATISTICS).split("/")
    return any(tuple(part.split()[-len(end) :]) == end for part in parts for end in endings)
