"""Traces that were cut off or damaged: what is whole is read, what was changed is refused."""

from __future__ import annotations

import json
import os
import struct
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from trace_kit import (
    RAM,
    SMALL,
    check_prefix,
    content,
    copy,
    write,
)

from repro_golden.base.errors import ReproError
from repro_golden.compare.traces import compare
from repro_golden.trace import Trace, dump_path, read_dump, seal


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """A folder in memory."""
    with tempfile.TemporaryDirectory(dir=RAM) as folder:
        yield Path(folder)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("small") / "trace", SMALL)


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
        read_back = content(trace)
    except ReproError as error:
        return "several lines" if "\n" in str(error) else None
    if read_back != whole[: len(read_back)]:
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


@pytest.mark.whole
@pytest.mark.parametrize("mask", [0x01, 0x10, 0x80])
def test_a_flipped_byte_of_the_columns_is_detected(small: Path, tmp_path: Path, mask: int) -> None:
    """No flipped byte of the sealed rows gives other rows, nor an error of another kind than one line.

    All of the footer, which says where and of what type everything is, and each 40th byte before it. A byte that no
    row depends on may flip unseen.
    """
    directory = copy(small, tmp_path / "t")
    seal(directory)
    whole, columns = content(Trace(directory)), directory / "rank-00000.parquet"
    raw = columns.read_bytes()
    footer = len(raw) - 8 - struct.unpack_from("<I", raw, len(raw) - 8)[0]
    passed = []
    for at in (*range(0, footer, 40), *range(footer, len(raw))):
        columns.write_bytes(raw[:at] + bytes([raw[at] ^ mask]) + raw[at + 1 :])
        if accepted(directory, whole) not in (None, "a complete trace"):
            passed.append(at)
    assert passed == []


@pytest.mark.parametrize("mask", [0x01, 0x10, 0x80])
def test_a_flipped_byte_of_the_header_is_detected(small: Path, tmp_path: Path, mask: int) -> None:
    """No flipped byte of the header gives another header: who ran, on what, for how many steps."""
    directory = copy(small, tmp_path / "t")
    whole, header = Trace(directory).header, directory / "header.json"
    raw = header.read_bytes()
    passed = []
    for at in range(len(raw)):
        header.write_bytes(raw[:at] + bytes([raw[at] ^ mask]) + raw[at + 1 :])
        with suppress(ReproError):
            if Trace(directory).header != whole:
                passed.append(raw[max(0, at - 20) : at + 1])
    assert passed == []


def test_a_header_without_a_digest_is_read(small: Path, tmp_path: Path) -> None:
    """Traces that were written before headers carried one are read as before."""
    directory = copy(small, tmp_path / "t")
    header = directory / "header.json"
    raw = json.loads(header.read_text())
    del raw["check"]
    header.write_text(json.dumps(raw))
    assert Trace(directory).header == Trace(small).header


def test_a_dump_that_was_changed_is_no_dump(tmp_path: Path) -> None:
    """A dump is taken for the tensor that its row stands for, or not at all: no size is told of another one."""
    trace = Trace(write(tmp_path / "t", SMALL))
    row = next(row for row in trace.rows(0) if row.name == "w")
    path = dump_path(trace.directory, 0, row.phase, row.name)
    assert read_dump(trace, 0, row) is None
    path.parent.mkdir()
    path.write_bytes(bytes(5))
    assert read_dump(trace, 0, row) == bytes(5)
    for damaged in (b"\1" + bytes(4), bytes(4), bytes(6)):
        path.write_bytes(damaged)
        assert read_dump(trace, 0, row) is None


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


