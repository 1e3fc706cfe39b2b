"""benchmarks/campaign: a share of every part holds, and the page is of what was kept."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import SOURCE

SCRIPT = SOURCE / "benchmarks" / "campaign" / "campaign.py"
PARTS = {
    "planted": 0.05, "clean": 0.05, "search": 0.05, "damage": 1, "kills": 0.01, "faults": 0.01, "hostile": 0.05,
    "large": 0.05,
}  # fmt: skip
"""The share of each part that is tried."""


def test_the_page_is_of_what_was_kept(tmp_path: Path) -> None:
    """It is written from the data beside it."""
    page = SOURCE / "docs" / "benchmarks" / "campaign.md"
    kept = page.with_suffix(".json")
    copy = tmp_path / "campaign.json"
    copy.write_text(kept.read_text() if kept.exists() else "{}")
    subprocess.run([sys.executable, str(SCRIPT), "--page", "--out", str(copy)], check=True)
    assert copy.with_suffix(".md").read_text() == page.read_text()


@pytest.mark.whole
@pytest.mark.parametrize("part", PARTS)
def test_a_share_of_each_part_holds(tmp_path: Path, part: str) -> None:
    """A twentieth of the campaign, all damaged files, a hundredth of kills and faults, drawn anew each day."""
    out = tmp_path / "campaign.json"
    line = [sys.executable, str(SCRIPT), part, "--share", str(PARTS[part]), "--jobs", "1", "--out", str(out)]
    line += ["--seed", time.strftime("%j")]  # a small share by one seed would be the same few tries for ever
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{line}: {done.stdout[-3000:]} {done.stderr[-3000:]}"
    assert all(promise["tried"] for promise in json.loads(out.read_text())[part]["promises"])


@pytest.mark.whole
def test_a_part_that_was_ended_goes_on(tmp_path: Path) -> None:
    """What was answered is kept, and nothing is said of a part before all of it is answered."""
    out, kept = tmp_path / "campaign.json", tmp_path / "kept"
    out.write_text('{"planted": {"promises": []}}')
    line = [sys.executable, str(SCRIPT), "planted", "--only", "plain loop", "--share", "0.01", "--out", str(out)]
    line += ["--resume", str(kept)]

    def done(*more: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([*line, *more], capture_output=True, text=True, check=False)

    ended = done("--limit", "0")
    assert ended.returncode == 3 and "0 of 11 changes" in ended.stdout
    assert json.loads(out.read_text()) == {"planted": {"promises": []}}
    assert done().returncode == 0
    (answers,) = kept.rglob("loop.jsonl")
    first = answers.read_text().splitlines()
    assert len(first) == 11
    answers.write_text("\n".join(first[:5]) + "\n" + first[5][:20])  # the last line was being written
    again = done()
    assert again.returncode == 0, again.stderr
    assert answers.read_text().splitlines()[:5] == first[:5] and len(answers.read_text().splitlines()) == 11
