from __future__ import annotations

import json
import math
import struct
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from examples_kit import at_most
from hypothesis import given
from hypothesis import strategies as st

from repro.text import comparison_text
from repro_golden.base.errors import ReproError
from repro_golden.case.file import Bound, Compare
from repro_golden.compare.traces import compare, first_divergent_index, violations
from repro_golden.compare.untouched import untouched
from repro_golden.recording.attach.gathered.unseen import unmatched
from repro_golden.recording.recorder import Recorder, dump_path
from repro_golden.trace import PHASES, Header, Row, Trace, TraceWriter, seal
from repro_golden.trace.signals import Signals
from repro_golden.trace.writer import metric_row

torch.set_num_threads(1)

RAM = next(iter(Path("/dev").glob("shm")), None)  # syncing to disk is what takes the time
HEADER = Header({"name": "t"}, "rollouts", {}, {}, steps=9)
NANS = [struct.unpack("<d", bits.to_bytes(8, "little"))[0] for bits in (0x7FF8 << 48, (0x7FF8 << 48) + 1, 0xFFF8 << 48)]
INF = math.inf


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """A folder in memory."""
    with tempfile.TemporaryDirectory(dir=RAM) as folder:
        yield Path(folder)


def write(directory: Path, steps: Sequence[Sequence[Row]], header: Header = HEADER) -> Trace:
    writer = TraceWriter(directory, header)
    for number, rows in enumerate(steps, header.first_step):
        for row in rows:
            writer.add(row)
        writer.end_step(number)
    writer.close({"reason": "finished"})
    return Trace(directory)


def row_of(phase: str, name: str, value: torch.Tensor) -> Row:
    """The row of one signal."""
    signals = Signals()
    signals.take(phase, name, value)
    return signals.rows()[0]


def column(phase: str, name: str, *values: float, dtype: torch.dtype = torch.float32) -> Row:
    return row_of(phase, name, torch.tensor(values, dtype=dtype))


def metrics(**values: float) -> list[Row]:
    return [metric_row("loss", name, value) for name, value in values.items()]


def pair(folder: Path, a: Sequence[Sequence[Row]], b: Sequence[Sequence[Row]]) -> tuple[Trace, Trace]:
    return write(folder / "a", a), write(folder / "b", b)


def test_a_training_that_is_the_same_is_told(tmp_path: Path) -> None:
    """Where only signals beside it differ, or a shape, parameters and gradients are said to have the same bits."""

    def steps(*beside: Row, weight: float = 1.0, gradient: float = 2.0) -> list[list[Row]]:
        last = [column("grad", "w", gradient), column("update", "w", weight), *beside]
        return [[column("grad", "w", 2), column("update", "w", 1), *beside], last]

    value, same = torch.ones(1, 1), "trained parameters and gradients have the same bits in all 2 steps"
    scale, flat = (row_of("update", "buffer/scale", v) for v in (value, value[0]))
    end = column("update", "end/w", 1), column("update", "end/w", 2)
    cases = (
        (steps(scale), steps(flat), f"{same}: only a shape changed"),
        (steps(scale), steps(row_of("update", "buffer/scale", value.double())), f"{same}: only a dtype changed"),
        (steps(scale), steps(row_of("update", "buffer/scale", value + 1)), same),
        (steps(scale), steps(row_of("update", "buffer/scale", value + 1), weight=3), ""),
        (steps(scale), steps(flat, gradient=3), ""),
        (steps(end[0]), steps(end[1]), ""),
        (steps(*metrics(loss=1.0)), steps(*metrics(loss=2.0)), ""),
        (steps(scale, *metrics(loss=1.0)), steps(flat, *metrics(loss=1.0)), f"{same}: only a shape changed".replace(
            "parameters and gradients", "parameters, gradients and metrics")),
        (steps(scale, *metrics(loss=1.0)), steps(flat, *metrics(loss=1.0, acc=2.0)), same),
        (steps(), steps(), ""),
    )  # fmt: skip
    for number, (a, b, text) in enumerate(cases):
        comparison = compare(*pair(tmp_path / str(number), a, b))
        assert comparison.untouched == comparison.to_mapping()["untouched"] == text, number
        assert bool(comparison.divergence) == (a != b) and (text in comparison_text(comparison))
    a, b = pair(tmp_path / "told", steps(scale, *metrics(loss=1.0)), steps(flat, *metrics(loss=1.0)))
    assert "metrics" not in untouched(a, b, replace(compare(a, b).looked, unsure=["loss"])), "it was not compared"
    sides = [[row_of("update", "w", value)]], [[row_of("update", "w", value[0])]]
    assert compare(*pair(tmp_path / "w", *sides)).untouched.endswith("in the one step: only a shape changed")


