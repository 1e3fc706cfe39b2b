"""Refactors that change no bit, made from a file's syntax tree: whatever the trainer looks like, some of them apply.

Each takes a module's source and a generator and returns the changed source, or None where it has nothing to do. A
refactor keeps every operation, its operands and their order; it renames, moves, wraps or describes.
"""

from __future__ import annotations

import ast
import builtins
import random
import re
from collections.abc import Callable
from itertools import pairwise
from typing import TypeAlias

from repro.demo.edits import end, functions, insert, start, substitute

__all__ = ["REFACTORS", "Refactor", "note", "refactor"]

Refactor: TypeAlias = Callable[[str, random.Random], str | None]

_Function: TypeAlias = ast.FunctionDef
_ALIASES = (
    ("_Shape", "tuple[int, ...]"), ("_Lengths", "list[int]"), ("_Columns", "dict[str, object]"),
    ("_Span", "tuple[int, int]"), ("_Names", "tuple[str, ...]"), ("_Scalar", "int | float"),
)  # fmt: skip
_HELPERS = (
    ("_is_empty", "values", "len(values) == 0", "Whether there is nothing in it."),
    ("_last", "values", "values[-1]", "The last element."),
    ("_plural", "count", '"" if count == 1 else "s"', "The ending of a counted noun."),
    ("_ceil_div", "a, b", "-(-a // b)", "Integer division, rounded up."),
    ("_clamp_index", "index, length", "max(0, min(index, length - 1))", "The nearest valid index."),
    ("_spread", "low, high", "high - low", "Width of an interval."),
)
_SUFFIXES = ("_here", "_now", "_local", "_value")


def refactor(source: str, rng: random.Random, accept: Callable[[str], bool]) -> str:
    """One refactor of a module that changes its text, compiles and is accepted.

    Args:
        source: The module.
        rng: Chooses it.
        accept: Whether a result serves; a commit to come may have anchors of its own in the file.
    """
    for candidate in rng.sample(REFACTORS, len(REFACTORS)):
        for _ in range(3):
            changed = candidate(source, rng)
            if changed and changed != source and _compiles(changed) and accept(changed):
                return changed
    changed = _with_note(source, f"Revision {rng.randrange(16**6):06x}.")
    assert accept(changed), "a sentence in the module's docstring is in the way of an anchor"
    return changed


def _compiles(source: str) -> bool:
    try:
        compile(source, "<refactor>", "exec", dont_inherit=True)
    except SyntaxError:
        return False
    return True


# -- names


def rename_local(source: str, rng: random.Random) -> str | None:
    """A local variable gets another name."""
    tree = ast.parse(source)
    shared = _module_names(tree) | set(dir(builtins))
    choices = [(f, name) for f in functions(tree) for name in sorted(_renameable(f) - shared)]
    if not choices:
        return None
    function, name = rng.choice(choices)
    new = name + rng.choice(_SUFFIXES)
    if new in source:
        return None
    spans = [
        (node.lineno, node.col_offset, len(name.encode()))
        for node in ast.walk(function)
        if isinstance(node, ast.Name) and node.id == name
    ]
    return substitute(source, [(line, column, size, new) for line, column, size in spans])


