"""The repository that is guarded, as the user has it. Nothing here modifies it."""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from repro_golden.base.errors import ReproError
from repro_golden.base.trust import folder_of, trust_of
from repro_golden.case.file import Case
from repro_golden.repository.code_key import code_keys
from repro_golden.repository.git import Git, GitFailedError
from repro_golden.repository.lfs import POINTER_MOST, holds, pointed_at
from repro_golden.repository.place import Place

__all__ = ["Checkout", "find_checkout", "no_such_code"]


@dataclass(frozen=True)
class Checkout:
    """A working tree.

    Attributes:
        root: Its top folder.
        common: Git's common folder, shared by all worktrees.
        trust: Whose code runs here, as CI says it; '' elsewhere.
    """

    root: Path
    common: Path
    trust: str = ""

    @property
    def state(self) -> Path:
        """Folder for everything a bisect or a recording keeps: ``repro`` in git's common folder, never in the checkout.

        In CI it is one for each trust: what a pull request's code could have written serves no run of a branch.
        """
        folder = self.common / "repro"
        return folder / "trust" / folder_of(self.trust) if self.trust else folder

    @property
    def git(self) -> Git:
        """Git in its top folder."""
        return Git(self.root)

    @property
    def scratch(self) -> Path:
        """Where runs under way are kept."""
        return self.state / "tmp"

    def place(self, case: Case) -> Place:
        """The subject as it lies in the working tree; its commit is known only when nothing under it was changed.

        Raises:
            ReproError: the subject's path is neither in the last commit nor in the working tree.
        """
        commit = self.git.text("rev-parse", "--verify", "--quiet", "HEAD^{commit}", none=1)
        if not commit:
            return Place(self.root)
        if not case.subject.path:
            return Place(self.root, commit, None)
        keys = code_keys(self.git, [commit], case.paths())
        if case.subject.path in keys.absent([commit]):
            if not os.path.lexists(self.root / case.subject.path):
                raise no_such_code([case.subject.path], "HEAD nor in the working tree")
            return Place(self.root)
        if _changed(self.git, *keys.covers(commit)):
            return Place(self.root)
        return Place(self.root, commit, keys.of(commit))


def no_such_code(paths: Sequence[str], where: str) -> ReproError:
    """The error for paths that nothing has: two commits without a path are not equal, the path is wrong."""
    return ReproError(
        f"{', '.join(paths)} is neither in {where}: correct subject.path of the case (or --path), which names what "
        "holds the code"
    )


def _changed(git: Git, paths: Sequence[PurePosixPath], left_out: Sequence[str] = ()) -> bool:
    """Whether the working tree has paths otherwise than the last commit, or not at all, also in submodules.

    No filter runs. A file that one has rewritten counts as changed unless the index knows it, as after `git status`,
    or Git LFS keeps its content.
    """
    git = git.without_filters()
    entries = (entry.partition("\t") for entry in git.names("ls-files", "--stage", "-z"))
    modes = {name: facts.split(" ")[0] for facts, _, name in entries}
    submodules = [PurePosixPath(name) for name, mode in modes.items() if mode == "160000"]
    # of what lies inside a submodule, all of the submodule counts
    paths = [next((s for s in submodules if path.is_relative_to(s)), path) for path in paths]
    specs = [f":(top,literal){path}" if path.parts else ":(top)" for path in paths]  # a literal dot would be a name
    specs += [f":(top,exclude,literal){name}" for name in left_out]
    status = ("status", "--porcelain", "-z", "--untracked-files=normal", "--ignore-submodules=dirty", "--no-renames")
    for entry in git.names(*status, "--", *specs):
        kind, name = entry[:2], entry[3:]
        if kind != " M" or not _kept_by_lfs(git, name, modes[name]):
            return True
    flags = {
        name: flag for flag, _, name in (e.partition(" ") for e in git.names("ls-files", "-v", "-z", "--", *specs))
    }
    if set(flags.values()) - {"H"}:  # left out by a sparse checkout, or taken for unchanged without a look
        return True
    inside = [git.folder / name for name in submodules if str(name) in flags]
    return not all((folder / ".git").exists() and not _changed(Git(folder), [PurePosixPath()]) for folder in inside)


def _kept_by_lfs(git: Git, name: str, mode: str) -> bool:
    """Whether a file is what a pointer of Git LFS in the index stands for, and may be run as the index says."""
    path = git.folder / name
    if path.is_symlink() or not path.is_file() or bool(path.stat().st_mode & stat.S_IXUSR) != (mode == "100755"):
        return False
    if int(git("cat-file", "-s", f":0:{name}")) > POINTER_MOST:
        return False
    oid = pointed_at(git("cat-file", "blob", f":0:{name}"))
    return oid is not None and holds(path, oid)


def find_checkout(start: Path) -> Checkout:
    """The checkout that holds `start`.

    Raises:
        ReproError: not inside a git repository with a working tree.
    """
    outside = f"{start} is not inside a git repository: change to one, or run `git init` first"
    if not start.is_dir():
        raise ReproError(outside)
    git = Git(start)
    try:
        common = os.fsdecode(git("rev-parse", "--git-common-dir").removesuffix(b"\n"))
    except GitFailedError as error:
        if "not a git repository" in error.stderr:
            raise ReproError(outside) from None
        raise
    try:
        root = Path(os.fsdecode(git("rev-parse", "--show-toplevel").removesuffix(b"\n")))
    except GitFailedError:
        raise ReproError(f"{start} is a bare repository: run repro in a checkout of it") from None
    return Checkout(root, (start / common).resolve(), trust_of(os.environ))
