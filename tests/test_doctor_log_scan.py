"""The reader of logs: one pass that misses nothing, whatever the blocks, and survives every file."""

from __future__ import annotations

import gzip
import io
import os
import tracemalloc
from pathlib import Path

import pytest
from doctor_log_kit import LOADED, PHRASES, actor, arguments, clean, engine, slime, step, write
from examples_kit import at_most
from hypothesis import given
from hypothesis import strategies as st

from repro.doctor.artefacts.kinds import Aside, Hit, Log, Series
from repro.doctor.artefacts.logs.asides import aside
from repro.doctor.artefacts.logs.files import log_files, read_log
from repro.doctor.artefacts.logs.scan import BEHIND, KEPT, NEAR, SHOWN, Scan, safe, scan
from repro.doctor.logs import LOG, RAY_SESSION
from repro_golden.base.errors import ReproError
from repro_golden.base.printed.lines import labelled


def naive(data: bytes, phrases: list[str]) -> Scan:
    """The same line by line."""
    lines = data.split(b"\n")
    lines = lines[:-1] if not lines[-1] else lines
    scan = Scan(len(data), len(lines), {p: [] for p in phrases}, dict.fromkeys(phrases, 0))
    offset = 0
    for number, line in enumerate(lines, 1):
        for phrase in phrases:
            start = line.find(phrase.encode())
            if start >= 0:
                scan.counts[phrase] += 1
                if scan.counts[phrase] <= KEPT:
                    end = start + len(phrase.encode())
                    scan.hits[phrase].append(Hit(number, offset, _shown(line, start, end), _why(line, start, end)))
        offset += len(line) + 1
    return scan


def _shown(line: bytes, start: int, end: int) -> str:
    if line.endswith(b"\r") and len(line) > end:
        line = line[:-1]
    if end <= SHOWN:
        return safe(line[: 4 * SHOWN]).strip()
    return safe(line[:160] + b" ... " + line[max(160, start - 60) : start + 160]).strip()


def _why(line: bytes, start: int, end: int) -> Aside:
    before = line[:start] if start <= NEAR else line[:160] + line[start - NEAR : start]
    behind = line[: -1 if line.endswith(b"\r") and len(line) > end else None][end : end + BEHIND]
    return aside(*(part.decode("utf-8", "replace") for part in (before, line[start:end], behind)))


TEXTS = st.lists(
    st.one_of(
        st.sampled_from(
            [
                b" 'it ",
                b"' ",
                b'INFO "',
                b"abc",
                b"ab",
                b"bca",
                b"\n",
                b"\r\n",
                b"\x1b[31m",
                b"\xff",
                b"\0",
                b"\xc3\xa9",
                b" ",
                b"aaaa",
            ]
        ),
        st.binary(max_size=6),
        st.sampled_from([b"x" * 300, b"y" * 1700, b"z" * 5000]),
    ),
    max_size=40,
).map(b"".join)


@given(
    TEXTS,
    st.lists(st.sampled_from(["abc", "ab", "bca", "cab", "a", "aa", "é", "\x1b[", "xy"]), unique=True, max_size=5),
    st.integers(1, 64),
)
def test_scan_equals_a_naive_reading(data: bytes, phrases: list[str], block: int) -> None:
    """Lines, offsets, texts and counts equal those of reading line by line, wherever the borders of blocks fall."""
    got, expected = scan(io.BytesIO(data), phrases, block=block, long=1), naive(data, phrases)
    assert (got.size, got.lines, got.counts) == (expected.size, expected.lines, expected.counts)
    assert got.hits == expected.hits
    assert all(data[:offset].count(b"\n") == line - 1 for line, offset in got.marks)


@pytest.mark.parametrize("block", [7, 64])
def test_phrases_across_pieces_of_a_long_line(block: int) -> None:
    """A line that is searched in pieces loses no phrase, wherever the pieces end, and shows what a whole one would."""
    for start in range(4000, 7000):
        data = b"begin " + b"z" * start + b"abc" + b"y" * 700 + b"\nabc"
        assert scan(io.BytesIO(data), ["abc", "zab"], block=block, long=1).hits == naive(data, ["abc", "zab"]).hits


@at_most(60)
@given(st.integers(0, 300), st.integers(1, 64), st.integers(0, 40))
def test_takers_get_every_line_once(lines: int, block: int, gap: int) -> None:
    """What takes lines gets each one that holds its phrase, beyond the hundred that are kept, once and whole."""
    data = b"".join(b"%d: two two %s\n%s" % (n, b"." * gap, b"-\n" * (n % 3)) for n in range(lines))
    taken: list[tuple[int, bytes]] = []
    scanned = scan(io.BytesIO(data), ["two"], takers={"two": lambda n, line: taken.append((n, line))}, block=block)
    expected = [(n, line) for n, line in enumerate(data.split(b"\n"), 1) if b"two" in line]
    assert taken == expected
    assert (scanned.counts["two"], len(scanned.hits["two"])) == (lines, min(lines, KEPT))


