"""The repository that is guarded, as the user has it. Nothing here modifies it."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from repro_golden.base.canonical import digest
from repro_golden.base.errors import MachineFailureError, ReproError
from repro_golden.base.trust import folder_of, trust_of
from repro_golden.case.file import Case
from repro_golden.repository.code_key import code_keys, not_code
from repro_golden.repository.dvc_files import POINTERS, beside
from repro_golden.repository.git import Git, GitFailedError, cleaned
from repro_golden.repository.linked import data_of
from repro_golden.repository.working import (
    NOTHING,
    SUBMODULE,
    Lying,
    Ran,
    apart,
    as_it_lies,
    changed,
    is_absent,
    modes_of,
    noted_of,
)

__all__ = ["BESIDE", "Checkout", "Place", "find_checkout", "held_alone", "no_such_code"]

BESIDE = ".repro"


# -- where a subject's code lies


@dataclass(frozen=True)
class Place:
    """Where a subject's code lies.

    Attributes:
        root: The checkout or worktree.
        commit: The commit that it is, or None for a checkout with changes of its own.
        tree: git's hash of the subject's folder, or None likewise.
        home: The user's own checkout, where `root` is a worktree of it; None where it is that checkout.
        variables: Environment variables of its processes here, such as the GPUs that they may use.
    """

    root: Path
    commit: str | None = None
    tree: str | None = None
    home: Path | None = None
    variables: Mapping[str, str] = field(default_factory=dict)

    @property
    def beside(self) -> Path:
        """Where what is noted of a worktree lies: the folder above code has nothing else that could be imported."""
        return self.root.parent / BESIDE


# -- the repository that is guarded, as the user has it. Nothing here modifies it


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
    def is_sparse(self) -> bool:
        """Whether git may leave a part of each commit out of it."""
        return (self.root / self.git.text("rev-parse", "--git-path", "info/sparse-checkout")).exists()

    @property
    def scratch(self) -> Path:
        """Where runs under way are kept."""
        return self.state / "tmp"

    def commit_without(self, folder: Path) -> str | None:
        """The commit that the working tree is, whatever lies in one folder; None where that has changes of its own.

        Folders that hold a trace and nothing else are no change. What git tracks counts wherever it lies.
        """
        commit = self.git.text("rev-parse", "--verify", "--quiet", "HEAD^{commit}", none=1)
        headers = self.git.names("ls-files", "-z", "--others", "--exclude-standard", "--", ":(top,glob)**/header.json")
        folders = {PurePosixPath(header).parent for header in headers} - {PurePosixPath()}
        left_out = [str(path) for path in folders if all(map(_OF_TRACES.fullmatch, self._files_in(path)))]
        if folder.is_relative_to(self.root) and folder != self.root:
            left_out += [str(folder.relative_to(self.root))]
        untracked = (path for path in left_out if not self.git.names("ls-files", "-z", "--", path))
        left_out = [*not_code(self.root), *(f":(top,exclude,literal){path}" for path in untracked)]
        return commit if commit and not _changed(self.git, [PurePosixPath()], left_out) else None

    def paths(self, case: Case, code_paths: Sequence[str] = (), *, untracked: bool = False) -> list[str]:
        """`Case.paths`, and what git tracks of the files that the case itself names: its launch script, say.

        With it what says which data belongs where the program reads some that git does not track. `untracked` takes the
        files that git would track for those that it does.
        """
        paths = case.paths(code_paths)
        named = [name for name in case.named if _outside(name, paths)]
        listed = ("ls-files", "-z", *(("--cached", "--others", "--exclude-standard") if untracked else ()), "--")
        tracked = self.git.names(*listed, *(f":(top,literal){name}" for name in named)) if named else []
        holding = {str(folder) for name in tracked for folder in (PurePosixPath(name), *PurePosixPath(name).parents)}
        paths += [name for name in named if name in holding]
        return paths + [name for name in self._naming(case) if name not in paths and _outside(name, paths)]

    def _naming(self, case: Case) -> list[str]:
        return beside([*case.subject.link, *data_of(case, self.root)])

    def _files_in(self, folder: PurePosixPath) -> list[str]:
        """All files below a folder, by their paths in it."""
        inside = self.root / folder
        return [path.relative_to(inside).as_posix() for path in inside.rglob("*") if not path.is_dir()]

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
        keys = code_keys(self.git, [commit], self.paths(case))
        if case.subject.path in keys.absent([commit]):
            if not os.path.lexists(self.root / case.subject.path):
                raise no_such_code([case.subject.path], "HEAD nor in the working tree")
            return Place(self.root)
        paths, left_out = keys.covers(commit)
        naming = [path for path in paths if str(path) in self._naming(case)]  # data may lie there, which is no change
        code = [path for path in paths if path not in naming]
        if _changed(self.git, code, not_code(self.root, left_out)):
            return Place(self.root)
        if naming and (_changed(self.git, naming, untracked="no") or self._new_pointers(naming)):
            return Place(self.root)
        return Place(self.root, commit, keys.of(commit))

    def _new_pointers(self, paths: Sequence[PurePosixPath]) -> list[str]:
        if not paths:
            return []
        listed = self.git.names("ls-files", "--others", "--exclude-standard", "-z", "--", *POINTERS)
        return [name for name in listed if any(PurePosixPath(name).is_relative_to(path) for path in paths)]

    def ran(self, case: Case) -> Ran:
        """The code that a run here is of, which no commit may have yet."""
        git, paths = self.git.without_filters(), self.paths(case, untracked=True)
        head = self.git.text("rev-parse", "--verify", "--quiet", "HEAD^{commit}", none=1)
        with apart(git) as index:
            lying = as_it_lies(git, index)
            tree = lying.tree
            keys = code_keys(index, [tree, *([head] if head else [])], paths)
            covered, left_out = keys.covers(tree)
            naming = [path for path in covered if str(path) in self._naming(case)]  # data may lie there
            code = _specs(git, [path for path in covered if path not in naming])
            left = not_code(self.root, left_out)
            others = ("ls-files", "--others", "--exclude-standard", "-z", "--")
            beside = git.names(*others, *code, *left) if code else []
            untracked = noted_of(index, beside + self._new_pointers(naming))
        key = keys.of(tree)
        if unknown := self._unknown(lying, [*_specs(git, covered), *left]):
            return Ran("", "", untracked, unknown)
        return Ran(key or NOTHING, head if head and key and keys.of(head) == key else "", untracked)

    def _unknown(self, lying: Lying, specs: Sequence[str]) -> str:
        """Why no key stands for what lies here of some pathspecs, such as no commit can have; else empty."""
        git = self.git.without_filters()
        among = frozenset(git.names("ls-files", "-z", "--", *specs))
        if name := next((name for name in lying.unmerged if name in among), ""):
            return f"{name} is not merged"
        if files := cleaned(self.git, [name for name in lying.put if name in among]):
            return f"a filter, which does not run here, would rewrite {files[0]} when it is added"
        return "a submodule of it is not as its commit" if _modules_changed(git, specs, absent=False) else ""

    def uncommitted(self, case: Case) -> list[str]:
        """The files of a subject's code that git tracks and that lie here otherwise than in the last commit."""
        git = self.git.without_filters()
        specs = [*_specs(git, [PurePosixPath(path) for path in self.paths(case)]), *not_code(self.root)]
        return [name for _, name in changed(git, specs)]

    def takes(self, path: str) -> bool:
        """Whether git has a file at a path, or would take one that lies there; True where that is not for this git.

        What lies behind a symlink, or in a repository inside this one, is asked nowhere.
        """
        where = self.root / path
        inner = [where, *where.parents][: len(PurePosixPath(path).parts)]
        if any(folder.is_symlink() or (folder / ".git").exists() for folder in inner):
            return True
        specs = [f":(top,literal){path}"] if inner else [":(top)", *not_code(self.root)]
        listed = ("ls-files", "--cached", "--others", "--exclude-standard", "-z")
        return bool(self.git.names(*listed, "--", *specs))


