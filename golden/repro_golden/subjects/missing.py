"""What a program did not find in a worktree, and what lies in the user's checkout where no commit holds it."""

from __future__ import annotations

import itertools
import json
import os
import re
import shlex
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path, PurePosixPath

from repro_golden.base.errors import ReproError
from repro_golden.repository.checkout import Place
from repro_golden.repository.git import Git
from repro_golden.repository.linked import in_few_words
from repro_golden.repository.submodules import empty_in, fix_for

__all__ = ["found_missing", "links_in", "made_in", "missing_from", "names_fix"]

_SAYS_SO = re.compile(
    r"no such file|\berrno 2\b|FileNotFoundError|not found|not exist|n't exist|no file\b"
    r"|(?:cannot|can't|could not|couldn't|unable to|failed to) (?:open|access|find|stat|read|load)|path_or_model_id",
    re.IGNORECASE,
)
"""What Python, shells, numpy, torch, datasets and transformers print of a path at which there is nothing.

It need not be exact: what counts is that the line names something which is in the checkout and not in the worktree.
"""
_QUOTED = re.compile(r"'([^'\n]+)'|\"([^\"\n]+)\"|<([^<>\n]+)>|`([^`\n]+)`")
_MODULE = re.compile(
    r"No module named '([\w.]+)'|cannot import name '(\w+)' from (?:partially initialized module )?'([\w.]+)'"
)
_IN_CHECKOUT = re.compile(r" \(([^\n()]+) is in your checkout, where git ")
_BUILT = "is built in your checkout"
_EMPTY = "never fetched, so"
_NOT_BUILT_HERE = frozenset({"build", "dist", "site-packages", "dist-packages"})
"""Folders that hold copies of what is built."""
_LINES, _LONGEST, _MADE = 50, 4096, 200


def missing_from(place: Place, output: str, linked: Sequence[str], *, sure: bool = False) -> str:
    """Why a program does not find a file, in words that name the cure; '' where it is for another reason.

    Args:
        place: The worktree that it ran in.
        output: The end of its output.
        linked: What is linked into worktrees already.
        sure: Leave out what may have another reason too: a module that an empty submodule may hold.
    """
    if place.home is None:
        return ""
    ended = output.splitlines()[-_LINES:]
    lines = [line for line in ended if _SAYS_SO.search(line)]
    matches = (match for line in reversed(ended) for match in _MODULE.findall(line))
    modules = [whole or f"{package}.{name}" for whole, name, package in matches]
    try:
        checkout = _Untracked(Git(place.home), place.root)
        texts = dict.fromkeys(text for line in reversed(lines) for text in _paths(line))
        for text in texts:
            for name in checkout.named_by(text):
                if (link := checkout.top_of(name)) and not any(PurePosixPath(link).is_relative_to(n) for n in linked):
                    return checkout.told(name, link)
        for module in modules:
            if built := checkout.built(module):
                return built
        return _in_submodule(place.root, texts, modules, sure=sure)
    except (ReproError, OSError):  # the checkout of another machine
        return ""


def _in_submodule(root: Path, texts: Collection[str], modules: Sequence[str], *, sure: bool) -> str:
    """What to do where a file or module may lie in a submodule that has nothing in it; '' where none does."""
    if not (texts or modules) or not (empty := empty_in(Git(root))):
        return ""
    paths = {PurePosixPath(path): path for path in empty}
    files = [Path(os.path.normpath(text)) for text in texts]
    files = [path.relative_to(root) if path.is_relative_to(root) else path for path in files]
    named = [path for path in paths if any(file.is_relative_to(path) for file in files)]
    for parts in (module.split(".") for module in modules):  # sys.path may have the folder above the submodule
        named += [path for path in paths if any(path.parts[-k:] == tuple(parts[:k]) for k in range(1, len(parts) + 1))]
    if not named and (sure or not modules):
        return ""
    names = list(dict.fromkeys(paths[path] for path in named or paths))
    what = "is a submodule that was" if len(names) == 1 else "are submodules that were"
    perhaps = "" if named else ", if that is what it lacks"
    fix = fix_for(names[0], named=empty[names[0]])
    return f"{in_few_words(names)} {what} {_EMPTY} empty here: {fix}{perhaps}"


def links_in(message: str) -> list[str]:
    """What a message of `missing_from` says to link."""
    return [shlex.split(link)[0] for link in re.findall(r"`--link (.+?)` before --", message)]


