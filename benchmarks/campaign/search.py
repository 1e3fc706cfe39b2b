"""Searches: the answer against brute force and against `git bisect run`, on drawn histories and on git's own.

Kits and checks are those of the tests (tests/search_kit.py, bayes_kit.py, flaky_kit.py, test_search*.py); here they are
tried more often, from another seed, and counted. The histories of git's t6002 and t6030 stand here by their parents.
"""

from __future__ import annotations

import contextlib
import random
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import hypothesis
from bayes_kit import RATES, line, merges, simulate
from flaky_kit import RATES as WRONG_RATES
from flaky_kit import sheet
from hypothesis import strategies as st
from promise import Asked, Promise
from search_kit import brute_force, check_exact, judge, members, problems, run, scattered
from search_kit import history as long_history
from test_gitrule import test_tests_are_counted_as_git_makes_them as check_tests_counted
from test_search import check_every_culprit, depth, git_depth
from test_search_git import git_bisect, import_history
from test_search_git import history as short_history

from repro_bisect.search.first_bad import Ambiguous, Dag, FirstBad, Search
from repro_bisect.search.split import TRIES

__all__ = ["T6002", "T6030", "promises"]

_L = {"l0": "root", "l1": "l0", "l2": "l1", "a0": "l2", "a1": "a0", "b1": "a0", "c1": "b1", "b2": "b1", "b3": "b2",
    "c2": "c1 b2", "c3": "c2", "a2": "a1", "a3": "a2", "b4": "b3 a3", "a4": "a3 b4 c3", "l3": "a4", "l4": "l3",
    "l5": "l4"}  # fmt: skip
_E = {"e8": "F", "e7": "e8", "e6": "e7", "e5": "e6", "f4": "F", "f3": "f4", "f2": "f3", "f1": "f2", "e4": "e5",
    "e3": "e4", "e2": "e3", "e1": "e2", "E": "e1 f1"}  # fmt: skip
_U = {"u0": "U", **{f"u{k}": "u0" for k in range(1, 6)}, "V": "u1 u2 u3 u4 u5"}
T6002 = {"root": "", **_L, "F": "", **_E, "U": "", **_U}
"""The three histories of git's t6002-rev-list-bisect, by the parents of each commit, oldest first."""

T6030 = {"H1": "", "H2": "H1", "H3": "H2", "H4": "H3", "H5": "H4", "H6": "H5", "H7": "H6", "S5": "H4", "S6": "S5",
    "S7": "S6", "A": "S5 H5", "B": "S7 H7", "P1": "H1", "P2": "P1", "P3": "P2", "P4": "P3 H4", "P5": "P4", "P6": "P5",
    "P7": "P6 H7"}  # fmt: skip
"""That of t6030-bisect-porcelain."""

_ENDS = {"t6002": (T6002, [("l5", ["root"]), ("a4", ["a2", "b3"]), ("E", ["F"]), ("V", ["U"]), ("V", ["u1", "u2"])]),
    "t6030": (T6030, [("H7", ["H1"]), ("B", ["H1"]), ("B", ["A"]), ("P7", ["H1"]), ("S7", ["H7"])])}  # fmt: skip


def promises(asked: Asked) -> Iterator[Promise]:
    """Exact answers first, then their price, noise, and git."""
    yield _drawn(
        asked,
        "random histories, every culprit: brute force's answer, at most a probe more than git's rule",
        asked.count(18_000),
        problems(20),
        check_every_culprit,
    )
    yield _drawn(
        asked,
        "random histories, several probes at once, any costs, any skips: brute force's answer",
        asked.count(20_000),
        st.tuples(problems(16), st.integers(1, 4), st.lists(st.floats(0, 100), max_size=20)),
        _check_with_costs,
    )
    yield _scattered(asked)
    yield _windows(asked)
    yield _depths(asked)
    yield _noisy(asked)
    yield _flaky(asked)
    yield _beside_git(asked)
    for name in _ENDS:
        yield _of_git(asked, name)
    yield _counted(asked)


def _drawn(asked: Asked, what: str, count: int, strategy: Any, check: Callable[[Any], None]) -> Promise:
    """A check on what Hypothesis draws; one that fails is counted, and drawing goes on."""
    kept, began, distinct = Promise(what), time.monotonic(), set[str]()

    @hypothesis.seed(asked.seed)
    @hypothesis.settings(
        max_examples=count, deadline=None, database=None, suppress_health_check=list(hypothesis.HealthCheck)
    )
    @hypothesis.given(strategy)
    def one(problem: Any) -> None:
        text = repr(_plain(problem))
        if text in distinct:
            return
        distinct.add(text)
        with _tried(kept, text[:400]):
            check(problem)
            kept.judge(True, "")

    one()
    kept.figures = {"each": f"{(time.monotonic() - began) / max(1, kept.tried) * 1000:.1f} ms"}
    return kept