def _outside(name: str, paths: Sequence[str]) -> bool:
    return not any(PurePosixPath(name).is_relative_to(path) for path in paths)


def no_such_code(paths: Sequence[str], where: str) -> ReproError:
    """The error for paths that nothing has: two commits without a path are not equal, the path is wrong."""
    return ReproError(
        f"{', '.join(paths)} is neither in {where}: correct subject.path of the case (or --path), which names what "
        "holds the code"
    )


_OF_TRACES = re.compile(r"header\.json|steps\.(?:jsonl|index)|rank-\d{5}\.(?:parquet|log)|dumps/[^/]+\.bin")
"""The files of a trace's folder."""


def _changed(
    git: Git,
    paths: Sequence[PurePosixPath],
    left_out: Sequence[str] = (),
    *,
    untracked: str = "normal",
    absent: bool = True,
) -> bool:
    """Whether the working tree has paths otherwise than the last commit, or not at all, also in submodules.

    What is left out is in git's words. No filter runs. A file that one has rewritten counts as changed unless the
    index knows it, as after `git status`, or Git LFS keeps its content.
    """
    git = git.without_filters()
    specs = [*_specs(git, paths), *left_out]
    if next(changed(git, specs, untracked=untracked), None):
        return True
    flags = {
        name: flag for flag, _, name in (e.partition(" ") for e in git.names("ls-files", "-v", "-z", "--", *specs))
    }
    if set(flags.values()) - {"H"}:  # left out by a sparse checkout, or taken for unchanged without a look
        return True
    return _modules_changed(git, specs, untracked=untracked, absent=absent)