# -- where


@at_most(40)
@given(st.lists(st.integers(0, 1), min_size=1, max_size=7), st.lists(st.integers(0, 1), min_size=1, max_size=7))
def test_the_first_divergent_step_is_the_first_unequal_one(a: list[int], b: list[int]) -> None:
    """Binary search on the chains finds what a scan over all steps finds, though later steps may agree again."""
    with tempfile.TemporaryDirectory(dir=RAM) as folder:
        x, y = pair(Path(folder), *([metrics(m=float(v)) for v in side] for side in (a, b)))
        expected = next((i for i, (p, q) in enumerate(zip(a, b, strict=False)) if p != q), None)
        assert first_divergent_index(x, y) == first_divergent_index(y, x) == expected
        comparison = compare(x, y)
        assert comparison.steps == min(len(a), len(b))
        assert (comparison.divergence is None and not comparison.ended) == (expected is None and len(a) == len(b))
        assert comparison.divergence is None or comparison.divergence.step == expected
        assert [m.same for m in comparison.metrics] == [p == q for p, q in zip(a, b, strict=False)]


CHANGES = {
    "same": lambda row: row,
    "value": lambda row: column(row.phase, row.name, 9.0, 2.0),
    "dtype": lambda row: column(row.phase, row.name, 1.0, 2.0, dtype=torch.float64),
    "shape": lambda row: column(row.phase, row.name, 1.0, 2.0, 3.0),
    "missing": lambda _: None,
}


@at_most(40)
@given(st.permutations([(p, n) for p in PHASES for n in "xy"]), st.data())
def test_the_first_signal_is_by_phase_then_by_the_baselines_order(
    keys: list[tuple[str, str]], data: st.DataObject
) -> None:
    """Against a plain reading: phases in order, the baseline's order within one, added signals after; kinds, counts."""
    changes = [data.draw(st.sampled_from(["same", "same", "same", *CHANGES])) for _ in keys]
    added = data.draw(st.lists(st.tuples(st.sampled_from(PHASES), st.sampled_from("uvw")), max_size=2, unique=True))
    baseline = [column(phase, name, 1.0, 2.0) for phase, name in keys]
    others = [new for row, change in zip(baseline, changes, strict=True) if (new := CHANGES[change](row))]
    others = data.draw(st.permutations([*others, *(column(p, n, 1.0) for p, n in added)]))
    if not others:
        return
    expected = [
        (phase, name, change)
        for p in PHASES
        for phase, name, change in [
            *((*key, change) for key, change in zip(keys, changes, strict=True) if change != "same"),
            *((r.phase, r.name, "added") for r in others if (r.phase, r.name) in added),
        ]
        if phase == p
    ]
    with tempfile.TemporaryDirectory(dir=RAM) as folder:
        divergence = compare(*pair(Path(folder), [baseline], [others])).divergence
    if not expected:
        assert divergence is None
        return
    assert divergence is not None
    assert (divergence.phase, divergence.signal, divergence.kind) == expected[0]
    assert divergence.differing == {p: n for p in PHASES if (n := sum(e[0] == p for e in expected))}


