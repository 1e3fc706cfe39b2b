"""Changes of the built-in trainer's source, found by structure, each of one expression at its exact place.

An operator looks at one expression of the real source and proposes other texts for it; everything around the
expression stays byte-equal, so the lines that a change touches are read from its diff. No change is written down here:
what can be changed follows from the source as it is today, and a seed chooses. Which expressions are tensors is read
from annotations and carried through assignments.

Run as a program it trains the trainer under each change that it reads from standard input (`verdicts`).
"""

from __future__ import annotations

import ast
import builtins
import difflib
import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import random
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import pairwise
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

PACKAGE = Path(__file__).parent.parent / "core" / "repro_core"
FILES = ("advantages.py", "batching.py", "kl.py", "loss.py", "model.py", "optimizer.py", "trainer.py")
"""What an update is made of. The sampler is not among them: rollouts are recorded once."""

CONFIG: dict[str, Any] = {
    "seed": 5,
    "rollout_batch_size": 3,
    "n_samples_per_prompt": 4,
    "global_batch_size": 6,
    "num_steps_per_rollout": 2,
    "max_response_len": 5,
    "temperature": 0.9,
    "max_tokens_per_micro_batch": 36,
    "lr": 0.02,
    "adam_eps": 1e-6,
    "weight_decay": 0.1,
    "clip_grad": 0.05,
    "whiten_advantages": True,
    "eps_clip": 0.02,
    "eps_clip_high": 0.03,
    "eps_clip_c": 1.05,
    "entropy_coef": 0.01,
    "kl_loss_coef": 0.1,
    "use_tis": True,
    "tis_clip": 1.02,
    "tis_clip_low": 0.98,
    "model": {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "initializer_range": 0.2,
    },
}
"""A run in which as much of the trainer as possible matters: clips bind, the policy moves within a rollout."""
ROLLOUTS = 2
TIMEOUT = 20  # seconds for one run under a change; one takes well under a second

Verdict = str
"""moved, still (every signal has the same bits), nan (a signal lost its last finite number) or "failed: WHY"."""


# What a change is


@dataclass(frozen=True)
class Mutation:
    """One change of one file of the trainer.

    Attributes:
        kind: the operator, one of `KINDS`.
        path: the file in the package, such as ``loss.py``.
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
        return self.kind in DISTANT

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
_PLAIN = {"dtype", "shape", "device", "ndim", "requires_grad"}


def _annotated(annotation: ast.expr | None) -> str:
    text = "" if annotation is None else ast.unparse(annotation)
    if re.fullmatch(r"(torch\.)?Tensor( \| None)?", text):
        return "tensor"
    return "mapping" if re.fullmatch(r"(dict|Mapping)\[str, (torch\.)?Tensor\]", text) else ""


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
                prints = [n for n in ast.walk(node) if isinstance(n, ast.Call) and ast.unparse(n.func) == "self.log"]
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
                    found = {ast.unparse(f.target): _annotated(f.annotation) for f in fields}
                    self.fields |= {name: kind for name, kind in found.items() if kind}
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
        own, inner = [], []
        todo: list[ast.AST] = list(ast.iter_child_nodes(scope))
        while todo:
            node = todo.pop()
            own.append(node)
            if isinstance(node, ast.FunctionDef):
                inner.append(node)
            else:
                todo.extend(ast.iter_child_nodes(node))
        for _ in range(4):  # a name that is assigned below its use (in a loop) needs another pass
            for node in own:
                env |= {name: kind for name, kind in self._bound(node, env) if kind}
        self._kinds |= {node: self._kind(node, env) for node in own if isinstance(node, ast.expr)}
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


# Operators: from an expression to other texts for it


Edit = tuple[ast.expr, str]
Proposal = str | list[Edit]
Operator = Callable[[Any, Source], Iterator[Proposal]]
_OPERATORS: dict[str, Operator] = {}


def _operator(kind: str) -> Callable[[Operator], Operator]:
    def register(function: Operator) -> Operator:
        _OPERATORS[kind] = function
        return function

    return register


def _method(node: ast.AST, *names: str) -> ast.expr | None:
    """The owner in ``owner.name(...)``."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in names:
        return node.func.value
    return None


def _name(node: ast.Call) -> str:
    """The last part of what is called."""
    return ast.unparse(node.func).rpartition(".")[2]


def _number(node: ast.AST) -> float | int | None:
    return node.value if isinstance(node, ast.Constant) and type(node.value) in (int, float) else None  # type: ignore[return-value]


def _torch(node: ast.AST, *names: str) -> bool:
    return isinstance(node, ast.Call) and ast.unparse(node.func) in {f"{m}.{n}" for m in ("torch", "F") for n in names}


def _arguments(node: ast.Call, m: Source) -> str:
    return ", ".join([*map(m.text, node.args), *(f"{k.arg}={m.text(k.value)}" for k in node.keywords)])


