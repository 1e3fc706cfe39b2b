"""Bisecting where verdicts are noisy, or may be: replays of both ends and of commits between, as `bayes` asks for them.

All that is known of the range counts, whoever asked for it: what a plain search found before noise was seen, and runs
of earlier bisects.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from statistics import fmean

from repro_bisect.axes.axis import short
from repro_bisect.driver.range_search import verdict_of_code
from repro_bisect.predicates.predicates import Exit
from repro_bisect.probe.answers import Answer, Code, Skip, judge
from repro_bisect.probe.request import Request
from repro_bisect.probe.scheduler import PendingProbe, Scheduler
from repro_bisect.search.bayes import PATIENCE, BayesSearch
from repro_bisect.search.detours import Straight
from repro_bisect.search.first_bad import Ambiguous, FirstBad, Verdict
from repro_bisect.search.noise import CAUTIOUS
from repro_golden.base.errors import NotVerifiableError, ReproError
from repro_golden.compare.traces import Divergence
from repro_golden.trace import Trace

__all__ = ["HOPELESS", "SURE", "NoisyAnswer", "NoisySearch", "Refuted"]

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
        divergence: One that the culprit showed, or the commit with its code that was replayed for it; None for exit
            codes.
        posterior: Each commit's probability of being the culprit, those worth telling.
        rates: How often a commit without and one with the culprit is judged BAD, as it is estimated.
        tallies: How many replays of commits without the culprit were BAD, of how many, and the same of those with it.
        contradicted: Whether some outcome was wrong, whatever the culprit.
        alike: Whether the runs of each commit all said the same.
    """

    answer: FirstBad[str] | Ambiguous[str]
    end: Divergence | None
    divergence: Divergence | None
    posterior: Mapping[str, float]
    rates: tuple[float, float]
    tallies: tuple[tuple[int, int], tuple[int, int]]
    contradicted: bool
    alike: bool


@dataclass(frozen=True)
class Refuted:
    """Why what a noisy search assumed does not hold.

    Attributes:
        beside: A commit from before GOOD that is not GOOD: what comes after it may differ for what GOOD has.
        earlier: A commit of the range that is BAD, although one culprit of the whole range does not explain that. What
            made it so lies before it.
        alike: Whether the runs of each commit all said the same.
    """

    alike: bool
    beside: str = ""
    earlier: str = ""


