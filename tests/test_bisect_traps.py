"""Ways in which a bisect could name the wrong commit, or lose what it found, and does not."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import Repo, environment
from history_kit import CASE, TRAIN, edit, note, start

from repro_golden.case.command_line import CommandLine

SCALE = "scale = 1.0\n"
LOSS = r"loss=(?P<loss>\S+)"


def command(steps: int) -> tuple[str, ...]:
    """The trainer for so many steps."""
    return ("--", sys.executable, "train.py", "--steps", str(steps))


def bisect(repo: Repo, spec: str, *arguments: str, code: int = 0) -> tuple[dict[str, Any], str]:
    """JSON and progress of a bisect."""
    done = repo.repro("bisect", "--no-explain", spec, "--json", *arguments)
    assert done.returncode == code, done.stdout + done.stderr
    return json.loads(done.stdout), done.stderr


@pytest.mark.campaign
def test_drift_up_to_a_bound(tmp_path: Path) -> None:
    """Where each commit moves a metric a little, the one that crosses the bound is named, however small its step."""
    repo = start(tmp_path, case=None)
    good = repo.git("rev-parse", "HEAD")
    commits = [edit(repo, f"scale = {1 + k / 100}\n", f"scale = {1 + (k + 1) / 100}\n", f"drift {k}") for k in range(4)]
    # the loss grows with the square: 2, 4, 6 and 8 %
    result, progress = bisect(
        repo, f"{good}..HEAD", "--when", "metric:loss rtol=0.05", "--metric", LOSS, "-j", "1", *command(1)
    )
    assert result["culprit"]["commit"] == commits[2], progress
    assert "agrees with BAD's by" not in progress


@pytest.mark.campaign
def test_longer_traces_of_earlier_bisects(tmp_path: Path) -> None:
    """A probe is judged by the steps that matter now, not by further ones that an earlier bisect happened to train."""
    repo = start(tmp_path, case=None)
    good = repo.git("rev-parse", "HEAD")
    late = edit(repo, SCALE, "scale = 1.0 + 1e-6 * (step >= 3)\n", "Late")
    for n in range(3):
        note(repo, f"between {n}")
    between = repo.git("rev-parse", "HEAD")
    result, _ = bisect(
        repo, f"{good}..{between}", "-j", "1", *command(5)
    )  # journals whole traces of what comes after it
    assert result["culprit"]["commit"] == late
    early = edit(repo, "(step >= 3)", "(step >= 1)", "Early")
    note(repo, "last")
    result, progress = bisect(repo, f"{good}..HEAD", "-j", "1", *command(5))
    assert result["culprit"]["commit"] == early, progress
    assert result["divergence"]["step"] == 1


@pytest.mark.whole
def test_a_metric_that_an_earlier_commit_moves_in_a_later_step(tmp_path: Path) -> None:
    """As by bits, the commit that moves the first step is the culprit; with --all the one before it is another.

    Each has a table of its own: what the first one moved says nothing of the second.
    """
    repo = start(tmp_path, case=None)
    good = repo.git("rev-parse", "HEAD")
    late = edit(repo, SCALE, "scale = 1.0 + 0.5 * (step >= 2)\n", "Late")
    note(repo, "between")
    early = edit(repo, "0.5 * (step >= 2)", "0.5 * (step >= 1)", "Early")
    by = ("--when", "metric:loss rtol=0.01", "--metric", LOSS, "-j", "1")
    result, progress = bisect(repo, f"{good}..HEAD", *by, *command(4))
    assert result["culprit"]["commit"] == early, progress
    assert result["earlier"]["step"] == 2
    done = repo.repro("bisect", "--no-explain", "--all", f"{good}..HEAD", *by, *command(4))
    assert done.returncode == 0, done.stdout + done.stderr
    for commit in (late, early):
        assert f"{commit[:10]} against its parent:" in done.stdout


def test_steps_that_a_program_is_told_are_part_of_the_key(tmp_path: Path) -> None:
    """Runs of one program share what was found whatever their length, unless the program itself is told it."""
    told, other = (
        [CommandLine(["python", "train.py", *words], steps).case(tmp_path).digest for steps in (2, 3)]
        for words in (["--steps", "{step}"], [])
    )
    assert told[0] != told[1]
    assert other[0] == other[1]


@pytest.mark.whole
def test_a_test_script_outside_the_commits(tmp_path: Path) -> None:
    """Correcting a script that lies outside the repository makes what it said before worth nothing."""
    repo = start(tmp_path, case=None)
    script, commits = tmp_path / "test.sh", [repo.git("rev-parse", "HEAD")]
    for n in range(4):
        (repo.root / "value").write_text(f"{n}\n")
        commits.append(repo.commit(f"value {n}"))
    for limit, culprit in ((2, commits[3]), (3, commits[4])):
        script.write_text(f"#!/bin/sh\ntest ! -e value || test $(cat value) -lt {limit}\n")
        script.chmod(0o755)
        result, progress = bisect(repo, f"{commits[0]}..HEAD", "--when", "exit", "--", str(script))
        assert result["culprit"]["commit"] == culprit, progress
    again, _ = bisect(repo, f"{commits[0]}..HEAD", "--when", "exit", "--", str(script))
    assert again["cost"]["probes"] == 0
    fresh, _ = bisect(repo, f"{commits[0]}..HEAD", "--when", "exit", "--fresh", "--", str(script))
    assert fresh["cost"]["probes"] > 0


FLAKY = """\
import fcntl, sys
with open({counter!r}, "a+") as file:
    fcntl.flock(file, fcntl.LOCK_EX)
    file.write("x")
    calls = file.tell()
