"""Text edits anchored on the code as it is. An anchor that is missing or ambiguous is an error, never a no-op."""

from __future__ import annotations

import ast
import builtins
import symtable
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from repro_golden.base.errors import ReproError

__all__ = ["Edit", "anchored", "apply", "end", "functions", "insert", "start", "substitute", "unbound"]


@dataclass(frozen=True)
class Edit:
    """Replace the one occurrence of `old` in a file by `new`.

    Attributes:
        path: The file, relative to the trainer's folder.
        old: Its anchor.
        new: What stands there afterwards.
    """

    path: str
    old: str
    new: str


def anchored(edits: Iterable[Edit], files: Mapping[str, str]) -> bool:
    """Whether every anchor stands exactly once in its file."""
    return all(files.get(e.path, "").count(e.old) == 1 for e in edits)


def apply(edits: Iterable[Edit], files: Mapping[str, str]) -> dict[str, str]:
    """The files after the edits, in their order.

    Raises:
        ReproError: an anchor does not stand exactly once: the trainer has changed since the edit was written.
    """
    out = dict(files)
    for edit in edits:
        count = out.get(edit.path, "").count(edit.old)
        if count != 1:
            first = edit.old.strip().splitlines()[0]
            raise ReproError(
                f"the demo's anchor {first!r} stands {count} times in {edit.path} of the installed trainer: "
                "reinstall repro-harness, or bring repro/demo/culprits.py up to date with the trainer"
            )
        out[edit.path] = out[edit.path].replace(edit.old, edit.new)
    return out


# -- text and syntax tree: where things stand in a module's source, and how they are replaced there


def functions(node: ast.AST) -> Iterator[ast.FunctionDef]:
    """Functions and methods, those inside other functions left out."""
    if isinstance(node, ast.FunctionDef):
        yield node
    elif isinstance(node, (ast.Module, ast.ClassDef)):
        for child in node.body:
            yield from functions(child)


def start(node: ast.stmt) -> int:
    """Lines before a statement, its decorators included."""
    decorators = node.decorator_list if isinstance(node, (ast.FunctionDef, ast.ClassDef)) else []
    return min([node.lineno, *(d.lineno for d in decorators)]) - 1


def end(node: ast.stmt) -> int:
    """Lines up to the end of a statement."""
    assert node.end_lineno is not None
    return node.end_lineno


def insert(source: str, line: int, text: str) -> str:
    """The source with `text` after its first `line` lines."""
    lines = source.splitlines(keepends=True)
    return "".join([*lines[:line], text, *lines[line:]])


def substitute(source: str, spans: list[tuple[int, int, int, str]]) -> str:
    """Replace spans ``(line, column, size, text)``; columns and sizes are UTF-8 bytes, as `ast` counts."""
    lines = [line.encode() for line in source.splitlines(keepends=True)]
    for line, column, size, text in sorted(spans, reverse=True):
        raw = lines[line - 1]
        lines[line - 1] = raw[:column] + text.encode() + raw[column + size :]
    return b"".join(lines).decode()


def unbound(source: str) -> set[str]:
    """Names that a module's functions read and nobody binds: each would be a NameError when its line is reached."""
    top = symtable.symtable(source, "<module>", "exec")
    bound = {s.get_name() for s in top.get_symbols() if s.is_assigned() or s.is_imported() or s.is_namespace()}
    bound |= {*dir(builtins), "__name__", "__file__", "__doc__"}
    tables, read = list(top.get_children()), set[str]()
    for table in tables:  # grows as it goes
        tables += table.get_children()
        read |= {s.get_name() for s in table.get_symbols() if s.is_global() and s.is_referenced()}
    return read - bound
