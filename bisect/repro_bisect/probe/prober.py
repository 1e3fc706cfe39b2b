"""Probes: one commit replayed and kept, or found in the journal."""

from __future__ import annotations

import contextlib
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from repro_bisect.axes.axis import Axis, short
from repro_bisect.predicates.predicates import Exit, Own, Predicate, first_violation
from repro_bisect.probe import left, states
from repro_bisect.probe.answers import (
    UNTESTABLE,
    UNTESTABLE_CODE,
    Answer,
    Code,
    Recording,
    Skip,
    depends_on_the_question,
    is_told,
    reason_of,
)
from repro_bisect.probe.around import Surroundings
from repro_bisect.probe.attempts import Attempts, Control
from repro_bisect.probe.executors import Executor, Outcome, State, Task
from repro_bisect.probe.journal import Entry, Journal, probe_key
from repro_bisect.probe.left import dumped, ended_itself, trace_in, undumped
from repro_bisect.probe.progress import Bill, Cost, Stage
from repro_bisect.probe.request import Made, Request
from repro_golden.base.canonical import digest
from repro_golden.base.clean import without_colours
from repro_golden.base.errors import ReproError, UnjudgedError
from repro_golden.base.files import scratch_folder, size_of
from repro_golden.case.file import Case
from repro_golden.case.identity import Identity
from repro_golden.replay.children import ChildFailure
from repro_golden.repository.checkout import Checkout
from repro_golden.store.golden import GoldenRun
from repro_golden.subjects.watched import Watched
from repro_golden.trace import Trace

__all__ = ["Control", "Prober"]

_DUMPED = 64 << 20
"""Bytes of whole tensors and of operations that a probe in the journal may have."""
_CODES = 128
"""Exit codes from here on say nothing of a commit, as `git bisect run` has it."""


_FREE = Control()


