"""The repository that is guarded, as the user has it. Nothing here modifies it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import git

from repro_golden.canonical import digest
from repro_golden.case import Case
from repro_golden.children import Place
from repro_golden.errors import ReproError

__all__ = ["Checkout", "find_checkout", "joined_trees", "subject_tree", "whole_tree"]


@dataclass(frozen=True)
class Checkout:
    """A working tree.

    Attributes:
        root: Its top folder.
        state: Folder for everything a bisect or a recording keeps: ``repro`` in git's common folder, shared by all
            worktrees and never in the checkout.
    """

    root: Path
    state: Path

    @property
    def scratch(self) -> Path:
        """Where runs under way are kept."""
        return self.state / "tmp"

    def place(self, case: Case) -> Place:
        """The subject as it lies in the working tree; its commit is known only when nothing under it was changed."""
        with git.Repo(self.root) as repo:
            if not repo.head.is_valid():
                return Place(self.root)
            commit = repo.head.commit
            if not case.subject.path:
                return Place(self.root, commit.hexsha, None)
            paths = [*case.paths(), *(f":(exclude){name}" for name in NOT_CODE)]
            if repo.git.status("--porcelain", "--", *paths):
                return Place(self.root)
            tree = joined_trees([subject_tree(commit, path) for path in case.paths()])
            return Place(self.root, commit.hexsha, tree)


NOT_CODE = ("golden", ".dvc", ".dvcignore")
"""What recording itself writes at a repository's root: it is no part of the code of a subject that is all of it."""


def subject_tree(commit: git.Commit, path: str) -> str | None:
    """Git's hash of the subject's folder in a commit: equal trees are equal code. None when the folder is absent."""
    if path in (".", "./"):
        return whole_tree(f"{item.name} {item.hexsha}" for item in commit.tree)
    try:
        return str((commit.tree / path.rstrip("/")).hexsha)
    except KeyError:
        return None


def joined_trees(trees: Sequence[str | None]) -> str | None:
    """One hash for several paths; None where a commit has none of them."""
    if len(trees) == 1 or not any(trees):
        return trees[0]
    return digest("paths", *(tree or "" for tree in trees))


def whole_tree(entries: Iterable[str]) -> str:
    """What stands for a whole repository's code: a digest over its top entries, ``name hash`` each."""
    return digest("tree", *sorted(entry for entry in entries if entry.split(" ")[0] not in NOT_CODE))


def find_checkout(start: Path) -> Checkout:
    """The checkout that holds `start`.

    Raises:
        ReproError: not inside a git repository with a working tree.
    """
    try:
        with git.Repo(start, search_parent_directories=True) as repo:
            if repo.working_tree_dir is None:
                raise ReproError(f"{start} is a bare repository: run repro in a checkout of it")
            return Checkout(Path(repo.working_tree_dir), Path(repo.common_dir).resolve() / "repro")
    except (git.InvalidGitRepositoryError, git.NoSuchPathError):
        raise ReproError(f"{start} is not inside a git repository: change to one, or run `git init` first") from None