class NoisySearch:
    """One search over replays whose verdicts are not certain."""

    def __init__(
        self,
        scheduler: Scheduler,
        way: Straight[str],
        bad: str,
        baseline: Trace | None,
        steps: int,
        noise: str,
        confidence: float | None,
        *,
        sure: float = 0.0,
        presumed: frozenset[str] = frozenset(),
    ) -> None:
        """Prepare a search.

        Args:
            scheduler: Where replays run.
            way: The commits to search.
            bad: The last of them.
            baseline: What they are judged against; None for exit codes.
            steps: Most steps of one.
            noise: How two replays of one commit differ, in words.
            confidence: The probability at which a commit is named; None for the default.
            sure: The chance, before anything was run, that no verdict is ever wrong.
            presumed: Commits that are not tried, because others near them cannot be tested.

        Raises:
            NotVerifiableError: both ends have the same code.
        """
        self.scheduler, self.bad, self.baseline, self.steps, self.noise = scheduler, bad, baseline, steps, noise
        history = scheduler.history
        good = history.good
        if history.tree(good) == history.tree(bad):
            raise NotVerifiableError(
                f"FLAKY: {noise}; and GOOD {short(good)} and BAD {short(bad)} have the same code in "
                f"{', '.join(history.paths)}: no commit between them can be to blame"
            )
        self._twins: dict[str | None, list[str]] = {}
        for commit in (good, *way.dag):
            self._twins.setdefault(history.tree(commit), []).append(commit)
        threshold = BayesSearch.threshold if confidence is None else confidence
        weights = dict.fromkeys(way.idle, 0.0)
        self.search = BayesSearch(way.dag, bad, [good], threshold, weights, CAUTIOUS, sure)
        self._next_run = Counter[str | None]()
        self._seconds: dict[str, list[float]] = {}
        self._violations: dict[str | None, Divergence] = {}
        self._refuted: Refuted | None = None
        self._take_what_is_known()
        for commit in presumed & way.dag.parents.keys():
            self.search = self.search.with_skip(commit)

    def _take_what_is_known(self) -> None:
        """Every run that is in the journal."""
        good = self.scheduler.history.good
        for tree, (commit, *_) in self._twins.items():
            run = int(commit == good and self.baseline is not None)  # GOOD's run 0 made the baseline
            while (answer := self.scheduler.known(self._request(commit, run))) is not None:
                self._learn(commit, self._judged(answer))
                run += 1
            self._next_run[tree] = run

    def _request(self, commit: str, run: int) -> Request:
        return Request(commit, self.steps, self.baseline, run=run)

    def run(self) -> NoisyAnswer | Refuted:
        """Search to the end, or until one culprit is known not to explain what was seen.

        Raises:
            NotVerifiableError: the ends cannot be told apart, or nothing that can be tested tells any more.
            ReproError: an end cannot be tested.
        """
        self.scheduler.drive(self._plan, self._take)
        answer, rates = self.search.answer, self.search.rates
        if self._refuted or answer is None:
            assert self._refuted
            return self._refuted
        named = {answer.commit} if isinstance(answer, FirstBad) else answer.commits
        if refuted := self._unlike_assumed(named):
            return refuted
        tree = self.scheduler.history.tree
        return NoisyAnswer(
            answer,
            self._violations.get(tree(self.scheduler.history.bad)),
            self._violations.get(tree(answer.commit)) if isinstance(answer, FirstBad) else None,
            self._posterior(),
            (rates.good, rates.bad),
            self._tallies(named),
            self.search.contradicted,
            self._alike,
        )

    @property
    def _alike(self) -> bool:
        return not any(count.goods and count.bads for count in self.search.observations.values())

    def _tallies(self, named: Collection[str]) -> tuple[tuple[int, int], tuple[int, int]]:
        """How many replays were BAD, of how many: of commits that hold none of what is named, and that hold all."""
        dag, tallies = self.search.dag, [[0, 0], [0, 0]]
        sought = sum(1 << dag.index[commit] for commit in named)
        for commit, count in self.search.observations.items():
            held = dag.ancestors[dag.index[commit]] & sought if commit in dag else 0
            if held in (0, sought):
                tallies[held > 0][0] += count.bads
                tallies[held > 0][1] += count.goods + count.bads
        (a, b), (c, d) = tallies
        return (a, b), (c, d)

    def _unlike_assumed(self, named: Collection[str]) -> Refuted | None:
        """See that what is named is BAD, and what it follows is GOOD: the search may have inferred it from others."""
        history, dag = self.scheduler.history, self.search.dag
        holding = {history.good, *history.descendants(history.good)}
        for commit in named:
            if commit not in holding and not history.parents[commit]:
                return Refuted(self._alike, beside=commit)
            for parent in history.parents[commit]:
                if parent in dag and parent not in named and (parent in holding or commit not in holding):
                    if not self._is(parent, bad=False):
                        return Refuted(self._alike, earlier=parent)
                elif commit not in holding and parent not in dag and not self._is(parent, bad=False, surely=True):
                    return Refuted(self._alike, beside=parent)
        if len(named) > 1 or self._is(*named, bad=True):
            return None
        if (earlier := self._earliest_bad()) and self._is(earlier, bad=True):
            return Refuted(self._alike, earlier=earlier)
        raise NotVerifiableError(
            f"{self._doubt()}; {short(*named)} would explain most, and is GOOD itself: search a shorter range"
        )

    def _earliest_bad(self) -> str:
        """The first commit before the bad end that is oftener BAD than not; "" where none is."""
        seen = self.search.observations
        bad = (c for c in self.search.dag if c != self.bad and c in seen and seen[c].bads > seen[c].goods)
        return next(bad, "")

    def _is(self, commit: str, *, bad: bool, surely: bool = False) -> bool:
        """Whether a commit is what is assumed of it, by as many runs as it takes to be as sure as of an answer.

        One run that says so will do, unless `surely` is asked for. What cannot be tested may be, but is not so surely.
        """
        tree, rates, odds, bads = self.scheduler.history.tree, self.search.rates, 0.0, 0
        if tree(commit) in (None, tree(self.scheduler.history.good)):
            return tree(commit) is not None or not surely
        for_bad = math.log(rates.bad / max(rates.good, _SHOWN))
        for_good = math.log(max(1 - rates.bad, _SHOWN) / (1 - rates.good))
        enough = math.log(self.search.threshold / (1 - self.search.threshold))
        for run in range(PATIENCE):
            asked = self._request(commit, run)
            known = self.scheduler.known(asked)
            so = odds if bad else -odds
            if known is None and (abs(odds) >= enough or (so > 0 and not surely)):
                break
            judged = self._judged(self.scheduler.ask(asked)[0] if known is None else known)
            if isinstance(judged, Skip):
                return not surely
            bads += bool(judged)
            odds += for_bad if judged else for_good
            if known is None:
                verdict = f"BAD  {short(commit)} {judged}" if judged else f"GOOD {short(commit)}"
                self.scheduler.say(f"{verdict}  [{bads} of {run + 1} replays BAD]")
        return (odds > 0) == bad

    def _plan(self, room: int) -> bool:
        """Start the replays that tell most; False where the search has its answer."""
        if self.search.answer is not None:
            return False
        self._refuse()
        scheduler = self.scheduler
        under_way = [probe.commit for probe in scheduler.pending_probes.values()]
        if self.search.contradicted and self._alike and (earlier := self._earliest_bad()):
            left = HOPELESS - self.search.observations[earlier].bads
            if left <= 0:
                self._refuted = Refuted(self._alike, earlier=earlier)
                return False
            again = [earlier] * min(room, left - under_way.count(earlier))
        else:
            again = self._next(room, under_way)
        for commit in again:
            tree = scheduler.history.tree(commit)
            scheduler.submit(self._request(commit, self._next_run[tree]))
            self._next_run[tree] += 1
        if not scheduler.pending_probes:
            raise NotVerifiableError(f"{self._doubt()} and no more tests would tell: {self._fix}")
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
        if isinstance(judged, Divergence):
            self._violations.setdefault(self.scheduler.history.tree(commit), judged)
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
            raise NotVerifiableError(f"{self._doubt()}: {self._fix}")

    @property
    def _fix(self) -> str:
        if isinstance(self.scheduler.predicate, Exit):
            return (
                "see what of it rests on another run, another program or the machine, and have it exit alike each time"
            )
        return "make it deterministic (`python -m repro_core.determinism`), or compare metrics by wider bounds"

    def _doubt(self) -> str:
        predicate, history = self.scheduler.predicate.text, self.scheduler.history
        tests = [self.search.observations.get(c) for c in (history.good, self.bad)]
        tally = " and ".join(
            f"{name} is BAD in {n.bads if n else 0} of {n.bads + n.goods if n else 0} replays"
            for name, n in zip((f"GOOD {short(history.good)}", f"BAD {short(self.bad)}"), tests, strict=True)
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
