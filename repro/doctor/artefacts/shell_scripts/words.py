"""Words of a shell script with what stands in variables put in: expansion as bash does it, without running anything.

What only a running shell can know (``$(nvidia-smi)``, variables that come from outside) stays as written.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Protocol

from tree_sitter import Node

from repro.doctor.artefacts.shell_scripts.arithmetic import forget_written, number
from repro.doctor.artefacts.shell_scripts.patterns import braces, changed
from repro.doctor.artefacts.shell_scripts.values import (
    BoundError,
    Fields,
    Part,
    Scope,
    Value,
    Word,
    ansi,
    joined,
    known,
    parsed,
    plain,
    scalar,
    single,
    text_of,
    unescaped,
    unquoted,
)  # fmt: skip

__all__ = ["expand", "expand_all", "forget_counted"]

_EXPANSIONS = frozenset(
    {"simple_expansion", "expansion", "command_substitution", "arithmetic_expansion", "process_substitution"}
)
_BRACED_WORDS = frozenset({"word", "concatenation", "brace_expression"})
_CONTINUED = b"\\\n"
_SEVERAL = re.compile(r'"\$(@|\{(@|\w+\[@\])[^{}"]*\})"')
"""What becomes no word at all where there is nothing: ``"${A[@]}"``."""


def expand(node: Node, scope: Scope, *, split: bool = True) -> list[Word]:
    """The words that a node becomes.

    Args:
        node: A word, string, concatenation, expansion ...
        scope: What is set.
        split: Whether expansions outside of quotes are split; not in ``NAME=value``, whose result is one word.

    Raises:
        BoundError: Where it grows too large.
    """
    if split and node.type in _BRACED_WORDS and "{" in text_of(node):
        words = braces(text_of(node))
        if words and len(words) > 1 and "braceexpand" in scope.modes:
            words = None
        if words is None or len(words) > 1:
            return _listed(words, node, scope)
    fields = Fields()
    _add(node, scope, fields, quoted=not split, depth=0)
    fields.end()
    if not split:
        value: Value = tuple(part for number, word in enumerate(fields.done) for part in joined(number, word))
        return [scope.word(value, node)]
    return fields.done


def _listed(words: Sequence[str] | None, node: Node, scope: Scope) -> list[Word]:
    """The words of a brace expansion, read as if they stood in its place."""
    words = words and [word for word in words if word]
    command = None if words is None else parsed(" ".join([":", *words]).encode(errors="replace"))
    read = command.named_children[0].named_children[1:] if command and command.named_children else ()
    if words is None or len(read) != len(words):
        return [scope.word((Part(f"${{{text_of(node)}}}", False),), node)]
    inner = replace(scope, line=scope.line + node.start_point[0])  # writes what it writes in the same place
    return [word for child in read for word in expand(child, inner)]


def expand_all(nodes: Iterable[Node], scope: Scope) -> list[Word]:
    """The words of several nodes.

    Raises:
        BoundError: Where they grow too large.
    """
    words: list[Word] = []
    groups: list[list[Node]] = []
    for node in nodes:
        if groups and _one_word(groups[-1][-1], node):
            groups[-1].append(node)
        else:
            groups.append([node])
    for group in groups:
        words += expand(group[0], scope) if len(group) == 1 else _joined(group, scope)
    return words


def _one_word(node: Node, following: Node) -> bool:
    """Whether the parser takes for two words what is one."""
    parent = following.parent
    gap = following.start_byte - node.end_byte
    if gap != len(_CONTINUED) or parent is None or parent.start_byte > node.end_byte:
        return False
    at = node.end_byte - parent.start_byte
    return (parent.text or b"")[at : at + gap] == _CONTINUED


def _joined(group: Sequence[Node], scope: Scope) -> list[Word]:
    """Nodes with nothing but a backslash and the line's end between them, which a shell takes out."""
    texts = [text_of(node) for node in group]
    if any(re.search(r"\$\w+$", text) and re.match(r"\w", after) for text, after in itertools.pairwise(texts)):
        return [scope.word((Part("".join(texts), False),), group[0])]  # the name goes on
    fields = Fields()
    for node in group:
        _add(node, scope, fields, quoted=False, depth=0)
    fields.end()
    last = text_of(group[-1])
    if last.startswith("-") and scope.joins is not None:
        scope.joins.extend(word for word in fields.done if word.text.endswith(last))
    return fields.done


