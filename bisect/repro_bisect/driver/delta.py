"""Which of a set of changes move the numbers of a case: `minimal` over real probes, and the confirmation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from repro_bisect.axes.sets import FlagSet
from repro_bisect.driver.confirm import Confirmed, Interval, confirm
from repro_bisect.driver.endpoints import Endpoints
from repro_bisect.driver.range_search import RangeSearch, Tested
from repro_bisect.driver.result import BisectResult, Outcome
from repro_bisect.driver.searching import Searching
from repro_bisect.driver.session import Options, session, undisturbed
from repro_bisect.predicates.predicates import Exit, known_violation, predicate_of
from repro_bisect.probe.progress import Watch
from repro_bisect.probe.request import Request
from repro_bisect.probe.scheduler import PendingProbe, Scheduler
from repro_bisect.search.dag import Dag
from repro_bisect.search.first_bad import Search, Verdict
from repro_bisect.search.minimal import Minimal, Response, minimal
from repro_golden.base.errors import NotVerifiableError
from repro_golden.case.file import Case
from repro_golden.repository.checkout import Checkout
from repro_golden.trace import Trace

__all__ = ["SetResult", "minimal_set"]

_RESPONSES = {Verdict.GOOD: Response.SAME, Verdict.BAD: Response.MOVES, Verdict.SKIP: Response.SKIP}


@dataclass(frozen=True, kw_only=True)
class SetResult(BisectResult):
    """What a search among changes without an order found. Its culprit is a set of them.

    Attributes:
        changes: How many there are.
        chosen: Labels of those that move the numbers together.
        does: What each of them does.
        hidden: Those of them of which it is not known whether they are needed: the rest cannot be tested.
        asked: How many sets were tried beside the two ends.
    """

    changes: int = 0
    chosen: Sequence[str] = ()
    does: Sequence[str] = ()
    hidden: Sequence[str] = ()
    asked: int = 0

    @property
    def proved(self) -> bool:
        """Whether none of them can be left out: the rest was seen to move nothing."""
        return self.outcome == "found" and not self.hidden


def minimal_set(checkout: Checkout, case: Case, axis: FlagSet, watch: Watch, options: Options) -> SetResult:
    """Find a minimal set of changes that moves the numbers of a case.

    What moves them later than all changes together do counts as not moving them.

    Raises:
        NotVerifiableError: the case does not reproduce itself, or full replays contradict the search.
        ReproError: the rollouts or an end cannot be used.
        MachineFailureError: the machine failed; the same command resumes.
    """
    predicate = predicate_of(options.when, case.compare, checkout.root)

    def search(options: Options) -> SetResult:
        with session(checkout, case, axis, predicate, watch, options) as (scheduler, _):
            endpoints = Endpoints(scheduler, None, checkout.state / "states", open_end=options.open_end)
            return _Reduction(scheduler, axis, endpoints).explained(checkout, explain=options.explain)

    return undisturbed(search, watch, options)


class _Reduction(Searching[SetResult]):
    result_type = SetResult

    def __init__(self, scheduler: Scheduler, axis: FlagSet, endpoints: Endpoints) -> None:
        super().__init__(scheduler, endpoints)
        self.axis = axis

    def search(self) -> SetResult:
        """The ends, the search, and full replays of what it found."""
        interval = (
            self.endpoints.by_exit_code(runs=2) if isinstance(self.predicate, Exit) else self.endpoints.by_trace()
        )
        if self.endpoints.noise:
            which = "with all changes" if "of BAD" in self.endpoints.noise else "without any change"
            raise NotVerifiableError(
                f"{which} the case does not reproduce itself ({self.endpoints.noise}): a set is judged by "
                "single replays, so make it deterministic"
            )
        if interval is None:
            return self._result("agree", None, None)
        if self.endpoints.end:
            self.scheduler.say(f"with all changes the numbers differ at {self.endpoints.end}")
        dag = Dag.between(self.axis.parents, [interval.good], interval.bad)
        shortcut = self.shortcut(interval, self.endpoints.end)
        while True:
            search = Search(dag, interval.bad, [interval.good])
            range_search = self.range_search(interval, search, self.endpoints.end, shortcut)
            smallest = _Smallest(self.axis, range_search).run()
            self.has_answer()
            point = self.axis.point(frozenset(smallest.chosen))
            if shortcut and (less := self._moves_without(smallest, interval)):
                self.scheduler.say(f"from step 0 {less} moves the numbers too: searching again with probes from there")
                shortcut = None
                continue
            confirmed = confirm(self.scheduler, range_search, point, interval, self.endpoints.end)
            if confirmed is not None:
                return self._result("flaky" if confirmed.flaky else "found", smallest, confirmed)
            if shortcut is None:
                raise NotVerifiableError(f"full replays do not bear out that {point} moves the numbers: run it again")
            self.scheduler.say(f"full replays do not bear {point} out: searching again with probes from step 0")
            shortcut = None

    def _moves_without(self, smallest: Minimal, interval: Interval) -> str:
        """One less than was chosen that moves the numbers all the same, before the step at which probes began."""
        chosen = frozenset(smallest.chosen)
        fewer = [self.axis.point(chosen - {change}) for change in chosen] if len(chosen) > 1 else []
        steps, baseline = self.scheduler.case.steps, interval.baseline
        answers = self.scheduler.ask(*(Request(point, steps, baseline, stage="confirmation") for point in fewer))
        for point, answer in zip(fewer, answers, strict=True):
            if baseline and isinstance(answer, Trace) and known_violation(self.predicate, baseline, answer):
                return point
        return ""

    def _result(self, outcome: Outcome, smallest: Minimal | None, confirmed: Confirmed | None) -> SetResult:
        axis = self.axis
        tried = [name for name in self.scheduler.verdicts if name not in (axis.good, axis.bad)]
        labels = [change.label for change in axis.changes]
        chosen = list(smallest.chosen) if smallest else []
        flaky = confirmed.culprit if confirmed and confirmed.flaky else None
        self.endpoints.remarks += confirmed.remarks if confirmed else ()
        if confirmed and confirmed.untold:
            self.endpoints.remarks.append(f"whether other changes move the numbers is not known: {confirmed.untold}")
        return self.result(
            outcome,
            [confirmed.culprit] if confirmed and not flaky else [],
            {name: [axis.good] for name in [axis.bad, *tried]},
            flaky=flaky,
            explains_bad=confirmed.explains if confirmed else None,
            changes=len(axis.changes),
            chosen=[labels[k] for k in chosen],
            does=[axis.changes[k].about for k in chosen],
            hidden=[labels[k] for k in smallest.hidden] if smallest else [],
            asked=smallest.asked if smallest else 0,
        )


class _Smallest:
    """`minimal` over real probes."""

    def __init__(self, axis: FlagSet, range_search: RangeSearch) -> None:
        self.axis, self.range_search, self.scheduler = axis, range_search, range_search.scheduler
        self._asking = minimal(len(axis.changes), self.scheduler.slots)
        self._points: list[str] = []
        self._answers: dict[str, Tested] = {}
        self._found: Minimal | None = None

    def run(self) -> Minimal:
        """Search to the end."""
        self.scheduler.drive(self._plan, self._take)
        assert self._found is not None
        return self._found

    def _plan(self, _: int) -> bool:
        """Ask what is asked next once all before is answered; False where nothing more is to be asked."""
        if len(self._answers) < len(self._points):
            assert self.scheduler.pending_probes, "nobody but who ends the search cancels a probe"
            return True
        # in the order in which they were asked for, so that two searches tell the same
        responses = [self._judged(point, self._answers[point]) for point in self._points]
        try:
            subsets = self._asking.send(responses) if responses else next(self._asking)
        except StopIteration as end:
            self._found = end.value
            return False
        self._points, self._answers = [self.axis.point(subset) for subset in subsets], {}
        for point in self._points:
            self.scheduler.start(point, self.range_search.test)
        return True

    def _take(self, pending: PendingProbe, tested: Tested) -> None:
        self._answers[pending.commit] = tested

    def _judged(self, point: str, tested: Tested) -> Response:
        """What a set does."""
        self.range_search.tested[point] = tested
        verdict, detail = self.range_search.verdict(point, tested)
        response = _RESPONSES[verdict]
        if response is Response.SAME:
            detail = "the numbers stay"
        self.scheduler.record(point, verdict, detail)
        self.scheduler.say(f"{response.value:<5} {point}: {detail}")
        self.scheduler.know([point], tested.diagnosis)
        return response