@pytest.mark.parametrize(
    ("other", "kind", "detail"),
    [
        ([column("loss", "x", 1.0, 3.0)], "value", "float32 [2]"),
        ([column("loss", "x", 1.0, 2.0, dtype=torch.bfloat16)], "dtype", "dtype float32 became bfloat16"),
        ([column("loss", "x", 1.0)], "shape", "shape [2] became [1]"),
        ([column("grad", "x", 1.0, 2.0)], "missing", "observed by the baseline only"),
        ([column("input", "x", 1.0), column("loss", "x", 1.0, 2.0)], "added", "not observed by the baseline"),
    ],
)
def test_each_kind_is_named(tmp_path: Path, other: list[Row], kind: str, detail: str) -> None:
    """Value, dtype, shape, missing and added signals are told apart, with both sides in words; sealed as live."""
    a, b = pair(tmp_path, [[column("loss", "x", 1.0, 2.0)]], [other])
    divergence = compare(a, b).divergence
    assert divergence is not None and (divergence.kind, divergence.detail) == (kind, detail)
    assert (divergence.magnitude is not None) == (kind == "value")
    seal(a.directory)
    seal(b.directory)
    assert compare(Trace(a.directory), Trace(b.directory)).divergence == divergence


def test_statistics_are_not_compared(tmp_path: Path) -> None:
    """Equality rests on the fingerprint alone: the figures beside it may differ."""
    row = column("grad", "w", 1.0)
    a, b = pair(tmp_path, [[row]], [[replace(row, l2=2.0, absmax=3.0, nonfinite=4, sketch=b"")]])
    assert compare(a, b).divergence is None


def test_bytes_of_cut_words_are_compared(tmp_path: Path) -> None:
    """Two shares whose whole words agree differ where a word that is not whole does."""
    rows = []
    for last in (3.0, 4.0):
        signals = Signals()
        part = {"name": "w", "shape": [4], "at": [0]}
        signals.take("grad", "w", torch.tensor([1.0, 2.0, last]), {"shape": [3], "parts": [part]})
        rows += signals.rows()
    divergence = compare(*pair(tmp_path, [[rows[0]]], [[rows[1]]])).divergence
    assert (
        rows[0].lanes == rows[1].lanes
        and divergence is not None
        and (divergence.signal, divergence.kind) == ("w", "value")
    )


# -- bits of floats


@pytest.mark.parametrize(("x", "y"), [(0.0, -0.0), (NANS[0], NANS[1]), (NANS[0], NANS[2]), (1.0, math.nextafter(1, 2))])
@pytest.mark.parametrize("kind", ["metric", "tensor"])
def test_equality_is_that_of_bits(tmp_path: Path, x: float, y: float, kind: str) -> None:
    """-0.0 differs from 0.0, NaNs of unlike bits differ, one ULP counts; each equals itself. Metrics and tensors."""
    rows = [
        metric_row("loss", "m", v) if kind == "metric" else column("loss", "m", v, dtype=torch.float64) for v in (x, y)
    ]
    a, b = pair(tmp_path, [[rows[0]]], [[rows[1]]])
    again = write(tmp_path / "again", [[rows[0]]])
    assert compare(a, again).divergence is None and compare(a, b).divergence is not None
    assert all(m.same for m in compare(a, again).metrics) and not any(m.same for m in compare(a, b).metrics)
    json.dumps(compare(a, b).to_mapping(), allow_nan=False)


def test_a_metric_on_one_side_is_not_the_same(tmp_path: Path) -> None:
    """A metric that one side lacks is listed with None, and is never the same, NaN included."""
    a, b = pair(tmp_path, [metrics(x=1.0, y=NANS[0])], [metrics(x=1.0, z=2.0)])
    changes = {m.metric: m for m in compare(a, b).metrics}
    assert list(changes) == ["x", "y", "z"] and [m.same for m in changes.values()] == [True, False, False]
    assert changes["y"].b is None and changes["z"].a is None


# -- nothing compared is never a pass


