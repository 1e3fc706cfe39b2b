"""Brace expansion, which a shell does before all else: ``{1..3}``, ``a{b,c}``."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence

__all__ = ["braces"]

_MOST = 1024
_ATOM = re.compile(
    r"""\\[\s\S]|'[^']*'|"(?:\\[\s\S]|[^"\\])*"|\$\{[^}]*\}|\$\((?:[^()]|\([^()]*\))*\)|`[^`]*`|[\s\S]""",
)
"""What is one thing to a brace expansion: a quotation, an expansion, a character."""
_NUMBERS = re.compile(r"(-?\d{1,9})\.\.(-?\d{1,9})(?:\.\.(-?\d{1,9}))?")
_LETTERS = re.compile(r"([A-Za-z])\.\.([A-Za-z])(?:\.\.(-?\d{1,9}))?")


def braces(source: str) -> list[str] | None:
    """The words that a word becomes, as source; itself alone where it has nothing to expand.

    Returns:
        None where they are too many.
    """
    words = list(itertools.islice(_words(_ATOM.findall(source)), _MOST + 1))
    return words if len(words) <= _MOST else None


def _words(atoms: Sequence[str]) -> Iterator[str]:
    for start, atom in enumerate(atoms):
        if atom != "{":
            continue
        found = _alternatives(atoms, start)
        if found is not None:
            end, options = found
            head = "".join(atoms[:start])
            for option, tail in itertools.product(options, itertools.islice(_words(atoms[end + 1 :]), _MOST + 1)):
                yield head + option + tail
            return
    yield "".join(atoms)


def _alternatives(atoms: Sequence[str], start: int) -> tuple[int, list[str]] | None:
    """Where a brace ends, and what it stands for; None where it is only a brace."""
    depth, commas = 0, [start]
    for at in range(start, len(atoms)):
        depth += (atoms[at] == "{") - (atoms[at] == "}")
        if atoms[at] == "," and depth == 1:
            commas.append(at)
        if depth == 0:
            if len(commas) > 1:
                pairs = itertools.pairwise([*commas, at])
                inner = (_words(atoms[a + 1 : b]) for a, b in pairs)
                return at, list(itertools.islice(itertools.chain.from_iterable(inner), _MOST + 1))
            options = _sequence("".join(atoms[start + 1 : at]))
            return None if options is None else (at, options)
    return None


def _sequence(text: str) -> list[str] | None:
    """``1..8``, ``01..10..3``, ``a..e``."""
    if match := _NUMBERS.fullmatch(text):
        first, last = int(match[1]), int(match[2])
        padded = any(re.match(r"-?0\d", bound) for bound in match.group(1, 2))
        width = max(map(len, match.group(1, 2))) if padded else 0
        return [f"{number:0{width}d}" for number in _steps(first, last, match[3])]
    if match := _LETTERS.fullmatch(text):
        return [chr(code) for code in _steps(ord(match[1]), ord(match[2]), match[3])]
    return None


def _steps(first: int, last: int, step: str | None) -> list[int]:
    size = abs(int(step or 1)) or 1
    steps = range(first, last + 1, size) if first <= last else range(first, last - 1, -size)
    return list(itertools.islice(steps, _MOST + 1))
