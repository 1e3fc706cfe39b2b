"""What every kind of subject can do: one class for each, which `subjects.KINDS` finds."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

from repro_golden.base.canonical import digest
from repro_golden.base.errors import ReproError
from repro_golden.case.file import Case
from repro_golden.recording.attach.code.identify import Built, marked
from repro_golden.replay.children import ChildFailure, Run, RunResult, watched
from repro_golden.replay.output import last_line, tail
from repro_golden.repository.checkout import Checkout, Place
from repro_golden.subjects.argv import interpreter
from repro_golden.subjects.environments.builds import Who
from repro_golden.subjects.missing import missing_from
from repro_golden.subjects.surroundings import folders_of
from repro_golden.trace import Header

__all__ = ["Kind", "Perturbation"]

Perturbation = tuple[int, str, str]
"""Step, phase and name of the signal that is changed by one ULP."""


class Kind(ABC):
    """How the subject of one case is run, and asked who it is.

    Attributes:
        names: What case files call it (`[subject] kind`).
        advice: What makes a trainer of this kind reproduce itself.
    """

    names: ClassVar[tuple[str, ...]] = ()
    advice: ClassVar[str]

    def __init__(self, case: Case) -> None:
        self.case = case

    # -- what a kind must say

    @abstractmethod
    def run_all(
        self,
        place: Place,
        runs: Sequence[Run],
        log: Path,
        cancel: threading.Event | None,
        enough: Callable[[], bool] | None,
    ) -> list[RunResult]:
        """Make runs one after the other; see `launch`."""

    @abstractmethod
    def identity(self, root: Path) -> Who:
        """Who the processes of a run would be, without training.

        Raises:
            ReproError: their environment does not build, or their Python does not serve.
        """

    # -- what it may say otherwise

    @classmethod
    def given(cls, header: Header) -> Mapping[str, Any]:
        """What a trace tells of the process that the words and variables of its case are for.

        Returns:
            ``argv``, and ``variables`` as `variables_given` has them, among others; neither where no process was asked.
        """
        return header.subject

    def out_of_reach(self, checkout: Checkout) -> str:
        """Why no commit of the repository can change the subject; '' where one can, or where nobody knows."""
        path = self.case.subject.path
        if checkout.takes(path):
            return ""
        what = (
            f"git takes no file of {path}"
            if path != "."
            else "the repository holds no file beside what recording writes"
        )
        return f"{what}, so no commit can change the subject: correct subject.path, or commit the code that trains"

    @property
    def provable(self) -> tuple[str, ...]:
        """Phases in which a planted change must be seen."""
        return ("grad", "update") if self.case.subject.recorded else ()

    def rests_on(self, packages: Collection[str]) -> list[str]:
        """Those of the packages that a run loaded which its numbers may rest on."""
        return sorted(packages)

    def perturbed_inside(self, perturbation: Perturbation) -> bool:
        """Whether a change is planted in the program itself, and not in what it wrote as that is read."""
        del perturbation
        return True

    @property
    def brings_rollouts(self) -> bool:
        """Whether its rollouts are files of its own form, which are there or are none of ours."""
        return False

    def needs_rollouts(self, path: Path) -> str:
        """Why there must be rollouts at `path` before a recording; '' where that captures them, or needs none."""
        del path
        return ""

    def try_out(self, place: Place, log: Path) -> None:
        """See `subjects.try_out`."""
        del place, log

    def exit_of(self, place: Place, log: Path, cancel: threading.Event | None) -> int:
        """The exit code of the program; see `exit_code`."""
        del place, log, cancel
        kind = self.case.subject.kind
        raise ReproError(f"{self.case.name} is of kind {kind}, which has no exit code: give a command after --")

    def sampler(self, settings: Mapping[str, Any], *, only: bool) -> Case:
        """The case that captures rollouts.

        Args:
            settings: Keys of ``[subject.config]`` with other values, for the capture alone.
            only: Whether nothing is trained: every rollout is sampled with the starting weights.

        Raises:
            ReproError: it makes its rollouts itself, or not otherwise than it does.
        """
        del settings, only
        raise ReproError(
            f"{self.case.name} is a command, whose rollouts are its own files: let it write them (its own "
            "--save-debug-rollout-data) and name their folder in case.rollouts"
        )

    def capture(self, place: Place, folder: Path, log: Path, *, only: bool) -> None:
        """Write as many rollouts as the case needs to a folder; see `sampler`.

        Raises:
            ChildFailure: the trainer failed.
            ReproError: it wrote too few, or weights did not arrive at the engine.
        """
        raise NotImplementedError

    def sampled_by(self, *, only: bool) -> str:
        """Who samples the rollouts of a capture, in words."""
        raise NotImplementedError

    # -- what all do alike

    def launch(
        self,
        place: Place,
        runs: Sequence[Run],
        log: Path,
        cancel: threading.Event | None = None,
        enough: Callable[[], bool] | None = None,
    ) -> list[RunResult]:
        """See `subjects.launch`."""
        log.parent.mkdir(parents=True, exist_ok=True)
        with watched(place, log, self.case.subject.env, folders_of(self.case, place.home or place.root)) as disks:
            log.write_bytes(b"")
            try:
                results = self.run_all(place, runs, log, cancel, enough)
            except ChildFailure as failure:
                raise self._explained(failure, place, tail(log)) from None
            if len(results) < len(runs) or any(_cut(*pair) for pair in zip(results, runs, strict=True)):
                disks.blame()
            return results

    def exit_code(self, place: Place, log: Path, cancel: threading.Event | None = None) -> int:
        """See `subjects.exit_code`."""
        log.parent.mkdir(parents=True, exist_ok=True)
        with watched(place, log, self.case.subject.env, folders_of(self.case, place.home or place.root)) as disks:
            log.write_bytes(b"")
            try:
                code = self.exit_of(place, log, cancel)
            except ChildFailure as failure:
                raise self._explained(failure, place, tail(log)) from None
            if code:
                disks.blame()
            if 0 < code < 128 and code != 125:  # it says nothing of a commit that it did not find what no commit holds
                ended = ChildFailure("start", -1, f"exited with {code}: {last_line(log)}", str(log), code)
                if (explained := self._explained(ended, place, last_line(log), sure=True)) is not ended:
                    raise explained
            return code

    def _explained(self, failure: ChildFailure, place: Place, output: str, *, sure: bool = False) -> ChildFailure:
        """The failure, with what its program did not find because no commit holds it; see `missing_from`."""
        timeout, linked = failure.stage == "timeout", self.case.subject.link
        missing = "" if timeout else missing_from(place, output, linked, sure=sure)
        return replace(failure, message=f"{failure.message} ({missing})") if missing else failure

    def other_pythons(self, root: Path) -> list[str]:
        """Interpreters that its commands name beside the case's own."""
        del root
        return []

    def build(self, root: Path) -> Built:
        """See `subjects.build_of`."""
        if self.case.subject.locks:
            python = Path(interpreter(self.case.subject, root))
            marks, binary = marked([str(python)]), python.stat()
            facts = str(python.resolve()), f"{binary.st_size} {binary.st_mtime_ns}"
            return Built(digest("interpreter", *facts), marks)
        return self.identity(root).find_build()


def _cut(result: RunResult, run: Run) -> bool:
    """Whether a run did not make all of its steps: a program may go on, and differ, where it could not write."""
    return run.train and (result.diverged or result.steps < run.steps)
