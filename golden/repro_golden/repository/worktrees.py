"""Worktrees of commits. Nothing here changes the user's checkout, index, branches or configuration."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from repro_golden.base.canonical import named_after
from repro_golden.base.errors import AbsentError, MachineFailureError
from repro_golden.base.files import of_user, scratch_folder, sweep
from repro_golden.case.file import Case
from repro_golden.repository.checkout import BESIDE, Checkout, Place
from repro_golden.repository.git import POINTER_MOST, Git, GitFailedError, kept_at, lfs_store, pointed_at
from repro_golden.repository.leads import drop_copies, notes_of, settle
from repro_golden.repository.linked import Linked, data_of
from repro_golden.repository.submodules import entries_of, fix_for, names_of, repositories_of
from repro_golden.repository.working import is_absent

__all__ = ["Worktrees", "fill", "folder_for", "name_for"]


class Worktrees:
    """Detached worktrees in a folder of the user's cache (see `folder_for`), one folder per process.

    The repository's hooks and filters never run: hooks are pointed at nothing, and every configured filter is emptied
    for the one command that fills the worktree. A worktree holds every file, also where the checkout is a sparse one.
    What a killed process left behind is removed by the next.
    """

    def __init__(
        self, checkout: Checkout, link: Sequence[str] = (), in_place: Sequence[str] = (), *, name: str | None = None
    ) -> None:
        """Prepare to make some.

        Args:
            checkout: Of which.
            link: What of the user's checkout each of them has too, though no commit holds it.
            in_place: See `Linked`.
            name: What the folder of each is called, where that is another than `name_for` says.

        Raises:
            ReproError: that is not there to be linked.
        """
        self._linked = Linked(checkout.git, link, in_place)
        self._home, self._git = checkout.root, checkout.git.without_filters()
        self._name = name or name_for(checkout)
        self._exit = contextlib.ExitStack()
        self._base, self._common = folder_for(checkout), checkout.common
        checkout.state.mkdir(parents=True, exist_ok=True)
        self._lock = checkout.state / "worktrees.lock"
        self._earlier = checkout.state / "worktrees"  # where they lay once, and lie where nothing else serves
        with self._alone():
            if self._earlier.is_dir():
                sweep(self._earlier)
            self._folder = self._exit.enter_context(scratch_folder(self._base))
        self._forget()
        self._notes = notes_of(checkout)
        settle(self._notes)

    @classmethod
    def of(cls, checkout: Checkout, case: Case) -> Worktrees:
        """Those in which a case's program runs."""
        return cls(checkout, case.subject.link, data_of(case, checkout.root))

    @contextlib.contextmanager
    def at(self, commit: str, tree: str | None) -> Iterator[Place]:
        """A worktree of one commit, removed on exit.

        Raises:
            MachineFailureError: git could not make it.
            AbsentError: a submodule, an LFS object or linked data of the commit is not here.
            ReproError: what is linked was changed meanwhile.
        """
        # no part of the commit's id in it: a program whose numbers rest on its folder is to differ from itself
        path = Path(tempfile.mkdtemp(prefix="at-", dir=self._folder)) / self._name
        try:
            with self._alone():
                self._run("worktree", "add", "--quiet", "--detach", "--force", "--no-checkout", str(path), commit)
            self._run("reset", "--quiet", "--hard", at=path)  # the long part, side by side
            fill(path, self._common, commit, self._git, self._home)
            self._linked.put(path)
            yield Place(path, commit, tree, home=self._home)
            self._linked.check()
        finally:
            self._remove(path)

    def _remove(self, path: Path) -> None:
        shutil.rmtree(path.parent, ignore_errors=True)
        if path.parent.exists():  # a trainer or its setup made folders that nothing can be removed from
            _make_writable(path.parent)
            shutil.rmtree(path.parent, ignore_errors=True)
        self._forget()

    def close(self) -> None:
        """Remove this process's folder, and with the last of them what held them."""
        self._exit.close()
        with self._alone(), contextlib.suppress(OSError):
            self._base.rmdir()
        self._forget()
        drop_copies(self._notes)

    def _forget(self) -> None:
        """Drop git's notes on our worktrees that are gone.

        `git worktree prune` would drop the user's too, such as one on a disk that is not mounted now.
        """
        with self._alone():
            for note in self._common.glob("worktrees/*/gitdir"):
                with contextlib.suppress(OSError):
                    target = Path(note.read_text(encoding="utf-8").strip())
                    ours = target.is_relative_to(self._base) or target.is_relative_to(self._earlier)
                    if ours and not target.exists():
                        shutil.rmtree(note.parent, ignore_errors=True)

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Hold the lock on git's notes on worktrees: git reads those of every other, and stumbles over half a one."""
        with self._lock.open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def _run(self, *arguments: str, at: Path | None = None) -> None:
        try:
            self._git.at(at or self._home)(*arguments)
        except GitFailedError as error:
            raise _git_failed(f"`git {' '.join(arguments[:2])}`", error.stderr, self._base) from None


