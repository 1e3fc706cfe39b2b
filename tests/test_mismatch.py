"""The train/rollout mismatch: its numbers against plain loops, what hides nothing, and which tokens it is of."""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from examples_kit import at_most
from hypothesis import given
from hypothesis import strategies as st
from mismatch_kit import NAN, RAM, Sample, column, step_rows, traced

from repro_golden.compare.kl import kl_of_step
from repro_golden.compare.mismatch.change import Number, mismatch_change
from repro_golden.compare.mismatch.measured import NUMBERS, Bucket, Mismatch, Token, exact_sum, measure, of_trace
from repro_golden.trace.signals import Signals
from repro_golden.trace.token_columns import TokenPairs, pairs_of

INF = math.inf

LOG_PROB = st.one_of(
    st.floats(-30, 0, width=32),
    st.floats(-(2.0**-20), 0, width=32),
    st.sampled_from([0.0, -0.0, -800.0, NAN, -INF, INF]),
)
TOKEN = st.tuples(LOG_PROB, LOG_PROB, st.integers(0, 1))
SAMPLES = st.lists(st.lists(TOKEN, max_size=9), max_size=5)


def tokens_of(samples: Sequence[Sequence[tuple[float, float, int]]]) -> list[tuple[int, int, int, float, float]]:
    """Every unmasked token as (sample, position, length, trainer, rollout), by plain loops."""
    values = []
    for sample, tokens in enumerate(samples):
        for position, (trainer, rollout, mask) in enumerate(tokens):
            if mask:
                values.append((sample, position, len(tokens), trainer, rollout))
    return values


def nearest_rank(values: list[float], percent: str) -> float:
    """The smallest value that at least so many percent of all values do not exceed."""
    share = {"p50": (50, 100), "p90": (90, 100), "p99": (99, 100), "p999": (999, 1000)}[percent]
    return next(v for v in sorted(values) if sum(w <= v for w in values) * share[1] >= share[0] * len(values))


def bucket(value: int) -> tuple[int, int]:
    low = high = 0
    while not low <= value <= high:
        low, high = high + 1, 2 * high + 1
    return low, high


def slow(samples: Sequence[Sequence[tuple[float, float, int]]]) -> dict[str, Any]:
    """The same numbers from Python's floats, one token at a time."""
    every = tokens_of(samples)
    good = [t for t in every if math.isfinite(t[3]) and math.isfinite(t[4])]
    numbers: dict[str, Any] = dict.fromkeys(NUMBERS)
    numbers |= {"tokens": len(good), "nonfinite": len(every) - len(good)}
    if not good:
        return numbers
    d = [trainer - rollout for *_, trainer, rollout in good]
    gaps, ratios = [abs(x) for x in d], [exp(x) for x in d]
    largest = max(d)
    weights = [math.exp(x - largest) for x in d]
    numbers |= {name: nearest_rank(gaps, name) for name in ("p50", "p90", "p99", "p999")}
    return numbers | {
        "mean": sum(gaps) / len(d),
        "max": max(gaps),
        "k1": sum(-x for x in d) / len(d),
        "k3": sum(expm1(x) - x for x in d) / len(d),
        "ratio_max": max(ratios),
        "ratio_min": min(ratios),
        "above_2": sum(r > 2 for r in ratios) / len(d),
        "below_half": sum(r < 0.5 for r in ratios) / len(d),
        "ess": sum(weights) ** 2 / sum(w * w for w in weights) / len(d),
    }


def exp(x: float) -> float:
    return math.exp(x) if x < 709 else INF


def expm1(x: float) -> float:
    return math.expm1(x) if x < 709 else INF


def close(a: float | None, b: float | None) -> bool:
    if a is None or b is None:
        return a is b
    return a == b or math.isclose(a, b, rel_tol=1e-9, abs_tol=1e-15)