def _binary(node: ast.AST, *ops: type[ast.operator]) -> bool:
    return isinstance(node, ast.BinOp) and isinstance(node.op, ops)


@_operator("dtype")
def _dtype(node: ast.expr, m: Source) -> Iterator[Proposal]:
    """A tensor takes a round trip through a narrower type."""
    if m.tensor(node) and not isinstance(node, ast.Compare):
        yield f"{m.atom(node)}.bfloat16().float()"
        yield f"{m.atom(node)}.to(torch.float16).to(torch.float32)"


@_operator("cast")
def _cast(node: ast.expr, m: Source) -> Iterator[Proposal]:
    """A cast names another type."""
    if (owner := _method(node, "float")) is not None and m.tensor(owner):
        yield f"{m.atom(owner)}.bfloat16().float()"
        yield f"{m.atom(owner)}.double()"
    if isinstance(node, ast.Call):
        for keyword in node.keywords:
            if keyword.arg == "dtype" and m.text(keyword.value) == "torch.float32":
                for other in ("bfloat16", "float16", "float64"):
                    yield [(keyword.value, f"torch.{other}")]


@_operator("wide")
def _wide(node: ast.expr, m: Source) -> Iterator[Proposal]:
    """One function or sum is computed in double precision."""
    functions = ["exp", "expm1", "rsqrt", "sqrt", "cos", "sin", "sum", "mean", "square"]
    if not isinstance(node, ast.Call):
        return
    if (owner := _method(node, *functions)) is not None and m.tensor(owner):
        yield f"{m.atom(owner)}.double().{_name(node)}({_arguments(node, m)}).float()"
    elif _torch(node, *functions, "log_softmax", "softmax", "silu"):
        rest = [f"{k.arg}={m.text(k.value)}" for k in node.keywords if k.arg != "dtype"]
        yield f"{m.text(node.func)}({', '.join([f'{m.atom(node.args[0])}.double()', *rest])}).float()"


@_operator("epsilon")
def _epsilon(node: ast.expr, m: Source) -> Iterator[Proposal]:
    """An epsilon is scaled where it is used."""
    if isinstance(node, (ast.Name, ast.Attribute)) and re.search(r"(\b|_)eps$", m.text(node), re.IGNORECASE):
        for factor in ("0.0", "10", "1e3", "1e5"):
            yield f"({factor} * {m.text(node)})"


@_operator("literal")
def _literal(node: ast.expr, m: Source) -> Iterator[Proposal]:
    """A number in a tensor expression is another one."""
    value = _number(node)
    if value is None:
        return
    if isinstance(m.parents[node], ast.BinOp) and any(map(m.tensor, m.above(node))):
        yield repr(value * 1.001 if value else 0.001)
        yield repr(value * 2 if value else 1)
    elif isinstance(value, float):
        yield repr(value + 0.001)


@_operator("sum order")
def _sum_order(node: ast.expr, m: Source) -> Iterator[Proposal]:
    """A sum or mean runs backwards."""
    if isinstance(node, ast.Call) and (owner := _method(node, "sum", "mean")) is not None and m.tensor(owner):
        dims = [*node.args, *(k.value for k in node.keywords if k.arg == "dim")]
        yield f"{m.atom(owner)}.flip({m.text(dims[0]) if dims else 0}).{_name(node)}({_arguments(node, m)})"


@_operator("sum blocks")
def _sum_blocks(node: ast.expr, m: Source) -> Iterator[Proposal]:
    """A sum is made of partial sums."""
    if isinstance(node, ast.Call) and (owner := _method(node, "sum")) is not None and m.tensor(owner):
        if not node.args and not node.keywords:
            for size in (2, 3, 5, 8):
                yield f"torch.stack([block.sum() for block in {m.atom(owner)}.flatten().split({size})]).sum()"
            yield f"{m.atom(owner)}.flatten().cumsum(0)[-1]"
        else:
            yield f"{m.atom(owner)}.cumsum(dim=-1)[..., -1]"


@_operator("mean")
def _mean(node: ast.expr, m: Source) -> Iterator[Proposal]:
    """A sum becomes a mean, or a mean a sum."""
    for one, other in (("sum", "mean"), ("mean", "sum")):
        if isinstance(node, ast.Call) and (owner := _method(node, one)) is not None and m.tensor(owner):
            yield f"{m.atom(owner)}.{other}({_arguments(node, m)})"


