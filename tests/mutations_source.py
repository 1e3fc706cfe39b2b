"""The built-in trainer's source, read for places to change: what a change is, and which expressions are tensors."""

from __future__ import annotations

import ast
import builtins
import difflib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

PACKAGE = Path(__file__).parent.parent / "core" / "repro_core"
FILES = (
    "rl/advantages.py",
    "rl/batching.py",
    "rl/kl.py",
    "rl/loss.py",
    "model/decoder.py",
    "engines/optimizer.py",
    "engines/torch_engine.py",
    "train/trainer.py",
)
"""What an update is made of. The sampler is not among them: rollouts are recorded once. Experts, critics and the
estimators in ``rl/values.py`` have no part in a run of GRPO."""


# What a change is


@dataclass(frozen=True)
class Mutation:
    """One change of one file of the trainer.

    Attributes:
        kind: the operator, one of `KINDS`.
        path: the file in the package, such as ``rl/loss.py``.
        function: where the changed expression stands, such as ``Policy.forward``; empty at module level.
        before: the file's source.
        after: the same with the change.
    """

    kind: str
    path: str
    function: str
    before: str
    after: str

    @property
    def distant(self) -> bool:
        """The operations that move run on other lines, and no caller of theirs stands on the changed one either."""
        return self.kind in ("header", "constant")

    @cached_property
    def _hunks(self) -> list[tuple[range, range]]:
        lines = difflib.unified_diff(self.before.splitlines(), self.after.splitlines(), n=0, lineterm="")
        heads = [m for line in lines if (m := re.fullmatch(r"@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@", line))]
        return [(_lines(m[1], m[2]), _lines(m[3], m[4])) for m in heads]

    @property
    def removed(self) -> list[range]:
        """Line numbers in `before`, one range for each hunk; an empty one stands where lines are only added."""
        return [old for old, _ in self._hunks]

    @property
    def added(self) -> list[range]:
        """Line numbers in `after`, hunk by hunk as `removed`."""
        return [new for _, new in self._hunks]

    @property
    def diff(self) -> str:
        """The unified diff, for people."""
        old, new = self.before.splitlines(keepends=True), self.after.splitlines(keepends=True)
        return "".join(difflib.unified_diff(old, new, f"a/{self.path}", f"b/{self.path}", n=1))


def _lines(start: str, count: str | None) -> range:
    """A hunk's lines; git and diff name the line *before* an empty range."""
    first, length = int(start), int(count or "1")
    return range(first, first + length) if length else range(first + 1, first + 1)


# What the source says


_NO_TENSOR = {"tolist", "item", "dim", "size", "numel", "stride", "values", "items", "keys", "append", "backward"}
PLAIN = {"dtype", "shape", "device", "ndim", "requires_grad"}


def _annotated(annotation: ast.expr | None) -> str:
    text = "" if annotation is None else ast.unparse(annotation)
    if re.fullmatch(r"(torch\.)?Tensor( \| None)?", text):
        return "tensor"
    return "mapping" if re.fullmatch(r"(dict|Mapping)\[str, (torch\.)?Tensor( \| None)?\]|Scores", text) else ""


def _each(target: ast.expr, kind: str) -> Iterator[tuple[str, str]]:
    if isinstance(target, ast.Name):
        yield target.id, kind
    elif isinstance(target, ast.Tuple):
        for part in target.elts:
            yield from _each(part, kind)


def _reached(trees: Iterable[ast.Module]) -> set[str]:
    """Names of functions that making a trainer and training with it can call; what only prints does not count."""
    uses: dict[str, set[str]] = {}
    for tree in trees:
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                uses.setdefault(node.name, set()).update({"__init__", "forward"})
            elif isinstance(node, ast.FunctionDef):
                calls = [n for n in ast.walk(node) if isinstance(n, ast.Call)]
                prints = [n for n in calls if ast.unparse(n.func) in ("self.log", "self.say")]
                silent = {n for call in prints for n in ast.walk(call)}
                called = [n for n in ast.walk(node) if n not in silent]
                names = {n.func.id for n in called if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)}
                members = {n.attr for n in called if isinstance(n, ast.Attribute)}  # a property is not called
                uses.setdefault(node.name, set()).update(names, members)
    out, todo = set(), ["Trainer", "train"]
    while todo:
        name = todo.pop()
        if name in uses and name not in out:
            out.add(name)
            todo += uses[name]
    return out


