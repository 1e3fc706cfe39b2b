"""What a path is: the first reader that claims it reads it; a folder that none claims is looked into."""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from repro.doctor.artefacts.kinds import NotRead, Reader
from repro.doctor.artefacts.launches.scripts import launch_of_program
from repro_golden.base.errors import ReproError

__all__ = ["READERS", "Seen", "recognise"]

READERS = (
    "traces:GOLDEN", "traces:TRACE", "checkpoints.megatron:MEGATRON", "checkpoints.hf:HF",
    "checkpoints.tokenizer:TOKENIZER", "runs:RUN_FOLDER", "parsers:PARSERS", ".logs:RAY_SESSION", "runs:ROLLOUT_DUMP",
    "traces:FOREIGN_GOLDEN", "checkpoints.hf:CONFIG", "case:CASE", "launches.scripts:LAUNCH", "python_code:PYTHON",
    "machine:FREEZE", "prompts:PROMPTS", ".logs:LOG",
)  # fmt: skip
"""Every reader, as ``module:name`` below `artefacts`, or with a dot beside it, in the order in which they are asked."""

_NAMES = (
    ("*.pt", "runs:ROLLOUT_DUMP"), ("config.json", "checkpoints.hf:CONFIG"), ("*.sh", "launches.scripts:LAUNCH"),
    ("*.jsonl", "prompts:PROMPTS"),
    ("requirements*.txt", "machine:FREEZE"), ("*.lock", "machine:FREEZE"), ("*.log", ".logs:LOG"),
)  # fmt: skip
"""What a file that the user names must be by its name, where its content does not show it: then it is corrupt."""

DEPTH = 8
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
def _reader(name: str) -> Reader:
    module, _, attribute = name.partition(":")
    reader: Reader = getattr(importlib.import_module(f".{module}", "repro.doctor.artefacts"), attribute)
    return reader


def recognise(path: Path) -> list[Seen]:
    """Read a path, or what lies below it.

    Returns:
        What was recognised, in the order of names; where nothing was, one entry without a kind.
    """
    walk = _Walk(_Inside(path))
    seen = list(_below(path, DEPTH, walk))
    if walk.outside:
        count = f"{len(walk.outside)} links lead" if len(walk.outside) > 1 else "a link leads"
        reason = f"{count} out of {path} and {'were' if len(walk.outside) > 1 else 'was'} not followed"
        seen.append(Seen(path, _FOLDER, [NotRead(walk.outside[0], reason)]))
    if walk.deep:
        count = f"{len(walk.deep)} folders lie" if len(walk.deep) > 1 else "a folder lies"
        reason = f"{count} {DEPTH} deep, and what is below was not looked at"
        seen.append(Seen(path, _FOLDER, [NotRead(walk.deep[0], reason)]))
    return seen or [_by_name(path)]


def _by_name(path: Path) -> Seen:
    """A file that no reader claims, but whose name says what it ought to be: its reader says why it is not.

    A Python program is one that can be started.
    """
    reader = next((_reader(name) for pattern, name in _NAMES if path.match(pattern)), None)
    if not path.is_file():
        return Seen(path, "")
    if path.suffix == ".py" and (launch := launch_of_program(path)):
        return Seen(path, "program", [launch])
    if reader is None:
        return Seen(path, "")
    read = _read(path, reader)
    return read if read.problem or read.artefacts else Seen(path, reader.name, problem="holds nothing of its kind")


@dataclass
class _Walk:
    """What a walk below one path has left, and what it has seen: a link may lead back."""

    inside: _Inside
    left: int = MOST
    seen: set[tuple[int, int]] = field(default_factory=set)
    deep: list[Path] = field(default_factory=list)
    outside: list[Path] = field(default_factory=list)

    def enters(self, path: Path) -> bool:
        """Whether a path is to be looked at: once, and nothing of the kernel's."""
        try:
            state, real = path.stat(), path.resolve()
        except (OSError, RuntimeError):
            return False  # a link that leads nowhere
        if any(real.is_relative_to(place) for place in _KERNELS) or (state.st_dev, state.st_ino) in self.seen:
            return False
        if not self.inside.holds(path):
            self.outside.append(path)
            return False
        self.seen.add((state.st_dev, state.st_ino))
        return True

    def may(self, reader: Reader, path: Path) -> bool:
        """Whether a reader stays inside: of a folder, and of what stands for its folder, it opens what it likes."""
        if path.is_dir():
            return self.inside.whole(path)
        folder = path.parent.parent if path.parent.name == "train_data" else path.parent
        return not reader.beside or self.inside.whole(folder)


