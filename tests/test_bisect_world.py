"""What no commit holds decides numbers too: no commit is named for it, nor for what does not reproduce itself."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from conftest import Repo
from history_kit import edit, note, start

SCALE = "scale = 1.0\n"
COMMAND = ("--", sys.executable, "train.py", "--steps", "2")
NOISE = "scale = 1.0 + int.from_bytes(os.urandom(2)) * 1e-6\n"


def searched(repo: Repo, *arguments: str) -> tuple[int, str]:
    """Exit code and all that a search says."""
    done = repo.repro("bisect", "--no-explain", "-j", "1", *arguments)
    return done.returncode, done.stdout + done.stderr


def _write(repo: Repo, path: str, text: str) -> None:
    (repo.root / path).parent.mkdir(exist_ok=True)
    (repo.root / path).write_text(text)


def test_a_flaky_commit_is_no_culprit_of_a_pull_request(tmp_path: Path) -> None:
    """Of a branch whose search ends at a commit that differs from itself, none is named, and it is said why."""
    repo = start(tmp_path, case=None)
    good = repo.git("rev-parse", "HEAD")
    flaky = edit(repo, SCALE, NOISE, "Noise")
    edit(repo, NOISE, "scale = 2.0\n", "The culprit, and no noise")
    out = tmp_path / "out"
    done = repo.repro("report", "pr", f"{good}..HEAD", "--bisect", "--out", str(out), *COMMAND)
    (case,) = json.loads((out / "report.json").read_text())["results"]
    assert (done.returncode, case["verdict"], case["culprits"]) == (1, "moved", []), done.stderr
    assert case["unnamed"] == f"{flaky[:10]} does not reproduce itself: two replays of it differ"
    comment = (out / "comment.md").read_text()
    assert "Culprits" not in comment and "No commit is named: " in comment
    code, text = searched(repo, f"{good}..HEAD", *COMMAND)
    assert code == 3 and f"\n{flaky[:10]} is FLAKY: " in f"\n{text}"


@pytest.mark.parametrize("when", ["bitwise", "exit"])
def test_what_decides_lies_outside_of_the_path(tmp_path: Path, when: str) -> None:
    """Commits with the same code in ``--path`` that say otherwise, each again, are refused: none of them is named."""
    repo = start(tmp_path, case=None)
    _write(repo, "src/note", "1\n")
    _write(repo, "outside", "1.0\n")
    check = "if float(open('outside').read()) > 1: raise SystemExit(1)\n" if when == "exit" else ""
    train = (repo.root / "train.py").read_text().replace(SCALE, "scale = float(open('outside').read())\n")
    _write(repo, "train.py", train + check)
    good = repo.commit("Good")
    _write(repo, "src/note", "2\n")
    inside = repo.commit("Within the path, and harmless")
    _write(repo, "outside", "2.0\n")
    repo.commit("Outside of it, and the culprit")
    asked = ["--when", "exit"] if when == "exit" else []
    code, text = searched(repo, f"{good}..HEAD", *asked, "--path", "src", *COMMAND)
    assert code == 3, text
    last = text.splitlines()[-1]
    assert inside[:10] in last and "have the same code in src and say otherwise, each of them again" in last


@pytest.mark.parametrize("when", ["bitwise", "exit"])
def test_what_changed_between_two_searches_names_no_commit(tmp_path: Path, when: str) -> None:
    """A parent whose replays are all of an earlier search is replayed once more before its child is named."""
    repo, data = start(tmp_path, case=None), tmp_path / "data"
    check = f"if float(open({str(data)!r}).read()) > 1: raise SystemExit(1)\n" if when == "exit" else ""
    train = (repo.root / "train.py").read_text().replace(SCALE, f"scale = float(open({str(data)!r}).read())\n")
    _write(repo, "train.py", train + check)
    good = repo.commit("Good")
    asked = ["--when", "exit"] if when == "exit" else []
    edit(repo, "loss = (model(x)", "loss = 2 * (model(x)", "Moves")
    if when == "exit":
        edit(repo, check, "raise SystemExit(1)\n", "Fails")
    data.write_text("1.0")
    code, text = searched(repo, f"{good}..HEAD", *asked, *COMMAND)
    assert code == 0, text
    repo.git("checkout", "-q", "-B", "other", good)
    note(repo, "harmless")
    data.write_text("5.0")
    code, text = searched(repo, f"{good}..HEAD", *asked, *COMMAND)
    assert code == 3, text
    assert f"{good[:10]} is not what it was when an earlier search replayed it" in text.splitlines()[-1]
    if when == "bitwise":
        note(repo, "harmless too")
        done = repo.repro("report", "pr", f"{good}..HEAD", *COMMAND)
        assert done.returncode == 3 and "is not what it was when an earlier search" in done.stdout, done.stdout


def test_the_same_search_again_replays_nothing(tmp_path: Path) -> None:
    """What one search made of both sides together stands: resumed, it names the culprit without a replay."""
    repo = start(tmp_path, case=None)
    good = repo.git("rev-parse", "HEAD")
    note(repo, "before")
    culprit = edit(repo, SCALE, "scale = 2.0\n", "The culprit")
    for code, text in (searched(repo, f"{good}..HEAD", *COMMAND) for _ in range(2)):
        assert code == 0 and f"{culprit[:10]} moved the numbers" in text
    assert " 0 probes, 0 trained steps," in text