@at_most(80)
@given(SAMPLES)
def test_numbers_are_those_of_plain_loops(samples: list[list[tuple[float, float, int]]]) -> None:
    """Over masked, missing, huge and non-finite log-probs; every number, the places and both kinds of buckets."""
    with tempfile.TemporaryDirectory(dir=RAM) as folder:
        mismatch = of_trace(traced(Path(folder) / "t", [step_rows(samples)]), 0, bound=1.0)
    assert mismatch is not None
    expected = slow(samples)
    assert {name for name, value in mismatch.numbers().items() if not close(value, expected[name])} == set()
    every = tokens_of(samples)
    good = [t for t in every if math.isfinite(t[3]) and math.isfinite(t[4])]
    assert mismatch.trainer_nonfinite == sum(not math.isfinite(t[3]) for t in every)
    assert mismatch.rollout_nonfinite == sum(not math.isfinite(t[4]) for t in every)
    bad = next(((t[0], t[1]) for t in every if t not in good and not all(map(math.isfinite, t[3:]))), None)
    assert (mismatch.first_nonfinite and (mismatch.first_nonfinite.sample, mismatch.first_nonfinite.position)) == bad
    over = next(((t[0], t[1]) for t in good if abs(t[3] - t[4]) > 1.0), None)
    assert (mismatch.over and (mismatch.over.sample, mismatch.over.position)) == over
    gaps = [abs(t[3] - t[4]) for t in good]
    worst = good[gaps.index(max(gaps))] if good else None
    assert (mismatch.worst and (mismatch.worst.sample, mismatch.worst.position)) == (worst and worst[:2])
    for buckets, by in ((mismatch.by_position, 1), (mismatch.by_length, 2)):
        bins: dict[tuple[int, int], list[float]] = {}
        for token, gap in zip(good, gaps, strict=True):
            bins.setdefault(bucket(token[by]), []).append(gap)
        assert [(b.low, b.high, b.tokens, b.max) for b in buckets] == [
            (*key, len(values), max(values)) for key, values in sorted(bins.items())
        ]
        assert all(close(b.mean, sum(bins[b.low, b.high]) / b.tokens) for b in buckets)
    json.dumps(mismatch.to_mapping(), allow_nan=False)


def test_the_direction_is_trainer_minus_rollout() -> None:
    """A trainer that finds a token twice as likely has a ratio of 2, k1 of -log 2 and k3 of 1 - log 2."""
    measured = of([(math.log(0.5), math.log(0.25))])
    assert measured.ratio_max == measured.ratio_min == pytest.approx(2.0)
    assert measured.k1 == pytest.approx(-math.log(2)) and measured.k3 == pytest.approx(1 - math.log(2))
    assert measured.mean == measured.max == pytest.approx(math.log(2)) and measured.ess == 1.0
    other = of([(math.log(0.25), math.log(0.5))])
    assert other.ratio_max == pytest.approx(0.5) and other.k1 == pytest.approx(math.log(2))
    assert other.k3 == pytest.approx(math.log(2) - 0.5), "k3 is not symmetric: a swap of sides would be seen"


def of(pairs: Sequence[tuple[float, float]], bound: float | None = None) -> Mismatch:
    """The mismatch of one sample's tokens in fp64."""
    trainer, rollout = (np.array([p[k] for p in pairs], np.float64) for k in (0, 1))
    count = np.arange(len(pairs))
    zeros = np.zeros(len(pairs), np.int64)
    lengths = np.full(len(pairs), len(pairs))
    return measure([TokenPairs(0, "log_probs", trainer, rollout, zeros, count, lengths, zeros, [""])], bound)


def test_percentiles_are_nearest_ranks() -> None:
    """Of 1000 gaps 1..1000 the 50th is 500, the 99.9th 999; of one gap all are that gap; none lies between two."""
    measured = of([(0.0, -float(k)) for k in range(1, 1001)])
    assert (measured.p50, measured.p90, measured.p99, measured.p999, measured.max) == (500, 900, 990, 999, 1000)
    few = of([(0.0, -1.0), (0.0, -3.0), (0.0, -7.0)])
    assert (few.p50, few.p90, few.p999) == (3, 7, 7)
    assert of([(0.0, -2.5)]).p50 == 2.5