def _module_names(tree: ast.Module) -> set[str]:
    """Names bound at the top of a module: a comprehension's variable of that name would hide one of them."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            names.update((alias.asname or alias.name).split(".")[0] for alias in node.names)
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.add(node.name)
        names.update(n.id for n in ast.walk(node) if isinstance(n, ast.Name) and not isinstance(node, ast.FunctionDef))
    return names


def _renameable(function: _Function) -> set[str]:
    """Local names whose every use is an `ast.Name` of this function with a position that can be trusted."""
    stored: set[str] = set()
    barred: set[str] = set()
    for node in ast.walk(function):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            stored.add(node.id)
        elif isinstance(node, ast.arg):
            barred.add(node.arg)
        elif isinstance(node, (ast.Global, ast.Nonlocal)):
            barred.update(node.names)
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            barred.add(node.name)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            barred.update((alias.asname or alias.name).split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ExceptHandler) and node.name:
            barred.add(node.name)
        elif isinstance(node, ast.JoinedStr):  # Python 3.11 places names inside f-strings wrongly
            barred.update(n.id for n in ast.walk(node) if isinstance(n, ast.Name))
    return {n for n in stored - barred if not n.startswith("_")}


def rename_private(source: str, rng: random.Random) -> str | None:
    """A private constant or function of the module gets another name."""
    tree = ast.parse(source)
    names = sorted(
        {
            target.id
            for node in tree.body
            if isinstance(node, ast.Assign)
            for target in node.targets
            if isinstance(target, ast.Name) and re.fullmatch(r"_[A-Z]\w+", target.id)
        }
        | {node.name for node in tree.body if isinstance(node, ast.FunctionDef) and node.name.startswith("_")}
    )
    if not names:
        return None
    name = rng.choice(names)
    new = name + ("_TABLE" if name.isupper() else "_impl")
    # A whole word of a private name is that name wherever it stands: strings of ours never hold one.
    return None if new in source else re.sub(rf"(?<![\w.]){name}\b", new, source)


# -- structure


def extract_helper(source: str, rng: random.Random) -> str | None:
    """The right-hand side of one assignment becomes a private function of the module."""
    tree = ast.parse(source)
    choices = [
        (top, statement, names)
        for top in tree.body
        for function in functions(top)
        for statement in function.body
        if isinstance(statement, ast.Assign) and (names := _inputs(function, statement)) is not None
    ]
    if not choices:
        return None
    top, statement, names = rng.choice(choices)
    target = statement.targets[0]
    assert isinstance(target, ast.Name)
    helper = f"_{target.id.lstrip('_')}_of"
    if helper in source:
        return None
    value = statement.value
    body = ast.get_source_segment(source, value)
    assert body is not None
    assert value.end_col_offset is not None
    size = value.end_col_offset - value.col_offset
    called = substitute(source, [(value.lineno, value.col_offset, size, f"{helper}({', '.join(names)})")])
    text = f'def {helper}({", ".join(names)}):\n    """One step of its caller."""\n    return {body}\n\n\n'
    return insert(called, start(top), text)


def _inputs(function: _Function, statement: ast.Assign) -> list[str] | None:
    """The local names that a one-line right-hand side reads; None where it cannot move out of the function."""
    value, target = statement.value, statement.targets[0]
    if len(statement.targets) != 1 or not isinstance(target, ast.Name) or value.end_lineno != value.lineno:
        return None
    if isinstance(value, (ast.Constant, ast.Name, ast.Attribute)):
        return None
    moving = (ast.Await, ast.Yield, ast.YieldFrom, ast.NamedExpr, ast.Lambda, ast.JoinedStr,
              ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp, ast.Starred)  # fmt: skip
    if any(isinstance(node, moving) for node in ast.walk(value)):
        return None
    local = {node.arg for node in ast.walk(function) if isinstance(node, ast.arg)}
    for node in ast.walk(function):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            local.add(node.id)
        elif isinstance(node, ast.FunctionDef) and node is not function:
            local.add(node.name)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            local.update((alias.asname or alias.name).split(".")[0] for alias in node.names)
    used = [node.id for node in ast.walk(value) if isinstance(node, ast.Name)]
    if "super" in used:
        return None
    return list(dict.fromkeys(name for name in used if name in local))


def reorder(source: str, rng: random.Random) -> str | None:
    """Two functions that stand one after the other change places."""
    body = ast.parse(source).body
    lines = source.splitlines(keepends=True)
    pairs = [
        (a, b)
        for a, b in pairwise(body)
        if _movable(a) and _movable(b) and not "".join([lines[a.lineno - 2], *lines[end(a) : b.lineno - 1]]).strip()
    ]
    if not pairs:
        return None
    a, b = rng.choice(pairs)
    first, gap, second = lines[a.lineno - 1 : end(a)], lines[end(a) : b.lineno - 1], lines[b.lineno - 1 : end(b)]
    return "".join([*lines[: a.lineno - 1], *second, *gap, *first, *lines[end(b) :]])


def _movable(node: ast.stmt) -> bool:
    """A function whose definition reads nothing of the module: no decorators, constant defaults."""
    return (
        isinstance(node, ast.FunctionDef)
        and not node.decorator_list
        and all(isinstance(d, ast.Constant) for d in (*node.args.defaults, *filter(None, node.args.kw_defaults)))
    )


def add_alias(source: str, rng: random.Random) -> str | None:
    """A type alias after the imports."""
    fresh = [(name, what) for name, what in _ALIASES if name not in source]
    imports = [n for n in ast.parse(source).body if isinstance(n, (ast.Import, ast.ImportFrom))]
    if not fresh or not imports:
        return None
    name, what = rng.choice(fresh)
    return insert(source, end(imports[-1]), f"\n{name} = {what}\n")


def add_helper(source: str, rng: random.Random) -> str | None:
    """A small function that nobody calls yet."""
    fresh = [h for h in _HELPERS if h[0] not in source]
    if not fresh:
        return None
    name, arguments, body, docstring = rng.choice(fresh)
    return f'{source.rstrip()}\n\n\ndef {name}({arguments}):\n    """{docstring}"""\n    return {body}\n'


# -- refactors of words alone: comments and docstrings


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


def _reword(source: str, rng: random.Random) -> str | None:
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
    return _with_note(source, rng.choice(fresh)) if fresh and documented else None


def _with_note(source: str, sentence: str) -> str:
    """The module with one more paragraph in its docstring."""
    text = ast.parse(source).body[0]
    lines = source.splitlines(keepends=True)
    last = (text.end_lineno or 1) - 1
    at = lines[last].rindex('"""')
    head = lines[last][:at].rstrip()
    lines[last] = f'{head}\n\n{sentence}\n"""\n' if head else f'\n{sentence}\n"""\n'
    return "".join(lines)


REFACTORS: list[Refactor] = [
    _reword, note, rename_local, rename_local, rename_private, extract_helper, extract_helper, reorder, add_alias,
    add_helper,
]  # fmt: skip
"""All of them; those that look most like work stand twice."""
