"""The judge of metrics: two-sided, blind to order, monotone, and never taken in by NaN."""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from nightly_kit import COMMIT, flat, nightly_run

from repro.nightly.records import STATUSES, Baseline, NightlyRun, Summary
from repro.nightly.trusted import Judged, judge, judge_metrics, metrics_check, nonfinite, summarise, trusted
from repro_golden.case.file import Bound
from repro_golden.case.tables import NightlyTable

FINITE = st.floats(allow_nan=False, allow_infinity=False)
NOT_FINITE = st.sampled_from([math.nan, math.inf, -math.inf])
HISTORY = st.lists(FINITE, min_size=1, max_size=14)
BOUNDS = st.none() | st.builds(Bound, rtol=st.floats(0, 1), atol=st.floats(0, 10))
MADS = st.floats(0.5, 20)
TABLE = NightlyTable(history=14, least=3, mads=6.0)


def verdict(value: float, history: list[float], bound: Bound | None = None, mads: float = 6.0) -> str:
    return judge(value, history, mads=mads, least=1, bound=bound).verdict


# -- one value


@given(FINITE, HISTORY, BOUNDS, MADS)
def test_both_sides_are_judged_alike(value: float, history: list[float], bound: Bound | None, mads: float) -> None:
    """With every sign turned the verdict is the same: far below is as far as far above."""
    mirror = verdict(-value, [-x for x in history], bound, mads)
    assert verdict(value, history, bound, mads) == mirror


@given(st.integers(-1000, 1000), st.lists(st.integers(-1000, 1000), min_size=1, max_size=14), BOUNDS)
def test_the_distance_from_the_median_alone_counts(far: int, history: list[int], bound: Bound | None) -> None:
    """So far above the median is judged as so far below it."""
    values = [float(x) for x in history]
    median = statistics.median(history)
    assert verdict(median + far, values, bound) == verdict(median - far, values, bound)


@given(FINITE, HISTORY, BOUNDS, MADS, st.randoms(use_true_random=False))
def test_order_does_not_count(value: float, history: list[float], bound: Bound | None, mads: float, by: Any) -> None:
    """A shuffled history gives the same judgement, to the last digit."""
    shuffled = by.sample(history, len(history))
    judgement, other = (judge(value, h, mads=mads, least=1, bound=bound) for h in (history, shuffled))
    assert vars(judgement) == vars(other)


@given(FINITE, FINITE, HISTORY, BOUNDS, MADS)
def test_farther_is_never_better(a: float, b: float, history: list[float], bound: Bound | None, mads: float) -> None:
    """Of two values on one side, the farther one is not inside where the nearer one is outside."""
    median = judge(0.0, history, mads=mads, least=1).median
    near, far = sorted([max(a, median), max(b, median)])
    if verdict(near, history, bound, mads) == "outside":
        assert verdict(far, history, bound, mads) == "outside"
    near, far = sorted([min(a, median), min(b, median)], reverse=True)
    if verdict(near, history, bound, mads) == "outside":
        assert verdict(far, history, bound, mads) == "outside"


@given(NOT_FINITE, st.lists(FINITE | NOT_FINITE, max_size=14), BOUNDS)
def test_nan_and_infinity_never_pass(value: float, history: list[float], bound: Bound | None) -> None:
    """Not even where the past had them, or nothing is known, or the bound is wide."""
    assert verdict(value, history, bound) == "not finite"


@given(FINITE, HISTORY, st.lists(NOT_FINITE, max_size=5), BOUNDS)
def test_nan_in_the_past_counts_for_nothing(
    value: float, history: list[float], bad: list[float], bound: Bound | None
) -> None:
    """A history with values that are no numbers judges as the same without them."""
    assert vars(judge(value, [*bad, *history], mads=6.0, least=1, bound=bound)) == vars(
        judge(value, history, mads=6.0, least=1, bound=bound)
    )


@given(FINITE, st.lists(FINITE, max_size=4), st.integers(0, 5))
def test_too_few_nights_are_never_a_pass(value: float, history: list[float], least: int) -> None:
    """With fewer than asked for, and with none at all, nothing is known."""
    judgement = judge(value, history, mads=6.0, least=least)
    assert (judgement.verdict == "unknown") == (len(history) < max(1, least))
    assert judge(value, [], mads=6.0, least=least).verdict == "unknown"


