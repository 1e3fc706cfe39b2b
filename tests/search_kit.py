"""Histories, culprits and brute force for the tests and the benchmark of the search."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping, Sequence

from hypothesis import strategies as st

from repro_bisect.search.first_bad import Ambiguous, Dag, FirstBad, Search, Verdict

Parents = dict[str, list[str]]


def line(n: int) -> dict[int, list[int]]:
    return {i: [i - 1] if i else [] for i in range(n)}


def plain_ancestors(parents: Mapping[str, Sequence[str]], commit: str) -> set[str]:
    """The commit and its ancestors, by the definition."""
    return {commit}.union(*(plain_ancestors(parents, p) for p in parents[commit]))


def judge(dag: Dag[str], culprit: str, skips: Mapping[str, str]) -> Callable[[str], tuple[Verdict, str]]:
    bad = {c for c in dag if culprit in plain_ancestors(dag.parents, c)}

    def verdict(commit: str) -> tuple[Verdict, str]:
        if commit in skips:
            return Verdict.SKIP, skips[commit]
        return (Verdict.BAD if commit in bad else Verdict.GOOD), ""

    return verdict


def run(
    search: Search[str],
    verdict: Callable[[str], tuple[Verdict, str]],
    k: int = 1,
    costs: Mapping[str, float] | None = None,
) -> Search[str]:
    """Search to the end in rounds of k."""
    while search.answer is None:
        probes = search.next(k, costs=costs)
        assert 0 < len(probes) <= k and len(set(probes)) == len(probes) and not set(probes) & set(search.verdicts)
        assert not search.moot(probes), "a useless probe was chosen"
        for commit in probes:
            search = search.with_verdict(commit, *verdict(commit))
    assert search.next(k) == []
    return search


def members(answer: FirstBad[str] | Ambiguous[str] | None) -> set[str]:
    assert answer is not None
    return {answer.commit} if isinstance(answer, FirstBad) else set(answer.commits)


def brute_force(dag: Dag[str], skips: Iterable[str]) -> dict[str, set[str]]:
    """For each culprit, every one that the verdicts of all testable commits together cannot tell from it."""
    reach = {c: plain_ancestors(dag.parents, c) for c in dag}
    testable = [c for c in dag if c not in set(skips)]
    seen = {culprit: [culprit in reach[x] for x in testable] for culprit in dag}
    return {culprit: {other for other in dag if seen[other] == seen[culprit]} for culprit in dag}


@st.composite
def dags(draw: st.DrawFn, most: int = 14) -> Dag[str]:
    """Ranges of histories with merges, several roots and several good ends."""
    n = draw(st.integers(2, most))
    parents: Parents = {}
    for i in range(n):
        links = draw(st.lists(st.integers(0, i - 1), max_size=3, unique=True)) if i else []
        parents[f"c{i}"] = [f"c{p}" for p in links]
    goods = draw(st.lists(st.integers(0, n - 2), max_size=3))
    used = {p for ps in parents.values() for p in ps}
    parents["bad"] = [c for c in parents if c not in used] if draw(st.booleans()) else [f"c{n - 1}"]
    return Dag.between(dict(reversed(parents.items())), [f"c{g}" for g in goods], "bad")


@st.composite
def problems(draw: st.DrawFn, most: int = 14) -> tuple[Dag[str], str, dict[str, str]]:
    """A range, its culprit, and commits that cannot be tested, each for a reason of its own or none."""
    dag = draw(dags(most))
    culprit = draw(st.sampled_from(dag.order))
    skipped = draw(st.sets(st.sampled_from(dag.order))) - {"bad"}
    blank = draw(st.booleans())
    return dag, culprit, {c: "" if blank else f"reason {c}" for c in sorted(skipped)}


def history(rng: random.Random) -> Dag[int]:
    """A few hundred commits: pull requests on a main line, or no order at all."""
    n, parents = rng.randrange(100, 300), {0: list[int]()}
    if rng.random() < 0.5:
        span = rng.randrange(1, 40)
        for i in range(1, n):
            parents[i] = sorted({max(0, i - 1 - rng.randrange(span)) for _ in range(rng.randrange(1, 4))})
    else:
        mains = [0]
        while len(parents) < n:
            tip = rng.choice(mains[-10:])
            for _ in range(rng.randrange(1, 12)):
                parents[len(parents)], tip = [tip], len(parents)
            parents[len(parents)] = [mains[-1], tip]
            mains.append(len(parents) - 1)
    heads = sorted(set(parents) - {p for ps in parents.values() for p in ps})
    while len(heads) > 1:
        parents[len(parents)] = heads[:2]
        heads = [*heads[2:], len(parents) - 1]
    return Dag(parents)


def check_exact(
    problem: tuple[Dag[str], str, dict[str, str]], k: int, costs: Mapping[str, float] | None = None
) -> None:
    dag, culprit, skips = problem
    end = run(Search(dag, "bad"), judge(dag, culprit, skips), k, costs)
    expected = brute_force(dag, skips)[culprit]
    assert members(end.answer) == expected == end.suspects
    assert isinstance(end.answer, FirstBad) == (len(expected) == 1)
    assert not end.presumed


def pull_requests(n: int) -> dict[int, list[int]]:
    """A main line where half of the commits merge a branch of 1 to 5 commits that left it up to 50 ago."""
    rng, parents, mains = random.Random(5), {0: list[int]()}, [0]
    while len(parents) < n:
        links = [mains[-1]]
        if rng.random() < 0.5:
            tip = mains[max(0, len(mains) - 1 - rng.randrange(50))]
            for _ in range(rng.randrange(1, 6)):
                parents[len(parents)], tip = [tip], len(parents)
            links.append(tip)
        parents[len(parents)] = links
        mains.append(len(parents) - 1)
    return parents


def scattered(rng: random.Random, size: int) -> tuple[Dag[str], str, dict[str, str]]:
    """A range of so many commits, its culprit, and lone commits that cannot be tested, all for one reason."""
    parents = pull_requests(size) if rng.random() < 0.5 else line(size)
    graph = {f"c{i}": [f"c{p}" for p in links] for i, links in parents.items()}
    dag, rate = Dag.between(graph, [], f"c{max(parents)}"), rng.choice([0.2, 0.35, 0.5])
    return dag, rng.choice(dag.order), {c: "build" for c in dag.order[:-1] if rng.random() < rate}


SHAPES: dict[str, Callable[[int], dict[int, list[int]]]] = {"line": line, "pull requests": pull_requests}