@pytest.mark.parametrize("bad", [(NAN, -1.0), (-1.0, NAN), (-INF, -1.0), (-1.0, -INF), (-INF, -INF), (NAN, NAN)])
def test_what_is_not_finite_is_counted_apart_and_named(bad: tuple[float, float]) -> None:
    """One such token leaves the other numbers as they are, and stands in the count, the text and as a token."""
    clean, measured = of([(-1.0, -1.5), (-2.0, -2.0)]), of([(-1.0, -1.5), bad, (-2.0, -2.0)])
    same = set(NUMBERS) - {"nonfinite"}
    assert {k: v for k, v in measured.numbers().items() if k in same} == {
        k: v for k, v in clean.numbers().items() if k in same
    }
    assert measured.nonfinite == 1 and measured.first_nonfinite is not None and measured.first_nonfinite.position == 1
    assert measured.trainer_nonfinite == (not math.isfinite(bad[0]))
    assert measured.rollout_nonfinite == (not math.isfinite(bad[1]))
    assert str(measured).startswith("1 of 3 tokens not finite, first sample 0, position 1 (trainer ")
    alone = of([bad])
    assert alone.tokens == 0 and alone.max is None and "1 of 1 tokens not finite" in str(alone)


def test_nothing_gives_no_number() -> None:
    """Without a token every number is absent, not 0; and it is said so."""
    measured = of([])
    assert set(measured.numbers().values()) == {0, None} and (measured.worst, measured.over) == (None, None)
    assert str(measured) == "no unmasked token" and not measured.by_position and not measured.by_length


def test_signed_zeros_are_no_gap() -> None:
    """-0.0 against 0.0 is a gap of +0, a KL of +0 and a ratio of 1."""
    measured = of([(0.0, -0.0), (-0.0, 0.0)])
    values = [measured.mean, measured.max, measured.k1, measured.k3]
    assert values == [0, 0, 0, 0] and all(math.copysign(1, v) == 1 for v in values if v is not None)
    assert (measured.ratio_min, measured.ratio_max, measured.ess) == (1, 1, 1)


def test_overflow_is_infinite_and_never_nan() -> None:
    """A ratio beyond fp64 is infinite, as are the means it is in; the effective sample size stays a share."""
    measured = of([(-1.0, -900.0), (-1.0, -1.0), (-900.0, -1.0)])
    assert measured.ratio_max == INF and measured.k3 == INF and measured.ratio_min == 0.0
    assert (
        measured.ess == pytest.approx(1 / 3) and measured.max == 899.0 and measured.mean == pytest.approx(2 * 899 / 3)
    )
    assert (measured.above_2, measured.below_half) == (pytest.approx(1 / 3), pytest.approx(1 / 3))
    absurd = of([(1.7e308, -1.7e308), (-1.7e308, 1.7e308)])
    assert absurd.max == absurd.mean == absurd.k3 == INF and absurd.ess == 0.5
    assert absurd.k1 is not None and math.isnan(absurd.k1), "the two infinities have no mean"
    json.dumps(absurd.to_mapping(), allow_nan=False)


@pytest.mark.parametrize(
    ("values", "total"),
    [([1e308, 1e308, -1e308], 1e308), ([1e308, 1e308], INF), ([INF, 1.0], INF), ([INF, -INF], NAN), ([-0.0], 0.0)],
)
def test_sums_leave_fp64_only_where_they_must(values: list[float], total: float) -> None:
    """An intermediate overflow changes nothing; both infinities make NaN; the sum of -0.0 is 0.0."""
    result = exact_sum(np.array(values))
    assert (math.isnan(result) and math.isnan(total)) or (result == total and math.copysign(1, result) == 1)


@at_most(80)
@given(st.lists(st.tuples(st.floats(-30, 0), st.floats(-30, 0)), min_size=1, max_size=30), st.randoms())
def test_order_plays_no_part(pairs: list[tuple[float, float]], random: Any) -> None:
    """Another order of the tokens gives the same bits, whatever the sums; k3 and the gaps are never negative."""
    measured = of(pairs)
    random.shuffle(pairs)
    assert of(pairs).numbers() == measured.numbers()
    assert measured.k3 is not None and measured.k3 >= 0 and measured.ess is not None and 0 < measured.ess <= 1 + 1e-12


def test_k3_is_exact_for_small_gaps() -> None:
    """A gap of 1e-7 gives d*d/2 = 5e-15, of which exp(d) - 1 - d gets a tenth wrong."""
    d = 1e-7 / 3
    assert of([(d, 0.0)]).k3 == pytest.approx(d * d / 2, rel=1e-6, abs=0)


