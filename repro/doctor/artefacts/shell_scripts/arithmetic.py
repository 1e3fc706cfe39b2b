"""Arithmetic of a shell script: whole numbers, as bash counts, and the variables that an expression writes."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable

from repro.doctor.artefacts.shell_scripts.values import Part, Scope, Word, known, scalar

__all__ = ["count", "evaluate", "forget_written", "number"]

_LONGEST = 500
_LARGEST = 1 << 62
_NAME = r"[A-Za-z_]\w*"
_SUBSCRIPT = r"(?:\[[^\]]*\])?"
_OPERATION = r"(?:[-+*/%&|^]|<<|>>)?"
_WRITTEN = re.compile(
    rf"(?P<set>\$?\{{?\w+\}}?){_SUBSCRIPT}\s*{_OPERATION}=(?!=)|(?:\+\+|--)\s*(?P<before>\$?\{{?\w+)"
    rf"|(?P<after>\$?\{{?\w+\}}?){_SUBSCRIPT}\s*(?:\+\+|--)"
)
"""What an expression writes; it may hold more that looks like it, which is then forgotten for nothing."""
_ASSIGNMENT = re.compile(rf"\s*({_NAME})\s*([-+*/%]?)=(?!=)(.*)", re.S)
_STEP = re.compile(rf"\s*(?:({_NAME})\s*(\+\+|--)|(\+\+|--)\s*({_NAME}))\s*")


def evaluate(source: str, value: Callable[[str], str | None]) -> int | None:
    """An arithmetic expression of bash.

    Args:
        source: What stands between ``$((`` and ``))``.
        value: A variable's value, by its name or number; None where it is not known.

    Returns:
        Its value; None where it is not known, beyond what is read here, or where it writes variables.
    """

    def held(match: re.Match[str]) -> str:
        text = value(match[1] or match[2])
        return text if text is not None and re.fullmatch(r"-?(0|[1-9]\d{0,18})", text) else "x"

    if len(source) > _LONGEST or _WRITTEN.search(source):
        return None
    source = re.sub(r"\$(?:\{(\w+)\}|(\d|[A-Za-z_]\w*))", held, source)
    source = re.sub(rf"({_NAME})()", held, source).strip()
    # a zero in front makes a number octal; `!` binds more tightly than Python's `not`
    if len(source) > _LONGEST or not re.fullmatch(r"[\d+\-*/%()<>=!&| \t\n]+", source) or re.search(r"\b0\d", source):
        return None
    if re.search(r"!(?!=)", source) and re.search(r"[<>=+*/%-]", source):
        return None
    source = source.replace("&&", " and ").replace("||", " or ")
    source = re.sub(r"!(?!=)", " not ", source)
    try:
        return _number(ast.parse(source, mode="eval").body)
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
        return None


_COMPARE: dict[type, Callable[[int, int], bool]] = {
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
}


def _number(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and type(node.value) is int and node.value <= _LARGEST:
        return node.value
    if isinstance(node, ast.UnaryOp):
        value = _number(node.operand)
        if isinstance(node.op, ast.Not):
            return int(not value)
        return -value if isinstance(node.op, ast.USub) else value
    if isinstance(node, ast.BinOp):
        return _counted(node.op, _number(node.left), _number(node.right))
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        return int(_COMPARE[type(node.ops[0])](_number(node.left), _number(node.comparators[0])))
    if isinstance(node, ast.BoolOp):
        values = [bool(_number(value)) for value in node.values]
        return int(all(values) if isinstance(node.op, ast.And) else any(values))
    raise ValueError


def _counted(operation: ast.operator, left: int, right: int) -> int:
    if isinstance(operation, ast.Add):
        result = left + right
    elif isinstance(operation, ast.Sub):
        result = left - right
    elif isinstance(operation, ast.Mult):
        result = left * right
    else:
        sign = -1 if (left < 0) != (right < 0) else 1
        quotient = sign * (abs(left) // abs(right))  # bash rounds towards zero
        results: dict[type, int] = {ast.Div: quotient, ast.Mod: left - quotient * right}
        if type(operation) not in results:
            raise ValueError
        result = results[type(operation)]
    if max(abs(left), abs(right), abs(result)) > _LARGEST:
        raise ValueError
    return result


def number(source: str, scope: Scope) -> int | None:
    """An arithmetic expression of bash; None where it is not known, or writes variables."""

    def text(name: str) -> str | None:
        word = scalar(name, scope)
        return word.text if word and known(word.value) else None

    return evaluate(source, text)


def forget_written(source: str, scope: Scope) -> bool:
    """Forget the variables that an expression writes; whether there are any."""
    names = [match["set"] or match["before"] or match["after"] for match in _WRITTEN.finditer(source[: _LONGEST * 20])]
    for name in names:
        if "$" in name:
            scope.forget_all()
        elif not name.isdigit():
            scope.forget(name)
    return bool(names)


def count(source: str, scope: Scope, where: Word) -> None:
    """Do what ``((...))`` and ``let`` do: one assignment is read, of anything else what it writes is forgotten."""
    name, result = "", None
    if assignment := _ASSIGNMENT.fullmatch(source):
        name, operation, right = assignment.groups()
        result = number(f"{name} {operation} ({right})" if operation else right, scope)
    elif step := _STEP.fullmatch(source):
        name = step[1] or step[4]
        result = number(f"{name} {(step[2] or step[3])[0]} 1", scope)
    if result is None or name in scope.arrays or scope.attributes.get(name):
        forget_written(source, scope)
    else:
        scope.put(name, where._replace(value=(Part(str(result)),)))
