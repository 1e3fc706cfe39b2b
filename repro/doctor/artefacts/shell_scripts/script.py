"""What is read of a shell script, and what its branches leave."""

from __future__ import annotations

import itertools
import posixpath
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

from tree_sitter import Node

from repro.doctor.artefacts.shell_scripts.values import (
    Held,
    Part,
    Scope,
    Setting,
    Value,
    Word,
    known,
    put,
    said,
    text_of,
)
from repro.doctor.artefacts.shell_scripts.words import expand

__all__ = ["Command", "Merging", "Script", "Setting", "Sources", "heredoc", "parts_of", "starts", "substitute"]


@dataclass(frozen=True)
class Command:
    """A command that the script would run.

    Attributes:
        words: Its words.
        settings: Variables set in front of it.
        exported: What is exported when it runs.
        shortened: Arrays with flags of which it gets the first word alone: ``$ARGS`` for ``"${ARGS[@]}"``.
    """

    words: tuple[Word, ...]
    settings: tuple[Setting, ...]
    exported: dict[str, Setting]
    shortened: tuple[Word, ...] = ()


@dataclass
class Script:
    """What was read.

    Attributes:
        commands: In order.
        settings: Exports, unsets and prefixes in order.
        missing: Files near it that it sources and that are not there, with the word that names them.
        cut: Why reading stopped early; '' where it did not.
        broken: Whether something in it is no shell's.
        joined: Words that a backslash at a line's end makes of two, the second a flag.
        returns: The first line of each file that ends as on Windows: a backslash there continues nothing.
        hidden: Whether variables are exported whose names only a shell knows.
        doubts: See `Merging`.
    """

    commands: list[Command] = field(default_factory=list)
    settings: list[Setting] = field(default_factory=list)
    missing: list[Word] = field(default_factory=list)
    cut: str = ""
    broken: bool = False
    doubts: int = 0
    joined: list[Word] = field(default_factory=list)
    returns: list[Word] = field(default_factory=list)
    hidden: bool = False


def starts(command: Command) -> bool:
    """Whether it starts something that takes flags."""
    return sum(word.text.startswith("--") for word in command.words) > 2


_TAKE_TEXT = ("ssh", "tmux", "screen")
"""Programs whose last argument a shell reads."""


def is_shell(word: str) -> bool:
    """Whether a word names a shell."""
    return word.rpartition("/")[2] in ("bash", "sh")


def line_behind(words: Sequence[Word]) -> Word | None:
    """The line that a shell reads: ``bash -e -c LINE``; None where it reads a file."""
    for option, word in itertools.pairwise(words[1:]):
        if re.fullmatch(r"-[a-z]*c", option.text):
            return word
        if not option.text.startswith("-"):
            return None
    return None


def reads_text(word: str) -> bool:
    """Whether a word names a program that has a shell read what it is given, here or elsewhere."""
    return is_shell(word) or word.rpartition("/")[2] in _TAKE_TEXT


def handed_on(words: Sequence[Word]) -> tuple[Sequence[Word], Word | None]:
    """What stands before the line that a shell is to read, and that: ``srun ... bash -c LINE``, ``ssh HOST LINE``."""
    for at in range(1, len(words)):
        if is_shell(words[at].text) and (line := line_behind(words[at:])):
            return words[:at], line
    if reads_text(words[0].text) and not is_shell(words[0].text) and len(words) > 1 and " " in words[-1].text:
        return words[:-1], words[-1]
    return (), None


def parts_of(clause: Node) -> tuple[list[Node], list[Node]]:
    """The statements of a condition, and those of what follows it."""
    condition: list[Node] = []
    body: list[Node] = []
    current = body if clause.type == "else_clause" else condition
    for child in clause.children:
        if child.type == "then":
            current = body
        elif child.type in ("elif_clause", "else_clause"):
            continue
        elif child.is_named and child.type != "comment":
            current.append(child)
    return condition, body


T = TypeVar("T")
Shared = Callable[[str, Sequence[T | None]], T]
"""What is known of a name, by what ways leave of it."""