def test_memory_is_bounded_for_a_line_without_end(tmp_path: Path) -> None:
    """A line of 100 MB, with a phrase at its beginning, middle and end, is read in a few megabytes."""
    path = tmp_path / "one.log"
    with path.open("wb") as file:
        file.write(b"NCCL error " + b"x" * 50_000_000 + b"disk is full" + b"y" * 50_000_000 + b"at the end")
    tracemalloc.start()
    log = read_log(path, ("NCCL error", "disk is full", "at the end"))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 10_000_000
    assert (log.lines, dict(log.counts)) == (1, {"NCCL error": 1, "disk is full": 1, "at the end": 1})
    assert [log.hits[p][0].line for p in log.hits] == [1, 1, 1]
    assert "NCCL error" in log.hits["disk is full"][0].text
    assert "disk is full" in log.hits["disk is full"][0].text


def test_log_gives_metrics_arguments_and_lines(tmp_path: Path) -> None:
    """Metrics are without their prefixes, with the lines where they stand; Megatron's arguments are there."""
    lines = [
        *clean(),
        "critic-step 2: {'train/critic-value_loss': 0.25}",
        "\r 10%|#  | 1/9\r" + slime("step 9: {'loss': 1}"),
    ]
    path = write(tmp_path / "train.log", lines)
    log = read_log(path, PHRASES)
    series = log.series
    assert isinstance(log, Log)
    assert isinstance(series, Series)
    assert series.flags == {"colocate": "True", "load": "/ckpt/qwen", "rollout_batch_size": "32"} | {
        "sglang_mem_fraction_static": "0.8"
    }
    assert series.steps[0] == {"loss": 0.5, "grad_norm": 0.1}
    assert series.steps[2]["critic-value_loss"] == 0.25
    assert series.steps[9] == {"loss": 1.0}
    assert series.rollouts[1]["raw_reward"] == 0.5
    assert series.rollouts[1]["perf/step_time"] == 10.0
    for (kind, number), line in series.lines.items():
        (text,) = log.around(line, line)
        label = labelled(text)
        assert label is None or (label.label, label.number) == (kind, number)
        assert f"{kind} {number}" in text


@at_most(50)
@given(st.lists(st.tuples(st.integers(0, 6), st.sampled_from(["step", "rollout", "perf"]), st.floats())), st.booleans())
def test_series_equals_reading_each_line(rows: list[tuple[int, str, float]], noise: bool) -> None:
    """The metrics are those that `labelled` reads of every line, the first one where a number comes twice."""
    import tempfile

    lines = [slime(f"{kind} {n}: {{'train/x': {value!r}}}") for n, kind, value in rows]
    lines = [part for line in lines for part in ([line, "{'a': {'b': 1}} noise: {'x': 2}"] if noise else [line])]
    steps: dict[int, float] = {}
    for n, kind, value in rows:
        if kind == "step":
            steps.setdefault(n, value)
    with tempfile.TemporaryDirectory() as folder:
        series = read_log(write(Path(folder) / "a.log", lines), ()).series
    assert {n: repr(m["x"]) for n, m in series.steps.items()} == {n: repr(v) for n, v in steps.items()}


def test_around_reads_the_same_lines_again(tmp_path: Path) -> None:
    """Lines are read again by number, near block borders, in gzip, with carriage returns, and beyond the end."""
    lines = [f"line {n} {'x' * (n % 97)}" for n in range(1, 40_001)]
    data = "\r\n".join(lines).encode()
    (tmp_path / "a.log").write_bytes(data)
    (tmp_path / "a.log.gz").write_bytes(gzip.compress(data))
    for name in ("a.log", "a.log.gz"):
        log = read_log(tmp_path / name, ("line 39999 ",))
        assert (log.lines, log.size) == (40_000, len(data))
        for first in (1, 777, 21_000, 39_995):
            assert log.around(first, first + 5) == [line.rstrip() for line in lines[first - 1 : first + 5]]
        assert log.around(-5, 1) == [lines[0].rstrip()]
        assert log.around(40_001, 50_000) == []
        assert len(log.around(1, 40_000)) == 1000
        (hit,) = log.hits["line 39999 "]
        assert hit.line == 39_999
        assert data[hit.offset :].startswith(b"line 39999 ")


