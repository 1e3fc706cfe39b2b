"""The folders that a launch names, and what this machine knows of them."""

from __future__ import annotations

import re
from pathlib import Path, PurePosixPath

from repro.doctor.artefacts.checkpoints.megatron import TRACKER, iteration_of
from repro.doctor.artefacts.kinds import Launch, MegatronCheckpoint

__all__ = [
    "PATHS",
    "exists",
    "flag_of",
    "flagged",
    "folder_of",
    "has_checkpoints",
    "is_known",
    "is_whole",
    "named",
    "same",
    "shown",
]

PATHS = ("--load", "--ref-load", "--save", "--hf-checkpoint", "--critic-load", "--critic-save", "--prompt-data")
"""Flags that name what must be on the machine that trains."""

_LEFT = re.compile(r"\$\{?\w*(?:\[[@*]\]|[@*]|ARGS|FLAGS|OPTS|EXTRA)")

_COMMON = frozenset({"/", ".", "/root", "/home", "/tmp", "/mnt", "/data", "/workspace", "/opt", "/var"})  # noqa: S108
"""Folders that every machine may have, so that they do not say that this is the one that trains."""


def named(launch: Launch, flag: str) -> Path | None:
    """The path that a flag names; None where it is not given or only a shell knows it."""
    value = launch.value(flag)
    return Path(value) if value and "\0" not in value else None


def exists(path: Path) -> bool:
    """Whether a path is there, as far as this user may look."""
    try:
        return path.exists()
    except (OSError, ValueError):
        return False


def is_known(launch: Launch, path: Path) -> bool:
    """Whether this machine is one that would have the path: it does, or has its folder, or another path of the launch.

    A launch script is often read on another machine than the one that trains: what is missing here says nothing there.
    """
    if exists(path):
        return True
    if any(exists(other) for flag in PATHS if (other := named(launch, flag)) is not None):
        return path.is_absolute()
    parent = path.parent
    return path.is_absolute() and str(parent) not in _COMMON and parent != _home() and exists(parent)


def _home() -> Path | None:
    try:
        return Path.home()
    except (RuntimeError, KeyError):
        return None


def same(one: Path, other: Path) -> bool:
    """Whether two paths are one folder, as far as can be told: by the file system, else as written."""
    try:
        if one.exists() and other.exists():
            return one.samefile(other)
    except (OSError, ValueError):
        pass
    return PurePosixPath(one) == PurePosixPath(other)


def flag_of(launch: Launch, path: Path, flags: tuple[str, ...]) -> str | None:
    """The first of the flags that names a folder: the same, or one of the same name (copied from where it trains)."""
    for flag in flags:
        value = named(launch, flag)
        if value is not None and (same(value, path) or (not exists(value) and value.name == path.absolute().name)):
            return flag
    return None


def is_whole(launch: Launch) -> bool:
    """Whether all flags are seen: no array or list of further ones is left to the shell."""
    return bool(launch.words) and not any(_LEFT.search(word) for word in launch.words)


def flagged(launch: Launch, flags: tuple[str, ...]) -> bool:
    """Whether any of the flags has a value that can be read."""
    return any(named(launch, flag) is not None for flag in flags)


def has_checkpoints(path: Path) -> bool:
    """Whether Megatron has saved to a folder."""
    try:
        return (path / TRACKER).is_file() or any(iteration_of(child.name) is not None for child in path.iterdir())
    except OSError:
        return False


def folder_of(checkpoint: MegatronCheckpoint, iteration: int) -> Path:
    """The folder of one iteration; -1 is ``release``."""
    if iteration_of(checkpoint.path.absolute().name) == iteration:
        return checkpoint.path
    return checkpoint.path / ("release" if iteration < 0 else f"iter_{iteration:07d}")


def shown(text: str) -> str:
    """A text of a file, in one line and short."""
    return ascii(text[:60])[1:-1]
