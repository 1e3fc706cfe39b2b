"""Which of a set of changes move the numbers of a case: `minimal` over real probes, and the confirmation."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from repro_bisect.axes.sets import FlagSet
from repro_bisect.driver.confirm import Confirmed, Interval, confirm
from repro_bisect.driver.endpoints import Endpoints
from repro_bisect.driver.explained import with_explanations
from repro_bisect.driver.range_search import RangeSearch, Tested, verdict_of_code
from repro_bisect.driver.result import BisectResult, Culprit, Outcome
from repro_bisect.driver.session import Options, session
from repro_bisect.predicates.predicates import Bitwise, Exit, predicate_of
from repro_bisect.probe.one_step import Shortcut, prepare
from repro_bisect.probe.prober import Code, Skip
from repro_bisect.probe.progress import Watch
from repro_bisect.probe.scheduler import Scheduler
from repro_bisect.search.dag import Dag
from repro_bisect.search.first_bad import Search, Verdict
from repro_bisect.search.minimal import Minimal, Response, minimal
from repro_golden.base.errors import NotVerifiableError, ReproError
from repro_golden.case.file import Case
from repro_golden.repository.checkout import Checkout

__all__ = ["SetResult", "minimal_set"]

_RESPONSES = {Verdict.GOOD: Response.SAME, Verdict.BAD: Response.MOVES, Verdict.SKIP: Response.SKIP}


@dataclass(frozen=True)
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
    with session(checkout, case, axis, predicate, watch, options) as (scheduler, _):
        ends = Endpoints(scheduler, None, checkout.state / "states", open_end=options.open_end)
        try:
            result = _Reduction(scheduler, axis, ends).run()
        finally:
            ends.close()
        return with_explanations(scheduler, checkout, result, None) if options.explain else result


class _Reduction:
    def __init__(self, scheduler: Scheduler, axis: FlagSet, ends: Endpoints) -> None:
        self.scheduler, self.axis, self.ends, self.prober = scheduler, axis, ends, scheduler.prober
        self.began = time.monotonic()
        self.answered: float | None = None
        self.one_step = False

    def run(self) -> SetResult:
        """The ends, the search, and full replays of what it found."""
        interval = self.ends.by_exit_code(runs=2) if isinstance(self.prober.predicate, Exit) else self.ends.by_trace()
        if self.ends.noise:
            raise NotVerifiableError(
                f"without any change the case does not reproduce itself ({self.ends.noise}): a set is judged by single "
                "replays; make it deterministic, or judge by a --when that noise does not cross"
            )
        if interval is None:
            return self._result("agree", None, None)
        bound = self.prober.case.steps
        shortcut: Shortcut | None = None
        if interval.baseline and interval.last and self.ends.end:
            self.scheduler.say(f"with all changes the numbers differ at {self.ends.end}")
            bound = self.ends.end.step - interval.baseline.header.first_step + 1
            if isinstance(self.prober.predicate, Bitwise):
                states, traces = self.ends.states(interval.good), (interval.baseline, interval.last)
                shortcut = prepare(
                    self.scheduler, states, {}, (interval.good, interval.bad), self.ends.end.step, traces
                )  # fmt: skip
        while True:
            self.one_step = shortcut is not None
            range_search = self._range_search(interval, bound, shortcut)
            found = minimal(len(self.axis.changes), partial(self._ask, range_search), self._slots)
            self.answered = time.monotonic() - self.began
            point = self.axis.point(frozenset(found.chosen))
            confirmed = confirm(self.scheduler, range_search, point, interval, self.ends.end)
            if confirmed is not None:
                return self._result("flaky" if confirmed.flaky else "found", found, confirmed)
            if shortcut is None:
                raise NotVerifiableError(f"full replays do not bear out that {point} moves the numbers: run it again")
            self.scheduler.say(f"full replays do not bear {point} out: searching again with probes from step 0")
            shortcut = None

    @property
    def _slots(self) -> int:
        return self.prober.executor.slots

    def _range_search(self, interval: Interval, bound: int, shortcut: Shortcut | None) -> RangeSearch:
        """What tests a set, by one step or straight, and judges it."""
        search = Search(Dag.between(self.axis.parents, [interval.good], interval.bad), interval.bad, [interval.good])
        range_search = RangeSearch(self.scheduler, search, interval.baseline, bound, shortcut)
        if interval.last is not None:
            range_search.tested[interval.bad] = Tested(interval.last, interval.baseline, bound)
        return range_search

    def _ask(self, range_search: RangeSearch, subsets: Sequence[frozenset[int]]) -> list[Response]:
        """Several sets at once."""
        points = [self.axis.point(subset) for subset in subsets]
        waiting = [self.scheduler.start(p, lambda pending, p=p: range_search.test(p, pending)) for p in points]  # type: ignore[misc]
        found: Sequence[Tested] = self.scheduler.results(waiting)  # type: ignore[assignment]
        return [self._judged(range_search, point, tested) for point, tested in zip(points, found, strict=True)]

    def _judged(self, range_search: RangeSearch, point: str, tested: Tested) -> Response:
        range_search.tested[point] = tested
        verdict, detail = Verdict.GOOD, "the numbers stay"
        if isinstance(tested.answer, Skip):
            verdict, detail = Verdict.SKIP, tested.answer.reason
        elif isinstance(tested.answer, Code):
            verdict, detail = verdict_of_code(tested.answer.code)
        elif found := range_search.divergence(tested):
            skipped = isinstance(found, Skip)
            verdict, detail = (
                Verdict.SKIP if skipped else Verdict.BAD,
                found.reason if isinstance(found, Skip) else str(found),
            )
        self.scheduler.record(point, verdict, detail)
        said = {Verdict.GOOD: "SAME", Verdict.BAD: "MOVES", Verdict.SKIP: "SKIP"}[verdict]
        self.scheduler.say(f"{said:<5} {point}: {detail}")
        self.scheduler.know([point], tested.diagnosis)
        return _RESPONSES[verdict]

    def _result(self, outcome: Outcome, found: Minimal | None, confirmed: Confirmed | None) -> SetResult:
        axis, culprits = self.axis, list[Culprit]()
        if confirmed:
            culprits = [confirmed.culprit]
        elif found:
            raise ReproError("a set that was found is confirmed")
        order = [name for name in self.scheduler.verdicts if name not in (axis.good, axis.bad)]
        labels = [change.label for change in axis.changes]
        chosen = list(found.chosen) if found else []
        return SetResult(
            outcome=outcome,
            good=axis.good,
            bad=axis.bad,
            case=self.prober.case.name,
            predicate=self.prober.predicate.text,
            culprits=culprits,
            suspects=[],
            untried=[],
            end=self.ends.end,
            explains_bad=confirmed.explains if confirmed else None,
            verdicts=dict(self.scheduler.verdicts),
            skips=dict(self.scheduler.skips),
            diagnoses=dict(self.scheduler.diagnoses),
            parents={name: [axis.good] for name in [axis.bad, *order]},
            subjects=axis.subjects([axis.good, axis.bad, *order]),
            cost=self.prober.cost,
            git_probes=None,
            git_steps=self.prober.case.steps,
            git_seconds=None,
            accepted={axis.good: "GOOD", axis.bad: "BAD"},
            one_step=self.one_step,
            posterior={},
            rates=None,
            seconds=time.monotonic() - self.began,
            answered=self.answered,
            machine=self.prober.machine,
            golden=None,
            looked=self.prober.predicate.looked(self.ends.baseline),
            changes=len(axis.changes),
            chosen=[labels[k] for k in chosen],
            does=[axis.changes[k].about for k in chosen],
            hidden=[labels[k] for k in found.hidden] if found else [],
            asked=found.asked if found else 0,
        )