def _modules_changed(git: Git, specs: Sequence[str], *, untracked: str = "no", absent: bool = True) -> bool:
    """Whether a submodule, of those that pathspecs name, has changes of its own or, where that counts, is absent."""
    folders = [git.folder / name for name, mode in modes_of(git, specs).items() if mode == SUBMODULE]
    return any(
        not (folder / ".git").exists() or _changed(Git(folder), [PurePosixPath()], untracked=untracked, absent=absent)
        for folder in folders
        if absent or not is_absent(folder)
    )


def _specs(git: Git, paths: Sequence[PurePosixPath]) -> list[str]:
    """Git's words for paths; of what lies inside a submodule, all of the submodule counts."""
    modules = [PurePosixPath(name) for name, mode in modes_of(git).items() if mode == SUBMODULE]
    paths = [next((m for m in modules if path.is_relative_to(m)), path) for path in paths]
    return [f":(top,literal){path}" if path.parts else ":(top)" for path in paths]  # a literal dot would be a name


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


# -- locks that say who holds them: what two commands at once would spoil is done by one of them, and the other ends


@contextlib.contextmanager
def held_alone(checkout: Checkout, *paths: Path) -> Iterator[None]:
    """Hold what lies at some paths of a checkout for the block, against other commands that would write there.

    The kernel lets go of a lock when its process ends, however it ends.

    Raises:
        ReproError: another process holds one of them.
        MachineFailureError: the lock cannot be made.
    """
    folder = checkout.state / "locks"
    with contextlib.ExitStack() as exits:
        for path in sorted(set(paths)):  # in one order for all, so that of several at once one goes on
            file = folder / digest("lock", str(path))
            try:
                folder.mkdir(parents=True, exist_ok=True)
                lock = exits.enter_context(file.open("a", encoding="utf-8"))
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ReproError(_taken(checkout, path, file)) from None
            except OSError as error:
                raise MachineFailureError(f"cannot lock {path} in {folder}: {error.strerror}") from error
            with contextlib.suppress(OSError):  # a full disk: then nobody learns who it is
                lock.truncate(0)
                lock.write(str(os.getpid()))
                lock.flush()
        yield


def _taken(checkout: Checkout, path: Path, lock: Path) -> str:
    name = path.relative_to(checkout.root) if path.is_relative_to(checkout.root) else path
    with contextlib.suppress(OSError):
        if number := lock.read_text(encoding="utf-8"):
            return f"{name} is being recorded by process {number}: wait for it, or end it, and run again"
    return f"{name} is being recorded by another process: wait for it, and run again"
