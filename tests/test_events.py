"""TensorBoard both ways: event files as a baseline, and nights and pull requests as event files."""

from __future__ import annotations

import json
import math
import struct
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import warm_kit
from conftest import environment
from hypothesis import example, given
from hypothesis import strategies as st
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter
from torch.utils.tensorboard import SummaryWriter
from trace_kit import write

from repro.nightly.checks import events_check
from repro.nightly.records import Baseline, Check, NightlyRun
from repro.nightly.records import Summary as Values
from repro.nightly.tensorboard import STATUS_TEXT, write_nightly_runs, write_pulls
from repro.pulls.pair import Compared, PairResult, compare_traces
from repro_bisect.axes.axis import PointInfo
from repro_golden.base.errors import ReproError
from repro_golden.base.machine.usage import Usage
from repro_golden.case.file import Bound, Compare
from repro_golden.compare.tensorboard import agreeing_offset, differences, matched, read_events
from repro_golden.trace import Trace
from repro_golden.trace.writer import metric_row

FINITE = st.floats(allow_nan=False, allow_infinity=False, width=64)
NAMES = st.sampled_from(["loss", "train/loss", "eval/loss", "grad_norm", "train/grad_norm", "kl", "a/b/kl", ""])
RUNS = st.dictionaries(st.integers(0, 5), st.dictionaries(NAMES, st.floats(), max_size=4), max_size=4)


def single(value: float) -> float:
    """Rounded to float32, by the C library and not by what is tested."""
    try:
        single: float = struct.unpack("<f", struct.pack("<f", value))[0]
    except OverflowError:
        return math.copysign(math.inf, value)
    return single


def bits(value: float) -> bytes:
    return struct.pack("<f", value)


def log(folder: Path, values: Mapping[int, Mapping[str, float]], *, at: float = 1.0, new_style: bool = False) -> Path:
    """Values by step and tag, as torch.utils.tensorboard writes them."""
    with SummaryWriter(str(folder)) as writer:
        for step, tags in values.items():
            for tag, value in tags.items():
                writer.add_scalar(tag, value, step, walltime=at, new_style=new_style)
    return folder


# -- reading


@pytest.mark.parametrize("new_style", [False, True])
def test_scalars_are_read_as_float32(tmp_path: Path, new_style: bool) -> None:
    """Plain and tensor scalars come back bit for bit in float32, NaN, infinities and -0.0 too, under their tag."""
    tags = {"train/grad_norm": 0.1, "loss": math.nan, "kl": math.inf, "low": -math.inf, "zero": -0.0, "big": 1e39}
    events = read_events(log(tmp_path, {0: tags, 7: {"loss": 2.5}}, new_style=new_style))
    assert list(events) == [0, 7] and events[7] == {"loss": 2.5} and events[0].keys() == tags.keys()
    assert {tag: bits(v) for tag, v in events[0].items()} == {tag: bits(single(v)) for tag, v in tags.items()}
    assert events[0]["train/grad_norm"] == 0.10000000149011612


def test_the_later_wall_time_wins(tmp_path: Path) -> None:
    """Of a step that several files of a tree log, the value with the later wall time counts."""
    log(tmp_path / "a", {0: {"loss": 1.0}, 1: {"loss": 2.0}, 2: {"loss": 3.0}}, at=50.0)
    log(tmp_path / "b", {1: {"loss": 20.0, "kl": 5.0}}, at=70.0)
    log(tmp_path / "c" / "deep", {1: {"loss": 200.0}, 2: {"loss": 300.0}}, at=20.0)
    assert read_events(tmp_path) == {0: {"loss": 1.0}, 1: {"loss": 20.0, "kl": 5.0}, 2: {"loss": 3.0}}