_KERNELS = ("/proc", "/sys", "/dev")
"""Where reading may wait for ever."""


def _below(path: Path, depth: int, walk: _Walk) -> Iterator[Seen]:
    if not walk.enters(path):
        return
    try:
        reader = next(
            (candidate for candidate in map(_reader, READERS) if walk.may(candidate, path) and candidate.fits(path)),
            None,
        )
        children = sorted(path.iterdir()) if path.is_dir() else []
    except OSError as error:
        yield Seen(path, "unreadable", problem=f"cannot be read: {error.strerror or error}")
        return
    if reader:
        yield _read(path, reader)
    owned = reader.owns if reader else ()
    if not children or "*" in owned:
        return
    looked = [
        child for child in children if child.name[0] != "." and not any(child.match(pattern) for pattern in owned)
    ]
    if looked and depth == 0:
        walk.deep.append(path)
        return
    for number, child in enumerate(looked):
        if walk.left == 0:
            left = f"{len(looked) - number} of its {len(looked)} entries were not looked at, after {MOST} files"
            yield Seen(path, _FOLDER, [NotRead(path, left)])
            return
        walk.left -= 1
        yield from _below(child, depth - 1, walk)


_FOLDER = "folder that was not searched whole"


def _read(path: Path, reader: Reader) -> Seen:
    artefacts: list[object] = []
    try:
        for artefact in reader.read(path):
            artefacts.append(artefact)  # noqa: PERF402 - one by one: what comes before a corrupt one is kept
    except (ReproError, OSError) as error:
        return Seen(path, reader.name, artefacts, str(error))
    return Seen(path, reader.name, artefacts)


# -- what really lies in a folder that the user named: a link in it that leads elsewhere is somebody else's word


_MOST = 200_000
"""Entries that are looked at for links; of a larger tree no folder is read as a whole."""


class _Inside:
    """The inside of a path that the user named. A link that is named itself is followed.

    Args:
        path: It. A snapshot of the Hugging Face cache is taken with the blobs beside it that its links lead to.
    """

    def __init__(self, path: Path) -> None:
        real = path.resolve()
        cached = real.parent.name == "snapshots" and real.parent.parent.name.startswith(("models--", "datasets--"))
        self._root = real.parent.parent if cached else real
        self._named = real

    def holds(self, path: Path) -> bool:
        """Whether a path that exists really lies inside."""
        return path.resolve().is_relative_to(self._root)

    def whole(self, folder: Path) -> bool:
        """Whether no link below a folder leads out, so that who reads all of it stays inside."""
        leaking, crowded = self._walked
        return not crowded and folder.resolve() not in leaking

    @cached_property
    def _walked(self) -> tuple[set[Path], bool]:
        """The folders with a link somewhere below that leads out, and whether there were too many entries."""
        leaking: set[Path] = set()
        todo, seen = [self._named], 0
        while todo:
            folder = todo.pop()
            try:
                entries = list(os.scandir(folder))
            except OSError:  # a file, or nothing that could be read
                continue
            seen += len(entries)
            if seen > _MOST:
                return leaking, True
            for entry in entries:
                path = Path(entry.path)
                if entry.is_dir(follow_symlinks=False):
                    todo.append(path)
                elif entry.is_symlink() and self._leads_out(path):
                    leaking.update(p for p in path.parents if p.is_relative_to(self._named))
        return leaking, False

    def _leads_out(self, link: Path) -> bool:
        try:
            return link.exists() and not self.holds(link)
        except (OSError, RuntimeError):
            return False  # it leads nowhere
