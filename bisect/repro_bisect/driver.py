"""Bisecting a range: both ends, the search, and the confirmation of what it found."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from repro_bisect.commits import CommitInfo, History
from repro_bisect.dag import Dag
from repro_bisect.desk import Desk, Flight
from repro_bisect.executors import Executor, Signal
from repro_bisect.executors.local import Local, default_jobs
from repro_bisect.gitrule import git_probes
from repro_bisect.hunt import Hunt, Tested, verdict_of_code
from repro_bisect.noisy import NoisySearch
from repro_bisect.onestep import Shortcut, chosen_steps, prepare, state_key
from repro_bisect.predicates import Bitwise, Bounds, Exit, first_violation, of_case, parse_predicate
from repro_bisect.probe import Answer, Code, Prober, Skip, judge
from repro_bisect.result import BisectResult, Culprit, Outcome, Watch
from repro_bisect.search import Ambiguous, Found, Search, Verdict
from repro_bisect.states import States
from repro_golden.case import Case, CoreSubject
from repro_golden.checkout import Checkout
from repro_golden.compare import Divergence, compare, first_difference
from repro_golden.errors import NotVerifiableError, ReproError
from repro_golden.rollouts import place_of
from repro_golden.store import GoldenRun, Store
from repro_golden.subjects import identity_of
from repro_golden.trace import Trace

__all__ = ["Options", "bisect_range"]


@dataclass(frozen=True)
class Options:
    """How to search.

    Attributes:
        jobs: Probes at once; None for what the machine, or the cluster, serves.
        ray: Address of a Ray cluster, or ``auto``; None runs probes here.
        when: The predicate as text; None for what the case says.
        paths: Folders and files that hold all that matters; empty for the subject's own.
        first_parent: Follow only the first parent of merges.
        every: Move the baseline from culprit to culprit until the ends agree.
        confidence: Where verdicts are noisy, the probability at which a commit is the answer; None for the default.
        open_end: The case has as many steps as GOOD makes.
    """

    jobs: int | None = None
    ray: str | None = None
    when: str | None = None
    paths: Sequence[str] = ()
    first_parent: bool = False
    every: bool = False
    confidence: float | None = None
    open_end: bool = False


def bisect_range(checkout: Checkout, case: Case, spec: str, watch: Watch, options: Options) -> BisectResult:
    """Find the commit of ``GOOD..BAD`` that moved the numbers of a case.

    Args:
        checkout: The repository; nothing in it changes.
        case: The case.
        spec: ``GOOD..BAD``.
        watch: Called with every line of progress, and about once a second.
        options: How to search.

    Raises:
        NotVerifiableError: GOOD does not reproduce itself, and cannot be told from BAD by repetition.
        ReproError: the range, the rollouts or an end cannot be used.
        MachineFailureError: the machine failed; the same command resumes.
    """
    predicate = parse_predicate(options.when, checkout.root) if options.when else of_case(case.compare)
    paths = list(options.paths) or [case.subject.path]
    if isinstance(case.subject, CoreSubject) and not case.subject.path:
        raise ReproError(
            f"the subject of {case.name} is the installed {case.subject.module}, which no commit changes: "
            "set subject.path to its folder in this repository"
        )
    history = History(checkout, spec, paths, first_parent=options.first_parent)
    store = Store(checkout.root)
    rollouts = store.rollouts(case)
    if case.case.rollouts is not None and len(rollouts) == 0:
        raise ReproError(f"{rollouts.directory} holds no rollouts: `repro golden record {case.name}` records them")
    if len({history.tree(c) for c in (history.good, *history.parents)}) == 1:
        raise NotVerifiableError(
            f"no commit of {spec} changes {', '.join(paths)}/, the code of {case.name}, so nothing is to be replayed: "
            "widen subject.path (or --path) if what it reads lies elsewhere"
        )
    identity = identity_of(case, checkout.root)
    executor: Executor
    if options.ray:
        from repro_bisect.executors.cluster import Cluster

        executor = Cluster(options.ray, checkout, case, history, place_of(rollouts), options.jobs)
    else:
        executor = Local(checkout, case, place_of(rollouts), options.jobs or default_jobs(case))
    prober = Prober(checkout, case, history, rollouts.digest, identity, executor, predicate)
    try:
        golden = _golden_of(store, case, history, identity.machine, rollouts.digest)
        bisection = _Bisection(history, prober, golden, options, checkout.state / "states", identity.machine)
        return bisection.run(watch)
    finally:
        prober.close()


def _golden_of(store: Store, case: Case, history: History, machine: str, rollouts: str) -> GoldenRun | None:
    """The golden run of GOOD's own code on this machine, if there is one."""
    path = store.run_path(machine, case.name)
    if list(history.paths) != [case.subject.path]:
        return None
    if not (path.exists() or path.with_name(path.name + ".dvc").exists()):
        return None
    golden = store.load(machine, case.name)
    same = golden.record.get("tree") == history.tree(history.good)
    current = golden.record["case"] == case.canonical() and golden.record["rollouts"] == rollouts
    return golden if same and current and not golden.noisy else None


