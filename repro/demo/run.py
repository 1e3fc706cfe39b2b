"""The demo itself: hide a regression, record, verify, bisect, report, and only then open the answer."""

from __future__ import annotations

import shlex
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from repro.demo.history import make_history
from repro.demo.repository import checkout, open_answer, seal_answer, write_repository
from repro.initialise import initialise, trainer_source
from repro.live import line_of
from repro.report.bisect import write_report
from repro_bisect.driver.commits import bisect_range
from repro_bisect.driver.result import BisectResult
from repro_bisect.driver.session import Options as BisectOptions
from repro_bisect.driver.session import commits_of
from repro_bisect.probe.progress import Event
from repro_golden.base.errors import ReproError
from repro_golden.case.file import find_case
from repro_golden.repository.checkout import find_checkout
from repro_golden.runs.record import Options, record
from repro_golden.runs.verify import Verification, verify

__all__ = ["MARKER", "DemoResult", "prepare_folder", "run_demo"]

MARKER = ".repro-demo"
"""A file that says: this folder is a demo's and may be replaced by the next one."""
_CASE = "demo"

Say = Callable[[str], None]


@dataclass(frozen=True)
class DemoResult:
    """What a demo did and found.

    Attributes:
        seed: Of the history.
        commits: How many lie between the golden run and HEAD.
        proofs: How many the golden run passed.
        verification: HEAD's replay against the golden run.
        bisect: The search.
        answer: The opened answer: commit, subject, kind, place, phase and first_step.
        sha256: Of the sealed answer.
        reports: Markdown and HTML.
        reproduce: The command that searches again.
        seconds: Wall time of everything.
    """

    seed: int
    commits: int
    proofs: int
    verification: Verification
    bisect: BisectResult
    answer: dict[str, Any]
    sha256: str
    reports: tuple[Path, ...]
    reproduce: str
    seconds: float

    @property
    def problem(self) -> str:
        """Why the demo failed, in one line; empty when the planted commit, step and phase were named."""
        bisect, planted = self.bisect, self.answer
        if self.verification.agrees:
            return "HEAD agrees with the golden run although a regression was planted"
        if bisect.outcome != "found" or bisect.culprit is None or bisect.divergence is None:
            return f"the bisect ended with {bisect.outcome!r} instead of a commit"
        if bisect.culprit.commit != planted["commit"]:
            return f"the bisect named {bisect.culprit.commit[:10]}, but {planted['commit'][:10]} was planted"
        if bisect.divergence.step != planted["first_step"]:
            return f"the first difference is at step {bisect.divergence.step}, but {planted['first_step']} was planted"
        if bisect.divergence.phase != planted["phase"]:
            return f"the first difference is in {bisect.divergence.phase}, but {planted['phase']} was planted"
        return ""

    def to_mapping(self) -> dict[str, Any]:
        """JSON types."""
        return {
            "seed": self.seed,
            "right": not self.problem,
            "problem": self.problem,
            "commits": self.commits,
            "proofs": self.proofs,
            "verify": self.verification.to_mapping(),
            "bisect": self.bisect.to_mapping(),
            "answer": self.answer,
            "sha256": self.sha256,
            "reports": [str(path) for path in self.reports],
            "reproduce": self.reproduce,
            "seconds": self.seconds,
        }


def prepare_folder(folder: Path) -> None:
    """An empty folder with the demo's marker; an earlier demo's content is removed.

    Raises:
        ReproError: it holds something else, or is a file.
    """
    if folder.exists() and not folder.is_dir():
        raise ReproError(f"{folder} is a file: give --out another folder")
    if folder.exists() and any(folder.iterdir()):
        if not (folder / MARKER).is_file():
            raise ReproError(f"{folder} is not empty and no earlier demo's: empty it, or give --out another folder")
        for path in folder.iterdir():
            if path.name == MARKER:
                continue  # last of all, so that a demo that is killed here can be replaced too
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / MARKER).write_text("Written by `repro demo`, which replaces this folder.\n", encoding="utf-8")


def run_demo(seed: int, folder: Path, say: Say) -> DemoResult:
    """Do the whole job in `folder`.

    Raises:
        ReproError: the folder or the machine does not serve, or a golden run was refused.
    """
    began = time.monotonic()
    folder = folder.resolve()
    prepare_folder(folder)
    root = folder / "repository"
    good, commits, digest = _hide(seed, root, folder / "answer.json")
    say(f"a history of {commits} commits after {good[:10]}; one of them lowers a precision")
    say(f"the answer is sealed in {_shown(folder)}/answer.json (sha256 {digest[:16]})")

    checkout(root, good, detach=True)
    for wrote in initialise(root, "first", str(folder / "remote")):
        say(f"wrote {wrote}")
    repository = find_checkout(root)
    case = find_case(root, _CASE)
    _, proofs = record(repository, case, Options(), say)

    checkout(root, "main")
    verification = verify(repository, case, say)
    say(f"HEAD: {verification.comparison.divergence or 'agrees with the golden run'}")

    def watch(event: Event) -> None:
        if event.text:
            say(line_of(event))

    spec = f"{good[:10]}..main"
    options = BisectOptions(explain=True)
    result = bisect_range(repository, case, commits_of(repository, case, spec, options), watch, options)
    command = f"cd {shlex.quote(_shown(root))} && repro bisect {spec} --case {_CASE}"
    reports = tuple(write_report(result, folder, command))
    answer = open_answer(folder / "answer.json", digest)
    seconds = time.monotonic() - began
    return DemoResult(
        seed, commits, len(proofs), verification, result, answer, digest, reports, command, round(seconds, 3)
    )


def _hide(seed: int, root: Path, path: Path) -> tuple[str, int, str]:
    """Write repository and sealed answer: first commit, commits after it, and the seal. The answer stays behind."""
    history = make_history(trainer_source(), seed)
    ids = write_repository(root, history.commits)
    return ids[0], len(ids) - 1, seal_answer(history.answer(ids), path)


def _shown(path: Path) -> str:
    """A path as the user would type it."""
    here = Path.cwd()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)
