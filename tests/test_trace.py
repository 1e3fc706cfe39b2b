"""Traces as they are written and read back, their headers, roots, and what the writer refuses."""

from __future__ import annotations

import json
import resource
import struct
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from trace_kit import (
    HEADER,
    KEYS,
    NAN_WITH_PAYLOAD,
    RAM,
    ROWS,
    SMALL,
    STEPS,
    check_prefix,
    content,
    copy,
    exact,
    kill,
    tensor_row,
    write,
)

from repro_golden.base.errors import MachineFailureError, ReproError
from repro_golden.fingerprint import Lanes
from repro_golden.trace import FORMAT, PHASES, Row, Trace, TraceWriter, seal
from repro_golden.trace.model import chain, root
from repro_golden.trace.writer import metric_row


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """A folder in memory."""
    with tempfile.TemporaryDirectory(dir=RAM) as folder:
        yield Path(folder)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("small") / "trace", SMALL)


# -- round trip


@given(STEPS)
def test_what_was_written_is_read_back(steps: list[list[Row]]) -> None:
    """Random rows (any name, NaN payloads, -0.0) come back bit for bit, live and sealed, and sealing twice is free."""
    with tempfile.TemporaryDirectory(dir=RAM) as folder:
        directory = write(Path(folder) / "t", steps)
        live = Trace(directory)
        expected = [[exact(r) for r in rows] for rows in steps]
        assert [[exact(r) for r in live.rows(i)] for i in range(len(live.steps))] == expected
        before = content(live)
        seal(directory)
        seal(directory)
        sealed = Trace(directory)
        assert content(sealed) == before and sealed.header == HEADER and sealed.end == {"reason": "finished"}
        assert {p.name for p in directory.iterdir()} == {
            "header.json",
            "steps.jsonl",
            "steps.index",
            "rank-00000.parquet",
        }
        for i, rows in enumerate(steps):
            assert all(exact(sealed.row(i, r.phase, r.name)) == exact(r) for r in rows)


@given(STEPS)
def test_the_step_log_alone_tells_metrics_roots_and_chain(steps: list[list[Row]]) -> None:
    """Without any rows the step log still holds every metric bit for bit, the roots and the chain; rows are refused."""
    with tempfile.TemporaryDirectory(dir=RAM) as folder:
        directory = write(Path(folder) / "t", steps)
        seal(directory)
        (directory / "rank-00000.parquet").unlink()
        trace, previous = Trace(directory), Trace(write(Path(folder) / "empty", [])).chain
        for number, (record, rows) in enumerate(zip(trace.steps, steps, strict=True)):
            previous = chain(previous, number, root(rows))
            assert (record.step, record.root, record.chain, record.signals) == (
                number,
                root(rows),
                previous,
                len(rows),
            )
            with pytest.raises(ReproError, match="has no rows"):
                trace.rows(number)


@pytest.mark.parametrize("value", [-0.0, 0.0, 5e-324, float("inf"), NAN_WITH_PAYLOAD, 0.1])
def test_metrics_keep_their_bits(tmp_path: Path, value: float) -> None:
    """A metric's bits survive the step log and its row: -0.0, infinities and NaN payloads included."""
    trace = Trace(write(tmp_path / "t", [[metric_row("loss", "kl", value)]]))
    assert exact(trace.steps[0].metrics["kl"]) == exact(value)
    (row,) = trace.rows(0)
    assert row.values == row.sketch == struct.pack("<d", value) and row.nonfinite == (value - value != 0)


def test_one_metric_name_in_two_phases_loses_neither(tmp_path: Path) -> None:
    """Two metrics that share a name in different phases are both readable, or the second is refused in one line."""
    writer, metrics = TraceWriter(tmp_path / "t", HEADER), [1.0, 2.0]
    writer.add(metric_row("loss", "norm", 1.0))
    with suppress(ReproError):
        writer.add(metric_row("grad", "norm", 2.0))
        metrics = sorted(writer.end_step(0).metrics.values())
    kill(writer)
    assert metrics == [1.0, 2.0]


# -- the header


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": FORMAT + 1}, "upgrade repro-harness"),
        ({"format": None}, "no format number"),
        ({"format": "1"}, "no format number"),
        ({"format": 0}, "no format number"),
        ({"format": True}, "no format number"),
        ({"scheme": "psum128/2"}, "psum128/2"),
        ({"scheme": None}, "this repro compares"),
        ({"steps": "many"}, "is damaged"),
        ({"rollouts": ...}, "is damaged"),
        ({"first_step": ...}, "is damaged"),
    ],
)
def test_a_foreign_header_is_refused(small: Path, tmp_path: Path, change: dict[str, Any], message: str) -> None:
    """A newer format, another fingerprint scheme or a missing part is refused in one line."""
    directory = copy(small, tmp_path / "t")
    raw = json.loads((directory / "header.json").read_text()) | change
    (directory / "header.json").write_text(json.dumps({k: v for k, v in raw.items() if v is not ...}))
    with pytest.raises(ReproError, match=message) as caught:
        Trace(directory)
    assert "\n" not in str(caught.value)


def test_no_trace_is_one_line(tmp_path: Path) -> None:
    """A folder without a header, and a header that is no JSON, are one line each."""
    with pytest.raises(ReproError, match="no trace header at"):
        Trace(tmp_path)
    (tmp_path / "header.json").write_bytes(b"\xff\xfe")
    with pytest.raises(ReproError, match="not a readable trace header"):
        Trace(tmp_path)


# -- roots


