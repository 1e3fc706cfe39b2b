"""Submodules of commits: what they are called, which repositories of them are here, and which were never fetched.

One of which nothing is here is an empty folder in a worktree, as in a clone that was made without it. It refuses no
range of a program that does without, but a program may go another way where it finds nothing.
"""

from __future__ import annotations

import functools
import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from repro_golden.repository.checkout import Checkout
from repro_golden.repository.git import Git, GitFailedError
from repro_golden.repository.linked import in_few_words
from repro_golden.repository.working import SUBMODULE, is_absent, modes_of

__all__ = ["empty_in", "entries_of", "fetched", "fix_for", "names_of", "never_fetched", "repositories_of"]

_UPDATE = "`git submodule update --init --recursive`"
_SYMLINK = "120000"


# -- of one commit


def entries_of(git: Git, commit: str) -> tuple[list[str], dict[str, str]]:
    """The plain files of a commit, and the commit of each of its submodules, by path.

    Args:
        git: On its repository.
        commit: Its id.
    """
    files, links = list[str](), dict[str, str]()
    for entry in git.names("ls-tree", "--full-tree", "-r", "-z", commit):
        facts, _, path = entry.partition("\t")
        mode, _, object_id = facts.split()
        if mode == SUBMODULE:
            links[path] = object_id
        elif mode != _SYMLINK:
            files.append(path)
    return files, links


def names_of(git: Git, commit: str) -> dict[str, str]:
    """The names of a commit's submodules, by path, as far as its .gitmodules has them.

    Raises:
        GitFailedError: git cannot read that.
    """
    if not git("ls-tree", "--full-tree", commit, ".gitmodules").startswith(b"100"):
        return {}
    text = git("cat-file", "blob", f"{commit}:.gitmodules")
    # not by --blob, where what is damaged is as good as nothing
    ask = ("config", "--null", "--file", "-", "--get-regexp", r"^submodule\..*\.path$")
    entries = (os.fsdecode(entry).partition("\n") for entry in git(*ask, given=text, none=1).split(b"\0") if entry)
    return {path: key.removeprefix("submodule.").removesuffix(".path") for key, _, path in entries}


def repositories_of(above: Sequence[Path], name: str, here: Path) -> list[Path]:
    """The git folders of a submodule that are here.

    Args:
        above: Those of what it is a submodule of.
        name: What it is called there; its path where it has no name.
        here: Where it is in the user's checkout. One that was cloned there keeps its git folder in itself.
    """
    return [folder for folder in (*(folder / "modules" / name for folder in above), here / ".git") if folder.is_dir()]


def fix_for(path: str, *, named: bool, cloned: bool = False, at: str = "a commit that has it") -> str:
    """How a submodule, or a commit of it, comes here.

    Args:
        path: Where it is.
        named: Whether .gitmodules says where it comes from.
        cloned: Whether there is a repository of it here.
        at: A commit that has it.
    """
    if named:
        return f"{_UPDATE} in your checkout, at {at}, fetches it where its remote still has it"
    if cloned:
        return f"`git -C {shlex.quote(path)} fetch` in your checkout brings it where its remote still has it"
    return f"no .gitmodules says where it comes from; a clone of it at {path} in your checkout brings it"


# -- of a checkout


def fetched(git: Git, common: Path) -> dict[str, Path]:
    """The git folders of all submodules that are here, also of those inside others, by what each is called.

    Args:
        git: In the checkout's root.
        common: The repository's common git folder.
    """
    git_folder = Path(git.text("rev-parse", "--absolute-git-dir"))  # a linked worktree keeps what was made there
    folders = sorted({*_modules(common / "modules"), *_modules(git_folder / "modules")})
    return {str(folder.relative_to(common)): folder for folder in folders} | dict(_cloned(git, ""))


def _modules(folder: Path) -> Iterator[Path]:
    for path in folder.iterdir() if folder.is_dir() else ():
        if (path / "HEAD").is_file() and (path / "objects").is_dir():
            yield path
            yield from _modules(path / "modules")
        elif path.is_dir():
            yield from _modules(path)


def _cloned(git: Git, above: str) -> Iterator[tuple[str, Path]]:
    """Those that keep their git folder in themselves."""
    for path in _links_in(git):
        folder = git.folder / path / ".git"
        if folder.is_dir():
            yield f"{above}{path}/.git", folder
            yield from ((f"{above}{path}/.git/{m.relative_to(folder)}", m) for m in _modules(folder / "modules"))
            yield from _cloned(git.at(git.folder / path), f"{above}{path}/")


