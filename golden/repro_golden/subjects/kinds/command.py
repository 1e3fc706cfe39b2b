"""Subjects that are commands: programs that know nothing of us, recorded from outside by `recording.attach`."""

from __future__ import annotations

import contextlib
import functools
import tempfile
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from repro_golden.base.canonical import digest
from repro_golden.base.errors import MachineFailureError, ReproError
from repro_golden.base.files import scratch_folder
from repro_golden.base.machine.processes import ExecError
from repro_golden.case.file import Case, CommandSubject
from repro_golden.compare.renames import Parting
from repro_golden.recording.attach.base.settings import Settings
from repro_golden.recording.attach.code import strangers
from repro_golden.recording.attach.code.identify import Built
from repro_golden.recording.attach.gathered.collect import Gathering, read_terminal
from repro_golden.recording.attach.gathered.earlier_runs import among_others
from repro_golden.recording.attach.gathered.merging import OtherRanksError
from repro_golden.recording.attach.gathered.run import environment_for, said_of
from repro_golden.recording.attach.gathered.unseen import Unseen
from repro_golden.recording.attach.written.order import as_planted
from repro_golden.recording.attach.written.raw import cut_short
from repro_golden.replay.children import (
    Child,
    ChildFailure,
    Run,
    RunResult,
    Stage,
    blame_the_machine,
    blame_the_network,
)
from repro_golden.replay.output import last_line
from repro_golden.repository.checkout import Place, find_checkout
from repro_golden.store.rollouts import rollouts_of
from repro_golden.subjects.additions import Addition, Written
from repro_golden.subjects.argv import argv_of, beside_case, interpreter, replaced, variables_of
from repro_golden.subjects.caches import own_caches
from repro_golden.subjects.environments.builds import Environment, Who, held, identity_in
from repro_golden.subjects.environments.installs import left_alone, taken_back
from repro_golden.subjects.environments.overlays import Overlay, held_overlay
from repro_golden.subjects.kinds.kind import Kind, Perturbation
from repro_golden.subjects.pythons import build_of_other, check_own, environments_named, other_pythons, said_by, said_to
from repro_golden.trace import Header, Trace

__all__ = ["AdditionOf", "CommandKind"]

AdditionOf = Callable[[Run, Path], Addition | None]
"""What a kind adds to a run that has this scratch folder."""

_SET_UP = "set-up"
"""A file beside a worktree whose setup has been run."""


# -- a run


