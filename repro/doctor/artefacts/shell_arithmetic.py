"""Arithmetic of a shell script: whole numbers, as bash counts."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable

__all__ = ["evaluate"]


def evaluate(source: str, value: Callable[[str], str | None]) -> int | None:
    """An arithmetic expression of bash.

    Args:
        source: What stands between ``$((`` and ``))``.
        value: A variable's value; None where it is not known.

    Returns:
        Its value; None where it is not known, or beyond what is read here.
    """

    def name(match: re.Match[str]) -> str:
        text = value(match[0])
        return text if text is not None and re.fullmatch(r"-?\d{1,19}", text) else "x"

    # the dollar sign is a matter of taste in there
    source = re.sub(r"\$\{(\w+)\}|\$(?=\w)", r"\1", source[:500])
    source = re.sub(r"[A-Za-z_]\w*", name, source).strip()
    if len(source) > 500 or not re.fullmatch(r"[\d+\-*/%()<>=!&| \t\n]+", source):
        return None
    source = source.replace("&&", " and ").replace("||", " or ")
    source = re.sub(r"!(?!=)", " not ", source)
    try:
        return _number(ast.parse(re.sub(r"\b0+(\d)", r"\1", source), mode="eval").body)
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
    if isinstance(node, ast.Constant) and type(node.value) is int:
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
    if max(abs(left), abs(right)) > 1 << 62:
        raise ValueError
    if isinstance(operation, ast.Add):
        return left + right
    if isinstance(operation, ast.Sub):
        return left - right
    if isinstance(operation, ast.Mult):
        return left * right
    sign = -1 if (left < 0) != (right < 0) else 1
    quotient = sign * (abs(left) // abs(right))  # bash rounds towards zero
    if isinstance(operation, ast.Div):
        return quotient
    if isinstance(operation, ast.Mod):
        return left - quotient * right
    raise ValueError
