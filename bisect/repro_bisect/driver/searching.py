"""What every search between two ends shares, whatever it asks next: the ends, one-step probes, the result, and why."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Generic, TypeVar

from repro_bisect.axes.axis import before as point_before
from repro_bisect.driver.circumstances import NOT_FOUND
from repro_bisect.driver.confirm import Interval
from repro_bisect.driver.endpoints import Endpoints
from repro_bisect.driver.range_search import RangeSearch, Tested
from repro_bisect.driver.result import BisectResult, Culprit, Outcome, in_order
from repro_bisect.explain.driver import Recorded, explain
from repro_bisect.predicates.predicates import Bitwise
from repro_bisect.probe.one_step import Shortcut, prepare
from repro_bisect.probe.scheduler import Scheduler
from repro_bisect.search.first_bad import Search
from repro_golden.base.errors import NotVerifiableError, ReproError
from repro_golden.compare.traces import Divergence
from repro_golden.repository.checkout import Checkout

__all__ = ["Searching"]

R = TypeVar("R", bound=BisectResult)


class Searching(ABC, Generic[R]):
    """One search between the ends of the scheduler's axis, from looking at these to the confirmed culprit.

    Attributes:
        one_step: Whether probes trained one step from a saved state.
        answered: Seconds until the search had its answer, before it was confirmed; None as long as it has none.
        recorded: By culprit, what the replays that confirmed it recorded for its explanation.
    """

    result_type: type[R]

    def __init__(self, scheduler: Scheduler, endpoints: Endpoints) -> None:
        """Search the scheduler's axis; its clock starts with the scheduler's."""
        self.scheduler, self.endpoints = scheduler, endpoints
        self.history, self.predicate = scheduler.history, scheduler.predicate
        self.one_step = False
        self.answered: float | None = None
        self.recorded: dict[str, Recorded] = {}
        self._began = scheduler.began

    @abstractmethod
    def search(self) -> R:
        """Look at the ends, search, and confirm what was found."""

    def run(self) -> R:
        """`search`, which takes what the journal knows, and gives back what the ends hold."""
        try:
            self.scheduler.begin()
            return self.search()
        finally:
            self.endpoints.close()

    def explained(self, checkout: Checkout, *, explain: bool) -> R:
        """`run`, and where that is asked for each culprit with why, where its traces tell."""
        result = self.run()
        if not explain or result.outcome != "found":
            return result
        culprits = [self._why(checkout, culprit) for culprit in result.culprits]
        seconds = time.monotonic() - self._began
        return replace(result, culprits=culprits, cost=self.scheduler.cost, seconds=seconds)

    def _why(self, checkout: Checkout, culprit: Culprit) -> Culprit:
        info, divergence = culprit.commit, culprit.divergence
        if divergence is None or culprit.comparison is None:  # an exit code, or verdicts that are noisy
            return culprit
        before = culprit.before or point_before(self.history, info.commit, self.history.good)
        states = self.endpoints.golden_states() if before == self.history.good else {}
        until = divergence.step if culprit.until is None else culprit.until
        try:
            explanation = explain(
                self.scheduler, checkout, before, info.commit,
                golden=states, until=until, recorded=self.recorded.pop(info.commit, None),
            )  # fmt: skip
        except (NotVerifiableError, ReproError) as error:  # the answer stands without it
            return replace(culprit, unexplained=str(error))
        return replace(culprit, explanation=explanation)

    def has_answer(self) -> None:
        """Note the time: what follows only bears the answer out."""
        self.answered = time.monotonic() - self._began

    def shortcut(self, interval: Interval, end: Divergence | None) -> Shortcut | None:
        """How to probe an interval by one step from a saved state; None where that cannot tell what is asked."""
        if not isinstance(self.predicate, Bitwise) or end is None:
            return None
        assert interval.baseline
        assert interval.last
        golden = self.endpoints.golden_states() if interval.good == self.history.good else {}
        endpoints, traces = (interval.good, interval.bad), (interval.baseline, interval.last)
        shortcut = prepare(self.scheduler, self.endpoints.states(interval.good), golden, endpoints, end.step, traces)
        self.one_step = self.one_step or shortcut is not None
        return shortcut

    def range_search(
        self, interval: Interval, search: Search[str], end: Divergence | None, shortcut: Shortcut | None
    ) -> RangeSearch:
        """What tests the points of an interval and judges them, with what is known of its bad end."""
        bound = self.scheduler.case.steps
        if end and interval.baseline:
            bound = 1 + next(i for i, record in enumerate(interval.baseline.steps) if record.step == end.step)
        range_search = RangeSearch(self.scheduler, search, interval.baseline, bound, shortcut, end)
        if interval.last is not None:
            range_search.tested[interval.bad] = Tested(interval.last, interval.baseline, bound)
        if (interval.good, interval.bad) == (self.history.good, self.history.bad):
            for point, answer in self.endpoints.ahead.items():
                if point in search.dag:  # not one of those that lack GOOD, where only the others are searched
                    range_search.take(point, Tested(answer, interval.baseline, bound))
        return range_search

    def result(
        self,
        outcome: Outcome,
        culprits: Sequence[Culprit],
        parents: Mapping[str, Sequence[str]],
        accepted: Mapping[str, str] | None = None,
        **more: Any,
    ) -> R:
        """The result, with all that it says of how it came about.

        Args:
            outcome: See `BisectResult`.
            culprits: Likewise.
            parents: Likewise.
            accepted: Likewise; by default only what both ends are.
            more: Fields of `result_type` that only some searches know.
        """
        good, bad, scheduler = self.history.good, self.history.bad, self.scheduler
        lacks = any(map(NOT_FOUND.search, scheduler.skips.values())) and self.endpoints.not_installed()
        return self.result_type(
            outcome=outcome,
            good=good,
            named=self.history.named,
            bad=bad,
            case=self.scheduler.case.name,
            predicate=self.predicate.text,
            culprits=list(culprits),
            end=self.endpoints.end,
            verdicts=dict(scheduler.verdicts),
            skips={point: scheduler.skips[point] for point in in_order(scheduler.skips, parents)},
            diagnoses=dict(scheduler.diagnoses),
            parents={point: list(before) for point, before in parents.items()},
            subjects=self.history.subjects(list(dict.fromkeys([good, bad, *scheduler.verdicts]))),
            cost=self.scheduler.cost,
            git_steps=self.scheduler.case.steps,
            accepted=accepted or {good: "GOOD", bad: "BAD"},
            one_step=self.one_step,
            looked=scheduler.looked(self.endpoints.baseline, self.endpoints.last),
            remarks=[
                *scheduler.remarks,
                *self.endpoints.remarks,
                *([lacks] if lacks else []),
                *(f"{place} was changed meanwhile" for place in scheduler.prober.changed),
            ],
            seconds=time.monotonic() - self._began,
            answered=self.answered,
            machine=self.scheduler.machine,
            golden=str(self.endpoints.golden.directory) if self.endpoints.golden else None,
            renames=self.endpoints.renames,
            ends=[self.history.info(good), self.history.info(bad)],
            **more,
        )