@dataclass(frozen=True)
class _Job:
    case: Case
    subject: CommandSubject
    place: Place
    run: Run
    log: Path
    raw: Path
    out: Path
    addition: Addition | None = None
    built: Environment | None = None
    overlay: Overlay | None = None

    @property
    def recorded(self) -> bool:
        """Whether the recorder looks at its steps."""
        return self.addition is None or self.addition.recorder

    @functools.cached_property
    def python(self) -> str:
        """Its own environment may lie in the worktree."""
        environment = self.overlay or self.built
        return (environment and environment.python) or interpreter(self.subject, self.place.root, self.place.home)

    @functools.cached_property
    def tokens(self) -> dict[str, str]:
        """What our six tokens stand for."""
        # not the run's number of steps: schedules depend on it, and a run is ended from outside
        step, checkpoint = self.case.steps, self.run.checkpoint or str(self.out / "checkpoint")
        if self.run.load:
            step, checkpoint = self.run.first_step, self.run.load
        for at, folder in self.run.states.items():
            step, checkpoint = at, folder
        return {
            "root": str(self.place.home or self.place.root),
            "rollouts": self.run.rollouts or "",
            "out": str(self.out),
            "checkpoint": checkpoint,
            "step": str(step),
            "python": self.python,
        }

    @property
    def planted(self) -> list[tuple[int, str, str]]:
        """Where the recorder meets what it is to change: the optimizers step as they do in the baseline."""
        if self.run.perturbation is None:
            return []
        step, phase, name = self.run.perturbation
        end = Trace(Path(self.run.baseline)).end if self.run.baseline else None
        return as_planted((end or {}).get("rounds", ()), self.run.first_step, (step, phase, name))

    @property
    def command(self) -> str:
        """What trains: from the start, saving a state on the way, or from a state."""
        return self.subject.resume if self.run.load else self.subject.save if self.run.states else self.subject.command

    @functools.cached_property
    def variables(self) -> dict[str, str]:
        """The environment without the recorder."""
        variables = variables_of(self.case, self.subject, self.python, self.tokens)
        ours = self.built.variables(self.subject) if self.built else {}
        ours |= self.overlay.variables(variables) if self.overlay else {}
        variables |= beside_case(ours, self.subject) | dict(self.place.variables)
        variables |= own_caches(variables, self.raw / "caches", self.place.home or self.place.root)
        return self.addition.variables(variables) if self.addition else variables

    def child(self, text: str, variables: Mapping[str, str]) -> Child:
        command = argv_of(text, self.tokens, self.subject.shell)
        return Child(command, self.place.root, variables, self.log, self.subject.timeout)

    @property
    def settings(self) -> Settings:
        """What the recorder is asked for. One step more is begun, so that what is logged after the last one counts."""
        observe, run = self.case.observe, self.run
        settings = Settings(
            str(self.raw), steps=run.steps, record=run.trace is not None, terminal=run.terminal,
            activations=observe.activations, metrics=observe.metrics, ignore=observe.ignore,
            perturbation=self.planted, signals=observe.signals, first=run.first_step, dump=run.dump,
            home=str(self.place.home) if self.place.home else None, place=str(self.place.root), alone=True,
            operations=run.operations
            and {**run.operations, **{key: run.operations[key] - run.first_step for key in ("step", "until")}},
        )  # fmt: skip
        return self.addition.settings(settings) if self.addition else settings

    @property
    def watched(self) -> dict[str, str]:
        """The environment of a process that is not recorded: it says which code it has imported."""
        settings = self.settings if self.addition else replace(self.settings, recorder=False)
        return environment_for(settings, self.variables)

    def check_own(self, pythons: Collection[str]) -> None:
        """Refuse a program of which no process runs in the environment that was made for it."""
        environment = self.overlay or self.built
        if environment and environment.python:
            pinned = [f"{name} {version}" for name, version in self.subject.packages.items()]
            what = f"has {', '.join(pinned)}" if self.overlay else f"{', '.join(self.subject.locks)} asks for"
            check_own(environment.python, what, pythons, self.log)

    def header(self, about: Mapping[str, Any], _: int) -> Header:
        if self.recorded:
            self.check_own([about["python"]])
        rollouts = rollouts_of(self.case, Path(self.run.rollouts)).digest if self.run.rollouts else ""
        place = {"kind": self.subject.kind, "commit": self.place.commit, "tree": self.place.tree}
        environment = self.overlay or self.built
        built = {"environment": environment.to_mapping()} if environment else {}
        launched = {"launched": replaced(self.command, self.tokens)}
        where = place | built | (launched | said_of(about) if self.recorded else {})
        where |= self.addition.about() if self.addition else {}
        return Header(self.case.canonical(), rollouts, where, about["identity"], self.run.steps, self.run.first_step)