def test_a_tag_of_several_folders(tmp_path: Path) -> None:
    """One after the other they are a run; at the same time each has a metric of its own, by its folder."""
    log(tmp_path / "run" / "train", {0: {"loss": 1.0}}, at=1.0)
    log(tmp_path / "run" / "train", {1: {"loss": 2.0}}, at=3.0)
    log(tmp_path / "run" / "eval", {0: {"loss": 5.0}}, at=2.0)
    assert read_events(tmp_path / "run") == {0: {"eval/loss": 5.0, "train/loss": 1.0}, 1: {"train/loss": 2.0}}
    for day in ("01", "02"):
        for rank in (0, 1):
            log(tmp_path / day / f"Jan{day}_12-00-0{rank}_host_rank{rank}", {0: {"loss": 1.0 + rank}}, at=2.0)
    assert read_events(tmp_path / "01") == read_events(tmp_path / "02") == {0: {"rank0/loss": 1.0, "rank1/loss": 2.0}}
    log(tmp_path / "again" / "first", {0: {"loss": 1.0}, 1: {"loss": 7.0}}, at=1.0)
    log(tmp_path / "again" / "second", {1: {"loss": 2.0}}, at=3.0)
    assert read_events(tmp_path / "again") == {0: {"loss": 1.0}, 1: {"loss": 2.0}}


@pytest.mark.parametrize("tag", ["loss", "train/loss"])
def test_scalars_that_were_added_together_are_told_apart(tmp_path: Path, tag: str) -> None:
    """`add_scalars` writes one tag into a folder for each of its values: each is compared, by the recorder's name."""
    for name, policy in (("a", 1.0), ("b", 9.0)):
        with SummaryWriter(str(tmp_path / name)) as writer:
            writer.add_scalars(tag, {"policy": policy, "value": 0.5}, 0)
    a, b = (read_events(tmp_path / name) for name in "ab")
    assert a == {0: {f"{tag}/policy": 1.0, f"{tag}/value": 0.5}} and not differences(a, b, {}).agrees


def test_a_restart_in_the_middle_keeps_all_steps(tmp_path: Path) -> None:
    """A run that starts again at an earlier step loses none of the steps that only the first part made."""
    log(tmp_path, {0: {"loss": 1.0}, 1: {"loss": 2.0}, 2: {"kl": 3.0}}, at=1.0)
    log(tmp_path, {1: {"loss": 5.0}}, at=2.0)
    assert read_events(tmp_path) == {0: {"loss": 1.0}, 1: {"loss": 5.0}, 2: {"kl": 3.0}}


def test_what_is_no_scalar_is_passed_over(tmp_path: Path) -> None:
    """Text and histograms are left out; a scalar as tensorboardX writes it, without metadata, is read."""
    with SummaryWriter(str(tmp_path)) as writer:
        writer.add_text("note", "hello", 0)
        writer.add_histogram("weights", np.arange(3.0), 0)
        writer.add_scalar("loss", 1.5, 0)
    plain = EventFileWriter(str(tmp_path))
    value = Summary.Value(tag="train/kl", simple_value=0.25)
    plain.add_event(Event(wall_time=1.0, step=0, summary=Summary(value=[value])))
    plain.close()
    assert read_events(tmp_path) == {0: {"loss": 1.5, "train/kl": 0.25}}


def test_a_file_that_was_cut_short_counts_up_to_there(tmp_path: Path) -> None:
    """Whole records of a killed run are read."""
    (path,) = log(tmp_path, {step: {"loss": float(step)} for step in range(5)}).iterdir()
    path.write_bytes(path.read_bytes()[:-7])
    assert read_events(tmp_path) == {step: {"loss": float(step)} for step in range(4)}


def test_folders_without_scalars_are_refused(tmp_path: Path) -> None:
    """No event file, and event files without a scalar, are one line each."""
    with pytest.raises(ReproError, match="no TensorBoard event file"):
        read_events(tmp_path)
    SummaryWriter(str(tmp_path)).close()
    with pytest.raises(ReproError, match="hold no scalar"):
        read_events(tmp_path)


def test_without_tensorboard_one_line_names_the_cure(tmp_path: Path) -> None:
    """Reading and writing without TensorBoard say how to install it; nothing else of repro needs it."""
    log(tmp_path / "events", {0: {"loss": 1.0}})
    code = (
        "import sys; sys.modules['tensorboard'] = None\n"  # what Python itself does for a module that may not be found
        "from repro.__main__ import main; sys.exit(main(['diff', 'events', 'events']))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment(), capture_output=True, text=True, check=False
    )
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1 and "'repro-harness[tensorboard]'" in done.stderr


