"""Where a subject's code lies."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

__all__ = ["Place"]


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
