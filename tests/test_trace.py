from __future__ import annotations

import json
import resource
import shutil
import struct
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import astuple, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from repro_golden.errors import MachineFailureError, ReproError
from repro_golden.fingerprint import Lanes, reference
from repro_golden.trace import FORMAT, PHASES, Header, Row, Trace, TraceWriter, seal
from repro_golden.trace.model import chain, root
from repro_golden.trace.writer import metric_row

SETTINGS = settings(deadline=None, derandomize=True, max_examples=25)
RAM = next(iter(Path("/dev").glob("shm")), None)  # syncing to disk is what takes the time
HEADER = Header({"name": "t"}, "rollouts", {"kind": "core"}, {"host": {}}, steps=3)
WORD = st.integers(0, 2**64 - 1)
ANY_FLOAT = WORD.map(lambda bits: struct.unpack("<d", bits.to_bytes(8, "little"))[0])
NAN_WITH_PAYLOAD = struct.unpack("<d", (0xFFF8_0000_DEAD_BEEF).to_bytes(8, "little"))[0]
TEXT = st.text(max_size=8)

ROWS = st.one_of(
    st.builds(
        Row,
        phase=st.sampled_from(PHASES),
        name=TEXT,
        dtype=st.sampled_from(["float32", "bfloat16", "int64"]),
        shape=st.lists(st.integers(0, 2**40), max_size=3).map(tuple),
        lanes=st.builds(Lanes, WORD, WORD),
        nonfinite=st.integers(0, 2**40),
        absmax=ANY_FLOAT,
        l2=ANY_FLOAT,
        sketch=st.binary(max_size=20),
        values=st.none() | st.binary(max_size=20),
        placement=st.none() | TEXT,
    ),
    st.builds(metric_row, st.sampled_from(PHASES), TEXT, ANY_FLOAT | st.sampled_from([-0.0, NAN_WITH_PAYLOAD])),
)
STEPS = st.lists(st.lists(ROWS, min_size=1, max_size=5, unique_by=lambda r: r.key), max_size=3)


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """A folder in memory."""
    with tempfile.TemporaryDirectory(dir=RAM) as folder:
        yield Path(folder)


def exact(value: Any) -> Any:
    """The value with every float as its bits, so that equality is that of bits."""
    if isinstance(value, float):
        return struct.pack("<d", value)
    if isinstance(value, dict):
        return {k: exact(v) for k, v in value.items()}
    if isinstance(value, Row):
        return exact(list(astuple(value)))
    return [exact(v) for v in value] if isinstance(value, (list, tuple)) else value


def content(trace: Trace) -> list[Any]:
    """All that a trace says of its steps."""
    return [
        exact([s.step, s.root, s.chain, s.signals, dict(s.metrics), trace.rows(i)]) for i, s in enumerate(trace.steps)
    ]


def write(directory: Path, steps: Sequence[Sequence[Row]], *, end: bool = True) -> Path:
    writer = TraceWriter(directory, HEADER)
    for number, rows in enumerate(steps):
        for row in rows:
            writer.add(row)
        writer.end_step(number)
    if end:
        writer.close({"reason": "finished"})
    else:
        kill(writer)
    return directory


def kill(writer: TraceWriter) -> None:
    """Let go of the files as the death of the process does: without a closing line."""
    writer._log.close()
    writer._step_log.close()


def tensor_row(phase: str, name: str, values: bytes) -> Row:
    return Row(phase, name, "uint8", (len(values),), reference(values), 0, 3.5, 4.25, b"", values)


SMALL = [
    [metric_row("loss", "kl", k / 10 + 0.01), replace(tensor_row("grad", "w", bytes([k] * 5)), sketch=b"\1\2\3")]
    for k in range(3)
]


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("small") / "trace", SMALL)


def copy(source: Path, target: Path, *, end: bool = True) -> Path:
    shutil.copytree(source, target)
    if not end:
        log = target / "steps.jsonl"
        log.write_bytes(b"".join(log.read_bytes().splitlines(keepends=True)[:-1]))
    return target


def check_prefix(directory: Path, whole: list[Any], count: int) -> None:
    trace = Trace(directory)
    assert content(trace) == whole[:count]
    assert trace.chain == (trace.steps[-1].chain if count else Trace(directory).chain)


# -- round trip


@SETTINGS
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
        assert {p.name for p in directory.iterdir()} == {"header.json", "steps.jsonl", "rank-00000.parquet"}
        for i, rows in enumerate(steps):
            assert all(exact(sealed.row(i, r.phase, r.name)) == exact(r) for r in rows)


@SETTINGS
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
    writer, found = TraceWriter(tmp_path / "t", HEADER), [1.0, 2.0]
    writer.add(metric_row("loss", "norm", 1.0))
    with suppress(ReproError):
        writer.add(metric_row("grad", "norm", 2.0))
        found = sorted(writer.end_step(0).metrics.values())
    kill(writer)
    assert found == [1.0, 2.0]


# -- cut off


