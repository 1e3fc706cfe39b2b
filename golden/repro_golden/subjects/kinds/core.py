"""In-process subjects (`repro_core.CONTRACT`): all runs of a launch in one replay child.

Where several ranks train, each has one.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import shutil
import sys
import tempfile
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
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
from repro_golden.compare.renames import Parting
from repro_golden.recording.attach.code.identify import build, importable, modules
from repro_golden.recording.attach.gathered.collect import Gathering
from repro_golden.recording.pieces import assemble
from repro_golden.recording.rank_group import run_folder
from repro_golden.replay.children import (
    Child,
    ChildFailure,
    PortTakenError,
    Run,
    RunResult,
    Stage,
    base_environment,
    blame_the_machine,
)
from repro_golden.replay.output import last_line
from repro_golden.replay.ranks import Lost, Ranks, free_port, meeting, rank_log
from repro_golden.repository.checkout import Checkout, Place
from repro_golden.store.rollouts import RolloutSet
from repro_golden.subjects.argv import beside_case
from repro_golden.subjects.environments.builds import Who, identity_in
from repro_golden.subjects.environments.overlays import held_overlay
from repro_golden.subjects.kinds.kind import Kind
from repro_golden.trace import Header, Trace
from repro_golden.trace.frames import read_frames

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

    names = ("core",)
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
            return Who(identity.replaying().laid_out(layout), importable(), modules(), partial(build, root))
        try:
            with held_overlay(case, subject, Place(root), sys.executable, subject.packages) as overlay:
                variables |= beside_case(overlay.variables(variables), subject)
                overlay.notice(variables, root, overlay.folder)
                who = identity_in(case, overlay.python, variables, root)
                who.find_build()  # while it is held; it is remembered
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
                variables |= beside_case(overlay.variables(variables), subject)
                overlay.notice(variables, place.root, log)
            job: dict[str, Any] = {"case": case.canonical(), "root": str(place.root), "subject": about}
            if (ranks := case.resources.ranks) > 1:
                return _RankedJob(job, subject, ranks, python, variables, scratch, log).run_all(runs, cancel, enough)
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


# -- in-process subjects that train on several ranks of this host: one replay child for each, one trace of all


_ATTEMPTS = 3
"""How often ranks try to meet: between choosing a port and listening there somebody else may take it."""


@dataclass(frozen=True)
class _RankedJob:
    """What all runs of a launch have in common.

    Attributes:
        job: The replay children's, without its runs.
        subject: What is trained.
        ranks: How many processes train it.
        python: Their interpreter.
        variables: Their environment, without what tells them apart.
        scratch: A folder for what they write, in which they start.
        log: File for the output of all, one after the other; each has its own beside it.
    """

    job: Mapping[str, Any]
    subject: CoreSubject
    ranks: int
    python: str
    variables: Mapping[str, str]
    scratch: Path
    log: Path

    def run_all(
        self, runs: Sequence[Run], cancel: threading.Event | None, enough: Callable[[], bool] | None
    ) -> list[RunResult]:
        """Make the runs one after the other; see `subjects.launch`.

        What the ranks hold together is known here alone, so a run that parts from its baseline is ended from outside,
        with its processes: a run that may end so has processes of its own.
        """
        logs = [rank_log(self.log, rank) for rank in range(self.ranks)]
        for path in logs:
            path.write_bytes(b"")
        all_results: list[RunResult] = []
        for number, (_, group) in enumerate(itertools.groupby(enumerate(runs), _togetherness)):
            sizes = [path.stat().st_size for path in logs]
            try:
                results = self._met([run for _, run in group], number, logs, cancel, enough)
            finally:
                with self.log.open("ab") as every:
                    for path, size in zip(logs, sizes, strict=True):
                        with path.open("rb") as file:
                            file.seek(size)
                            shutil.copyfileobj(file, every)
            if results is None:
                return []
            all_results += results
        return all_results

    def _met(
        self,
        runs: Sequence[Run],
        number: int,
        logs: Sequence[Path],
        cancel: threading.Event | None,
        enough: Callable[[], bool] | None,
    ) -> list[RunResult] | None:
        """Make runs in one set of processes, again where the ranks' port was taken meanwhile."""
        for attempt in range(_ATTEMPTS):
            raw = self.scratch / f"raw-{number}-{attempt}"
            raw.mkdir()
            job = {**self.job, "runs": [asdict(run) for run in runs], "raw": str(raw)}
            (raw / "job.json").write_text(canonical_json(job), encoding="utf-8")
            command, port = [self.python, "-m", "repro_golden.replay.child", str(raw / "job.json")], free_port()
            limit = self.subject.timeout * len(runs)
            children = [
                Child(command, self.scratch, {**self.variables, **self._places(rank, port)}, path, limit)
                for rank, path in enumerate(logs)
            ]
            try:
                return _train(runs, Ranks(children, raw), cancel, enough)
            except PortTakenError:
                begun = any(run.trace and (Path(run.trace) / "header.json").exists() for run in runs)
                if attempt == _ATTEMPTS - 1 or begun:
                    raise
            finally:
                shutil.rmtree(raw, ignore_errors=True)
        raise AssertionError("unreachable")

    def _places(self, rank: int, port: str) -> dict[str, str]:
        """The variables of one rank; a port or address that the case names is where they meet."""
        env = meeting(rank, self.ranks, port)
        return env | {key: self.subject.env[key] for key in ("MASTER_ADDR", "MASTER_PORT") if key in self.subject.env}