def _add(node: Node, scope: Scope, fields: Fields, *, quoted: bool, depth: int) -> None:
    if depth > 60:
        raise BoundError("too deep")
    here = scope.word((), node)
    kind = node.type
    if kind == "raw_string":
        fields.add((Part(text_of(node)[1:-1]),), here)
    elif kind == "ansi_c_string":
        fields.add((Part(ansi(text_of(node)[2:-1])),), here)
    elif kind == "string":
        if not _SEVERAL.fullmatch(text_of(node)):
            fields.add((), here)
        _inside(node, scope, fields, quoted=True, depth=depth, start=1, end=1)
    elif kind == "translated_string":
        for child in node.named_children:
            _add(child, scope, fields, quoted=True, depth=depth + 1)
    elif kind in _EXPANSIONS:
        _expansion(node, scope, fields, quoted=quoted, depth=depth)
    elif kind == "heredoc_body":
        _inside(node, scope, fields, quoted=True, depth=depth)
    elif node.child_count and kind not in ("brace_expression",):
        _inside(node, scope, fields, quoted=quoted, depth=depth, bare=True)
    else:
        fields.add((_literal(text_of(node)),), here)


_COMPUTED = re.compile(r"(?:[^\\$`]|\\[\s\S]|\$(?![\w{(@*#?!$-]))*(?:\$[\w{(@*#?!$-]|`)")
"""An expansion that the parser takes for text."""


def _literal(text: str) -> Part:
    """Text outside of quotes."""
    return Part(text, False) if _COMPUTED.match(text) else Part(unescaped(text))


def _inside(
    node: Node,
    scope: Scope,
    fields: Fields,
    *,
    quoted: bool,
    depth: int,
    start: int = 0,
    end: int = 0,
    bare: bool = False,
) -> None:
    """Children of a node, and the text between them (which the parser does not always give a node)."""
    source = node.text or b""
    at, last = start, len(source) - end
    here = scope.word((), node)

    def literal(upto: int) -> None:
        text = source[at:upto].decode(errors="replace")
        if text:
            fields.add((_literal(text) if bare else Part(unquoted(text), not _COMPUTED.match(text)),), here)

    for child in node.children:
        begin = child.start_byte - node.start_byte
        if begin < at or child.end_byte == child.start_byte:
            continue
        if child.type in _EXPANSIONS or (bare and child.is_named):
            literal(begin)
            _add(child, scope, fields, quoted=quoted, depth=depth + 1)
            at = child.end_byte - node.start_byte
    if at < last:
        literal(last)


# -- expansions


class _Add(Protocol):
    """Adds an expansion, split or not as its place wants it; written at `origin`, else where the expansion stands."""

    def __call__(self, value: Value, origin: Word | None = None) -> None: ...


def _expansion(node: Node, scope: Scope, fields: Fields, *, quoted: bool, depth: int) -> None:
    here = scope.word((), node)

    def add(value: Value, origin: Word | None = None) -> None:
        if quoted:
            fields.add(value, origin or here)
        else:
            fields.split(value, origin or here, scope.spaces)

    if node.type == "simple_expansion":
        _named(text_of(node)[1:], node, scope, fields, add, quoted)
    elif node.type == "expansion":
        _braced(node, scope, fields, add, quoted, depth)
    elif node.type == "arithmetic_expansion":
        add(_arithmetic(node, scope))
    else:
        nested = text_of(node).startswith("`") and "\\" in text_of(node)  # it is read twice
        readable = node.type == "command_substitution" and not nested
        value = scope.substitute(node, scope) if scope.substitute and readable else None
        add(_unknown(node) if value is None else value)


def _unknown(node: Node) -> Value:
    return (Part(text_of(node), False),)


def _named(name: str, node: Node, scope: Scope, fields: Fields, add: _Add, quoted: bool) -> None:
    """``$NAME``, ``$1``, ``$@``."""
    if name in ("@", "*"):
        if scope.positional is None:
            fields.add((Part(text_of(node), False, several=True),), scope.word((), node))
        else:
            _several(scope.positional, scope, fields, quoted and name == "@", quoted)
        return
    word = scalar(name, scope)
    if word is None:
        add(() if name in scope.arrays else _unknown(node))
    else:
        add(word.value, word)


