"""A shell script read as a shell would read it, without running anything: its commands, with the variables they get."""

from __future__ import annotations

import functools
import itertools
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
from repro.doctor.artefacts.shell_scripts.statements import Statements, nothing
from repro.doctor.artefacts.shell_scripts.values import (
    BoundError,
    Function,
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
from repro.doctor.artefacts.shell_scripts.words import expand_all, forget_counted

__all__ = ["LARGEST", "Command", "Script", "Setting", "read_script"]

LARGEST = 1 << 20
"""Bytes of a script that is read."""
_SOURCED = 8
_RECURSIONS = 6
"""Calls of a function by itself that are followed, where it is certain that they are made."""
_BEFORE = ("time", "builtin", "command")
_DECLARING = ("declare", "typeset", "local", "export", "readonly", "unset")
_COMMENT = re.compile(rb"\s*#(?!!)")
_ASSIGNED = re.compile(r"([$\w{}]*\w\}?)(?:\[[^\]]*\])?\+?=")
_READ_WHOLE = re.compile(
    r"(?P<ifs>IFS=(?:''|\"\")?\s+)?read\s+(?P<options>(?:-r\s+)?-r?d)\s*(?:''|\"\"|\$'\\0')\s+(?P<name>[A-Za-z_]\w*)"
)
"""``read -r -d '' NAME``: all that there is."""


def read_script(
    source: bytes, path: Path, arguments: Sequence[str] | None = None, *, taken: bool | None = True
) -> Script:
    """Read a script.

    Args:
        source: The script.
        path: Where it lies: files that it sources are looked for beside and below it.
        arguments: What it is started with; None where that is not known.
        taken: Which of the branches that a shell may take leave what is set: see `Merging`.
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
    reader.script.broken, reader.script.doubts = root.has_error, reader.merging.doubts
    reader.script.hidden = reader.variables.hidden
    return reader.script


class _Reader(Statements):
    """One walk over a script, with the commands that change it."""

    def __init__(self, path: Path, *, taken: bool | None) -> None:
        super().__init__(taken=taken)
        self._sources = Sources(path)
        self._called: set[str] = set()
        self._calling: list[str] = []
        self._again = False
        self._certain = 0
        """Unsure branches around the outermost call of a function that calls itself."""
        self._sourced = 0

    def parsed(self, source: bytes, path: Path) -> Node:
        """The tree of a file. Lines that end as on Windows are read as they were meant, and noted."""
        if b"\r\n" in source:
            lines = source.split(b"\n")
            numbers = [n for n, line in enumerate(lines, 1) if line.endswith(b"\r") and not _COMMENT.match(line)]
            severed = [n for n in numbers if lines[n - 1].endswith(b"\\\r")]
            for number in (severed or numbers)[:1]:
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
        given: list[Node] = []
        for child in node.named_children:
            if child.type == "variable_assignment":
                given.append(child)
            elif child.type == "command_name":
                if given and _torn(child):
                    self.assign(given, scope)
                    given = []
                nodes += (child.named_children or [child]) if child.text else []
            elif not child.type.endswith("_redirect") and child.type != "comment":
                nodes.append(child)
            elif child.type.endswith("_redirect"):
                forget_counted(child, scope)
        words = expand_all([*nodes, *_behind(node)], scope)
        if not words:
            self.assign(given, scope)
            return
        settings = [setting for each in given if (setting := self.variables.prefix(each, scope))]
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
        outer, scope.saved = scope.saved, {}
        beneath, scope.beneath = scope.beneath, scope.beneath | {setting.name for setting in settings}
        for setting in settings:
            scope.keep(setting.name)
            scope.arrays.pop(setting.name, None)
            scope.put(setting.name, setting.where._replace(value=setting.value or ()))
            scope.exported[setting.name] = setting
        inner, scope.saved = scope.saved, outer
        done = self._builtin(words, scope)
        written = [
            setting.name
            for setting in settings
            if scope.exported.get(setting.name) != setting
            or scope.scalars.get(setting.name) != setting.where._replace(value=setting.value or ())
        ]
        outer, scope.saved = scope.saved, inner
        scope.put_back()
        scope.saved, scope.beneath = outer, beneath
        for name in written:  # whether that outlives the call depends on how it was written
            scope.forget(name)
        return done

    def _builtin(self, words: Sequence[Word], scope: Scope) -> bool:
        """Do what a command changes in the script itself; whether it was such a one."""
        name, args = words[0].text, words[1:]
        if name in scope.functions:
            self._call(name, args, scope)
        elif name in ("source", ".") and args:
            self._source(args[0], args[1:], scope)
        elif name in READING and (name != "printf" or (args and args[0].text == "-v")):
            self.variables.read(words, scope)
        elif is_shell(name) and (line := line_behind(words)):
            self._shell(line.text, line, scope)
        elif name in _BUILTINS:
            _BUILTINS[name](self, words, scope)
        elif name in _BEFORE and (inner := [*itertools.dropwhile(lambda word: word.text.startswith("-"), args)]):
            return self._under(inner, scope)
        elif name in ("trap", "shopt"):
            self._mode(words, scope)
            return False
        else:
            return False
        return True

    def _under(self, words: Sequence[Word], scope: Scope) -> bool:
        """``time COMMAND``, ``builtin COMMAND``: what it may set is set, or not known."""
        setting = [*itertools.takewhile(lambda word: _ASSIGNED.match(word.text), words)]
        rest = words[len(setting) :]
        declared = rest[1:] if rest and rest[0].text in _DECLARING else []
        for word in (*setting, *declared):  # behind `time` an expansion is split here, and not by a shell
            if not known(word.value) and "$" in word.text.partition("=")[0]:
                scope.forget_all()
            elif match := re.match(r"\w+", word.text):
                scope.forget(match[0])
        return bool(rest) and self._builtin(rest, scope)

    def _mode(self, words: Sequence[Word], scope: Scope) -> None:
        """``shopt -s``, and ``trap`` where what it runs comes between commands."""
        texts = [word.text for word in words]
        if texts[0] == "shopt":
            scope.modes |= {*texts} & {"nocasematch", "lastpipe"}
        elif len(words) > 2 and {*texts[2:]} & {"ERR", "DEBUG", "RETURN"}:
            inner, ended = scope.copy(), self.ended
            self.silently(lambda: self._eval(words[:2], inner))
            self.ended = ended
            for name in {*inner.scalars, *inner.arrays}:
                if inner.held(name) != scope.held(name):
                    self.variables.moving.add(name)
                    scope.forget(name)

    def _leave(self, words: Sequence[Word], _: Scope) -> None:
        """``exit``, ``return``, ``break``, ``continue``."""
        way = words[0].text
        if way in ("break", "continue"):
            text = words[1].text if len(words) > 1 else "1"
            by = min(int(text), self.loops) if re.fullmatch(r"\d{1,5}", text) else self.loops
            if not by:
                return  # there is no loop
            way = way if by == 1 else f"{way} {by}"
        self.ended = way

    def _let(self, words: Sequence[Word], scope: Scope) -> None:
        for word in words[1:]:
            count(word.text, scope, word)

    def _set(self, words: Sequence[Word], scope: Scope) -> None:
        options = [word.text for word in words[1:]]
        if "--" in options:
            scope.positional = list(words[options.index("--") + 2 :])
        if re.search(r"(?<!\S)\+(?:\w*B|o braceexpand)", " ".join(options)):
            scope.modes.add("braceexpand")
        for option in options[: options.index("--")] if "--" in options else options:
            if re.fullmatch(r"[-+][a-z]*a[a-z]*", option) or option == "allexport":
                self.variables.every = option.startswith("-") or option == "allexport"

    def _shift(self, words: Sequence[Word], scope: Scope) -> None:
        by = words[1].text if len(words) > 1 else "1"
        if scope.positional is not None:
            sure = re.fullmatch(r"\d{1,5}", by) is not None and single(scope.positional[: int(by)])
            if not sure:
                scope.lose()
            elif int(by) <= len(scope.positional):  # else nothing is
                scope.positional = scope.positional[int(by) :]

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
        inner.arrays, inner.positional, inner.saved, inner.attributes = {}, None, None, {}
        left = len(self.left)
        self._text(source, word, inner)
        self.ended = ""
        del self.left[left:]

    def _call(self, name: str, arguments: Sequence[Word], scope: Scope) -> None:
        deep = self._calling.count(name)
        if deep > _RECURSIONS or (deep and self.unsure > self._certain):
            self._again = True  # what it does was read, with other arguments
            scope.forget_all()
            return
        self._called.add(name)
        self._calling.append(name)
        again, self._again = self._again, False
        certain, self._certain = self._certain, self._certain if deep else self.unsure
        bodies = scope.functions[name]
        try:
            self._bodies(bodies, arguments, scope)
            if self._again and not deep:
                self.silently(lambda: self.repeated(functools.partial(self._bodies, bodies, None), scope))
        finally:
            self._calling.pop()
            self._again, self._certain = again or (self._again and bool(deep)), certain

    def _bodies(self, functions: Sequence[Function | None], arguments: Sequence[Word] | None, scope: Scope) -> None:
        """Run a function; of several bodies branches chose one."""
        bodies = [functools.partial(self._body, each, arguments) if each else nothing for each in functions]
        self.merged(bodies, scope) if len(bodies) > 1 else bodies[0](scope)

    def _body(self, function: Function, arguments: Sequence[Word] | None, scope: Scope) -> None:
        """Run a function's body: its own variables, its arguments (None: unknown) and its file end with it."""
        body, path, line = function
        before = scope.positional, scope.path, scope.line, scope.saved, scope.beneath
        left, loops = len(self.left), self.loops
        scope.beneath |= {*(scope.saved or {})}
        scope.path, scope.line, scope.saved, self.loops = path, line, {}, 0
        scope.positional = list(arguments or ())
        if arguments is None:
            scope.lose()
        try:
            self.run(body, scope)
            self.gather(left, scope, "return")
            scope.put_back()
        finally:
            scope.positional, scope.path, scope.line, scope.saved, scope.beneath = before
            self.loops = loops

    def uncalled(self, scope: Scope) -> None:
        """Read functions that only a caller from outside would start."""
        for name, function in [*self.functions.items()]:
            if name not in self._called:
                self.ended = ""
                inner = scope.copy()
                body, inner.path, inner.line = function
                inner.positional, inner.saved = None, {}
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


def _behind(node: Node) -> list[Node]:
    """The words of a command behind ``> FILE``, which the parser takes for more files."""
    parent = node.parent
    redirects = parent.named_children[1:] if parent is not None and parent.type == "redirected_statement" else []
    named = [[c for c in each.named_children if c.type != "file_descriptor"] for each in redirects]
    return [
        child
        for each, words in zip(redirects, named, strict=True)
        if each.type == "file_redirect"
        for child in words[1:]
    ]


def _torn(node: Node) -> bool:
    """Whether a line ends before a name: the parser takes ``A=1 > FILE`` and the next line for one command."""
    before, parent = node.prev_sibling, node.parent
    if before is None or parent is None or not before.type.endswith("_redirect"):
        return False
    start = parent.start_byte
    return b"\n" in (parent.text or b"")[before.end_byte - start : node.start_byte - start].replace(b"\\\n", b"")


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
