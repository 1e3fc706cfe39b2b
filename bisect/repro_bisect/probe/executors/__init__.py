"""Where probes run: `local` processes with worktrees, or the nodes of a Ray cluster. Both give the same answers.

An executor replays one commit and leaves what came of it in a folder. It judges nothing and remembers nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from repro_bisect.predicates.predicates import Bitwise, Exit, Own, Predicate
from repro_golden.base.canonical import canonical_json
from repro_golden.base.errors import UnjudgedError
from repro_golden.case.file import Case
from repro_golden.replay.children import ChildFailure, Run
from repro_golden.repository.checkout import Place
from repro_golden.subjects import exit_code, launch
from repro_golden.subjects.environments.installs import installed_by
from repro_golden.subjects.missing import made_in
from repro_golden.subjects.pythons import ran_in
from repro_golden.subjects.watched import Snapshot
from repro_golden.trace import Trace, seal

__all__ = ["Executor", "Outcome", "Signal", "State", "Task", "perform"]

Signal = tuple[int, str, str]
"""Step, phase and name."""


@dataclass(frozen=True)
class State:
    """A training state to start from.

    Attributes:
        step: The step that it lies before.
        folder: What the subject saved.
        key: Says whose it is, of which case and rollouts; part of the key of every probe that starts from it.
    """

    step: int
    folder: Path
    key: str


@dataclass(frozen=True)
class Task:
    """One replay.

    Attributes:
        commit: Full id.
        tree: Hash of the subject's code in it.
        steps: Most steps to train.
        predicate: What is looked for.
        baseline: Trace that the replay ends at its first violation against; None lets it make all of its steps.
        start: State to start from; None starts at step 0.
        states: Steps before which the training state is saved, below ``states/STEP``.
        states_budget: Bytes that these may take together; None for no limit.
        dump: Signals whose whole content is wanted.
        case: The case, where it is another than the executor's.
        operations: The first and the last step whose operations are recorded, below ``operations``; None records none.
        values: Numbers of operations that are written there with all that they read and made.
        changed: Files whose lines are noted when they run, if operations are recorded.
    """

    commit: str
    tree: str | None
    steps: int
    predicate: Predicate = field(default_factory=Bitwise)
    baseline: Path | None = None
    start: State | None = None
    states: Sequence[int] = ()
    states_budget: int | None = None
    dump: Sequence[Signal] = ()
    case: Case | None = None
    operations: tuple[int, int] | None = None
    values: Sequence[int] = ()
    changed: Sequence[str] = ()


@dataclass(frozen=True)
class Outcome:
    """What came of a task, beside the folder that it left: ``trace``, if a step was made, and ``states``.

    Attributes:
        failure: Why it ended before its time, or None.
        code: The program's exit code, where that was what was asked for.
        beside: Whether another one ran at the same time.
        installs: What its program installed where the programs of others run too, by name; '' where it did not.
        tries: Runs that it took.
        made: Files that its program left in its worktree, and that the user's checkout has where git holds none.
        pythons: The interpreters that its processes ran in, beside those that its key holds.
    """

    failure: ChildFailure | None = None
    code: int | None = None
    beside: bool = False
    installs: str = ""
    tries: int = 1
    made: tuple[str, ...] = ()
    pythons: Sequence[str] = ()

    @property
    def unready(self) -> bool:
        """Whether it failed where the state that it started from may be to blame."""
        return self.failure is not None and self.failure.stage in ("load", "start", "step")

    @property
    def ran_itself(self) -> bool:
        """Whether its steps are the commit's: not other code's, nor of flags that took no effect."""
        return self.failure is None or self.failure.stage in ("step", "record", "timeout")


class Executor(Protocol):
    """Runs tasks, several at once from as many threads."""

    @property
    def slots(self) -> int:
        """How many tasks can run at once."""

    def surroundings(self, case: Case, *, again: bool = False) -> Snapshot:
        """What a case's program sees where its probes run: interpreter, packages, variables, and what git writes there.

        Args:
            case: The case.
            again: Whether to pass over what is remembered of interpreters.
        """

    def packages(self, case: Case, python: str, *, again: bool = False) -> Snapshot:
        """What an interpreter could import where probes run; without facts where it is gone, or does not answer.

        Args:
            case: The case whose programs run in it.
            python: Its path.
            again: As in `surroundings`.
        """

    def run(
        self, task: Task, folder: Path, cancel: threading.Event | None, progress: Callable[[int], None] | None = None
    ) -> Outcome:
        """Replay a commit; its trace and states lie below `folder` afterwards.

        Args:
            task: What to do.
            folder: An empty folder.
            cancel: Ends the replay when it is set.
            progress: Told now and then how many steps are made.

        Raises:
            CancelledError: `cancel` was set.
            MachineFailureError: the machine failed, which says nothing of the commit.
            ReproError: the instrument refused.
        """

    def close(self) -> None:
        """Give back what is held."""


def perform(
    case: Case,
    place: Place,
    rollouts: str | None,
    task: Task,
    folder: Path,
    cancel: threading.Event | None,
    progress: Callable[[int], None] | None = None,
) -> Outcome:
    """Make the run of a task in a place that was made for it; see `Executor.run`."""
    trace, log = folder / "trace", folder / "log"
    outcome = Outcome()
    try:
        if isinstance(task.predicate, Exit):
            return _left_in(place, Outcome(code=exit_code(case, place, log, cancel=cancel)))
        bits = isinstance(task.predicate, Bitwise)
        run = Run(
            task.steps,
            rollouts,
            trace=str(trace),
            baseline=str(task.baseline) if task.baseline and bits else None,
            dump=task.dump,
            states={step: str(folder / "states" / str(step)) for step in task.states},
            states_budget=task.states_budget,
            load=str(task.start.folder) if task.start else None,
            first_step=task.start.step if task.start else 0,
            operations=_operations(task, place.root, folder),
        )
        live = task.baseline if not bits and not isinstance(task.predicate, Own) else None
        launch(case, place, [run], log, cancel=cancel, enough=_watched(task, live, trace, progress))
    except ChildFailure as failure:
        outcome = Outcome(failure)
    finally:
        if (trace / "steps.jsonl").exists():
            seal(trace)
    return _left_in(place, outcome)


def _left_in(place: Place, outcome: Outcome) -> Outcome:
    """An outcome with what its program left where others may find it."""
    return replace(outcome, installs=installed_by(place), made=made_in(place), pythons=ran_in(place))


def _operations(task: Task, root: Path, folder: Path) -> dict[str, Any] | None:
    if task.operations is None:
        return None
    changed = folder / "changed.json"  # a file: all else goes by a variable, which holds 128 KiB at most
    changed.write_text(canonical_json(list(task.changed)), encoding="utf-8")
    where = {"folder": str(folder / "operations"), "root": str(root), "changed": str(changed)}
    first, last = task.operations
    return {**where, "step": first, "until": last, "dump": list(task.values)}


def _watched(
    task: Task, baseline: Path | None, folder: Path, progress: Callable[[int], None] | None
) -> Callable[[], bool]:
    """Looks at the trace that is being written: tells how far it is, and whether it violates the predicate already."""
    against, trace, seen = Trace(baseline) if baseline else None, None, 0

    def enough() -> bool:
        nonlocal seen, trace
        log = folder / "steps.jsonl"
        steps = log.read_bytes().count(b"\n") if log.exists() else 0
        if steps == seen:
            return False
        if progress:
            progress(steps)
        before, seen = seen, steps
        if against is None:
            return False
        trace = trace or Trace(folder)
        trace.more()
        common = min(len(trace.steps), len(against.steps))
        try:
            return any(task.predicate.at(against, trace, index) for index in range(before, common))
        except UnjudgedError:  # all of it is judged at the end
            return False

    return enough
