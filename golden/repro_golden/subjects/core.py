"""Subjects behind the door (`repro_core.CONTRACT`): all runs of a launch in one replay child.

Where several ranks train, `core_ranks` starts one for each.
"""

from __future__ import annotations

import contextlib
import json
import sys
import tempfile
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, cast

from packaging.version import Version

from repro_golden.base.canonical import canonical_json
from repro_golden.base.errors import MachineFailureError, ReproError
from repro_golden.base.extras import require
from repro_golden.case.file import Case, CoreSubject
from repro_golden.case.identity import PACKAGES, collect, megatron_layout, megatron_variables
from repro_golden.case.tables import joined
from repro_golden.recording.attach.identify import build, importable, modules
from repro_golden.replay.children import (
    Child,
    ChildFailure,
    Run,
    RunResult,
    Stage,
    base_environment,
    blame_the_machine,
    last_line,
)
from repro_golden.repository.checkout import Checkout, Place
from repro_golden.store.rollouts import RolloutSet
from repro_golden.subjects.argv import told
from repro_golden.subjects.core_ranks import RankedJob
from repro_golden.subjects.environments.builds import Who, identity_in
from repro_golden.subjects.environments.overlays import held_overlay
from repro_golden.subjects.kind import Kind
from repro_golden.trace import Trace

__all__ = ["CoreKind", "environment", "require_torch"]


def environment(case: Case, root: Path) -> dict[str, str]:
    """The environment of a child that trains the subject under `root`.

    PYTHONPATH holds the subject's folder alone, so a worktree swaps the subject and never the instrument.
    """
    subject = cast("CoreSubject", case.subject)
    variables = base_environment(case) | {"PYTHONSAFEPATH": "1"} | megatron_variables(subject.config) | subject.env
    if subject.path:
        variables["PYTHONPATH"] = str(root / subject.path)
    return variables


class CoreKind(Kind):
    """A trainer that our replay child imports by its interface."""

    advice = "find the source with `python -m repro_core.determinism`, or keep it for its metrics with --allow-noise"

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        self.subject = cast("CoreSubject", case.subject)

    @property
    def provable(self) -> tuple[str, ...]:
        """It shows all that it does."""
        return ("input", "forward", "grad", "update")

    def out_of_reach(self, checkout: Checkout) -> str:
        """Where the module is not in the subject's folder, a child imports what is installed."""
        subject = self.subject
        folder, top = checkout.root / subject.path, subject.module.partition(".")[0]
        if subject.path and any(path.name.partition(".")[0] == top for path in _entries(folder)):
            return super().out_of_reach(checkout)
        where = f"is not in {subject.path}/" if subject.path else "is imported as installed (subject.path is empty)"
        return (
            f"{subject.module} {where}, so no commit can change the subject: set subject.path to the folder of this "
            "repository that holds it, or guard a program of yours (`repro golden record NAME -- YOUR COMMAND`)"
        )

    def identity(self, root: Path) -> Who:
        """Who a child would be, by the packages of this process or its overlay.

        Raises:
            ReproError: the packages that the case asks for make no environment.
        """
        case, subject = self.case, self.subject
        variables, resources = environment(case, root), case.resources
        layout = megatron_layout(subject.config, resources.ranks)
        if not subject.packages:
            identity = collect(variables, threads=resources.cpus, ranks=resources.ranks)
            return Who(identity.replaying().laid_out(layout), importable(), build(root), modules())
        try:
            with held_overlay(case, subject, Place(root), sys.executable, subject.packages) as overlay:
                variables |= told(overlay.variables(variables), subject)
                overlay.notice(variables, root, overlay.folder)
                who = identity_in(case, overlay.python, variables, root)
                return replace(who, identity=who.identity.replaying().laid_out(layout))
        except ChildFailure as failure:
            raise ReproError(f"no environment for {root}: {failure}; correct subject.packages") from None

    def rests_on(self, packages: Collection[str]) -> list[str]:
        """Our replay child loads packages of its own beside the trainer's."""
        return sorted({*packages} & {*PACKAGES})

    def sampler(self, settings: Mapping[str, Any], *, only: bool) -> Case:
        """With other settings it may sample by another engine."""
        del only
        config = joined(self.subject.config, settings)
        return self.case.model_copy(update={"subject": self.subject.model_copy(update={"config": config})})

    def sampled_by(self, *, only: bool) -> str:
        """Its engine."""
        engine = self.subject.config.get("rollout_engine", "policy")
        what = "sampled with the starting weights" if only else f"{self.case.steps} steps, sampled as it trains"
        return what + ("" if engine == "policy" else f", by {engine}")

    def capture(self, place: Place, folder: Path, log: Path, *, only: bool) -> None:
        """It writes what it trains on."""
        self.launch(place, [Run(self.case.steps, save_rollouts=str(folder), train=not only)], log)
        RolloutSet.write_index(folder)

    def run_all(
        self,
        place: Place,
        runs: Sequence[Run],
        log: Path,
        cancel: threading.Event | None,
        enough: Callable[[], bool] | None,
    ) -> list[RunResult]:
        """All in one child, or in one for each rank."""
        case, subject = self.case, self.subject
        with contextlib.ExitStack() as exits:
            scratch = Path(
                exits.enter_context(tempfile.TemporaryDirectory(prefix="repro-child-"))
            )  # also where it starts
            about: dict[str, Any] = {"kind": subject.kind, "commit": place.commit, "tree": place.tree}
            variables, python = environment(case, place.root) | dict(place.variables), sys.executable
            if not subject.packages:
                require_torch(case)
            else:
                overlay = exits.enter_context(held_overlay(case, subject, place, python, subject.packages, cancel))
                about["environment"], python = overlay.to_mapping(), overlay.python
                variables |= told(overlay.variables(variables), subject)
                overlay.notice(variables, place.root, log)
            job: dict[str, Any] = {"case": case.canonical(), "root": str(place.root), "subject": about}
            if (ranks := case.resources.ranks) > 1:
                return RankedJob(job, subject, ranks, python, variables, scratch, log).run_all(runs, cancel, enough)
            result = scratch / "result.json"
            job |= {"runs": [asdict(run) for run in runs], "result": str(result), "raw": None}
            job_file = scratch / "job.json"
            job_file.write_text(canonical_json(job), encoding="utf-8")
            command = [python, "-m", "repro_golden.replay.child", str(job_file)]
            ended: list[bool] = []

            def stop() -> bool:
                ended[:] = [enough()] if enough else []
                return any(ended)

            child = Child(command, scratch, variables, log, subject.timeout * len(runs))
            code = child.run(cancel, stop if enough else None)
            return [] if any(ended) and not result.exists() else _result(result, runs, code, log)


