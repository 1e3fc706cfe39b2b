"""A shell script read as a shell would read it, without running anything: its commands, with the variables they get."""

from __future__ import annotations

import functools
import posixpath
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from tree_sitter import Node

from repro.doctor.artefacts.shell_scripts.arithmetic import count
from repro.doctor.artefacts.shell_scripts.script import (
    Command,
    Script,
    Sources,
    handed_on,
    heredoc,
    is_shell,
    line_behind,
    reads_text,
    substitute,
)
from repro.doctor.artefacts.shell_scripts.statements import Function, Statements
from repro.doctor.artefacts.shell_scripts.values import (
    BoundError,
    Part,
    Scope,
    Setting,
    Word,
    known,
    parsed,
    single,
    text_of,
)
from repro.doctor.artefacts.shell_scripts.variables import READING
from repro.doctor.artefacts.shell_scripts.words import expand, expand_all, forget_counted

__all__ = ["LARGEST", "Command", "Script", "Setting", "read_script"]

LARGEST = 1 << 20
"""Bytes of a script that is read."""
_SOURCED = 8
_COMMENT = re.compile(rb"\s*#(?!!)")
_ASSIGNED = re.compile(r"([$\w{}]*\w\}?)(?:\[[^\]]*\])?\+?=")
_READ_WHOLE = re.compile(
    r"(?P<ifs>IFS=(?:''|\"\")?\s+)?read\s+(?P<options>(?:-r\s+)?-r?d)\s*(?:''|\"\"|\$'\\0')\s+(?P<name>[A-Za-z_]\w*)"
)
"""``read -r -d '' NAME``: all that there is."""


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
    scope.joins = reader.script.joined
    root = reader.parsed(source, path)
    try:
        reader.run(root, scope)
        reader.uncalled(scope)
    except (BoundError, RecursionError) as error:
        reader.script.cut = str(error) or "too deep"
    reader.script.broken, reader.script.doubted = root.has_error, reader.merging.doubted
    reader.script.hidden = reader.variables.hidden
    return reader.script