# -- which tokens


def test_the_old_log_probs_are_what_is_compared(tmp_path: Path) -> None:
    """At a later update of a rollout log_probs have moved: the gap is that of old_log_probs, and says so."""
    rows = [*step_rows([[(-1.0, -1.25, 1)]]), column("forward", "old_log_probs", [-1.5])]
    mismatch = of_trace(traced(tmp_path / "t", [rows]), 0)
    assert mismatch is not None and (mismatch.column, mismatch.max) == ("old_log_probs", 0.25)
    plain = of_trace(traced(tmp_path / "u", [step_rows([[(-1.0, -1.25, 1)]])]), 0)
    assert plain is not None and (plain.column, plain.max) == ("log_probs", 0.25)


def test_a_gradient_of_the_same_name_is_no_column(tmp_path: Path) -> None:
    """Rows of the backward pass and metrics that are called alike are not read."""
    rows = [column("grad", "log_probs", [-9.0]), *step_rows([[(-1.0, -1.5, 1)]])]
    mismatch = of_trace(traced(tmp_path / "t", [rows]), 0)
    assert mismatch is not None and mismatch.max == 0.5


def test_without_lengths_the_place_is_that_in_the_column(tmp_path: Path) -> None:
    """No lengths, or lengths that do not add up: no sample is claimed and no bucket made."""
    columns = [column("forward", "log_probs", [-1.0, -2.0]), column("forward", "rollout_log_probs", [-1.0, -3.0])]
    for name, more in (("a", []), ("b", [column("input", "response_lengths", [5], "int64")])):
        mismatch = of_trace(traced(tmp_path / name, [[*columns, *more]]), 0)
        assert mismatch is not None and mismatch.worst is not None
        assert (mismatch.worst.sample, mismatch.worst.position, mismatch.by_position, mismatch.by_length) == (
            None,
            1,
            [],
            [],
        )
        assert mismatch.worst.place == "token 1"


def test_a_mask_of_other_tokens_lets_no_token_count_unseen(tmp_path: Path) -> None:
    """A mask [samples, tokens] keeps no values, and one of other tokens says nothing of these: no number, not a guess.

    A column of just the tokens that the mask keeps was taken by it: all of it counts.
    """
    both = [column("forward", "log_probs", [-1.0, -2.0]), column("input", "rollout_log_probs", [-1.0, -3.0])]
    signals = Signals()
    signals.take("input", "loss_mask", torch.tensor([[1, 0]]))
    for name, mask in (("flat", list(signals.rows())), ("other", [column("input", "loss_mask", [1, 0, 0], "int64")])):
        trace = traced(tmp_path / name, [[*mask, *both]])
        assert pairs_of(trace, 0) is None and kl_of_step(trace, trace, 0) is None, name
    taken = [column("input", "loss_mask", [0, 1, 1, 0], "int64"), *both]
    mismatch = of_trace(traced(tmp_path / "taken", [taken]), 0)
    assert mismatch is not None and mismatch.tokens == 2


def test_micro_batches_and_ranks_are_all_read(tmp_path: Path) -> None:
    """Columns shown once for each micro-batch, or by each rank, are parts of one step, in their order."""
    rows = []
    for part, gap in (("", 0.25), (".2", 0.5), (".10", 4.0)):
        rows += [
            column("forward", f"log_probs{part}", [-1.0]),
            column("forward", f"rollout_log_probs{part}", [-1.0 - gap]),
            column("forward", f"response_lengths{part}", [1], "int64"),
        ]
    mismatch = of_trace(traced(tmp_path / "t", [rows]), 0, bound=0.3)
    assert mismatch is not None and mismatch.tokens == 3 and mismatch.worst is not None and mismatch.over is not None
    assert mismatch.worst.place == "sample 0 of micro-batch 10, position 0" and mismatch.over.part == ".2"
    ranks = [column("forward", f"log_probs@{r}", [-1.0 - r]) for r in range(2)]
    shared = [column("input", "rollout_log_probs", [-1.0])]
    both = of_trace(traced(tmp_path / "u", [[*ranks, *shared]]), 0)
    assert both is not None and (both.tokens, both.max) == (2, 1.0) and both.worst is not None
    assert both.worst.place == "token 0 of rank 1"


