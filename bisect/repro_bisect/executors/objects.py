"""The commits of a range without the rest of their history, to be sent to another machine."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path

from repro_golden.checkout import Checkout
from repro_golden.errors import MachineFailureError

__all__ = ["commits_of", "pack_commits", "unpack_commits"]


def commits_of(checkout: Checkout, commits: Sequence[str]) -> list[str]:
    """These commits and the first parents of each, which confirming replays need."""
    listed = _git(checkout.root, "rev-list", "--no-walk=unsorted", "--parents", "--stdin", given=_lines(commits))
    parents = [line.split()[1] for line in listed.decode().splitlines() if " " in line]
    return list(dict.fromkeys([*commits, *parents]))


def pack_commits(checkout: Checkout, commits: Sequence[str]) -> bytes:
    """These commits with their files: their ids, an empty line, and a pack."""
    objects = _git(checkout.root, "rev-list", "--objects", "--no-walk", "--stdin", given=_lines(commits))
    names = b"".join(line.split()[0] + b"\n" for line in objects.splitlines())
    return _lines(commits) + b"\n" + _git(checkout.root, "pack-objects", "--quiet", "--stdout", given=names)


def unpack_commits(packed: bytes, folder: Path) -> None:
    """Make a repository that holds a pack, with nothing checked out; history beyond the commits is cut off."""
    commits, _, content = packed.partition(b"\n\n")
    kind = "sha1" if commits.find(b"\n") in (-1, 40) else "sha256"
    _git(folder.parent, "init", "--quiet", "--template=", f"--object-format={kind}", str(folder))
    _git(folder, "index-pack", "--stdin", given=content)
    (folder / ".git" / "shallow").write_bytes(commits + b"\n")


def _lines(names: Sequence[str]) -> bytes:
    return "".join(f"{name}\n" for name in names).encode()


def _git(where: Path, *arguments: str, given: bytes = b"") -> bytes:
    done = subprocess.run(["git", *arguments], cwd=where, input=given, capture_output=True, check=False)
    if done.returncode:
        message = " ".join(done.stderr.decode(errors="replace").split())[:300]
        raise MachineFailureError(f"`git {arguments[0]}` failed: {message}; cure that and run the same command again")
    return done.stdout
