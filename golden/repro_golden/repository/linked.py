"""Files of the user's checkout that no commit holds, put into worktrees: what every commit reads alike.

Each file is a symlink, in folders that are the worktree's own. What a program makes, replaces, renames or removes there
stays in the worktree. A write into a file in place goes through its link; nothing prevents that, so it is looked for.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import TypeAlias

from repro_golden.base.errors import ReproError
from repro_golden.case.file import Case
from repro_golden.repository.code_key import not_code
from repro_golden.repository.git import Git

__all__ = ["LEADS_OUT", "Linked", "beside_commits", "in_few_words", "leads_out", "refuse_tracked", "what_decides"]

_Facts: TypeAlias = tuple[int, ...] | None
"""Size, times of modification and of change, and inode of a file; None for a folder."""
_NOT_DATA = (".git", "__pycache__")
"""Folders that are no data: as little of them is part of a probe's key."""
_SHOWN = 4
"""Files that a sentence names."""


class Linked:
    """What is linked into every worktree, as it was when this was made.

    What git tracks is never linked, since each commit has its own; and what a commit has stays as the commit has it.
    """

    def __init__(self, git: Git, names: Sequence[str]) -> None:
        """Look at what is to be linked.

        Args:
            git: In the root of the user's checkout.
            names: Folders and files, relative to it.

        Raises:
            ReproError: one of them is not there, or holds nothing but what git tracks.
        """
        self._root, self._names = git.folder, [PurePosixPath(name) for name in names]
        specs = [f":(top,literal){name}" for name in self._names]
        self._tracked = set(git.names("ls-files", "-z", "--", *specs)) if specs else set()
        self._seen: dict[str, _Facts] = {}
        for name in self._names:
            if not os.path.lexists(self._root / name):
                raise ReproError(
                    f"there is no {name} in {self._root} to link into worktrees: correct --link (or subject.link), a "
                    "path in your checkout"
                )
            entries = self._below(name)
            if not any(facts for facts in entries.values()) and self._holds_tracked(name):
                raise ReproError(
                    f"git tracks {name}, so every commit has its own and none is linked: leave it out of --link (or "
                    "subject.link)"
                )
            self._seen |= entries

    def _holds_tracked(self, name: PurePosixPath) -> bool:
        return any(PurePosixPath(path).is_relative_to(name) for path in self._tracked)

    def put(self, tree: Path) -> None:
        """Link everything into a worktree that holds its commit's files."""
        commits_own: set[str] = set()  # and what would lie behind it: a commit's symlink may lead anywhere
        for name, facts in self._seen.items():
            target = tree / name
            if name.rpartition("/")[0] in commits_own:
                commits_own.add(name)
            elif os.path.lexists(target):
                if facts is not None or target.is_symlink() or not target.is_dir():
                    commits_own.add(name)
            elif facts is None:
                target.mkdir()
            else:
                target.symlink_to(self._root / name)

    def check(self) -> None:
        """Refuse runs during which a linked file was changed, made or removed in the checkout.

        Raises:
            ReproError: naming the file.
        """
        now: dict[str, _Facts] = {}
        for name in self._names:
            now |= self._below(name)
        for file in sorted(now.keys() | self._seen.keys()):
            before, after = self._seen.get(file, ()), now.get(file, ())
            if before != after:
                what = "was made" if before == () else "was removed" if after == () else "was changed"
                raise ReproError(
                    f"{file} of your checkout, which is linked into every worktree, {what} since this command began, "
                    "by the program or beside it, and nothing of the last run was kept: let the program write "
                    "elsewhere, and leave the file alone meanwhile"
                )

    def _below(self, name: PurePosixPath) -> dict[str, _Facts]:
        """What of the checkout is linked for a name, each folder before what lies in it, with the folders above it."""
        parents: dict[str, _Facts] = {str(parent): None for parent in reversed(name.parents) if parent.parts}
        return parents | dict(self._walked(str(name), ()))

    def _walked(self, name: str, above: tuple[tuple[int, int], ...]) -> Iterator[tuple[str, _Facts]]:
        if name in self._tracked:
            return
        path = self._root / name
        try:
            try:
                status = path.stat()
            except OSError:  # a link to nowhere, or in a circle
                status = path.lstat()
        except OSError:  # gone
            return
        place = (status.st_dev, status.st_ino)
        if not stat.S_ISDIR(status.st_mode):
            yield name, (status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino)
            return
        if place in above or not os.access(path, os.R_OK | os.X_OK):  # linked as a whole
            yield name, (status.st_ino,)
            return
        yield name, None
        for entry in sorted(path.iterdir()):
            if entry.name not in _NOT_DATA:
                yield from self._walked(f"{name}/{entry.name}", (*above, place))


# -- what no worktree has, and may decide all the same