@pytest.mark.parametrize("end", [False, True], ids=["killed", "closed"])
def test_any_cut_of_the_rank_log_leaves_whole_steps(small: Path, tmp_path: Path, end: bool) -> None:
    """Cut at any byte, the rank log gives the steps whose rows are whole, whether or not the run had ended."""
    whole = content(Trace(small))
    directory = copy(small, tmp_path / "t", end=end)
    log = directory / "rank-00000.log"
    raw = log.read_bytes()
    starts = frame_starts(raw)
    for cut in range(len(raw) + 1):
        log.write_bytes(raw[:cut])
        check_prefix(directory, whole, sum(s <= cut for s in starts[1:]))


def frame_starts(raw: bytes) -> list[int]:
    starts = [0]
    while starts[-1] < len(raw):
        starts.append(starts[-1] + 16 + struct.unpack_from("<Q", raw, starts[-1] + 4)[0])
    return starts


@pytest.mark.parametrize("end", [False, True], ids=["killed", "closed"])
def test_a_cut_rank_log_seals_to_whole_steps(small: Path, tmp_path: Path, end: bool) -> None:
    """Sealing a rank log that was cut (at frame borders, beside them and at every 40th byte) keeps the whole steps."""
    whole, raw = content(Trace(small)), (small / "rank-00000.log").read_bytes()
    starts = frame_starts(raw)
    near = {s + d for s in starts for d in (-1, 0, 1, 15, 16, 17)}
    for cut in sorted({c for c in near if 0 <= c <= len(raw)} | set(range(0, len(raw), 40))):
        directory = copy(small, tmp_path / str(cut), end=end)
        (directory / "rank-00000.log").write_bytes(raw[:cut])
        seal(directory)
        check_prefix(directory, whole, sum(s <= cut for s in starts[1:]))


def test_any_cut_of_the_step_log_leaves_whole_steps(small: Path, tmp_path: Path) -> None:
    """Cut at any byte, the step log gives the steps whose lines are whole, live and sealed."""
    whole, raw = content(Trace(small)), (small / "steps.jsonl").read_bytes()
    live, sealed = copy(small, tmp_path / "live"), copy(small, tmp_path / "sealed")
    seal(sealed)
    for cut in range(len(raw) + 1):
        count = min(raw[:cut].count(b"\n"), 3)
        for directory in (live, sealed):
            (directory / "steps.jsonl").write_bytes(raw[:cut])
            if directory is live or cut % 9 == 0:
                check_prefix(directory, whole, count)
            assert Trace(directory).complete == (cut == len(raw))


@SETTINGS
@given(st.data())
def test_cuts_of_both_logs_leave_the_shorter_prefix(data: st.DataObject) -> None:
    """A machine that dies leaves each log cut anywhere: the steps that are whole in both are read, live and sealed."""
    with tempfile.TemporaryDirectory(dir=RAM) as folder:
        directory = write(Path(folder) / "t", SMALL, end=False)
        whole = content(Trace(directory))
        rank, steps = directory / "rank-00000.log", directory / "steps.jsonl"
        raw, lines = rank.read_bytes(), steps.read_bytes()
        cut, at = data.draw(st.integers(0, len(raw))), data.draw(st.integers(0, len(lines)))
        rank.write_bytes(raw[:cut])
        steps.write_bytes(lines[:at])
        count = min(sum(s <= cut for s in frame_starts(raw)[1:]), lines[:at].count(b"\n"))
        check_prefix(directory, whole, count)
        seal(directory)
        check_prefix(directory, whole, count)


def test_a_kill_before_the_first_step_leaves_an_empty_trace(tmp_path: Path) -> None:
    """A header alone, without logs, is a trace of no steps; sealing it changes nothing."""
    directory = write(tmp_path / "t", [], end=False)
    for name in ("steps.jsonl", "rank-00000.log"):
        (directory / name).unlink(missing_ok=True)
        seal(directory)
        assert Trace(directory).steps == [] and not Trace(directory).complete


# -- damage


def accepted(directory: Path, whole: list[Any]) -> str | None:
    """What a reader takes from a damaged trace: None for one error line or an honest, incomplete prefix."""
    try:
        trace = Trace(directory)
        found = content(trace)
    except ReproError as error:
        return "several lines" if "\n" in str(error) else None
    if found != whole[: len(found)]:
        return "other content"
    return "a complete trace" if trace.complete else None


@pytest.mark.parametrize("end", [False, True], ids=["killed", "closed"])
@pytest.mark.parametrize("mask", [0x01, 0x80, 0xFF])
def test_a_flipped_byte_of_the_rank_log_is_detected(small: Path, tmp_path: Path, mask: int, end: bool) -> None:
    """No flipped byte of the rank log gives other rows or a trace that still counts as complete."""
    whole = content(Trace(small))
    directory = copy(small, tmp_path / "t", end=end)
    log = directory / "rank-00000.log"
    raw = log.read_bytes()
    for at in range(len(raw)):
        log.write_bytes(raw[:at] + bytes([raw[at] ^ mask]) + raw[at + 1 :])
        assert accepted(directory, whole) is None, f"byte {at}"