@given(FINITE, FINITE, st.integers(1, 14))
def test_bit_stable_numbers_have_no_noise(was: float, value: float, count: int) -> None:
    """Where all nights had one value and the case has no bound, any other is outside, the next float already."""
    assert verdict(value, [was] * count) == ("inside" if value == was else "outside")
    assert verdict(math.nextafter(was, math.inf), [was] * count) in ("outside", "not finite")


def test_the_formula() -> None:
    """|x - median| > max(mads * 1.4826 * MAD, bound), the limit itself being inside."""
    history = [1.0, 2.0, 3.0, 4.0, 100.0]  # median 3, deviations 2 1 0 1 97: MAD 1
    judgement = judge(3.0, history, mads=2.0, least=5)
    assert (judgement.median, judgement.mad, judgement.limit) == (3.0, 1.0, 2 * 1.4826)
    assert verdict(3 + 2.9, history, mads=2.0) == "inside" and verdict(3 + 2.97, history, mads=2.0) == "outside"
    wide = Bound(rtol=1.0, atol=0.5)
    assert verdict(6.5, history, wide, mads=2.0) == "inside" and verdict(6.51, history, wide, mads=2.0) == "outside"
    assert verdict(-0.5, history, wide, mads=2.0) == "inside" and verdict(-0.51, history, wide, mads=2.0) == "outside"
    assert verdict(5.9, history, Bound(atol=0.1), mads=2.0) == "inside", "the wider of both counts"


def test_huge_numbers_do_not_overflow() -> None:
    """Sums of the largest floats are infinite, and would let everything pass."""
    top = 1.7976931348623157e308
    assert verdict(-top, [top, top, top]) == "outside"
    assert judge(0.0, [top, -top], mads=6.0, least=1).median == 0.0


# -- a night's metrics


def seen(*values: float, name: str = "loss") -> list[dict[str, Summary]]:
    return [{name: flat(value)} for value in values]


def test_an_excursion_in_the_middle_is_seen() -> None:
    """A metric that ends where it always did is outside all the same where its highest value is another."""
    tonight = {"loss": replace(flat(1.0), high=9.0)}
    check = metrics_check(tonight, seen(1, 1, 1), TABLE, {})
    assert check.status == "changed" and "where it is highest is 9.0" in check.text
    assert "bit-stable" in check.text
    assert [j.place for j in judge_metrics({"loss": flat(1.0)}, seen(1, 1, 1), TABLE, {})] == ["last"]


def test_a_bound_holds_for_whatever_tells_its_metric() -> None:
    """Tonight's `loss#1` and `loss@0` may be as far as `loss`, as everywhere; `pass@1` beside `pass` is another."""
    past = [{name: flat(1.0) for name in ("loss@0", "loss@1", "loss#1@0", "pass", "pass@1")}] * 3
    bounds = {"loss": Bound(rtol=0.1), "pass": Bound(rtol=0.1)}
    assert metrics_check(past[0] | {"loss@1": flat(1.05)}, past, TABLE, bounds).status == "green"
    assert metrics_check(past[0] | {"loss@1": flat(1.15)}, past, TABLE, bounds).status == "changed"
    assert metrics_check(past[0] | {"pass": flat(1.05)}, past, TABLE, bounds).status == "green"
    assert metrics_check(past[0] | {"pass@1": flat(1.05)}, past, TABLE, bounds).status == "changed"


