"""The files of a run's folder, found while they appear."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterator
from pathlib import Path

from repro_golden.base.errors import ReproError
from repro_golden.base.systems import System
from repro_golden.dumps.archive.reading import LIMIT
from repro_golden.dumps.run.losses import loss_name
from repro_golden.dumps.train.files import TrainDump, first_missing, read_train_dump

__all__ = ["TrainFiles", "loss_files", "numbered", "side_files"]

_TRAIN = re.compile(r"([0-9]{1,18})(?:_([0-9]{1,9}))?\.pt")
_BULKY = {"train_data", "rollout_data", "events", "policy_loss_debug", "dashboard_columns", "trajectory", "tokenizer"}
_DEPTH = 4


class TrainFiles:
    """The train dumps of a folder: ``train_data/N.pt`` or ``train_data/N_RANK.pt``, or the same in the folder itself.

    Attributes:
        paths: By rollout, then by rank; under None slime's one file.
    """

    def __init__(
        self, folder: Path, system: System | None, ranks: int | None, allow: Collection[str] = (), limit: int = LIMIT
    ) -> None:
        self.paths: dict[int, dict[int | None, Path]] = {}
        self._folder, self._system, self._ranks, self._allow, self._limit = folder, system, ranks, allow, limit
        self._read: dict[Path, tuple[tuple[int, int], TrainDump | ReproError]] = {}

    def refresh(self) -> None:
        """Look for new files."""
        dumps = self._folder / "train_data"
        if not dumps.is_dir():
            if (self._folder / "rollout_data").is_dir():
                return  # then numbers in the folder itself are no train dumps
            dumps = self._folder
        for rollout, rank, path in numbered(dumps):
            self.paths.setdefault(rollout, {})[rank] = path

    def later(self, rollout: int) -> bool:
        """Whether a later rollout has files: a rank writes those of a rollout before it trains on the next."""
        return any(other > rollout for other in self.paths)

    @property
    def ranks(self) -> int | None:
        """How many ranks the dumps of all rollouts tell of; None where they tell of none."""
        written = [rank for by_rank in self.paths.values() for rank in by_rank if rank is not None]
        return max(written) + 1 if written else None

    def load(self, rollout: int, *, final: bool) -> list[TrainDump] | None:
        """The files of a rollout.

        Args:
            rollout: Its number.
            final: Nothing is being written any more.

        Returns:
            None where not all of them are there yet, or one is still being written.

        Raises:
            ReproError: one cannot be read, and is whole.
        """
        final = final or self.later(rollout)
        paths = self.paths.get(rollout, {})
        if not paths:
            return None
        if None not in paths and not final and (self._ranks is None or _missing(paths, self._ranks)):
            return None
        # what is not this rollout's was used up
        self._read = {path: known for path, known in self._read.items() if path in paths.values()}
        dumps = []
        for path in paths.values():
            dump = self._one(path)
            if isinstance(dump, ReproError):
                if final:
                    raise dump
                return None
            if dump.rollout_id != rollout:
                raise ReproError(f"{path} is of rollout {dump.rollout_id}, and its name says {rollout}")
            dumps.append(dump)
        return dumps

    def forget(self) -> None:
        """Let go of the files that were read."""
        self._read.clear()

    def _one(self, path: Path) -> TrainDump | ReproError:
        """A file, or why it cannot be read; one that has not changed since is not read again."""
        try:
            seen = path.stat()
        except OSError as error:
            return ReproError(f"{path} cannot be read: {error.strerror}")
        state = seen.st_size, seen.st_mtime_ns
        if path in self._read and self._read[path][0] == state:
            return self._read[path][1]
        try:
            dump: TrainDump | ReproError = read_train_dump(
                path, system=self._system, allow=self._allow, limit=self._limit
            )
        except ReproError as error:
            dump = error
        self._read[path] = (state, dump)
        return dump


def _missing(paths: Collection[int | None], ranks: int) -> bool:
    return first_missing([rank for rank in paths if rank is not None], ranks) is not None


def numbered(folder: Path) -> Iterator[tuple[int, int | None, Path]]:
    """The files ``N.pt`` and ``N_RANK.pt`` of a folder."""
    try:
        names = [entry.name for entry in os.scandir(folder)]
    except OSError:
        return
    for name in names:
        if match := _TRAIN.fullmatch(name):
            yield int(match[1]), None if match[2] is None else int(match[2]), folder / name


def loss_files(folder: Path) -> dict[int, dict[int, Path]]:
    """The dumps of the policy loss by rank and call."""
    paths: dict[int, dict[int, Path]] = {}
    try:
        names = [entry.name for entry in os.scandir(folder / "policy_loss_debug")]
    except OSError:
        return paths
    for name in names:
        if seen := loss_name(name):
            paths.setdefault(seen[0], {})[seen[1]] = folder / "policy_loss_debug" / name
    return paths


def side_files(folder: Path) -> list[Path]:
    """Files of the folder and of the folders in it, without those that hold dumps; links are not followed."""
    paths: list[Path] = []
    for at, folders, names in os.walk(folder):
        depth = len(Path(at).relative_to(folder).parts)
        folders[:] = sorted(name for name in folders if name not in _BULKY) if depth < _DEPTH else []
        paths += [Path(at) / name for name in sorted(names)]
    return paths
