from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from search_kit import (
    brute_force,
    check_exact,
    dags,
    history,
    judge,
    line,
    members,
    plain_ancestors,
    problems,
    run,
    scattered,
)

from repro_bisect.search.first_bad import Ambiguous, ContradictionError, Dag, FirstBad, Search
from repro_bisect.search.split import TRIES

CAMPAIGN = settings(deadline=None, derandomize=True, max_examples=40_000)
SIZES = [*range(1, 34), 63, 64, 65, 80, 81, 82, 100, 124, 125, 126, 136, 243, 244, 256, 257, 299, 300]


def depth(
    search: Search, k: int, skip: Callable[[int], str | None] = lambda _: None, *, named: bool = False
) -> tuple[int, int, int]:
    """Worst rounds, probes and testable ones over every culprit, or every one that is named, by the decision tree."""
    worst, stack = (0, 0, 0), [(search, 0, 0, 0)]
    while stack:
        search, rounds, probes, tested = stack.pop()
        if search.answer is not None:
            if not named or isinstance(search.answer, FirstBad):
                worst = tuple(map(max, worst, (rounds, probes, tested)))
            continue
        branches, chosen = [search], search.next(k)
        assert chosen
        for commit in chosen:
            reason = skip(commit)
            verdicts = ["GOOD", "BAD"] if reason is None else ["SKIP"]
            tested += reason is None
            branches = [b for branch in branches for v in verdicts if (b := judged(branch, commit, v, reason or ""))]
        stack += [(branch, rounds + 1, probes + len(chosen), tested) for branch in branches]
    return worst


def judged(search: Search, commit: object, verdict: str, reason: str) -> Search | None:
    try:
        return search.with_verdict(commit, verdict, reason)
    except ContradictionError:
        return None


def git_depth(dag: Dag[int]) -> int:
    """Worst probes of git's rule: the suspect with the best min(x, n - x)."""
    worst, stack = 0, [(dag.ancestors[-1], 0)]
    while stack:
        suspects, probes = stack.pop()
        n = suspects.bit_count()
        cuts = [a & suspects for i, a in enumerate(dag.ancestors) if suspects >> i & 1]
        best = max(cuts, key=lambda cut: min(cut.bit_count(), n - cut.bit_count()))
        worst = max(worst, probes)
        stack += [(part, probes + 1) for part in (best, suspects & ~best) if n > 1]
    return worst


@pytest.mark.parametrize("seeds", [range(60), pytest.param(range(60, 3000), marks=pytest.mark.campaign)])
def test_scattered_skips_of_one_reason_leave_no_suspect_too_many(seeds: range) -> None:
    """Where commits fail here and there for one reason, what was presumed is tried before several are suspected.

    At most 1 in 200 histories uses up its tries: its answer names more suspects, and what was presumed.
    """
    wide = []
    for seed in seeds:
        rng = random.Random(seed)
        dag, culprit, skips = scattered(rng, rng.randrange(10, 80))
        end = run(Search(dag, dag.order[-1]), judge(dag, culprit, skips), rng.randrange(1, 4))
        exact = brute_force(dag, skips)[culprit]
        if members(end.answer) != exact:
            wide.append(seed)
            state = end._state
            assert len(state.splitters) - len(state.untried) >= TRIES and exact < members(end.answer), seed
            assert isinstance(end.answer, Ambiguous) and end.answer.presumed, seed
    assert len(wide) <= len(seeds) // 200, wide


@given(problems(), st.integers(1, 4))
def test_answer_equals_brute_force(problem: tuple[Dag[str], str, dict[str, str]], k: int) -> None:
    """With skips of distinct or no reasons the answer is the exact set that no testable commit can tell apart."""
    check_exact(problem, k)


def check_every_culprit(problem: tuple[Dag[str], str, dict[str, str]]) -> None:
    dag, _, skips = problem
    for skipped in ({}, skips):
        stack, expected, worst = [(Search(dag, "bad"), 0)], brute_force(dag, skipped), 0
        suspects = set[str]()
        while stack:  # every verdict that some culprit gives
            search, probes = stack.pop()
            if search.answer is not None:
                assert all(members(search.answer) == expected[c] for c in search.suspects)
                suspects |= search.suspects
                worst = max(worst, probes)
                continue
            (commit,) = search.next()
            verdicts = [("SKIP", skipped[commit])] if commit in skipped else [("GOOD", ""), ("BAD", "")]
            stack += [(judged(search, commit, *v), probes + 1) for v in verdicts]
        assert suspects == set(dag)
        if not skipped:
            assert worst <= git_depth(dag) + 1