bad = {bad}
sys.exit(bad != (calls % {every} == 2))
"""


@pytest.mark.whole
def test_flaky_exit_codes_are_weighed(tmp_path: Path) -> None:
    """A test that says the wrong thing in every sixth call is repeated, and the culprit has a probability."""
    repo = start(tmp_path, case=None)

    def commit(bad: bool, text: str) -> str:
        code = FLAKY.format(counter=str(tmp_path / "calls"), bad=bad, every=6)
        (repo.root / "test.py").write_text(f"# {text}\n{code}")
        return repo.commit(text)

    good = commit(False, "good")
    for n in range(3):
        commit(False, f"still {n}")
    culprit = commit(True, "culprit")
    for n in range(4):
        commit(True, f"after {n}")
    result, progress = bisect(repo, f"{good}..HEAD", "--when", "exit", "-j", "1", "--", sys.executable, "test.py")
    assert result["culprit"]["commit"] == culprit, progress
    assert result["posterior"][culprit] >= 0.95
    assert 0 < result["rates"][0] < 0.4 < 0.6 < result["rates"][1] < 1
    assert "one replay proves nothing" in progress


def test_one_bug_on_both_sides_of_a_merge(tmp_path: Path) -> None:
    """Exit codes that no one culprit explains are not called noise where no two runs of a commit differ."""
    repo = start(tmp_path, case=None)
    (repo.root / "test.sh").write_text("[ ! -e bad ]\n")
    good = repo.commit("good")
    repo.git("branch", "right")
    brought = set()
    for side, at in (("left", 5), ("right", 2)):
        if side == "right":
            repo.git("checkout", "--quiet", "right")
        for number in range(1, 7):
            if number == at:
                (repo.root / "bad").touch()
            (repo.root / side).write_text(str(number))
            commit = repo.commit(f"{side} {number}")
            brought |= {commit} if number == at else set()
    repo.git("checkout", "--quiet", "-")
    repo.git("merge", "--quiet", "right", "-m", "merge")
    program = ("--when", "exit", "-j", "1", "--", "sh", "test.sh")
    for side in ("HEAD^1", "HEAD^2"):  # what is known of both sides contradicts any one culprit
        bisect(repo, f"{good}..{side}", *program)
    result, progress = bisect(repo, f"{good}..HEAD", *program)
    assert result["culprit"]["commit"] in brought, progress
    assert result["alike"] and result["rates"] is not None
    assert "Verdicts are noisy" not in Path(result["reports"][0]).read_text()


@pytest.mark.whole
def test_a_branch_from_before_good(tmp_path: Path) -> None:
    """A branch that lacks what GOOD has cannot be compared with it: the culprit is found among what contains GOOD."""
    repo = start(tmp_path, case=None)
    repo.git("branch", "old")
    good = edit(repo, "lr=0.01", "lr=0.02", "Learn faster, on purpose")
    note(repo, "one", "other")
    repo.git("checkout", "--quiet", "old")
    for n in range(6):  # so long that the first probe falls on it
        note(repo, f"from before {n}", "old")
    repo.git("checkout", "--quiet", "main")
    repo.git("merge", "--quiet", "--no-ff", "--message", "Merge old", "old")
    culprit = edit(repo, SCALE, "scale = 1.0 + 1e-6\n", "Scale")
    note(repo, "two")
    result, progress = bisect(repo, f"{good}..HEAD", "-j", "1", *command(2))
    assert result["culprit"]["commit"] == culprit, progress
    assert "searching only what contains GOOD" in progress


@pytest.mark.whole
def test_a_branch_whose_beginning_cannot_be_tested(tmp_path: Path) -> None:
    """That the first commit of a branch differs from GOOD, which it lacks, proves nothing without its parent."""
    repo, broken = start(tmp_path, case=None), "scale = 1.0; assert False\n"
    edit(repo, SCALE, broken, "It does not start")
    repo.git("branch", "old")
    edit(repo, broken, SCALE, "It starts")
    good = edit(repo, "lr=0.01", "lr=0.02", "Learn faster, on purpose")
    repo.git("checkout", "--quiet", "old")
    edit(repo, broken, SCALE, "It starts here too")
    for n in range(4):
        note(repo, f"from before {n}", "old")
    repo.git("checkout", "--quiet", "main")
    repo.git("merge", "--quiet", "--no-ff", "--message", "Merge old", "old")
    culprit = edit(repo, SCALE, "scale = 1.0 + 1e-6\n", "Scale")
    result, progress = bisect(repo, f"{good}..HEAD", "-j", "1", *command(2))
    assert result["culprit"]["commit"] == culprit, progress


@pytest.mark.campaign
def test_a_culprit_that_a_later_one_hides(tmp_path: Path) -> None:
    """What moves a late step is told where a commit after it moves an earlier one, and `--all` names both.

    The search asks for BAD's first difference, which the later commit makes.
    """
    repo = start(tmp_path)
    good = repo.git("rev-parse", "HEAD")
    late = edit(repo, "manual_seed(step))", "manual_seed(step)) * (1 + 1e-3 * (step >= 4))", "Late")
    note(repo, "nothing")
    early = edit(repo, "scale = 1.0", "scale = 1.0 + 1e-6", "Scale")
    result, _ = bisect(repo, f"{good}..HEAD")
    assert ([culprit["commit"]["commit"] for culprit in result["culprits"]], result["divergence"]["step"]) == (
        [early],
        0,
    )
    assert result["explains_bad"] and result["earlier"]["step"] == 4
    done = repo.repro("bisect", "--no-explain", f"{good}..HEAD")
    assert "Commits before it move the numbers too" in done.stdout and "It alone" not in done.stdout
    result, progress = bisect(repo, f"{good}..HEAD", "--all")
    assert [culprit["commit"]["commit"] for culprit in result["culprits"]] == [late, early], progress
    assert [culprit["divergence"]["step"] for culprit in result["culprits"]] == [4, 0]


@pytest.mark.campaign
def test_a_stop_before_the_culprit(tmp_path: Path) -> None:
    """Where BAD and the culprit's parent train less than GOOD, this is told, and the culprit does not explain all."""
    repo = start(tmp_path)
    good = repo.git("rev-parse", "HEAD")
    edit(repo, "    optimizer.step()", "    optimizer.step() if step < 4 else None", "Stop")
    early = edit(repo, SCALE, "scale = 1.0 + 1e-6\n", "Scale")
    done = repo.repro("bisect", "--no-explain", f"{good}..HEAD")
    assert done.returncode == 0 and done.stdout.startswith(f"{early[:10]} moved the numbers")
    assert f"BAD {early[:10]} makes 4 of GOOD's 6 steps: no more are compared" in done.stdout
    assert "It alone" not in done.stdout