def _several(words: Sequence[Word], scope: Scope, fields: Fields, apart: bool, quoted: bool) -> None:
    if apart:
        fields.several(words)
    elif quoted:
        if words:
            between = None if scope.spaces is None else scope.spaces[:1]
            value = tuple(part for number, word in enumerate(words) for part in joined(number, word, between))
            fields.add(value, words[0])
    else:
        for number, word in enumerate(words):
            if number:
                fields.end()
            fields.split(word.value, word, scope.spaces)


def _in_quotes(node: Node) -> bool:
    """Whether it stands between double quotes, or in a here-document."""
    parent = node.parent
    while parent is not None and parent.type not in ("string", "heredoc_body", "command_substitution"):
        parent = parent.parent
    return parent is not None and parent.type != "command_substitution"


_BRACED = re.compile(
    r"^\$\{(?P<hash>[#!])?(?P<name>[A-Za-z_]\w*|\d+|[@*])(?:\[(?P<at>[^\]]*)\])?(?P<op>:?[-+=?]|%%?|##?|//?|\^\^?|,,?|:|@)?",
)


def _braced(node: Node, scope: Scope, fields: Fields, add: _Add, quoted: bool, depth: int) -> None:
    """``${...}``."""
    source = text_of(node)
    match = _BRACED.match(source)
    if match is None or match["hash"] == "!" or (not match["op"] and match.end() < len(source) - 1):
        add(_unknown(node))
    elif match["at"] in ("@", "*") or match["name"] in ("@", "*"):
        _every(match, node, scope, fields, add, quoted, depth)
    else:
        _one(match, node, scope, fields, add, quoted, depth)


def _every(match: re.Match[str], node: Node, scope: Scope, fields: Fields, add: _Add, quoted: bool, depth: int) -> None:
    """``${A[@]}``, ``${#A[@]}``, ``${A[@]:-x}``."""
    name, op = match["name"], match["op"] or ""
    words = scope.positional if name in ("@", "*") else scope.arrays.get(name)
    if words is None and name in scope.scalars and known(scope.scalars[name].value):
        words = [scope.scalars[name]]
    sure = words is not None and single(words)
    cut = re.fullmatch(r" *(\d{1,6})(?::(\d{1,6}))?", text_of(node)[match.end() : -1]) if op == ":" else None
    if (
        words is not None
        and cut
        and (int(cut[1]) or name not in ("@", "*"))
        and (sure or (cut[1] == "0" and not cut[2]))
    ):
        begin = int(cut[1]) - (name in ("@", "*"))
        words = words[begin:][: int(cut[2]) if cut[2] else None]
        _several(words, scope, fields, quoted and "*" not in (match["at"], name), quoted)
    elif match["hash"]:
        add((Part(str(len(words))),) if words is not None and sure else _unknown(node))
    elif words is not None and op in ("", ":-", "-", ":=", "=", ":?", "?") and (words or op in ("", "=", "-", "?")):
        _several(words, scope, fields, quoted and "*" not in (match["at"], name), quoted)
    elif words and not sure:
        fields.add((Part(text_of(node), False, several=True),), scope.word((), node))
    elif op in ("+", ":+", "-", ":-"):
        if bool(words) == (op in ("+", ":+")):
            _argument(node, match.end(), scope, fields, add, quoted, depth)
    else:
        fields.add((Part(text_of(node), False, several=True),), scope.word((), node))


def _one(match: re.Match[str], node: Node, scope: Scope, fields: Fields, add: _Add, quoted: bool, depth: int) -> None:
    """``${NAME}``, ``${NAME:-x}``, ``${NAME%.sh}``."""
    source, name, op, at = text_of(node), match["name"], match["op"] or "", match["at"]
    if at is not None and forget_written(at, scope):
        return add(_unknown(node))
    word = _element(name, at, scope, node) if at is not None else scalar(name, scope)
    if match["hash"]:
        add((Part(str(len(word.text))),) if word and known(word.value) else _unknown(node))
    elif op.strip(":") in ("-", "=", "+", "?") and op:
        there = word is not None and (":" not in op or word.text != "")
        if op.endswith("+"):
            if word is not None and not any(part.known and part.text for part in word.value) and not known(word.value):
                add(_unknown(node))  # it may be empty
            elif there:
                _argument(node, match.end(), scope, fields, add, quoted, depth)
        elif there and word is not None:
            add(word.value, word)
        elif op.endswith("?"):
            add(_unknown(node))
        else:
            if op.endswith("="):
                given = scope.word(_argument_value(node, match.end(), scope, depth), node)
                scope.put(name, given) if at is None else scope.forget(name, array=True)
            _argument(node, match.end(), scope, fields, add, quoted, depth)
    elif word is None:
        add(() if name in scope.arrays else _unknown(node))
    elif not op:
        add(word.value, word)
    else:
        argument = _argument_value(node, match.end(), scope, depth)  # it may count
        result = None
        if known(word.value) and op != ":":
            result = changed(word.text, op, source[match.end() : -1], scope)
        elif (
            known(word.value)
            and known(argument)
            and (cut := re.fullmatch(r"(\d{1,6})(?::(\d{1,6}))?", plain(argument)))
        ):
            begin = int(cut[1])
            result = word.text[begin : begin + int(cut[2])] if cut[2] else word.text[begin:]
        add(_unknown(node) if result is None else (Part(result),), word)
    return None


