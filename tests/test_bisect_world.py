"""What no commit holds decides numbers too: no commit is named for it, nor for what does not reproduce itself."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from conftest import Repo
from history_kit import TRAIN, edit, note, start

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


@pytest.mark.whole
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


@pytest.mark.whole
@pytest.mark.parametrize("commits", [1, 2])
@pytest.mark.parametrize("steps", [3, 9])
def test_no_search_for_numbers_takes_back_that_steps_are_others(tmp_path: Path, steps: int, commits: int) -> None:
    """HEAD makes other steps than BASE, with equal numbers: that stays the verdict, and nothing clears the code."""
    repo = start(tmp_path, case=None)
    good = repo.git("rev-parse", "HEAD")
    edit(repo, "options.steps)", f"{steps})", "Other steps")
    if commits > 1:
        edit(repo, SCALE, "scale = 1.0 + 0.0\n", "Nothing")
    out = tmp_path / "out"
    done = repo.repro("report", "pr", f"{good}..HEAD", "--bisect", "--out", str(out), *COMMAND)
    (case,) = json.loads((out / "report.json").read_text())["results"]
    assert (done.returncode, case["verdict"], len(case["culprits"])) == (1, "moved", 2 - commits), done.stderr
    assert case["unnamed"] == ("" if commits == 1 else "a search compares the steps that both sides make, which agree")


@pytest.mark.parametrize("when", ["bitwise", "exit", pytest.param("slow", marks=pytest.mark.whole)])
def test_what_decides_lies_outside_of_the_path(tmp_path: Path, when: str) -> None:
    """Commits with the same code in ``--path`` that say otherwise, each again, are refused: none of them is named.

    Steps that take longer than a start have probes end as soon as they have their answer.
    """
    repo = start(tmp_path, case=None)
    _write(repo, "src/note", "1\n")
    _write(repo, "outside", "1.0\n")
    check = "if float(open('outside').read()) > 1: raise SystemExit(1)\n" if when == "exit" else ""
    pause = "    __import__('time').sleep(1.5)\n" if when == "slow" else ""
    train = (repo.root / "train.py").read_text().replace(SCALE, f"scale = float(open('outside').read())\n{pause}")
    _write(repo, "train.py", train + check)
    good = repo.commit("Good")
    _write(repo, "src/note", "2\n")
    inside = repo.commit("Within the path, and harmless")
    _write(repo, "outside", "2.0\n")
    repo.commit("Outside of it, and the culprit")
    asked = ["--when", "exit"] if when == "exit" else []
    command = (*COMMAND[:-1], "5" if when == "slow" else "2")
    code, text = searched(repo, f"{good}..HEAD", *asked, "--path", "src", *command)
    assert code == 3, text
    last = text.splitlines()[-1]
    assert inside[:10] in last and "have the same code in src, train.py and say otherwise, each of them again" in last


@pytest.mark.parametrize("when", [pytest.param("bitwise", marks=pytest.mark.whole), "exit"])
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
    code, text = searched(repo, f"{good}..HEAD", *asked, *COMMAND)  # nor does that change what is said
    assert code == 3 and "is not what it was when an earlier search" in text.splitlines()[-1], text
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


def test_branches_that_were_merged_into_each_other(tmp_path: Path) -> None:
    """GOOD has what moved the numbers before it was merged: the merge base that has it too leads to the culprit."""
    repo = start(tmp_path, case=None)
    repo.git("checkout", "-q", "-b", "release")
    shared = edit(repo, SCALE, "scale = 2.0\n", "Moves, and is in both")
    repo.git("checkout", "-q", "main")
    (repo.root / "note").write_text("plain")
    plain = repo.commit("Plain")
    repo.git("checkout", "-q", "release")
    repo.git("merge", "-q", "--no-ff", "-m", "Release merges main", plain)
    good = repo.git("rev-parse", "HEAD")
    repo.git("checkout", "-q", "main")
    repo.git("merge", "-q", "--no-ff", "-m", "Main merges the release", shared)
    culprit = edit(repo, "scale = 2.0\n", "scale = 3.0\n", "The culprit")
    code, text = searched(repo, f"{good}..HEAD", *COMMAND)
    if code:  # git may begin with either merge base
        assert f"`repro bisect {shared[:10]}..{culprit[:10]}` begins at another one" in text, text
        code, text = searched(repo, f"{shared}..HEAD", *COMMAND)
    assert code == 0 and f"{culprit[:10]} moved the numbers" in text


def test_a_bad_end_that_moves_by_itself_is_told(tmp_path: Path) -> None:
    """The culprit before it is named, and that nothing is known of what comes after."""
    repo = start(tmp_path, case=None)
    good = repo.git("rev-parse", "HEAD")
    culprit = edit(repo, SCALE, "scale = 2.0\n", "The culprit")
    edit(repo, "scale = 2.0\n", NOISE.replace("1.0", "2.0"), "Noise")
    done = repo.repro("bisect", "--no-explain", "-j", "1", f"{good}..HEAD", *COMMAND)
    assert done.returncode == 0 and f"{culprit[:10]} moved the numbers" in done.stdout, done.stderr
    assert f"whether commits after {culprit[:10]} move the numbers is not known: two replays of BAD" in done.stdout


def test_a_command_is_given_where_it_runs(tmp_path: Path) -> None:
    """A file of another folder, or the checkout's own by its path, is refused with what to write.

    So is one that lies beside the checkout, by a path that means nothing from a worktree.
    """
    repo = start(tmp_path, case=None)
    _write(repo, "sub/train.py", "raise SystemExit(1)\n")
    repo.commit("Another program of this name")
    below = Repo(repo.root / "sub")
    done = below.repro("bisect", "HEAD~1..HEAD", *COMMAND)
    line = done.stderr.splitlines()[-1]
    assert done.returncode == 2 and "write sub/train.py, or where it is to run here, sh -c 'cd sub && " in line, line
    done = repo.repro("bisect", "HEAD~1..HEAD", "--", sys.executable, str(repo.root / "train.py"))
    assert done.returncode == 2 and "and not its own; write train.py instead" in done.stderr
    (tmp_path / "hp.json").write_text("{}")
    _write(repo, "sub/train.py", "open('../../hp.json')\nraise SystemExit(1)\n")
    repo.commit("It reads what lies beside the checkout")
    note(repo, "Another", "sub/train.py")
    (tmp_path / "drive.py").write_text("raise SystemExit(1)\n")
    inside = ["sh", "-c", f"cd sub && {sys.executable} train.py"]
    for words, out in ((inside, "../../hp.json"), ([sys.executable, "../drive.py"], "../drive.py")):
        done = repo.repro("bisect", "HEAD~1..HEAD", "-j", "1", "--", *words)
        fix = f"; {out} leads out of a worktree, which lies elsewhere than your checkout: write "
        assert done.stderr.rstrip().endswith(f"{fix}{tmp_path / Path(out).name}"), done.stderr


def test_a_parent_without_the_code_is_no_error(tmp_path: Path) -> None:
    """A commit that brought the path on a branch from before there was any is compared with GOOD."""
    repo = Repo(tmp_path / "repo")
    repo.root.mkdir()
    repo.git("init", "--quiet", "--initial-branch=main")
    _write(repo, "README", "nothing yet")
    before = repo.commit("Before")
    _write(repo, "train.py", TRAIN)
    good = repo.commit("Good")
    repo.git("checkout", "-q", "-b", "side", before)
    _write(repo, "train.py", TRAIN.replace(SCALE, "scale = 2.0\n"))
    culprit = repo.commit("Brings another one")
    repo.git("checkout", "-q", "main")
    repo.git("merge", "-q", "--no-ff", "-X", "theirs", "-m", "Merge", culprit)
    code, text = searched(repo, f"{good}..HEAD", "--path", "train.py", *COMMAND)
    assert "Traceback" not in text and (code, f"{culprit[:10]} moved the numbers" in text) == (0, True), text
