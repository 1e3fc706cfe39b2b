"""What is sent to a node of a cluster: unpacked once, held while it is used, removed when unused for days."""

from __future__ import annotations

import contextlib
import fcntl
import io
import os
import shutil
import socket
import stat
import tarfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from repro_golden.base.errors import MachineFailureError
from repro_golden.base.files import is_still
from repro_golden.repository.checkout import Checkout
from repro_golden.repository.git import Git

__all__ = ["Bundle", "commits_of", "held", "node_folder", "pack", "pack_commits", "unpack", "unpack_commits"]

_KEPT = 3 * 24 * 3600
"""Seconds that a bundle is kept after its last use."""


@dataclass(frozen=True)
class Bundle:
    """Something that a node fetches once.

    Attributes:
        key: Equal for equal content.
        refs: One reference of Ray to its bytes, in a list so that Ray does not fetch it before it is needed.
    """

    key: str
    refs: list[Any]


def pack(folder: Path, names: Sequence[str] = (".",)) -> bytes:
    """What of a folder goes by these names, as bytes."""
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w") as archive:
        for name in names:
            if (folder / name).exists():
                archive.add(folder / name, arcname=name)
    return content.getvalue()


def unpack(content: bytes, folder: Path) -> None:
    """The inverse of `pack`."""
    with tarfile.open(fileobj=io.BytesIO(content)) as archive:
        archive.extractall(folder, filter="data")


def node_folder(base: Path) -> Path:
    """Where this user's bundles and probes lie on a node; nobody else may write there.

    Raises:
        MachineFailureError: it is somebody else's.
    """
    folder = base / f"repro-node-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise MachineFailureError(f"{folder} on {socket.gethostname()} is not ours alone: remove it, and run again")
    return folder


@contextlib.contextmanager
def held(home: Path, key: str, make: Callable[[Path], None]) -> Iterator[Path]:
    """Where a bundle lies on this node, which nobody removes meanwhile; the first that asks makes it.

    Args:
        home: See `node_folder`.
        key: Of the bundle.
        make: Fills an empty folder.
    """
    target = home / key
    with _locked(home, key, fcntl.LOCK_SH):
        if not target.exists():
            with (home / f"{key}.making").open("w") as lock:  # others hold it, for as long as they please
                fcntl.flock(lock, fcntl.LOCK_EX)
                _make(home, key, make)
        os.utime(target)
        yield target


def _make(home: Path, key: str, make: Callable[[Path], None]) -> None:
    target, part = home / key, home / f".new-{key}"
    if target.exists():
        return
    _sweep(home)
    shutil.rmtree(part, ignore_errors=True)  # of a process that was killed over it
    part.mkdir()
    try:
        make(part)
        part.rename(target)
    finally:
        shutil.rmtree(part, ignore_errors=True)


@contextlib.contextmanager
def _locked(home: Path, key: str, how: int) -> Iterator[IO[str]]:
    """Hold a bundle's lock; a sweep may have removed its file while we waited."""
    path = home / f"{key}.lock"
    while True:
        with path.open("a") as lock:
            fcntl.flock(lock, how)
            if is_still(lock, path):
                yield lock
                return


def _sweep(home: Path) -> None:
    """Remove the bundles that were not used for days, and that nobody holds."""
    for path in home.glob("*.lock"):
        target, part = path.with_suffix(""), home / f".new-{path.stem}"
        with contextlib.suppress(OSError):  # held, or gone meanwhile
            if time.time() - (target if target.exists() else path).stat().st_mtime < _KEPT:
                continue
            with _locked(home, path.stem, fcntl.LOCK_EX | fcntl.LOCK_NB):
                if target.exists() and time.time() - target.stat().st_mtime < _KEPT:
                    continue
                shutil.rmtree(part, ignore_errors=True)
                if target.exists():
                    target.rename(part)  # so that half a one is never taken for a whole
                    shutil.rmtree(part, ignore_errors=True)
                (home / f"{path.stem}.making").unlink(missing_ok=True)
                path.unlink()


# -- the commits of a range without the rest of their history, to be sent to another machine


def commits_of(checkout: Checkout, commits: Sequence[str]) -> list[str]:
    """These commits and the first parents of each, which confirming replays need."""
    listed = checkout.git("rev-list", "--no-walk=unsorted", "--parents", "--stdin", given=_lines(commits))
    parents = [line.split()[1] for line in listed.decode().splitlines() if " " in line]
    return list(dict.fromkeys([*commits, *parents]))


def pack_commits(checkout: Checkout, commits: Sequence[str]) -> bytes:
    """These commits with their files: their ids, an empty line, and a pack."""
    objects = checkout.git("rev-list", "--objects", "--no-walk", "--stdin", given=_lines(commits))
    names = b"".join(line.split()[0] + b"\n" for line in objects.splitlines())
    return _lines(commits) + b"\n" + checkout.git("pack-objects", "--quiet", "--stdout", given=names)


def unpack_commits(packed: bytes, folder: Path) -> None:
    """Make a repository that holds a pack, with nothing checked out; history beyond the commits is cut off."""
    commits, _, content = packed.partition(b"\n\n")
    kind = "sha1" if commits.find(b"\n") in (-1, 40) else "sha256"
    Git(folder.parent)("init", "--quiet", "--template=", f"--object-format={kind}", str(folder))
    Git(folder)("index-pack", "--stdin", given=content)
    (folder / ".git" / "shallow").write_bytes(commits + b"\n")


def _lines(names: Sequence[str]) -> bytes:
    return "".join(f"{name}\n" for name in names).encode()
