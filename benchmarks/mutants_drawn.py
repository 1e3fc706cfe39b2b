"""Changes of the code, drawn by a seed, and how they and marks beside them are written into a copy of it."""

from __future__ import annotations

import ast
import contextlib
import difflib
import functools
import itertools
import random
import re
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tiers import ROOT

__all__ = ["PACKAGES", "Mutant", "changed", "draw", "read_marks", "write"]

PACKAGES = ("repro", "core/repro_core", "golden/repro_golden", "bisect/repro_bisect")
LEFT_OUT = (  # compiled: what is put into them to see who comes by does not compile
    "golden/repro_golden/fingerprint/backends/_numba.py",
    "golden/repro_golden/fingerprint/backends/_triton.py",
)


@dataclass(frozen=True)
class Mutant:
    """One change.

    Attributes:
        number: Its place in the draw.
        seed: The draw's.
        path: The file, from the repository's root.
        operator: Cosmic Ray's name of what was done.
        occurrence: Which of the places in this file where it can be done.
        line: The line, counted from 1.
        diff: The change as a unified diff without context.
    """

    number: int
    seed: int
    path: str
    operator: str
    occurrence: int
    line: int
    diff: str

    def text(self) -> str:
        """The whole file as changed."""
        from cosmic_ray.mutating import mutate_code
        from cosmic_ray.plugins import get_operator

        text = mutate_code(committed(self.path), get_operator(self.operator)(), self.occurrence)
        assert text is not None, self
        return text

    def edits(self) -> list[tuple[int, int, list[str]]]:
        """What it replaces: from a line up to another, counted from 0, and the lines in their place."""
        old, new = committed(self.path).splitlines(), self.text().splitlines()
        codes = difflib.SequenceMatcher(None, old, new, autojunk=False).get_opcodes()
        return [(start, end, new[at:to]) for tag, start, end, at, to in codes if tag != "equal"]


@functools.cache
def committed(path: str) -> str:
    """A file of the last commit."""
    done = subprocess.run(["git", "show", f"HEAD:{path}"], cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout


def draw(seed: int, number: int) -> list[dict[str, Any]]:
    """Changes of lines that run: files by their size, then a kind of change, then a place."""
    from cosmic_ray.ast import get_ast
    from cosmic_ray.plugins import get_operator, operator_names

    chosen: list[dict[str, Any]] = []
    random_of = random.Random(seed)
    names = [p for folder in PACKAGES for p in tracked(folder) if p not in LEFT_OUT]
    sizes = [len(committed(name).splitlines()) for name in names]
    taken: set[tuple[str, int]] = set()
    while len(chosen) < number:
        (name,) = random_of.choices(names, sizes)
        source = committed(name)
        nodes, silent = list(_nodes(get_ast(source))), _silent(source)
        places: dict[str, list[tuple[str, int, int]]] = {}
        for operator in sorted(operator_names()):
            made = get_operator(operator)
            if made.arguments():
                continue
            ats = itertools.chain.from_iterable(made().mutation_positions(node) for node in nodes)
            for occurrence, ((line, _), _) in enumerate(ats):
                if line not in silent and (name, line) not in taken:
                    family = re.sub(r"(Operator|Replace(?:Binary|Comparison|Unary)).*", r"\1", operator)
                    places.setdefault(family, []).append((operator, occurrence, line))
        if not places:
            continue
        operator, occurrence, line = random_of.choice(places[random_of.choice(sorted(places))])
        mutant = Mutant(len(chosen), seed, name, operator, occurrence, line, "")
        if diff := _difference(source, mutant):
            lines = {(name, at + 1) for start, end, _ in mutant.edits() for at in range(start, max(end, start + 1))}
            if not lines & taken:  # or they could not be tried together
                taken |= lines
                chosen.append(asdict(mutant) | {"diff": "\n".join(diff)})
    return chosen


def tracked(folder: str) -> list[str]:
    """Python files of the last commit, sorted."""
    words = ["git", "ls-tree", "-r", "--name-only", "HEAD", folder]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True)
    return sorted(name for name in done.stdout.split() if name.endswith(".py"))


def _nodes(node: Any) -> Iterator[Any]:
    yield node
    for child in getattr(node, "children", ()):
        yield from _nodes(child)


def _silent(source: str) -> set[int]:
    """Lines whose change means nothing: annotations, imports, type aliases' heads, what only type checkers read."""
    lines: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        hidden: list[ast.AST | None] = []
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            every = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs, node.args.vararg, node.args.kwarg]
            hidden += [node.returns, *(arg.annotation for arg in every if arg)]
        if isinstance(node, ast.AnnAssign):
            hidden.append(node.annotation)
        if isinstance(node, ast.Import | ast.ImportFrom):
            hidden.append(node)
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            hidden.append(node)
        for part in hidden:
            if part is not None:
                lines.update(range(part.lineno, (part.end_lineno or part.lineno) + 1))  # type: ignore[attr-defined]
    return lines


