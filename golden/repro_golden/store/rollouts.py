"""Recorded rollouts in canonical form: a folder of one safetensors file per rollout and an index with their digests.

Equality is always over content (tensors by fingerprint, metadata as canonical JSON), never over file bytes.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from repro_golden.base.canonical import canonical_json, check_format, digest, read_json, write_atomic
from repro_golden.base.errors import ReproError
from repro_golden.store.rollout_file import FORMAT, RolloutData, read_rollout

if TYPE_CHECKING:
    from repro_golden.base.systems import System
    from repro_golden.case.file import Case
    from repro_golden.dumps.rollout.files import RolloutDump

__all__ = [
    "DumpFiles",
    "RolloutFiles",
    "RolloutSet",
    "Rollouts",
    "engine_text",
    "open_rollouts",
    "place_of",
    "rollouts_of",
    "sampled_by",
]

INDEX = "index.json"


class RolloutSet:
    """A folder of rollouts 0 .. n-1.

    Attributes:
        directory: The folder.
        digests: Content digest of each rollout, from the index.
    """

    def __init__(self, directory: Path) -> None:
        """Open a folder of rollouts.

        Raises:
            ReproError: no index, or a newer format.
        """
        self.directory = directory
        index = directory / INDEX
        if not index.exists():
            raise ReproError(
                f"no rollouts at {directory}: `repro golden pull` fetches them, `repro golden record` makes them"
            )
        raw = read_json(index, "rollout index")
        check_format(raw.get("format"), FORMAT, f"the rollouts {directory}")
        digests = raw.get("rollouts")
        if not isinstance(digests, list) or not all(isinstance(d, str) for d in digests):
            raise ReproError(f"{index} is damaged: pull or record it again")
        self.digests: list[str] = digests

    @classmethod
    def write_index(cls, directory: Path) -> RolloutSet:
        """Index the rollouts that a run has just written to `directory`."""
        count = len(list(directory.glob("*.safetensors")))
        digests = [read_rollout(directory / f"{i}.safetensors").digest for i in range(count)]
        write_atomic(directory / INDEX, canonical_json({"format": FORMAT, "rollouts": digests}) + "\n")
        return cls(directory)

    @property
    def digest(self) -> str:
        """32 hex digits over all rollouts in order."""
        return digest("rollouts", *self.digests)

    @cached_property
    def engine(self) -> Mapping[str, Any] | None:
        """The identity of the engine that sampled them; None where the trained policy itself did."""
        return self.read(0).meta.get("engine") if self.digests else None

    def __len__(self) -> int:
        return len(self.digests)

    def read(self, rollout_id: int) -> RolloutData:
        """Rollout `rollout_id`, checked against the index.

        Raises:
            ReproError: beyond the end, unreadable, or changed since it was indexed.
        """
        if not 0 <= rollout_id < len(self):
            raise ReproError(
                f"{self.directory} holds rollouts 0..{len(self) - 1}, the case needs rollout {rollout_id}: "
                "lower case.steps or record more"
            )
        path = self.directory / f"{rollout_id}.safetensors"
        rollout = read_rollout(path)
        if rollout.digest != self.digests[rollout_id]:
            raise ReproError(
                f"{path} was changed since it was recorded: `dvc checkout {self.directory}.dvc` brings it back"
            )
        return rollout


@dataclass(frozen=True)
class RolloutFiles:
    """What a command trains on: a folder of files of its own form, or nothing that we know of.

    Attributes:
        directory: The folder; None where the command reads what it likes.
    """

    directory: Path | None

    @cached_property
    def digest(self) -> str:
        """32 hex digits over the files' names and bytes; '' without a folder."""
        if self.directory is None:
            return ""
        parts = []
        for path in sorted(p for p in self.directory.rglob("*") if p.is_file()):
            with path.open("rb") as file:
                content = hashlib.file_digest(file, "sha256").hexdigest()
            parts.append(f"{path.relative_to(self.directory).as_posix()}={content}")
        return digest("rollout files", *parts)

    def __len__(self) -> int:
        return 0 if self.directory is None else sum(p.is_file() for p in self.directory.rglob("*"))