@_operator("fused")
def _fused(node: ast.expr, m: Source) -> Iterator[Proposal]:
    """A fused function is written out, or a plain one computed another way."""
    if not isinstance(node, ast.Call):
        return
    owner = _method(node, "exp", "sqrt", "square", "pow", "cos", "sin", "abs")
    if owner is not None and m.tensor(owner) and isinstance(node.func, ast.Attribute):
        name, a = node.func.attr, m.atom(owner)
    elif isinstance(node.func, ast.Attribute) and _torch(node, node.func.attr) and node.args:
        name, a = node.func.attr, m.atom(node.args[0])
    else:
        return
    plain = {
        "exp": [f"torch.exp2({a} * 1.4426950408889634)", f"(torch.expm1({a}) + 1.0)", f"({a} / 2).exp().square()"],
        "expm1": [f"(torch.exp({a}) - 1)"],
        "silu": [f"({a} * torch.sigmoid({a}))", f"({a} / (1.0 + torch.exp(-{a})))"],
        "rsqrt": [f"(1.0 / torch.sqrt({a}))", f"({a} ** -0.5)"],
        "sqrt": [f"({a} * torch.rsqrt({a}))", f"(0.5 * torch.log({a})).exp()"],
        "square": [f"({a} ** 2)", f"({a}.abs() ** 2.0000001)"],
        "pow": [f"({a} * {a})", f"{a}.abs().log().mul(2).exp()"],
        "cos": [f"torch.sin({a} + 1.5707963267948966)"],
        "sin": [f"torch.cos({a} - 1.5707963267948966)"],
        "log_softmax": [f"({a} - torch.logsumexp({a}, dim=-1, keepdim=True))", f"torch.softmax({a}, dim=-1).log()"],
        "softmax": [f"torch.log_softmax({a}, dim=-1).exp()", f"({a}.exp() / {a}.exp().sum(dim=-1, keepdim=True))"],
    }
    yield from plain.get(name, [])


@_operator("reciprocal")
def _reciprocal(node: ast.expr, m: Source) -> Iterator[Proposal]:
    """A division becomes a product with the reciprocal."""
    if _binary(node, ast.Div) and m.tensor(node) and isinstance(node, ast.BinOp):
        yield f"({m.atom(node.left)} * (1.0 / {m.atom(node.right)}))"


@_operator("association")
def _association(node: ast.expr, m: Source) -> Iterator[Proposal]:
    """The parentheses of a product or sum of three move."""
    if not isinstance(node, ast.BinOp) or not m.tensor(node):
        return
    left, right = node.left, node.right
    if isinstance(left, ast.BinOp) and isinstance(node.op, ast.Mult) and isinstance(left.op, (ast.Mult, ast.MatMult)):
        sign = "*" if isinstance(left.op, ast.Mult) else "@"
        yield f"(({m.atom(left.left)} * {m.atom(right)}) {sign} {m.atom(left.right)})"
        yield f"({m.atom(left.left)} {sign} ({m.atom(left.right)} * {m.atom(right)}))"
    if isinstance(left, ast.BinOp) and isinstance(node.op, ast.Add) and isinstance(left.op, ast.Add):
        yield f"({m.atom(left.left)} + ({m.atom(left.right)} + {m.atom(right)}))"
    if isinstance(right, ast.BinOp) and isinstance(node.op, ast.Mult) and isinstance(right.op, ast.Div):
        yield f"({m.atom(left)} * {m.atom(right.left)} / {m.atom(right.right)})"


@_operator("clip bound")
def _clip_bound(node: ast.expr, m: Source) -> Iterator[Proposal]:
    """One bound of a clip moves."""
    if isinstance(node, ast.Call) and _method(node, "clamp", "clip") is not None:
        bounds = [*node.args, *(k.value for k in node.keywords)]
        for bound in bounds:
            for factor in ("0.99", "1.01", "0.5"):
                yield [(bound, f"{factor} * {m.atom(bound)}")]
        if len(bounds) > 1:
            yield [(bounds[0], m.text(bounds[1]))]


@_operator("clip dropped")
def _clip_dropped(node: ast.expr, m: Source) -> Iterator[Proposal]:
    """A clip is missing."""
    if (owner := _method(node, "clamp", "clip")) is not None:
        yield m.atom(owner)


@_operator("clip order")
def _clip_order(node: ast.expr, m: Source) -> Iterator[Proposal]:
    """What was clipped before a product is clipped after it."""
    if _binary(node, ast.Mult, ast.Add, ast.Sub) and isinstance(node, ast.BinOp):
        sign = {ast.Mult: "*", ast.Add: "+", ast.Sub: "-"}[type(node.op)]
        left, right = _method(node.left, "clamp"), _method(node.right, "clamp")
        if right is not None and isinstance(node.right, ast.Call):
            yield f"({m.text(node.left)} {sign} {m.atom(right)}).clamp({_arguments(node.right, m)})"
        if left is not None and isinstance(node.left, ast.Call):
            yield f"({m.atom(left)} {sign} {m.atom(node.right)}).clamp({_arguments(node.left, m)})"


@_operator("min max")
def _min_max(node: ast.expr, m: Source) -> Iterator[Proposal]:
    """The smaller instead of the larger, or the other way."""
    others = {"maximum": "minimum", "minimum": "maximum", "max": "min", "min": "max"}
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in others:
        yield f"{m.text(node.func.value)}.{others[node.func.attr]}({_arguments(node, m)})"


