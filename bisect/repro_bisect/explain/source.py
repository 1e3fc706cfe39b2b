"""Where in the source an operation was asked for, and whether a change touched that place.

A change touches a statement if one of its lines is among those that the change removed (before) or added (after). The
lines of a statement are those from its first to its last; of a compound one (``if``, ``def`` …) those of its head. What
decorates a function is on the way of all that runs in it.
"""

from __future__ import annotations

import ast
import codecs
import io
import posixpath
import re
import textwrap
import tokenize
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import PurePosixPath

from repro_golden.recording.operations.stream import Frame, Operation, Stream
from repro_golden.repository.checkout import Checkout
from repro_golden.repository.git import GitFailedError

__all__ = ["Diff", "Place", "Sources", "Version", "read_diff"]

_HUNK = re.compile(r"^@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@")
_LINKS = 16
"""Symlinks that one name may lead through."""
_TOUCHING = 4
"""Hunks that are shown of a change that no stack crosses."""


@dataclass(frozen=True)
class Place:
    """One line of the source.

    Attributes:
        file: Relative to the repository, or as Python knows it outside of it.
        line: From 1.
        function: That it is in.
        text: The statement's lines, stripped of their common indent; "" where the file is not at hand.
        touched: Whether the change touched the statement.
        hunk: The part of the change that did, as `git diff` has it.
    """

    file: str
    line: int
    function: str
    text: str = ""
    touched: bool = False
    hunk: str = ""

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


@dataclass(frozen=True)
class Hunk:
    """One part of a change.

    Attributes:
        before: The lines that it removed.
        after: The lines that it added.
        text: As `git diff` has it.
    """

    before: range
    after: range
    text: str

    @property
    def computes(self) -> bool:
        """Whether a line of it is more than a comment."""
        lines = (line[1:].strip() for line in self.text.split("\n")[1:] if line[:1] in "+-")
        return any(line and not line.startswith("#") for line in lines)


@dataclass(frozen=True)
class Diff:
    """A change, by file: hunks under the file's name before (`before`) and after (`after`) it."""

    before: Mapping[str, Sequence[Hunk]] = field(default_factory=dict)
    after: Mapping[str, Sequence[Hunk]] = field(default_factory=dict)


def read_diff(checkout: Checkout, before: str, after: str) -> Diff:
    """What `git diff` says of two commits, without context and without the user's own diff settings."""
    quiet = ("--no-ext-diff", "--no-textconv", "--no-color", "--unified=0", "--find-renames", "--src-prefix=a/")
    text = checkout.git.text("diff-tree", "-r", "-p", *quiet, "--dst-prefix=b/", before, after)
    diff = Diff({}, {})
    names: dict[str, str] = {}
    hunk: list[str] = []
    at: tuple[range, range] | None = None

    def close() -> None:
        if at is not None:
            whole = Hunk(*at, "\n".join(hunk))
            for side, name in ((diff.before, names.get("---")), (diff.after, names.get("+++"))):
                if name is not None:
                    side.setdefault(name, []).append(whole)  # type: ignore[attr-defined]

    for line in _lines(text):
        if line.startswith("diff --git "):
            close()
            at, names = None, {}
        elif at is None and line.startswith(("--- ", "+++ ")):
            name = _unquoted(line[4:])
            names[line[:3]] = "" if name == "/dev/null" else name[2:]
        elif match := _HUNK.match(line):
            close()
            first = [int(match[1]), int(match[3])]
            count = [int(match[k]) if match[k] is not None else 1 for k in (2, 4)]
            at, hunk = (range(first[0], first[0] + count[0]), range(first[1], first[1] + count[1])), [line]
        elif at is not None:
            hunk.append(line)
    close()
    return diff


def _lines(text: str) -> list[str]:
    """Lines as git, ast and Python count them: a form feed ends none."""
    return text.replace("\r\n", "\n").removesuffix("\n").split("\n")