class Prober:
    """Replays commits of one range on the rollouts of one case, remembering what is already known.

    Attributes:
        predicate: What makes a probe BAD.
        cost: What was spent.
        machine: Short name of the machine that answers hold for.
        search: What its own probes are kept under in the journal.
        attempts: What makes them.
        git: In the user's checkout.
        ran_in: In words, what probes said they ran in, beside the interpreters that keys hold.
    """

    def __init__(
        self,
        checkout: Checkout,
        case: Case,
        history: Axis,
        rollouts: Watched,
        identity: Identity,
        executor: Executor,
        predicate: Predicate,
        examine: Callable[[Path, str], str] | None = None,
        *,
        fresh: bool = False,
        first: GoldenRun | None = None,
        cost: Cost | None = None,
    ) -> None:
        """Replay points of one axis.

        Args:
            checkout: The repository.
            case: The case.
            history: The axis.
            rollouts: See `watched_rollouts`.
            identity: The machine's.
            executor: Runs the probes.
            predicate: What makes one BAD.
            examine: See `repro_bisect.driver.session.Options`.
            fresh: Use nothing that earlier bisects found.
            first: The good end's golden run, where it is its first replay.
            cost: What was spent before; None for nothing.
        """
        self.case, self.predicate, self.executor, self.machine = case, predicate, executor, identity.machine
        self._history = history
        self._exit = contextlib.ExitStack()
        self._scratch = self._exit.enter_context(scratch_folder(checkout.scratch, "bisect"))
        self._lock, self._examine = threading.Lock(), examine
        self.git = checkout.git
        self._around = Surroundings(
            checkout, case, rollouts, identity, executor, lambda: self._journal.ran_in(case.digest)
        )
        self._journal = Journal(checkout.state, fresh=fresh, alone=executor.slots == 1, are=self._around.pythons.are)
        self.search = self._journal.search
        self.cost = cost or Cost()
        self._unkept: dict[tuple[str, int], Made] = {}
        self._golden = first
        self._first = {self.key(history.good): first.trace} if first else {}
        self._tried: set[tuple[str, int]] = set()
        self._attempts = Attempts(executor, history.commit(history.good))
        self.ran_in = set[str]()

    def probe(self, asked: Request, control: Control = _FREE) -> Answer:
        """Make a probe, or find it in the journal.

        Args:
            asked: What is wanted.
            control: See `Control`.

        Raises:
            CancelledError: `control.cancel` was set.
            MachineFailureError: git, the disk or the machine failed: no verdict.
            ReproError: the instrument refused.
        """
        point, history = asked.point, self._history
        tree = history.tree(point)
        if tree is None:
            return Skip(f"it has none of {', '.join(history.paths)}")
        if why := history.skipped(point):
            return Skip(why)
        key = self.key(point, asked.start)
        known = self._known(key, asked)
        if known is not None:
            self.reuse()
            return known
        baseline = asked.baseline.directory if asked.baseline and not asked.whole and not asked.start else None
        case, at = self._case(point), asked.keep[0] if asked.keep else ()
        task = Task(
            history.commit(point), tree, asked.steps, self.predicate, baseline, asked.start, at,
            case.case.states_budget, asked.dump, case,
        )  # fmt: skip
        return self._replay(task, asked, key, control)

    def make_state(self, commit: str, step: int, target: Path, start: State | None, control: Control = _FREE) -> None:
        """Train a commit up to `step`, and keep its state in a folder of `States` if it can save itself.

        Raises:
            CancelledError, MachineFailureError, ReproError: see `probe`.
        """
        steps = step - (start.step if start else 0)
        code_commit, case = self._history.commit(commit), self._case(commit)
        task = Task(code_commit, self._history.tree(commit), steps, start=start, states=(step,), case=case)
        around, began = self._around.of(case), time.monotonic()
        stood = around.moment
        with scratch_folder(self._scratch, "states") as folder:
            outcome = self._run(task, folder, control)
            trace = trace_in(folder / "trace")
            ran_in = outcome.pythons
            if outcome.failure is None and around.expects(ran_in) and around.lasted(stood, ran_in):
                states.keep(folder / "states", target)
        self._charge("search", len(trace.steps) if trace else 0, time.monotonic() - began, outcome.tries)

    def operations(
        self,
        asked: Request,
        steps: tuple[int, int],
        values: Sequence[int] = (),
        control: Control = _FREE,
        *,
        against: str,
    ) -> Recording | Skip:
        """Make a probe on whose way the operations of some steps are recorded, or find it in the journal.

        Args:
            asked: What is wanted, without a baseline. From the state before the recorded steps they are its first.
            steps: The first and the last step that are recorded.
            values: Operations that are written with all that they read and made.
            control: See `Control`.
            against: The point that it is compared with: the lines of files that differ are noted when they run.

        Raises:
            CancelledError, MachineFailureError, ReproError: see `probe`.
        """
        if known := self.known_operations(asked, steps, values, against=against):
            self.reuse()
            return known
        commit, case = self._history.commit(asked.point), self._case(asked.point)
        changed = self._changed(asked, against)
        task = Task(
            commit, self._history.tree(asked.point), asked.steps, start=asked.start, dump=asked.dump, case=case,
            operations=steps, values=values, changed=changed,
        )  # fmt: skip
        around, began = self._around.of(case), time.monotonic()
        stood = around.moment
        folder = self._scratch / f"operations-{uuid.uuid4().hex[:8]}"
        folder.mkdir()
        outcome = self._run(task, folder, control)
        trace, seconds = trace_in(folder / "trace"), round(time.monotonic() - began, 3)
        made = len(trace.steps) if trace else 0
        self._charge(asked.stage, made, seconds, outcome.tries)
        if outcome.failure and not (trace and asked.partial and outcome.ran_itself):
            return Skip(reason_of(outcome.failure, self.git))
        streams = left.streams_of(folder)
        if trace is None or not any(record.step == steps[0] for record in trace.steps):
            return Skip(f"it ends before step {steps[0]}")
        if not streams:
            return Skip(f"no operation of step {steps[0]} was recorded")
        lasting = around.lasted(stood, outcome.pythons)
        size = size_of(folder / left.FOLDER) + size_of(trace.directory / "dumps")
        if outcome.failure or size > _DUMPED or any(stream.problem for stream in streams):
            return Recording(trace, streams, seconds, lasting=lasting, beside=outcome.beside, pythons=outcome.pythons)
        left.seal(folder)
        (folder / left.FOLDER).rename(trace.directory / left.FOLDER)
        key = self._operations_key(asked, steps, values, changed)
        trace_path = self._keep(commit, asked, key, None, made, seconds, trace.directory, outcome, lasting=lasting)
        streams = [replace(stream, folder=trace_path / left.FOLDER) for stream in streams]
        return Recording(Trace(trace_path), streams, seconds, key, asked.run, beside=outcome.beside)

    def known_operations(
        self, asked: Request, steps: tuple[int, int], values: Sequence[int] = (), *, against: str
    ) -> Recording | None:
        """What `operations` would find in the journal; None where there is nothing, or not all of it."""
        if not len(self._journal):
            return None
        key = self._operations_key(asked, steps, values, self._changed(asked, against))
        entry = self._journal.find(key, asked.run)
        trace = self._known(key, asked) if entry else None
        streams = left.sealed_streams(trace.directory) if isinstance(trace, Trace) else []
        if entry is None or not isinstance(trace, Trace) or not streams:
            return None
        return Recording(trace, streams, entry.seconds, key, asked.run, beside=entry.beside)

    def forget(self, *made: Recording) -> None:
        """Have recordings made anew when they are asked for again: a replay beside them had other numbers."""
        with self._lock:
            self._journal.drop((recording.key, recording.run) for recording in made if recording.key)

    def doubt(self, asked: Request) -> Request:
        """The same as a run alone, that nothing found before answers."""
        with self._lock:
            self._journal.drop([(self.key(asked.point, asked.start), asked.run)])
        return replace(asked, alone=True)

    def believes(self, why: str) -> bool:
        """See `Company.believes`."""
        return self._attempts.company.believes(why)

    def tried_again(self, point: str, why: str, again: str) -> None:
        """Note what came of a failure that was doubted; '' where it is none any more. See `Company.tried`."""
        self._attempts.company.tried(short(point), why, again, beside=False)

    def disown(self) -> None:
        """Have what this search made beside other probes be made anew: they disturbed each other."""
        with self._lock:
            self._journal.disown()

    def _operations_key(
        self, asked: Request, steps: tuple[int, int], values: Sequence[int], changed: Sequence[str]
    ) -> str:
        """As `key`; beside it all that decides what a recording holds, the commit for the lines of its stacks."""
        rest = [self._history.commit(asked.point), asked.steps, steps, list(values), changed, list(asked.dump)]
        return digest("operations", left.recorder(), self.key(asked.point, asked.start), repr(rest))

    def _changed(self, asked: Request, against: str) -> list[str]:
        """Files of a point that another has not, or has otherwise."""
        commits = self._history.commit(against), self._history.commit(asked.point)
        names = self.git.text("diff-tree", "-r", "-z", "--name-only", "--no-renames", "--diff-filter=d", *commits)
        return [name for name in names.split("\0") if name]

    def keep(self, asked: Request, recording: Recording) -> Recording:
        """Journal a recording's trace as that of a probe; who asks has seen that the recorder moved no number."""
        trace, commit = recording.trace, self._history.commit(asked.point)
        key, steps = self.key(asked.point, asked.start), len(trace.steps)
        if not recording.key:
            lasting, seconds = recording.lasting, recording.seconds
            outcome = Outcome(beside=recording.beside, pythons=recording.pythons)
            trace_path = self._keep(commit, asked, key, None, steps, seconds, trace.directory, outcome, lasting=lasting)
            return replace(recording, trace=Trace(trace_path))
        lasting = trace.directory.parent == self._journal.folder / "probes"  # both entries name the one folder
        name = trace.directory.name if lasting else str(trace.directory)
        made = self._journal.find(recording.key, recording.run)
        with self._lock:
            entry = Entry(
                key, asked.run, commit, "", steps, recording.seconds, name, undumped=undumped(trace.directory, asked),
                search=made.search if made else "", beside=recording.beside, pythons=made.pythons if made else {},
            )  # fmt: skip
            self._journal.add(entry, None, lasting=lasting)
        return recording

    def known(self, asked: Request) -> Answer | None:
        """What was found before, if that answers; costs nothing."""
        tree = self._history.tree(asked.point) if len(self._journal) or self._first else None
        return None if tree is None else self._known(self.key(asked.point, asked.start), asked)

    def made(self, asked: Request) -> Made | None:
        """Where and by which search the answer to a request was made; None where that is not known."""
        if self._history.tree(asked.point) is None:
            return None
        key = self.key(asked.point, asked.start)
        entry = None if self._is_first(key, asked) else self._journal.find(key, asked.run)
        return Made(entry.commit, entry.search, entry.beside) if entry else self._unkept.get((key, asked.run))

    def golden(self, asked: Request) -> GoldenRun | None:
        """The golden run that answers a request."""
        code = self._golden is not None and self._history.tree(asked.point) is not None
        return self._golden if code and self._is_first(self.key(asked.point, asked.start), asked) else None

    def _is_first(self, key: str, asked: Request) -> bool:
        return asked.run == 0 and key in self._first

    def anew(self, asked: Request) -> Request:
        """The same as a replay that nobody has made; the point has code."""
        return replace(asked, run=self._journal.unused_run(self.key(asked.point, asked.start)))

    def at_itself(self, asked: Request) -> Request:
        """The same as a replay of the point's own commit, and of no other one with the same key."""
        commit, made = self._history.commit(asked.point), self.made(asked)
        if made is None or made.commit == commit:
            return asked
        for run in self._journal.runs(self.key(asked.point, asked.start)):
            again = replace(asked, run=run)
            entry = self.made(again)
            if run > asked.run and entry and entry.commit == commit and self.known(again) is not None:
                return again
        return self.anew(asked)

    @property
    def expected(self) -> Mapping[str, str]:
        """What stands for interpreters that the program may run in, of which keys say nothing."""
        return self._around.pythons.expected

    def reuse(self) -> None:
        """Count an answer that `known` gave, and that was used."""
        with self._lock:
            self.cost.reused += 1

    def key(self, commit: str, start: State | None = None) -> str:
        """The key under which probes of a commit are journalled."""
        tree = self._history.tree(commit)
        assert tree is not None, "who asks has seen that there is code"
        key = probe_key(tree, self._around.of(self._case(commit)).facts)
        if isinstance(self.predicate, Exit):
            return digest("exit", key)
        return digest("resumed", key, start.key) if start else key

    def _case(self, commit: str) -> Case:
        return self._history.case(commit, self.case)

    def _known(self, key: str, asked: Request) -> Answer | None:
        """A journalled probe that answers the question: long enough, or already violating."""
        if self._is_first(key, asked):
            return self._first[key]
        if (entry := self._journal.find(key, asked.run)) is None:
            return None
        self._attempts.has_made(entry.commit, entry.made)
        # what refused an end in an earlier search is asked again: the file that it lacked, say, is in no key
        earlier = (key, asked.run) not in self._tried
        good, bad = (earlier and asked.point == end for end in (self._history.good, self._history.bad))
        if entry.skip:
            again = good or bad or depends_on_the_question(entry.skip)
            return None if again else Skip(without_colours(entry.skip), diagnosis=entry.diagnosis)
        if entry.code is not None:
            refused = (good and entry.code != 0) or (bad and entry.code == 0)
            return None if refused else Code(entry.code)
        try:
            trace = Trace(self._journal.trace_path(entry))
            enough = len(trace.steps) >= asked.steps or ended_itself(trace)
            enough = enough or (not asked.whole and self._violates(trace, asked))
            enough = enough and {*entry.undumped, *dumped(trace.directory, asked.dump)} >= set(asked.dump)
        except ReproError:  # damaged: replay it
            return None
        return trace.until(asked.steps) if enough else None

    def _violates(self, trace: Trace, asked: Request) -> bool:
        """Whether a trace that may have been cut off is BAD all the same, within so many steps."""
        if asked.baseline is None or isinstance(self.predicate, Own):
            return False
        try:
            return first_violation(self.predicate, asked.baseline, trace, asked.steps) is not None
        except UnjudgedError:
            return False

    def _replay(self, task: Task, asked: Request, key: str, control: Control) -> Answer:
        around, began = self._around.of(self._case(asked.point)), time.monotonic()
        self._tried.add((key, asked.run))
        stood = around.moment
        with scratch_folder(self._scratch, "probe") as folder:
            outcome = self._run(task, folder, control, alone=asked.alone)
            trace = trace_in(folder / "trace")
            reason = reason_of(outcome.failure, self.git) if outcome.failure else ""
            judged = trace if outcome.ran_itself else None
            if reason and judged and (asked.partial or (not asked.start and self._violates(judged, asked))):
                reason = ""  # it crashed only after its numbers had moved
            lasting = around.lasted(stood, outcome.pythons)
            if asked.keep and not outcome.failure and lasting and around.expects(outcome.pythons):
                states.keep(folder / "states", asked.keep[1])
            if outcome.code is not None and not 0 <= outcome.code < _CODES:
                raise ReproError(
                    f"the command ended with {outcome.code} at {short(task.commit)}, neither good nor bad: "
                    "exit with 0, 1 to 127, or 125 to skip"
                )
            steps, seconds = len(trace.steps) if trace else 0, round(time.monotonic() - began, 3)
            self._charge(asked.stage, steps, seconds, outcome.tries)
            skip = Skip(reason, diagnosis=self._diagnosis(outcome.failure)) if reason and outcome.failure else None
            if skip and task.start and outcome.unready:
                return replace(skip, unready=True)  # says something of the state, not yet of the commit
            why = skip.reason if skip else UNTESTABLE if outcome.code == UNTESTABLE_CODE else ""
            doubted = why and outcome.beside and not is_told(why)
            if doubted and (alone := self._alone(why, task, asked, key, control)) is not None:
                return alone
            trace_path = self._keep(
                task.commit, asked, key, skip, steps, seconds, folder / "trace", outcome, lasting=lasting
            )
        if skip:
            return skip
        return Code(outcome.code) if outcome.code is not None else Trace(trace_path)

    def _alone(self, why: str, task: Task, asked: Request, key: str, control: Control) -> Answer | None:
        """What a probe says alone that was skipped beside others; None where such skips are believed.

        Raises:
            DisturbedError: see `Company.tried`.
        """
        company = self._attempts.company
        with company.doubting:
            if company.believes(why):
                return None
            answer = self._replay(task, replace(asked, alone=True), key, control)
            again = UNTESTABLE if answer == Code(UNTESTABLE_CODE) else answer.reason if isinstance(answer, Skip) else ""
            company.tried(short(task.commit), why, again)
        return answer

    def _run(self, task: Task, folder: Path, control: Control, *, alone: bool = False) -> Outcome:
        outcome = self._attempts.run(task, folder, control, alone=alone)
        self.ran_in.update(self._around.pythons.in_words(outcome.pythons))
        return outcome

    def _diagnosis(self, failure: ChildFailure) -> str:
        log = Path(failure.log)
        return self._examine(log, failure.message) if self._examine and log.is_file() else ""

    def _charge(self, stage: Stage, steps: int, seconds: float, tries: int) -> None:
        bill: Bill = getattr(self.cost, stage)
        with self._lock:
            bill.probes += tries
            bill.steps += steps
            bill.seconds += seconds

    def _keep(
        self,
        commit: str,
        asked: Request,
        key: str,
        skip: Skip | None,
        steps: int,
        seconds: float,
        trace: Path,
        outcome: Outcome,
        *,
        lasting: bool,
    ) -> Path:
        """Journal a finished probe and return where its trace lies from now on."""
        name = "" if skip or outcome.code is not None else f"{key}-{asked.run}-{uuid.uuid4().hex[:8]}"
        reason, known = (skip.reason, skip.diagnosis) if skip else ("", "")
        entry = Entry(
            key, asked.run, commit, reason, steps, seconds, name, outcome.code, known, undumped(trace, asked),
            self.search, outcome.beside, outcome.made, self._around.pythons.facts(outcome.pythons),
        )  # fmt: skip
        if name and size_of(trace / "dumps") > _DUMPED:  # for this bisect only
            self._unkept[key, asked.run] = Made(commit, self.search, outcome.beside)
            return trace.rename(self._scratch / f"dumped-{name}")
        if name and not lasting:  # its trace goes with this search, which is who may use it
            entry = replace(entry, folder=str(self._scratch / name))
        with self._lock:
            self._journal.met(self.case.digest, entry.pythons)
            self._journal.add(entry, trace if name else None, lasting=lasting)
        return self._journal.trace_path(entry)

    @property
    def journalled(self) -> int:
        """Finished probes that earlier bisects left of these commits' code, straight ones."""
        if not len(self._journal):  # a key is not free where there are very many commits
            return 0
        points = (self._history.good, *self._history.parents)
        return self._journal.count({self.key(point) for point in points if self._history.tree(point)})

    @property
    def changed(self) -> list[str]:
        """Places beside the commits that were not the same all the time."""
        return self._around.changed

    def close(self) -> None:
        """Remove what is not journalled."""
        self._exit.close()