def _entries(folder: Path) -> list[Path]:
    return list(folder.iterdir()) if folder.is_dir() else []


def require_torch(case: Case) -> None:
    """Refuse a Python without the torch that a case's subject is imported with: every commit would be a SKIP.

    Raises:
        ReproError: it has none, or one that the built-in trainer does not know.
    """
    subject = cast("CoreSubject", case.subject)
    require(f"the trainer {subject.module}", "trainer")
    release = version("torch")
    if subject.module == "repro_core" and Version(release).release < _OLDEST_TORCH:
        oldest = ".".join(map(str, _OLDEST_TORCH))
        raise ReproError(f"the built-in trainer needs torch {oldest}, {sys.executable} has {release}: upgrade it there")


_OLDEST_TORCH = (2, 9)


def _result(path: Path, runs: Sequence[Run], code: int, log: Path) -> list[RunResult]:
    if not path.exists():
        blame_the_machine(code, log)
        raise ChildFailure(*_died_at(runs), f"exited with {code}: {last_line(log)}", str(log))
    raw = json.loads(path.read_text(encoding="utf-8"))
    if refusal := raw.get("refused"):
        raise (MachineFailureError if raw.get("machine") else ReproError)(refusal)
    if failure := raw.get("failure"):
        blame_the_machine(code, log)
        raise ChildFailure(failure["stage"], failure["step"], failure["message"], str(log))
    return [RunResult(r["steps"], r["diverged"], r["terminal"], r["seconds"]) for r in raw["runs"]]


def _died_at(runs: Sequence[Run]) -> tuple[Stage, int]:
    """How far a child came that could not say so: the step under way by its last trace, which is begun after `load`."""
    stage: tuple[Stage, int] = ("import", -1)
    for run in runs:
        if run.trace and (Path(run.trace) / "header.json").exists():
            steps = Trace(Path(run.trace)).steps
            stage = ("step", steps[-1].step + 1) if steps else ("start", run.first_step)
    return stage