class CommandKind(Kind):
    """A program that knows nothing of us."""

    names: ClassVar[tuple[str, ...]] = ("command",)
    advice = (
        "seed every generator and ask torch for deterministic algorithms, leave out a metric that is no number of the "
        "training ([observe] ignore), or keep it for its metrics with --allow-noise"
    )

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        assert case.subject.program
        self.subject = case.subject.program

    @property
    def brings_rollouts(self) -> bool:
        """A trainer that replays says otherwise."""
        return self.subject.system is None

    def additions(self, place: Place, log: Path) -> AdditionOf:
        """What is added to a run."""
        del place, log
        return lambda *_: None

    def plants(self, perturbation: Perturbation) -> bool:
        """Whether the recorder plants a change."""
        del perturbation
        return True

    def identity(self, root: Path) -> Who:
        """Who the program's processes would be."""
        case, subject, place = self.case, self.subject, Place(root)
        try:
            with held(case, subject, place) as built:
                python = (built and built.python) or interpreter(subject, root)
                with contextlib.ExitStack() as exits:
                    overlay = None
                    if subject.packages:
                        overlay = exits.enter_context(held_overlay(case, subject, place, python, subject.packages))
                        python = overlay.python
                    variables = variables_of(case, subject, python, {"root": str(root), "python": python})
                    if overlay:
                        variables |= beside_case(overlay.variables(variables), subject)
                        overlay.notice(variables, root, overlay.folder)
                    who = identity_in(case, python, variables, root)
                    if overlay:
                        who.find_build()  # while it is held; it is remembered
                    return who
        except ChildFailure as failure:
            fix = "correct its lock files, subject.setup or subject.packages"
            raise ReproError(f"no environment for {root}: {failure}; {fix}") from None

    def other_pythons(self, root: Path) -> list[str]:
        """See `Kind.other_pythons`; where `env` has a PATH of its own, that which a script finds there."""
        return other_pythons(self.case, root)

    def build(self, root: Path) -> Built:
        """See `subjects.build_of`."""
        case_build = super().build(root)
        builds = [case_build, *(build_of_other(self.case, other, root) for other in self.other_pythons(root))]
        marks = {place: mark for build in builds for place, mark in build.marks.items()}
        return Built(digest("builds", *(build.digest for build in builds)), marks) if builds[1:] else case_build

    def run_all(
        self,
        place: Place,
        runs: Sequence[Run],
        log: Path,
        cancel: threading.Event | None,
        enough: Callable[[], bool] | None,
    ) -> list[RunResult]:
        """Each in processes of its own."""
        return [self._run(place, run, log, cancel, enough) for run in runs]

    def _run(
        self,
        place: Place,
        asked: Run,
        log: Path,
        cancel: threading.Event | None,
        enough: Callable[[], bool] | None,
    ) -> RunResult:
        adds = self.additions(place, log)
        with _scratch(place) as scratch:
            raw, out = scratch / "raw", scratch / "out"
            raw.mkdir()
            out.mkdir()
            with held(self.case, self.subject, place, cancel) as built:
                at = asked.perturbation
                ours = asked if at and self.plants((at[0], at[1], at[2])) else replace(asked, perturbation=None)
                job = _Job(self.case, self.subject, place, ours, log, raw, out, adds(asked, scratch), built)
                with _prepared(job, cancel) as prepared:
                    return _train(prepared, cancel, enough)

    def exit_of(self, place: Place, log: Path, cancel: threading.Event | None) -> int:
        """That of the program as it is."""
        return self.ended(place, Run(self.case.steps), log, cancel, lambda *_: None)

    def ended(self, place: Place, asked: Run, log: Path, cancel: threading.Event | None, adds: AdditionOf) -> int:
        """The exit code of a run that is not recorded."""
        with _scratch(place) as scratch:
            out = scratch / "out"
            out.mkdir()
            with held(self.case, self.subject, place, cancel) as built:
                bare = _Job(self.case, self.subject, place, asked, log, scratch, out, adds(asked, scratch), built)
                with _prepared(bare, cancel) as job:
                    code = _ran(job, job.child(self.subject.command, job.watched), cancel)
                    if job.addition:
                        job.addition.ended(code)
        if code:
            blame_the_machine(code, log)
        return code

    def try_out(self, place: Place, log: Path) -> None:
        """See `subjects.try_out`."""
        if not (place.root / self.subject.path).exists():
            raise ReproError(f"there is no {self.subject.path} here: correct subject.path")
        if not self.subject.check:
            return
        log.touch()
        with _scratch(place) as scratch:
            try:
                with held(self.case, self.subject, place) as built:
                    job = _Job(self.case, self.subject, place, Run(self.case.steps), log, scratch, scratch, built=built)
                    with _overlaid(job, None) as overlaid:
                        _step(overlaid, "import", self.subject.check, None)
            except ChildFailure as failure:
                raise ReproError(f"subject.check fails on the working tree: {failure.message}") from None


