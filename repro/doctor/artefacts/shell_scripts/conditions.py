"""Conditions of a shell script whose result can be said without running it."""

from __future__ import annotations

import fnmatch

from tree_sitter import Node

from repro.doctor.artefacts.shell_scripts.arithmetic import number
from repro.doctor.artefacts.shell_scripts.values import Scope, known, text_of
from repro.doctor.artefacts.shell_scripts.words import EXTENDED, expand

__all__ = ["holds"]


def holds(node: Node, scope: Scope) -> bool | None:
    """Whether a condition holds; None where only a shell knows.

    Args:
        node: A command, a test, a list of them.
        scope: What is set.
    """
    return _holds(node, scope, 0)


def _holds(node: Node, scope: Scope, depth: int) -> bool | None:
    if depth > 30:
        return None
    inner = [child for child in node.children if not child.is_extra]
    kind = node.type
    if kind == "command":
        return {"true": True, ":": True, "false": False}.get(text_of(node))
    if kind == "negated_command" and inner:
        return _not(_holds(inner[-1], scope, depth + 1))
    if kind in ("test_command", "parenthesized_expression", "compound_statement") and len(inner) == 3:
        if inner[0].type == "((":
            result = number(text_of(inner[1]), scope)
            return None if result is None else result != 0
        return None if kind == "compound_statement" else _holds(inner[1], scope, depth + 1)
    if kind in ("list", "binary_expression") and len(inner) == 3 and inner[1].type in ("&&", "||", "-a", "-o"):
        left, right = _holds(inner[0], scope, depth + 1), _holds(inner[2], scope, depth + 1)
        decisive = inner[1].type in ("||", "-o")
        if decisive in (left, right):
            return decisive
        return None if None in (left, right) else not decisive
    if kind == "unary_expression" and len(inner) == 2:
        if text_of(inner[0]) == "!":
            return _not(_holds(inner[1], scope, depth + 1))
        text = _text(inner[1], scope)
        if text is None or text_of(inner[0]) not in ("-z", "-n"):
            return None
        return (text == "") == (text_of(inner[0]) == "-z")
    if kind == "binary_expression" and len(inner) == 3:
        left_text, right_text = _text(inner[0], scope), _text(inner[2], scope)
        if left_text is None or right_text is None:
            return None
        pattern = inner[2].type in ("extglob_pattern", "regex", "word") and not _single(node)
        return _compare(text_of(inner[1]), left_text, right_text, pattern)
    return None


def _not(value: bool | None) -> bool | None:
    return None if value is None else not value


def _single(node: Node) -> bool:
    """Whether it stands in ``[ ]``, which knows no patterns."""
    parent = node.parent
    while parent is not None and parent.type != "test_command":
        parent = parent.parent
    return parent is not None and text_of(parent).startswith("[ ")


def _text(node: Node, scope: Scope) -> str | None:
    words = expand(node, scope, split=False)
    return words[0].text if words and known(words[0].value) else None


def _compare(operation: str, left: str, right: str, pattern: bool) -> bool | None:
    if operation in ("=", "==", "!="):
        if pattern and EXTENDED.search(right):
            return None
        same = fnmatch.fnmatchcase(left, right) if pattern else left == right
        return same == (operation != "!=")
    try:
        a, b = int(left[:30]), int(right[:30])
    except ValueError:
        return None
    results = {"-eq": a == b, "-ne": a != b, "-lt": a < b, "-le": a <= b, "-gt": a > b, "-ge": a >= b}
    return results.get(operation)