@_operator("boundary")
def _boundary(node: ast.expr, m: Source) -> Iterator[Proposal]:
    """A comparison is off by one, or takes the boundary to the other side."""
    others = {ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "=="}
    if isinstance(node, ast.Compare) and m.tensor(node):
        yield f"({m.text(node.left)} {others[type(node.ops[0])]} {m.text(node.comparators[0])})"
        for shift in ("+ 1", "- 1", "+ 2"):
            yield [(node.comparators[0], f"({m.text(node.comparators[0])} {shift})")]


@_operator("mask")
def _mask(node: ast.expr, m: Source) -> Iterator[Proposal]:
    """A mask is missing or the wrong way round."""
    if isinstance(node, ast.Call) and _torch(node, "where") and len(node.args) == 3:
        keep, yes, no = node.args
        yield m.atom(yes)
        yield f"torch.where(~{m.atom(keep)}, {m.text(yes)}, {m.text(no)})"
    if (owner := _method(node, "masked_fill")) is not None:
        yield m.atom(owner)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitAnd):
        yield m.atom(node.left)
        yield m.atom(node.right)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Invert):
        yield m.atom(node.operand)
    if _torch(node, "nonzero") and isinstance(node, ast.Call):
        yield f"torch.nonzero(torch.ones_like({m.text(node.args[0])}))"


@_operator("position")
def _position(node: ast.expr, m: Source) -> Iterator[Proposal]:
    """Positions, ranges and exponents start one too early or too late."""
    if isinstance(node, ast.Call) and _torch(node, "arange"):
        bounds = node.args[:2] if len(node.args) > 1 else node.args
        for change in ("+ 1", "- 1"):
            if len(bounds) == 2:
                yield [(bound, f"{m.text(bound)} {change}") for bound in bounds]
            else:
                yield f"({m.text(node)} {change})"
    if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Add, ast.Sub)) and m.tensor(node.left):
        shift = _number(node.right)
        if isinstance(shift, int):
            yield m.atom(node.left)
            yield [(node.right, str(shift + 1))]
    if isinstance(node, ast.Name) and node.id in ("positions", "order", "predictions", "targets") and m.tensor(node):
        yield f"({node.id} + 1)"
        yield f"({node.id} * 2)"


@_operator("argument")
def _argument(node: ast.expr, m: Source) -> Iterator[Proposal]:
    """A number that is handed over by the configuration arrives as another one."""
    if isinstance(node, (ast.Attribute, ast.Subscript)) and re.match(r"(self\.)?(c|config)\.", m.text(node)):
        above = list(m.above(node))
        call = next((o for o in above if isinstance(o, ast.Call)), None)
        statement = next(o for o in above if isinstance(o, ast.stmt))
        # Not to a function that returns plain numbers: what those move lies elsewhere.
        works = any(map(m.tensor, above)) or isinstance(statement, ast.Expr) or (call and any(map(m.tensor, call.args)))
        if works and isinstance(above[0], (ast.keyword, ast.Call, ast.BinOp)):
            for factor in ("1.001", "0.5", "0.0"):
                yield f"({factor} * {m.text(node)})"


@_operator("betas")
def _betas(node: ast.expr, m: Source) -> Iterator[Proposal]:
    """The other one of a pair of settings."""
    if isinstance(node, ast.Subscript) and isinstance(m.parents[node], ast.keyword):
        place = _number(node.slice)
        if place is not None and place in (0, 1):
            yield [(node.slice, str(1 - place))]


@_operator("decay")
def _decay(node: ast.expr, m: Source) -> Iterator[Proposal]:
    """Weight decay enters through the gradient, or twice."""
    if isinstance(node, ast.Call) and len(node.args) > 1:
        for keyword in node.keywords:
            if keyword.arg == "weight_decay":
                weights, grads, decay = m.text(node.args[0]), m.text(node.args[1]), m.text(keyword.value)
                coupled = f"list(torch._foreach_add({grads}, {weights}, alpha={decay}))"
                yield [(node.args[1], coupled), (keyword.value, "0.0")]
                yield [(node.args[1], coupled)]


@_operator("state")
def _state(node: ast.expr, m: Source) -> Iterator[Proposal]:
    """A tensor that should start at zero starts elsewhere, or one at one."""
    if isinstance(node, ast.Call) and _torch(node, "zeros", "zeros_like", "ones_like"):
        for start in ("+ 1", "+ 1e-3") if "zeros" in m.text(node.func) else ("* 1.001", "* 2"):
            yield f"({m.text(node)} {start})"