@pytest.mark.whole
def test_every_culprit_where_lengths_differ(tmp_path: Path) -> None:
    """With --all, a culprit whose run is longer than BAD's ends the search, and nothing untrue is said."""
    repo = start(tmp_path, TRAIN.replace("default=6", "default=4"), None)
    good = repo.git("rev-parse", "HEAD")
    culprit = edit(repo, SCALE, "scale = 1.0 + 1e-6\n", "Scale")
    note(repo, "one")
    edit(repo, "default=4", "default=3", "Train less")
    result, progress = bisect(repo, f"{good}..HEAD", "--all", "--", sys.executable, "train.py")
    assert [c["commit"]["commit"] for c in result["culprits"]] == [culprit], progress
    assert result["explains_bad"] is None


@pytest.mark.parametrize("every", [(), ("--all",)], ids=("one", "all"))
def test_a_culprit_whose_metric_is_gone_is_named(tmp_path: Path, every: tuple[str, ...]) -> None:
    """It cannot be asked what comes after it: that is said, and it is named, whatever a later commit moves."""
    repo = start(tmp_path, case=None)
    good = repo.git("rev-parse", "HEAD")
    culprit = edit(repo, " loss={", " mean={", "Rename")
    edit(repo, "lr=0.01", "lr=0.02", "Rate")
    by = ("--when", "metric:loss rtol=1e-1", "--metric", LOSS, "--metric", r"mean=(?P<mean>\S+)", "-j", "1")
    result, progress = bisect(repo, f"{good}..HEAD", *every, *by, *command(2))
    assert [c["commit"]["commit"] for c in result["culprits"]] == [culprit], progress
    told = f"whether commits after {culprit[:10]} move the numbers is not known: it has no metric 'loss' in any step"
    assert result["explains_bad"] is None and any(remark.startswith(told) for remark in result["remarks"])