class Package:
    """What annotations say about names that one file defines and another uses."""

    def __init__(self, trees: Sequence[ast.Module]) -> None:
        self.fields: dict[str, str] = {"grad": "tensor", "weight": "tensor"}
        self.returns: dict[str, str] = {}
        for tree in trees:
            for node in ast.walk(tree):
                if isinstance(node, ast.ClassDef):
                    fields = [f for f in node.body if isinstance(f, ast.AnnAssign) and isinstance(f.target, ast.Name)]
                    annotations = {ast.unparse(f.target): _annotated(f.annotation) for f in fields}
                    self.fields |= {name: kind for name, kind in annotations.items() if kind}
                elif isinstance(node, ast.FunctionDef) and node.name != "forward":
                    self.returns[node.name] = _annotated(node.returns)
        self.reached = _reached(trees)


class Source:
    """One file: its text, who contains whom, and which expressions are tensors."""

    def __init__(self, path: str, text: str, package: Package) -> None:
        assert text.isascii(), f"{path}: columns are counted in bytes"
        self.path, self.text_, self.tree, self.package = path, text, ast.parse(text), package
        self.parents = {child: node for node in ast.walk(self.tree) for child in ast.iter_child_nodes(node)}
        starts = [0]
        for line in text.splitlines(keepends=True):
            starts.append(starts[-1] + len(line))
        self._starts = starts
        self._kinds: dict[ast.AST, str] = {}
        self._scope(self.tree, {})

    def span(self, node: ast.expr) -> tuple[int, int]:
        """Where the node's text begins and ends in the file."""
        assert node.end_lineno is not None and node.end_col_offset is not None
        return self._starts[node.lineno - 1] + node.col_offset, self._starts[node.end_lineno - 1] + node.end_col_offset

    def text(self, node: ast.expr) -> str:
        """The node's own text."""
        start, end = self.span(node)
        return self.text_[start:end]

    def atom(self, node: ast.expr) -> str:
        """The same, in parentheses where something that follows would otherwise bind first."""
        bare = isinstance(node, (ast.Name, ast.Attribute, ast.Call, ast.Subscript, ast.List))
        return self.text(node) if bare else f"({self.text(node)})"

    def tensor(self, node: ast.AST) -> bool:
        """The expression is a tensor, as far as annotations tell."""
        return self._kinds.get(node) == "tensor"

    def above(self, node: ast.AST) -> Iterator[ast.AST]:
        """The nodes that contain this one, the nearest first."""
        while node in self.parents:
            node = self.parents[node]
            yield node

    def _scope(self, scope: ast.AST, outer: Mapping[str, str]) -> None:
        env = dict(outer)
        if isinstance(scope, ast.FunctionDef):
            every = [*scope.args.posonlyargs, *scope.args.args, *scope.args.kwonlyargs]
            env |= {a.arg: _annotated(a.annotation) for a in every}
        nodes, inner = [], []
        todo: list[ast.AST] = list(ast.iter_child_nodes(scope))
        while todo:
            node = todo.pop()
            nodes.append(node)
            if isinstance(node, ast.FunctionDef):
                inner.append(node)
            else:
                todo.extend(ast.iter_child_nodes(node))
        for _ in range(4):  # a name that is assigned below its use (in a loop) needs another pass
            for node in nodes:
                env |= {name: kind for name, kind in self._bound(node, env) if kind}
        self._kinds |= {node: self._kind(node, env) for node in nodes if isinstance(node, ast.expr)}
        for function in inner:
            self._scope(function, env)

    def _bound(self, node: ast.AST, env: Mapping[str, str]) -> Iterator[tuple[str, str]]:
        if isinstance(node, ast.AnnAssign):
            yield from _each(node.target, _annotated(node.annotation))
        elif isinstance(node, ast.Assign):
            target, value = node.targets[0], node.value
            if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
                for part, its in zip(target.elts, value.elts, strict=True):
                    yield from _each(part, self._kind(its, env))
            else:
                yield from _each(target, self._kind(value, env))
        elif isinstance(node, (ast.For, ast.comprehension)):
            yield from self._elements(node.target, node.iter, env)

    def _elements(self, target: ast.expr, of: ast.expr, env: Mapping[str, str]) -> Iterator[tuple[str, str]]:
        if isinstance(of, ast.Tuple) and of.elts and not isinstance(target, ast.Tuple):
            yield from _each(target, self._kind(of.elts[0], env))
        elif isinstance(of, ast.Call) and ast.unparse(of.func) == "enumerate" and isinstance(target, ast.Tuple):
            yield from self._elements(target.elts[1], of.args[0], env)
        elif isinstance(of, ast.Call) and isinstance(of.func, ast.Attribute) and of.func.attr in ("values", "items"):
            if self._kind(of.func.value, env) == "mapping":
                last = target.elts[-1] if isinstance(target, ast.Tuple) else target
                yield from _each(last, "tensor")
        else:
            yield from _each(target, self._kind(of, env))

    def _kind(self, node: ast.AST, env: Mapping[str, str]) -> str:
        match node:
            case ast.Name():
                return env.get(node.id, "")
            case ast.Attribute():
                return self.package.fields.get(node.attr, "")
            case ast.Subscript():
                return "tensor" if self._kind(node.value, env) else ""
            case ast.BinOp(left=a, right=b) | ast.IfExp(body=a, orelse=b):
                return "tensor" if "tensor" in (self._kind(a, env), self._kind(b, env)) else ""
            case ast.UnaryOp():
                return "" if isinstance(node.op, ast.Not) else self._kind(node.operand, env)
            case ast.Compare(left=a, ops=[op], comparators=[b]) if not isinstance(op, (ast.Is, ast.IsNot, ast.In)):
                return "tensor" if "tensor" in (self._kind(a, env), self._kind(b, env)) else ""
            case ast.Call():
                return self._called(node, env)
        return ""

    def _called(self, node: ast.Call, env: Mapping[str, str]) -> str:
        takes = bool(node.args) and self._kind(node.args[0], env) == "tensor"
        if isinstance(node.func, ast.Name):
            if node.func.id in self.package.returns:
                return self.package.returns[node.func.id]
            return "tensor" if takes and not hasattr(builtins, node.func.id) and node.func.id.islower() else ""
        if not isinstance(node.func, ast.Attribute):
            return ""
        owner, name = node.func.value, node.func.attr
        if isinstance(owner, ast.Name) and owner.id in ("torch", "F"):
            return "tensor" if name.islower() and name != "no_grad" else ""
        if self._kind(owner, env) == "tensor":
            return "" if name in _NO_TENSOR else "tensor"
        if name in self.package.returns:
            return self.package.returns[name]
        return "tensor" if takes and ast.unparse(owner).startswith("self") else ""


