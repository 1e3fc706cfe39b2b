"""What a bisect shows while it runs: one line for each event in a log, and a live view on a terminal."""

from __future__ import annotations

import os
import pty
import re
import select
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import environment
from history_kit import edit, note, start
from hypothesis import given
from hypothesis import strategies as st

from repro.live import bisect_view, line_of
from repro.text import duration
from repro_bisect.probe.progress import Event, Running


def on_a_terminal(command: list[str], cwd: Path) -> tuple[int, str]:
    """Exit code and everything that a terminal of 100 columns was sent."""
    master, slave = pty.openpty()
    size = {"COLUMNS": "100", "LINES": "40", "TERM": "xterm-256color"}
    process = subprocess.Popen(
        command, cwd=cwd, env=environment() | size, stdin=slave, stdout=subprocess.PIPE, stderr=slave
    )
    os.close(slave)
    seen, deadline = b"", time.monotonic() + 240
    while time.monotonic() < deadline:
        if select.select([master], [], [], 0.2)[0]:
            try:
                seen += os.read(master, 65536)
            except OSError:  # the other side is closed
                break
        elif process.poll() is not None:
            break
    os.close(master)
    process.communicate(timeout=60)
    return process.returncode, seen.decode(errors="replace")


@pytest.mark.whole
def test_a_terminal_shows_the_range_and_what_runs(tmp_path: Path) -> None:
    """The range is drawn with its verdicts, the probes under way with their steps, and every event stays as a line."""
    repo = start(tmp_path, case=None)
    good = repo.git("rev-parse", "HEAD")
    note(repo, "one")
    culprit = edit(repo, "scale = 1.0\n", "scale = 1.0 + 1e-6\n", "Warm up")
    note(repo, "two")
    slow = [sys.executable, "train.py", "--steps", "3"]
    code, shown = on_a_terminal(
        [sys.executable, "-m", "repro", "bisect", "--no-explain", f"{good}..HEAD", "--", *slow], repo.root
    )
    assert code == 0, shown
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown)
    assert re.search(r"GOOD \[[.?+x]{3}\] BAD", plain), plain
    assert re.search(r"probing [0-9a-f]{10}  step \d(/\d)?  \d+ s", plain), plain
    assert f"BAD  {culprit[:10]}" in plain
    assert "\x1b[?25h" in shown, "the cursor comes back"


@given(
    st.text("ab \n", max_size=9).map(str.strip), st.integers(0, 999), st.integers(0, 99), st.none() | st.floats(0, 1e6)
)
def test_an_event_is_one_line(text: str, suspects: int, rounds: int, left: float | None) -> None:
    """A log line says what happened and, while there are suspects, how many are left and for how long."""
    line = line_of(Event(text.replace("\n", " "), suspects=suspects, rounds=rounds, left=left))
    assert "\n" not in line
    assert (f"{suspects} suspects" in line) is (suspects > 1)


def test_a_log_says_now_and_then_how_far_a_long_probe_is(capsys: pytest.CaptureFixture[str]) -> None:
    """A log has a line for a probe after a minute and at times that double, whoever watches once a second."""
    with bisect_view() as watch:
        for second in range(1000):
            watch(
                Event(
                    "", running={"a" * 40: Running(second // 100, 10, float(second)), "b" * 40: Running(0, None, 9.0)}
                )
            )
        watch(Event("", running={"a" * 40: Running(1, 10, 5.0)}))  # probed once more
        watch(Event("", running={"a" * 40: Running(2, 10, 61.0)}))
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "  probing aaaaaaaaaa  step 0/10  60 s" and lines[-1] == "  probing aaaaaaaaaa  step 2/10  61 s"
    assert [re.findall(r"step (\d)", line) for line in lines[1:-1]] == [["1"], ["2"], ["4"], ["9"]], lines


def test_durations_are_for_people() -> None:
    """Seconds up to two minutes, then minutes, then hours."""
    assert [duration(s) for s in (0.4, 8, 119, 120, 3599, 3600, 7500)] == [
        "0 s", "8 s", "119 s", "2 min", "1 h 0 min", "1 h 0 min", "2 h 5 min"
    ]  # fmt: skip