@given(problems())
def test_every_culprit(problem: tuple[Dag[str], str, dict[str, str]]) -> None:
    """For every culprit the answer equals brute force, and the worst costs at most a probe more than git's rule."""
    check_every_culprit(problem)


@pytest.mark.campaign
def test_every_culprit_of_many() -> None:
    """Both hold on over 10,000 different random DAGs of up to 21 commits, for every culprit of each."""
    seen = set[tuple[tuple[str, tuple[str, ...]], ...]]()

    @given(problems(20))
    @CAMPAIGN
    def check(problem: tuple[Dag[str], str, dict[str, str]]) -> None:
        parents = problem[0].parents
        seen.add(tuple(sorted((c, tuple(sorted(parents[c]))) for c in parents)))
        check_every_culprit(problem)

    check()
    assert len(seen) >= 10_000


@pytest.mark.parametrize("k", [1, 2, 3, 4])
def test_line_takes_the_fewest_rounds(k: int) -> None:
    """On a line of n no culprit takes more than ceil(log_{k+1} n) rounds of k probes, and `bound` says so."""
    for n in SIZES:
        optimum = next(r for r in range(n) if (k + 1) ** r >= n) if n > 1 else 0
        search = Search(Dag(line(n)), n - 1)
        assert depth(search, k)[0] == optimum == search.bound(k)


@pytest.mark.campaign
@pytest.mark.parametrize("k", [1, 2, 3, 4])
def test_every_line_takes_the_fewest_rounds(k: int) -> None:
    """The same for every n up to 300."""
    for n in range(2, 301):
        assert (k + 1) ** (depth(Search(Dag(line(n)), n - 1), k)[0] - 1) < n


@pytest.mark.parametrize("seeds", [range(40), pytest.param(range(40, 10_000), marks=pytest.mark.campaign)])
def test_at_most_one_probe_more_than_git(seeds: range) -> None:
    """On histories of a few hundred commits the worst culprit costs at most one probe more than with git's rule."""
    for seed in seeds:
        dag = history(random.Random(seed))
        assert depth(Search(dag, dag.order[-1]), 1)[0] <= git_depth(dag) + 1, seed


@given(problems(), st.integers(1, 3))
def test_bound_holds(problem: tuple[Dag[str], str, dict[str, str]], k: int) -> None:
    """Without further skips `bound` is the number of rounds that the worst culprit takes."""
    dag, _, skips = problem
    search = Search(dag, "bad")
    assert search.bound(k) == depth(search, k)[0]
    for commit in skips:
        search = search.with_verdict(commit, "SKIP", "build")
    assert search.bound(k) == depth(search, k)[0]


@given(problems(), st.randoms())
def test_order_of_verdicts_does_not_matter(problem: tuple[Dag[str], str, dict[str, str]], rng: random.Random) -> None:
    """The same verdicts in another order give an equal search: suspects, answer, next probes, presumption."""
    dag, culprit, skips = problem
    verdict = judge(dag, culprit, {c: rng.choice(["", "import", "build"]) for c in skips})
    commits = rng.sample(dag.order, rng.randrange(len(dag) + 1))
    events = [(c, *verdict(c)) for c in commits] + [(c, "SKIP", rng.choice(["build", "disk"])) for c in commits[::2]]
    ends = []
    for _ in range(2):
        search = Search(dag, "bad")
        for event in rng.sample(events, len(events)):
            search = search.with_verdict(*event)
        ends.append(search)
    end, other = ends
    assert end == other and hash(end) == hash(other)
    for k in (1, 3):
        assert end.next(k) == other.next(k) == end.next(k)
    assert (end.suspects, end.answer, end.presumed) == (other.suspects, other.answer, other.presumed)


@given(dags(9), st.data())
def test_contradiction_exactly_when_no_culprit_is_left(dag: Dag[str], data: st.DataObject) -> None:
    """Arbitrary verdicts raise at the first one that no single culprit explains, in one line naming both commits."""
    reach = {c: plain_ancestors(dag.parents, c) for c in dag}
    search, left, seen = Search(dag, "bad"), set(dag.order), {"bad"}
    for commit, bad in data.draw(st.lists(st.tuples(st.sampled_from(dag.order), st.booleans()))):
        left = {c for c in left if (c in reach[commit]) == bad}
        if not left:
            with pytest.raises(ContradictionError) as caught:
                search.with_verdict(commit, "BAD" if bad else "GOOD")
            words = set(str(caught.value).replace(",", " ").replace(":", " ").split())
            assert commit in words and words & seen and "\n" not in str(caught.value)
            return
        search = search.with_verdict(commit, "BAD" if bad else "GOOD")
        seen.add(commit)
        assert search.suspects == left