@pytest.mark.whole
@pytest.mark.parametrize("later", [False, True], ids=("last", "moved-again"))
def test_a_number_that_its_parent_tells_in_a_line_of_text(tmp_path: Path, later: bool) -> None:
    """Where GOOD tells a number as one and the commits after it in lines of text, that which moves it is named.

    By bits it and its parent agree. What comes after it is not known where another commit moves the text again.
    """
    score = '    score = loss.item() * 1.0\n    print({"score": score})\n'
    repo = start(tmp_path, TRAIN.replace("    if step + 1 ==", f"{score}    if step + 1 =="), None)
    good = repo.git("rev-parse", "HEAD")
    edit(repo, 'print({"score": score})', 'print(f"INFO: score {score!r}")', "Log")
    note(repo, "between")
    culprit = edit(repo, "loss.item() * 1.0", "loss.item() * (1.0 + (step > 0))", "Double")
    edit(repo, "(1.0 + (step > 0))", "(1.0 + 2 * (step > 0))", "Triple") if later else note(repo, "last")
    result, progress = bisect(repo, f"{good}..HEAD", *command(3))
    assert [c["commit"]["commit"] for c in result["culprits"]] == [culprit], progress
    place = result["culprits"][0]["divergence"]
    assert (place["step"], place["signal"]) == (1, "score") and place["detail"].endswith(" in lines of text")
    assert result["explains_bad"] is (None if later else True)
    assert "observed by the baseline only" not in progress