@pytest.mark.parametrize("swap", [False, True])
@pytest.mark.parametrize(
    ("steps", "change", "message"),
    [
        (0, {}, "holds no whole step: nothing to compare"),
        (1, {"rollouts": "other"}, "different rollouts: not comparable"),
        (1, {"first_step": 6}, "start at steps"),
    ],
    ids=["empty", "rollouts", "first step"],
)
def test_nothing_compared_is_an_error(
    tmp_path: Path, steps: int, change: dict[str, int], message: str, swap: bool
) -> None:
    """No steps, other rollouts or another first step are one error line, whichever side has them, in either mode."""
    a = write(tmp_path / "a", [metrics(x=1.0)])
    b = write(tmp_path / "b", [metrics(x=1.0)] * steps, replace(HEADER, **change))  # type: ignore[arg-type]
    for rule in (None, Compare(mode="bounds", bounds={"x": Bound(rtol=9.0)})):
        with pytest.raises(ReproError, match=message) as caught:
            compare(*((b, a) if swap else (a, b)), rule)
        assert "\n" not in str(caught.value)


def test_two_roots_for_equal_signals_are_an_error(tmp_path: Path) -> None:
    """A step log that gives equal rows another root is never a pass: the trace is called damaged."""
    a, b = pair(tmp_path, [metrics(x=1.0)], [metrics(x=2.0)])
    log = b.directory / "rank-00000.log"
    log.write_bytes((a.directory / "rank-00000.log").read_bytes())
    with pytest.raises(ReproError, match="does not match its root"):
        compare(a, Trace(b.directory))


# -- bounds


def bounded(folder: Path, a: dict[str, float], b: dict[str, float], **bounds: Bound) -> str | None:
    x, y = pair(folder, [metrics(**a)], [metrics(**b)] if b else [[column("loss", "other", 1.0)]])
    divergence = compare(x, y, Compare(mode="bounds", bounds=bounds)).divergence
    assert divergence is None or divergence.kind == "bound"
    return divergence and divergence.signal


@pytest.mark.parametrize("bound", [Bound(rtol=0.5), Bound(atol=0.5), Bound(rtol=1e300, atol=1e300), Bound()])
@pytest.mark.parametrize(
    ("x", "y"),
    [(1.0, NANS[0]), (NANS[0], 1.0), (NANS[0], NANS[0]), (1.0, INF), (INF, 1.0), (INF, INF), (-INF, 1.0), (1.0, None)],
)
def test_nan_inf_and_absent_are_outside_every_bound(tmp_path: Path, x: float, y: float | None, bound: Bound) -> None:
    """NaN, an infinity on either side, and a metric that is absent have left every bound, however wide."""
    assert bounded(tmp_path, {"m": x}, {} if y is None else {"m": y}, m=bound) == "m"


@at_most(60)
@given(*[st.floats(-1e6, 1e6)] * 2, *[st.floats(0, 2)] * 2)
def test_a_bound_is_atol_plus_rtol_times_the_baseline(x: float, y: float, rtol: float, atol: float) -> None:
    """|b - a| <= atol + rtol * |a|, the border included; the step before a violation is no part of it."""
    with tempfile.TemporaryDirectory(dir=RAM) as folder:
        a, b = pair(Path(folder), [metrics(m=1.0), metrics(m=x)], [metrics(m=1.0), metrics(m=y)])
        comparison = compare(a, b, Compare(mode="bounds", bounds={"m": Bound(rtol=rtol, atol=atol)}))
    assert comparison.equal == (abs(y - x) <= atol + rtol * abs(x))
    assert comparison.divergence is None or (comparison.divergence.step, comparison.divergence.phase) == (1, "loss")