def name_for(checkout: Checkout) -> str:
    """What the folder of each worktree is called: as the repository's own, which may be the package that is imported.

    All working trees of a repository share the name: what was found in worktrees of one serves the others.
    """
    folder = checkout.common.parent if checkout.common.name == ".git" else checkout.root
    return folder.name if re.fullmatch(r"\w[\w.+-]*", folder.name) else "tree"


def folder_for(checkout: Checkout) -> Path:
    """Where the worktrees of a repository lie: below no working tree, its own above all.

    Programs look for their root and their settings in the folders above them. Where neither the user's cache nor a
    folder for what is temporary serves, they lie with the rest of our state, inside git's folder. So where these run no
    programs, or have less than half of that disk's room, and little.
    """
    room = min(_ROOM, shutil.disk_usage(checkout.common).free // 2)  # half: the same disk may fill meanwhile
    for folder in of_user("worktrees"):
        with contextlib.suppress(OSError):
            runs = not os.statvfs(folder).f_flag & os.ST_NOEXEC
            if runs and shutil.disk_usage(folder).free >= room:
                return _of_this_disk(folder) / named_after(checkout.common)
    return checkout.state / "worktrees"


_ROOM = 4 << 30
"""Bytes of free disk that are enough for worktrees, however much the repository's own disk has."""


def _of_this_disk(folder: Path) -> Path:
    """A folder in it of a name that no other has: another machine may have the same path on a disk of its own.

    What lies there and is not here is no worktree that is gone.
    """
    if not any(folder.glob("disk-*")):
        tempfile.mkdtemp(prefix="disk-", dir=folder)
    return min(folder.glob("disk-*"))


def _make_writable(top: Path) -> None:
    """Let the owner change every folder below one."""
    for folder, below, _ in os.walk(top):  # which looks into a folder after this has made it readable
        for name in below:
            if not (path := Path(folder, name)).is_symlink():
                with contextlib.suppress(OSError):
                    path.chmod(stat.S_IRWXU)


# -- what git leaves out of a worktree: submodules, and the content of files that Git LFS keeps. Both from what is here


_LITTLE = 1 << 20
"""Bytes of free disk under which a git failure is put down to the disk."""


def fill(tree: Path, common: Path, commit: str, git: Git, home: Path) -> None:
    """Complete a worktree.

    Args:
        tree: The worktree, checked out, in a folder of its own.
        common: The repository's common git folder.
        commit: The commit that is checked out.
        git: Git without the repository's filters.
        home: The user's checkout.

    Raises:
        AbsentError: a submodule's commit or an LFS object is not here; the line says how to fetch it.
        MachineFailureError: git or the disk failed.
    """
    try:
        git_folder = Path(git.at(home).text("rev-parse", "--absolute-git-dir"))
        part = _Part.of(tree, common, commit, "", git.at(tree.parent), tree.parent / BESIDE)
        _complete(replace(part, linked=git_folder), home)
    except GitFailedError as error:
        raise _git_failed(f"`git {error.command}`", error.stderr, tree) from None
    except OSError as error:
        raise _git_failed("filling a worktree", f"{error.strerror or error} {error.filename or ''}", tree) from None


def _git_failed(what: str, message: str, at: Path) -> MachineFailureError:
    """The error for a failure of git or of the disk that `at` is on."""
    message = " ".join(message.split())[:300]
    with contextlib.suppress(OSError):
        if shutil.disk_usage(at).free < _LITTLE:  # git itself only says that it cannot write
            message = f"no space left at {at} (XDG_CACHE_HOME may name a folder on a larger disk)"
    return MachineFailureError(f"{what} failed: {message}; cure that and run the same command again")


@dataclass(frozen=True)
class _Part:
    """The worktree, or a submodule in it.

    Attributes:
        tree: Its folder in the worktree.
        repository: The git folder with its objects.
        commit: The commit that belongs there.
        path: Where it is in the worktree; empty for the worktree itself.
        git: Git on that repository and this folder, run beside the worktree: a submodule's own setting may name a
            folder that is not there now.
        git_folder: Beside the worktree, where the git folders of this part's submodules are made.
        linked: The git folder of a linked worktree, in which git keeps the submodules that were made there.
    """

    tree: Path
    repository: Path
    commit: str
    path: str
    git: Git
    git_folder: Path
    linked: Path | None = None

    @classmethod
    def of(cls, tree: Path, repository: Path, commit: str, path: str, git: Git, git_folder: Path) -> _Part:
        """A part, by the git of what holds it."""
        git = git.with_options(f"--git-dir={repository}", f"--work-tree={tree}")
        return cls(tree, repository, commit, path, git, git_folder)

    def below(self, path: str, repository: Path, commit: str) -> _Part:
        """The submodule at a path of this part, by a repository of it."""
        return _Part.of(
            self.tree / path, repository, commit, self.name(path), self.git, self.git_folder / "modules" / path
        )

    def name(self, path: str) -> str:
        """A path of this part, as it is called in the worktree."""
        return f"{self.path}/{path}" if self.path else path


def _complete(part: _Part, home: Path) -> None:
    """Put the LFS content and the submodules into a part whose files are there."""
    files, links = entries_of(part.git, part.commit)
    _lfs(part, files)
    names = names_of(part.git, part.commit) if links else {}
    for path, commit in links.items():
        above, here = [part.repository, *([part.linked] if part.linked else [])], home / part.name(path)
        repositories = repositories_of(above, names.get(path, path), here)
        if not repositories and is_absent(here):
            (part.tree / path).mkdir(parents=True, exist_ok=True)
            continue
        parts = [part.below(path, repository, commit) for repository in repositories]
        _complete(_checked_out(parts, part.name(path), commit, named=path in names), home)


def _checked_out(parts: Sequence[_Part], path: str, commit: str, *, named: bool) -> _Part:
    """Put the files of a submodule where they belong, with a git folder of its own; the part without its filters.

    `git archive` would leave out and rewrite what the attributes export-ignore and export-subst say.

    Args:
        parts: The submodule by each repository of it that is here.
        path: What it is called.
        commit: The commit that belongs there.
        named: Whether .gitmodules says where it comes from.
    """
    part = next((p for p in parts if p.git.tells("cat-file", "-e", f"{commit}^{{commit}}")), None)
    if part is None:
        what = f"commit {commit[:10]} of the submodule {path}" if parts else f"the submodule {path}"
        raise AbsentError(f"{what} is not here: {fix_for(path, named=named, cloned=bool(parts))}")
    part.tree.mkdir(parents=True, exist_ok=True)
    part = replace(part, git=part.git.without_filters())
    _own_git_folder(part)
    # by the user's folder: settings may hold for it alone (includeIf); a part of a split index would be written there
    git = part.git.at(part.tree).with_options("-c", "core.splitIndex=false")
    index = {"GIT_INDEX_FILE": str(part.git_folder / "index")}
    git("read-tree", part.commit, variables=index)
    git("checkout-index", "--all", "--force", "--quiet", "--index", variables=index)
    return part


_COPIED = (
    "config", "config.worktree", "info/attributes", "info/exclude", "info/grafts", "info/sparse-checkout", "shallow",
)  # fmt: skip
"""What a repository says of itself; its objects are read where they are, and git is asked for its refs."""
_NOT_OURS = ("core.worktree", "extensions.refStorage")
"""Settings of it that do not hold for a copy: the user's folder, and where refs are kept."""


def _own_git_folder(part: _Part) -> None:
    """Make the git folder of a submodule in the worktree, by which programs find its root.

    What a program does there by git, such as a commit, a stash or a setting, goes with the worktree. The user may fetch
    or pack meanwhile: no file is copied that git replaces by others.
    """
    for folder in ("objects/info", "info", "refs"):
        (part.git_folder / folder).mkdir(parents=True)
    (part.git_folder / "HEAD").write_text(f"{part.commit}\n")  # by which git knows the folder
    lines = part.git("count-objects", "-v").splitlines()
    others = [line.removeprefix(b"alternate: ") for line in lines if line.startswith(b"alternate: ")]
    # git follows alternates of alternates five deep, and this is one more: the deepest first, so that it follows none
    stores = [*reversed(others), os.fsencode(part.repository / "objects")]
    (part.git_folder / "objects" / "info" / "alternates").write_bytes(b"".join(store + b"\n" for store in stores))
    listed = part.git("for-each-ref", "--format=%(objectname) %(refname)%00%(symref)").splitlines()
    refs = [(ref, target) for ref, _, target in (line.partition(b"\0") for line in listed)]
    (part.git_folder / "packed-refs").write_bytes(b"".join(ref + b"\n" for ref, target in refs if not target))
    for ref, target in ((ref, target) for ref, target in refs if target):  # such as origin/HEAD; none of them is packed
        path = part.git_folder / os.fsdecode(ref.split(b" ", 1)[1])
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"ref: " + target + b"\n")
    for name in _COPIED:
        with contextlib.suppress(FileNotFoundError):
            shutil.copyfile(part.repository / name, part.git_folder / name)
            if name.startswith("config"):
                for setting in _NOT_OURS:
                    part.git("config", "--file", str(part.git_folder / name), "--unset-all", setting, none=5)
    (part.tree / ".git").write_text(f"gitdir: {part.git_folder}\n")


def _lfs(part: _Part, files: Sequence[str]) -> None:
    """Put the content of files that are kept by Git LFS in the place of their pointers."""
    attributes = [part.tree / file for file in files if file.split("/")[-1] == ".gitattributes"]
    if not any(b"filter=lfs" in file.read_bytes() for file in attributes if file.is_file()):
        return
    store = lfs_store(part.git, part.repository)
    for file in files:
        path = part.tree / file
        if not path.is_file() or path.is_symlink() or path.stat().st_size > POINTER_MOST:
            continue
        if not (oid := pointed_at(path.read_bytes())):
            continue
        stored = kept_at(store, oid)
        if not stored.is_file():
            fix = f"`git lfs fetch --all`{f' in {part.path}' if part.path else ''} brings that of every commit"
            raise AbsentError(f"the LFS content of {part.name(file)} is not here: {fix}")
        mode = path.stat().st_mode
        shutil.copyfile(stored, path)
        path.chmod(mode)