@pytest.mark.whole
def test_suspects_that_no_baseline_makes_good_end_the_search(tmp_path: Path) -> None:
    """A NaN is BAD beside a NaN too: with --all what comes after the suspects is not known, and they stay named."""
    repo = start(tmp_path, case=None)
    good = repo.git("rev-parse", "HEAD")
    broken = edit(repo, SCALE, "scale = one\n", "Broken")
    tested = edit(repo, "scale = one\n", "scale = float('nan')\n", "NaN")
    edit(repo, "lr=0.01", "lr=0.02", "Rate")
    result, progress = bisect(repo, f"{good}..HEAD", "--all", "--when", "finite", "-j", "1", *command(2), code=3)
    assert sorted(result["suspects"]) == sorted([broken, tested]), progress
    told = f"whether commits after {tested[:10]} move the numbers is not known"
    assert any(remark.startswith(told) for remark in result["remarks"])


def test_a_verdict_on_what_a_filter_writes_says_so(tmp_path: Path) -> None:
    """Commits are replayed with a file as git keeps it: ends that agree so may not in the checkout."""
    repo = start(tmp_path, TRAIN.replace("scale = 1.0", "scale = float(open('rate.txt').read())"), None)
    (repo.root / "rate.txt").write_text("1.0\n")
    (repo.root / ".gitattributes").write_text("rate.txt filter=louder\n")
    good = repo.commit("Rate")
    repo.git("config", "filter.louder.smudge", "sed s/1.0/2.0/")
    note(repo, "nothing")
    told = "rate.txt is written by the filter louder in your checkout, which runs in no commit's worktree"
    done = repo.repro("bisect", f"{good}..HEAD", "-j", "1", *command(1))
    assert "agree" in done.stdout and told in done.stdout, done.stdout + done.stderr
    for search in ("bisect", "history"):
        done = repo.repro(search, f"{good}..HEAD", "--json", "-j", "1", *command(1))
        assert any(remark.startswith(told) for remark in json.loads(done.stdout)["remarks"]), done.stdout
    assert told in repo.repro("history", f"{good}..HEAD", "-j", "1", *command(1)).stdout


@pytest.mark.campaign
def test_a_run_that_ends_early_is_no_verdict(tmp_path: Path) -> None:
    """A commit that trains fewer steps and agrees as far as it goes is skipped for that, and the search goes on."""
    repo = start(tmp_path, TRAIN.replace("default=6", "default=4"), None)
    good = repo.git("rev-parse", "HEAD")
    edit(repo, "default=4", "default=2", "Train less")
    edit(repo, "default=2", "default=4", "Train as before")
    culprit = edit(repo, SCALE, "scale = 1.0 + 1e-6 * (step >= 3)\n", "Scale")
    note(repo, "one")
    result, progress = bisect(repo, f"{good}..HEAD", "-j", "1", "--", sys.executable, "train.py")
    assert result["culprit"]["commit"] == culprit, progress
    assert all("ends after 2 of 4 steps" in reason for reason in result["skips"].values())
    # without --steps too, everything but the confirmation is known the second time
    again, _ = bisect(repo, f"{good}..HEAD", "-j", "1", "--", sys.executable, "train.py")
    assert again["cost"]["ends"]["steps"] == again["cost"]["search"]["steps"] == 0


META = """\
    optimizer.step()
    if step == 1:
        optimizer.add_param_group({"params": [torch.ones(2, device="meta", requires_grad=True)]})
"""


@pytest.mark.parametrize("case", [pytest.param(CASE, marks=pytest.mark.whole), None], ids=("with a case", "without"))
def test_a_recording_that_fails_is_no_short_run(tmp_path: Path, case: str | None) -> None:
    """Ends of which the recorder saw two steps of six are not said to agree: what it failed at is the reason."""
    repo = start(tmp_path, TRAIN.replace("    optimizer.step()\n", META), case)
    edit(repo, SCALE, "scale = 1.0 + 1e-6 * (step >= 3)\n", "Scale")
    done = repo.repro("bisect", "HEAD~1..HEAD", *(() if case else ("--", sys.executable, "train.py")))
    assert done.returncode == 2, done.stdout
    assert "is not recorded whole from step 2: the recorder failed at step 2: ReproError: a meta tensor" in done.stderr