# -- comparing


@pytest.mark.parametrize(
    ("name", "values", "offset"),
    [("loss", [4.5, 3.25, 2.5, 2.0], 1), ("loss", [4.5, 3.25], None), ("lr", [4.5, 3.25, 2.5, 2.0], None)],
)
def test_a_numbering_is_told_by_values(name: str, values: list[float], offset: int | None) -> None:
    """A few agree with others by chance, and a schedule that steps once too early with itself, one step on."""
    ours = {step: {name: value} for step, value in enumerate(values)}
    assert agreeing_offset({step + 1: told for step, told in ours.items()}, ours, {}) == offset


@given(RUNS, st.integers(-3, 3))
def test_equal_after_rounding_never_differs(run: dict[int, dict[str, float]], offset: int) -> None:
    """A run compared with itself in float32 never differs, whatever the offset; and agrees where all is finite."""
    rounded = {step + offset: {name: single(v) for name, v in values.items()} for step, values in run.items()}
    diffs = differences(rounded, run, {}, offset)
    assert diffs.differing == []
    assert diffs.values == sum(map(len, run.values()))
    broken = [v for values in rounded.values() for v in values.values() if not math.isfinite(v)]
    assert len(diffs.nonfinite) == len(broken)
    assert diffs.agrees == (diffs.values > 0 and not broken)


@given(FINITE, st.integers(0, 5), st.booleans())
def test_the_neighbouring_float32_differs(value: float, step: int, up: bool) -> None:
    """One representable float32 apart is a difference, at that step and with both values."""
    base = single(value)
    if not math.isfinite(base):
        return
    word = struct.unpack("<i", bits(base))[0] + (1 if up else -1)
    other = struct.unpack("<f", struct.pack("<I", word & 0xFFFFFFFF))[0]
    diffs = differences({step: {"loss": base}}, {step: {"loss": other}}, {})
    if not math.isnan(other):
        assert [(c.step, c.metric, bits(c.a or 0.0), bits(c.b or 0.0)) for c in diffs.differing] == [
            (step, "loss", bits(base or 0.0), bits(other or 0.0))
        ]
    assert not diffs.agrees


@given(st.floats(-9, 9) | FINITE, st.floats(-9, 9) | st.floats(allow_nan=False), st.floats(0, 1), st.floats(0, 10))
@example(a=1.0, b=1.5, rtol=0.0, atol=0.5)
@example(a=1.0, b=1.5000001, rtol=0.0, atol=0.5)
@example(a=-4.0, b=-6.0, rtol=0.5, atol=0.0)
def test_bounds_are_honoured(a: float, b: float, rtol: float, atol: float) -> None:
    """With a bound, |b - a| <= atol + rtol |a| in float32 decides, by either side's name."""
    x, y = single(a), single(b)
    inside = math.isfinite(x) and math.isfinite(y) and abs(y - x) <= atol + rtol * abs(x)
    for name in ("train/loss", "loss"):
        bound = {name: Bound(rtol=rtol, atol=atol)}
        diffs = differences({0: {"train/loss": a}}, {0: {"loss": b}}, bound)
        both_broken = not math.isfinite(x) and not math.isfinite(y)
        assert (not diffs.differing) == (inside or both_broken)


def test_what_is_not_finite_is_never_agreement() -> None:
    """NaN on both sides is its own finding; NaN on one side differs, bounds or not."""
    nan, wide = math.nan, {"loss": Bound(atol=1e9)}
    both = differences({0: {"loss": nan}}, {0: {"loss": nan}}, wide)
    assert (len(both.nonfinite), list(both.differing), both.agrees) == (1, [], False)
    for pair in ((nan, 1.0), (1.0, nan), (math.inf, 1.0)):
        diffs = differences({0: {"loss": pair[0]}}, {0: {"loss": pair[1]}}, wide)
        assert (len(diffs.differing), list(diffs.nonfinite)) == (1, [])
    json.dumps(both.to_mapping(), allow_nan=False)


