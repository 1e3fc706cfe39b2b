"""What git leaves out of a worktree: submodules, and the content of files that Git LFS keeps. Both from what is here.

No network is used, nothing is written outside the worktree, and no hook or filter of the repository runs.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import tarfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from repro_golden.errors import ReproError

__all__ = ["fill"]

_POINTER = re.compile(rb"version https://git-lfs\.github\.com/spec/v1\n(?:.*\n)*?oid sha256:([0-9a-f]{64})\n", re.ASCII)
_POINTER_MOST = 1024
"""Bytes of the largest pointer file, by Git LFS's specification."""


def fill(tree: Path, common: Path, quiet: Sequence[str]) -> None:
    """Complete a worktree.

    Args:
        tree: The worktree, checked out.
        common: The repository's common git folder.
        quiet: Options of git that keep hooks and filters from running.

    Raises:
        ReproError: a submodule's commit or an LFS object is not here; the line says how to fetch it.
    """
    _submodules(tree, common, quiet)
    _lfs(tree, common)


def _git(tree: Path, *arguments: str) -> bytes:
    return subprocess.run(["git", *arguments], cwd=tree, capture_output=True, check=True).stdout


def _submodules(tree: Path, common: Path, quiet: Sequence[str]) -> None:
    if not (tree / ".gitmodules").is_file():
        return
    listed = _git(tree, "config", "--null", "--file", ".gitmodules", "--get-regexp", r"^submodule\..*\.path$")
    names = {}
    for entry in filter(None, listed.decode().split("\0")):
        key, _, path = entry.partition("\n")
        names[path] = key.removeprefix("submodule.").removesuffix(".path")
    for path, commit in _links(tree):
        _archive(tree / path, common / "modules" / names.get(path, path), path, commit, quiet)


def _links(tree: Path) -> Iterator[tuple[str, str]]:
    """Path and commit of every submodule that the worktree's commit names."""
    for entry in _git(tree, "ls-tree", "-r", "-z", "HEAD").decode().split("\0"):
        facts, tab, path = entry.partition("\t")
        if tab and facts.startswith("160000 "):
            yield path, facts.split()[2]


def _archive(target: Path, repository: Path, path: str, commit: str, quiet: Sequence[str]) -> None:
    """Put a commit of a submodule's own repository where it belongs, and that of the submodules in it."""
    cure = f"`git submodule update --init --recursive` in your checkout, at a commit that has it, fetches {path}"
    if not repository.is_dir():
        raise ReproError(f"the submodule {path} is not here: {cure}")
    at = ["git", *quiet, f"--git-dir={repository}"]
    if subprocess.run([*at, "cat-file", "-e", f"{commit}^{{commit}}"], capture_output=True, check=False).returncode:
        raise ReproError(f"commit {commit[:10]} of the submodule {path} is not here: {cure}")
    target.mkdir(parents=True, exist_ok=True)
    packed = subprocess.Popen([*at, "archive", "--format=tar", commit], stdout=subprocess.PIPE)
    assert packed.stdout is not None
    with packed, tarfile.open(fileobj=packed.stdout, mode="r|") as archive:
        archive.extractall(target, filter="tar")
    if packed.returncode:
        raise ReproError(f"the submodule {path} cannot be read at {commit[:10]}: {cure}")
    inner = subprocess.run([*at, "ls-tree", "-r", "-z", commit], capture_output=True, check=True).stdout.decode()
    for entry in inner.split("\0"):
        facts, tab, below = entry.partition("\t")
        if tab and facts.startswith("160000 "):
            _archive(target / below, repository / "modules" / below, f"{path}/{below}", facts.split()[2], quiet)


def _lfs(tree: Path, common: Path) -> None:
    """Put the content of files that are kept by Git LFS in the place of their pointers."""
    if not any(b"filter=lfs" in file.read_bytes() for file in _attributes(tree)):
        return
    for name in filter(None, _git(tree, "ls-files", "-z").decode("utf-8", "surrogateescape").split("\0")):
        path = tree / name
        if not path.is_file() or path.is_symlink() or path.stat().st_size > _POINTER_MOST:
            continue
        if not (match := _POINTER.match(path.read_bytes())):
            continue
        oid = match[1].decode()
        found = common / "lfs" / "objects" / oid[:2] / oid[2:4] / oid
        if not found.is_file():
            raise ReproError(
                f"the LFS content of {name} is not here: `git lfs fetch --all` brings that of every commit"
            )
        mode = path.stat().st_mode
        shutil.copyfile(found, path)
        path.chmod(mode)


def _attributes(tree: Path) -> Iterator[Path]:
    for name in filter(None, _git(tree, "ls-files", "-z", "--", ":(glob)**/.gitattributes").decode().split("\0")):
        if (tree / name).is_file():
            yield tree / name