def beside_commits(git: Git, linked: Sequence[str] = (), since: float = 0.0) -> list[str]:
    """Files of a checkout that git does not track, and folders (``data/``) in which it tracks none; files come first.

    What recording writes, bytecode and Python environments are left out.

    Args:
        git: In the root of the checkout.
        linked: Those that every worktree has too are left out.
        since: Of those, what was written since then; seconds, as `time.time` has it.
    """
    specs = [":(top)", *(f":(top,exclude,literal){name}" for name in [*not_code(git.folder), *linked])]
    listed = git.names("ls-files", "--others", "--directory", "-z", "--", *specs)
    names = [
        name
        for name in listed
        if PurePosixPath(name).name not in _NOT_DATA
        and not name.endswith(".pyc")
        and not (git.folder / name / "pyvenv.cfg").exists()
        and (not since or _written_since(git.folder / name, since))
    ]
    return sorted(names, key=lambda name: (name.endswith("/"), name))


def _written_since(path: Path, since: float) -> bool:
    files = (path, *(Path(folder, name) for folder, _, names in os.walk(path) for name in names))
    return any(file.is_file() and file.stat().st_mtime >= since for file in files)


def what_decides(git: Git, linked: Sequence[str]) -> str:
    """What may decide where a checkout and a worktree of its commit say otherwise, with the cure.

    Args:
        git: In the root of the checkout.
        linked: What every worktree has of it already.
    """
    names = beside_commits(git, linked)
    if not names:
        return (
            "what decides lies outside git, and your checkout has no other files: let the program depend neither on "
            "the folder that it runs in nor on its path"
        )
    if len(names) > 1:
        return (
            f"what decides lies outside git, and no worktree has {in_few_words(names)} of your checkout: link which of "
            "them it is (--link before --, or link in [subject] of the case), or commit it"
        )
    return (
        f"what decides lies outside git, and may be {names[0]} of your checkout, which no worktree has: `--link "
        f"{shlex.quote(names[0])}` before --, or link = {json.dumps(names, ensure_ascii=False)} in [subject] of the "
        "case, puts it there"
    )


LEADS_OUT = "leads out of a worktree"


def leads_out(git: Git, message: str) -> str:
    """What to write for a path by which a program in a worktree found nothing, as it lies beside the checkout.

    Args:
        git: In the root of the checkout.
        message: What the program said. It may have started in any folder that has files of git's.

    Returns:
        Words for behind the message; '' where no such path is in it, or several files may be meant.
    """
    texts = [text for text in re.findall(r"[^\s'\"`<>:;,=()\[\]]+", message) if ".." in PurePosixPath(text).parts]
    if not texts:
        return ""
    root = str(git.folder)
    folders = {str(parent) for name in git.names("ls-files", "-z") for parent in PurePosixPath(name).parents}
    for text in texts:
        targets = {os.path.normpath(f"{root}/{folder}/{text}") for folder in folders}
        there = [path for path in targets if not f"{path}/".startswith(f"{root}/") and os.path.lexists(path)]
        if len(there) == 1 and there[0] != "/" and not PurePosixPath(text).is_absolute():
            return f"; {text} {LEADS_OUT}, which lies elsewhere than your checkout: write {there[0]}"
    return ""


def in_few_words(names: Sequence[str]) -> str:
    """``a, b, c and 4 more``."""
    shown = names if len(names) <= _SHOWN + 1 else names[:_SHOWN]
    more = f" and {len(names) - len(shown)} more" if len(shown) < len(names) else ""
    return ", ".join(shown) + more


# -- the checkout's own files, named by a command


def refuse_tracked(git: Git, case: Case) -> None:
    """Refuse a command that names a file of the checkout which each commit has for itself.

    Args:
        git: In the root of the user's checkout.
        case: The case.

    Raises:
        ReproError: one is named, with what to write instead.
    """
    for name in dict.fromkeys(_below_root(case, git.folder)):
        inside = f":(top,literal){name}"
        if not git.names("ls-files", "-z", "--", inside):
            continue
        others = git.names("ls-files", "--others", "-z", "--", inside)
        if all(path.endswith(".pyc") for path in others):
            raise ReproError(
                f"the command names your checkout's own {name}, which git tracks: every commit would run that one "
                f"and not its own; write {name} instead"
            )


def _below_root(case: Case, root: Path) -> Iterator[str]:
    """What a program's commands and variables name below ``{root}``, as such or by its path; relative to it."""
    subject, tops = case.subject, ("{root}/", *dict.fromkeys((f"{root}/", f"{root.resolve()}/")))
    for word in [*subject.words, *subject.env.values()] if subject.templates else ():
        for part in [word, *re.split(r"[=:,;|&()<>\"'\s]+", word)]:
            for top in (top for top in tops if part.startswith(top)):
                name = os.path.normpath(part.removeprefix(top).lstrip("/") or ".")
                if name != "." and not name.startswith(".."):
                    yield name