def test_bounds_judge_metrics_only_and_every_step(tmp_path: Path) -> None:
    """Other bits of unbounded signals pass under bounds; the first violation of any step is named with its numbers."""
    a = [[column("grad", "w", 1.0), *metrics(m=1.0, n=1.0)]] * 3
    b = [[column("grad", "w", 2.0), *metrics(m=1.5, n=1.0)]] * 2 + [metrics(m=1.0, n=7.0)]
    x, y = pair(tmp_path, a, b)
    assert compare(x, y, Compare(mode="bounds", bounds={"m": Bound(atol=0.5), "n": Bound(atol=6.0)})).equal
    divergence = compare(x, y, Compare(mode="bounds", bounds={"m": Bound(atol=0.5), "n": Bound(atol=5.0)})).divergence
    assert divergence is not None and (divergence.step, divergence.signal) == (2, "n")
    assert divergence.detail == "1.0 became 7.0, allowed +-5"
    assert not compare(x, y).equal


def test_a_bound_may_name_one_of_several_numbers(tmp_path: Path) -> None:
    """`loss#1` is judged by its own name, and with `loss`."""
    x, y = pair(tmp_path, [metrics(**{"loss": 1.0, "loss#1": 1.0})], [metrics(**{"loss": 1.0, "loss#1": 2.0})])
    for name in ("loss#1", "loss"):
        (broken,) = violations(x, y, 0, {name: Bound()})
        assert broken.signal == "loss#1"


def test_a_bound_on_a_metric_that_the_baseline_lacks_is_an_error(tmp_path: Path) -> None:
    """A bounded metric that the baseline never had is a misspelt case, not a violation and not a pass."""
    x, y = pair(tmp_path, [metrics(m=1.0)], [metrics(m=1.0, typo=1.0)])
    with pytest.raises(ReproError, match=r"no metric 'typo' in any step \(it has: m\): correct"):
        compare(x, y, Compare(mode="bounds", bounds={"typo": Bound()}))
    assert violations(x, y, 0, {}) == []


# -- how much


def test_a_change_that_the_sketch_misses_is_not_measured(tmp_path: Path) -> None:
    """Of a large gradient only sampled values are kept: a change elsewhere has no size, one in the sample has."""
    base = torch.ones(40, 50)
    sampled = np.frombuffer(row_of("grad", "w", torch.arange(2000.0).reshape(40, 50)).sketch, "<f4").astype(int)
    outside = min(set(range(2000)) - set(sampled.tolist()))
    sizes = []
    for k, at in enumerate((outside, int(sampled[0]))):
        changed = base.clone()
        changed.view(-1)[at] = 1.5
        sides = ([[row_of("grad", "w", t)]] for t in (base, changed))
        divergence = compare(*pair(tmp_path / str(k), *sides)).divergence
        assert divergence is not None and divergence.magnitude is not None
        sizes.append(divergence.magnitude)
        assert ("abs" in str(divergence)) == (at != outside)
    assert str(sizes[0]) == "not measured" and sizes[0].max_ulp is sizes[0].max_abs is None
    assert sizes[1].differing >= 1 and sizes[1].max_abs == 0.5 and not sizes[1].exact


def test_whole_dumps_are_measured_exactly(tmp_path: Path) -> None:
    """Where both runs dumped the divergent tensor, the size is that of all its elements, not of the sketch."""
    traces = []
    for side in range(2):
        recorder = Recorder(TraceWriter(tmp_path / str(side), HEADER), 0, dump=[(0, "grad", "layer/w")])
        x = torch.ones(40, 50)
        x[side * 7, 3] += side * 2**-23
        recorder("grad", "layer/w", x)
        recorder.end_step(0)
        recorder.writer.close({})
        assert len(dump_path(tmp_path / str(side), 0, "grad", "layer/w").read_bytes()) == 8000
        traces.append(Trace(tmp_path / str(side)))
    divergence = compare(*traces).divergence
    assert divergence is not None and divergence.magnitude is not None and divergence.magnitude.exact
    assert (divergence.magnitude.elements, divergence.magnitude.differing, divergence.magnitude.max_ulp) == (2000, 1, 1)


# -- KL


def tokens(*log_probs: float, mask: Sequence[int] = (1, 1, 0), dtype: torch.dtype = torch.float32) -> list[Row]:
    return [
        row_of("input", "loss_mask", torch.tensor(mask)),
        row_of("forward", "log_probs", torch.tensor(log_probs, dtype=dtype)),
    ]