def test_an_end_without_a_word_is_no_shorter_run(tmp_path: Path) -> None:
    """os._exit takes the last step with it, in which the scale is another: the ends are not said to agree."""
    repo = start(tmp_path, TRAIN + "os._exit(0)\n", None)
    edit(repo, SCALE, "scale = 1.0 + (step == 5)\n", "Scale")
    done = repo.repro("bisect", "HEAD~1..HEAD", "--", sys.executable, "train.py")
    assert done.returncode == 2, done.stdout
    assert "is not recorded whole from step 5: a process ended without a word" in done.stderr


@pytest.mark.whole
def test_a_process_that_begins_to_train_late_is_seen(tmp_path: Path) -> None:
    """A second process after the first, in which the scale is another: it is no part that nobody looks at."""
    repo = start(tmp_path, TRAIN, None)
    program = "import subprocess, sys\nfor scale in (1.0, 1.0):\n    subprocess.run([sys.executable, 'train.py'])\n"
    (repo.root / "twice.py").write_text(program)
    repo.commit("Twice")
    done = repo.repro("bisect", "HEAD~1..HEAD", "--path", ".", "--", sys.executable, "twice.py")
    assert done.returncode == 2
    assert "2 processes trained as rank 0" in done.stderr or "GOOD cannot be tested" in done.stderr, done.stderr
    note(repo, "one")
    done = repo.repro("bisect", "HEAD~1..HEAD", "--path", ".", "--", sys.executable, "twice.py")
    assert (done.returncode, "2 processes trained as rank 0" in done.stderr) == (2, True), done.stderr


COUNTED = """\
import pathlib
ran = pathlib.Path("{folder}", "ran")
ran.open("a").write("x")
if {when}:
    options.steps = 3
"""


@pytest.mark.parametrize(("command", "second"), [("bisect", 3), ("history", 2)])
def test_replays_of_other_lengths_do_not_reproduce(tmp_path: Path, command: str, second: int) -> None:
    """GOOD's second replay, the given run of all, makes three steps of six: nothing is said to agree."""
    cut = COUNTED.format(folder=tmp_path, when=f"ran.stat().st_size == {second}")
    repo = start(tmp_path, TRAIN.replace("torch.set_num_threads", cut + "torch.set_num_threads"), None)
    note(repo, "one")
    done = repo.repro(command, "HEAD~1..HEAD", "-j", "1", "--", sys.executable, "train.py")
    assert done.returncode == 3, done.stdout + done.stderr
    assert "give both the same to do" in done.stderr


@pytest.mark.whole
def test_a_bad_end_that_agrees_by_chance_is_weighed(tmp_path: Path) -> None:
    """Its first replay has GOOD's numbers and no later one has: that is noise to be weighed, and no agreement."""
    repo = start(tmp_path, TRAIN, None)
    count = f"(open({str(tmp_path / 'calls')!r}, 'a').write('x'), os.stat({str(tmp_path / 'calls')!r}).st_size)[1]"
    edit(repo, "scale = 1.0\n", f"scale = 1.5 if {count} > 6 else 1.0\n", "Now and then")
    result, progress = bisect(repo, "HEAD~1..HEAD", "-j", "1", "--", sys.executable, "train.py", "--steps", "6")
    assert "two replays of BAD differ at step 0" in progress
    assert result["outcome"] == "found" and result["culprits"][0]["commit"]["subject"] == "Now and then"


@pytest.mark.whole
def test_a_bad_end_whose_noise_is_within_what_is_asked_agrees(tmp_path: Path) -> None:
    """Its second replay is judged by the same question as the first, not by its bits."""
    repo = start(tmp_path, TRAIN, None)
    edit(repo, "scale = 1.0\n", "scale = 1.0 + int.from_bytes(os.urandom(2)) * 1e-9\n", "A little noise")
    by = ("--when", "metric:loss rtol=0.5", "--metric", LOSS, "-j", "1")
    result, _ = bisect(repo, "HEAD~1..HEAD", *by, "--", sys.executable, "train.py", "--steps", "6")
    assert result["outcome"] == "agree" and result["cost"]["ends"]["probes"] == 4


