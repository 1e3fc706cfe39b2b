"""Bisecting where verdicts are noisy: replays of both ends and of commits between, as `bayes` asks for them."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import fmean

from repro_bisect.axis import short
from repro_bisect.bayes import BayesSearch
from repro_bisect.dag import Dag
from repro_bisect.desk import Desk
from repro_bisect.hunt import verdict_of_code
from repro_bisect.probe import Answer, Code, Skip, judge
from repro_bisect.search import Ambiguous, Found, Verdict
from repro_golden.compare import Divergence
from repro_golden.errors import NotVerifiableError, ReproError
from repro_golden.trace import Trace

__all__ = ["NoisyAnswer", "NoisySearch"]

_HOPELESS = 3
"""Replays of GOOD that are all BAD: no repetition tells GOOD from BAD then."""
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
    """

    answer: Found[str] | Ambiguous[str]
    end: Divergence | None
    posterior: Mapping[str, float]
    rates: tuple[float, float]


class NoisySearch:
    """One search over replays whose verdicts are not certain."""

    def __init__(self, desk: Desk, baseline: Trace | None, steps: int, noise: str, confidence: float | None) -> None:
        """Prepare a search.

        Args:
            desk: Where replays run.
            baseline: What they are judged against; None for exit codes.
            steps: Most steps of one.
            noise: How two replays of one commit differ, in words.
            confidence: The probability at which a commit is named; None for the default.
        """
        self.desk, self.baseline, self.steps, self.noise = desk, baseline, steps, noise
        history = desk.history
        parents, good, bad = history.parents, history.good, history.bad
        same = {c for c, ps in parents.items() if any(history.tree(p) == history.tree(c) for p in ps[:1])}
        weights = dict.fromkeys(same, 0.0)  # what changes no code moves no numbers
        threshold = BayesSearch.threshold if confidence is None else confidence
        self.search = BayesSearch(Dag.between(parents, [good], bad), bad, [good], threshold, weights)
        self._next_run = Counter({history.tree(good): 1})  # 0 made the baseline
        self._seconds: dict[str, list[float]] = {}
        self._end: Divergence | None = None

    def run(self) -> NoisyAnswer:
        """Search to the end.

        Raises:
            NotVerifiableError: the ends cannot be told apart, or nothing that can be tested tells any more.
            ReproError: an end cannot be tested.
        """
        desk, slots = self.desk, self.desk.prober.executor.slots
        while (answer := self.search.answer) is None:
            self._refuse()
            flying = [f.commit for f in desk.flights.values()]
            for commit in self.search.next(slots - len(flying), flying, self._costs()):
                tree = desk.history.tree(commit)
                desk.submit(commit, self.steps, run=self._next_run[tree])
                self._next_run[tree] += 1
            if not desk.flights:
                raise NotVerifiableError(f"{self._doubt()} and no more tests would tell: {_CURE}")
            for flight, outcome in desk.finished():
                self._seconds.setdefault(flight.commit, []).append(time.monotonic() - flight.began)
                self._take(flight.commit, outcome)
        desk.clear()
        rates = self.search.rates
        return NoisyAnswer(answer, self._end, self._posterior(), (rates.good, rates.bad))

    def _take(self, commit: str, outcome: Answer) -> None:
        found = self._judged(outcome)
        if isinstance(found, Skip):
            try:
                self.search = self.search.with_skip(commit)
            except ValueError:
                raise ReproError(f"{short(commit)} cannot be tested: {found.reason}; choose another end") from None
            self.desk.record(commit, "SKIP", found.reason)
            self.desk.say(f"SKIP {short(commit)} {found.reason}")
            self.desk.know([commit], found.diagnosis)
            return
        if isinstance(found, Divergence) and (self._end is None or commit == self.desk.history.bad):
            self._end = found
        self.search = self.search.with_outcome(commit, bool(found))
        count = self.search.observations[commit]
        self.desk.record(commit, "BAD" if count.bads > count.goods else "GOOD")
        likeliest = max(self.search.posterior.items(), key=lambda item: item[1])
        tally = f"{count.bads} of {count.bads + count.goods} replays BAD"
        sure = f"likeliest culprit {short(likeliest[0])} with {100 * likeliest[1]:.1f} %"
        verdict = f"BAD  {short(commit)} {found}" if found else f"GOOD {short(commit)}"
        self.desk.say(f"{verdict}  [{tally}; {sure}]", posterior=self._posterior())

    def _judged(self, outcome: Answer) -> Divergence | str | Skip | None:
        """What makes one outcome BAD, if anything does."""
        if isinstance(outcome, Code):
            verdict, detail = verdict_of_code(outcome.code)
            return Skip(detail) if verdict is Verdict.SKIP else detail if verdict is Verdict.BAD else None
        if isinstance(outcome, Skip) or self.baseline is None:
            return outcome if isinstance(outcome, Skip) else Skip("it left no exit code")
        return judge(self.desk.prober.predicate, self.baseline, outcome, self.steps)

    def _refuse(self) -> None:
        goods = self.search.observations.get(self.desk.history.good)
        hopeless = goods is not None and not goods.goods and goods.bads >= _HOPELESS
        if hopeless or self.search.indistinguishable:
            raise NotVerifiableError(f"{self._doubt()}: {_CURE}")

    def _doubt(self) -> str:
        good, predicate = short(self.desk.history.good), self.desk.prober.predicate.text
        tests = [self.search.observations.get(c) for c in (self.desk.history.good, self.desk.history.bad)]
        told = " and ".join(
            f"{name} is BAD in {n.bads if n else 0} of {n.bads + n.goods if n else 0} replays"
            for name, n in zip(("GOOD", "BAD"), tests, strict=True)
        )
        return f"GOOD {good} is FLAKY: {self.noise}; by {predicate} {told}"

    def _costs(self) -> dict[str, float]:
        """Seconds of a replay, as far as they are known: the mean of a commit's own, else of all."""
        if not self._seconds:
            return {}
        mean = fmean(s for found in self._seconds.values() for s in found)
        costs = {commit: fmean(found) for commit, found in self._seconds.items()}
        return {c: max(costs.get(c, mean), 1e-3) for c in (self.desk.history.good, *self.desk.history.parents)}

    def _posterior(self) -> dict[str, float]:
        return {c: p for c, p in self.search.posterior.items() if p >= _SHOWN}


_CURE = "make it deterministic (`python -m repro_core.determinism`), or compare metrics by wider bounds"
