"""Bisecting a range: both ends, the search, and the confirmation of what it found."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass
from typing import Any, Literal

from repro_bisect.commits import CommitInfo, History
from repro_bisect.dag import Dag
from repro_bisect.probe import Cost, Prober, Signal, Skip, judge
from repro_bisect.search import Ambiguous, ContradictionError, Found, Search, Verdict
from repro_golden.case import Case, CoreSubject
from repro_golden.checkout import Checkout
from repro_golden.children import CancelledError
from repro_golden.compare import Comparison, Divergence, compare, first_divergent_index, jsonable
from repro_golden.errors import NotVerifiableError, ReproError
from repro_golden.store import GoldenRun, Store
from repro_golden.subjects import identity_of
from repro_golden.trace import Trace

__all__ = ["BisectResult", "Event", "bisect_range", "default_jobs"]

Outcome = Literal["found", "ambiguous", "agree", "flaky"]


@dataclass(frozen=True)
class Event:
    """Something to show while a bisect runs.

    Attributes:
        text: One line.
        tested: Commits that have a verdict.
        suspects: Commits that may still be the culprit.
        rounds: Rounds still needed at most.
    """

    text: str
    tested: int = 0
    suspects: int = 0
    rounds: int = 0


Watch = Callable[[Event], None]


@dataclass(frozen=True)
class BisectResult:
    """What a bisect found.

    Attributes:
        outcome: ``found``, ``ambiguous`` (only skips left), ``agree`` (the ends do), ``flaky`` (the culprit differs
            from itself).
        good: The good end.
        bad: The bad end.
        case: The case's name.
        culprit: The commit that moved the numbers.
        suspects: Where skips leave several.
        untried: Suspects that were only presumed untestable.
        divergence: Where the culprit's numbers first differ from its parent's; without a culprit, BAD's from GOOD's.
        comparison: The culprit's full replay against its parent's.
        explains_bad: Whether the culprit's trace equals BAD's; False means that later commits move numbers too.
        verdicts: Every commit that was judged.
        skips: Why, for the skipped ones.
        order: Every commit of the range, newest first.
        cost: Probes, trained steps and seconds.
        seconds: Wall time.
        machine: Where.
        golden: The golden run that served as GOOD's first run, if one did.
        bitwise: Whether equal meant equal bits; else metrics within the case's bounds.
    """

    outcome: Outcome
    good: str
    bad: str
    case: str
    culprit: CommitInfo | None
    suspects: Sequence[str]
    untried: Sequence[str]
    divergence: Divergence | None
    comparison: Comparison | None
    explains_bad: bool | None
    verdicts: Mapping[str, str]
    skips: Mapping[str, str]
    order: Sequence[str]
    cost: Cost
    seconds: float
    machine: str
    golden: str | None
    bitwise: bool

    @property
    def commits(self) -> int:
        """How many commits the range has."""
        return len(self.order)

    def to_mapping(self) -> dict[str, Any]:
        """JSON types."""
        raw: dict[str, Any] = jsonable(asdict(self)) | {"commits": self.commits}
        raw["comparison"] = self.comparison.to_mapping() if self.comparison else None
        return raw


def bisect_range(checkout: Checkout, case: Case, spec: str, watch: Watch, *, jobs: int = 1) -> BisectResult:
    """Find the commit of ``GOOD..BAD`` that moved the numbers of a case.

    Args:
        checkout: The repository; nothing in it changes.
        case: The case.
        spec: ``GOOD..BAD``.
        watch: Called with every line of progress.
        jobs: Probes at once.

    Raises:
        NotVerifiableError: GOOD does not reproduce itself.
        ReproError: the range, the rollouts or an end cannot be used.
        MachineFailureError: the machine failed; the same command resumes.
    """
    if isinstance(case.subject, CoreSubject) and not case.subject.path:
        raise ReproError(
            f"the subject of {case.name} is the installed {case.subject.module}, which no commit changes: "
            "set subject.path to its folder in this repository"
        )
    history = History(checkout, spec, case.subject.path)
    store = Store(checkout.root)
    rollouts = store.rollouts(case)
    if case.case.rollouts is not None and len(rollouts) == 0:
        raise ReproError(f"{rollouts.directory} holds no rollouts: `repro golden record {case.name}` records them")
    if len({history.tree(c) for c in (history.good, *history.parents)}) == 1:
        raise NotVerifiableError(
            f"no commit of {spec} changes {case.subject.path}/, the code of {case.name}, so nothing is to be replayed: "
            "widen subject.path if what it reads lies elsewhere"
        )
    identity = identity_of(case, checkout.root)
    prober = Prober(checkout, case, history, rollouts, identity)
    try:
        golden = _golden_of(store, case, history, identity.machine, rollouts.digest)
        return _Bisection(case, history, prober, golden, watch, jobs, identity.machine).run()
    finally:
        prober.close()


def _golden_of(store: Store, case: Case, history: History, machine: str, rollouts: str) -> GoldenRun | None:
    """The golden run of GOOD's own code on this machine, if there is one."""
    path = store.run_path(machine, case.name)
    if not (path.exists() or path.with_name(path.name + ".dvc").exists()):
        return None
    golden = store.load(machine, case.name)
    same = golden.record.get("tree") == history.tree(history.good)
    current = golden.record["case"] == case.canonical() and golden.record["rollouts"] == rollouts
    return golden if same and current and not golden.noisy else None