class Merging:
    """What branches leave of which only a shell knows which one is taken.

    Args:
        taken: Of what they leave different, whether the last change is taken, or what another one leaves; None for
            neither: what is known then is so in all ways.

    Attributes:
        doubts: 0 where that never made a difference; 1 where it did once, between two ways of which each is a reading.
    """

    def __init__(self, *, taken: bool | None) -> None:
        self.taken, self.doubts = taken, 0
        self._picked: set[int] = set()

    def scopes(self, scope: Scope, after: Sequence[Scope]) -> None:
        """Put together what branches left."""
        self._picked = set()
        scope.exported = self._each(
            scope.exported,
            [branch.exported for branch in after],
            lambda name, _: Setting(name, scope.unknown(name).value, scope.unknown(name)),
        )
        for name in {name for branch in (scope, *after) for name in branch.scalars}:
            held = [branch.scalars.get(name) for branch in after]
            there = [word for word in held if word is not None]
            if len({said(word) for word in there}) > 1 or (name in scope.scalars and there and len(there) < len(held)):
                scope.scalars[name] = scope.unknown(name)
            else:
                put(scope.scalars, name, self._one(name, None, held, scope.unknown))
        scope.arrays = self._each(scope.arrays, [branch.arrays for branch in after], scope.shared)
        for name, setting in scope.exported.items():
            if setting.value is not None and name in scope.scalars:
                scope.exported[name] = replace(setting, value=scope.scalars[name].value)
        scope.functions = {
            name: [*dict.fromkeys(body for branch in after for body in branch.functions.get(name, [None]))]
            for name in {name for branch in after for name in branch.functions}
        }
        scope.positional = after[0].positional
        if any(branch.positional != scope.positional for branch in after):
            scope.lose()
        for name in {name for branch in after for name in branch.attributes}:
            letters = {branch.attributes.get(name, "") for branch in after}
            scope.attributes[name] = "".join({*"".join(letters), *("r" if len(letters) > 1 else "")})
        if scope.saved is not None:
            saved = [branch.saved or {} for branch in after]
            scope.saved = {name: self._before(name, scope, saved) for name in {name for each in saved for name in each}}
        if self._picked:
            self.doubts += 1 if (len(after), len(self._picked)) == (2, 1) else 2

    def _before(self, name: str, scope: Scope, saved: Sequence[Mapping[str, Held]]) -> Held:
        """What comes back of a name behind a function; of one that is not its own in each branch only a shell knows."""
        held = [each[name] for each in saved if name in each]
        if len(held) == len(saved) and all(each == held[0] for each in held):
            return held[0]
        inner = scope.copy()
        inner.forget(name)
        return inner.held(name)

    def _each(self, before: Mapping[str, T], after: Sequence[Mapping[str, T]], shared: Shared[T]) -> dict[str, T]:
        held: dict[str, T] = {}
        for name in dict.fromkeys(name for had in after for name in had):
            put(held, name, self._one(name, before.get(name), [had.get(name) for had in after], shared))
        return held

    def _one(self, name: str, before: T | None, after: Sequence[T | None], shared: Shared[T]) -> T | None:
        """What all leave of a name, or else what is taken."""
        forms = [said(each) for each in after]
        if len({*forms}) == 1:
            return after[-1]
        last = max(at for at, each in enumerate(after) if each is not before)
        if self.taken is None:
            return shared(name, after)
        self._picked.add(last)
        return after[last] if self.taken else after[next(at for at, each in enumerate(forms) if each != forms[last])]


# -- what a command substitution of a shell script gives, where that can be said without running it


def substitute(node: Node, scope: Scope) -> Value | None:
    """What ``$(...)`` gives where a reader can say it: the script's folder, a here-document, an echo."""
    inner = node.named_children
    if len(inner) != 1:
        return None
    value = _output(inner[0], scope, 0)
    if value is None:
        return None
    *head, last = value or (Part(""),)
    return (*head, last._replace(text=last.text.rstrip("\n")))  # the line ends that a substitution drops


