"""What a shell makes of a word: brace expansion before all else, ``{1..3}``, ``a{b,c}``, and patterns, ``*.sh``."""

from __future__ import annotations

import fnmatch
import itertools
import re
from collections.abc import Iterator, Sequence

from repro.doctor.artefacts.shell_scripts.values import LONGEST, BoundError, Scope, known, scalar, unquoted

__all__ = ["braces", "changed", "escaped", "matches", "pattern"]

_MATCHED = 4096
"""Characters of the longest value that patterns are matched with."""
_UNREAD = re.compile(r"[*?+@!]\(|\[[:.=]|\\")
"""Patterns that `fnmatch` does not know."""
_PIECE = re.compile(
    r"""\\(?P<escaped>[\s\S])|'(?P<raw>[^']*)'|"(?P<double>(?:\\[\s\S]|[^"\\])*)"|\$(?P<name>[A-Za-z_]\w*|\d)"""
    r"""|\$\{(?P<braced>[A-Za-z_]\w*|\d+)\}|(?P<computed>[$`])|(?P<bare>[\s\S])"""
)
_NAMED = re.compile(r"\$(?:([A-Za-z_]\w*|\d)|\{([A-Za-z_]\w*|\d+)\})")
_COMPUTED = re.compile(r"(?:[^\\$`]|\\[\s\S])*[$`]")

Pieces = list[tuple[str, bool]]
"""Texts, and whether each stands in quotes, where it matches itself alone."""
_MOST_WORDS = 1024
_ATOM = re.compile(
    r"""\\[\s\S]|'[^']*'|"(?:\\[\s\S]|[^"\\])*"|\$\{[^}]*\}|\$\((?:[^()]|\([^()]*\))*\)|`[^`]*`|[\s\S]""",
)
"""What is one thing to a brace expansion: a quotation, an expansion, a character."""
_NUMBERS = re.compile(r"(-?\d{1,9})\.\.(-?\d{1,9})(?:\.\.(-?\d{1,9}))?")
_LETTERS = re.compile(r"([A-Za-z])\.\.([A-Za-z])(?:\.\.(-?\d{1,9}))?")


def _pieces(source: str, scope: Scope) -> Pieces | None:
    """The pieces of a pattern with its variables put in; None where it is not known, or beyond what is read here."""
    pieces: Pieces = []
    for match in _PIECE.finditer(source):
        name = match["name"] or match["braced"]
        if match["computed"]:
            return None
        if name:
            text, quoted = _held(name, scope), False
        elif match["double"] is not None:
            text, quoted = _inside(match["double"], scope), True
        else:
            quoted = match["bare"] is None
            text = next(text for text in match.group("escaped", "raw", "bare") if text is not None)
        if text is None:
            return None
        if text:
            pieces.append((text, quoted))
    return pieces


def _held(name: str, scope: Scope) -> str | None:
    word = scalar(name, scope)
    return word.text if word and known(word.value) else None


def _inside(source: str, scope: Scope) -> str | None:
    """What stands in double quotes."""
    texts, at = [], 0
    for match in [*_NAMED.finditer(source), None]:
        literal = source[at : match.start() if match else len(source)]
        if _COMPUTED.match(literal) or (match and re.search(r"(?<!\\)(?:\\\\)*\\$", literal)):
            return None
        held = _held(match[1] or match[2], scope) if match else ""
        if held is None:
            return None
        texts += [unquoted(literal), held]
        at = match.end() if match else at
    return "".join(texts)


def _glob(pieces: Pieces) -> str | None:
    """A pattern of `fnmatch`; None where that knows none."""
    bare = "".join(text for text, quoted in pieces if not quoted)
    if _UNREAD.search(bare) or ("[" in bare and any(quoted for _, quoted in pieces)):
        return None
    return "".join(escaped(text) if quoted else text for text, quoted in pieces).replace("[^", "[!")


def escaped(text: str) -> str:
    """A pattern that matches a text alone."""
    return re.sub(r"[*?\[]", r"[\g<0>]", text)


def pattern(source: str, scope: Scope) -> str | None:
    """A pattern as `fnmatch` takes it; None where only a shell knows what it matches."""
    pieces = _pieces(source, scope)
    return None if pieces is None else _glob(pieces)


def matches(text: str | None, glob: str | None, scope: Scope) -> bool | None:
    """Whether a pattern matches; None where only a shell knows."""
    if glob == "*":
        return True
    if text is None or glob is None or "nocasematch" in scope.modes:
        return None
    return fnmatch.fnmatchcase(text, glob)


def changed(text: str, op: str, source: str, scope: Scope) -> str | None:
    """What ``%``, ``#``, ``/`` and ``^`` make of a value.

    Args:
        text: The value.
        op: What stands behind the name.
        source: What stands behind that, as written.
        scope: What is set.

    Returns:
        None for what is not known, or not read.

    Raises:
        BoundError: Where it grows too long.
    """
    if op in ("^^", ",,") and not source:
        return text.upper() if op == "^^" else text.lower()
    if op in ("/", "//"):
        return _replaced(text, op, source, scope)
    glob = pattern(source, scope) if op in ("%", "%%", "#", "##") and len(text) <= _MATCHED else None
    if glob is None:
        return None
    if op[0] == "%":
        positions = range(len(text), -1, -1) if op == "%" else range(len(text) + 1)
        return next((text[:end] for end in positions if fnmatch.fnmatchcase(text[end:], glob)), text)
    starts = range(len(text) + 1) if op == "#" else range(len(text), -1, -1)
    return next((text[start:] for start in starts if fnmatch.fnmatchcase(text[:start], glob)), text)


def _replaced(text: str, op: str, source: str, scope: Scope) -> str | None:
    """``${NAME/old/new}``, where the old is no pattern."""
    end = next((m.start() for m in _PIECE.finditer(source) if m[0] == "/"), len(source))
    parts = [_pieces(side, scope) for side in (source[:end], source[end + 1 :])]
    if parts[0] is None or parts[1] is None or "'" in source or "nocasematch" in scope.modes:
        return None
    old, new = ("".join(piece for piece, _ in side) for side in (parts[0], parts[1]))
    if not old or set(old) & set("*?[\\#%") or set(new) & set("&~\\"):
        return None
    if text.count(old) * len(new) > LONGEST:
        raise BoundError("a word is too long")
    return text.replace(old, new, 1 if op == "/" else -1)


def braces(source: str) -> list[str] | None:
    """The words that a word becomes, as source; itself alone where it has nothing to expand.

    Returns:
        None where they are too many.
    """
    words = list(itertools.islice(_words(_ATOM.findall(source)), _MOST_WORDS + 1))
    return words if len(words) <= _MOST_WORDS else None


def _words(atoms: Sequence[str]) -> Iterator[str]:
    for start, atom in enumerate(atoms):
        if atom != "{":
            continue
        group = _alternatives(atoms, start)
        if group is not None:
            end, options = group
            head = "".join(atoms[:start])
            for option, tail in itertools.product(options, itertools.islice(_words(atoms[end + 1 :]), _MOST_WORDS + 1)):
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
                return at, list(itertools.islice(itertools.chain.from_iterable(inner), _MOST_WORDS + 1))
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
    return list(itertools.islice(steps, _MOST_WORDS + 1))