@_operator("bessel")
def _bessel(node: ast.expr, m: Source) -> Iterator[Proposal]:
    """A count is one more or one fewer."""
    if isinstance(node, ast.Call) and m.text(node.func) == "len" and any(map(m.tensor, m.above(node))):
        owner = m.parents[node]
        if isinstance(owner, ast.BinOp) and isinstance(owner.op, ast.Sub):
            yield [(owner, m.text(node))]
        elif isinstance(owner, ast.BinOp):
            yield f"({m.text(node)} - 1)"
            yield f"({m.text(node)} + 1)"


@_operator("term")
def _term(node: ast.expr, m: Source) -> Iterator[Proposal]:
    """A term is missing from a sum or difference."""
    if _binary(node, ast.Add, ast.Sub) and isinstance(node, ast.BinOp) and m.tensor(node):
        yield m.atom(node.left)
        if isinstance(node.op, ast.Add):
            yield m.atom(node.right)


@_operator("factor")
def _factor(node: ast.expr, m: Source) -> Iterator[Proposal]:
    """A factor or divisor is missing."""
    if _binary(node, ast.Mult, ast.Div) and isinstance(node, ast.BinOp) and m.tensor(node):
        yield m.atom(node.left)
        if isinstance(node.op, ast.Mult):
            yield m.atom(node.right)


@_operator("sign")
def _sign(node: ast.expr, m: Source) -> Iterator[Proposal]:
    """A sign is lost, or the sides of a difference are exchanged."""
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub) and m.tensor(node):
        yield m.atom(node.operand)
    if _binary(node, ast.Sub) and isinstance(node, ast.BinOp) and m.tensor(node):
        yield f"({m.text(node.right)} - {m.atom(node.left)})"
    if _binary(node, ast.Add) and isinstance(node, ast.BinOp) and m.tensor(node):
        yield f"({m.text(node.left)} - {m.atom(node.right)})"


@_operator("swap")
def _swap(node: ast.expr, m: Source) -> Iterator[Proposal]:
    """Two arguments of a call are exchanged."""
    if isinstance(node, ast.Call) and not _torch(node, "maximum", "minimum"):
        places = [a for a in node.args if m.tensor(a)]
        for one, other in pairwise(places):
            yield [(one, m.text(other)), (other, m.text(one))]


@_operator("skip")
def _skip(node: ast.expr, m: Source) -> Iterator[Proposal]:
    """A function is not called: what goes in comes out."""
    if not isinstance(node, ast.Call) or m.text(node.func).startswith(("torch.", "F.")):
        return
    if node.args and m.tensor(node) and m.tensor(node.args[0]):
        yield m.atom(node.args[0])


@_operator("generator")
def _generator(node: ast.expr, m: Source) -> Iterator[Proposal]:
    """Another seed, another stream, or one draw more."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        draws = [m.text(k.value) for k in node.keywords if k.arg == "generator"]
        if draws and node.func.attr.endswith("_"):
            yield f"{m.text(node)}.{node.func.attr}({_arguments(node, m)})"
            for keyword in node.keywords:
                if keyword.arg == "generator":
                    yield [(keyword.value, "torch.Generator().manual_seed(1)")]
            yield f"{m.text(node)}.mul_(torch.empty(1).uniform_(0.5, 1.5, generator={draws[0]}))"
    if isinstance(node, ast.Call) and _name(node) != "manual_seed":  # which is no operation on a tensor
        for argument in node.args:
            if re.search(r"(\b|_)seed$", m.text(argument)):
                for change in ("+ 1", "* 2", "// 2", "^ 64"):
                    yield [(argument, f"{m.text(argument)} {change}")]


@_operator("data order")
def _data_order(node: ast.expr, m: Source) -> Iterator[Proposal]:
    """A tensor's first dimension comes in another order."""
    if m.tensor(node):
        yield f"{m.atom(node)}.flip(0)"
        yield f"{m.atom(node)}.roll(1, 0)"


@_operator("loop")
def _loop(node: ast.expr, m: Source) -> Iterator[Proposal]:
    """A comprehension that makes tensors runs backwards."""
    whole = isinstance(node, (ast.ListComp, ast.GeneratorExp, ast.DictComp))
    if whole and (any(map(m.tensor, ast.walk(node))) or any(map(m.tensor, m.above(node)))):
        assert isinstance(node, (ast.ListComp, ast.GeneratorExp, ast.DictComp))
        for generator in node.generators:
            yield [(generator.iter, f"reversed(list({m.text(generator.iter)}))")]


@_operator("gradient")
def _gradient(node: ast.expr, m: Source) -> Iterator[Proposal]:
    """Values stay, and the gradient is cut off or scaled."""
    if m.tensor(node) and not isinstance(node, ast.Compare):
        a = m.atom(node)
        yield f"{a}.detach()"
        yield f"({a} + ({a} - {a}.detach()))"
    if (owner := _method(node, "detach")) is not None:
        yield m.atom(owner)