def _ends_early(run: Run) -> bool:
    """Whether a run may be over before it has made its steps."""
    return run.baseline is not None and run.steps > 1


def _togetherness(numbered: tuple[int, Run]) -> int:
    """The same for neighbours that can be made in one set of processes."""
    number, run = numbered
    return number if _ends_early(run) else -1


class _Growing:
    """One run, its trace growing while the ranks train."""

    def __init__(self, run: Run, raw: Path, ranks: int) -> None:
        self.run, self.raw = run, raw
        self.parted = False
        self.wrong: ReproError | None = None
        self._parting = Parting(run.baseline, run.trace)
        self._gathering = Gathering(raw, Path(run.trace), _header, ranks) if run.trace else None

    @property
    def step(self) -> int:
        """The step under way."""
        return self.run.first_step + (self._gathering.steps if self._gathering else 0)

    def poll(self) -> bool:
        """Write what all ranks have recorded since; whether the run is to end."""
        if self._gathering is None or self.wrong:
            return bool(self.wrong)
        try:
            self.parted |= self._parting.seen(self._gathering.poll())
        except MachineFailureError:
            raise
        except ReproError as error:  # the ranks' records do not fit together, and will not
            self.wrong = error
        return bool(self.wrong) or (self.parted and _ends_early(self.run))

    def close(self) -> None:
        """Leave what was recorded so that it can be read."""
        if self._gathering is not None:
            try:
                self.poll()
                if (trace := Path(self.run.trace or "")).is_dir():
                    assemble(self.raw, trace)
            finally:
                self._gathering.close()

    def result(self, reports: Sequence[Mapping[str, Any]], log: Path) -> RunResult:
        """What came of it.

        Args:
            reports: What each rank says of it; nothing where it was ended before.
            log: What a failure of all ranks is shown by.

        Raises:
            ChildFailure: the ranks' records make no trace.
        """
        seconds = reports[0]["seconds"] if reports else []
        if self._gathering is None:
            terminal = {
                f"rank-{k:05d}/{name}": v for k, report in enumerate(reports) for name, v in report["terminal"].items()
            }
            return RunResult(reports[0]["steps"], False, terminal, seconds)
        try:
            self.poll()
            if self.wrong:
                raise self.wrong
            collected = self._gathering.finish(["the trainer"], 0, "diverged" if self.parted else "finished")
        except MachineFailureError:
            raise
        except ReproError as error:
            stage: Stage = "step" if self._gathering.steps else "start"
            raise ChildFailure(stage, self.step, str(error), str(log)) from None
        if not self.parted and not collected.complete:
            raise ChildFailure("step", collected.steps, "the ranks made different numbers of steps", str(log))
        return RunResult(collected.steps, self.parted, collected.terminal, seconds)


def _train(
    runs: Sequence[Run], ranks: Ranks, cancel: threading.Event | None, asked: Callable[[], bool] | None
) -> list[RunResult] | None:
    """Make runs in one set of processes; None where `asked` ended them."""
    count = len(ranks.children)
    with contextlib.ExitStack() as exits:
        growing = [_Growing(run, run_folder(ranks.raw, number), count) for number, run in enumerate(runs)]
        for trace in growing:
            trace.raw.mkdir()
            exits.callback(trace.close)
        asked_so = False

        def enough() -> bool:
            nonlocal asked_so
            ended = [trace.poll() for trace in growing]
            asked_so = not any(ended) and bool(asked and asked())
            return any(ended) or asked_so

        try:
            ranks.run(cancel, enough)
        except Lost as lost:
            raise _judged(lost, growing) from None
        if asked_so:
            return None
        log = ranks.children[0].log
        for trace in growing:
            if trace.wrong:
                return [trace.result([], log)]
        reports = [ranks.results[rank] for rank in range(count)] if len(ranks.results) == count else []
        return [trace.result([report[number] for report in reports], log) for number, trace in enumerate(growing)]


def _judged(lost: Lost, growing: Sequence[_Growing]) -> Exception:
    """Whose failure it was that a rank failed."""
    who, report = f"rank {lost.rank}", lost.report or {}
    if refusal := report.get("refused"):
        kind = MachineFailureError if report.get("machine") else ReproError
        return kind(f"{who}: {refusal}")
    try:
        blame_the_machine(lost.code or 0, lost.log, f"{who} of the trainer")
    except MachineFailureError as machine:
        return machine
    if failure := report.get("failure"):
        return ChildFailure(failure["stage"], failure["step"], f"{who}: {failure['message']}", str(lost.log))
    message = f"{who} exited with {lost.code}: {last_line(lost.log)}"
    return ChildFailure(*_came_to(lost.rank, growing), message, str(lost.log))


def _came_to(rank: int, growing: Sequence[_Growing]) -> tuple[Stage, int]:
    """How far a rank came that could not say so, by the records that it begins after `load`."""
    for trace in reversed(growing):
        if (log := trace.raw / f"rank-{rank:05d}.log").exists():
            steps = sum(1 for _ in read_frames(log))
            return ("step" if steps else "start"), trace.run.first_step + steps
    return "import", -1


def _header(about: Mapping[str, Any], _: int) -> Header:
    return Header.from_mapping(about["header"])
