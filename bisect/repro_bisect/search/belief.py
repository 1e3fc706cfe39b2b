"""The posterior of the culprit, and what a test is expected to tell about it, over arrays.

Shapes: C candidates (the commits of the range, parents first), R rows (what can be tested: the candidates, then the
good ends).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Generic

import numpy as np
from numpy.typing import NDArray

from repro_bisect.search.dag import Commit, ContradictionError, Dag, bits
from repro_bisect.search.noise import Floats, Ints, Prior, entropy, log_chance, log_chance_of_one_rate, wrong_rate

__all__ = ["MOST_COMMITS", "Belief", "Range"]

MOST_COMMITS = 10_000
"""Above this the table of who contains whom would take more than 100 MB, and a noisy search hundreds of probes."""

_CHUNK = 256
"""Rows that are turned into floats at once."""


@dataclass(frozen=True, eq=False)
class Range(Generic[Commit]):
    """What never changes during a search.

    Attributes:
        source: what it was made from: the DAG, the bad end, the good ends and the weights.
        commits: the candidates [C].
        rows: what can be tested [R]; its first C are the candidates.
        inside: index of each candidate in the DAG [C].
        log_weight: log of each candidate's chance before any test [C]; minus infinity for none.
        bad: the row of the bad end.
        goods: the rows of the good ends.
    """

    source: tuple[Dag[Commit], Commit, Collection[Commit], Mapping[Commit, float] | None]
    commits: tuple[Commit, ...]
    rows: tuple[Commit, ...]
    inside: Ints
    log_weight: Floats
    bad: int
    goods: range

    @classmethod
    def of(
        cls, dag: Dag[Commit], bad: Commit, goods: Collection[Commit], weights: Mapping[Commit, float] | None
    ) -> Range[Commit]:
        """The range between the ends; the errors are `BayesSearch`'s."""
        if bad not in dag:
            raise ValueError(f"the bad end {bad} is not in the range that is searched")
        if not goods:
            raise ValueError("a noisy search needs a good end to learn how often good commits fail: give one")
        mask = dag.ancestors[dag.index[bad]]
        for good in goods:
            if good in dag:
                mask &= ~dag.ancestors[dag.index[good]]
        if not mask >> dag.index[bad] & 1:
            raise ContradictionError(f"{bad} is BAD but is reached from a commit that is GOOD; swap the ends?")
        inside = bits(mask)
        commits = tuple(dag.order[i] for i in inside)
        good_rows = tuple(dict.fromkeys(goods))
        weight = np.array([1.0 if weights is None else float(weights.get(c, 1.0)) for c in commits])
        if not (np.isfinite(weight).all() and (weight >= 0).all() and weight.any()):
            raise ValueError("weights must be finite, none negative and one of the range positive")
        with np.errstate(divide="ignore"):  # the log of no chance is minus infinity, as it should be
            log_weight = np.log(weight / weight.sum())
        return cls(
            source=(dag, bad, goods, weights),
            commits=commits,
            rows=commits + good_rows,
            inside=np.array(inside),
            log_weight=log_weight,
            bad=commits.index(bad),
            goods=range(len(commits), len(commits) + len(good_rows)),
        )

    @cached_property
    def contains(self) -> NDArray[np.bool_]:
        """Whether a row contains a candidate [R, C]; ValueError where that table would be too large."""
        if len(self.commits) > MOST_COMMITS:
            raise ValueError(
                f"{len(self.commits)} commits are too many for a noisy search; move an end to keep {MOST_COMMITS}"
            )
        return self.containing(range(len(self.rows)))

    def containing(self, rows: Sequence[int]) -> NDArray[np.bool_]:
        """The same of some rows."""
        dag = self.source[0]
        contained = np.zeros((len(rows), len(self.commits)), dtype=np.bool_)  # a good end contains no candidate
        size = (len(dag) + 7) // 8
        for k, row in enumerate(rows):
            if row < len(self.commits):
                packed = np.frombuffer(dag.ancestors[int(self.inside[row])].to_bytes(size, "little"), dtype=np.uint8)
                contained[k] = np.unpackbits(packed, bitorder="little")[self.inside]
        return contained

    def row(self, commit: Commit) -> int:
        """The row of a commit; ValueError for one that is neither in the range nor a good end."""
        try:
            return self._index[commit]
        except KeyError:
            raise ValueError(f"{commit} is not in the range that is searched") from None

    def weigh(self, columns: Floats) -> Floats:
        """For each row, the sums of columns [C, 2] over the candidates that it contains [R, 2]."""
        parts = range(0, len(self.contains), _CHUNK)
        return np.concatenate([self.contains[i : i + _CHUNK].astype(np.float64) @ columns for i in parts])

    def alike(self, skips: Sequence[int]) -> Ints:
        """A number for each candidate; equal ones are told apart by no row that is not skipped."""
        packed = np.packbits(np.delete(self.contains, skips, axis=0), axis=0).T
        seen: dict[bytes, int] = {}
        return np.array([seen.setdefault(column.tobytes(), len(seen)) for column in packed])

    @cached_property
    def _index(self) -> dict[Commit, int]:
        return {commit: i for i, commit in enumerate(self.rows)}


