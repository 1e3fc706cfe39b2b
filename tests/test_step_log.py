"""The index of the step log, row groups of several steps, sealing while recording, and traces of older formats."""

from __future__ import annotations

import json
import math
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from trace_kit import HEADER, SMALL, content, copy, tensor_row, write

from repro.__main__ import main
from repro_golden.base.errors import ReproError
from repro_golden.compare.traces import first_difference
from repro_golden.trace import Trace, TraceWriter, columns, seal
from repro_golden.trace.step_log import IndexedSteps
from repro_golden.trace.writer import metric_row

STEPS = 50


@pytest.fixture(scope="module")
def long(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sealed trace of many small steps."""
    folder = write(tmp_path_factory.mktemp("long") / "trace", many())
    seal(folder)
    return folder


def many(moved: int = STEPS) -> list[list]:
    """Steps of which those from `moved` on are others."""
    return [
        [metric_row("loss", "loss", step + (step >= moved)), tensor_row("grad", "w", bytes([step] * (step % 4)))]
        for step in range(STEPS)
    ]


@pytest.mark.parametrize("number", [1, 2])
def test_an_older_trace_reads_as_before(tmp_path: Path, number: int) -> None:
    """Format 1 had a row group for each step and no index, 2 another index and the chain in each line."""
    old = Trace(Path(__file__).parent / "fixtures" / f"trace_format_{number}")
    assert json.loads((old.directory / "header.json").read_text())["format"] == number
    assert not isinstance(old.steps, IndexedSteps)  # an index of today's form alone is used
    assert [[row.key for row in old.rows(i)] for i in range(len(old.steps))] == [[r.key for r in s] for s in SMALL]
    assert old.end == {"reason": "finished"} and len(content(old)) == len(SMALL)
    unindexed = copy(old.directory, tmp_path / "t")
    (unindexed / "steps.index").unlink(missing_ok=True)
    assert content(Trace(unindexed)) == content(old) == content(Trace(write(tmp_path / "today", SMALL)))


@pytest.mark.parametrize("order", [(1, 2, 3), (0, 2, 3), (0, 0, 1, 2, 3), (1, 0, 2, 3)], ids=str)
def test_lines_of_an_older_log_have_one_order(tmp_path: Path, order: tuple[int, ...]) -> None:
    """Where each line has its chain, one that is removed, repeated or moved is told as in a log of today."""
    folder = copy(Path(__file__).parent / "fixtures" / "trace_format_2", tmp_path / "t")
    lines = (folder / "steps.jsonl").read_bytes().splitlines(keepends=True)
    (folder / "steps.jsonl").write_bytes(b"".join(lines[i] for i in order))
    with pytest.raises(ReproError, match="damaged or out of order"):
        Trace(folder)


def test_row_groups_hold_several_steps(long: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """However many steps a row group holds, each reads the same, in any order."""
    expected = content(Trace(long))
    for size in (1, 7, 1000):
        monkeypatch.setattr(columns, "_ROWS", size)
        folder = write(tmp_path / str(size), many())
        seal(folder)
        trace, order = Trace(folder), list(range(STEPS))
        random.Random(size).shuffle(order)
        groups = trace._columns._file.num_row_groups
        assert groups == {1: STEPS, 7: groups, 1000: 1}[size]
        assert {i: trace.rows(i) for i in order} == {i: Trace(long).rows(i) for i in order}
        assert content(trace) == expected


def test_a_log_with_an_index_is_searched_without_its_lines(long: Path, tmp_path: Path) -> None:
    """The first difference of two traces is found by reading few lines of either, and is the right one."""
    folder = write(tmp_path / "other", many(31))
    seal(folder)
    a, b = Trace(long), Trace(folder)
    assert isinstance(a.steps, IndexedSteps) and a.steps._every is None
    divergence = first_difference(a, b)
    assert divergence is not None and (divergence.step, divergence.name) == (31, "loss")
    assert a.steps._every is None and b.steps._every is None
    assert a.end == {"reason": "finished"} and a.complete is (len(a.steps) == HEADER.steps)


@pytest.mark.parametrize("damaged", ["steps.index", "steps.jsonl"])
def test_an_index_that_does_not_fit_its_log_says_nothing(long: Path, tmp_path: Path, damaged: str) -> None:
    """A flipped byte of either and a cut of the index: the trace says what it said, or one line that it is damaged."""
    expected, raw = content(Trace(long)), (long / damaged).read_bytes()
    for at in random.Random(3).sample(range(len(raw)), 60):
        folder = copy(long, tmp_path / f"{at}")
        for changed in (raw[:at] + bytes([raw[at] ^ 4]) + raw[at + 1 :], raw[:at]):
            (folder / damaged).write_bytes(changed)
            try:
                trace = Trace(folder)
            except ReproError:
                assert damaged == "steps.jsonl"
                continue
            assert content(trace) == expected[: len(trace.steps)]
            assert damaged == "steps.jsonl" or len(trace.steps) == STEPS


def test_an_index_that_somebody_made_up_is_told_in_one_line(long: Path, tmp_path: Path) -> None:
    """Its digests are right, and its lines are where no step is: no traceback, and no step of it is read."""
    from repro_golden.trace import step_log

    folder = copy(long, tmp_path / "made-up")
    raw = (folder / "steps.index").read_bytes()
    magic, count, end, of_log, _ = step_log._HEAD.unpack_from(raw)
    made_up = step_log._COUNT.pack(7) * count + step_log._COUNT.pack(1) * count + bytes(16 * count)
    (folder / "steps.index").write_bytes(
        step_log._HEAD.pack(magic, count, end, of_log, step_log._digest(made_up)) + made_up
    )
    with pytest.raises(ReproError, match="is not where its index says"):
        Trace(folder).rows(3)


def test_columns_that_are_written_beside_the_log_are_those_of_sealing(long: Path, tmp_path: Path) -> None:
    """A trace that was sealed while it was recorded is the same; one that broke off leaves no part of a file."""
    for name in ("whole", "broken"):
        writer = TraceWriter(tmp_path / name, HEADER, sealing=True)
        for number, rows in enumerate(many()):
            for row in rows:
                writer.add(row)
            writer.end_step(number)
        if name == "whole":
            writer.close({"reason": "finished"})
            assert (tmp_path / name / "rank-00000.parquet").exists()
        writer.let_go()
        seal(tmp_path / name)
        assert content(Trace(tmp_path / name)) == content(Trace(long))
        assert {path.name for path in (tmp_path / name).iterdir()} == {path.name for path in long.iterdir()}


def test_what_a_killed_recorder_left_of_its_columns_is_written_anew(long: Path, tmp_path: Path) -> None:
    """The rank's log is what counts until the trace is sealed."""
    folder = write(tmp_path / "killed", many())
    (folder / "rank-00000.part").write_bytes(b"PAR1 cut off")
    seal(folder)
    assert content(Trace(folder)) == content(Trace(long))
    assert {path.name for path in folder.iterdir()} == {path.name for path in long.iterdir()}


def test_a_trace_that_grows_is_read_on(tmp_path: Path) -> None:
    """Each step is there as soon as it is written, and what was read before stays."""
    writer = TraceWriter(tmp_path / "live", HEADER)
    trace = Trace(tmp_path / "live")
    for number, rows in enumerate(many()):
        for row in rows:
            writer.add(row)
        record = writer.end_step(number)
        trace.more()
        assert trace.steps[number] == record and len(trace.steps) == number + 1
        assert [row.key for row in trace.rows(number)] == [row.key for row in rows]
    writer.close({"reason": "finished"})
    trace.more()
    assert trace.end == {"reason": "finished"}


def test_whether_any_step_shows_a_signal(long: Path, tmp_path: Path) -> None:
    """It is told of a sealed trace and of one that is not, by phase and name."""
    for trace in (Trace(long), Trace(write(tmp_path / "live", many()))):
        assert trace.shows("loss", "loss") and not trace.shows("forward", "loss") and not trace.shows("loss", "los")


@pytest.mark.parametrize("sealed", [True, False])
def test_equal_traces_that_are_not_finite(tmp_path: Path, capsys: pytest.CaptureFixture[str], sealed: bool) -> None:
    """NaN agrees with nothing, in a metric and in a tensor; the infinities of a mask beside the parameters do."""
    infinite = replace(tensor_row("update", "module/net/mask", b"\0" * 4), nonfinite=4)
    steps = {
        "mask": [[metric_row("loss", "loss", 1.0), infinite]] * 2,
        "metric": [[metric_row("loss", "loss", 1.0)], [metric_row("loss", "loss", math.nan)]],
        "tensor": [[infinite], [infinite, replace(tensor_row("grad", "w", b"ab"), nonfinite=1)]],
    }
    for name, rows in steps.items():
        sides = [write(tmp_path / f"{name}-{side}", rows) for side in "ab"]
        for side in sides if sealed else ():
            seal(side)
        code = main(["diff", *map(str, sides), "--json"])
        told = json.loads(capsys.readouterr().out)["nonfinite"]
        first = {"metric": (1, "loss", "loss"), "tensor": (1, "grad", "w")}.get(name)
        assert (code, told) == (
            int(first is not None),
            first and dict(zip(("step", "phase", "signal"), first, strict=True)),
        )


def test_sealing_looks_for_no_pandas(tmp_path: Path) -> None:
    """Pyarrow imports it, where it is installed, as soon as it is given an array that it did not make itself."""
    write(tmp_path / "t", many())
    code = (
        "import importlib.abc, sys\n"
        "class Trap(importlib.abc.MetaPathFinder):\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        assert name != 'pandas'\n"
        "sys.meta_path.insert(0, Trap())\n"
        "from pathlib import Path\n"
        "from repro_golden.trace import Trace, seal\n"
        f"seal(Path({str(tmp_path / 't')!r}))\n"
        f"print(len(Trace(Path({str(tmp_path / 't')!r})).rows(3)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "2\n"), done.stderr