def test_kl_is_given_from_the_first_divergent_step_on(tmp_path: Path) -> None:
    """KL over unmasked tokens for the divergent step and those after it; none where all steps agree."""
    x = [tokens(-1.0, -2.0, -3.0)] * 3
    y = [x[0], tokens(-1.5, -2.0, -9.0), x[0]]
    comparison = compare(*pair(tmp_path, x, y))
    r = -0.5
    assert comparison.kl == {1: (-r / 2, (math.expm1(r) - r) / 2), 2: (0.0, 0.0)}
    assert compare(*pair(tmp_path / "same", x, x)).kl == {}


@pytest.mark.parametrize(
    "other",
    [
        tokens(-1.0, -2.0),
        tokens(-1.0, -2.0, -3.0)[:1],
    ],
    ids=["shape", "absent"],
)
@pytest.mark.parametrize("swap", [False, True])
def test_log_probs_of_another_form_give_no_kl(tmp_path: Path, other: list[Row], swap: bool) -> None:
    """Log-probs of another shape, or none, are a divergence without a KL, on either side."""
    sides = [tokens(-1.0, -2.0, -3.0), other]
    a, b = pair(tmp_path, *([s] for s in (reversed(sides) if swap else sides)))
    comparison = compare(a, b)
    assert comparison.divergence is not None and comparison.divergence.signal == "log_probs" and comparison.kl == {}


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_log_probs_of_another_dtype_are_a_divergence_of_no_kl(tmp_path: Path, dtype: torch.dtype) -> None:
    """Bits differ, and the policy is the same: the KL of equal numbers is 0."""
    a, b = pair(tmp_path, [tokens(-1.0, -2.0, -3.0)], [tokens(-1.0, -2.0, -3.0, dtype=dtype)])
    comparison = compare(a, b)
    assert comparison.divergence is not None and comparison.divergence.signal == "log_probs"
    assert comparison.kl == {0: (0.0, 0.0)}


@pytest.mark.parametrize("dtype", [torch.bool, torch.int32, torch.uint8, torch.float32, torch.int64])
def test_a_mask_of_any_dtype_masks(tmp_path: Path, dtype: torch.dtype) -> None:
    """The loss mask may be bool, integer or float: KL is over its non-zero tokens."""
    sides = [
        [row_of("input", "loss_mask", torch.tensor([1, 0, 1]).to(dtype)), tokens(*values)[1]]
        for values in ((-1.0, -2.0, -3.0), (-1.0, -9.0, -3.5))
    ]
    k1, k3 = compare(*pair(tmp_path, [sides[0]], [sides[1]])).kl[0]
    assert (k1, k3) == (0.25, (math.expm1(-0.5) + 0.5) / 2)


def test_each_number_that_a_pattern_asks_for_is_asked_after(tmp_path: Path) -> None:
    """Of two that one pattern names the one that was never told is named; a pattern of names asks for none."""
    trace = write(tmp_path, [metrics(loss=1.0)])
    assert unmatched(trace, [], [r"loss=(?P<loss>\S+)", r"(?P<name>\w+)=(?P<value>\S+)"]) == ""
    both = r"loss=(?P<loss>\S+)|kl=(?P<kl>\S+)"
    assert unmatched(trace, [], [both]) == f"no number was found for kl by {both!r}"


def test_what_is_not_finite_is_found_where_nothing_masks(tmp_path: Path) -> None:
    """NaN in a moving average or a frozen parameter counts; an infinite buffer, or one of a module, is a mask."""
    bad = torch.tensor([1.0, math.nan])
    for name, counts in (("copy/ema/w", True), ("frozen/w", True), ("buffer/mask", False), ("module/ref/mask", False)):
        trace = write(tmp_path / name, [[row_of("grad", "w", torch.ones(2)), row_of("update", name, bad)]])
        first = (0, "update", name) if counts else None
        assert trace.first_nonfinite() == first
        seal(trace.directory)
        assert Trace(trace.directory).first_nonfinite() == first
