"""What git leaves out of a worktree: submodules, and the content of files that Git LFS keeps. Both from what is here.

No network is used, nothing is written outside the worktree's folder, and no hook or filter of a repository runs.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from repro_golden.errors import MachineFailureError, ReproError

__all__ = ["empty_filters", "fill", "git_failed"]

_POINTER = re.compile(rb"version https://git-lfs\.github\.com/spec/v1\n(?:.*\n)*?oid sha256:([0-9a-f]{64})\n", re.ASCII)
_POINTER_MOST = 1024
"""Bytes of the largest pointer file, by Git LFS's specification."""

_LITTLE = 1 << 20
"""Bytes of free disk under which a git failure is put down to the disk."""


def fill(tree: Path, common: Path, commit: str, quiet: Sequence[str]) -> None:
    """Complete a worktree.

    Args:
        tree: The worktree, checked out, in a folder of its own.
        common: The repository's common git folder.
        commit: The commit that is checked out.
        quiet: Options of git that keep hooks and filters from running.

    Raises:
        ReproError: a submodule's commit or an LFS object is not here; the line says how to fetch it.
        MachineFailureError: git or the disk failed.
    """
    try:
        _complete(_Part(tree, common, commit, "", tuple(quiet), tree.parent))
    except OSError as error:
        raise git_failed("filling a worktree", f"{error.strerror or error} {error.filename or ''}", tree) from None


def empty_filters(at: Sequence[str], near: Path) -> list[str]:
    """Options that empty every filter which is configured for a repository.

    Args:
        at: Options of git that say which.
        near: A folder on its disk.

    Raises:
        MachineFailureError: git cannot read the configuration.
    """
    listed = _git([*at, "config", "--name-only", "--get-regexp", r"^filter\."], near, none=1)
    filters = sorted({name.rsplit(".", 1)[0] for name in os.fsdecode(listed).splitlines()})
    settings = ("smudge=", "process=", "required=false")
    return [part for f in filters for s in settings for part in ("-c", f"{f}.{s}")]


def git_failed(what: str, message: str, at: Path) -> MachineFailureError:
    """The error for a failure of git or of the disk that `at` is on."""
    message = " ".join(message.split())[:300]
    with contextlib.suppress(OSError):
        if shutil.disk_usage(at).free < _LITTLE:  # git itself only says that it cannot write
            message = f"no space left at {at}"
    return MachineFailureError(f"{what} failed: {message}; cure that and run the same command again")


def _git(arguments: Sequence[str], near: Path, index: Path | None = None, none: int = 0) -> bytes:
    """Output of one git command.

    Args:
        arguments: All of them.
        near: A folder on the disk that it writes to.
        index: The index that it uses instead of the repository's own.
        none: The exit code that says there is nothing to put out.
    """
    environment = os.environ | ({"GIT_INDEX_FILE": str(index)} if index else {})
    done = subprocess.run(["git", *arguments], env=environment, capture_output=True, check=False)
    if done.returncode not in (0, none):
        verb = next((a for a in ("config", "ls-tree", "read-tree", "checkout-index") if a in arguments), "")
        raise git_failed(f"`git {verb}`", done.stderr.decode(errors="replace"), near)
    return done.stdout


@dataclass(frozen=True)
class _Part:
    """The worktree, or a submodule in it.

    Attributes:
        tree: Its folder in the worktree.
        repository: The git folder with its objects.
        commit: The commit that belongs there.
        path: Where it is in the worktree; empty for the worktree itself.
        quiet: Options of git that keep hooks and filters from running.
        folder: The worktree's own folder, beside it.
    """

    tree: Path
    repository: Path
    commit: str
    path: str
    quiet: tuple[str, ...]
    folder: Path

    @property
    def at(self) -> list[str]:
        """Options that point git here: a submodule's own setting may name a folder that is not there now."""
        return [*self.quiet, f"--git-dir={self.repository}", f"--work-tree={self.tree}"]

    def name(self, path: str) -> str:
        """A path of this part, as it is called in the worktree."""
        return f"{self.path}/{path}" if self.path else path


def _complete(part: _Part) -> None:
    """Put the LFS content and the submodules into a part whose files are there."""
    files, links = [], {}
    listed = _git([*part.at, "ls-tree", "--full-tree", "-r", "-z", part.commit], part.folder)
    for entry in os.fsdecode(listed).split("\0"):
        facts, tab, path = entry.partition("\t")
        if tab and facts.startswith("160000 "):
            links[path] = facts.split()[2]
        elif tab and not facts.startswith("120000 "):
            files.append(path)
    _lfs(part, files)
    names = _names(part) if links else {}
    for path, commit in links.items():
        repository = part.repository / "modules" / names.get(path, path)
        below = _Part(part.tree / path, repository, commit, part.name(path), part.quiet, part.folder)
        _complete(_checked_out(below))


def _names(part: _Part) -> dict[str, str]:
    """The names of a part's submodules, by path; the folders of their repositories are called so."""
    if not (part.tree / ".gitmodules").is_file():
        return {}
    ask = ("--file", str(part.tree / ".gitmodules"), "--get-regexp", r"^submodule\..*\.path$")
    names = {}
    for entry in filter(None, os.fsdecode(_git(["config", "--null", *ask], part.folder, none=1)).split("\0")):
        key, _, path = entry.partition("\n")
        names[path] = key.removeprefix("submodule.").removesuffix(".path")
    return names


def _checked_out(part: _Part) -> _Part:
    """Put the files of a submodule where they belong, by an index that is nobody's; the part without its filters.

    `git archive` would leave out and rewrite what the attributes export-ignore and export-subst say.
    """
    cure = f"`git submodule update --init --recursive` in your checkout, at a commit that has it, fetches {part.path}"
    if not part.repository.is_dir():
        raise ReproError(f"the submodule {part.path} is not here: {cure}")
    part.tree.mkdir(parents=True, exist_ok=True)
    look = ["git", *part.at, "cat-file", "-e", f"{part.commit}^{{commit}}"]
    if subprocess.run(look, capture_output=True, check=False).returncode:
        raise ReproError(f"commit {part.commit[:10]} of the submodule {part.path} is not here: {cure}")
    part = replace(part, quiet=(*part.quiet, *empty_filters(part.at, part.folder)))
    with tempfile.TemporaryDirectory(dir=part.folder) as folder:
        index = Path(folder) / "index"
        _git([*part.at, "read-tree", part.commit], part.folder, index)
        _git(["-C", str(part.tree), *part.at, "checkout-index", "--all", "--force", "--quiet"], part.folder, index)
    return part


def _lfs(part: _Part, files: Sequence[str]) -> None:
    """Put the content of files that are kept by Git LFS in the place of their pointers."""
    attributes = [part.tree / file for file in files if file.split("/")[-1] == ".gitattributes"]
    if not any(b"filter=lfs" in file.read_bytes() for file in attributes if file.is_file()):
        return
    for file in files:
        path = part.tree / file
        if not path.is_file() or path.is_symlink() or path.stat().st_size > _POINTER_MOST:
            continue
        if not (match := _POINTER.match(path.read_bytes())):
            continue
        oid = match[1].decode()
        found = part.repository / "lfs" / "objects" / oid[:2] / oid[2:4] / oid
        if not found.is_file():
            cure = f"`git lfs fetch --all`{f' in {part.path}' if part.path else ''} brings that of every commit"
            raise ReproError(f"the LFS content of {part.name(file)} is not here: {cure}")
        mode = path.stat().st_mode
        shutil.copyfile(found, path)
        path.chmod(mode)