class _Reader(Statements):
    """One walk over a script, with the commands that change it."""

    def __init__(self, path: Path, *, taken: bool) -> None:
        super().__init__(taken=taken)
        self._sources = Sources(path)
        self._called: set[str] = set()
        self._calling: set[str] = set()
        self._again = False
        self._sourced = 0

    def parsed(self, source: bytes, path: Path) -> Node:
        """The tree of a file. Lines that end as on Windows are read as they were meant, and noted."""
        if b"\r\n" in source:
            lines = source.split(b"\n")
            ends = [n for n, line in enumerate(lines, 1) if line.endswith(b"\r") and not _COMMENT.match(line)]
            severed = [n for n in ends if lines[n - 1].endswith(b"\\\r")]
            for number in (severed or ends)[:1]:
                text = "\\\r" if severed else "\r"
                self.script.returns.append(Word((Part(text),), str(path), number))
            source = source.replace(b"\r\n", b"\n")
        return parsed(source)

    def fed(self, node: Node, redirect: Node, scope: Scope) -> None:
        """``bash <<EOF``: a shell, here or elsewhere, reads what stands there; ``read -d '' NAME <<EOF``."""
        command = node.named_children[0]
        name = command.child_by_field_name("name")
        body = next((child for child in redirect.named_children if child.type == "heredoc_body"), None)
        if name is None or body is None:
            return
        value = heredoc(redirect, scope)
        if value is not None and reads_text(text_of(name)):
            self._shell("".join(part.text for part in value), scope.word((), body), scope)
        elif value is not None and (match := _READ_WHOLE.fullmatch(text_of(command))):
            text = "".join(part.text for part in value)
            if known(value) and ("r" in match["options"] or "\\" not in text):
                text = text if match["ifs"] else text.strip(" \t\n")
                self.variables.set(match["name"], scope.word((Part(text),), body), scope)

    def command(self, node: Node, scope: Scope) -> None:
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
            elif child.type.endswith("_redirect"):
                forget_counted(child, scope)
        words = expand_all(nodes, scope)
        if not words:
            for setting in settings:
                self.variables.set(setting.name, setting.where._replace(value=setting.value or ()), scope)
            return
        if self._with(settings, words, scope):
            return
        self.script.settings += settings
        count, (front, line) = len(self.script.commands), handed_on(words)
        if line is not None and known(line.value):
            self._shell(line.text, line, scope)
            if started := self.script.commands[count:]:
                self.script.commands[count:] = [replace(inner, words=(*front, *inner.words)) for inner in started]
                return
        shortened = tuple(scope.word((Part(name),), at) for at in nodes if (name := _shortened(at, scope)))
        self.script.commands.append(Command(tuple(words), tuple(settings), dict(scope.exported), shortened))

    def _with(self, settings: Sequence[Setting], words: Sequence[Word], scope: Scope) -> bool:
        """``NAME=value function``: what stands before it holds as long as it runs."""
        if not settings:
            return self._builtin(words, scope)
        outer, scope.own = scope.own, {}
        for setting in settings:
            scope.keep(setting.name)
            scope.put(setting.name, setting.where._replace(value=setting.value or ()))
            scope.exported[setting.name] = setting
        own, scope.own = scope.own, outer
        done = self._builtin(words, scope)
        written = [
            setting.name
            for setting in settings
            if scope.exported.get(setting.name) != setting
            or scope.scalars.get(setting.name) != setting.where._replace(value=setting.value or ())
        ]
        outer, scope.own = scope.own, own
        scope.put_back()
        scope.own = outer
        for name in written:  # whether that outlives the call depends on how it was written
            scope.forget(name)
        return done

    def _builtin(self, words: Sequence[Word], scope: Scope) -> bool:
        """Do what a command changes in the script itself; whether it was such a one."""
        name, args = words[0].text, words[1:]
        if name in self.functions:
            self._call(name, args, scope)
        elif name in ("source", ".") and args:
            self._source(args[0], args[1:], scope)
        elif name in READING and (name != "printf" or (args and args[0].text == "-v")):
            self.variables.read(words, scope)
        elif is_shell(name) and (line := line_behind(words)):
            self._shell(line.text, line, scope)
        elif name in _BUILTINS:
            _BUILTINS[name](self, words, scope)
        else:
            return False
        return True

    def _leave(self, words: Sequence[Word], scope: Scope) -> None:
        """``exit``, ``return``, ``break``, ``continue``."""
        self.ended = words[0].text
        if self.ended in ("break", "continue") and [word.text for word in words[1:]] not in ([], ["1"]):
            self.left.append((self.ended, scope.copy()))  # it leaves what is around the loop too

    def _let(self, words: Sequence[Word], scope: Scope) -> None:
        for word in words[1:]:
            count(word.text, scope, word)

    def _set(self, words: Sequence[Word], scope: Scope) -> None:
        options = [word.text for word in words[1:]]
        if "--" in options:
            scope.positional = list(words[options.index("--") + 2 :])
        for option in options[: options.index("--")] if "--" in options else options:
            if re.fullmatch(r"[-+][a-z]*a[a-z]*", option) or option == "allexport":
                self.variables.every = option.startswith("-") or option == "allexport"

    def _shift(self, words: Sequence[Word], scope: Scope) -> None:
        by = words[1].text if len(words) > 1 else "1"
        if scope.positional is not None:
            sure = re.fullmatch(r"\d{1,5}", by) is not None and single(scope.positional[: int(by)])
            scope.positional = scope.positional[int(by) :] if sure else None

    def _eval(self, words: Sequence[Word], scope: Scope) -> None:
        text = " ".join(word.text for word in words[1:])
        if all(known(word.value) for word in words):
            self._text(text, words[0], scope)
            return
        for target in _ASSIGNED.findall(text):
            if "$" in target:
                scope.forget_all()  # it computes the name
            else:
                scope.forget(target)

    def _text(self, source: str, word: Word, scope: Scope) -> None:
        """Commands in a string."""
        path, line = scope.path, scope.line
        scope.line = word.line - 1
        try:
            self.run(parsed(source.encode(errors="replace")), scope)
        finally:
            scope.path, scope.line = path, line

    def _shell(self, source: str, word: Word, scope: Scope) -> None:
        """Commands that a shell of their own reads: it has what is exported, and what it sets is lost."""
        inner = scope.copy()
        there = {name for name, setting in scope.exported.items() if setting.value is not None}
        inner.scalars = {name: held for name, held in scope.scalars.items() if name in there}
        inner.arrays, inner.positional, inner.own, inner.attributes = {}, None, None, {}
        left = len(self.left)
        self._text(source, word, inner)
        self.ended = ""
        del self.left[left:]

    def _call(self, name: str, arguments: Sequence[Word], scope: Scope) -> None:
        if name in self._calling:
            self._again = True
            return  # it waits for something by calling itself: what it does was read
        self._called.add(name)
        self._calling.add(name)
        again, self._again = self._again, False
        bodies = [functools.partial(self._body, body, arguments) for body in self.functions[name]]
        try:
            # of several, branches chose one
            self.merged(bodies, scope) if len(bodies) > 1 else bodies[0](scope)
            if self._again:
                self.silently(lambda: self.repeated(bodies[0], scope))
        finally:
            self._calling.discard(name)
            self._again = again

    def _body(self, function: Function, arguments: Sequence[Word], scope: Scope) -> None:
        """Run a function's body: its own variables, its arguments and its file end with it."""
        body, path, line = function
        before = scope.positional, scope.path, scope.line, scope.own
        left = len(self.left)
        scope.positional, scope.path, scope.line, scope.own = list(arguments), path, line, {}
        try:
            self.run(body, scope)
            self.gather(left, scope, "return")
            scope.put_back()
        finally:
            scope.positional, scope.path, scope.line, scope.own = before

    def uncalled(self, scope: Scope) -> None:
        """Read functions that only a caller from outside would start."""
        for name in list(self.functions):
            if name not in self._called:
                self.ended = ""
                inner = scope.copy()
                body, inner.path, inner.line = self.functions[name][-1]
                inner.positional, inner.own = None, {}
                self.run(body, inner)

    def _source(self, word: Word, arguments: Sequence[Word], scope: Scope) -> None:
        """Read a file that the script reads, if it lies near it."""
        if not known(word.value):
            self.variables.hidden = self.variables.hidden or self.variables.every
            return
        path = self._sources.find(word.text, scope.path.parent)
        if path is None and not self.unsure and self._sources.missing(word.text):
            self.script.missing.append(word._replace(value=(Part(posixpath.normpath(word.text)),)))
        if path is None or self._sourced >= _SOURCED:
            self.variables.hidden = self.variables.hidden or self.variables.every
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
        left = len(self.left)
        try:
            self.run(self.parsed(source, path), scope)
            self.gather(left, scope, "return")
        finally:
            self._sourced -= 1
            scope.path, scope.line, scope.positional = before


def _shortened(node: Node, scope: Scope) -> str:
    """The array of which a word passes on the first alone, where it holds flags; '' for any other word."""
    match = re.fullmatch(r"(\"?)\$(\{?)(\w+)(?(2)\})\1", text_of(node))
    words = scope.arrays.get(match[3], []) if match and match[3] not in scope.scalars else []
    return match[3] if match and len(words) > 1 and any(word.text.startswith("--") for word in words) else ""


_BUILTINS: Mapping[str, Callable[[_Reader, Sequence[Word], Scope], None]] = {
    **dict.fromkeys(("exit", "return", "break", "continue"), _Reader._leave),
    "let": _Reader._let,
    "set": _Reader._set,
    "shift": _Reader._shift,
    "eval": _Reader._eval,
}