@contextlib.contextmanager
def _scratch(place: Place) -> Iterator[Path]:
    """A folder for one run, of which checkpoints may be part: where the next run removes it, should this be killed."""
    try:
        base = find_checkout(place.root).scratch
    except ReproError:  # no checkout
        with tempfile.TemporaryDirectory(prefix="repro-command-") as folder:
            yield Path(folder)
        return
    with scratch_folder(base, "command") as scratch:
        yield scratch


@contextlib.contextmanager
def _prepared(job: _Job, cancel: threading.Event | None) -> Iterator[_Job]:
    """A job that can be run, for the block.

    In a worktree that takes what builds a commit, and what tells that it cannot be tested; the user's checkout is
    theirs. What is built serves all versions of `subject.packages`, and so is built in the environment below them.
    """
    done, known, home = job.place.beside / _SET_UP, [job.python], job.place.home or job.place.root
    with contextlib.suppress(ReproError):  # a Python by a relative path is the checkout's, which a node may not have
        known += CommandKind(job.case).other_pythons(home)
    shared = [*known, *environments_named(job.case, home)]
    if job.place.home is not None and job.subject.setup and not job.built and not done.exists():
        alone = left_alone(job.python, job.subject.setup, job.place.root, job.variables)
        with taken_back(shared, job.place, job.variables), alone:
            _step(job, "build", job.subject.setup, cancel)
        done.parent.mkdir(exist_ok=True)
        done.touch()
        job = replace(job)  # which finds a Python that the setup has made in the worktree
    with (
        _overlaid(job, cancel) as overlaid,
        taken_back([overlaid.python, *shared], job.place, overlaid.variables),
        said_to(job.raw, job.place, [overlaid.python, *known]),
    ):
        if job.place.home is not None and job.subject.check:
            _step(overlaid, "import", job.subject.check, cancel)
        yield overlaid


@contextlib.contextmanager
def _overlaid(job: _Job, cancel: threading.Event | None) -> Iterator[_Job]:
    """The job in its environment with the packages that the case asks for, for the block."""
    if not job.subject.packages:
        yield job
        return
    with held_overlay(job.case, job.subject, job.place, job.python, job.subject.packages, cancel) as overlay:
        overlaid = replace(job, overlay=overlay)
        overlay.notice(overlaid.variables, overlaid.place.root, overlaid.log)
        yield overlaid


def _step(job: _Job, stage: Any, text: str, cancel: threading.Event | None) -> None:
    code = _started(job, job.child(text, job.variables if stage == "build" else job.watched), cancel)
    if code:
        blame_the_machine(code, job.log)
        if stage == "build":
            blame_the_network("subject.setup", job.log)
        raise ChildFailure(stage, -1, f"{text} exited with {code}: {last_line(job.log)}", str(job.log))


def _ran(job: _Job, child: Child, cancel: threading.Event | None, enough: Any = None) -> int:
    """The exit code of the program, which is refused where no process of it was in its environment."""
    before = said_by(job.raw).keys()
    code = _started(job, child, cancel, enough)
    if not any(job.raw.glob("note-deaf-*")):  # one that does not tell where it runs may be the program
        job.check_own([python for name, python in said_by(job.raw).items() if name not in before])
    return code


def _started(job: _Job, child: Child, cancel: threading.Event | None, enough: Any = None) -> int:
    strangers.prepare(job.raw, job.place.home or job.place.root)
    try:
        with among_others(job.raw, job.place, job.case):
            code = child.run(cancel, enough)
    except ExecError as error:
        raise ChildFailure("start", -1, str(error), str(job.log)) from None
    if line := strangers.said(job.raw, job.place.root, job.place.home):
        raise ChildFailure("other", -1, line, str(job.log))
    return code


def _train(job: _Job, cancel: threading.Event | None, asked: Callable[[], bool] | None) -> RunResult:
    out = Path(job.run.trace or job.out / "trace")
    with contextlib.closing(_gathering(job, out)) as gathering:
        return _gathered(job, gathering, cancel, asked)