@dataclass(frozen=True)
class _Flight:
    commit: str
    tree: str | None
    cancel: threading.Event


class _Bisection:
    def __init__(
        self,
        case: Case,
        history: History,
        prober: Prober,
        golden: GoldenRun | None,
        watch: Watch,
        jobs: int,
        machine: str,
    ) -> None:
        self.case, self.history, self.prober, self.golden = case, history, prober, golden
        self.watch, self.jobs, self.machine = watch, max(1, jobs), machine
        self.began = time.monotonic()
        self.search = Search(Dag.between(history.parents, [history.good], history.bad), history.bad, [history.good])
        self.verdicts: dict[str, str] = {}
        self.skips: dict[str, str] = {}
        self.bitwise = case.compare.mode == "bitwise"
        self.flights: dict[Future[Trace | Skip], _Flight] = {}
        self.baseline: Trace

    def run(self) -> BisectResult:
        if self.prober.journalled:
            self.say(f"resuming: {self.prober.journalled} finished probes are in the journal")
        with ThreadPoolExecutor(max_workers=self.jobs) as pool:
            try:
                return self._run(pool)
            except BaseException:
                self._cancel(self.flights.values())
                raise

    def _run(self, pool: ThreadPoolExecutor) -> BisectResult:
        divergence = self._probe_ends(pool)
        if divergence is None:
            return self._result("agree", None)
        self.say(f"GOOD and BAD differ at {divergence}")
        bound = self._bound(divergence)
        self._search(pool, bound)
        answer = self.search.answer
        if isinstance(answer, Found):
            return self._confirm(pool, answer.commit, divergence)
        assert isinstance(answer, Ambiguous)
        return self._result(
            "ambiguous", divergence, suspects=self._ordered(answer.commits), untried=self._ordered(answer.presumed)
        )

    # -- the ends

    def _probe_ends(self, pool: ThreadPoolExecutor) -> Divergence | None:
        """Make GOOD's baseline, show that it reproduces, and find where BAD leaves it."""
        good, bad, steps = self.history.good, self.history.bad, self.case.steps
        if self.golden:
            self.say(f"GOOD {good[:10]}: its golden run is at hand; replaying it once")
            self.baseline = self.golden.trace
        else:
            self.say(f"GOOD {good[:10]}: replaying it twice")
            self.baseline = self._end(self._submit(pool, good, steps).result(), "GOOD")
        self.prober.baseline = self.baseline
        again = self._submit(pool, good, steps, run=1)
        other = self._submit(pool, bad, steps)
        found = compare(self.baseline, self._end(again.result(), "GOOD"), self.case.compare)
        if found.divergence:
            raise NotVerifiableError(
                f"GOOD {good[:10]} is FLAKY: two replays of it differ at {found.divergence}; "
                "make it deterministic (`python -m repro_core.determinism`), or compare metrics by bounds"
            )
        self.record(good, Verdict.GOOD)
        self.say(f"BAD {bad[:10]}: replaying it")
        divergence = judge(self.baseline, self._end(other.result(), "BAD"), self.case.compare, steps)
        self.record(bad, Verdict.BAD if divergence else Verdict.GOOD)
        self.flights.clear()
        return divergence

    def _submit(self, pool: ThreadPoolExecutor, commit: str, steps: int, **how: Any) -> Future[Trace | Skip]:
        """Start a probe that can be cancelled; `how` is `Prober.probe`'s."""
        flight = _Flight(commit, self.history.tree(commit), threading.Event())
        future = pool.submit(self.prober.probe, commit, steps, cancel=flight.cancel, **how)
        self.flights[future] = flight
        return future

    @staticmethod
    def _cancel(flights: Iterable[_Flight]) -> None:
        for flight in flights:
            flight.cancel.set()

    def _end(self, outcome: Trace | Skip, name: str) -> Trace:
        if isinstance(outcome, Skip):
            raise ReproError(f"{name} cannot be tested: {outcome.reason}; choose another end for the range")
        return outcome

    def _bound(self, divergence: Divergence) -> int:
        """How many steps a probe may need: none trains past BAD's first divergence (or first violation)."""
        return 1 + next(i for i, record in enumerate(self.baseline.steps) if record.step == divergence.step)

    # -- the search

    def _search(self, pool: ThreadPoolExecutor, bound: int) -> None:
        for commit in self.history.parents:  # what the journal knows is free, so it comes first
            if self.search.answer is None and commit not in self.search.verdicts:
                known = self.prober.known(commit, bound)
                if known is not None:
                    self.prober.cost.reused += 1
                    self._take(commit, known, bound)
        while self.search.answer is None:
            flying = [f.commit for f in self.flights.values()]
            for commit in self.search.next(self.jobs - len(flying), in_flight=flying):
                if self.history.tree(commit) not in {f.tree for f in self.flights.values()}:  # twins share a probe
                    self._submit(pool, commit, bound)
            done, _ = wait(self.flights, return_when=FIRST_COMPLETED)
            for future in done:
                commit = self.flights.pop(future).commit
                try:
                    self._take(commit, future.result(), bound)
                except CancelledError:
                    continue
            moot = self.search.moot(f.commit for f in self.flights.values())
            self._cancel(f for f in self.flights.values() if f.commit in moot)
        self._cancel(self.flights.values())  # what still runs can no longer change the answer
        wait(self.flights)
        self.flights.clear()

    def _take(self, commit: str, outcome: Trace | Skip, bound: int) -> None:
        if isinstance(outcome, Skip):
            verdict, detail = Verdict.SKIP, outcome.reason
        else:
            found = judge(self.baseline, outcome, self.case.compare, bound)
            verdict, detail = (Verdict.BAD, str(found)) if found else (Verdict.GOOD, f"{bound} steps agree")
        for twin in self._twins(commit):
            try:
                self.search = self.search.with_verdict(twin, verdict, detail if verdict is Verdict.SKIP else "")
            except ContradictionError:  # the numbers moved and came back: there is a culprit below all the same
                self.say(f"{verdict.value} {twin[:10]} contradicts what is known: the numbers moved more than once")
            self.record(twin, verdict, detail)
        self.watch(
            Event(
                f"{verdict.value:<4} {commit[:10]} {detail}",
                len(self.verdicts),
                len(self.search.suspects),
                self.search.bound(self.jobs),
            )
        )

    def _twins(self, commit: str) -> list[str]:
        """The commit and the suspects with the same subject tree: they share one probe."""
        tree = self.history.tree(commit)
        known, suspects = self.search.verdicts, self.search.suspects
        rest = (c for c in self.history.parents if c != commit and c not in known and c in suspects)
        return [commit, *(c for c in rest if self.history.tree(c) == tree)]

    # -- the confirmation

    def _confirm(self, pool: ThreadPoolExecutor, commit: str, divergence: Divergence) -> BisectResult:
        """Replay culprit, parent and BAD in full, with the divergent tensor dumped whole on both sides."""
        steps = self.case.steps
        info = self.history.info(commit)
        self.say(f"confirming {commit[:10]} {info.subject}: full replays of it, its parent and BAD")
        first = self._end(self._submit(pool, commit, self._bound(divergence)).result(), "the culprit")
        signal = self._signal(first, divergence)
        parent = info.parents[0] if info.parents else self.history.good
        waiting = [self._submit(pool, c, steps, run=2, dump=[signal], partial=True) for c in (parent, commit)]
        bad = self.history.bad
        if self.history.tree(bad) != self.history.tree(commit):
            waiting.append(self._submit(pool, bad, steps, run=2, full=True, partial=True))
        before, after, *last = (self._end(w.result(), "the culprit, its parent or BAD") for w in waiting)
        found = compare(before, after, self.case.compare)
        index = first_divergent_index(first, after)
        if found.divergence is None or (self.bitwise and index is not None):
            self.verdicts[commit] = "FLAKY"
            self.say(f"FLAKY {commit[:10]}: two replays of it differ")
            return self._result("flaky", found.divergence or divergence, culprit=info, comparison=found)
        explains = all(self._same(after, trace) for trace in last)
        return self._result("found", found.divergence, culprit=info, comparison=found, explains=explains)

    def _same(self, culprit: Trace, bad: Trace) -> bool:
        """Whether BAD's trace is the culprit's, to the last step, by the case's rule."""
        found = compare(culprit, bad, self.case.compare)
        return found.divergence is None and len(culprit.steps) == len(bad.steps)

    def _signal(self, trace: Trace, divergence: Divergence) -> Signal:
        found = judge(self.baseline, trace, self.case.compare, 0) or divergence
        return found.step, found.phase, found.signal

    # -- what is said

    def say(self, text: str) -> None:
        self.watch(Event(text, len(self.verdicts), len(self.search.suspects), self.search.bound(self.jobs)))

    def record(self, commit: str, verdict: Verdict, reason: str = "") -> None:
        self.verdicts[commit] = verdict.value
        if verdict is Verdict.SKIP:
            self.skips[commit] = reason

    def _ordered(self, commits: frozenset[str]) -> list[str]:
        return [c for c in self.history.parents if c in commits]

    def _result(
        self,
        outcome: Outcome,
        divergence: Divergence | None,
        *,
        culprit: CommitInfo | None = None,
        comparison: Comparison | None = None,
        explains: bool | None = None,
        suspects: Sequence[str] = (),
        untried: Sequence[str] = (),
    ) -> BisectResult:
        return BisectResult(
            outcome=outcome,
            good=self.history.good,
            bad=self.history.bad,
            case=self.case.name,
            culprit=culprit,
            suspects=list(suspects),
            untried=list(untried),
            divergence=divergence,
            comparison=comparison,
            explains_bad=explains,
            verdicts=dict(self.verdicts),
            skips=dict(self.skips),
            order=list(self.history.parents),
            cost=self.prober.cost,
            seconds=time.monotonic() - self.began,
            machine=self.machine,
            golden=str(self.golden.directory) if self.golden else None,
            bitwise=self.bitwise,
        )


def default_jobs(case: Case) -> int:
    """As many probes at once as the processors serve."""
    return max(1, (os.cpu_count() or 1) // (case.resources.cpus * case.resources.ranks))
