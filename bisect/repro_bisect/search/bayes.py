"""The search for the culprit where outcomes are noisy: a pure function from outcomes to the next probes.

One culprit c is assumed. A test of a commit that contains c says BAD with one rate, a test of any other with another;
neither rate is known, and both ends are tested to learn them (`repro_bisect.search.noise`). Outcomes may come in any
order, and one commit may be tested many times; the state is immutable:

    search = BayesSearch(Dag.between(parents, goods, bad), bad, goods)
    while search.answer is None and not search.indistinguishable:
        for commit in search.next(k=2):
            search = search.with_outcome(commit, bad=fails(commit))
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Generic

import numpy as np

from repro_bisect.search.belief import Belief, Range
from repro_bisect.search.dag import Commit, Dag
from repro_bisect.search.first_bad import Ambiguous, FirstBad
from repro_bisect.search.noise import USUAL, Count, Floats, Prior, Rates

__all__ = ["CALIBRATION", "PATIENCE", "BayesSearch", "Count", "Rates"]

CALIBRATION = 2
"""Tests of each end before anything else: what does not reproduce itself shows with two runs at the earliest."""

PATIENCE = 30
"""After so many tests of each end, rates that still look alike are given up on (`BayesSearch.indistinguishable`)."""

_ODDS = math.log(10)
"""Odds, for an answer, that there are two rates rather than one. Where the culprit moves nothing, odds of ten to one
arise in at most one search of ten, averaged over that one rate, whenever the search stops (Ville's inequality)."""

_BRANCHES = 16
"""So many joint outcomes of the probes under way are weighed: all of them up to four probes, then the likeliest."""

_EQUAL = 1e-9
"""Scores this close are equal, relatively: rounding must not choose between them."""


@dataclass(frozen=True)
class BayesSearch(Generic[Commit]):
    """All that is known about the culprit.

    Attributes:
        dag: the range; `Dag.between` makes it. Only ancestors of `bad` that are not ancestors of a good are searched.
        bad: the bad end. It contains the culprit, so its tests only inform about the rate of bad commits.
        goods: the good ends, at least one, inside `dag` or not: their tests only inform about the rate of good ones.
        threshold: the posterior probability at which a culprit is named.
        weights: how likely each commit is the culprit before any test, relatively; None for all alike. A commit
            that is not listed weighs 1, and one that cannot be the culprit weighs 0.
        prior: of either end's rate of wrong outcomes.
        sure: the chance, before any test, that no outcome is ever wrong. Above 0, noise is only possible: as long as
            no outcome has shown it, one test of each end will do. The first one that does leaves nothing of it.

    Raises:
        ValueError: an end is missing, the threshold is not between 0.5 and 1, `sure` not between 0 and 1, weights are
            negative or all zero, or what to test next is asked in a range of more commits than that is worth.
        ContradictionError: `bad` is one of the goods or an ancestor of one.
    """

    dag: Dag[Commit]
    bad: Commit
    goods: Collection[Commit]
    threshold: float = 0.95
    weights: Mapping[Commit, float] | None = field(default=None, repr=False, hash=False)
    prior: Prior = USUAL
    sure: float = 0.0
    _tests: tuple[tuple[int, int, int], ...] = field(default=(), repr=False)  # (row, goods, bads), ascending
    _skips: tuple[int, ...] = field(default=(), repr=False)
    # Made once and handed on: it is the same for every state of a search.
    _made: Range[Commit] | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not 0.5 < self.threshold < 1:
            raise ValueError(f"the threshold must lie between 0.5 and 1, not be {self.threshold}")
        if not 0 <= self.sure < 1:
            raise ValueError(f"the chance that nothing is noisy must be below 1, not {self.sure}")
        object.__setattr__(self, "goods", tuple(self.goods))
        if self._made is None or self._made.source != (self.dag, self.bad, self.goods, self.weights):
            object.__setattr__(self, "_made", Range.of(self.dag, self.bad, self.goods, self.weights))

    def with_outcome(self, commit: Commit, bad: bool) -> BayesSearch[Commit]:
        """The search with one more test of a commit of the range or of a good end; order does not matter.

        Raises:
            ValueError: the commit is neither.
        """
        row = self._range.row(commit)
        tests = {i: (goods, bads) for i, goods, bads in self._tests}
        goods, bads = tests.get(row, (0, 0))
        tests[row] = (goods, bads + 1) if bad else (goods + 1, bads)
        return replace(self, _tests=tuple((i, *tests[i]) for i in sorted(tests)))

    def with_skip(self, commit: Commit) -> BayesSearch[Commit]:
        """The search in which a commit cannot be tested: it is not proposed; outcomes that it gave still count.

        Raises:
            ValueError: the commit is not in the range, or it is an end without which nothing is calibrated.
        """
        row = self._range.row(commit)
        skips = tuple(sorted({*self._skips, row}))
        if row == self._range.bad or not set(self._range.goods) - set(skips):
            raise ValueError(f"{commit} cannot be tested but is an end of the range; choose another end")
        return replace(self, _skips=skips)

    @property
    def observations(self) -> dict[Commit, Count]:
        """Outcomes of every commit that was tested, the ends included."""
        return {self._range.rows[i]: Count(goods, bads) for i, goods, bads in self._tests}

    @property
    def skips(self) -> frozenset[Commit]:
        """Commits that cannot be tested."""
        return frozenset(self._range.rows[i] for i in self._skips)

    @property
    def posterior(self) -> dict[Commit, float]:
        """The probability of each commit of the range to be the culprit, parents first."""
        return dict(zip(self._range.commits, self._belief.chance.tolist(), strict=True))

    @property
    def rates(self) -> Rates:
        """How often commits without and with the culprit fail, as the outcomes have it."""
        belief = self._belief
        return Rates(float(belief.chance @ belief.bad_if_without), float(belief.chance @ belief.bad_if_with))

    @property
    def odds(self) -> float:
        """How much likelier two rates make the outcomes than one rate for all commits; below 1, one rate does."""
        return math.exp(min(self._belief.evidence, 700.0))  # exp overflows at 709.8

    @cached_property
    def answer(self) -> FirstBad[Commit] | Ambiguous[Commit] | None:
        """The culprit, or commits that nothing testable tells apart; None while the posterior is below the threshold.

        There is none either before both ends were calibrated and the odds are ten to one that the rates differ.
        """
        if self._uncalibrated or self._belief.evidence < _ODDS or self.rates.bad <= self.rates.good:
            return None
        return self._leader

    @property
    def indistinguishable(self) -> bool:
        """Whether after `PATIENCE` tests of each end BAD fails no oftener than GOOD, as far as can be told: refuse."""
        return self._doubtful and min(self._end_tests) >= PATIENCE

    @property
    def deterministic(self) -> bool:
        """Whether no outcome has shown any noise, and both ends had the chance to.

        That is: each end was tested `CALIBRATION` times, no GOOD said BAD, no BAD said GOOD, and one culprit explains
        all other outcomes. While it holds, `next` is a plain binary search; `first_bad.Search` serves too.
        It is no proof. An end that is wrong at a rate of 0.1 passes two tests in 81 of 100 cases: what a plain search
        names is then to be confirmed by tests of the culprit and its parents, which is what `answer` waits for.
        """
        return not self._uncalibrated and not self.contradicted

    @property
    def contradicted(self) -> bool:
        """Whether the outcomes are noisy: no culprit explains them all without a wrong one."""
        return not self._belief.noiseless.any()

    def information(self, commit: Commit) -> float:
        """How many bits a test of this commit is expected to tell about the culprit.

        Raises:
            ValueError: the commit is neither in the range nor a good end.
        """
        return float(self._belief.information()[self._range.row(commit)])

    def next(
        self, k: int = 1, under_way: Iterable[Commit] = (), costs: Mapping[Commit, float] | None = None
    ) -> list[Commit]:
        """Up to `k` tests to run at once; a commit that is to be tested more than once is listed more than once.

        Both ends come first, and again whenever the rates are in doubt. Then each test is the one that is expected to
        tell most about the culprit per cost, beyond what those before it and under way will tell. As long as nothing
        has shown noise (`deterministic`), it is reckoned without noise: a plain binary search, for equal costs.

        Args:
            k: how many tests, or free workers; none for 0.
            under_way: tests under way, repeated as often as they run; their outcomes are counted on.
            costs: seconds, or any relative cost, of one test of each commit; 1 where it is not listed.

        Returns:
            None where there is an answer, the rates are `indistinguishable`, or nothing testable tells anything.

        Raises:
            ValueError: k < 0, a cost is not positive, or a commit under way is not in the range.
        """
        if k < 0:
            raise ValueError(f"k must be at least 0, not {k}")
        if costs and not all(0 < cost < math.inf for cost in costs.values()):
            raise ValueError("a cost must be a positive number of seconds; leave out what is not known")
        if self.answer is not None or self.indistinguishable:
            return []
        running = [self._range.row(c) for c in under_way]
        price = np.array([(costs or {}).get(c, 1.0) for c in self._range.rows])
        chosen: list[int] = []
        while len(chosen) < k:
            end = self._due_end(running + chosen)
            if end is None:
                break
            chosen.append(end)
        branches = self._branches(sorted(running + chosen)) if len(chosen) < k else []
        while len(chosen) < k:
            gains = sum((chance * branch._gains for chance, branch in branches), np.zeros(len(price)))
            gains[list(self._skips)] = 0.0
            if gains.max() <= 1e-12:  # bits: rounding, not knowledge
                break
            score = gains / price
            chosen.append(int(np.argmax(score >= score.max() * (1 - _EQUAL))))  # the oldest of equals
            if len(chosen) < k:
                branches = _split(branches, chosen[-1])
        return [self._range.rows[i] for i in chosen]

    @property
    def _range(self) -> Range[Commit]:
        assert self._made is not None
        return self._made

    @cached_property
    def _belief(self) -> Belief:
        return Belief.of(self._range, self._tests, self.prior, self.sure)

    @property
    def _end_tests(self) -> tuple[int, int]:
        """Tests of all good ends together, and of the bad one."""
        count = {i: goods + bads for i, goods, bads in self._tests}
        return sum(count.get(i, 0) for i in self._range.goods), count.get(self._range.bad, 0)

    @property
    def _uncalibrated(self) -> bool:
        return min(self._end_tests) < self._calibration

    @property
    def _calibration(self) -> int:
        return 1 if self.sure and not self.contradicted else CALIBRATION

    @property
    def _doubtful(self) -> bool:
        """Whether one rate explains the outcomes, or too well for the answer at hand; or good ones fail oftener."""
        evidence, rates = self._belief.evidence, self.rates
        return evidence < 0 or rates.bad <= rates.good or (evidence < _ODDS and self._leader is not None)

    @cached_property
    def _leader(self) -> FirstBad[Commit] | Ambiguous[Commit] | None:
        members = [self._range.commits[i] for i in self._belief.leaders(self.threshold, self._skips)]
        if len(members) > 1:
            return Ambiguous(frozenset(members))
        return FirstBad(members[0]) if members else None

    def _due_end(self, under_way: list[int]) -> int | None:
        """The end that is to be tested before anything else, if there is one: the one with fewer tests."""
        goods, bads = self._end_tests
        good_rows = set(self._range.goods)
        goods += sum(i in good_rows for i in under_way)
        bads += under_way.count(self._range.bad)
        if min(goods, bads) >= (PATIENCE if self._doubtful else self._calibration):
            return None
        if bads < goods:
            return self._range.bad
        tested = {i: good + bad for i, good, bad in self._tests}
        return min(
            (i for i in self._range.goods if i not in self._skips), key=lambda i: tested.get(i, 0) + under_way.count(i)
        )

    def _branches(self, under_way: Iterable[int]) -> list[tuple[float, BayesSearch[Commit]]]:
        """The searches that the tests under way will leave, each with its chance."""
        branches = [(1.0, self)]
        for row in under_way:
            branches = _split(branches, row)
        return branches

    @cached_property
    def _gains(self) -> Floats:
        """For each row, the bits that a test is expected to tell: without noise, as long as none was seen."""
        if self.deterministic:
            plain = self._belief.plain_information()
            plain[list(self._skips)] = 0.0
            if plain.max() > 0:
                return plain
        return self._belief.information()


def _split(branches: list[tuple[float, BayesSearch[Commit]]], row: int) -> list[tuple[float, BayesSearch[Commit]]]:
    """Every branch with both outcomes of one more test; equal ones are one, and only the likeliest are kept."""
    chances: dict[BayesSearch[Commit], float] = {}
    for chance, branch in branches:
        commit = branch._range.rows[row]
        fails = float(branch._belief.fails()[row])
        for bad, share in ((False, 1 - fails), (True, fails)):
            after = branch.with_outcome(commit, bad)
            chances[after] = chances.get(after, 0.0) + chance * share
    likeliest = sorted(chances.items(), key=lambda item: (-item[1], item[0]._tests))[:_BRANCHES]
    total = sum(chance for _, chance in likeliest)
    return [(chance / total, branch) for branch, chance in likeliest]