def _unquoted(name: str) -> str:
    """A file's name as it is, of a line of `git diff`: a tab follows a blank in it, and odd characters are quoted."""
    name = name.removesuffix("\t")
    if not name.startswith('"'):
        return name
    return codecs.escape_decode(name[1:-1].encode(errors="surrogateescape"))[0].decode(errors="surrogateescape")


@dataclass(frozen=True)
class Version:
    """The source of one version.

    Attributes:
        checkout: The repository.
        commit: Of it.
        hunks: What the change touched here, by file.
        side: ``before`` or ``after``: which lines of a hunk are this version's.
    """

    checkout: Checkout
    commit: str
    hunks: Mapping[str, Sequence[Hunk]]
    side: str

    def lines(self, hunk: Hunk) -> range:
        """Those of this version."""
        return hunk.before if self.side == "before" else hunk.after

    @cached_property
    def _links(self) -> Mapping[str, str]:
        """The symlinks of the commit that lead to something of it, with where they lead."""
        git, links = self.checkout.git, dict[str, str]()
        for entry in git.names("ls-tree", "--full-tree", "-r", "-z", self.commit):
            facts, _, name = entry.partition("\t")
            if facts.startswith("120000 "):
                target = posixpath.join(posixpath.dirname(name), git.text("cat-file", "blob", facts.split()[2]))
                links[name] = posixpath.normpath(target)
        return links

    def real(self, file: str) -> str:
        """A file's name in the commit, where Python knows it by that of a symlink."""
        for _ in range(_LINKS if self._links else 0):
            inside = [file, *map(str, PurePosixPath(file).parents)]
            link = next((name for name in inside if name in self._links), None)
            if link is None:
                break
            file = posixpath.normpath(self._links[link] + file.removeprefix(link))
        return file