@dataclass(frozen=True, eq=False)
class Belief:
    """What the outcomes say, for each candidate as if it were the culprit.

    Attributes:
        range: the range.
        chance: the posterior [C].
        evidence: log of how much likelier two rates make the outcomes than one.
        noiseless: whether it explains every outcome without noise, and may be the culprit at all [C].
        bad_if_with: the chance that a commit with the culprit fails its next test [C].
        bad_if_without: the same for a commit without it [C].
    """

    range: Range[object]
    chance: Floats
    evidence: float
    noiseless: NDArray[np.bool_]
    bad_if_with: Floats
    bad_if_without: Floats

    @classmethod
    def of(cls, range_: Range[Commit], tests: Sequence[tuple[int, int, int]], prior: Prior, sure: float) -> Belief:
        """The exact posterior: for each candidate both rates are integrated out.

        Args:
            range_: the range.
            tests: row, goods and bads of what was tested.
            prior: of either end's rate of wrong outcomes.
            sure: the chance, before any test, that no outcome is ever wrong.
        """
        table = np.array(tests, dtype=np.int64).reshape(-1, 3)
        goods, bads = table[:, 1:].sum(axis=0)
        # For each candidate, the outcomes of commits that contain it [2, C], and of the others.
        good_with, bad_with = table[:, 1:].T @ range_.containing(table[:, 0].tolist())
        good_without, bad_without = goods - good_with, bads - bad_with
        noiseless = (good_with + bad_without == 0) & (range_.log_weight > -np.inf)
        noisy = log_chance(good_with, bad_with, prior) + log_chance(bad_without, good_without, prior)
        noisy += math.log1p(-sure)
        never = np.where(noiseless, math.log(sure) if sure else -np.inf, -np.inf)
        likelihood = np.logaddexp(noisy, never)
        log = range_.log_weight + likelihood
        top = log.max()
        chance = np.exp(log - top)
        total = chance.sum()
        clean = np.exp(never - likelihood)  # the chance that no outcome is wrong, if this is the culprit
        return cls(
            range=range_,  # type: ignore[arg-type]
            chance=chance / total,
            evidence=float(top + np.log(total)) - log_chance_of_one_rate(int(goods), int(bads)) - math.log1p(-sure),
            noiseless=noiseless,
            bad_if_with=1.0 - (1.0 - clean) * wrong_rate(good_with, bad_with, prior),
            bad_if_without=(1.0 - clean) * wrong_rate(bad_without, good_without, prior),
        )

    def leaders(self, threshold: float, skips: Sequence[int]) -> list[int]:
        """The candidate with this much of the posterior, else those that hold it and that nothing testable parts."""
        best = int(self.chance.argmax())
        if self.chance[best] >= threshold:
            return [best]
        if not skips:
            return []  # any two commits are told apart by a test of one of them
        alike = self.range.alike(skips)
        mass = np.bincount(alike, weights=self.chance)
        if mass.max() < threshold:
            return []
        leaders: list[int] = np.flatnonzero((alike == mass.argmax()) & (self.chance > 0)).tolist()
        return leaders

    def fails(self) -> Floats:
        """The chance that the next test of each row says BAD [R]."""
        return self._forecast[0]

    def information(self) -> Floats:
        """The bits that the next test of each row is expected to tell about the culprit [R].

        It is the entropy of the outcome, less what would remain of it if the culprit were known.
        """
        fails, remains = self._forecast
        return np.maximum(entropy(fails) - remains, 0.0)

    def plain_information(self) -> Floats:
        """The same if outcomes had no noise, among the candidates that have explained all so far [R]."""
        weight = np.where(self.noiseless, np.exp(self.range.log_weight), 0.0)
        inside = self.range.weigh((weight / weight.sum())[:, None])[:, 0]
        return entropy(inside)

    @cached_property
    def _forecast(self) -> tuple[Floats, Floats]:
        """For each row the chance to fail, and the expected entropy of the outcome if the culprit were known."""
        columns = np.stack(
            [
                np.stack([self.bad_if_with, entropy(self.bad_if_with)], axis=1),
                np.stack([self.bad_if_without, entropy(self.bad_if_without)], axis=1),
            ]
        )
        with_, without = columns * self.chance[:, None]
        # Every row has all candidates outside, but for those that it contains.
        forecast = self.range.weigh(with_ - without) + without.sum(axis=0)
        return forecast[:, 0], forecast[:, 1]
