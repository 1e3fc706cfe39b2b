"""Programs that say the wrong thing now and then: what is told of them is right as often as it says."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from flaky_kit import RATES, Points, Told, bisect, sheet, tangled

from repro_bisect.driver.result import BisectResult
from repro_bisect.predicates.predicates import Exit
from repro_bisect.probe.executors import Outcome, Task
from repro_golden.base.errors import ReproError
from repro_golden.replay.children import ChildFailure

MANY = [pytest.param(range(25), id="25"), pytest.param(range(400), id="400", marks=pytest.mark.campaign)]


def line(n: int) -> Points:
    """So many commits in a line, GOOD before them."""
    return Points({f"c{i}": [f"c{i - 1}" if i else "good"] for i in reversed(range(n))}, "good", f"c{n - 1}")


def told(
    folder: Path, n: int, culprit: int, wrong: set[tuple[str, int]], messages: list[str]
) -> tuple[BisectResult, Told]:
    """What is told of a line where the named runs, counted from 0, say the wrong thing."""

    def run(task: Task, folder: Path) -> Outcome:
        del folder
        bad = task.commit != "good" and int(task.commit[1:]) >= culprit
        return Outcome(code=int(bad != ((task.commit, executor.runs[task.commit] - 1) in wrong)))

    executor = Told(run)
    return bisect(line(n), executor, Exit(), folder, messages), executor


@pytest.mark.whole
@pytest.mark.parametrize("seeds", MANY)
@pytest.mark.parametrize("rate", RATES)
def test_no_wrong_culprit_without_its_probability(rate: float, seeds: range) -> None:
    """Whatever the rate, nothing wrong is told as certain, and of what is told at 95 % at least 93 % is right."""
    searches = sheet(rate, seeds)
    assert searches.silently_wrong == 0
    right = searches.told(0.95)
    # which tests are made is a matter of what they took, so a few more may be wrong by chance: of 394, 24 to 29 were
    slack = 1 + len(right) // 100
    assert sum(right) >= 0.93 * len(right) - slack, searches
    assert len(searches.refused) <= 0.05 * len(seeds), searches.refused
    if rate == 0:
        assert all(right) and not searches.refused


@pytest.mark.parametrize("rate", [0.0, 0.1])
def test_suspects_around_skips_have_a_probability_too(rate: float) -> None:
    """Where commits cannot be tested, several suspects are told with the chance that the culprit is among them."""
    searches = sheet(rate, range(20), skips=0.25)
    assert searches.silently_wrong == 0 and all(a.chance is not None for a in searches.answers if a.right is not None)
    right = searches.told(0.95)
    assert sum(right) >= 0.93 * len(right) - 1, searches


def test_a_program_that_never_contradicts_itself_costs_five_tests_more_than_git(tmp_path: Path) -> None:
    """Both ends, and the culprit and its parent once or twice more: nothing else beside a binary search."""
    for culprit in (20, 77, 100):
        result, executor = told(tmp_path / str(culprit), 128, culprit, set(), [])
        assert [c.commit.commit for c in result.culprits] == [f"c{culprit}"]
        assert result.git_probes is not None and executor.runs.total() <= result.git_probes + 5
        assert 0.95 < result.posterior[f"c{culprit}"] < 1 and result.rates is None


def test_an_end_that_says_the_wrong_thing_once_is_not_refused(tmp_path: Path) -> None:
    """BAD whose first run passes, and GOOD whose first run fails, are run again: the culprit is found by weighing."""
    for end in ("c9", "good"):
        messages: list[str] = []
        result, _ = told(tmp_path / end, 10, 4, {(end, 0)}, messages)
        assert [c.commit.commit for c in result.culprits] == ["c4"] and result.posterior["c4"] >= 0.95
        assert result.rates is not None and any("exit with other codes" in text for text in messages)


def test_a_wrong_end_is_refused_by_several_runs(tmp_path: Path) -> None:
    """BAD that is never bad is refused after four runs, and the line says how many."""
    with pytest.raises(ReproError, match="BAD c9 is GOOD by its exit code, in each of 4 runs"):
        told(tmp_path, 10, 99, set(), [])


@pytest.mark.parametrize("wrong", [{("c4", 0)}, {("c7", 0)}, {("c4", 0), ("c4", 1)}])
def test_one_wrong_verdict_on_the_way_names_nobody_else(tmp_path: Path, wrong: set[tuple[str, int]]) -> None:
    """A verdict that was wrong in the search is found out by repetition, or what is told has its probability."""
    result, _ = told(tmp_path, 10, 6, wrong, [])
    (culprit,) = (c.commit.commit for c in result.culprits)
    assert culprit == "c6" if len(wrong) == 1 else result.posterior[culprit] < 1
    # what was found is kept: the same bisect again asks for nothing
    again, executor = told(tmp_path, 10, 6, set(), [])
    assert executor.runs.total() == 0 and again.posterior == result.posterior


def searched(folder: Path, axis: Points, bad: set[str]) -> tuple[BisectResult, Told]:
    """What is told of a history of which some commits are BAD, in each of their runs."""
    executor = Told(lambda task, _: Outcome(code=int(task.commit in bad)))
    return bisect(axis, executor, Exit(), folder), executor


def test_a_change_that_was_taken_back_and_made_again_is_named_where_it_was_made_again(tmp_path: Path) -> None:
    """Of GOOD, a change, its revert, the revert of that and innocent commits the third is named, however often."""
    for toggles in (1, 2):
        last = 2 * toggles
        axis = line(last + 4)
        axis.same = {f"c{i}": "good" if i % 2 else "c0" for i in range(last + 1)}
        bad = {c for c in axis.parents if axis.tree(c) == "c0" or int(c[1:]) > last}
        result, _ = searched(tmp_path / str(toggles), axis, bad)
        assert [c.commit.commit for c in result.culprits] == [f"c{last}"]
        assert result.git_probes is None and not result.alike, "git would have met another verdict on the way"
        assert result.remarks[0].startswith("not searched") and result.remarks[0].endswith(f" {f'c{last - 2}'}")


def test_a_branch_from_before_good_is_not_to_blame_for_what_it_lacks(tmp_path: Path) -> None:
    """A branch without GOOD's fix is BAD as what it began from is: the culprit is sought in what contains GOOD."""
    side = {f"b{i}": [f"b{i - 1}" if i else "base"] for i in range(6)}
    main = {"merge": ["good", "b5"], "n1": ["merge"], "culprit": ["n1"], "n2": ["culprit"]}
    axis = Points(dict(reversed((side | main).items())), "good", "n2")
    result, executor = searched(tmp_path / "fixed", axis, {"base", *side, "culprit", "n2"})
    assert [c.commit.commit for c in result.culprits] == ["culprit"] and executor.runs["base"] == 1
    assert result.git_probes is None and "lack what GOOD has" in " ".join(result.remarks)
    result, _ = searched(tmp_path / "bad", axis, {"b0", "b1", "b2", "b3", "b4", "b5", *main})
    assert [c.commit.commit for c in result.culprits] == ["b0"]