@given(st.lists(ROWS, min_size=1, max_size=8, unique_by=KEYS), st.randoms(use_true_random=False))
def test_the_order_of_observation_plays_no_part(rows: list[Row], random: Any) -> None:
    """A step's root is the same in any order of observation; leaving one signal out, or in, changes it."""
    shuffled = list(rows)
    random.shuffle(shuffled)
    assert root(shuffled) == root(rows) != root(rows[1:])


@given(ROWS.filter(lambda r: r.dtype != "metric"), st.integers(0, 127))
def test_the_root_binds_what_names_a_signal_and_its_content(row: Row, bit: int) -> None:
    """Phase, name, dtype, shape and each bit of the lanes are in the root."""
    lanes = Lanes(row.lanes.a ^ 1 << bit if bit < 64 else row.lanes.a, row.lanes.b ^ (1 << bit) >> 64)
    others = [
        replace(row, phase=PHASES[PHASES.index(row.phase) - 1]),
        replace(row, name=row.name + "'"),
        replace(row, dtype="uint8"),
        replace(row, shape=(*row.shape, 1)),
        replace(row, lanes=lanes),
    ]
    assert len({root([r]) for r in [row, *others]}) == 6


@given(st.lists(st.booleans(), min_size=1, max_size=6), st.integers(0, 5))
def test_chains_that_parted_never_meet(values: list[bool], at: int) -> None:
    """After one other root every later chain differs, whatever follows; before it all are equal."""
    at %= len(values)
    a = b = "start"
    for step, value in enumerate(values):
        a, b = chain(a, step, str(value)), chain(b, step, str(value) if step != at else "another")
        assert (a == b) == (step < at)


# -- the writer refuses


def test_what_is_no_signal_is_refused(tmp_path: Path) -> None:
    """An unknown phase, a signal seen twice and an empty step are one line each, and the trace goes on after them."""
    writer = TraceWriter(tmp_path / "t", HEADER)
    row = tensor_row("loss", "x", b"1")
    with pytest.raises(ReproError, match="step 0 observed nothing"):
        writer.end_step(0)
    with pytest.raises(ReproError, match=r"unknown phase 'backward' .* use one of input, forward, loss, grad, update"):
        writer.add(replace(row, phase="backward"))
    writer.add(row)
    with pytest.raises(ReproError, match="observed twice in phase 'loss'"):
        writer.add(tensor_row("loss", "x", b"2"))
    writer.add(replace(row, phase="grad"))
    writer.end_step(0)
    with pytest.raises(ReproError, match="step 1 observed nothing"):
        writer.end_step(1)
    writer.add(row)
    writer.end_step(1)
    kill(writer)
    assert [s.signals for s in Trace(tmp_path / "t").steps] == [2, 1]


def test_a_trace_is_never_written_over(small: Path) -> None:
    """A folder that holds a trace is refused."""
    with pytest.raises(ReproError, match="already holds a trace"):
        TraceWriter(small, HEADER)


# -- a full disk


@contextmanager
def file_size_limit(size: int) -> Iterator[None]:
    """No file of this process may grow beyond `size` bytes (Python ignores the signal, so writes fail)."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def write_until_failure(directory: Path) -> tuple[int, str | None]:
    """How many steps were ended, and the machine's failure."""
    count, writer = 0, None
    try:
        writer = TraceWriter(directory, HEADER)
        for rows in SMALL:
            for row in rows:
                writer.add(row)
            writer.end_step(count)
            count += 1
        writer.close({"reason": "finished"})
    except MachineFailureError as error:
        if writer:
            kill(writer)
        return count, str(error)
    return count, None


def test_a_full_disk_keeps_the_steps_before(tmp_path: Path) -> None:
    """Wherever the disk runs full, the failure is the machine's, and the steps ended before it are read."""
    whole = content(Trace(write(tmp_path / "whole", SMALL)))
    size = (tmp_path / "whole" / "rank-00000.log").stat().st_size
    ended = set()
    for limit in range(0, size + 60, 37):
        directory = tmp_path / str(limit)
        with file_size_limit(limit):
            count, failure = write_until_failure(directory)
        assert failure is None or (str(directory) in failure and "\n" not in failure)
        if (directory / "header.json").exists():
            check_prefix(directory, whole, count)
            seal(directory)
            check_prefix(directory, whole, count)
            ended.add(count)
    assert ended == {0, 1, 2, 3}


def test_no_space_left_is_the_machines_failure(tmp_path: Path) -> None:
    """A device that is full (/dev/full) gives a MachineFailureError that says so."""
    for name in ("rank-00000.log", "steps.jsonl"):
        directory = tmp_path / name.partition(".")[0]
        directory.mkdir()
        (directory / name).symlink_to("/dev/full")
        writer = TraceWriter(directory, HEADER)
        writer.add(metric_row("loss", "kl", 1.0))
        with pytest.raises(MachineFailureError, match="No space left on device; the steps before stay readable"):
            writer.end_step(0)
        kill(writer)
        if name != "steps.jsonl":  # no line is written before its rows are
            assert (directory / "steps.jsonl").read_bytes() == b""


def test_a_folder_that_cannot_be_made_is_the_machines_failure(tmp_path: Path) -> None:
    """A trace below a file, and a log that is a folder, are the machine's failure."""
    (tmp_path / "file").touch()
    with pytest.raises(MachineFailureError, match="cannot write"):
        TraceWriter(tmp_path / "file" / "t", HEADER)
    (tmp_path / "t" / "steps.jsonl").mkdir(parents=True)
    with pytest.raises(MachineFailureError, match="cannot write a trace in"):
        TraceWriter(tmp_path / "t", HEADER)