@_operator("accumulate")
def _accumulate(node: ast.expr, m: Source) -> Iterator[Proposal]:
    """Adding in place forgets, or adds another amount."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "add_":
        into = m.text(node.func.value)
        yield f"{into}.copy_({_arguments(node, m)})"
        yield f"{into}.add_({_arguments(node, m)}, alpha=0.5)"
        yield f"{into}.mul_(0.5).add_({_arguments(node, m)}).mul_(1.999)"
        yield f"{into}.add_({_arguments(node, m)} / 3.0).add_({_arguments(node, m)} * 2.0 / 3.0)"
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "mul_":
        yield f"{m.text(node.func.value)}.div_(1.0 / {_arguments(node, m)})"
        yield f"{m.text(node.func.value)}.mul_({_arguments(node, m)}).mul_({_arguments(node, m)})"


@_operator("detour")
def _detour(node: ast.expr, m: Source) -> Iterator[Proposal]:
    """The same number up to rounding."""
    if m.tensor(node) and not isinstance(node, ast.Compare):
        yield f"({m.atom(node)} * 3.0 / 3.0)"
        yield f"({m.atom(node)} + 1.0 - 1.0)"


# Changes that no operation's stack crosses


def _header(node: ast.expr, m: Source) -> Iterator[Proposal]:
    """A loop over statements runs backwards, or a branch is taken the other way."""
    owner = m.parents[node]
    if isinstance(owner, ast.For) and node is owner.iter:
        yield f"reversed(list({m.text(node)}))"
    if isinstance(owner, ast.If) and node is owner.test:
        yield f"not ({m.text(node)})"


def _constant(node: ast.expr, _: Source) -> Iterator[Proposal]:
    """A constant of a module or a default of a class has another value."""
    value = _number(node)
    if value is not None:
        for factor in (0.5, 2, 100):
            yield repr(type(value)(value * factor))


_PLACES: dict[str, dict[str, Operator]] = {
    "body": _OPERATORS,
    "header": {"header": _header},
    "constant": {"constant": _constant},
}
DISTANT = ("header", "constant")
KINDS = (*_OPERATORS, *DISTANT)
"""The operators. Those of `DISTANT` are drawn only when asked for."""


# All changes, and draws from them


@cache
def sources() -> dict[str, Source]:
    """The trainer's files as they are now."""
    texts = {path: (PACKAGE / path).read_text() for path in FILES}
    package = Package([ast.parse(text) for text in texts.values()])
    return {path: Source(path, text, package) for path, text in texts.items()}


def _place(node: ast.expr, m: Source) -> str:
    """``body``, ``header``, ``constant`` or empty for expressions that are no place for a change."""
    child: ast.AST = node
    for owner in m.above(node):
        if isinstance(owner, (ast.Raise, ast.Assert, ast.JoinedStr, ast.arguments, ast.Slice)):
            return ""
        if isinstance(owner, (ast.FunctionDef, ast.ClassDef)) and child not in owner.body:
            return ""  # decorators, annotations, bases
        if isinstance(owner, ast.AnnAssign) and child is owner.annotation:
            return ""
        if isinstance(owner, ast.FunctionDef) and owner.name not in m.package.reached:
            return ""
        if isinstance(owner, (ast.Module, ast.ClassDef)):
            return "constant" if isinstance(child, (ast.Assign, ast.AnnAssign)) else ""
        if isinstance(owner, (ast.If, ast.For, ast.While)) and isinstance(child, ast.expr):
            return "header"
        if isinstance(owner, (ast.With, ast.ExceptHandler)) and not isinstance(child, ast.stmt):
            return ""
        if isinstance(owner, ast.FunctionDef):
            setting = isinstance(child, (ast.Assign, ast.AnnAssign)) and not any(
                isinstance(n, ast.Call) for n in ast.walk(child)
            )
            return "" if setting and owner.name == "__init__" else "body"  # a number that is read somewhere else
        child = owner
    return ""


def _changeable(node: ast.AST, m: Source) -> bool:
    """The node is an expression that is read, and by something that asks for its value."""
    owner = m.parents.get(node)
    if not isinstance(node, ast.expr) or isinstance(getattr(node, "ctx", None), (ast.Store, ast.Del)):
        return False
    if isinstance(owner, ast.Call) and node is owner.func:
        return False
    if isinstance(owner, ast.Attribute) and (owner.attr in _PLAIN or owner.attr.endswith("_")):
        return False
    return not (isinstance(owner, ast.Subscript) and isinstance(owner.ctx, ast.Store))


def _function(node: ast.AST, m: Source) -> str:
    names = [o.name for o in m.above(node) if isinstance(o, (ast.FunctionDef, ast.ClassDef))]
    return ".".join(reversed(names))


def _applied(m: Source, edits: Sequence[Edit]) -> str:
    text = m.text_
    for node, new in sorted(edits, key=lambda edit: m.span(edit[0]), reverse=True):
        start, end = m.span(node)
        text = text[:start] + new + text[end:]
    return text