def _output(node: Node, scope: Scope, depth: int) -> Value | None:
    if depth > 8:
        return None
    if node.type == "redirected_statement" and node.named_children:
        for redirect in node.named_children[1:]:
            if redirect.type == "heredoc_redirect":
                read_by_cat = _simple(node.named_children[0], scope) in (["cat"], ["cat", "-"])
                return heredoc(redirect, scope) if read_by_cat else None
            if redirect.type != "file_redirect":
                return None
        return _output(node.named_children[0], scope, depth + 1)
    if node.type == "list":
        left, *_, right = node.named_children
        argv = _simple(left, scope)
        if argv and argv[0] == "cd" and _simple(right, scope) in (["pwd"], ["pwd", "-P"]):
            target = [word for word in argv[1:] if not word.startswith("-")]
            return (Part(_absolute(target[0])),) if len(target) == 1 else None
        return None
    argv = _simple(node, scope)
    if not argv:
        return None
    name, *operands = argv
    operands = [word for word in operands if not re.fullmatch(r"-[a-zA-Z-]*", word)]
    if name == "dirname" and len(operands) == 1:
        return (Part(posixpath.dirname(operands[0]) or "."),)
    if name == "basename" and len(operands) in (1, 2):
        return (Part(posixpath.basename(operands[0]).removesuffix("".join(operands[1:]))),)
    if name in ("realpath", "readlink") and len(operands) == 1:
        return (Part(_absolute(operands[0])),)
    if name == "echo" and argv[1:] == operands:
        return (Part(" ".join(operands)),)
    if name == "seq" and 1 <= len(operands) <= 3 and all(re.fullmatch(r"\d{1,6}", word) for word in operands):
        last = int(operands[-1])
        begin = int(operands[0]) if len(operands) > 1 else 1
        step = int(operands[1]) if len(operands) == 3 else 1
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


def heredoc(redirect: Node, scope: Scope) -> Value | None:
    """The text of a here-document, with what the shell puts into it; None where it has none."""
    start = next((c for c in redirect.named_children if c.type == "heredoc_start"), None)
    body = next((c for c in redirect.named_children if c.type == "heredoc_body"), None)
    if start is None or body is None:
        return None
    if set(text_of(start)) & set("'\"\\"):
        return (Part(text_of(body)),)
    return tuple(part for word in expand(body, scope, split=False) for part in word.value)


# -- which files a launch script reads: those of its own checkout, as its author meant them

_CHECKOUT = re.compile(r"/(?:slime|miles|[Rr]elax)/((?:scripts|examples)/.+)")
"""/root/slime is where the trainers' images have the checkout that a script is of."""


class Sources:
    """The files that a script may read: below its checkout, else below the folder above its own.

    Args:
        path: The script.
    """

    def __init__(self, path: Path) -> None:
        self._root = _root_of(path)
        self._relative = not path.is_absolute()

    def find(self, text: str, folder: Path) -> Path | None:
        """The file of a `source`, if it may be read.

        Args:
            text: What the script says.
            folder: That of the script that says it.
        """
        if self._root is None or "\0" in text or not text or text.startswith("~"):
            return None
        path = Path(posixpath.normpath(folder / text))
        try:
            if path.resolve().is_relative_to(self._root) and path.is_file():
                return self._named(path)
            if (match := _CHECKOUT.search(text)) and (self._root / match[1]).resolve().is_relative_to(self._root):
                return self._named(self._root / match[1]) if (self._root / match[1]).is_file() else None
        except (OSError, RuntimeError):
            pass
        return None

    def missing(self, text: str) -> bool:
        """Whether a path says of itself where it is, and is not there."""
        try:
            known = self._root is not None and "\0" not in text and text.startswith("/") and not _CHECKOUT.search(text)
            return known and not Path(posixpath.normpath(text)).exists()
        except OSError:
            return False

    def _named(self, path: Path) -> Path:
        """As the user named the script: from here, if that was."""
        here = Path.cwd()
        return path.relative_to(here) if self._relative and path.is_relative_to(here) else path


def _root_of(path: Path) -> Path | None:
    """The checkout that a script lies in; else the folder above its own."""
    try:
        if not path.is_file():
            return None
        folders = path.resolve().parents
        for folder in folders[:5]:
            if (folder / ".git").exists() or (folder / "scripts" / "models").is_dir():
                return folder
    except (OSError, RuntimeError):
        return None
    return folders[min(1, len(folders) - 1)]