@cache
def sources() -> dict[str, Source]:
    """The trainer's files as they are now."""
    texts = {path: (PACKAGE / path).read_text() for path in FILES}
    package = Package([ast.parse(text) for text in texts.values()])
    return {path: Source(path, text, package) for path, text in texts.items()}


# Operators: from an expression to other texts for it


Edit = tuple[ast.expr, str]
Proposal = str | list[Edit]
Operator = Callable[[Any, Source], Iterator[Proposal]]
OPERATORS: dict[str, Operator] = {}


def operator(kind: str) -> Callable[[Operator], Operator]:
    def register(function: Operator) -> Operator:
        OPERATORS[kind] = function
        return function

    return register


def method(node: ast.AST, *names: str) -> ast.expr | None:
    """The owner in ``owner.name(...)``."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in names:
        return node.func.value
    return None


def name_of(node: ast.Call) -> str:
    """The last part of what is called."""
    return ast.unparse(node.func).rpartition(".")[2]


def number_of(node: ast.AST) -> float | int | None:
    return node.value if isinstance(node, ast.Constant) and type(node.value) in (int, float) else None  # type: ignore[return-value]


def is_torch(node: ast.AST, *names: str) -> bool:
    return isinstance(node, ast.Call) and ast.unparse(node.func) in {f"{m}.{n}" for m in ("torch", "F") for n in names}


def arguments_of(node: ast.Call, m: Source) -> str:
    return ", ".join([*map(m.text, node.args), *(f"{k.arg}={m.text(k.value)}" for k in node.keywords)])


def binary(node: ast.AST, *ops: type[ast.operator]) -> bool:
    return isinstance(node, ast.BinOp) and isinstance(node.op, ops)