@contextlib.contextmanager
def _tried(kept: Promise, where: str) -> Iterator[None]:
    """A try; what goes wrong in it is one that did not hold."""
    try:
        yield
    except Exception as error:  # noqa: BLE001 - whatever it is, the promise does not hold
        kept.judge(False, f"{where}: {type(error).__name__}: {error}"[:500])


def _plain(problem: Any) -> Any:
    """What it is, without what has been computed of it."""
    if isinstance(problem, Dag):
        return {c: [*problem.parents[c]] for c in problem.order}
    return [_plain(part) for part in problem] if isinstance(problem, (tuple, list)) else problem


def _check_with_costs(drawn: tuple[tuple[Dag[str], str, dict[str, str]], int, Sequence[float]]) -> None:
    problem, k, costs = drawn
    check_exact(problem, k, dict(zip(problem[0].order, costs, strict=False)))


def _scattered(asked: Asked) -> Promise:
    """As `test_scattered_skips_of_one_reason_leave_no_suspect_too_many` has it."""
    kept = Promise("skips here and there for one reason: brute force's answer, or more that are said to be presumed")
    wide = 0
    for number in range(asked.count(3_000)):
        rng = asked.random("scattered", number)
        dag, culprit, skips = scattered(rng, rng.randrange(10, 80))
        with _tried(kept, f"scattered {number}"):
            end = run(Search(dag, dag.order[-1]), judge(dag, culprit, skips), rng.randrange(1, 4))
            exact, state = brute_force(dag, skips)[culprit], end._state
            wider = members(end.answer) != exact
            tried = len(state.splitters) - len(state.untried) >= TRIES
            told = isinstance(end.answer, Ambiguous) and bool(end.answer.presumed) and exact < members(end.answer)
            kept.judge(
                not wider or (tried and told), f"scattered {number}: {sorted(members(end.answer) - exact)} too many"
            )
            wide += wider
    kept.figures = {"with more suspects": f"{wide} ({wide / kept.tried:.2%})"}
    return kept


def _windows(asked: Asked) -> Promise:
    """As `test_wide_windows_cost_logarithmically` has it, at every width and place drawn."""
    kept, most = Promise("skip windows of w neighbours cost O(log w) probes more"), 0
    for number in range(asked.count(300)):
        rng = asked.random("windows", number)
        n = rng.randrange(20, 600)
        width = rng.randrange(2, n - 2)
        start = rng.randrange(0, n - width)
        with _tried(kept, f"{width} of {n} from {start}"):
            _, probes, _ = depth(
                Search(Dag(line_of(n)), n - 1),
                1,
                lambda c, a=start, w=width: "build" if a <= c < a + w else None,
                named=True,
            )
            kept.judge(
                probes <= n.bit_length() + 2 * width.bit_length(), f"{width} of {n} from {start}: {probes} probes"
            )
            most = max(most, probes)
    kept.figures = {"most probes": str(most)}
    return kept


def line_of(n: int) -> dict[int, list[int]]:
    return {i: [i - 1] if i else [] for i in range(n)}


def _depths(asked: Asked) -> Promise:
    kept = Promise("histories of 100 to 300 commits: the worst culprit costs at most a probe more than git's rule")
    sizes = worst = 0
    for number in range(asked.count(3_000)):
        dag = long_history(asked.random("depths", number))
        with _tried(kept, f"history {number}"):
            ours, theirs = depth(Search(dag, dag.order[-1]), 1)[0], git_depth(dag)
            kept.judge(ours <= theirs + 1, f"history {number} of {len(dag)}: {ours} probes, git {theirs}")
            sizes, worst = sizes + len(dag), worst + (ours > theirs)
    kept.figures = {"commits": f"{sizes:,}", "with a probe more": str(worst)}
    return kept


def _noisy(asked: Asked) -> Promise:
    """As `test_the_posterior_keeps_its_word` has it."""
    kept, searches, tests = (
        Promise("noisy tests of unknown rates: what is named at 0.95 is right as often (0.9 for tests that lie a lot)"),
        0,
        0.0,
    )
    trials = max(150, asked.count(1_000))
    sets = [(shape, n, rates) for shape in (line, merges) for n in (16, 128) for rates in RATES]
    for shape, n, (bad, good) in asked.random("noisy").sample(sets, asked.count(len(sets), 2)):
        tally = simulate(shape(n), bad, good, trials, seed=asked.seed)
        named, bound = tally.right + tally.wrong, 0.95 if bad - good >= 0.5 else 0.90
        slack = 3 * (bound * (1 - bound) / max(1, named)) ** 0.5
        right = tally.right >= (bound - slack) * named and tally.refused <= 0.1 * trials + 3 * (0.09 * trials) ** 0.5
        kept.judge(right, f"{shape.__name__} of {n}, {bad}/{good}: {tally}")
        searches, tests = searches + trials, tests + sum(tally.tests)
    kept.figures = {"searches": f"{searches:,}", "tests a search": f"{tests / searches:.1f}"}
    return kept