@dataclass(frozen=True)
class _Interval:
    """A range to search: its ends, and what they are known to do; None for exit codes."""

    good: str
    bad: str
    baseline: Trace | None
    last: Trace | None


@dataclass(frozen=True)
class _Confirmed:
    culprit: Culprit
    after: Trace | None
    last: Trace | None
    explains: bool | None
    flaky: bool = False


class _Bisection:
    def __init__(
        self,
        history: History,
        prober: Prober,
        golden: GoldenRun | None,
        options: Options,
        states: Path,
        machine: str,
    ) -> None:
        self.history, self.prober, self.golden, self.options = history, prober, golden, options
        self.case, self.predicate, self.machine = prober.case, prober.predicate, machine
        self.states_folder = states
        self.began = time.monotonic()
        self.desk: Desk
        self.end: Divergence | None = None
        self.one_step = False
        self.first_baseline: Trace | None = None
        self._held: dict[str, States] = {}

    def run(self, watch: Watch) -> BisectResult:
        with ThreadPoolExecutor(max_workers=self.prober.executor.slots) as pool:
            self.desk = Desk(self.prober, self.history, pool, watch)
            try:
                if self.prober.journalled:
                    self.desk.say(f"resuming: {self.prober.journalled} finished probes are in the journal")
                return self._run()
            except BaseException:
                self.desk.cancel(self.desk.flights.values())
                raise
            finally:
                for states in self._held.values():
                    states.close(self.case.case.states_budget)

    def _run(self) -> BisectResult:
        if isinstance(self.predicate, Exit):
            self._exit_ends()
            interval = _Interval(self.history.good, self.history.bad, None, None)
        else:
            found = self._ends()
            if isinstance(found, BisectResult):
                return found
            if found is None:
                return self._result("agree", [])
            interval = found
        return self._search_all(interval)

    # -- the ends

    def _exit_ends(self) -> None:
        """GOOD must exit with 0 and BAD must not."""
        ends = (self.history.good, self.history.bad)
        for commit, name, wanted in zip(ends, ("GOOD", "BAD"), (Verdict.GOOD, Verdict.BAD), strict=True):
            self.desk.say(f"{name} {commit[:10]}: running the command")
            (answer,) = self.desk.results([self.desk.submit(commit, self.case.steps, stage="ends")])
            if not isinstance(answer, Code):
                raise ReproError(_unusable(name, answer))
            verdict, detail = verdict_of_code(answer.code)
            if verdict is not wanted:
                raise ReproError(
                    f"{name} {commit[:10]} is {verdict.value} ({detail}): choose another end for the range"
                )
            self.desk.record(commit, verdict)

    def _ends(self) -> _Interval | BisectResult | None:
        """Make GOOD's baseline, show that it reproduces, and find where BAD leaves it; None where they agree.

        Where GOOD does not reproduce itself the whole search is another one, and its result is returned.
        """
        good, bad, steps = self.history.good, self.history.bad, self.case.steps
        states = self._states(good)
        if self.golden:
            self.desk.say(f"GOOD {good[:10]}: its golden run is at hand; replaying it once")
            baseline = self.golden.trace
        else:
            self.desk.say(f"GOOD {good[:10]}: replaying it twice")
            keep = (chosen_steps(self.case), states) if isinstance(self.predicate, Bitwise) else None
            first = self.desk.submit(good, steps, stage="ends", keep=keep)
            baseline = _trace_of(self.desk.results([first])[0], "GOOD")
            self._shorten(baseline)
        self.prober.baseline = self.first_baseline = baseline
        steps = self.case.steps
        if refused := first_violation(self.predicate, baseline, baseline):
            raise ReproError(f"GOOD {good[:10]} itself is BAD by {self.predicate.text} ({refused}): choose another end")
        self.desk.say(f"BAD {bad[:10]}: replaying it")
        other = self.desk.submit(bad, steps, stage="ends")
        if self.prober.executor.slots == 1 or self.prober.known(bad, steps):  # GOOD need go no further than BAD
            last = _trace_of(self.desk.results([other])[0], "BAD")
            again = self._again(good, baseline, last, states)
        else:
            answers = self.desk.results([self.desk.submit(good, steps, stage="ends", run=1), other])
            again, last = (_trace_of(answer, name) for answer, name in zip(answers, ("GOOD", "BAD"), strict=True))
        noise = first_difference(baseline, again)
        if noise and (isinstance(self.predicate, Bounds) or first_violation(self.predicate, baseline, again)):
            return self._noisy(baseline, noise)
        self.desk.record(good, Verdict.GOOD)
        self.end = judge(self.predicate, baseline, last, steps)
        self.desk.record(bad, Verdict.BAD if self.end else Verdict.GOOD)
        return _Interval(good, bad, baseline, last) if self.end else None

    def _again(self, good: str, baseline: Trace, last: Trace, states: States) -> Trace:
        """GOOD's second replay, as far as it matters, saving on its way the state that probes may start from."""
        steps, keep = self.case.steps, None
        found = first_violation(self.predicate, baseline, last)
        if found and isinstance(self.predicate, Bitwise):
            steps = found.step - baseline.header.first_step + 1
            keep = ([found.step] if chosen_steps(self.case) and found.step else [], states)
        (answer,) = self.desk.results([self.desk.submit(good, steps, stage="ends", run=1, keep=keep)])
        return _trace_of(answer, "GOOD")

    def _shorten(self, baseline: Trace) -> None:
        """A command without a case file makes as many steps as it makes."""
        if len(baseline.steps) < self.case.steps and self.options.open_end:
            experiment = self.case.case.model_copy(update={"steps": len(baseline.steps)})
            self.case = self.prober.case = self.case.model_copy(update={"case": experiment})

    def _noisy(self, baseline: Trace, noise: Divergence) -> BisectResult:
        """A search by what noisy verdicts are worth."""
        self.desk.say(f"GOOD does not reproduce itself ({noise}): weighing repeated replays")
        found = NoisySearch(self.desk, baseline, self.case.steps, noise, self.options.confidence).run()
        self.end = found.end
        if isinstance(found.answer, Ambiguous):
            return self._result("ambiguous", [], ambiguous=found.answer, posterior=found.posterior, rates=found.rates)
        culprit = Culprit(self.history.info(found.answer.commit), found.end, None)
        return self._result("found", [culprit], posterior=found.posterior, rates=found.rates)

    def _states(self, commit: str) -> States:
        """The states of a commit, held until the bisect ends."""
        tree = self.history.tree(commit)
        if tree is None:
            raise ReproError(f"GOOD {commit[:10]} has none of {', '.join(self.history.paths)}")
        if tree not in self._held:
            self._held[tree] = States(self.states_folder, state_key(self.case, self.prober.key(tree)))
        return self._held[tree]

    # -- the search

    def _search_all(self, first: _Interval) -> BisectResult:
        """One interval, or with ``--all`` every one that is left when the baseline moves to the culprit."""
        culprits: list[Culprit] = []
        waiting, explains = deque([first]), None
        while waiting:
            interval = waiting.popleft()
            answer, confirmed = self._search_one(interval)
            if isinstance(answer, Ambiguous):
                return self._result("ambiguous", culprits, ambiguous=answer)
            assert confirmed is not None
            if confirmed.flaky:
                return self._result("flaky", [*culprits, confirmed.culprit])
            explains = confirmed.explains
            if not self.options.every:
                return self._result("found", [confirmed.culprit], explains=explains)
            commit = confirmed.culprit.commit.commit
            if brought := self._brought_in(interval, commit):
                self.desk.say(f"{commit[:10]} is a merge: searching what it brought in")
                waiting += brought
            elif commit not in {c.commit.commit for c in culprits}:
                culprits.append(confirmed.culprit)
            if explains is False and interval.bad != commit:
                self.desk.say(f"the baseline moves to {commit[:10]}")
                self.prober.baseline = confirmed.after
                waiting.append(_Interval(commit, interval.bad, confirmed.after, confirmed.last))
        return self._result("found", culprits, explains=explains)

    def _search_one(self, interval: _Interval) -> tuple[Found[str] | Ambiguous[str], _Confirmed | None]:
        self.prober.baseline = interval.baseline
        end: Divergence | None = None
        bound = self.case.steps
        if interval.baseline and interval.last:
            end = judge(self.predicate, interval.baseline, interval.last, self.case.steps)
            assert end is not None
            self.desk.say(f"GOOD and BAD differ at {end}")
            bound = 1 + next(i for i, record in enumerate(interval.baseline.steps) if record.step == end.step)
        shortcut = self._shortcut(interval, end)
        while True:
            hunt = Hunt(self.desk, self._start(interval), interval.baseline, bound, shortcut)
            self._take_ends(hunt, interval, bound)
            answer = hunt.run()
            if isinstance(answer, Ambiguous):
                return answer, None
            confirmed = self._confirm(hunt, answer.commit, interval, end)
            if confirmed is not None:
                return answer, confirmed
            self.desk.say("the full replays contradict what one step said: searching again with probes from step 0")
            shortcut = None

    def _shortcut(self, interval: _Interval, end: Divergence | None) -> Shortcut | None:
        if not isinstance(self.predicate, Bitwise) or end is None:
            return None
        assert interval.baseline
        assert interval.last
        ours = self.golden and interval.good == self.history.good
        folder = self.golden.directory / "states" if self.golden and ours else None
        kept = {int(path.name): path for path in folder.iterdir()} if folder and folder.is_dir() else {}
        ends, traces = (interval.good, interval.bad), (interval.baseline, interval.last)
        shortcut = prepare(self.desk, self._states(interval.good), kept, ends, end.step, traces)
        self.one_step = self.one_step or shortcut is not None
        return shortcut

    def _start(self, interval: _Interval) -> Search[str]:
        parents = self.history.parents
        if interval.good != self.history.good:  # only what contains the culprit can be compared with it
            inside = self.history.descendants(interval.good)
            parents = {c: [p for p in ps if p in inside] for c, ps in parents.items() if c in inside}
        return Search(Dag.between(parents, [interval.good], interval.bad), interval.bad, [interval.good])

    def _take_ends(self, hunt: Hunt, interval: _Interval, bound: int) -> None:
        if interval.last is not None:
            hunt.tested[interval.bad] = Tested(interval.last, interval.baseline, bound)

    def _brought_in(self, interval: _Interval, commit: str) -> list[_Interval]:
        """The sides of a merge that do not contain the baseline, where they differ from GOOD: the change is theirs."""
        if interval.good == self.history.good:
            return []
        baseline, found = self.first_baseline, list[_Interval]()
        inside = self.history.descendants(interval.good)
        for parent in self.history.parents.get(commit, ()):
            if parent in inside or parent == interval.good or parent not in self.history.parents:
                continue
            self.prober.baseline = baseline
            (answer,) = self.desk.results([self.desk.submit(parent, self.case.steps, full=True, run=2)])
            if isinstance(answer, Trace) and baseline and first_violation(self.predicate, baseline, answer):
                found.append(_Interval(self.history.good, parent, baseline, answer))
        return found

    # -- the confirmation

    def _confirm(self, hunt: Hunt, commit: str, interval: _Interval, end: Divergence | None) -> _Confirmed | None:
        """Replay culprit, parent and BAD in full, with the divergent tensor dumped whole on both sides.

        None where a verdict from one step is not borne out.
        """
        info = self.history.info(commit)
        if interval.baseline is None or end is None:
            return _Confirmed(Culprit(info, None, None), None, None, None)
        steps = self.case.steps
        self.desk.say(f"confirming {commit[:10]} {info.subject}: full replays of it, its parent and BAD")
        tested = hunt.tested.get(commit) or hunt.test(commit, Flight(commit, None))
        first = _trace_of(tested.answer, "the culprit")
        found = hunt.divergence(tested) or end
        signal: Signal = (found.step, found.phase, found.signal)
        parent = info.parents[0] if info.parents else interval.good
        how = {"stage": "confirmation", "run": 2, "partial": True}
        waiting = [self.desk.submit(c, steps, dump=[signal], **how) for c in (parent, commit)]
        if others := self.history.tree(interval.bad) != self.history.tree(commit):
            waiting.append(self.desk.submit(interval.bad, steps, full=True, **how))
        before_answer, after_answer, *rest = self.desk.results(waiting)
        after = _trace_of(after_answer, "the culprit")
        before = interval.baseline if isinstance(before_answer, Skip) else _trace_of(before_answer, "its parent")
        last = _trace_of(rest[0], "BAD") if others else after
        if tested.one_step and hunt.shortcut and not hunt.shortcut.same(first, after):
            return None
        moved = first_violation(self.predicate, before, after)
        if tested.one_step and moved is None:
            return None
        itself = None if tested.one_step or not isinstance(self.predicate, Bitwise) else first_difference(first, after)
        if itself or moved is None:
            return self._flaky(info, itself, first, after)
        comparison = replace(compare(before, after), divergence=moved)
        explains = not others or self._same(after, last)
        return _Confirmed(Culprit(info, moved, comparison), after, last, explains)

    def _flaky(self, info: CommitInfo, itself: Divergence | None, first: Trace, after: Trace) -> _Confirmed:
        """A culprit that differs from itself, shown with the first difference of two of its own replays."""
        self.desk.record(info.commit, "FLAKY")
        self.desk.say(f"FLAKY {info.commit[:10]}: two replays of it differ at {itself}" if itself else "FLAKY")
        comparison = replace(compare(first, after), divergence=itself)
        return _Confirmed(Culprit(info, itself, comparison), after, None, None, flaky=True)

    def _same(self, culprit: Trace, bad: Trace) -> bool:
        """Whether BAD's trace is the culprit's, to the last step, by the predicate."""
        return first_violation(self.predicate, culprit, bad) is None and len(culprit.steps) == len(bad.steps)

    # -- what is said

    def _result(
        self,
        outcome: Outcome,
        culprits: Sequence[Culprit],
        *,
        explains: bool | None = None,
        ambiguous: Ambiguous[str] | None = None,
        posterior: Mapping[str, float] | None = None,
        rates: tuple[float, float] | None = None,
    ) -> BisectResult:
        history, tests = self.history, None
        if len(culprits) == 1 and outcome == "found":
            commit = culprits[0].commit.commit
            tests = git_probes(history.parents, history.good, history.bad, commit, self.desk.skips)
        return BisectResult(
            outcome=outcome,
            good=history.good,
            bad=history.bad,
            case=self.case.name,
            predicate=self.predicate.text,
            culprits=list(culprits),
            suspects=self._ordered(ambiguous.commits) if ambiguous else [],
            untried=self._ordered(ambiguous.presumed) if ambiguous else [],
            end=self.end,
            explains_bad=explains,
            verdicts=dict(self.desk.verdicts),
            skips=dict(self.desk.skips),
            parents={c: list(ps) for c, ps in history.parents.items()},
            subjects=history.subjects([history.good, history.bad, *self.desk.verdicts]),
            cost=self.prober.cost,
            git_probes=tests,
            git_steps=self.case.steps,
            one_step=self.one_step,
            posterior=posterior or {},
            rates=rates,
            seconds=time.monotonic() - self.began,
            machine=self.machine,
            golden=str(self.golden.directory) if self.golden else None,
        )

    def _ordered(self, commits: frozenset[str]) -> list[str]:
        return [c for c in self.history.parents if c in commits]


def _trace_of(answer: Answer, name: str) -> Trace:
    if not isinstance(answer, Trace):
        raise ReproError(_unusable(name, answer))
    return answer


def _unusable(name: str, answer: Answer) -> str:
    why = answer.reason if isinstance(answer, Skip) else "it left no trace"
    return f"{name} cannot be tested: {why}; choose another end for the range"