def test_tests_of_git_are_counted_where_it_would_have_met_the_same_verdicts(tmp_path: Path) -> None:
    """A commit that exits with 125 is a skip to git too; one that could not be started is BAD to it."""
    for outcome in (Outcome(code=125), Outcome(failure=ChildFailure("start", -1, "no ./test.sh", "log"))):
        axis = line(8)
        executor = Told(
            lambda task, _, other=outcome: other if task.commit == "c3" else Outcome(code=task.commit in ("c6", "c7"))
        )
        result = bisect(axis, executor, Exit(), tmp_path / str(outcome.code))
        assert [c.commit.commit for c in result.culprits] == ["c6"] and list(result.skips) == ["c3"]
        assert (result.git_probes is None) == (outcome.code is None)


def test_what_is_named_is_bad_and_follows_what_is_good(tmp_path: Path) -> None:
    """Whatever was taken back, picked twice, merged or begun before GOOD: what is named made GOOD into BAD itself."""
    for seed in range(100):
        axis, bad = tangled(random.Random(seed))
        result, _ = searched(tmp_path / str(seed), axis, bad)
        (named,) = (c.commit.commit for c in result.culprits)
        holding = {"good", *axis.descendants("good")}
        before = [p for p in axis.parents[named] if p in holding or named not in holding]
        assert named in bad and before and not bad.intersection(before), seed
