"""What Git LFS leaves in git: a pointer for each file whose content it keeps."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

__all__ = ["POINTER_MOST", "holds", "kept_at", "pointed_at"]

_POINTER = re.compile(rb"version https://git-lfs\.github\.com/spec/v1\n(?:.*\n)*?oid sha256:([0-9a-f]{64})\n", re.ASCII)
POINTER_MOST = 1024
"""Bytes of the largest pointer file, by Git LFS's specification."""


def pointed_at(content: bytes) -> str | None:
    """The SHA-256 that a pointer names, in hex; None where this is no pointer."""
    match = _POINTER.match(content) if len(content) <= POINTER_MOST else None
    return match[1].decode() if match else None


def kept_at(repository: Path, oid: str) -> Path:
    """Where a git folder's own store keeps a content."""
    return repository / "lfs" / "objects" / oid[:2] / oid[2:4] / oid


def holds(path: Path, oid: str) -> bool:
    """Whether a file has the content of a pointer."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest() == oid
