"""What a path is: the first reader that claims it reads it; a folder that none claims is looked into."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from repro.doctor.artefacts.kinds import Reader
from repro_golden.errors import ReproError

__all__ = ["READERS", "Seen", "recognise"]

READERS = (
    "traces:GOLDEN", "traces:TRACE", "megatron:MEGATRON", "hf:HF", "tokenizer:TOKENIZER", "runs:RUN_FOLDER",
    "parsers:PARSERS", "log:RAY_SESSION", "runs:ROLLOUT_DUMP", "traces:FOREIGN_GOLDEN", "hf:CONFIG", "case:CASE",
    "launch:LAUNCH", "machine:FREEZE", "prompts:PROMPTS", "log:LOG",
)  # fmt: skip
"""Every reader, as ``module:name`` below `artefacts`, in the order in which they are asked."""

DEPTH = 4
"""Folders inside folders that are looked into."""
MOST = 20_000
"""Files that are looked at below one path."""


@dataclass(frozen=True)
class Seen:
    """A path that was looked at.

    Attributes:
        path: It.
        kind: What it is, by its reader's name; '' where none claims it.
        artefacts: What was read of it.
        problem: Why it could not be read, or not all of it; ''.
    """

    path: Path
    kind: str
    artefacts: list[object] = field(default_factory=list)
    problem: str = ""


@functools.cache
def _readers() -> tuple[Reader, ...]:
    found = []
    for name in READERS:
        module, _, attribute = name.partition(":")
        found.append(getattr(importlib.import_module(f"repro.doctor.artefacts.{module}"), attribute))
    return tuple(found)


def recognise(path: Path) -> list[Seen]:
    """Read a path, or what lies below it.

    Returns:
        What was recognised, in the order of names; where nothing was, one entry without a kind.
    """
    return list(_below(path, DEPTH, iter(range(MOST)))) or [Seen(path, "")]


def _below(path: Path, depth: int, budget: Iterator[int]) -> Iterator[Seen]:
    try:
        reader = next((one for one in _readers() if one.fits(path)), None)
        children = sorted(path.iterdir()) if path.is_dir() else []
    except OSError as error:
        yield Seen(path, "unreadable", problem=f"cannot be read: {error.strerror or error}")
        return
    if reader:
        yield _read(path, reader)
    owned = reader.owns if reader else ()
    if not children or depth == 0 or "*" in owned:
        return
    for child in children:
        if child.name.startswith(".") or child.is_symlink() or any(child.match(pattern) for pattern in owned):
            continue
        if next(budget, None) is None:
            return
        yield from _below(child, depth - 1, budget)


def _read(path: Path, reader: Reader) -> Seen:
    artefacts: list[object] = []
    try:
        for artefact in reader.read(path):
            artefacts.append(artefact)  # noqa: PERF402 - one by one: what comes before a corrupt one is kept
    except (ReproError, OSError) as error:
        return Seen(path, reader.name, artefacts, str(error))
    return Seen(path, reader.name, artefacts)
