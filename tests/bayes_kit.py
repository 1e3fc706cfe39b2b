"""Simulated noisy bisects, and the posterior by its definition.

`python tests/bayes_kit.py TRIALS` prints the table of accuracy and tests per search; it writes nothing.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from repro_bisect.search.bayes import CALIBRATION, BayesSearch
from repro_bisect.search.dag import Dag
from repro_bisect.search.first_bad import FirstBad

RATES = [(1.0, 0.0), (0.95, 0.05), (0.9, 0.1), (0.8, 0.2), (0.7, 0.3), (1.0, 0.2), (0.8, 0.0)]
GOOD = -1


def line(n: int) -> Dag[int]:
    return Dag({i: [i - 1] if i else [] for i in range(n)})


def merges(n: int, seed: int = 5) -> Dag[int]:
    """Pull requests of one to eight commits, each from one of the last few merges, merged one after another."""
    rng, parents, mains = random.Random(seed), {0: list[int]()}, [0]
    while len(parents) < n - 1:
        tip = rng.choice(mains[-4:])
        for _ in range(min(rng.randrange(1, 9), n - 1 - len(parents))):
            parents[len(parents)], tip = [tip], len(parents)
        parents[len(parents)] = [mains[-1], tip]
        mains.append(len(parents) - 1)
    if len(parents) < n:
        parents[len(parents)] = [mains[-1]]
    return Dag(parents)


@dataclass(frozen=True)
class Tally:
    """What many searches came to.

    Attributes:
        right: searches that named the culprit.
        wrong: searches that named another commit.
        refused: searches that found the rates indistinguishable.
        tests: tests of each search, those of the ends included.
    """

    right: int
    wrong: int
    refused: int
    tests: Sequence[int]

    @property
    def accuracy(self) -> float:
        """Of all searches, refused ones included."""
        return self.right / len(self.tests)

    @property
    def mean_tests(self) -> float:
        """Tests per search."""
        return sum(self.tests) / len(self.tests)

    def __str__(self) -> str:
        spread = sorted(self.tests)
        p95 = spread[int(0.95 * (len(spread) - 1))]
        named = max(1, self.right + self.wrong)
        return (
            f"{len(spread):>6} searches: accuracy {self.accuracy:.4f} (of named {self.right / named:.4f}), "
            f"refused {self.refused / len(spread):.4f}, tests {self.mean_tests:.2f} (95% within {p95})"
        )


def simulate(dag: Dag[int], bad: float, good: float, trials: int, seed: int, threshold: float | None = None) -> Tally:
    """Search `trials` times for a culprit drawn uniformly; tests fail at two rates that the search is not told."""
    rng, last = random.Random(seed), dag.order[-1]
    start = BayesSearch(dag, last, [GOOD]) if threshold is None else BayesSearch(dag, last, [GOOD], threshold)
    right = wrong = refused = 0
    tests: list[int] = []
    for _ in range(trials):
        search, culprit, count = start, rng.randrange(len(dag)), 0
        while search.answer is None and not search.indistinguishable:
            (commit,) = search.next()
            holds = commit != GOOD and bool(dag.ancestors[dag.index[commit]] >> culprit & 1)
            search = search.with_outcome(commit, rng.random() < (bad if holds else good))
            count += 1
        tests.append(count)
        refused += search.answer is None
        right += search.answer == FirstBad(dag.order[culprit])
        wrong += search.answer is not None and search.answer != FirstBad(dag.order[culprit])
    return Tally(right, wrong, refused, tests)


@lru_cache
def _nodes() -> tuple[np.ndarray, np.ndarray]:
    """Points and weights on (0, 1) that integrate polynomials of degree below 120 exactly."""
    x, w = np.polynomial.legendre.leggauss(60)
    return (x + 1) / 2, w / 2


def integral(wrong: int, right: int) -> float:
    """The chance of such outcomes of one end, by numeric integration over its rate with the density 3 (1 - e)^2."""
    e, w = _nodes()
    return float(np.sum(w * 3 * (1 - e) ** 2 * e**wrong * (1 - e) ** right))


def joint(dag: Dag[str], culprit: str, outcomes: Sequence[tuple[str, bool]]) -> float:
    """The chance of the outcomes if this is the culprit."""
    counts = {(holds, bad): 0 for holds in (False, True) for bad in (False, True)}
    for commit, bad in outcomes:
        holds = commit in dag and culprit in dag.commits(dag.ancestors[dag.index[commit]])
        counts[holds, bad] += 1
    return integral(counts[True, False], counts[True, True]) * integral(counts[False, True], counts[False, False])


def brute_posterior(
    dag: Dag[str], outcomes: Sequence[tuple[str, bool]], weights: Mapping[str, float]
) -> tuple[dict[str, float], float]:
    """The posterior by Bayes' rule, and the chance of the outcomes."""
    total = sum(weights.values())
    parts = {c: weights[c] / total * joint(dag, c, outcomes) for c in dag}
    evidence = sum(parts.values())
    return {c: part / evidence for c, part in parts.items()}, evidence


def entropy(chances: Mapping[str, float]) -> float:
    """In bits."""
    return -sum(p * float(np.log2(p)) for p in chances.values() if p > 0)


def brute_information(
    dag: Dag[str], outcomes: Sequence[tuple[str, bool]], weights: Mapping[str, float], commits: Sequence[str]
) -> float:
    """How much the joint outcome of these tests lowers the entropy of the posterior, on average."""
    before, evidence = brute_posterior(dag, outcomes, weights)
    branches: list[list[tuple[str, bool]]] = [[]]
    for commit in commits:
        branches = [[*branch, (commit, bad)] for branch in branches for bad in (False, True)]
    left = 0.0
    for branch in branches:
        after, chance = brute_posterior(dag, [*outcomes, *branch], weights)
        left += chance / evidence * entropy(after)
    return entropy(before) - left


def main(trials: int) -> None:
    """Print the table."""
    print(f"tests of both ends included, at least {CALIBRATION} each; the rates are not told")
    shapes = [
        ("line", line(128)),
        ("line", line(16)),
        ("line", line(1000)),
        ("merges", merges(128)),
        ("merges", merges(1000)),
    ]
    for shape, dag in shapes:
        for bad, good in RATES:
            few = max(1, trials // (10 if len(dag) > 128 or bad - good < 0.5 else 1))
            print(f"{shape:<6} n={len(dag):<5} {bad:.2f}/{good:.2f}", simulate(dag, bad, good, few, seed=1), flush=True)
    for rate in (0.05, 0.3, 0.7):
        print(f"line   n=128   {rate:.2f}/{rate:.2f}", simulate(line(128), rate, rate, max(1, trials // 10), seed=1))


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 1_000)