@given(st.lists(NAMES, unique=True), st.lists(NAMES, unique=True))
def test_names_match_one_to_one(a: list[str], b: list[str]) -> None:
    """No name is matched twice, equal names always match, and the sides may be swapped."""
    pairs = matched(a, b)
    assert len({x for x, _ in pairs}) == len({y for _, y in pairs}) == len(pairs)
    assert {x for x in a if x in b} <= {x for x, y in pairs if x == y}
    assert all(x.rpartition("/")[2] == y.rpartition("/")[2] for x, y in pairs)
    assert {(y, x) for x, y in pairs} == set(matched(b, a))


def test_a_last_part_must_be_unique_on_both_sides() -> None:
    """``train/loss`` is ``loss``; where there is an ``eval/loss`` too, nobody can tell."""
    assert matched(["train/loss"], ["loss"]) == [("train/loss", "loss")]
    assert matched(["train/loss", "eval/loss"], ["loss"]) == []
    assert matched(["loss", "eval/loss"], ["loss", "train/loss"]) == [("loss", "loss")]


# -- repro diff


def repro_diff(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return warm_kit.run([sys.executable, "-m", "repro", "diff", *words], folder, environment())


def trace(folder: Path, *losses: float, grad_norm: float = 1.0) -> Trace:
    rows = [
        [metric_row("loss", "loss", x), metric_row("grad", "grad_norm", grad_norm + i)] for i, x in enumerate(losses)
    ]
    return Trace(write(folder, rows))


def test_diff_of_events_and_a_trace(tmp_path: Path) -> None:
    """fp64 metrics agree with their float32 in event files, on either side and with steps that count from 1."""
    trace(tmp_path / "trace", 0.1, 0.2, 0.3)
    log(tmp_path / "events", {i + 1: {"train/loss": 0.1 * (i + 1), "lr": 1.0} for i in range(3)})
    for sides in (("events", "trace"), ("trace", "events")):
        done = repro_diff(tmp_path, "--offset", "1", *sides)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "agrees: 3 values of 3 steps compared in float32" in done.stdout and "~" in done.stdout
        assert f"reproduce with: repro diff --offset 1 {' '.join(sides)}" in done.stdout


def test_diff_names_the_numbering_under_which_all_agrees(tmp_path: Path) -> None:
    """Events that count from 1 differ as they are numbered, and the offset that makes them agree is named."""
    trace(tmp_path / "trace", 0.1, 0.2, 0.3)
    log(tmp_path / "events", {i + 1: {"loss": 0.1 * (i + 1)} for i in range(3)})
    for sides in (("events", "trace"), ("trace", "events")):
        done = repro_diff(tmp_path, *sides)
        assert done.returncode == 1 and "all values that both have agree with --offset 1" in done.stdout, done.stdout


def test_diff_names_first_worst_and_last(tmp_path: Path) -> None:
    """A difference is exit 1, with its step as the events count it and the table that traces have too."""
    trace(tmp_path / "trace", 0.5, 0.75, 4.0, 0.25)
    log(tmp_path / "events", {i: {"train/loss": x} for i, x in enumerate([0.5, 0.5, 0.5, 0.5])})
    done = repro_diff(tmp_path, "events", "trace")
    assert done.returncode == 1 and "differs at step 1, metric train/loss: 0.5 became 0.75" in done.stdout
    row = next(line for line in done.stdout.splitlines() if line.startswith("| train/loss"))
    assert [c.strip() for c in row.strip("|").split("|")] == [
        "train/loss", "1", "0.5 -> 0.75", "2", "+3.5 (+700%)", "-0.25 (-50%)"
    ]  # fmt: skip
    data = json.loads(repro_diff(tmp_path, "--json", "events", "trace").stdout)
    assert (data["equal"], data["values"], data["metrics"]) == (False, 4, {"train/loss": "loss"})
    assert data["differing"][1] == {"step": 2, "metric": "train/loss", "a": 0.5, "b": 4.0}


def test_diff_without_anything_common_is_one_line(tmp_path: Path) -> None:
    """No common metric, and no common step, are exit 2 and say what each side has."""
    trace(tmp_path / "trace", 0.5)
    log(tmp_path / "events", {5: {"loss": 0.5}})
    log(tmp_path / "other", {0: {"reward": 0.5}})
    for name, phrase in (("events", "--offset 0: try another"), ("other", "A has reward; B has grad_norm, loss")):
        done = repro_diff(tmp_path, name, "trace")
        assert done.returncode == 2 and len(done.stderr.splitlines()) == 1 and phrase in done.stderr, done.stderr
    misplaced = repro_diff(tmp_path, "--offset", "1", "trace", "trace")
    assert misplaced.returncode == 2 and "--offset" in misplaced.stderr


def test_diff_of_values_that_broke_down_alike(tmp_path: Path) -> None:
    """NaN on both sides is exit 1 and said to be no agreement."""
    trace(tmp_path / "trace", math.nan)
    log(tmp_path / "events", {0: {"loss": math.nan}})
    done = repro_diff(tmp_path, "events", "trace")
    assert done.returncode == 1 and "not finite on both sides: 1 value, first loss at step 0" in done.stdout


def steps(*numbers: int, tag: str = "loss") -> dict[int, dict[str, float]]:
    return {number: {tag: 0.5} for number in numbers}


def test_a_side_that_ended_early(tmp_path: Path) -> None:
    """A run that stopped before the other is a difference, of events and traces, either way round, and in JSON."""
    trace(tmp_path / "t4", 0.5, 0.5, 0.5, 0.5)
    trace(tmp_path / "t3", 0.5, 0.5, 0.5)
    log(tmp_path / "e4", steps(0, 1, 2, 3))
    log(tmp_path / "e3", steps(0, 1, 2))
    for a, b in (("e4", "t3"), ("t4", "e3"), ("e4", "e3")):
        for sides, who in (((a, b), "run"), ((b, a), "baseline")):
            done = repro_diff(tmp_path, *sides)
            first = done.stdout.splitlines()[0]
            assert done.returncode == 1 and first.startswith(f"differs: the {who} ended after step 2, "), done.stdout
    done = repro_diff(tmp_path, "--json", "e4", "t3")
    data = json.loads(done.stdout)
    assert done.returncode == 1 and (data["equal"], data["last_steps"]) == (False, [3, 2])
    assert data["ended"] == "the run ended after step 2, the baseline after step 3"
    assert json.loads(repro_diff(tmp_path, "--json", "e4", "t4").stdout)["ended"] == ""


def test_metrics_that_are_logged_now_and_then() -> None:
    """Who logs every tenth step has not ended before the next is due; a part of a run need not be as long as it."""
    every, tenth = steps(*range(25)), steps(0, 10, 20)
    for a, b in ((every, tenth), (tenth, every)):
        assert differences(a, b, {}).agrees
        assert differences(a, b | steps(30) if b is tenth else b | steps(*range(25, 31)), {}).ended
    both = {number: {"loss": 0.5, "lr": 1.0} for number in range(9)}
    short = {number: values if number < 3 else {"lr": 1.0} for number, values in both.items()}
    assert differences(both, short, {}).ended == "loss: the run ended after step 2, the baseline after step 8"
    late = steps(0, 1) | {7: {"eval/score": 1.0}}
    assert differences(late, steps(0, 1), {}).agrees, "a metric that one side alone has says nothing of the other"
    assert differences(steps(1, 2, 3), steps(0, 1), {}, 1).ended
    assert not differences(steps(1, 2), steps(0, 1), {}, 1).ended
    assert differences(steps(0, 1, 2), steps(0, 1), {}, prefix=True).agrees
    assert differences(steps(0, 1), steps(0), {}).ended


# -- nights


@pytest.mark.parametrize("first", [1, 7])
def test_events_that_number_their_steps_otherwise(first: int) -> None:
    """Equal numbers are never called changed, nor passed unsaid: the numbering under which all agree is named."""
    ours = {step: {"loss": 1 / (step + 1), "lr": 0.5} for step in range(3)}
    theirs = {step + first: {"train/loss": 1 / (step + 1), "train/lr": 0.5, "kl": 1.0} for step in range(9)}
    check = events_check(ours, theirs, {})
    assert check.status == "not judged" and f"agree with --offset {first}:" in check.text
    assert events_check(ours, theirs, {}, first).status == "green"
    assert events_check(ours, theirs, {}, 0).status == ("changed" if first == 1 else "error"), "as it was said"
    moved = {step: values | {"loss": values["loss"] + step} for step, values in ours.items()}
    assert events_check(moved, theirs, {}).status == ("changed" if first == 1 else "error")
    flat = {step: {"lr": 0.5} for step in ours}
    steady = {0: {"lr": 1.0}} | {step: {"lr": 0.5} for step in range(1, 9)}
    assert events_check(flat, steady, {}).status == "changed", "what agrees under any numbering says nothing of one"


def test_what_of_a_baseline_of_events_was_not_compared() -> None:
    """Its metrics that the case lacks are told, and the steps that one side alone has are counted."""
    ours = {0: {"loss": 1.0, "lr": 0.5}, 1: {"loss": 2.0}}
    theirs = {step: {"loss": step + 1.0, "kl": 0.5, "reward": 0.5} for step in range(9)}
    check = events_check(ours, theirs, {})
    assert (check.status, check.text) == (
        "green",
        "2 values of 1 metric as in the events; only in the events: kl, reward; only in the case: lr; "
        "not compared: loss at 7 steps of the events alone",
    )
    changed = events_check({0: {"loss": 3.5}}, theirs, {})
    assert changed.status == "changed" and "only in the events: kl, reward" in changed.text


# -- writing


def nightly_run(
    at: str, *, case: str = "toy", machine: str = "here", status: str = "green", **metrics: Values
) -> NightlyRun:
    return NightlyRun(
        case=case, machine=machine, at=at, commit={"commit": "c" * 40}, tree="", key="", rollouts="", identity={},
        status=status, steps=3, chain="", checks=[Check("run-to-run", "green", "")], baseline=Baseline("none"),  # type: ignore[arg-type]
        metrics=metrics, kl={"k1": -0.1, "k3": 0.3}, spent=Usage([9, 1_000_000, 2_000_000], 1, 0).to_mapping(),
        seconds=12.5,
    )  # fmt: skip


def wall_times(folder: Path) -> dict[int, float]:
    """The wall time of each step, as TensorBoard reads it."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(folder))
    accumulator.Reload()
    return {e.step: e.wall_time for e in accumulator.Scalars("night/status")}


def test_nights_are_written_by_machine_and_case(tmp_path: Path) -> None:
    """Each machine and case is a run: one point a night, numbered by time, with the night's own wall time."""
    loss = Values(first=1.0, last=0.1, low=-math.inf, high=math.nan, median=0.5)
    nightly_runs = [
        nightly_run("2026-11-22T03:12:45Z", status="changed", loss=loss),
        nightly_run("2026-11-21T03:00:00Z", loss=loss),
        nightly_run("2026-11-21T04:00:00Z", machine="there"),
    ]
    write_nightly_runs(nightly_runs, tmp_path)
    events = read_events(tmp_path / "here" / "toy")
    assert sorted(events) == [0, 1] and list(read_events(tmp_path / "there" / "toy")) == [0]
    assert [events[n]["night/status"] for n in (0, 1)] == [0.0, 3.0] and "3 is changed" in STATUS_TEXT
    got = {tag: bits(v) for tag, v in events[1].items() if not tag.startswith("night/")}
    assert got == {
        "loss/last": bits(0.1), "loss/low": bits(-math.inf), "loss/high": bits(math.nan),
        "kl/k1": bits(-0.1), "kl/k3": bits(0.3),
    }  # fmt: skip
    assert (events[1]["night/seconds"], events[1]["night/step_seconds"]) == (12.5, 1.5)
    assert wall_times(tmp_path / "here" / "toy") == {0: 1795230000.0, 1: 1795317165.0}


def test_writing_again_replaces(tmp_path: Path) -> None:
    """The same nights give the same bytes, other nights replace them, and a stranger's event file stays."""
    other = log(tmp_path / "here" / "toy", {0: {"mine": 1.0}})
    for at in ("2026-11-21T03:00:00Z", "2026-11-22T03:00:00Z"):
        write_nightly_runs([nightly_run(at)], tmp_path)
    (ours,) = other.glob("*.repro")
    content = ours.read_bytes()
    write_nightly_runs([nightly_run("2026-11-22T03:00:00Z")], tmp_path)
    assert ours.read_bytes() == content
    assert list(wall_times(tmp_path / "here" / "toy").values()) == [1795316400.0]
    assert read_events(other)[0]["mine"] == 1.0


@given(
    st.lists(
        st.text(max_size=200) | st.sampled_from(["kl", "a/last", "..", "/", "a//b", "\ud800"]), unique=True, max_size=5
    )
)
def test_any_name_is_a_sane_tag(tmp_path_factory: pytest.TempPathFactory, names: list[str]) -> None:
    """Whatever metrics, machines and cases are called, every value is found again, under a tag of its own."""
    folder = tmp_path_factory.mktemp("tags")
    metrics = {name: Values(n, n, n, n, n) for n, name in enumerate(names)}
    runs = [(machine, "..") for machine in names] or [("m", "../../c")]
    write_nightly_runs([nightly_run("2026-11-21T03:00:00Z", machine=m, case=c, **metrics) for m, c in runs], folder)
    files = [p for p in folder.rglob("*") if p.is_file()]
    assert len(files) == len(runs) and all(len(p.relative_to(folder).parts) == 3 for p in files)
    for path in files:
        (values,) = read_events(path.parent).values()
        tags = {t for t in values if t.startswith("night/")} - {
            f"{n}/{p}" for n in names for p in ("last", "low", "high")
        }
        assert tags >= {"night/status", "night/seconds", "night/step_seconds"}
        assert len(values) == 5 + 3 * len(names)
        assert all(part and part.isprintable() and part == part.strip() for tag in values for part in tag.split("/"))


POINT = PointInfo("c" * 40, "A", "2026-11-21T03:00:00Z", "S", (), "")


def pull(compared: Compared | None, case: str = "toy") -> PairResult:
    return PairResult(
        case=case, base=POINT, head=POINT, verdict="moved", reason="", compared=compared, bounds={}, spent={},
        commits=1, culprits=[], bisect=None, unnamed="", notes=[], machine="m", at="2026-11-21T03:00:00Z", seconds=1.0,
    )  # fmt: skip


def test_pulls_are_two_runs_of_each_case(tmp_path: Path) -> None:
    """Base and head have the points that a comparison keeps, exact in float32; a case without numbers has no run."""
    a = trace(tmp_path / "a", 0.1, 0.1, 0.1, 0.1, 0.1)
    b = trace(tmp_path / "b", 0.1, 0.2, 9.0, 0.2, math.nan, grad_norm=2.0)
    compared = compare_traces(a, b, Compare())
    write_pulls([pull(compared), pull(None, "same")], tmp_path / "tb")
    assert sorted(p.name for p in (tmp_path / "tb").iterdir()) == ["toy"]
    base, head = (read_events(tmp_path / "tb" / "toy" / side) for side in ("base", "head"))
    assert {step: values["loss"] for step, values in base.items() if "loss" in values} == dict.fromkeys(
        (1, 4), single(0.1)
    )
    assert {step: bits(v["loss"]) for step, v in head.items() if "loss" in v} == {1: bits(0.2), 4: bits(math.nan)}
    assert base[0]["grad_norm"] == 1.0 and head[0]["grad_norm"] == 2.0
    with pytest.raises(ReproError, match="two results of one case"):
        write_pulls([pull(compared), pull(compared)], tmp_path / "tb")