class Sources:
    """Places of one version's recording."""

    def __init__(self, version: Version, stream: Stream) -> None:
        """Look up places of a recording in the source that made it."""
        self._version, self._stream = version, stream
        self._read = cache(self._file)
        self._touch = cache(self._touching)

    def touched(self, operation: Operation) -> bool:
        """Whether the change touched the statement that asked for an operation, or one that called it."""
        return any(self._touch(frame) is not None for frame in self._frames(operation))

    def place(self, operation: Operation) -> Place | None:
        """The line that is named for an operation: the innermost that was touched, else the subject's innermost."""
        frames = list(self._frames(operation))
        for frame in frames:
            if (hunk := self._touch(frame)) is not None:
                return self._place(frame, hunk)
        subject_frames = [frame for frame in frames if self._is_code(frame.file)]
        non_torch_frames = [frame for frame in frames if "/torch/" not in frame.file]
        first = next(iter(subject_frames or non_torch_frames or frames), None)
        return None if first is None else self._place(first, None)

    def stack(self, operation: Operation) -> list[Place]:
        """Its frames, innermost first; of a backward operation those of its forward one first."""
        return [self._place(frame, self._touch(frame)) for frame in self._frames(operation)]

    def mentions(self, operation: Operation) -> list[Place]:
        """Where no stack crosses the change: touched statements that define a name which the operation's lines read.

        A constant, a default, a field: what a statement far away computes with.
        """
        frames = list(self._frames(operation))
        read = {frame: self._names_read(frame) for frame in frames}
        fields = {name for _, attributes in read.values() for name in attributes}
        places = []
        for file, hunks in self._version.hunks.items():
            if self._stream.ran is not None and file not in self._stream.ran:
                continue  # a test's, another program's
            for hunk in hunks:
                for name, line, scope, field_ in self._defined(file, self._version.lines(hunk)):
                    reads = (f for f in frames if scope is None or (f.file == file and f.line in scope))
                    if (field_ and name in fields) or any(name in read[frame][0] for frame in reads):
                        places.append(self._place(Frame(file, line, name), hunk))
        return places[:_TOUCHING]

    def ran(self, operation: Operation | None) -> list[Place]:
        """Touched statements that ran, in the order in which they first did, one of each hunk.

        Those of files that the operation's stack crosses come first. Not what only binds a name: an import, the head of
        a function or a class.
        """
        crossed = {frame.file for frame in self._frames(operation)} if operation else set()
        places: dict[Hunk, Place] = {}
        for file, lines in sorted((self._stream.ran or {}).items(), key=lambda pair: pair[0] not in crossed):
            text = self._read(file)
            for line in lines:
                frame = Frame(file, line, text.function(line))
                hunk = self._touch(frame) if line not in text.names else None
                if hunk is not None:
                    places.setdefault(hunk, self._place(frame, hunk))
        return list(places.values())

    def _frames(self, operation: Operation) -> Iterator[Frame]:
        if operation.forward is not None:
            yield from self._stream.operations[operation.forward].stack
        yield from operation.stack

    def _is_code(self, file: str) -> bool:
        return not file.startswith("/") and "site-packages" not in file

    def _place(self, frame: Frame, hunk: Hunk | None) -> Place:
        lines, span = self._read(frame.file).lines, self._span(frame)
        text = "\n".join(lines[span.start - 1 : span.stop - 1]) if lines else ""
        return Place(
            frame.file, frame.line, frame.function, textwrap.dedent(text), hunk is not None, hunk.text if hunk else ""
        )

    def _touching(self, frame: Frame) -> Hunk | None:
        span, text = self._span(frame), self._read(frame.file)
        decorated = text.decorations(frame.line)
        for hunk in self._version.hunks.get(self._version.real(frame.file), ()):
            lines = self._version.lines(hunk)
            # what the other side alone has
            inside = not lines and span.start < lines.start + 1 < span.stop and hunk.computes
            if inside or any((line in span or line in decorated) and line in text.code for line in lines):
                return hunk
        return None

    def _span(self, frame: Frame) -> range:
        """The lines of the statement that a frame is in."""
        best = range(frame.line, frame.line + 1)
        for span in self._read(frame.file).statements:
            if frame.line in span:
                best = span  # the last that holds it is the innermost: they come in order of their beginning
        return best

    def _file(self, name: str) -> _Text:
        """A file of this version; an empty one where it is not at hand, and line by line where it is not our Python."""
        if name.startswith("/"):
            return _Text()
        where = f"{self._version.commit}:{self._version.real(name)}"
        try:
            text = self._version.checkout.git.text("cat-file", "blob", where).removeprefix("\ufeff")
        except GitFailedError:
            return _Text()
        try:
            return _Text.of(text, ast.parse(text))
        except (SyntaxError, ValueError, tokenize.TokenError):
            return _Text.unparsed(text)

    def _names_read(self, frame: Frame) -> tuple[set[str], set[str]]:
        """The variables and the attributes that a frame's statement reads."""
        span, tree = self._span(frame), self._read(frame.file).tree
        inside = [node for node in ast.walk(tree) if getattr(node, "lineno", 0) in span]
        return (
            {node.id for node in inside if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)},
            {node.attr for node in inside if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)},
        )

    def _defined(self, file: str, touched: range) -> Iterator[tuple[str, int, range | None, bool]]:
        """Names that touched statements bind: variables, fields, arguments with their defaults.

        Each with its line, the lines of the function that alone knows it (None where others may), and whether it may be
        read as a field: an argument may become one, and a variable of a module or class is one.
        """
        text = self._read(file)
        for node in ast.walk(text.tree):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                lines = range(node.lineno, (node.end_lineno or node.lineno) + 1)
                parameters = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
                yield from ((a.arg, a.lineno, lines, True) for a in parameters if a.lineno in touched)
            elif isinstance(node, (ast.Assign, ast.AnnAssign)) and _overlap(_head(node), touched):
                scope = text.scope(node.lineno)
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                for target in targets:
                    for name in ast.walk(target):
                        if isinstance(name, ast.Name) and isinstance(name.ctx, ast.Store):
                            yield name.id, node.lineno, scope, scope is None
                        elif isinstance(name, ast.Attribute) and isinstance(name.ctx, ast.Store):
                            yield name.attr, node.lineno, range(0), True