def test_a_part_that_one_side_lacks_is_no_observation(tmp_path: Path) -> None:
    """Tokens of one side alone are not left out unseen: then there is no mismatch, not a smaller one."""
    base = step_rows([[(-1.0, -1.0, 1)]])
    cases = {
        "rollout": [*base, column("forward", "rollout_log_probs.1", [-1.0])],
        "trainer": [*base, column("forward", "log_probs.1", [-1.0])],
        "shape": [column("forward", "log_probs", [-1.0, -2.0]), column("input", "rollout_log_probs", [-1.0])],
        "none": [column("forward", "log_probs", [-1.0])],
        "complex": [column("forward", "log_probs", [1.0], "complex64"), column("input", "rollout_log_probs", [-1.0])],
    }
    for name, rows in cases.items():
        assert pairs_of(traced(tmp_path / name, [rows]), 0) is None, name


def test_dtypes_are_compared_by_value(tmp_path: Path) -> None:
    """A bf16 engine against an fp64 trainer: both sides in fp64, no cast of either."""
    rows = [
        column("forward", "log_probs", [-1.0 - 2**-40], "float64"),
        column("input", "rollout_log_probs", [-1.0], "bfloat16"),
    ]
    mismatch = of_trace(traced(tmp_path / "t", [rows]), 0)
    assert mismatch is not None and mismatch.max == 2**-40


# -- two sides


def test_a_change_is_over_all_common_steps(tmp_path: Path) -> None:
    """Both sides pool the tokens of the steps that both have; equal sides are the same without reading the other."""
    samples: list[Sample] = [[(-1.0, -1.5, 1)], [(-1.0, -1.0, 1)]]
    others: list[Sample] = [[(-1.0, -2.0, 1)], [(-1.0, -1.0, 1)]]
    a = traced(tmp_path / "a", [step_rows(samples), step_rows(samples), step_rows(samples)])
    b = traced(tmp_path / "b", [step_rows(samples), step_rows(others)])
    change = mismatch_change(a, b)
    assert change is not None and not change.same and change.before.steps == change.after.steps == [0, 1]
    assert (change.before.tokens, change.before.mean, change.after.mean, change.after.max) == (4, 0.25, 0.375, 1.0)
    numbers = {number.metric: number for number in change.numbers()}
    assert numbers["mean"].ratio == 1.5 and numbers["tokens"].ratio == 1.0 and list(numbers) == list(NUMBERS)
    assert change.after.worst is not None and change.after.worst.step == 1
    equal = mismatch_change(a, a)
    assert equal is not None and equal.same and equal.after is equal.before
    raw = json.loads(json.dumps(change.to_mapping(), allow_nan=False))
    assert raw["numbers"][2] == {"metric": "mean", "before": 0.25, "after": 0.375, "ratio": 1.5}
    none = traced(tmp_path / "c", [[column("forward", "log_probs", [-1.0])]])
    assert mismatch_change(none, none) is None


@pytest.mark.parametrize(
    ("before", "after", "ratio", "same"),
    [
        (1.0, 2.0, 2.0, False),
        (0.0, 0.0, 1.0, True),
        (0.0, -0.0, 1.0, False),
        (0.0, 1.0, INF, False),
        (0.0, -1.0, -INF, False),
        (INF, INF, 1.0, True),
        (-INF, INF, None, False),
        (INF, 1.0, 0.0, False),
        (NAN, NAN, 1.0, True),
        (1.0, NAN, None, False),
        (None, 1.0, None, False),
        (None, None, None, True),
    ],
)
def test_ratios_of_a_change(before: float | None, after: float | None, ratio: float | None, same: bool) -> None:
    """Zeros, infinities, NaN and absent numbers each have an answer."""
    number = Number("mean", before, after)
    assert (number.ratio, number.same) == (ratio, same)


def test_what_is_told_of_a_token() -> None:
    """Both log-probs stand with all their digits."""
    token = Token(3, 2, 7, "", -0.1, -0.2)
    assert str(token) == "sample 2, position 7 (trainer -0.1, rollout -0.2)"
    assert Bucket(4, 7, 1, 0.5, 0.5).high == 7