def made_in(place: Place) -> tuple[str, ...]:
    """Files of a worktree that git does not track and the checkout has, too: its program made them, up to `_MADE`."""
    if place.home is None:
        return ()
    try:
        names = Git(place.root).names("ls-files", "--others", "-z")
    except (ReproError, OSError):
        return ()
    names = [name for name in names if _NOT_BUILT_HERE.isdisjoint(name.split("/"))]
    made = (name for name in names if not (place.root / name).is_symlink() and os.path.lexists(place.home / name))
    return tuple(itertools.islice(made, _MADE))


def found_missing(message: str) -> tuple[str, str]:
    """The message before what `missing_from` adds of a file of the checkout, and that file; it and '' where none is."""
    match = _IN_CHECKOUT.search(message)
    return (message[: match.start()], match[1]) if match else (message, "")


def names_fix(message: str) -> bool:
    """Whether a message says what to do about something that a program did not find."""
    return bool(links_in(message)) or _BUILT in message or _EMPTY in message


def _paths(line: str) -> Iterator[str]:
    """What in a line may be a path: what is quoted, what stands between colons, words."""
    quoted = ["".join(match) for match in _QUOTED.findall(line)]
    parts = [part.strip() for part in re.split(r":(?:\s|$)", line)]
    marks = "'\"`<>()[],;:"
    terms = [word.lstrip(marks).rstrip(f"{marks}.") for word in line.split()]
    yield from (text for text in (*quoted, *parts, *terms) if text and "\0" not in text and len(text) < _LONGEST)


class _Untracked:
    """What a checkout has, a worktree of it has not, and git does not track."""

    def __init__(self, git: Git, worktree: Path) -> None:
        self._git, self._root = git, worktree
        files = [PurePosixPath(name) for name in git.names("ls-files", "-z")]
        self._folders = {parent for file in files for parent in file.parents}
        self._tracked = {*files, *self._folders}

    def named_by(self, text: str) -> list[str]:
        """What a program may have meant by a path, relative to the checkout; it may have started in another folder."""
        path = Path(os.path.normpath(text))
        for top in (self._root, self._root.resolve()):
            if path.is_relative_to(top):
                path = path.relative_to(top)
        parts = [part for part in path.parts if part != ".."]
        if path.is_absolute() or not parts or parts[0] == ".git":
            return []
        name = PurePosixPath(*parts)
        if self._is_missing(name):
            return [str(name)]
        below = [str(folder / name) for folder in self._folders if folder.parts and self._is_missing(folder / name)]
        return below if len(below) == 1 else []

    def _is_missing(self, name: PurePosixPath) -> bool:
        return not os.path.lexists(self._root / name) and os.path.lexists(self._git.folder / name)

    def built(self, module: str) -> str:
        """What to do where a module was built in the checkout alone; '' where none was."""
        path = module.replace(".", "/")
        specs = [f":(top,glob)**/{path}{ending}" for ending in (".so", ".*.so", ".pyd", ".*.pyd")]
        built_files = [PurePosixPath(name) for name in self._git.names("ls-files", "--others", "-z", "--", *specs)]
        built_files = [name for name in built_files if not _NOT_BUILT_HERE & set(name.parts) and self._is_missing(name)]
        if not built_files:
            return ""
        file = min(built_files, key=lambda name: len(name.parts))
        return (
            f"{module} {_BUILT} ({file}, which git does not track) and in no commit's worktree: have the command build "
            'it, or setup = "{python} setup.py build_ext --inplace" in [subject] of a case, or what builds it here'
        )

    def top_of(self, name: str) -> str:
        """The highest folder above a path, or the path itself, in which git tracks nothing; '' where it is tracked.

        The folder around a file among others that no commit holds: what belongs to it is not always missed aloud.
        """
        path = PurePosixPath(name)
        for part in [*reversed(path.parents), path]:
            if part.parts and part not in self._tracked:
                if part.parent.parts and not (self._git.folder / part).is_dir() and self._among_others(part):
                    part = part.parent
                return f"{part}/" if (self._git.folder / part).is_dir() else str(part)
        return ""

    def _among_others(self, path: PurePosixPath) -> bool:
        beside = [path.parent / other.name for other in (self._git.folder / path.parent).iterdir() if other.is_file()]
        return any(other != path and other not in self._tracked and self._is_missing(other) for other in beside)

    def told(self, name: str, link: str) -> str:
        """The message."""
        listed = self._git.names("ls-files", "--others", "--exclude-standard", "-z", "--", f":(top,literal){name}")
        why = "where git does not track it (commit it if it is code)" if listed else "where git ignores it"
        word = shlex.quote(link)
        return (
            f"{name} is in your checkout, {why}, so no commit's worktree has it: `--link {word}` before --, or "
            f"link = {json.dumps([link], ensure_ascii=False)} in [subject] of the case, puts it there (what a program "
            "writes to it is written to yours)"
        )
