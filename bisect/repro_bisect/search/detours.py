"""A range without its detours: a commit with the code of an earlier one is as if it came right after that.

A search assumes one culprit. Where a change was taken back and made again, verdicts on the way contradict any one, and
an innocent commit behind them would explain what is left of them. So whatever lies between two commits with the same
code is left out:

    # GOOD  c1  c2 = GOOD  c3 = c1  c4     is searched as     GOOD  c2  c3  c4

What is left to name has its own parents, and holds no commit with its code that it does not follow at once.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic

from repro_bisect.search.dag import Ancestors, Commit, Dag, Gaps, gaps_of

__all__ = ["Straight", "straightened"]


@dataclass(frozen=True)
class Straight(Generic[Commit]):
    """A range as it is searched.

    Attributes:
        dag: Its commits, and which follow which.
        idle: Those of them that follow one with the same code: they are no culprit.
    """

    dag: Dag[Commit]
    idle: frozenset[Commit]


def straightened(
    parents: Mapping[Commit, Sequence[Commit]], good: Commit, bad: Commit, code: Callable[[Commit], object]
) -> Straight[Commit]:
    """The range from `good` to `bad` without its detours; see `Dag.between`.

    A commit that holds `good` is not put after one that lacks it: it may differ for what that lacks.

    Args:
        parents: Of each commit.
        good: The good end.
        bad: The bad end. Where it has the code of the good end, the range is left as it is.
        code: What stands for a commit's code; None where it has none.

    Raises:
        ValueError, ContradictionError: see `Dag.between`.
    """
    dag = Dag.between(parents, [good], bad)
    follows: dict[Commit, Sequence[Commit]] = {c: [p for p in parents[c] if p == good or p in dag] for c in dag}
    if code(good) == code(bad):
        return Straight(dag, frozenset())
    holding = {good}
    for commit in dag:
        if any(parent in holding for parent in follows[commit]):
            holding.add(commit)
    follows = _after_twins(follows, good, holding, code)
    dag = Dag.between(follows, [good], bad)
    follows = {c: follows[c] for c in dag}
    idle = (c for c, before in follows.items() if [code(p) for p in before] == [code(c)] != [None])
    return Straight(dag, frozenset(idle))


def _after_twins(
    follows: Mapping[Commit, Sequence[Commit]],
    good: Commit,
    holding: Collection[Commit],
    code: Callable[[Commit], object],
) -> dict[Commit, Sequence[Commit]]:
    """What each commit follows, where that is the first that it holds with the same code.

    Not one of another line: a branch that was squashed, and is merged again, has the finer line of the two.
    """
    graph = Dag({good: (), **follows})
    gaps, firsts, after = list[Gaps](), dict[object, list[Commit]](), dict[Commit, Sequence[Commit]]()
    for i, commit in enumerate(graph.order):
        before = graph.parents[commit]
        gaps.append(gaps_of(i, [graph.index[p] for p in before], gaps))
        twins = firsts.setdefault(code(commit), []) if code(commit) is not None else []
        line = Ancestors(gaps)
        for twin in twins:
            serves = twin in holding or commit not in holding
            if serves and (twin in before or line[i] >> graph.index[twin] & 1):
                before = (twin,)
                gaps[i] = gaps_of(i, [graph.index[twin]], gaps)
                break
        else:
            twins.append(commit)
        after[commit] = before
    del after[good]
    return after
