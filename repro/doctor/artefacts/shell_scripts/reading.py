"""A shell script read as a shell would read it, without running anything: its commands, with the variables they get.

Branches whose condition cannot be known are all read. A variable that they leave different is not known afterwards; of
arrays, which hold flags, the last that changed them is taken. What one alone sets is in one reading, not in another.
"""

from __future__ import annotations

import fnmatch
import functools
import posixpath
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from tree_sitter import Language, Node, Parser

from repro.doctor.artefacts.shell_scripts.conditions import holds
from repro.doctor.artefacts.shell_scripts.script import (
    Command,
    Merging,
    Script,
    Setting,
    Sources,
    handed_on,
    heredoc,
    is_shell,
    parts_of,
    reads_text,
    starts,
    substitute,
)
from repro.doctor.artefacts.shell_scripts.values import BoundError, Part, Scope, Word, known, number, text_of
from repro.doctor.artefacts.shell_scripts.words import expand, expand_all

__all__ = ["LARGEST", "Command", "Script", "Setting", "read_script"]

LARGEST = 1 << 20
"""Bytes of a script that is read."""
_STEPS = 40_000
_DEPTH = 60
_SOURCED = 8
_BLOCKS = frozenset(
    {"program", "compound_statement", "do_group", "redirected_statement", "negated_command", "ERROR", "else_clause"}
)


@functools.cache
def _parser() -> Parser:
    import tree_sitter_bash

    return Parser(Language(tree_sitter_bash.language()))


def read_script(source: bytes, path: Path, arguments: Sequence[str] | None = None, *, taken: bool = True) -> Script:
    """Read a script.

    Args:
        source: The script.
        path: Where it lies: files that it sources are looked for beside and below it.
        arguments: What it is started with; None where that is not known.
        taken: Whether what one branch alone sets is taken, where nobody knows whether a shell comes there.
    """
    scope, reader = Scope(path), _Reader(path, taken=taken)
    if arguments is not None:
        scope.positional = [Word((Part(word),), "argv", 1) for word in arguments]
    scope.substitute = substitute
    root = _parser().parse(source).root_node
    try:
        reader.run(root, scope)
        reader.uncalled(scope)
    except (BoundError, RecursionError) as error:
        reader.script.cut = str(error) or "too deep"
    reader.script.broken, reader.script.doubted = root.has_error, reader.merging.doubted
    return reader.script


