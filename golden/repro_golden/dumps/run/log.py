"""A trainer's log, read while it grows: metrics of updates and of rollouts."""

from __future__ import annotations

import codecs
import fnmatch
from collections.abc import Sequence
from pathlib import Path

from repro_golden.base.canonical import same_float
from repro_golden.base.errors import ReproError
from repro_golden.base.files import open_regular
from repro_golden.base.printed.lines import Labelled, Lines, labelled
from repro_golden.base.printed.machine_numbers import measures_time

__all__ = ["RunLog", "wanted"]

_CHUNK = 1 << 20
_NUMBERS = ("rollout/step", "rollout/partition")  # the rollout's number, and where the rank's samples came from


class RunLog:
    """The metrics of a log.

    Attributes:
        path: The file; it need not exist yet.
        steps: By the update's number, what its line says, under the names that traces give (`named`).
        rollouts: By the rollout's number, likewise: ``rollout/...``, ``multi_turn/...``, ``passrate/...``.
        roles: Whose updates have lines: ``actor``, ``critic``.
    """

    def __init__(self, path: Path, ignore: Sequence[str] = (), start: int = 0) -> None:
        """Look at a log.

        Args:
            path: The file.
            ignore: Globs of metrics to leave out.
            start: Byte from which on it is this run's.
        """
        self.path = path
        self.steps: dict[int, dict[str, float]] = {}
        self.rollouts: dict[int, dict[str, float]] = {}
        self.roles: set[str] = set()
        self.seen: dict[str, set[int]] = {}
        self._ignore = ignore
        self._offset = start
        self._ended = False
        self._decode = codecs.getincrementaldecoder("utf-8")(errors="replace").decode
        self._found: list[Labelled] = []
        self._lines = Lines(self._take)

    def read(self, *, end: bool = False) -> None:
        """Take what was written since.

        Args:
            end: Nothing more will be written: what stands behind the last line end is a line, too.

        Raises:
            ReproError: the file cannot be read, or says two things of one update.
        """
        try:
            with open_regular(self.path) as file:
                size = file.seek(0, 2)
                if size < self._offset:
                    raise ReproError(f"{self.path} became shorter while it was read: of another run?")
                file.seek(self._offset)
                while raw := file.read(_CHUNK):
                    self._offset += len(raw)
                    self._lines.write(self._decode(raw))
                    self._settle()
        except FileNotFoundError:
            if end:
                raise ReproError(f"there is no log at {self.path}") from None
        except OSError as error:
            raise ReproError(f"{self.path} cannot be read: {error.strerror}") from None
        if end and not self._ended:
            self._ended = True
            self._lines.write(self._decode(b"", True) + "\n")
            self._settle()

    def _take(self, line: str) -> None:
        entry = labelled(line)
        if entry and entry.label not in ("perf", "eval"):
            self._found.append(entry)

    def _settle(self) -> None:
        entries, self._found = self._found, []
        for entry in entries:
            metrics = wanted(entry.metrics, self._ignore)
            if entry.label == "step":
                self.roles.add(entry.role)
                self.seen.setdefault(entry.role, set()).add(entry.number)
                self._merge(self.steps.setdefault(entry.number, {}), metrics, f"step {entry.number}")
            else:
                self.seen.setdefault(entry.label, set()).add(entry.number)
                # the critic's ranks print their means under the same label
                critic = "rollout/values" in metrics and "rollout/log_probs" not in metrics
                named = {f"critic-{name}" if critic else name: value for name, value in metrics.items()}
                self._merge(self.rollouts.setdefault(entry.number, {}), named, f"{entry.label} {entry.number}")

    def _merge(self, into: dict[str, float], metrics: dict[str, float], what: str) -> None:
        """A line may be there twice (on the driver and from a worker), but not with other numbers."""
        for name, value in metrics.items():
            if name in into and not same_float(into[name], value):
                raise ReproError(
                    f"{self.path} has two lines of {what} that differ ({name}: {into[name]!r} and {value!r}): "
                    "give the log of one run"
                )
            into[name] = value


def wanted(metrics: dict[str, float], ignore: Sequence[str] = ()) -> dict[str, float]:
    """Metrics under a trace's names, without those that differ from run to run.

    ``train/`` is taken off, so that ``train/critic-grad_norm`` is ``critic-grad_norm``; the step's own number is left
    out, as is what measures time or memory by its name, and what a glob of `ignore` matches in either form.
    """
    selected = {}
    for name, value in metrics.items():
        short = name.removeprefix("train/")
        left = short == "step" or name in _NUMBERS or name.startswith(("perf/", "eval/"))
        ignored = any(fnmatch.fnmatchcase(form, glob) for form in (name, short) for glob in ignore)
        if not (left or ignored or measures_time(short)):
            selected[short] = value
    return selected
