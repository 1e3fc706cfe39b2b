"""Python launchers (Miles' scripts, tests of slime and Miles), read without running them.

They build a string of flags and hand it to ``execute_train``. Constants, f-strings and what is added in branches are
followed; a value that only running knows becomes ``$its_name``.
"""

from __future__ import annotations

import ast
import contextlib
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from repro.doctor.artefacts.kinds import Variable
from repro_golden.base.checks import Where

__all__ = ["Started", "started"]

_LONGEST = 1 << 20
_DEPTH = 6
_STEPS = 20_000
_CALL = "execute_train"


class _Piece(NamedTuple):
    """Some text of a string and the line that it stands in."""

    text: str
    line: int


_Text = tuple[_Piece, ...]
_Names = dict[str, "_Text | dict[str, _Text]"]


class Started(NamedTuple):
    """What a launcher hands to ``execute_train``.

    Attributes:
        argv: The command, each word with its place.
        env: Variables for the Ray job.
        gpus: GPUs of each node that it starts Ray with; '' where it is not said.
        line: Where the call stands.
        doubted: Whether what it gets may be otherwise, since nobody knows which branches are taken.
    """

    argv: list[tuple[str, Where]]
    env: dict[str, Variable]
    gpus: str
    line: int
    doubted: bool


def started(text: str, path: Path, *, taken: bool = True, line: int | None = None) -> Started | None:
    """The call of ``execute_train`` that gets the most flags.

    Args:
        text: The launcher.
        path: For the places of flags.
        taken: Whether what one branch alone sets is taken.
        line: Of the call that is meant; None for any.

    Returns:
        None where it is no Python, or calls it with nothing that can be read.
    """
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    walk = _Walk(tree, taken=taken)
    with contextlib.suppress(RecursionError, OverflowError):  # then: what was found until there
        walk.all()
    best: Started | None = None
    for call in (call for call in walk.calls if line in (None, call.line)):
        placed = [(word, Where(str(path), line, word)) for word, line in _split(call.flags)]
        if any(word.startswith("--") for word, _ in placed) and (best is None or len(placed) >= len(best.argv)):
            script = "".join(piece.text for piece in call.script) or "train.py"
            front = [("python3", Where(str(path), call.line)), (script, Where(str(path), call.line))]
            env = {
                name: Variable(_plain(value), "runtime-env", Where(str(path), _line(value), name, _plain(value)[:200]))
                for name, value in call.env.items()
            }
            best = Started(front + placed, env, call.gpus, call.line, walk.doubted)
    return best


class _Call(NamedTuple):
    line: int
    flags: _Text
    script: _Text
    env: dict[str, _Text]
    gpus: str