def _gathering(job: _Job, out: Path) -> Gathering | Written:
    """What makes the trace: of the recorder's records, or of what the program writes by itself."""
    if job.addition is None or job.recorded:
        more, unread = (job.addition.rows, job.addition.unread) if job.addition else ((lambda _: ()), dict)
        files = Path(job.tokens["checkpoint"]) if "{checkpoint}" in job.command else None
        resources = job.case.resources
        return Gathering(
            job.raw, out, job.header, resources.ranks, more, files, job.run.steps, others=resources.other_ranks,
            unread=unread, dump=[(step, phase, name) for step, phase, name in job.run.dump],
            planted=job.planted, root=job.place.root,
        )  # fmt: skip

    def header() -> Header:
        who = identity_in(job.case, job.python, job.variables, job.place.home or job.place.root)
        return job.header({"identity": who.identity.to_mapping()}, 0)

    return Written(out, header, job.addition, job.run.steps)


def _gathered(
    job: _Job, gathering: Gathering | Written, cancel: threading.Event | None, asked: Callable[[], bool] | None
) -> RunResult:
    run = job.run
    parting = Parting(run.baseline, run.trace)
    parted = False
    wrong: list[ReproError] = []

    def enough() -> bool:
        nonlocal parted
        try:
            records = gathering.poll()
            _blame_the_disk(job)
            parted = parted or parting.seen(records) or any(asked() for _ in records if asked)
        except MachineFailureError:
            raise
        except ReproError as error:  # nothing good can come of it any more
            wrong.append(error)
        return parted or bool(wrong) or (not job.recorded and gathering.steps >= run.steps)

    unseen = Unseen(job.raw)
    child = job.child(job.command, environment_for(job.settings, job.variables))
    if job.recorded:
        child = replace(child, beside=unseen.watch)
    try:
        code = _ran(job, child, cancel, enough if run.trace or not job.recorded else None)
    except ChildFailure:
        _blame_the_disk(job)
        raise
    _blame_the_disk(job)
    if job.addition:
        job.addition.ended(code)
    if run.trace is None and job.recorded:
        return _bare(job, code)
    steps = gathering.steps
    try:
        if wrong:
            raise wrong[0]
        unseen.check()
        collected = gathering.finish(child.command, code, "diverged" if parted else "finished")
    except MachineFailureError:
        raise
    except ReproError as error:
        if not (wrong or parted):  # else it was ended by us
            blame_the_machine(code, job.log)
            if steps == 0 or not job.recorded:
                _refuse(job, steps, code)
        itself = bool(code and not wrong)  # else it was ended by us, or did all that it was to
        raise ChildFailure(_stage_of(error, steps, itself), steps, str(error), str(job.log)) from None
    if not parted and collected.steps < run.steps:
        _refuse(job, collected.steps, code, collected.short)
    return RunResult(collected.steps, parted, collected.terminal, [])


def _stage_of(error: ReproError, steps: int, failed: bool) -> Stage:
    if isinstance(error, OtherRanksError) and not failed:
        return "ranks"
    return "step" if steps else "start"


def _bare(job: _Job, code: int) -> RunResult:
    """A run that recorded nothing but its end."""
    terminal = read_terminal(job.raw)
    if not terminal:
        _refuse(job, 0, code)
        raise ChildFailure("start", -1, "no optimizer step was seen", str(job.log))
    return RunResult(job.run.steps, False, terminal, [])


def _blame_the_disk(job: _Job) -> None:
    """Raise where the disk was full for the recorder, which then ends the recording and never the program."""
    if cut_short(job.raw):
        raise MachineFailureError("no space left on the disk to record; free some and run again")


def _refuse(job: _Job, done: int, code: int, short: str = "") -> None:
    """Raise for a program that failed, or was not recorded whole; one that merely ended early is the caller's to judge.

    What was not recorded would else count as not trained.
    """
    if code:
        blame_the_machine(code, job.log)
        raise ChildFailure("step" if done else "start", done, f"exited with {code}: {last_line(job.log)}", str(job.log))
    if short:
        raise ChildFailure("record", done, short, str(job.log))