def empty_in(git: Git, above: str = "") -> dict[str, bool]:
    """The submodules of a worktree that have nothing in them, also inside others; whether .gitmodules names each.

    Args:
        git: In its root.
        above: Put before each path.
    """
    empty = dict[str, bool]()
    links = _links_in(git)
    names = names_of(git, "HEAD") if links else {}
    for path in links:
        folder = git.folder / path
        if is_absent(folder):
            empty[f"{above}{path}"] = path in names
        elif (folder / ".git").exists():
            empty |= empty_in(git.at(folder), f"{above}{path}/")
    return empty


def _links_in(git: Git) -> list[str]:
    return [name for name, mode in modes_of(git).items() if mode == SUBMODULE]


# -- of a range


class _Empty(NamedTuple):
    """A submodule of which nothing is here: its path, its commit, and whether .gitmodules says where it comes from."""

    path: str
    commit: str
    named: bool


def never_fetched(checkout: Checkout, parents: Mapping[str, Sequence[str]], paths: Sequence[str]) -> list[str]:
    """What is to be known of each submodule that some commits change and that was never fetched here, in one line.

    Args:
        checkout: The repository.
        parents: The commits, each with those that it is compared with.
        paths: What of the repository decides numbers.
    """
    git, changing, having = checkout.git, dict[str, list[str]](), dict[str, tuple[str, bool]]()
    above = [checkout.common, Path(git.text("rev-parse", "--absolute-git-dir"))]

    @functools.cache
    def empty(commit: str) -> frozenset[_Empty]:
        try:
            return frozenset(_empty(git, above, commit, checkout.root, ""))
        except GitFailedError:  # a damaged .gitmodules, with which no worktree is made
            return frozenset()

    for commit, before in _changing(git, parents, paths):
        for submodule in sorted(empty(commit) ^ empty(before)):
            changing.setdefault(submodule.path, []).append(commit)
            having.setdefault(submodule.path, (commit if submodule in empty(commit) else before, submodule.named))
    return [_told(path, list(dict.fromkeys(changing[path])), *having[path]) for path in having]


def _told(path: str, commits: Sequence[str], having: str, named: bool) -> str:
    names, verb = in_few_words([commit[:10] for commit in commits]), "change" if len(commits) > 1 else "changes"
    fix = fix_for(path, named=named, at=having[:10])
    return f"{path} is a submodule that was never fetched here, and {names} {verb} it: its folder was empty ({fix})"


def _changing(git: Git, parents: Mapping[str, Sequence[str]], paths: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Each commit that has a submodule of some paths otherwise than one before it, and that one."""
    pairs = [(commit, before) for commit, those in parents.items() for before in those]
    asked = ("diff-tree", "--stdin", "--always", "-r", "-z", "--raw", "--no-renames", "--ignore-submodules=none")
    given = "".join(f"{commit} {before}\n" for commit, before in pairs)  # the second in its parents' place
    output, rest = iter(git(*asked, given=given.encode()).split(b"\0")), iter(pairs)
    pair, wanted = ("", ""), [PurePosixPath(path) for path in paths]
    changing = dict[tuple[str, str], None]()
    for entry in output:
        if not entry.startswith(b":"):  # the commit of the next pair, or the end
            pair = next(rest, pair)
            continue
        path = PurePosixPath(os.fsdecode(next(output)))
        if SUBMODULE.encode() in entry[1:].split(b" ")[:2] and any(map(partial(_overlap, path), wanted)):
            changing[pair] = None
    return iter(changing)


def _overlap(path: PurePosixPath, other: PurePosixPath) -> bool:
    return path.is_relative_to(other) or other.is_relative_to(path)


def _empty(git: Git, above: Sequence[Path], commit: str, here: Path, prefix: str) -> Iterator[_Empty]:
    """The submodules of a commit of which nothing is here, also inside others.

    Args:
        git: On its repository.
        above: Its git folders.
        commit: Its id.
        here: Where it is in the user's checkout.
        prefix: Put before each path.
    """
    links = entries_of(git, commit)[1]
    names = names_of(git, commit) if links else {}
    for path, link in links.items():
        folders = repositories_of(above, names.get(path, path), here / path)
        if not folders and is_absent(here / path):
            yield _Empty(f"{prefix}{path}", link, path in names)
        for folder in folders:
            inside = git.with_options(f"--git-dir={folder}")
            if inside.tells("cat-file", "-e", f"{link}^{{commit}}"):
                yield from _empty(inside, [folder], link, here / path, f"{prefix}{path}/")
                break