def _flaky(asked: Asked) -> Promise:
    """As `test_no_wrong_culprit_without_its_probability` has it: the driver around the search, too."""
    kept = Promise("programs that say the wrong thing now and then: nothing wrong is told as certain")
    refused = 0
    right = list[bool]()
    seeds = range(asked.seed * 10_000, asked.seed * 10_000 + asked.count(400, 5))
    for rate in WRONG_RATES:
        searches = sheet(rate, seeds)
        for number in range(len(seeds)):
            kept.judge(number >= searches.silently_wrong, f"rate {rate}: {searches}")
        refused, right = refused + len(searches.refused), right + searches.told(0.95)
    kept.figures = {"rates": ", ".join(f"{rate:g}" for rate in WRONG_RATES), "refused": str(refused)}
    kept.figures["told at 0.95 and right"] = f"{sum(right)} of {len(right)}"
    return kept


# -- git itself


def _beside_git(asked: Asked) -> Promise:
    kept, suspects = (
        Promise("drawn histories: `git bisect run` names the same commit, or a list that contains ours"),
        [0, 0, 0],
    )
    for number in range(asked.count(450, 6)):
        rng = asked.random("git", number)
        parents = short_history(rng)
        goods = rng.sample(range(3), 2)
        _compare(kept, asked.work / "git", parents, max(parents), goods, rng, number % 3, f"drawn {number}", suspects)
    kept.figures = {"suspects": f"{suspects[0]:,}, git's {suspects[1]:,}", "git named none": f"{suspects[2]:,} times"}
    return kept


def _of_git(asked: Asked, name: str) -> Promise:
    texts, ends = _ENDS[name]
    numbers = {commit: number for number, commit in enumerate(texts)}
    parents = {numbers[commit]: [numbers[p] for p in links.split()] for commit, links in texts.items()}
    kept, suspects = Promise(f"git's own {name}: brute force's answer, and `git bisect run` beside it"), [0, 0, 0]
    tries = [(bad, goods, skipping, again) for bad, goods in ends for skipping in range(3) for again in range(12)]
    rng = asked.random(name)
    for bad, goods, skipping, again in rng.sample(tries, asked.count(len(tries), 6)):
        where = f"{name}, {bad} not {' '.join(goods)}, skips {skipping}, {again}"
        draw = asked.random(where)
        _compare(
            kept,
            asked.work / "git",
            parents,
            numbers[bad],
            [numbers[g] for g in goods],
            draw,
            skipping,
            where,
            suspects,
        )
    kept.figures = {"suspects": f"{suspects[0]:,}, git's {suspects[1]:,}", "git named none": f"{suspects[2]:,} times"}
    return kept


def _compare(
    kept: Promise, repo: Path, parents: dict[int, list[int]], bad: int, goods: Sequence[int], rng: random.Random,
    skipping: int, where: str, suspects: list[int],
) -> None:  # fmt: skip
    """One culprit, found by brute force, by `git bisect run` and by us; with `skipping`, half of the commits fail."""
    names = import_history(repo, parents)
    try:
        graph = {names[i]: [names[p] for p in links] for i, links in parents.items()}
        dag = Dag.between(graph, [names[g] for g in goods], names[bad])
        culprit = rng.choice(dag.order)
        skips = {c: "" if skipping == 1 else "exit 125" for c in dag.order[:-1] if skipping and rng.random() < 0.5}
        verdict = judge(dag, culprit, skips)
        codes = {c: {"SKIP": 125, "BAD": 1, "GOOD": 0}[verdict(c)[0]] if c in dag else 0 for c in graph}
        theirs = git_bisect(repo, names[bad], [names[g] for g in goods], codes)
    finally:
        shutil.rmtree(repo)
    with _tried(kept, where):
        answer = run(Search(dag, dag.order[-1], [names[g] for g in goods]), verdict, rng.randrange(1, 3)).answer
        ours, exact = members(answer), brute_force(dag, skips)[culprit]
        presumed = isinstance(answer, Ambiguous) and answer.presumed
        right = (
            exact <= ours
            and (ours <= theirs or not theirs)  # git ends after the first of two merge bases and names none
            and (ours == exact or bool(presumed))
            and isinstance(answer, FirstBad) == (len(ours) == 1)
        )
        kept.judge(
            right, f"{where}: {len(ours)} suspects, brute force {len(exact)}, git {len(theirs)}, culprit {culprit}"
        )
        suspects[0] += len(ours)
        suspects[1] += len(theirs)
        suspects[2] += not theirs


def _counted(asked: Asked) -> Promise:
    """As `test_tests_are_counted_as_git_makes_them` has it."""
    kept = Promise("the tests that `git bisect run` would have made: git's own number")
    for number in range(asked.count(120, 3)):
        folder = asked.work / "counted"
        folder.mkdir()
        skipping = (0.0, 0.3, 0.7)[number % 3]
        with _tried(kept, f"seed {asked.seed * 1000 + number}, skipping {skipping}"):
            check_tests_counted(folder, asked.seed * 1000 + number, skipping)
            kept.judge(True, "")
        shutil.rmtree(folder)
    return kept
