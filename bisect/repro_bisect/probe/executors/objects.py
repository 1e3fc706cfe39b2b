"""The commits of a range without the rest of their history, to be sent to another machine."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from repro_golden.repository.checkout import Checkout
from repro_golden.repository.git import Git

__all__ = ["commits_of", "pack_commits", "unpack_commits"]


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