def _element(name: str, at: str, scope: Scope, node: Node) -> Word | None:
    """An array's element; None where it has none there."""
    if name == "BASH_SOURCE":
        return scalar(name, scope)
    words = scope.arrays.get(name)
    if words is None:
        return None
    index = number(at, scope)
    if index is None or not single(words if index < 0 else words[: index + 1]):
        return scope.word(_unknown(node), node)
    return words[index] if -len(words) <= index < len(words) else None


def _argument(node: Node, start: int, scope: Scope, fields: Fields, add: _Add, quoted: bool, depth: int) -> None:
    """The word behind ``:-``: what stands in quotes there is not split."""
    if quoted:
        return add(_argument_value(node, start, scope, depth))
    begin = node.start_byte + len(text_of(node)[:start].encode())
    at = begin
    here = scope.word((), node)
    source = node.text or b""

    def bare(text: str) -> None:
        for piece in re.split(r"(\\[\s\S])", text):
            if piece.startswith("\\") and len(piece) > 1:
                fields.add((Part(unescaped(piece)),), here)  # what is escaped is not split
            elif piece:
                fields.split((_literal(piece),), here, scope.spaces)

    def gap(upto: int) -> None:
        bare(source[at - node.start_byte : upto - node.start_byte].decode(errors="replace"))

    for child in _pieces(node, begin):
        gap(child.start_byte)
        if child.child_count == 0 and child.type not in ("raw_string", "ansi_c_string"):
            bare(text_of(child))
        else:
            _add(child, scope, fields, quoted=False, depth=depth + 1)
        at = child.end_byte
    gap(node.end_byte - 1)
    return None


def _pieces(node: Node, begin: int) -> list[Node]:
    """The nodes of an argument, with concatenations taken apart."""
    nodes: list[Node] = []
    for child in node.named_children:
        if child.start_byte < begin:
            continue
        nodes += child.named_children if child.type == "concatenation" else [child]
    return nodes


def _argument_value(node: Node, start: int, scope: Scope, depth: int) -> Value:
    begin = node.start_byte + len(text_of(node)[:start].encode())
    fields = Fields()
    here = scope.word((), node)
    source = node.text or b""
    at, within = begin, _in_quotes(node)

    def literal(text: str) -> None:
        fields.add((Part(unquoted(text), not _COMPUTED.match(text)) if within else _literal(text),), here)

    for child in _pieces(node, begin):
        literal(source[at - node.start_byte : child.start_byte - node.start_byte].decode(errors="replace"))
        if within and child.type in ("raw_string", "ansi_c_string", "word"):
            literal(text_of(child))  # single quotes are text there
        else:
            _add(child, scope, fields, quoted=True, depth=depth + 1)
        at = child.end_byte
    literal(source[at - node.start_byte : -1].decode(errors="replace"))
    fields.end()
    return tuple(part for word in fields.done for part in word.value if part.text)


def _arithmetic(node: Node, scope: Scope) -> Value:
    """``$(( ))`` of whole numbers that are known; what it writes is forgotten."""
    source = text_of(node)
    inner = source[3:-2] if source.startswith("$((") else source[2:-1]
    result = None if forget_written(inner, scope) else number(inner, scope)
    return _unknown(node) if result is None else (Part(str(result)),)


def forget_counted(node: Node, scope: Scope) -> None:
    """Forget what arithmetic writes in a statement that is not read further."""
    if node.type == "arithmetic_expansion":
        _arithmetic(node, scope)
    elif node.type != "command_substitution":
        for child in node.named_children:
            forget_counted(child, scope)
