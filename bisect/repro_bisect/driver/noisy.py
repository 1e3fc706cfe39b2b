"""Bisecting where verdicts are noisy, or may be: replays of both ends and of commits between, as `bayes` asks for them.

All that is known of the range counts, whoever asked for it: what a plain search found before noise was seen, and runs
of earlier bisects.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import reduce
from operator import and_, or_
from statistics import fmean

from repro_bisect.axes.axis import short
from repro_bisect.driver.range_search import verdict_of_code
from repro_bisect.predicates.predicates import Exit
from repro_bisect.probe.answers import Answer, Code, Skip, judge
from repro_bisect.probe.request import Request
from repro_bisect.probe.scheduler import PendingProbe, Scheduler
from repro_bisect.search.bayes import BayesSearch
from repro_bisect.search.dag import Dag
from repro_bisect.search.first_bad import Ambiguous, FirstBad, Verdict
from repro_bisect.search.noise import CAUTIOUS
from repro_golden.base.errors import NotVerifiableError, ReproError
from repro_golden.compare.traces import Divergence
from repro_golden.trace import Trace

__all__ = ["HOPELESS", "SURE", "NoisyAnswer", "NoisySearch"]

HOPELESS = 4
"""Runs of an end that all say what it is not: it is no such end then. A program that says the wrong thing three times
in ten does so in 1 of 120 searches."""
SURE = 0.5
"""The chance, before it was run, that a program whose exit code is asked for always says the same of the same code."""
_SHOWN = 0.001
"""The least probability that is told."""


@dataclass(frozen=True)
class NoisyAnswer:
    """What a noisy search found.

    Attributes:
        answer: The culprit, or commits that nothing testable tells apart.
        end: A violation that BAD showed.
        posterior: Each commit's probability of being the culprit, those worth telling.
        rates: How often a commit without and one with the culprit is judged BAD.
        contradicted: Whether some outcome was wrong, whatever the culprit.
        alike: Whether the runs of each commit all said the same.
    """

    answer: FirstBad[str] | Ambiguous[str]
    end: Divergence | None
    posterior: Mapping[str, float]
    rates: tuple[float, float]
    contradicted: bool
    alike: bool


class NoisySearch:
    """One search over replays whose verdicts are not certain."""

    def __init__(
        self,
        scheduler: Scheduler,
        baseline: Trace | None,
        steps: int,
        noise: str,
        confidence: float | None,
        *,
        sure: float = 0.0,
        presumed: Iterable[str] = (),
    ) -> None:
        """Prepare a search.

        Args:
            scheduler: Where replays run.
            baseline: What they are judged against; None for exit codes.
            steps: Most steps of one.
            noise: How two replays of one commit differ, in words.
            confidence: The probability at which a commit is named; None for the default.
            sure: The chance, before anything was run, that no verdict is ever wrong.
            presumed: Commits that are not tried, because others near them cannot be tested.
        """
        self.scheduler, self.baseline, self.steps, self.noise = scheduler, baseline, steps, noise
        history = scheduler.history
        good, bad = history.good, history.bad
        dag = Dag.between(history.parents, [good], bad)
        self._twins: dict[str | None, list[str]] = {}
        for commit in (good, *dag):
            self._twins.setdefault(history.tree(commit), []).append(commit)
        threshold = BayesSearch.threshold if confidence is None else confidence
        self.search = BayesSearch(dag, bad, [good], threshold, self._weights(dag), CAUTIOUS, sure)
        self._next_run = Counter[str | None]()
        self._seconds: dict[str, list[float]] = {}
        self._end: Divergence | None = None
        self._take_what_is_known()
        for commit in presumed:
            self.search = self.search.with_skip(commit)

    def _weights(self, dag: Dag[str]) -> dict[str, float]:
        """No weight for what no code can have done: of commits with the same code all contain the culprit, or none."""
        never = 0
        for twins in self._twins.values():
            if len(twins) > 1:
                inside = [dag.ancestors[dag.index[c]] if c in dag else 0 for c in twins]
                never |= reduce(or_, inside) & ~reduce(and_, inside)
        weights = dict.fromkeys(dag.commits(never), 0.0)
        return weights if len(weights) < len(dag) else {}

    def _take_what_is_known(self) -> None:
        """Every run that is in the journal."""
        good = self.scheduler.history.good
        for tree, (commit, *_) in self._twins.items():
            run = int(commit == good and self.baseline is not None)  # GOOD's run 0 made the baseline
            while (answer := self.scheduler.known(Request(commit, self.steps, self.baseline, run=run))) is not None:
                self._learn(commit, self._judged(answer))
                run += 1
            self._next_run[tree] = run

    def run(self) -> NoisyAnswer:
        """Search to the end.

        Raises:
            NotVerifiableError: the ends cannot be told apart, or nothing that can be tested tells any more.
            ReproError: an end cannot be tested.
        """
        self.scheduler.drive(self._plan, self._take)
        answer, rates = self.search.answer, self.search.rates
        assert answer is not None
        contradicted = self.search.contradicted
        alike = not any(count.goods and count.bads for count in self.search.observations.values())
        return NoisyAnswer(answer, self._end, self._posterior(), (rates.good, rates.bad), contradicted, alike)

    def _plan(self, room: int) -> bool:
        """Start the replays that tell most; False where the search has its answer."""
        if self.search.answer is not None:
            return False
        self._refuse()
        scheduler = self.scheduler
        for commit in self._next(room, [probe.commit for probe in scheduler.pending_probes.values()]):
            tree = scheduler.history.tree(commit)
            scheduler.submit(Request(commit, self.steps, self.baseline, run=self._next_run[tree]))
            self._next_run[tree] += 1
        if not scheduler.pending_probes:
            raise NotVerifiableError(f"{self._doubt()} and no more tests would tell: {self._cure}")
        return True

    def _next(self, room: int, under_way: list[str]) -> list[str]:
        try:
            return self.search.next(room, under_way, self._costs())
        except ValueError as error:
            raise NotVerifiableError(f"{self._doubt()}, and {error}") from None

    def _learn(self, commit: str, judged: Divergence | str | Skip | None) -> None:
        """Take what one replay says of a commit, and of those with the same code."""
        twins = self._twins[self.scheduler.history.tree(commit)]
        if isinstance(judged, Skip):
            for twin in twins:
                try:
                    self.search = self.search.with_skip(twin)
                except ValueError:
                    raise ReproError(f"{short(twin)} cannot be tested: {judged.reason}; choose another end") from None
                self.scheduler.record(twin, "SKIP", judged.reason)
            return
        if isinstance(judged, Divergence) and (self._end is None or commit == self.scheduler.history.bad):
            self._end = judged
        self.search = self.search.with_outcome(commit, bool(judged))
        count = self.search.observations[commit]
        self.scheduler.record(commit, "BAD" if count.bads > count.goods else "GOOD")

    def _take(self, pending: PendingProbe, outcome: Answer) -> None:
        commit, judged = pending.commit, self._judged(outcome)
        self._seconds.setdefault(commit, []).append(pending.seconds)
        self._learn(commit, judged)
        if isinstance(judged, Skip):
            self.scheduler.say(f"SKIP {short(commit)} {judged.reason}")
            self.scheduler.know([commit], judged.diagnosis)
            return
        count = self.search.observations[commit]
        likeliest = max(self.search.posterior.items(), key=lambda item: item[1])
        tally = f"{count.bads} of {count.bads + count.goods} replays BAD"
        sure = f"likeliest culprit {short(likeliest[0])} with {100 * likeliest[1]:.1f} %"
        verdict = f"BAD  {short(commit)} {judged}" if judged else f"GOOD {short(commit)}"
        self.scheduler.say(f"{verdict}  [{tally}; {sure}]", posterior=self._posterior())

    def _judged(self, outcome: Answer) -> Divergence | str | Skip | None:
        """What makes one outcome BAD, if anything does."""
        if isinstance(outcome, Code):
            verdict, detail = verdict_of_code(outcome.code)
            return Skip(detail) if verdict is Verdict.SKIP else detail if verdict is Verdict.BAD else None
        if isinstance(outcome, Skip) or self.baseline is None:
            return outcome if isinstance(outcome, Skip) else Skip("it left no exit code")
        return judge(self.scheduler.predicate, self.baseline, outcome, self.steps)

    def _refuse(self) -> None:
        goods = self.search.observations.get(self.scheduler.history.good)
        hopeless = goods is not None and not goods.goods and goods.bads >= HOPELESS
        if hopeless or self.search.indistinguishable:
            raise NotVerifiableError(f"{self._doubt()}: {self._cure}")

    @property
    def _cure(self) -> str:
        if isinstance(self.scheduler.predicate, Exit):
            return (
                "see what of it rests on another run, another program or the machine, and have it exit alike each time"
            )
        return "make it deterministic (`python -m repro_core.determinism`), or compare metrics by wider bounds"

    def _doubt(self) -> str:
        predicate, history = self.scheduler.predicate.text, self.scheduler.history
        tests = [self.search.observations.get(c) for c in (history.good, history.bad)]
        tally = " and ".join(
            f"{name} is BAD in {n.bads if n else 0} of {n.bads + n.goods if n else 0} replays"
            for name, n in zip((f"GOOD {short(history.good)}", f"BAD {short(history.bad)}"), tests, strict=True)
        )
        return (f"FLAKY: {self.noise}; " if self.noise else "") + f"by {predicate} {tally}"

    def _costs(self) -> dict[str, float]:
        """Seconds of a replay, as far as they are known: the mean of a commit's own, else of all."""
        if not self._seconds:
            return {}
        mean = fmean(s for seconds in self._seconds.values() for s in seconds)
        costs = {commit: fmean(seconds) for commit, seconds in self._seconds.items()}
        return {
            c: max(costs.get(c, mean), 1e-3) for c in (self.scheduler.history.good, *self.scheduler.history.parents)
        }

    def _posterior(self) -> dict[str, float]:
        return {c: p for c, p in self.search.posterior.items() if p >= _SHOWN}