def test_contradictions_name_both_commits() -> None:
    """A good descendant of a bad commit, a commit judged twice, and bad ones without a common suspect all raise."""
    search = Search(Dag(line(9)), 8)
    with pytest.raises(ContradictionError, match="6 is GOOD but contains 4, which is BAD"):
        search.with_verdict(4, "BAD").with_verdict(6, "GOOD")
    with pytest.raises(ContradictionError, match="6 is GOOD but contains 4, which is BAD"):
        search.with_verdict(6, "GOOD").with_verdict(4, "BAD")
    with pytest.raises(ContradictionError, match="4 was judged both GOOD and BAD"):
        search.with_verdict(4, "BAD").with_verdict(4, "GOOD")
    fork = Search(Dag({"m": ["a", "b"], "a": [], "b": []}), "m")
    with pytest.raises(ContradictionError, match="b is BAD and a is BAD"):
        fork.with_verdict("a", "BAD").with_verdict("b", "BAD")
    with pytest.raises(ContradictionError, match="8 is BAD but is reached"):
        Search(Dag(line(9)), 8, [8])


def test_wide_window_figure() -> None:
    """136 commits of which any 60 neighbours do not build: at most 14 probes, 9 of them testable, for every culprit.

    Where it is one of the 60, 10 more of them are tried before all are suspected.
    """
    dag = Dag(line(136))
    skips = [lambda c, a=a: "build" if a <= c < a + 60 else None for a in range(76)]
    worst = [depth(Search(dag, 135), 1, skip, named=True) for skip in skips]
    assert max(probes for _, probes, _ in worst) <= 14
    assert max(tested for _, _, tested in worst) <= 9
    worst = [depth(Search(dag, 135), 1, skip) for skip in skips]
    assert max(probes for _, probes, _ in worst) <= 14 + 10
    assert max(tested for _, _, tested in worst) <= 9