def _difference(source: str, mutant: Mutant) -> list[str]:
    """The lines of a diff; none where the change cannot be made."""
    try:
        text = mutant.text()
        compile(text, "mutant", "exec")
    except (AttributeError, SyntaxError):  # `except a.B` is more than Cosmic Ray knows
        return []
    return [*difflib.unified_diff(source.splitlines(), text.splitlines(), n=0, lineterm="")][2:]


def write(copy: Path, mutants: Sequence[Mutant], *, marks: Path | None = None, change: bool = True) -> None:
    """Write the changes into a copy, all at once, or marks, or both.

    A mark is a statement before the changed one that says which test came by; before all of a module's functions where
    the changed one runs on import.
    """
    for path in sorted({mutant.path for mutant in mutants}):
        source = committed(path)
        slots: list[str | None] = [*source.splitlines()]
        here = [mutant for mutant in mutants if mutant.path == path]
        heads: dict[int, list[str]] = {}
        for mutant in here if marks else ():
            for line in _marks(source, mutant.line):
                text = slots[line - 1] or ""
                indent = text[: len(text) - len(text.lstrip())]
                heads.setdefault(line - 1, []).append(f"{indent}{_mark(mutant.number, marks)}")
        for start, end, lines in itertools.chain.from_iterable(mutant.edits() for mutant in here if change):
            if start == end:
                slots[start] = "\n".join([*lines, slots[start] or ""])
                continue
            slots[start:end] = ["\n".join(lines) if lines else None] + [None] * (end - start - 1)
        text = "\n".join(
            line for at, slot in enumerate(slots) for line in (*heads.get(at, ()), slot) if line is not None
        )
        compile(text, path, "exec")
        (copy / path).write_text(text + "\n")


@contextlib.contextmanager
def changed(copy: Path, mutants: Sequence[Mutant]) -> Iterator[Path]:
    """A copy with some changes, for a while."""
    write(copy, mutants)
    try:
        yield copy
    finally:
        for path in {mutant.path for mutant in mutants}:
            (copy / path).write_text(committed(path))


def read_marks(seen: Path) -> dict[str, list[int]]:
    """The changes that each test reached."""
    reached: dict[str, set[int]] = {}
    for path in sorted(seen.iterdir()):
        reached.setdefault(path.read_text().rpartition(" (")[0], set()).add(int(path.name.partition("-")[0]))
    return {name: sorted(numbers) for name, numbers in reached.items()}


def _marks(source: str, line: int) -> list[int]:
    """Lines that a mark goes before: the statement's, and where it runs on import, all functions' first too."""
    tree, lines = ast.parse(source), source.splitlines()
    within: list[ast.stmt] = []
    inside = False
    node: ast.AST = tree
    while True:
        for child in ast.iter_child_nodes(node):
            start = min([getattr(child, "lineno", 0), *(d.lineno for d in getattr(child, "decorator_list", ()))])
            if start <= line <= (getattr(child, "end_lineno", None) or 0):
                break
        else:
            break
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and child in node.body:
            inside = True
        node = child
        if isinstance(node, ast.stmt):
            within.append(node)
    for statement in reversed(within):
        start = min([statement.lineno, *(d.lineno for d in getattr(statement, "decorator_list", ()))])
        before = lines[start - 1][: statement.col_offset]
        if not before.strip() and not lines[start - 1].lstrip().startswith(("elif", "else")):
            break
    first = [start]
    if not inside:
        for function in ast.walk(tree):
            if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
                body = function.body[1:] if ast.get_docstring(function) is not None else function.body
                if body and not lines[body[0].lineno - 1][: body[0].col_offset].strip():
                    begin = min([body[0].lineno, *(d.lineno for d in getattr(body[0], "decorator_list", ()))])
                    first.append(begin)
    return sorted(set(first))


def _mark(number: int, seen: Path | None) -> str:
    """A statement that needs nothing of its module: once a test, an empty file with its name."""
    told = (
        f"import os, hashlib; t = os.environ['PYTEST_CURRENT_TEST']; globals()['_seen_{number}'].add(t)\n"
        "try:\n"
        f"  with open('{seen}/{number}-' + hashlib.md5(t.encode()).hexdigest(), 'w') as f: f.write(t)\n"
        "except OSError: pass"
    )
    asked = "__import__('os').environ.get('PYTEST_CURRENT_TEST')"
    return f"{asked} in globals().setdefault('_seen_{number}', {{None}}) or exec({told!r}, globals())"