@pytest.mark.parametrize(
    ("name", "data", "fits"),
    [
        ("train.log", b"", True),
        ("worker-0a1b-01000000-123.out", b":job_id:01000000\n", True),
        ("raylet.out.3", b"x", True),
        ("slurm-12.err", b"x", True),
        ("train.log.1", b"x", True),
        ("train.log.gz", gzip.compress(b"step 1", mtime=0), True),
        ("core.log", b"\x7fELF\x01\x02", False),
        ("a.out", b"\x7fELF\x01\x02", False),
        ("zeros.log", b"\0" * 5000, False),
        ("model.log", b"PK\x03\x04abc", False),
        ("notes.txt", b"buy milk\n", False),
        ("latest_checkpointed_iteration.txt", b"12", False),
        ("requirements.txt", b"torch==2.9.1\nray==2.52.0\n", False),
        ("output.txt", b"[2026-11-20 15:47:01] model.py:918 - step 0: {'a': 1}\n", True),
        ("nohup", b"Traceback (most recent call last):\n", True),
        ("run", b"#!/bin/bash\necho INFO\n", False),
        ("data", b'{"prompt": "x", "date": "2026-11-20 15:47:01"}\n', False),
        ("train.py", b"# 2026-11-20 15:47:01 INFO\n", False),
        ("data.jsonl", b'{"a": 1}\n', False),
    ],
)
def test_what_is_taken_for_a_log(name: str, data: bytes, fits: bool, tmp_path: Path) -> None:
    """Logs are known by name and by what they begin with; scripts, data, archives and lists of packages are none."""
    (tmp_path / name).write_bytes(data)
    assert LOG.fits(tmp_path / name) is fits
    assert not RAY_SESSION.fits(tmp_path / name)


def test_ray_session_gives_each_log_with_its_rank(tmp_path: Path) -> None:
    """A session's logs are found, rotated and packed ones too; ranks come from names and lines; no link is followed."""
    logs = tmp_path / "session_2026-11-20_15-47-01_123" / "logs"
    (logs / "old").mkdir(parents=True)
    write(
        logs / "worker-ab-01000000-7.err",
        [f"[2026-11-20 15:47:01.707 actor_cell0_rank3] x.py:1 - {n}" for n in range(3)],
    )
    write(logs / "worker-ab-01000000-7.out", [":job_id:01000000", step(0)])
    write(logs / "raylet.out.1", ["[2026-11-20 15:47:01,054 W 74 74] (raylet) a"])
    write(logs / "old" / "rank12.log", ["x"])
    (logs / "gcs_server.out.gz").write_bytes(gzip.compress(b"hello\n", mtime=0))
    (logs / "worker-empty.out").write_bytes(b"")
    (logs / "monitor.log").symlink_to(logs / "raylet.out.1")
    (logs / "loop").symlink_to(logs)
    session = logs.parent
    assert RAY_SESSION.fits(session)
    assert RAY_SESSION.fits(logs)
    assert not RAY_SESSION.fits(tmp_path)
    names = [path.name for path in log_files(session)]
    assert len(names) == len(set(names)) == 7
    latest = tmp_path / "session_latest"
    latest.symlink_to(session)
    for folder in (session, latest):
        ranks = {path.name: read_log(path, ()).rank for path in log_files(folder)}
        assert ranks["worker-ab-01000000-7.err"] == 3
        assert ranks["rank12.log"] == 12
        assert ranks["raylet.out.1"] is None


def test_corrupt_and_absent_files_are_errors_of_one_line(tmp_path: Path) -> None:
    """Cut gzip, folders, pipes, loops of links and files that are gone raise the tool's own error, and nothing else."""
    packed = gzip.compress(os.urandom(100_000))
    (tmp_path / "cut.log").write_bytes(packed[:50_000])
    (tmp_path / "bad.log").write_bytes(packed[:500] + b"\xff" * 99 + packed[600:])
    (tmp_path / "loop.log").symlink_to(tmp_path / "loop.log")
    (tmp_path / "folder.log").mkdir()
    os.mkfifo(tmp_path / "pipe.log")
    for name in ("cut.log", "bad.log", "loop.log", "folder.log", "pipe.log", "gone.log", "nul\0.log"):
        LOG.fits(tmp_path / name)
        RAY_SESSION.fits(tmp_path / name)
        with pytest.raises(ReproError) as raised:
            read_log(tmp_path / name, ("x",))
        assert "\n" not in str(raised.value)


@at_most(60)
@given(st.binary(max_size=2000), st.sampled_from([b"", b"\x1f\x8b", b"step 1: {'a': ", b"  load ......"]))
def test_any_bytes_are_a_log_or_an_error(data: bytes, head: bytes) -> None:
    """Whatever a file holds, the reader gives a log or its own error, and what it shows steers no terminal."""
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "a.log")
        path.write_bytes(head + data)
        LOG.fits(path)
        try:
            log = read_log(path, ("a", "\u00e9", " "))
        except ReproError:
            return
        shown = [hit.text for hits in log.hits.values() for hit in hits] + log.around(1, 100)
        assert all(text.isprintable() and len(text) <= SHOWN for text in shown)


def test_all_artefacts_of_a_log(tmp_path: Path) -> None:
    """The reader gives the log and its numbers; a log without numbers gives itself alone."""
    kinds = [
        type(artefact)
        for artefact in LOG.read(write(tmp_path / "train.log", [*arguments(a=1), LOADED, actor(step(0))]))
    ]
    assert kinds == [Log, Series]
    assert [type(artefact) for artefact in LOG.read(write(tmp_path / "b.log", [engine("hello")]))] == [Log]