class _Walk:
    """One walk over a launcher's statements."""

    def __init__(self, tree: ast.Module, *, taken: bool) -> None:
        self.calls: list[_Call] = []
        self.doubted = False
        self._taken = taken
        self._tree = tree
        self._functions = {node.name: node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
        self._depth = 0
        self._steps = 0
        self._returned: _Text | None = None

    def all(self) -> None:
        """Module, then each function by itself: who calls whom matters little."""
        names: _Names = {}
        top = [node for node in self._tree.body if not isinstance(node, ast.FunctionDef | ast.ClassDef | ast.If)]
        self._block(top, names)
        for function in self._functions.values():
            if _CALL in ast.dump(function):
                self._block(function.body, dict(names))
        self._block([statement for statement in self._tree.body if isinstance(statement, ast.If)], dict(names))

    # -- statements

    def _block(self, body: Sequence[ast.stmt], names: _Names) -> bool:
        """Statements in order; whether they end (return, raise)."""
        return any(self._statement(statement, names) for statement in body)

    def _statement(self, node: ast.stmt, names: _Names) -> bool:
        self._steps += 1
        if self._steps > _STEPS:
            raise OverflowError
        match node:
            case (
                ast.Assign(targets=[ast.Name(id=name)], value=value)
                | ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value)
            ):
                self._set(name, self._value(value, names), names)
            case ast.AugAssign(target=ast.Name(id=name), op=ast.Add(), value=value):
                more, had = self._value(value, names), names.get(name)
                if isinstance(had, tuple) and isinstance(more, tuple) and _size(had) + _size(more) < _LONGEST:
                    names[name] = had + more
            case ast.AugAssign(target=ast.Name(id=name), op=ast.BitOr(), value=value):
                more, had = self._value(value, names), names.get(name)
                if isinstance(had, dict) and isinstance(more, dict):
                    names[name] = had | more
            case ast.Assign(targets=[ast.Subscript(value=ast.Name(id=name), slice=ast.Constant(value=str(key)))]):
                had, more = names.get(name), self._value(node.value, names)
                if isinstance(had, dict) and isinstance(more, tuple):
                    names[name] = had | {key: more}
            case ast.Expr(value=value):
                self._value(value, names)
            case ast.Return(value=value):
                result = self._value(value, names) if value else None
                self._returned = result if isinstance(result, tuple) else None
                return True
            case ast.Raise() | ast.Continue() | ast.Break():
                return True
            case ast.If() | ast.Match():
                return self._branches(node, names)
            case ast.For(body=body) | ast.While(body=body) | ast.With(body=body) | ast.Try(body=body):
                self._block(body, names)
        return False

    def _branches(self, node: ast.If | ast.Match, names: _Names) -> bool:
        """Each by itself, from what was before; the last one that changed a name is taken.

        In the other reading, not where one alone changed it and may be passed by.
        """
        bodies = [node.body, node.orelse] if isinstance(node, ast.If) else [case.body for case in node.cases]
        changed: _Names = {}
        counts: Counter[str] = Counter()
        returns = []
        for body in bodies:
            inner = dict(names)
            returns.append(bool(body) and self._block(body, inner))
            if not returns[-1]:
                other = {name: value for name, value in inner.items() if names.get(name) is not value}
                counts.update(other.keys())
                changed |= other
        doubted = {name for name in changed if counts[name] == 1} if returns.count(False) > 1 else set()
        self.doubted = self.doubted or bool(doubted)
        names |= {name: value for name, value in changed.items() if self._taken or name not in doubted}
        return all(returns)

    def _set(self, name: str, value: _Text | dict[str, _Text] | None, names: _Names) -> None:
        if value is None:
            names.pop(name, None)
        else:
            names[name] = value

    # -- expressions

    def _value(self, node: ast.expr, names: _Names) -> _Text | dict[str, _Text] | None:
        """A string with its lines, a mapping of them, or None."""
        match node:
            case ast.Constant(value=str(text)):
                return tuple(_Piece(part, node.lineno + n) for n, part in enumerate(text.splitlines(keepends=True)))
            case ast.Constant(value=bool() | int() | float() as number):
                return (_Piece(str(number), node.lineno),)
            case ast.Name(id=name):
                return names.get(name)
            case ast.JoinedStr(values=values):
                return self._joined(values, names)
            case ast.BinOp(left=left, op=ast.Add(), right=right):
                a, b = self._value(left, names), self._value(right, names)
                if isinstance(a, tuple) and isinstance(b, tuple) and _size(a) + _size(b) < _LONGEST:
                    return a + b
                return a if isinstance(a, tuple) and _size(a) > 1 else b if isinstance(b, tuple) else None
            case ast.Dict(keys=keys, values=values):
                return self._mapping(keys, values, names)
            case ast.Call():
                return self._call(node, names)
        return None

    def _mapping(self, keys: Sequence[ast.expr | None], values: Sequence[ast.expr], names: _Names) -> dict[str, _Text]:
        mapping: dict[str, _Text] = {}
        for key, node in zip(keys, values, strict=True):
            value = self._value(node, names)
            if key is None and isinstance(value, dict):
                mapping |= value
            elif isinstance(key, ast.Constant) and isinstance(key.value, str):
                mapping[key.value] = value if isinstance(value, tuple) else (_Piece(_hole(node), node.lineno),)
        return mapping

    def _joined(self, values: Sequence[ast.expr], names: _Names) -> _Text:
        pieces: list[_Piece] = []
        for node in values:
            inner = node.value if isinstance(node, ast.FormattedValue) else node
            value = self._value(inner, names)
            if isinstance(value, tuple):
                pieces += value
            elif not (isinstance(inner, ast.IfExp) and _optional(inner)):
                pieces.append(_Piece(_hole(inner), inner.lineno))
            if sum(len(piece.text) for piece in pieces) > _LONGEST:
                raise OverflowError
        return tuple(pieces)

    def _call(self, node: ast.Call, names: _Names) -> _Text | None:
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        if name == _CALL:
            arguments = {keyword.arg: keyword.value for keyword in node.keywords if keyword.arg}
            if node.args:
                arguments.setdefault("train_args", node.args[0])
            held = {key: self._value(value, names) for key, value in arguments.items()}
            flags, script, env, gpus = (
                held.get(key) for key in ("train_args", "train_script", "extra_env_vars", "num_gpus_per_node")
            )
            self.calls.append(
                _Call(
                    node.lineno,
                    flags if isinstance(flags, tuple) else (),
                    script if isinstance(script, tuple) else (),
                    env if isinstance(env, dict) else {},
                    _plain(gpus) if isinstance(gpus, tuple) else "",
                )
            )
        elif isinstance(node.func, ast.Attribute) and name in ("strip", "rstrip", "lstrip") and not node.args:
            text = self._value(node.func.value, names)
            return text if isinstance(text, tuple) else None
        elif isinstance(node.func, ast.Name) and name in self._functions and self._depth < _DEPTH:
            self._depth += 1
            self._returned = None
            self._block(self._functions[name].body, dict(names))
            self._depth -= 1
            return self._returned
        return None


def _optional(node: ast.IfExp) -> bool:
    """Whether it is a flag that is there or not: nobody knows."""
    return any(isinstance(branch, ast.Constant) and branch.value == "" for branch in (node.body, node.orelse))


def _hole(node: ast.expr) -> str:
    """A value that only running knows."""
    text = re.sub(r"\W+", "_", re.sub(r"\b(args|self|config)\.", "", ast.unparse(node))).strip("_")
    return f"${text[:60] or 'value'}"


def _size(text: _Text) -> int:
    return sum(len(piece.text) for piece in text)


def _plain(text: _Text) -> str:
    return "".join(piece.text for piece in text)


def _line(text: _Text) -> int | None:
    return text[0].line if text else None


def _split(text: _Text) -> list[tuple[str, int]]:
    """Words as a shell would split them, with the line of each one's first character."""
    tokens: list[tuple[str, int]] = []
    word: list[str] | None = None
    line, quote, escaped = 0, "", False
    for char, at in ((char, piece.line) for piece in text for char in piece.text):
        if word is None and not char.isspace():
            word, line = [], at
        if escaped:
            escaped = False
            if char != "\n" and word is not None:
                word.append(char)
        elif char == "\\" and quote != "'":
            escaped = True
        elif quote:
            if char == quote:
                quote = ""
            elif word is not None:
                word.append(char)
        elif char in "'\"":
            quote = char
        elif char.isspace():
            if word is not None:
                tokens.append(("".join(word), line))
            word = None
        elif word is not None:
            word.append(char)
    return [*tokens, ("".join(word), line)] if word is not None else tokens