@cache
def catalogue() -> tuple[Mutation, ...]:
    """Every change that the operators find in the trainer, each once, in the order of files, places and operators."""
    found: dict[tuple[str, str], Mutation] = {}
    for path, m in sources().items():
        for node in ast.walk(m.tree):
            if not _changeable(node, m) or not isinstance(node, ast.expr):
                continue
            place = _place(node, m)
            for kind, operator in _PLACES.get(place, {}).items():
                for proposal in operator(node, m):
                    after = _applied(m, [(node, proposal)] if isinstance(proposal, str) else proposal)
                    if after != m.text_:
                        found.setdefault((path, after), Mutation(kind, path, _function(node, m), m.text_, after))
    return tuple(found.values())


def _order(seed: int, kinds: Sequence[str] | None) -> list[Mutation]:
    """All changes of some kinds as a seed orders them: one of each kind in turn, functions in turn within a kind."""
    rng = random.Random(seed)
    wanted = [kind for kind in KINDS if kind not in DISTANT] if kinds is None else list(kinds)
    queues: list[list[Mutation]] = []
    for kind in wanted:
        by_function: dict[tuple[str, str], list[Mutation]] = {}
        for mutation in catalogue():
            if mutation.kind == kind:
                by_function.setdefault((mutation.path, mutation.function), []).append(mutation)
        for group in by_function.values():
            rng.shuffle(group)
        groups = list(by_function.values())
        rng.shuffle(groups)
        queues.append(_in_turn(groups))
    rng.shuffle(queues)
    return _in_turn(queues)


def _in_turn(queues: Sequence[Sequence[Mutation]]) -> list[Mutation]:
    longest = max(map(len, queues), default=0)
    return [queue[i] for i in range(longest) for queue in queues if i < len(queue)]


def mutations(seed: int, count: int, *, kinds: Sequence[str] | None = None) -> list[Mutation]:
    """Distinct changes drawn by a seed, spread over kinds and functions. Not all of them move a number.

    Args:
        seed: of `random.Random`.
        count: at most as many as exist.
        kinds: some of `KINDS`; all but `DISTANT` by default.
    """
    return _order(seed, kinds)[:count]


_KNOWN: dict[tuple[str, str], Verdict] = {}


def verdicts(candidates: Sequence[Mutation]) -> list[Verdict]:
    """What each change does to the run of `CONFIG`; one child process trains all that are not known yet."""
    new = list(dict.fromkeys((m.path, m.after) for m in candidates if (m.path, m.after) not in _KNOWN))
    if new:
        environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
        environment |= {"PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        done = subprocess.run(
            [sys.executable, "-P", "-W", "ignore", __file__], input=json.dumps(new), env=environment,
            stdout=subprocess.PIPE, text=True, check=True, timeout=60 + TIMEOUT * len(new),
        )  # fmt: skip
        _KNOWN.update(zip(new, json.loads(done.stdout.splitlines()[-1]), strict=True))
    return [_KNOWN[m.path, m.after] for m in candidates]


def moves(mutation: Mutation) -> bool:
    """The trainer trains to the end under the change, with numbers in every signal, and some signal's bits differ."""
    return verdicts([mutation]) == ["moved"]


def effective(seed: int, count: int, *, kinds: Sequence[str] | None = None) -> list[Mutation]:
    """The first `count` changes in the order of `mutations` that move a number."""
    out: list[Mutation] = []
    order = _order(seed, kinds)
    while order and len(out) < count:
        size = 2 * (count - len(out))
        batch, order = order[:size], order[size:]
        out += [m for m, verdict in zip(batch, verdicts(batch), strict=True) if verdict == "moved"]
    return out[:count]


# The run that judges


def rollouts() -> list[Any]:
    """The rollouts of the run: sampled by the trainer as it is, then made harder.

    Rewards differ within groups and are equal in one, responses are of several lengths, some tokens and one whole
    sample are masked, and the engine's log-probs lie off the trainer's: masks, padding, baselines and truncated
    importance sampling have something to do.
    """
    import torch

    from repro_core import Rollout
    from repro_core.config import TrainConfig
    from repro_core.trainer import Trainer

    trainer = Trainer(TrainConfig.from_mapping(CONFIG), log=lambda _: None)
    out = []
    for rollout_id in range(ROLLOUTS):
        drawn, rng = trainer.sample(rollout_id), random.Random(rollout_id)
        t = dict(drawn.tensors)
        totals, lengths = t["total_lengths"].tolist(), t["response_lengths"].tolist()
        equal = CONFIG["n_samples_per_prompt"]  # the samples of the first prompt
        cuts = [rng.randrange(n) for n in lengths]
        noise = torch.tensor([rng.gauss(0, 0.03) for _ in range(sum(lengths))])
        t["tokens"] = _cut(t["tokens"], totals, cuts)
        t["rollout_log_probs"] = _cut(t["rollout_log_probs"] + noise, lengths, cuts)
        t["total_lengths"] = torch.tensor([n - cut for n, cut in zip(totals, cuts, strict=True)])
        t["response_lengths"] = torch.tensor([n - cut for n, cut in zip(lengths, cuts, strict=True)])
        masked = [i == len(lengths) - 2 for i, n in enumerate(t["response_lengths"].tolist()) for _ in range(n)]
        t["loss_mask"] = torch.tensor([int(not none and rng.random() < 0.8) for none in masked])
        t["rewards"] = torch.tensor([1.0 if i < equal else rng.randrange(8) / 3 for i in range(len(lengths))])
        cut_short = ["truncated" if cut else status for cut, status in zip(cuts, drawn.meta["statuses"], strict=True)]
        out.append(Rollout({**drawn.meta, "statuses": cut_short}, t))
    return out