@pytest.mark.parametrize("mask", [0x01, 0x02, 0x80])
def test_a_flipped_byte_of_the_step_log_is_detected(small: Path, tmp_path: Path, mask: int) -> None:
    """No flipped byte of a step's line (root, chain, number of signals, metrics) passes: one line says so."""
    whole = content(Trace(small))
    for sealed in (False, True):
        directory = copy(small, tmp_path / str(sealed))
        if sealed:
            seal(directory)
        log = directory / "steps.jsonl"
        raw = log.read_bytes()
        passed = []
        for at in range(raw.rindex(b"\n", 0, -1) + 1):
            if sealed and at % 4:
                continue
            log.write_bytes(raw[:at] + bytes([raw[at] ^ mask]) + raw[at + 1 :])
            if what := accepted(directory, whole):
                passed.append((raw[max(0, at - 20) : at + 1], what))
        assert passed == []


def test_a_flipped_byte_of_the_closing_line_is_detected(small: Path, tmp_path: Path) -> None:
    """No flipped byte of the closing line leaves a complete trace that ended for another reason."""
    directory = copy(small, tmp_path / "t")
    log = directory / "steps.jsonl"
    raw = log.read_bytes()
    passed = []
    for at in range(raw.rindex(b"\n", 0, -1) + 1, len(raw)):
        log.write_bytes(raw[:at] + bytes([raw[at] ^ 0x01]) + raw[at + 1 :])
        with suppress(ReproError):
            trace = Trace(directory)
            if trace.complete and trace.end != {"reason": "finished"}:
                passed.append(trace.end)
    assert passed == []


def test_a_flipped_byte_of_the_columns_is_detected(small: Path, tmp_path: Path) -> None:
    """No flipped byte of the sealed rows gives other rows: statistics, sketches and values are guarded, not only lanes.

    A byte that no row depends on may flip unseen.
    """
    directory = copy(small, tmp_path / "t")
    seal(directory)
    whole, columns = content(Trace(directory)), directory / "rank-00000.parquet"
    raw = columns.read_bytes()
    passed = []
    for at in range(0, len(raw), max(1, len(raw) // 500)):
        columns.write_bytes(raw[:at] + bytes([raw[at] ^ 0x01]) + raw[at + 1 :])
        if accepted(directory, whole) == "other content":
            passed.append(at)
    assert passed == []


@pytest.mark.parametrize("length", [0, 1, 100, -1, -9])
def test_cut_columns_are_refused(small: Path, tmp_path: Path, length: int) -> None:
    """A sealed file that was cut is one error line that names a cure, and the step log is still readable."""
    directory = copy(small, tmp_path / "t")
    seal(directory)
    columns = directory / "rank-00000.parquet"
    columns.write_bytes(columns.read_bytes()[:length])
    trace = Trace(directory)
    assert len(trace.steps) == 3
    with pytest.raises(ReproError, match="pull or record it again"):
        trace.rows(0)


@pytest.mark.parametrize(
    "text",
    ['{"a": 1}', "[]", "null", "3", "not json", '{"step": 0, "metrics": {"kl": "7ff8"}}'],
    ids=["keys", "list", "null", "number", "text", "short float"],
)
def test_a_line_that_is_no_step_is_one_error_line(tmp_path: Path, text: str) -> None:
    """Whatever stands in the step log instead of a step is one line that names the file and the cure."""
    directory = write(tmp_path / "t", SMALL[:1], end=False)
    with (directory / "steps.jsonl").open("a") as log:
        log.write(text + "\n")
    with pytest.raises(ReproError, match=r"steps.jsonl line 2 is damaged: record the trace again"):
        Trace(directory)


def test_steps_in_another_order_break_the_chain(small: Path, tmp_path: Path) -> None:
    """Removing, repeating or swapping lines of the step log is detected."""
    lines = (small / "steps.jsonl").read_bytes().splitlines(keepends=True)
    for k, order in enumerate([(1, 2, 3), (0, 2, 3), (0, 0, 1, 2, 3), (1, 0, 2, 3)]):
        directory = copy(small, tmp_path / str(k))
        (directory / "steps.jsonl").write_bytes(b"".join(lines[i] for i in order))
        with pytest.raises(ReproError, match="does not continue the chain"):
            Trace(directory)


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


@SETTINGS
@given(st.lists(ROWS, min_size=1, max_size=8, unique_by=lambda r: r.key), st.randoms(use_true_random=False))
def test_the_order_of_observation_plays_no_part(rows: list[Row], random: Any) -> None:
    """A step's root is the same in any order of observation; leaving one signal out, or in, changes it."""
    shuffled = list(rows)
    random.shuffle(shuffled)
    assert root(shuffled) == root(rows) != root(rows[1:])


@SETTINGS
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


@SETTINGS
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
