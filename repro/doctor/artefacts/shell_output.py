"""What a command substitution of a shell script gives, where that can be said without running it."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path

from tree_sitter import Node

from repro.doctor.artefacts.shell_values import Part, Scope, Value, known, text_of
from repro.doctor.artefacts.shell_words import expand

__all__ = ["substitute"]


def substitute(node: Node, scope: Scope) -> Value | None:
    """What ``$(...)`` gives where a reader can say it: the script's folder, a here-document, an echo."""
    inner = node.named_children
    if len(inner) != 1:
        return None
    value = _output(inner[0], scope, 0)
    return None if value is None else _stripped(value)


def _output(node: Node, scope: Scope, depth: int) -> Value | None:
    if depth > 8:
        return None
    if node.type == "redirected_statement" and node.named_children:
        for redirect in node.named_children[1:]:
            if redirect.type == "heredoc_redirect":
                return _heredoc(node.named_children[0], redirect, scope)
            if redirect.type != "file_redirect":
                return None
        return _output(node.named_children[0], scope, depth + 1)
    if node.type == "list":
        left, *_, right = node.named_children
        words = _simple(left, scope)
        if words and words[0] == "cd" and _simple(right, scope) in (["pwd"], ["pwd", "-P"]):
            target = [word for word in words[1:] if not word.startswith("-")]
            return (Part(_absolute(target[0])),) if len(target) == 1 else None
        return None
    words = _simple(node, scope)
    if not words:
        return None
    name, *rest = words
    rest = [word for word in rest if not re.fullmatch(r"-[a-zA-Z-]*", word)]
    if name == "dirname" and len(rest) == 1:
        return (Part(posixpath.dirname(rest[0]) or "."),)
    if name == "basename" and len(rest) in (1, 2):
        return (Part(posixpath.basename(rest[0]).removesuffix("".join(rest[1:]))),)
    if name in ("realpath", "readlink") and len(rest) == 1:
        return (Part(_absolute(rest[0])),)
    if name == "echo" and words[1:] == rest:
        return (Part(" ".join(rest)),)
    if name == "seq" and 1 <= len(rest) <= 3 and all(re.fullmatch(r"\d{1,6}", word) for word in rest):
        last = int(rest[-1])
        begin = int(rest[0]) if len(rest) > 1 else 1
        step = int(rest[1]) if len(rest) == 3 else 1
        numbers = range(begin, last + 1, step) if step else range(0)
        return (Part("\n".join(map(str, numbers))),) if len(numbers) <= 10_000 else None
    return None


def _simple(node: Node, scope: Scope) -> list[str] | None:
    """The words of a command that are all known."""
    if node.type == "redirected_statement" and node.named_children:
        node = node.named_children[0]
    if node.type != "command":
        return None
    words = [
        word
        for child in node.named_children
        if not child.type.endswith("_redirect")
        for part in (child.named_children if child.type == "command_name" else [child])
        for word in expand(part, scope)
    ]
    return [word.text for word in words] if words and all(known(word.value) for word in words) else None


def _absolute(text: str) -> str:
    """A path as the script sees it when it is started from here."""
    return posixpath.normpath(posixpath.join(Path.cwd().as_posix(), text))


def _heredoc(command: Node, redirect: Node, scope: Scope) -> Value | None:
    if _simple(command, scope) not in (["cat"], ["cat", "-"]):
        return None
    start = next((c for c in redirect.named_children if c.type == "heredoc_start"), None)
    body = next((c for c in redirect.named_children if c.type == "heredoc_body"), None)
    if start is None or body is None:
        return None
    if set(text_of(start)) & set("'\"\\"):
        return (Part(text_of(body)),)
    return tuple(part for word in expand(body, scope, split=False) for part in word.value)


def _stripped(value: Value) -> Value:
    """Without the line ends that a substitution drops."""
    *rest, last = value or (Part(""),)
    return (*rest, last._replace(text=last.text.rstrip("\n")))