def _cut(packed: Any, lengths: Sequence[int], cuts: Sequence[int]) -> Any:
    """Each sample of a packed column without its last few tokens."""
    parts = zip(packed.split(list(lengths)), cuts, strict=True)
    return packed.new_tensor([value for part, cut in parts for value in part[: len(part) - cut].tolist()])


class _Trainers(importlib.abc.MetaPathFinder, importlib.abc.InspectLoader):
    """The trainer's package from memory, with one file replaced."""

    def __init__(self) -> None:
        self.replaced: dict[str, str] = {}
        self._codes: dict[str, CodeType] = {}

    def find_spec(self, fullname: str, path: object, target: object = None) -> importlib.machinery.ModuleSpec | None:  # noqa: ARG002
        """Only the trainer's package is found here."""
        if fullname != "repro_core" and not fullname.startswith("repro_core."):
            return None
        return importlib.util.spec_from_loader(fullname, self, is_package=fullname == "repro_core")

    def _file(self, fullname: str) -> str:
        return f"{fullname.partition('.')[2] or '__init__'}.py"

    def get_source(self, fullname: str) -> str:
        """The file's text, or what replaces it."""
        file = self._file(fullname)
        return self.replaced.get(file) or (PACKAGE / file).read_text()

    def get_code(self, fullname: str) -> CodeType:
        """Compiled once for each file that is not replaced."""
        file = self._file(fullname)
        if file in self.replaced:
            return self.source_to_code(self.replaced[file], file)
        if file not in self._codes:
            self._codes[file] = self.source_to_code(self.get_source(fullname), file)
        return self._codes[file]

    def train(self, replaced: dict[str, str], recorded: Sequence[Any]) -> tuple[list[Any], bool]:
        """Step, phase, name and bits of every signal, and whether each holds a finite number."""
        self.replaced = replaced
        for name in [name for name in sys.modules if name.partition(".")[0] == "repro_core"]:
            del sys.modules[name]
        config: ModuleType = importlib.import_module("repro_core.config")
        trainer_module: ModuleType = importlib.import_module("repro_core.trainer")
        trainer = trainer_module.Trainer(config.TrainConfig.from_mapping(CONFIG), log=lambda _: None)
        seen = _Seen()
        for rollout in recorded:
            for _ in trainer.train(rollout, seen):
                seen.step += 1
        return sorted(seen.bits), seen.finite


class _Seen:
    def __init__(self) -> None:
        self.bits: list[tuple[int, str, str, str, bytes]] = []
        self.step = 0
        self.finite = True

    def __call__(self, phase: str, name: str, value: Any) -> None:
        import torch

        if isinstance(value, dict):
            for key, tensor in value.items():
                self(phase, name + key, tensor)
            return
        tensor = (torch.tensor(value, dtype=torch.float64) if isinstance(value, float) else value).detach()
        self.finite &= bool(torch.isfinite(tensor).any()) or not tensor.numel()
        raw = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        self.bits.append((self.step, phase, name, f"{tensor.dtype} {list(tensor.shape)}", raw))


def _expired(*_: object) -> None:
    raise TimeoutError(f"no end after {TIMEOUT} seconds")


def main() -> None:
    """Read ``[[path, source], ...]`` and write one verdict for each."""
    trainers = _Trainers()
    sys.meta_path.insert(0, trainers)
    signal.signal(signal.SIGALRM, _expired)
    recorded = rollouts()
    baseline, _ = trainers.train({}, recorded)
    assert trainers.train({}, recorded)[0] == baseline, "the trainer does not repeat itself"
    out: list[Verdict] = []
    for path, after in json.load(sys.stdin):
        signal.alarm(TIMEOUT)
        try:
            bits, finite = trainers.train({path: after}, recorded)
            out.append("still" if bits == baseline else "moved" if finite else "nan")
        except Exception as error:  # noqa: BLE001 - whatever a changed trainer raises
            out.append(f"failed: {type(error).__name__}: {error}".splitlines()[0][:200])
        finally:
            signal.alarm(0)
    print(json.dumps(out))


if __name__ == "__main__":
    main()