@dataclass(frozen=True)
class DumpFiles(RolloutFiles):
    """What slime, Miles or Relax train on: a folder of their rollout dumps ``{rollout_id}.pt``.

    Attributes:
        system: Whose form they have; recognised by their fields where None.
        allow: Classes whose objects are read as plain fields, beyond those of the trainers' own dumps.
    """

    system: System | None = None
    allow: tuple[str, ...] = ()

    @cached_property
    def digest(self) -> str:
        """32 hex digits over the files' names and content. Bytes are no content: torch.save writes a file's name too.

        Raises:
            ReproError: a file is no rollout dump, or names a class that is not read.
        """
        files = ((path, path.stat()) for path in self.files)
        digests = ((path, _dump_digest(path, s.st_size, s.st_ctime_ns, self.system, self.allow)) for path, s in files)
        return digest("rollout dumps", *(f"{path.name}={content}" for path, content in digests))

    @property
    def files(self) -> list[Path]:
        """The dumps by number; evaluations, which nothing is trained on, are left out."""
        from repro_golden.dumps.rollout.files import dump_files

        return dump_files(self.directory, evaluation=False) if self.directory else []

    def __len__(self) -> int:
        return len(self.files)

    def read(self, rollout_id: int) -> RolloutDump:
        """The dump of a rollout.

        Raises:
            ReproError: there is none of this number, or it cannot be read.
        """
        from repro_golden.dumps.rollout.files import read_rollout_dump

        path = (self.directory or Path()) / f"{rollout_id}.pt"
        if not path.exists():
            raise ReproError(f"no rollout dump {path}, there are {len(self)}: lower case.steps or record more of them")
        return read_rollout_dump(path, system=self.system, allow=self.allow)


@functools.lru_cache(maxsize=256)
def _dump_digest(path: Path, size: int, changed: int, system: System | None, allow: tuple[str, ...]) -> str:
    """A dump's content, read once as long as the file stays as it is: each run of a bisect asks for it."""
    from repro_golden.dumps.rollout.files import content_digest, read_rollout_dump

    del size, changed
    return content_digest(read_rollout_dump(path, system=system, allow=allow))


Rollouts = RolloutSet | RolloutFiles


def engine_text(identity: Mapping[str, Any]) -> str:
    """A rollout engine in a few words, and what of it is a stand-in."""
    name = " ".join(str(identity.get(key, "")) for key in ("name", "version")).strip()
    stand_ins = ", ".join(map(str, identity.get("stand_ins", ())))
    rests = f"; rests on stand-ins: {stand_ins}" if stand_ins else ""
    return f"{name} on {identity.get('device', 'an unknown device')}{rests}"


def sampled_by(rollouts: Rollouts) -> str:
    """`engine_text` of the engine that sampled them; '' for the trained policy itself, or where that is not known."""
    engine = rollouts.engine if isinstance(rollouts, RolloutSet) else None
    return engine_text(engine) if engine else ""


def place_of(rollouts: Rollouts) -> str | None:
    """Their folder, absolute, as a run takes it."""
    return str(rollouts.directory.absolute()) if rollouts.directory else None


def rollouts_of(case: Case, path: Path) -> Rollouts:
    """The rollouts of a case in a folder.

    Raises:
        ReproError: see `open_rollouts`.
    """
    subject = case.subject
    return RolloutSet(path) if subject.samples else open_rollouts(path, subject.system, subject.unpickled)


def open_rollouts(path: Path, system: System | None = None, allow: Sequence[str] = ()) -> Rollouts:
    """The rollouts in a folder: ours where it has our index, else dumps for a trainer that reads them, else files.

    Args:
        path: The folder.
        system: Which trainer reads them. A command's files are told apart by their bytes, whatever they are.
        allow: Classes whose objects dumps may hold.

    Raises:
        ReproError: no such folder, or our index in a newer format.
    """
    if (path / INDEX).exists():
        return RolloutSet(path)
    if not path.is_dir():
        raise ReproError(f"no folder {path}: correct case.rollouts, or `repro golden pull` where DVC keeps it")
    return DumpFiles(path, system, tuple(allow)) if system else RolloutFiles(path)