_BINDS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Import, ast.ImportFrom)


@dataclass(frozen=True)
class _Text:
    """A file of Python.

    Attributes:
        lines: Its text.
        statements: The lines of each statement, in the order in which they begin, the outer one first.
        code: Lines that hold more than a comment.
        names: Lines of those that bind a name and compute nothing: imports, heads of functions and classes, docstrings.
        functions: The lines of each function, with its name, the outer one first.
        decorators: The lines of each function that is decorated, with those of its decorators.
        tree: It, parsed.
    """

    lines: Sequence[str] = ()
    statements: Sequence[range] = ()
    code: frozenset[int] = frozenset()
    names: frozenset[int] = frozenset()
    functions: Sequence[tuple[range, str]] = ()
    decorators: Sequence[tuple[range, range]] = ()
    tree: ast.Module = field(default_factory=lambda: ast.Module([], []))

    @classmethod
    def of(cls, text: str, tree: ast.Module) -> _Text:
        """What a parsed file holds."""
        statements = [node for node in ast.walk(tree) if isinstance(node, ast.stmt)]
        spans = sorted((_head(node) for node in statements), key=lambda span: (span.start, -span.stop))
        binding = [node for node in statements if isinstance(node, _BINDS) or _is_text(node)]
        functions = [n for n in statements if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef))]
        named = [(range(node.lineno, (node.end_lineno or node.lineno) + 1), node.name) for node in functions]
        decorators = [
            (
                range(node.lineno, (node.end_lineno or node.lineno) + 1),
                range(node.decorator_list[0].lineno, node.lineno),
            )
            for node in statements
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)) and node.decorator_list
        ]
        return cls(
            _lines(text),
            spans,
            _code(text),
            frozenset(line for node in binding for line in _head(node)),
            sorted(named, key=lambda pair: pair[0].start),
            decorators,
            tree,
        )

    @classmethod
    def unparsed(cls, text: str) -> _Text:
        """A file in another Python than ours: each line is a statement."""
        lines = _lines(text)
        code = [n for n, line in enumerate(lines, 1) if line.strip() and not line.lstrip().startswith("#")]
        return cls(lines, [range(n, n + 1) for n in code], frozenset(code))

    def decorations(self, line: int) -> set[int]:
        """The lines that decorate what holds a line."""
        return {n for held, lines in self.decorators if line in held for n in lines}

    def scope(self, line: int) -> range | None:
        """The lines of the innermost function that holds a line."""
        return next((span for span, _ in reversed(self.functions) if line in span), None)

    def function(self, line: int) -> str:
        """The name of the innermost function that holds a line, as Python has it for a stack."""
        return next((name for span, name in reversed(self.functions) if line in span), "<module>")


def _is_text(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _overlap(a: range, b: range) -> bool:
    return a.start < b.stop and b.start < a.stop


def _head(node: ast.stmt) -> range:
    """The lines of a statement; of a compound one those up to the end of what stands before its body."""
    inner = (ast.stmt, ast.ExceptHandler, ast.match_case)
    parts = [part for part in ast.iter_child_nodes(node) if not isinstance(part, inner)]
    if not any(isinstance(part, inner) for part in ast.iter_child_nodes(node)):
        return range(node.lineno, (node.end_lineno or node.lineno) + 1)
    every = [deep for part in parts for deep in ast.walk(part) if isinstance(deep, (ast.expr, ast.arg))]
    first = min([node.lineno, *(deep.lineno for deep in every)])
    return range(first, max([node.lineno, *(deep.end_lineno or deep.lineno for deep in every)]) + 1)


def _code(text: str) -> frozenset[int]:
    """The lines of more than a comment."""
    empty = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return frozenset(line for t in tokens if t.type not in empty for line in range(t.start[0], t.end[0] + 1))