@pytest.mark.whole
def test_an_end_that_goes_on_or_fails_is_told(tmp_path: Path) -> None:
    """BAD trains six steps where GOOD trains four, which agree; or fails after the case's last: a line says so."""
    repo = start(tmp_path, TRAIN.replace("default=6", "default=4"), None)
    edit(repo, "default=4", "default=6", "Longer")
    result, progress = bisect(repo, "HEAD~1..HEAD", "--", sys.executable, "train.py")
    assert result["outcome"] == "agree"
    assert "goes on after the 4 steps of GOOD: no more are compared\n" in progress
    assert [text in progress for text in result["remarks"]] == [True]
    repo = start(tmp_path / "case")
    edit(repo, "import argparse\n", "import argparse, atexit\n", "Import")
    with (repo.root / "train.py").open("a") as file:
        file.write("raise SystemExit(3)\n")
    repo.commit("Fail")
    result, progress = bisect(repo, "HEAD~1..HEAD")
    assert result["outcome"] == "agree"
    assert "its program failed (exit code 3) after 6 steps, and GOOD's did not" in progress
    assert [text in progress for text in result["remarks"]] == [True]
    done = repo.repro("report", "pr", "HEAD~1..HEAD", "--out", "out")
    assert done.returncode == 2, done.stdout
    assert "what was trained agrees, but its program failed (exit code 3)" in done.stdout + done.stderr


@pytest.mark.whole
def test_a_replay_that_fails_at_its_end_is_not_verified(tmp_path: Path) -> None:
    """What was trained agrees with the golden run; the program's failure after it is an error, and no agreement.

    So it is for pytest's plugin, which skips what nothing can be said of. A program that goes on where the golden run's
    ended differs, also where it fails after that.
    """
    repo = start(tmp_path, case=CASE.replace("steps = 6", "steps = 2").replace("--steps 6", "--steps 2"))
    repo.repro("init")
    done = repo.repro("golden", "record")
    assert done.returncode == 0, done.stderr
    with (repo.root / "train.py").open("a") as file:
        file.write("raise SystemExit(3)\n")
    done = repo.repro("golden", "verify")
    assert done.returncode == 2, done.stdout
    assert "what was trained agrees, but its program failed (exit code 3) after 2 steps" in done.stderr
    (repo.root / "test_numbers.py").write_text('def test_numbers(golden):\n    golden.verify("toy")\n')
    plugin = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_numbers.py"]
    done = subprocess.run(plugin, cwd=repo.root, capture_output=True, text=True, check=False, env=environment())
    assert done.returncode == 1 and "its program failed (exit code 3)" in done.stdout, done.stdout
    (repo.root / "test_numbers.py").unlink()
    goes_on = (repo.root / "train.py").read_text().replace("range(first, options.steps)", "range(4)")
    (repo.root / "train.py").write_text(goes_on)
    done = repo.repro("golden", "verify")
    told = "differs: the baseline ended after step 2, and the run goes on; the 2 steps that both made agree"
    assert done.returncode == 1 and told in done.stdout, done.stdout + done.stderr
    (repo.root / "train.py").write_text(goes_on.replace("range(4)", "range(first, options.steps)"))
    done = repo.repro("golden", "approve", "--reason", "it fails")
    assert "note: the program failed (exit code 3) after its last step" in done.stdout + done.stderr


@pytest.mark.whole
def test_a_run_shorter_than_its_case_is_told(tmp_path: Path) -> None:
    """Where a program ends well before the case's last step, how many steps are compared is said."""
    repo = start(tmp_path, case=CASE.replace("--steps 6", "--steps 4"))
    note(repo, "one")
    told = "GOOD ends by itself after 4 of the 6 steps of the case: no more are compared"
    result, progress = bisect(repo, "HEAD~1..HEAD")
    assert f"{told}\n" in progress and told in result["remarks"]
    assert told in json.loads(repo.repro("history", "HEAD~1..HEAD", "--json").stdout)["remarks"]