def test_what_a_metrics_check_says() -> None:
    """Green, changed, too few, gone, new, none and NaN, each by its own word."""
    past = seen(1.0, 1.1, 0.9, 1.0)
    assert metrics_check(seen(1.05)[0], past, TABLE, {}).status == "green"
    assert metrics_check(seen(3.0)[0], past, TABLE, {}).status == "changed"
    assert metrics_check(seen(3.0)[0], past, TABLE, {"loss": Bound(atol=5)}).status == "green"
    assert metrics_check(seen(1.0)[0], past[:2], TABLE, {}).status == "not judged"
    assert metrics_check(seen(1.0)[0], [], TABLE, {}).status == "not judged"
    gone = metrics_check({"kl": flat(0.0)}, past, TABLE, {})
    assert (gone.status, gone.text) == ("changed", "loss is gone")
    young = metrics_check(seen(1.0)[0] | {"kl": flat(0.0)}, past, TABLE, {})
    assert young.status == "green" and young.text.endswith("too young to judge: kl")
    assert metrics_check({}, past, TABLE, {}).status == "not judged"
    bad = metrics_check({"kl": flat(math.nan)}, [], TABLE, {}, {"kl": 4})
    assert (bad.status, bad.text) == ("error", "not finite: kl at step 4")


def test_only_the_newest_nights_count() -> None:
    """Older ones than the last N say nothing."""
    table = NightlyTable(history=3, least=3)
    assert metrics_check(seen(2.0)[0], seen(1, 1, 1, 2, 2, 2), table, {}).status == "green"
    assert metrics_check(seen(1.0)[0], seen(1, 1, 1, 2, 2, 2), table, {}).status == "changed"


@given(st.lists(st.dictionaries(st.sampled_from("ab"), FINITE | NOT_FINITE), max_size=6))
def test_a_value_that_is_no_number_is_seen_at_any_step(steps: list[dict[str, float]]) -> None:
    """A summary is finite exactly where every step is."""
    summaries = summarise(steps)
    bad = sorted({name for step in steps for name, v in step.items() if not math.isfinite(v)})
    assert nonfinite(summaries) == bad
    for name, summary in summaries.items():
        values = [step[name] for step in steps if name in step]
        assert str([summary.first, summary.last]) == str([values[0], values[-1]])
        if name not in bad:
            assert (summary.low, summary.high) == (min(values), max(values)) and min(values) <= summary.median


def test_a_judgement_reads_as_one_line() -> None:
    """Each kind says the value, and what it is judged by."""
    lines = [str(judge(v, [1.0, 1.5, 2.0], mads=6.0, least=n)) for v, n in ((1.0, 3), (1.0, 9), (math.nan, 3))]
    assert lines[0].endswith("3 trusted nights had 1.5 +- 4.45") and "only 3 trusted nights" in lines[1]
    assert lines[2].endswith("is nan") and not any("\n" in line for line in lines)
    assert isinstance(judge(1.0, [1.0], mads=1.0, least=1), Judged)


# -- which nights are trusted


def by(runs: list[NightlyRun], baseline: Baseline, since: Collection[str] = (COMMIT,)) -> list[int]:
    """Which of them are trusted, by their place."""
    trust = trusted(runs, ("m1", "key", "rollouts", 3), baseline, since)
    return [k for k, n in enumerate(runs) if any(n is f for f in trust)]


@pytest.mark.parametrize(
    "other", [{"machine": "m2"}, {"key": "k"}, {"rollouts": "r"}, {"steps": 4}, {"commit": "f" * 40}]
)
def test_another_experiment_is_not_trusted(other: dict[str, Any]) -> None:
    """Other machines, cases, rollouts, lengths, and commits outside of the epoch say nothing."""
    assert by([nightly_run(), nightly_run(**other)], Baseline("last green")) == [0]


def test_only_green_nights_are_trusted() -> None:
    """Whatever else a night was."""
    assert by([nightly_run(status=status) for status in STATUSES], Baseline("last green")) == [STATUSES.index("green")]


def test_the_history_begins_anew_with_an_approval() -> None:
    """Nights beside another golden run, or beside none, are of another epoch; without one, commits decide."""
    kinds = [
        Baseline("approved", "1", "x"), Baseline("last green", "2", "x"), Baseline("golden", "3", "x"),
        Baseline("golden", "4", "y"), Baseline("golden", "5", "y"),
    ]  # fmt: skip
    runs = [nightly_run(baseline=kind) for kind in kinds]
    assert by(runs, Baseline("golden", "", "y")) == [3, 4]
    assert by(runs, Baseline("golden", "", "z")) == []
    assert by(runs, Baseline("last green", "9", "q")) == [0, 1]
    assert by(runs, Baseline("approved", "9", "q"), since=set()) == []
