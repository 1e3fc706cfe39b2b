"""Text and syntax tree: where things stand in a module's source, and how they are replaced there."""

from __future__ import annotations

import ast
import builtins
import symtable
from collections.abc import Iterator

__all__ = ["end", "functions", "insert", "start", "substitute", "unbound"]


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
