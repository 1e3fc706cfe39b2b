"""Refactors of words alone: comments and docstrings."""

from __future__ import annotations

import ast
import random
import re

__all__ = ["note", "reword", "with_note"]

_WORDS = (
    ("fp32", "float32"), ("bf16", "bfloat16"), ("one by one", "one after the other"), ("exactly 0", "0 exactly"),
    ("must not", "may not"), ("whatever", "no matter what"), ("hence", "therefore"), ("nothing", "not anything"),
    ("all of", "the whole of"), ("made", "built"), ("each", "every"), ("because", "since"), ("i.e.", "that is"),
)  # fmt: skip
_NOTES = (
    "Kept small on purpose: one numeric step, one function.",
    "Shapes are written in the docstrings.",
    "See the paper for the derivation.",
    "Nothing here draws random numbers.",
    "Callers own what they pass in.",
    "Order matters: read from top to bottom.",
)


def reword(source: str, rng: random.Random) -> str | None:
    """Another word in one comment line or docstring."""
    lines = source.splitlines(keepends=True)
    places = [
        (number, old, new)
        for number in sorted(_prose_lines(source))
        for old, new in _WORDS
        if re.search(rf"\b{re.escape(old)}(?!\w)", _prose_of(lines[number]))
    ]
    if not places:
        return None
    number, old, new = rng.choice(places)
    prose = _prose_of(lines[number])
    lines[number] = lines[number][: len(lines[number]) - len(prose)] + re.sub(
        rf"\b{re.escape(old)}(?!\w)", new, prose, count=1
    )
    return "".join(lines)


def _prose_of(line: str) -> str:
    """A line of a docstring whole; of other lines only a comment that stands alone."""
    return line if not line.lstrip().startswith("#") else line[line.index("#") :]


def _prose_lines(source: str) -> set[int]:
    numbers = {n for n, line in enumerate(source.splitlines()) if line.lstrip().startswith("# ")}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.Module, ast.FunctionDef, ast.ClassDef)) and ast.get_docstring(node) is not None:
            text = node.body[0]
            # Inner lines alone: they hold no quotes, so no code either.
            numbers |= set(range(text.lineno, (text.end_lineno or text.lineno) - 1))
    return numbers


def note(source: str, rng: random.Random) -> str | None:
    """One more sentence in the module's docstring."""
    fresh = [n for n in _NOTES if n not in source]
    documented = ast.get_docstring(ast.parse(source)) is not None
    return with_note(source, rng.choice(fresh)) if fresh and documented else None


def with_note(source: str, sentence: str) -> str:
    """The module with one more paragraph in its docstring."""
    text = ast.parse(source).body[0]
    lines = source.splitlines(keepends=True)
    last = (text.end_lineno or 1) - 1
    at = lines[last].rindex('"""')
    head = lines[last][:at].rstrip()
    lines[last] = f'{head}\n\n{sentence}\n"""\n' if head else f'\n{sentence}\n"""\n'
    return "".join(lines)