@pytest.mark.parametrize("swap", [False, True], ids=["run", "baseline"])
@pytest.mark.parametrize("damage", ["cut", "empty", "gone", "other rows"])
def test_no_side_agrees_without_its_rows(small: Path, tmp_path: Path, damage: str, swap: bool) -> None:
    """Equal roots over rows that are damaged, missing or another run's are an error line, whichever side has them."""
    whole, broken = copy(small, tmp_path / "whole"), copy(small, tmp_path / "broken")
    other = write(tmp_path / "other", [[replace(row, sketch=b"\4") for row in rows] for rows in SMALL])
    for folder in (whole, broken, other):
        seal(folder)
    columns = broken / "rank-00000.parquet"
    if damage == "gone":
        columns.unlink()
    else:
        rows = (other / columns.name).read_bytes() if damage == "other rows" else columns.read_bytes()
        columns.write_bytes(rows[: {"cut": -9, "empty": 0}.get(damage)])
    assert compare(Trace(whole), Trace(copy(whole, tmp_path / "again"))).equal
    a, b = (broken, whole) if swap else (whole, broken)
    with pytest.raises(ReproError, match=r"record it again|does not match its root"):
        compare(Trace(a), Trace(b))


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
    with pytest.raises(ReproError, match=r"steps.jsonl line 2 is damaged or out of order: record the trace"):
        Trace(directory)


def test_steps_in_another_order_break_the_chain(small: Path, tmp_path: Path) -> None:
    """Removing, repeating or swapping lines of the step log is detected."""
    lines = (small / "steps.jsonl").read_bytes().splitlines(keepends=True)
    for k, order in enumerate([(1, 2, 3), (0, 2, 3), (0, 0, 1, 2, 3), (1, 0, 2, 3)]):
        directory = copy(small, tmp_path / str(k))
        (directory / "steps.jsonl").write_bytes(b"".join(lines[i] for i in order))
        with pytest.raises(ReproError, match="damaged or out of order"):
            Trace(directory)


# -- made to take the machine


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a":' * 100_000], ids=["lists", "objects"])
@pytest.mark.parametrize("name", ["header.json", "steps.jsonl"])
def test_json_that_is_nested_too_deeply_is_one_error_line(small: Path, tmp_path: Path, name: str, text: str) -> None:
    """It is damaged like any other."""
    directory = copy(small, tmp_path / "t")
    (directory / name).write_text(text + "\n")
    with pytest.raises(ReproError, match=r"damaged|nested too deeply"):
        Trace(directory)


@pytest.mark.parametrize("name", ["chec+", "ccheck", "chain"])
def test_a_digest_under_another_name_is_damage(small: Path, tmp_path: Path, name: str) -> None:
    """A flipped bit in the digest's own name does not make a header of today one of those that had none."""
    directory = copy(small, tmp_path / "t")
    header = (directory / "header.json").read_text()
    assert header.count('"check":') == 1
    (directory / "header.json").write_text(header.replace('"check":', f'"{name}":'))
    with pytest.raises(ReproError, match=r"header.json is damaged \(its content is not what was written\)"):
        Trace(directory)


@pytest.mark.parametrize("name", ["header.json", "steps.jsonl", "rank-00000.log", "rank-00000.parquet"])
def test_a_pipe_in_the_place_of_a_file_is_not_waited_for(small: Path, tmp_path: Path, name: str) -> None:
    """Nobody may ever write to it."""
    directory = copy(small, tmp_path / "t")
    if name.endswith(".parquet"):
        seal(directory)
    (directory / name).unlink()
    os.mkfifo(directory / name)
    with pytest.raises(ReproError, match="no regular file"):
        Trace(directory).rows(0)


def test_columns_that_grow_are_refused(small: Path, tmp_path: Path) -> None:
    """A few KiB that stand for gigabytes, of one value in many rows or of rows without any, are not unpacked."""
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    directory = copy(small, tmp_path / "t")
    seal(directory)
    once = pa.array([bytes(16 << 20)], pa.binary())
    often = pa.DictionaryArray.from_arrays(pa.array([0] * 100, pa.int32()), once)
    many = {"step": pa.nulls(10_000_000, pa.int64()), "values": pa.nulls(10_000_000, pa.binary())}
    for columns in ({"values": often}, many):
        others = {name: pa.nulls(len(columns["values"]), pa.string()) for name in ("placement", "sketch")}
        table = pa.table(columns | others)
        pq.write_table(table, directory / "rank-00000.parquet", compression="zstd", row_group_size=1 << 30)
        with pytest.raises(ReproError, match=r"would take \d+ MiB, which no recording of its size does"):
            Trace(directory).rows(0)