class _Reader:
    """One walk over a script."""

    def __init__(self, path: Path, *, taken: bool) -> None:
        self.script = Script()
        self.merging = Merging(taken=taken)
        self._sources = Sources(path)
        self._exported: dict[str, Setting] = {}
        self._functions: dict[str, tuple[Node, Path, int]] = {}
        self._called: set[str] = set()
        self._calling: set[str] = set()
        self._steps = 0
        self._depth = 0
        self._sourced = 0
        self._ended = ""
        self._all = False
        self._unsure = 0

    # -- statements

    def run(self, node: Node, scope: Scope) -> None:
        """One statement."""
        self._steps += 1
        if self._steps > _STEPS:
            raise BoundError("too many statements")
        if self._ended:
            return
        self._depth += 1
        if self._depth > _DEPTH:
            raise BoundError("too deep")
        try:
            self._statement(node, scope)
        finally:
            self._depth -= 1

    def _statement(self, node: Node, scope: Scope) -> None:
        kind = node.type
        if kind in _BLOCKS:
            self._children(node, scope)
        elif kind in _METHODS:
            _METHODS[kind](self, node, scope)

    def _apart(self, node: Node, scope: Scope) -> None:
        """``( ... )``, and each part of a pipeline: what they set is lost."""
        exported = dict(self._exported)
        for block in [node.named_children] if node.type == "subshell" else [[child] for child in node.named_children]:
            self._block(block, scope.copy())
            self._ended = ""
        self._exported = exported

    def _loop(self, node: Node, scope: Scope) -> None:
        """``while``, ``until``, ``for ((...))``: what is asked once, the rest once, or not at all."""
        self._block([child for child in node.named_children if child.type != "do_group"], scope)
        self._merged([lambda inner: self._children(node, inner, "do_group"), _nothing], scope)

    def _define(self, node: Node, scope: Scope) -> None:
        name, body = node.child_by_field_name("name"), node.child_by_field_name("body")
        if name and body:
            self._functions[text_of(name)] = (body, scope.path, scope.line)

    def _assignments(self, node: Node, scope: Scope) -> None:
        for assignment in [node] if node.type == "variable_assignment" else node.named_children:
            self._assign(assignment, scope)

    def _children(self, node: Node, scope: Scope, kind: str = "") -> None:
        for child in node.named_children:
            if not kind or child.type == kind:
                if child.type == "heredoc_redirect":
                    self._fed(node, child, scope)
                    # `cat <<EOF | next`: what stands behind the mark
                    self._children(child, scope, "pipeline")
                else:
                    self.run(child, scope)

    def _fed(self, node: Node, redirect: Node, scope: Scope) -> None:
        """``bash <<EOF``: a shell, here or elsewhere, reads what stands there."""
        name = node.named_children[0].child_by_field_name("name")
        body = next((child for child in redirect.named_children if child.type == "heredoc_body"), None)
        if name is not None and body is not None and reads_text(text_of(name)):
            value = heredoc(redirect, scope)
            if value is not None:
                self._text("".join(part.text for part in value), scope.word((), body), scope.copy())

    def _list(self, node: Node, scope: Scope) -> None:
        """``a && b``, ``a || b``."""
        children = [child for child in node.children if not child.is_extra]
        if len(children) != 3:
            return self._children(node, scope)
        left, operation, right = children
        self._unsure += operation.type == "||"  # it may fail
        self.run(left, scope)
        self._unsure -= operation.type == "||"
        result = holds(left, scope)
        if result is None:
            return self._merged([lambda inner: self.run(right, inner), _nothing], scope)
        if result == (operation.type == "&&"):
            self.run(right, scope)
        return None

    def _if(self, node: Node, scope: Scope) -> None:
        branches: list[Callable[[Scope], None]] = []
        certain = False
        clauses = [node, *(c for c in node.named_children if c.type in ("elif_clause", "else_clause"))]
        for clause in clauses:
            condition, body = parts_of(clause)
            result = True if clause.type == "else_clause" else holds(condition[-1], scope) if condition else None
            if not certain and result is not False:
                branches.append(functools.partial(self._block, condition + body))
                certain = result is True
        if not certain:
            branches.append(_nothing)
        self._merged(branches, scope)

    def _block(self, nodes: Sequence[Node], scope: Scope) -> None:
        for node in nodes:
            self.run(node, scope)

    def _case(self, node: Node, scope: Scope) -> None:
        value = node.child_by_field_name("value")
        words = expand(value, scope, split=False) if value else []
        text = words[0].text if words and known(words[0].value) else None
        branches: list[Callable[[Scope], None]] = []
        for item in node.named_children:
            if item.type != "case_item":
                continue
            patterns = item.children_by_field_name("value")
            body = [c for c in item.named_children if c not in patterns]
            wanted = [expand(p, scope, split=False)[0] for p in patterns]
            if text is None:
                branches.append(functools.partial(self._block, body))
                if any(text_of(p) == "*" for p in patterns):
                    return self._merged(branches, scope)
            elif any(fnmatch.fnmatchcase(text, w.text) for w in wanted if known(w.value)):
                return self._block(body, scope)
        if text is None:
            self._merged([*branches, _nothing], scope)
        return None

    def _for(self, node: Node, scope: Scope) -> None:
        name = node.child_by_field_name("variable")
        body = node.child_by_field_name("body")
        if name is None or body is None:
            return
        items = [word for child in node.children_by_field_name("value") for word in expand(child, scope)]
        sure = all(known(word.value) and not set(word.text) & set("*?[") for word in items)
        if items and sure and len(items) <= 32:
            for item in items:
                scope.scalars[text_of(name)] = item
                self.run(body, scope)
            return
        scope.scalars[text_of(name)] = scope.word((Part(f"${text_of(name)}", False),), node)
        self._merged([functools.partial(self.run, body), _nothing], scope)

    def _merged(self, branches: Sequence[Callable[[Scope], None]], scope: Scope) -> None:
        """Read branches of which only a shell knows which one is taken."""
        if len(branches) == 1:
            count = len(self.script.commands)
            branches[0](scope)
            if self._ended and not any(starts(command) for command in self.script.commands[count:]):
                # what is not given here may be given by whoever runs it: `exit` for want of an address
                self._ended = ""
            return
        exported, ends = dict(self._exported), []
        after: list[tuple[Scope, dict[str, Setting]]] = []
        alone = len([branch for branch in branches if branch is not _nothing]) == 1
        for branch in branches:
            inner, count = scope.copy(), len(self.script.settings)
            self._exported = dict(exported)
            self._unsure += 1
            branch(inner)
            self._unsure -= 1
            if alone and not self.merging.taken:
                self.script.settings[count:] = [each for each in self.script.settings[count:] if each.prefix]
            ends.append(self._ended)
            if not self._ended:
                after.append((inner, self._exported))
            self._ended = ""
        if not after:
            self._ended = ends[-1]
            return
        self._exported = self.merging.exports(exported, [had for _, had in after])
        self.merging.scopes(scope, [inner for inner, _ in after])
        for name, setting in self._exported.items():
            if setting.value is not None and name in scope.scalars:
                self._exported[name] = replace(setting, value=scope.scalars[name].value)

    # -- variables

    def _assign(self, node: Node, scope: Scope, *, export: bool = False) -> None:
        target, value = node.child_by_field_name("name"), node.child_by_field_name("value")
        if target is None:
            return
        more = any(child.type == "+=" for child in node.children)
        name = text_of(target)
        if target.type == "subscript" or (value is not None and value.type == "array"):
            self._assign_array(name, value, scope, node, more)
            return
        word = expand(value, scope, split=False)[0] if value is not None else None
        word = scope.word(word.value if word else (), node)
        if more and name in scope.arrays:
            if scope.arrays[name]:
                first = scope.arrays[name][0]
                scope.arrays[name] = [first._replace(value=first.value + word.value), *scope.arrays[name][1:]]
            return
        if more:
            before = scope.scalars.get(name)
            word = word._replace(value=(before.value if before else (Part(f"${{{name}}}", False),)) + word.value)
        if len(word.text) > LARGEST:
            raise BoundError("a variable is too long")
        scope.arrays.pop(name, None)
        scope.scalars[name] = word
        if export or self._all or name in self._exported:
            self._export(name, word)

    def _assign_array(self, name: str, value: Node | None, scope: Scope, node: Node, more: bool) -> None:
        at = None
        if (match := re.fullmatch(r"(\w+)\[(.*)\]", name, re.S)) is not None:
            name, at = match[1], number(match[2], scope)
        elements = [] if value is None else _elements(value, scope)
        held = list(scope.arrays.get(name, ()))
        if not held and more and name in scope.scalars:
            held = [scope.scalars[name]]
        if match is not None:
            if at is not None and 0 <= at < len(held):
                held[at] = elements[0] if elements else scope.word((), node)
            else:
                held += elements
            scope.arrays[name] = held
        else:
            scope.arrays[name] = held + elements if more else elements
        if len(scope.arrays[name]) > LARGEST >> 4:
            raise BoundError("an array is too long")
        scope.scalars.pop(name, None)

    def _export(self, name: str, word: Word) -> None:
        setting = Setting(name, word.value, word)
        self._exported[name] = setting
        self.script.settings.append(setting)

    def _declare(self, node: Node, scope: Scope) -> None:
        words = [text_of(child) for child in node.children if child.type == "word"]
        options = "".join(word for word in words if word.startswith("-"))
        export = (text_of(node.children[0]) == "export" and "n" not in options) or "x" in options
        for child in node.named_children:
            if child.type == "variable_assignment":
                self._assign(child, scope, export=export)
            elif child.type == "variable_name" and export:
                name = text_of(child)
                if name in scope.scalars:
                    self._export(name, scope.word(scope.scalars[name].value, child))
            elif child.type not in ("word", "comment") and export:
                for word in expand(child, scope):
                    name, equals, _ = word.text.partition("=")
                    if equals and name.isidentifier() and known(word.value):
                        value = Word((Part(word.text[len(name) + 1 :]),), word.path, word.line)
                        scope.scalars[name] = value
                        self._export(name, value)

    def _unset(self, node: Node, scope: Scope) -> None:
        for child in node.named_children:
            name = text_of(child)
            if name.startswith("-"):
                continue
            scope.scalars.pop(name, None)
            scope.arrays[name] = []  # known to be nothing, which a name that was never set is not
            self._functions.pop(name, None)
            self._exported[name] = Setting(name, None, scope.word((), child))
            self.script.settings.append(self._exported[name])

    # -- commands

    def _command(self, node: Node, scope: Scope) -> None:
        nodes: list[Node] = []
        settings: list[Setting] = []
        for child in node.named_children:
            if child.type == "variable_assignment":
                target, value = child.child_by_field_name("name"), child.child_by_field_name("value")
                if target is not None and target.type == "variable_name":
                    held = expand(value, scope, split=False)[0].value if value is not None else ()
                    settings.append(Setting(text_of(target), held, scope.word((), child), prefix=True))
            elif child.type == "command_name":
                nodes += child.named_children or [child]
            elif not child.type.endswith("_redirect") and child.type != "comment":
                nodes.append(child)
        words = expand_all(nodes, scope)
        if not words:
            for setting in settings:
                scope.scalars[setting.name] = setting.where._replace(value=setting.value or ())
            return
        if self._builtin(words, scope):
            return
        self.script.settings += settings
        count, (front, line) = len(self.script.commands), handed_on(words)
        if line is not None and known(line.value):
            self._text(line.text, line, scope.copy())
            if started := self.script.commands[count:]:
                self.script.commands[count:] = [replace(inner, words=(*front, *inner.words)) for inner in started]
                return
        self.script.commands.append(Command(tuple(words), tuple(settings), dict(self._exported)))

    def _builtin(self, words: Sequence[Word], scope: Scope) -> bool:
        """Do what a command changes in the script itself; whether it was such a one."""
        name, args = words[0].text, words[1:]
        if name in self._functions:
            self._call(name, args, scope)
        elif name in ("source", ".") and args:
            self._source(args[0], args[1:], scope)
        elif name in ("exit", "return"):
            self._ended = name
        elif name == "set":
            options = [w.text for w in args]
            if "--" in options:
                scope.positional = list(args[options.index("--") + 1 :])
            for option in options[: options.index("--")] if "--" in options else options:
                if re.fullmatch(r"[-+][a-z]*a[a-z]*", option) or option == "allexport":
                    self._all = option.startswith("-") or option == "allexport"
        elif name == "shift":
            if scope.positional is not None:
                count = int(args[0].text) if args and args[0].text.isdigit() and len(args[0].text) < 6 else 1
                scope.positional = scope.positional[count:]
        elif name in ("read", "mapfile", "readarray") or (name == "printf" and args and args[0].text == "-v"):
            for word in args if name != "printf" else args[1:2]:
                # what they read is known to a shell alone: it stays as it is written where it is used
                scope.arrays.pop(word.text, None)
                scope.scalars.pop(word.text, None)
        elif name == "eval" and args and all(known(word.value) for word in args):
            self._text(" ".join(word.text for word in args), args[0], scope)
        elif is_shell(name) and len(args) >= 2 and re.fullmatch(r"-[a-z]*c", args[0].text):
            self._text(args[1].text, args[1], scope.copy())
        else:
            return False
        return True

    def _text(self, source: str, word: Word, scope: Scope) -> None:
        """Commands in a string."""
        path, line = scope.path, scope.line
        scope.line = word.line - 1
        try:
            self.run(_parser().parse(source.encode(errors="replace")).root_node, scope)
        finally:
            scope.path, scope.line = path, line

    def _call(self, name: str, arguments: Sequence[Word], scope: Scope) -> None:
        if name in self._calling:
            return  # it waits for something by calling itself: what it does was read
        self._called.add(name)
        self._calling.add(name)
        body, path, line = self._functions[name]
        before = scope.positional, scope.path, scope.line
        scope.positional, scope.path, scope.line = list(arguments), path, line
        try:
            self.run(body, scope)
        finally:
            scope.positional, scope.path, scope.line = before
            self._calling.discard(name)
        if self._ended == "return":
            self._ended = ""

    def uncalled(self, scope: Scope) -> None:
        """Read functions that only a caller from outside would start."""
        for name in list(self._functions):
            if name not in self._called:
                self._ended = ""
                inner = scope.copy()
                body, inner.path, inner.line = self._functions[name]
                inner.positional = None
                self.run(body, inner)

    def _source(self, word: Word, arguments: Sequence[Word], scope: Scope) -> None:
        """Read a file that the script reads, if it lies near it."""
        if not known(word.value):
            return
        path = self._sources.find(word.text, scope.path.parent)
        if path is None and not self._unsure and self._sources.missing(word.text):
            self.script.missing.append(word._replace(value=(Part(posixpath.normpath(word.text)),)))
        if path is None or self._sourced >= _SOURCED:
            return
        try:
            with path.open("rb") as file:
                source = file.read(LARGEST)
        except OSError:
            return
        before = scope.path, scope.line, scope.positional
        scope.path, scope.line = path, 0
        if arguments:
            scope.positional = list(arguments)
        self._sourced += 1
        try:
            self.run(_parser().parse(source).root_node, scope)
        finally:
            self._sourced -= 1
            scope.path, scope.line, scope.positional = before
        if self._ended == "return":
            self._ended = ""


_METHODS: Mapping[str, Callable[[_Reader, Node, Scope], None]] = {
    "list": _Reader._list,
    "subshell": _Reader._apart,
    "pipeline": _Reader._apart,
    "if_statement": _Reader._if,
    "case_statement": _Reader._case,
    "for_statement": _Reader._for,
    "while_statement": _Reader._loop,
    "c_style_for_statement": _Reader._loop,
    "function_definition": _Reader._define,
    "variable_assignment": _Reader._assignments,
    "variable_assignments": _Reader._assignments,
    "declaration_command": _Reader._declare,
    "unset_command": _Reader._unset,
    "command": _Reader._command,
}


def _nothing(_: Scope) -> None:
    """The branch that is not there."""


def _elements(value: Node, scope: Scope) -> list[Word]:
    if value.type != "array":
        return expand(value, scope, split=False)
    return expand_all([child for child in value.named_children if child.type != "comment"], scope)