@pytest.mark.parametrize(("n", "width"), [(300, 200), (1000, 300), (1000, 900)])
def test_wide_windows_cost_logarithmically(n: int, width: int) -> None:
    """A window of w neighbours that do not build costs O(log w) probes more (it has two edges), wherever it lies."""
    for start in (0, (n - width) // 2, n - width - 1):
        search = Search(Dag(line(n)), n - 1)
        _, probes, _ = depth(search, 1, lambda c, a=start: "build" if a <= c < a + width else None)
        assert probes <= n.bit_length() + 2 * width.bit_length()


def test_presumed_commits_are_reported_and_can_be_tried() -> None:
    """Untried commits between two equal skips are presumed skipped, tried last, and in a wide run listed as untried."""
    # [?, G, S, p, p, S, B]   then 4 turns out to be testable and GOOD
    search = Search(Dag(line(7)), 6)
    for commit, verdict in ((1, "GOOD"), (2, "SKIP"), (5, "SKIP")):
        search = search.with_verdict(commit, verdict, "build")
    assert search.presumed == {3, 4} and set(search.next(7)) == {3, 4} and search.answer is None
    tried = search.with_verdict(4, "GOOD")
    assert tried.presumed == frozenset() and tried.suspects == {5, 6}
    assert tried.answer == Ambiguous(frozenset({5, 6}))
    # of a wide run some are tried, spread over it, and the rest on demand
    search = Search(Dag(line(99)), 98).with_verdict(0, "GOOD")
    while search.answer is None:
        search = search.with_verdict(search.next()[0], "SKIP", "build")
    skipped = sorted(c for c, verdict in search.verdicts.items() if verdict == "SKIP")
    assert isinstance(search.answer, Ambiguous) and search.answer.commits == set(range(1, 99))
    assert search.answer.presumed == set(range(1, 98)) - set(skipped) and TRIES <= len(skipped) <= TRIES + 2
    assert max(b - a for a, b in pairwise([0, *skipped, 98])) <= 20
    assert replace(search, presume=False).next() and replace(search, presume=False).presumed == frozenset()


@pytest.mark.parametrize("reasons", [("build", "import"), ("", "")])
def test_nothing_is_presumed_without_a_common_reason(reasons: tuple[str, str]) -> None:
    """Skips for distinct or empty reasons leave the commits between them to be tried."""
    search = Search(Dag(line(7)), 6).with_verdict(1, "SKIP", reasons[0]).with_verdict(4, "SKIP", reasons[1])
    assert search.presumed == frozenset()
    assert {2, 3} < set(search.next(7))


def test_presumption_follows_paths() -> None:
    """Equal skips on two branches presume nothing about commits that lie on no path between them."""
    parents = {"m": ["a3", "b3"], **{f"{s}{i}": [f"{s}{i - 1}"] if i else [] for s in "ab" for i in range(4)}}
    search = Search(Dag(parents), "m").with_verdict("a1", "SKIP", "build")
    assert search.with_verdict("b3", "SKIP", "build").presumed == frozenset()
    assert search.with_verdict("a3", "SKIP", "build").presumed == {"a2"}


@given(problems(), st.integers(1, 4), st.randoms())
def test_arrival_order_does_not_matter(
    problem: tuple[Dag[str], str, dict[str, str]], k: int, rng: random.Random
) -> None:
    """With k probes under way, moot ones cancelled and free workers refilled, every arrival order ends alike."""
    dag, culprit, skips = problem
    verdict = judge(dag, culprit, skips)
    search, under_way = Search(dag, "bad"), list[str]()
    while search.answer is None:
        new = search.next(k - len(under_way), under_way) if len(under_way) < k else []
        assert not set(new) & set(under_way)
        under_way += new
        assert under_way, "nothing runs and there is no answer"
        landed = under_way.pop(rng.randrange(len(under_way)))
        search = search.with_verdict(landed, *verdict(landed))
        moot = search.moot(under_way)
        for commit in moot:  # a moot probe tells nothing, whatever it says
            assert search.with_verdict(commit, *verdict(commit)).suspects == search.suspects
        under_way = [c for c in under_way if c not in moot]
    assert members(search.answer) == brute_force(dag, skips)[culprit]


def test_probes_under_way_are_counted_on() -> None:
    """Free workers are spread over the parts that the probes under way will leave, so that the largest shrinks."""
    # [12 older | 18 newer] with 11 under way: one probe halves each part
    assert Search(Dag(line(30)), 29).next(2, under_way=[11]) == [20, 5]
    assert Search(Dag(line(2)), 1).next(2, under_way=[0]) == []


def test_probe_outside_the_suspects() -> None:
    """A merge that is no suspect itself is probed where it cuts the suspects far better than any of them."""
    leaves = [f"l{i}" for i in range(8)]
    parents = {**{c: [] for c in leaves}, "x": leaves, "half": leaves[:4], "bad": ["x", "half"]}
    search = Search(Dag(parents), "bad").with_verdict("x", "BAD")
    assert "half" not in search.suspects and search.next() == ["half"]


def test_range_is_what_only_bad_reaches() -> None:
    """`between` keeps ancestors of BAD that no good reaches, parents first; foreign parents are outside."""
    parents = {"bad": ["m"], "m": ["b", "c"], "c": ["a"], "b": ["a"], "a": ["before"], "other": ["b"], "later": ["bad"]}
    dag = Dag.between(parents, ["other", "elsewhere"], "bad")
    assert dag.order == ("c", "m", "bad") and len(dag) == 3 and "a" not in dag
    assert [(child, p) for child in dag for p in dag.parents[child]] == [(b, a) for a, b in pairwise(dag)]
    with pytest.raises(ContradictionError, match="bad is BAD but is reached from later"):
        Dag.between(parents, ["later"], "bad")
    with pytest.raises(ValueError, match="nowhere is not in the history"):
        Dag.between(parents, [], "nowhere")


def test_wrong_use_is_refused_in_one_line() -> None:
    """Cycles, commits outside the range, unknown verdicts and impossible k are errors."""
    with pytest.raises(ValueError, match="cycle: "):
        Dag({"a": ["b"], "b": ["a"]})
    with pytest.raises(ValueError, match="bad end 7 is not in the range"):
        Search(Dag(line(3)), 7)
    search = Search(Dag(line(3)), 2, [-1])
    with pytest.raises(ValueError, match="9 is not in the range"):
        search.with_verdict(9, "GOOD")
    with pytest.raises(ValueError, match="FLAKY"):
        search.with_verdict(1, "FLAKY")
    with pytest.raises(ValueError, match="k must be at least 0"):
        search.next(-1)
    assert search.next(0) == []
    with pytest.raises(ValueError, match="k must be at least 1"):
        search.bound(0)
    assert search.with_verdict(-1, "GOOD") == search
    with pytest.raises(ContradictionError, match="-1 is BAD but was given as a good end"):
        search.with_verdict(-1, "BAD")
