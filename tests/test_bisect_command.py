"""`repro bisect GOOD..BAD -- CMD` and its ways: predicates, exit codes, paths, parents, every culprit, noise."""

from __future__ import annotations

import fcntl
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from conftest import Repo
from history_kit import TRAIN, edit, note, start

SCALE = "scale = 1.0\n"
LOSS = r"loss=(?P<loss>\S+)"
COMMAND = ("--", sys.executable, "train.py", "--steps", "3")


def bisect(repo: Repo, spec: str, *arguments: str, code: int = 0) -> tuple[dict[str, Any], str]:
    """JSON and progress of a bisect."""
    options, dashes, command = _split(arguments)
    done = repo.repro("bisect", "--no-explain", spec, "--json", *options, *dashes, *command)
    assert done.returncode == code, done.stdout + done.stderr
    return json.loads(done.stdout), done.stderr


def _split(arguments: tuple[str, ...]) -> tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]:
    at = arguments.index("--") if "--" in arguments else len(arguments)
    return arguments[:at], arguments[at : at + 1], arguments[at + 1 :]


def test_a_command_needs_no_case(tmp_path: Path) -> None:
    """A command alone is replayed over as many steps as GOOD makes; git goes on from the log that is exported.

    One whose program is told that number, on which its schedule may rest, needs it.
    """
    repo = start(tmp_path, case=None)
    done = repo.repro("bisect", "HEAD~1..HEAD", *COMMAND, "--of", "{step}")
    assert (done.returncode, done.stdout) == (2, "") and "{step} stands for the number of steps" in done.stderr
    good = repo.git("rev-parse", "HEAD")
    note(repo, "one")
    culprit = edit(repo, SCALE, "scale = 1.0 + 1e-6\n", "Warm up")
    note(repo, "two")
    result, progress = bisect(repo, f"{good}..HEAD", "--export", str(tmp_path / "log"), *COMMAND)
    assert result["culprit"]["commit"] == culprit, progress
    assert (result["divergence"]["step"], result["divergence"]["phase"]) == (0, "grad")
    assert result["git_steps"] == 3
    assert result["explains_bad"] is True
    assert result["reproduce"].endswith(f"-- {sys.executable} train.py --steps 3")
    repo.git("bisect", "replay", str(tmp_path / "log"))
    assert f"{culprit} is the first bad commit" in repo.git("bisect", "next")
    repo.git("bisect", "reset")


@pytest.mark.whole
@pytest.mark.parametrize("slots", ["2", "1"])
def test_no_run_is_made_for_one_thing_alone(tmp_path: Path, slots: str) -> None:
    """GOOD runs twice, BAD once to its end, then come the search, and parent and culprit once more.

    Those two record the operations that explain the culprit. With one slot it is so where a start takes longer than all
    steps, as it does here.
    """
    repo = start(tmp_path, case=None)
    good = repo.git("rev-parse", "HEAD")
    for number in range(3):
        note(repo, f"{number}")
    culprit = edit(repo, SCALE, "scale = 1.0 + 1e-6\n", "Warm up")
    for number in range(3):
        note(repo, f"after {number}")
    line = ("bisect", f"{good}..HEAD", "-j", slots, "--json")
    done = repo.repro(*line, *COMMAND)
    assert f"\nconfirmed: {culprit[:10]} Warm up\n" in done.stderr  # before it is explained
    result = json.loads(done.stdout)
    assert (result["culprit"]["commit"], result["explains_bad"]) == (culprit, True)
    (culprits,) = result["culprits"]
    assert "aten.mul.Tensor at train.py:23" in culprits["explanation"]["text"] and culprits["explanation"]["size"]
    cost = {stage: result["cost"][stage]["probes"] for stage in ("ends", "search", "confirmation", "explanation")}
    assert cost == {"ends": 3, "search": cost["search"], "confirmation": 2, "explanation": 0}
    assert cost["search"] <= 4
    again = json.loads(repo.repro(*line, *COMMAND).stdout)
    assert again["cost"]["probes"] == 0
    assert again["culprits"][0]["explanation"]["text"] == culprits["explanation"]["text"]


@pytest.mark.whole
def test_a_release_that_was_cut_on_a_branch_is_a_good_end(tmp_path: Path) -> None:
    """The search begins at its merge base with BAD, if that has its numbers; if not, the branch moved them."""
    repo = start(tmp_path, case=None)
    base = note(repo, "one")
    repo.git("checkout", "--quiet", "-b", "release")
    named = note(repo, "version 1.0")
    moved = edit(repo, SCALE, "scale = 1.0 + 1e-3\n", "A fix of the release alone")
    repo.git("checkout", "--quiet", "main")
    note(repo, "two")
    culprit = edit(repo, SCALE, "scale = 1.0 + 1e-6\n", "Warm up")
    bad = note(repo, "three")
    for predicate in ("bitwise", "exit"):
        options = ("--when", predicate, *COMMAND)
        if predicate == "exit":
            options = ("--when", "exit", "--", "grep", "-q", "scale = 1.0$", "train.py")
        result, progress = bisect(repo, f"{named}..{bad}", *options)
        assert (result["culprit"]["commit"], result["good"], result["named"]) == (culprit, base, named), progress
        assert f"merge base with BAD, {base[:10]}" in progress
    done = repo.repro("bisect", "--no-explain", f"{moved}..{bad}", *COMMAND)
    assert done.returncode == 2 and f"`repro bisect {base[:10]}..{moved[:10]}` finds where" in done.stderr, done.stderr
    done = repo.repro("bisect", "--no-explain", f"{named}..{bad}", *COMMAND)
    assert "GOOD " + named[:10] + " is on a branch of its own" in done.stdout


@pytest.mark.parametrize("predicate", ["bitwise", pytest.param("exit", marks=pytest.mark.whole)])
def test_quick_ends_with_the_name(tmp_path: Path, predicate: str) -> None:
    """Neither confirmed nor explained, which is said; without it the same command goes on from the journal."""
    repo = start(tmp_path, case=None)
    for number in range(3):
        note(repo, f"{number}")
    old, new = (SCALE, "scale = 1.0 + 1e-6\n") if predicate == "bitwise" else (SCALE, "raise SystemExit(1)\n")
    culprit = edit(repo, old, new, "Warm up")
    note(repo, "after")
    command = ("bisect", "HEAD~4..HEAD", "--when", predicate, "-j", "1")
    done = repo.repro(*command, "--quick", *COMMAND)
    assert done.returncode == 0, done.stderr
    assert "\nNot confirmed: full replays may say otherwise." in done.stdout
    assert done.stdout.startswith(f"not confirmed: {culprit[:10]} ") and "confirming" not in done.stderr
    assert ", 0 for the confirmation" in done.stdout or predicate == "exit"
    answer = json.loads(repo.repro(*command, "--json", *COMMAND).stdout)
    assert answer["culprit"]["commit"] == culprit and answer["confirmed"] is True
    assert answer["cost"]["reused"] > 2
    assert answer["seconds"] >= answer["cost"]["seconds"]  # one after the other, the explanation's too
    done = repo.repro(*command, "--quick", "--all", *COMMAND)
    assert done.returncode == 2 and "give one of them" in done.stderr
    if predicate == "exit":
        done = repo.repro(*command, "--all", *COMMAND)
        assert done.returncode == 2 and done.stderr.endswith("of which --when exit knows none: leave it out\n")


def test_a_command_that_leaves_no_trace_is_an_error(tmp_path: Path) -> None:
    """With any predicate but `exit`, a program that trains nothing ends the search in one line that says so."""
    repo = start(tmp_path, case=None)
    note(repo, "one")
    done = repo.repro("bisect", "--no-explain", "HEAD~1..HEAD", "--", sys.executable, "-c", "print(1)")
    assert done.returncode == 2
    assert "no optimizer step was seen" in done.stderr.splitlines()[-1]


def test_exit_codes_mean_what_git_means(tmp_path: Path) -> None:
    """0 is good, 125 a skip, 1 to 127 bad; a code above says nothing and ends the search; no trainer is needed."""
    repo = start(tmp_path, case=None)
    test = ("--", sys.executable, "-c", "import sys; sys.exit(int(open('code').read()))")

    def commit(code: int, text: str) -> str:
        (repo.root / "code").write_text(f"{code}\n")
        (repo.root / "text").write_text(text)
        return repo.commit(text)

    good = commit(0, "good")
    commit(0, "still good")
    commit(125, "cannot be tested")
    culprit = commit(3, "culprit")
    commit(7, "still bad")
    for jobs in ("1", "2"):
        result, progress = bisect(repo, f"{good}..HEAD", "--when", "exit", "-j", jobs, *test, code=3)
        assert result["outcome"] == "ambiguous", progress
        assert culprit in result["suspects"]
        assert len(result["suspects"]) == 2
        assert result["looked_at"]["text"] == "exit codes alone"
    bad = commit(200, "killed")
    done = repo.repro("bisect", "--no-explain", f"{good}..{bad}", "--when", "exit", *test)
    assert done.returncode == 2
    assert "neither good nor bad" in done.stderr
    done = repo.repro("bisect", "--no-explain", f"{culprit}~1..{culprit}", "--when", "exit", *test)
    assert done.returncode == 2, "a commit that exits with 125 cannot be an end"


@pytest.mark.whole
def test_a_metric_bound_ends_a_probe_at_its_violation(tmp_path: Path) -> None:
    """Under a metric predicate bits may move; the commit that breaks the bound is named, and its probes end there.

    With `--quick`: else BAD goes to its end where a start takes longer than all steps, for its trace confirms.
    """
    repo = start(tmp_path, case=None)
    good = repo.git("rev-parse", "HEAD")
    edit(repo, SCALE, "scale = 1.0 + 1e-6\n", "Move bits alone")
    note(repo, "one")
    slow = "scale = 1.0 + 1e-1 * (step >= 2)\n    __import__('time').sleep(0.4)\n"
    culprit = edit(repo, "scale = 1.0 + 1e-6\n", slow, "Move the loss")
    note(repo, "two")
    command = ("--", sys.executable, "train.py", "--steps", "12")
    result, progress = bisect(
        repo, f"{good}..HEAD", "--when", "metric:loss rtol=1e-3", "--metric", LOSS, "-j", "1", "--quick", *command
    )
    assert result["culprit"]["commit"] == culprit, progress
    assert (result["divergence"]["step"], result["divergence"]["signal"]) == (2, "loss")
    assert result["predicate"] == "metric:loss rtol=1e-3"
    looked = "1 metric by its bound (loss); bits were not judged"
    assert (result["looked_at"]["text"], result["looked_at"]["parameters"]) == (looked, 0)
    assert f"looked at {looked}." in Path(result["reports"][0]).read_text()
    entries = [json.loads(line) for line in (repo.root / ".git/repro/journal.jsonl").read_text().splitlines()]
    bad = [e["steps"] for e in entries if e["commit"] == repo.git("rev-parse", "HEAD")]
    assert min(bad) < 9, "the probe of BAD went on long after its violation"


@pytest.mark.whole
def test_only_the_given_paths_matter(tmp_path: Path) -> None:
    """With --path, commits in which these files are identical share one probe."""
    repo = start(tmp_path, case=None)
    good = repo.git("rev-parse", "HEAD")
    for n in range(6):
        note(repo, f"other {n}", f"docs/{n}.md")
    culprit = edit(repo, SCALE, "scale = 1.0 + 1e-6\n", "Warm up")
    for n in range(6):
        note(repo, f"more {n}", f"docs/more{n}.md")
    result, progress = bisect(repo, f"{good}..HEAD", "--path", "train.py", "-j", "1", *COMMAND)
    assert result["culprit"]["commit"] == culprit, progress
    assert result["cost"]["search"]["probes"] <= 1, "one version of the file is GOOD's, the other BAD's"


@pytest.fixture
def merged(tmp_path: Path) -> tuple[Repo, str, dict[str, str]]:
    """A main line with two culprits and a side branch with a third; repository, GOOD, and the commits by name."""
    repo = start(
        tmp_path, TRAIN.replace(SCALE, f"{SCALE}    shift = 0.0\n").replace("* scale", "* scale + shift"), None
    )
    good, names = repo.git("rev-parse", "HEAD"), {}
    note(repo, "one")
    repo.git("checkout", "--quiet", "-b", "side")
    names["side"] = edit(repo, "shift = 0.0", "shift = 1e-5", "Shift")
    note(repo, "on the side", "other")
    repo.git("checkout", "--quiet", "main")
    names["first"] = edit(repo, "lr=0.01", "lr=0.0100001", "Learn faster")
    note(repo, "two", "more")
    repo.git("merge", "--quiet", "--no-ff", "--message", "Merge side", "side")
    names["merge"] = repo.git("rev-parse", "HEAD")
    note(repo, "three", "more")
    names["last"] = edit(repo, "scale = 1.0\n", "scale = 1.0 + 1e-6\n", "Scale")
    note(repo, "four", "more")
    return repo, good, names


@pytest.mark.campaign  # test_foreign_bisect has the same of trainers that replay in a fraction of a second
def test_every_culprit(merged: tuple[Repo, str, dict[str, str]]) -> None:
    """--all names each commit that moved the numbers, the one that a merge brought in by its own name."""
    repo, good, names = merged
    result, progress = bisect(repo, f"{good}..HEAD", "--all", *COMMAND)
    named = {culprit["commit"]["commit"] for culprit in result["culprits"]}
    assert named == {names["first"], names["side"], names["last"]}, progress
    assert all(culprit["divergence"] for culprit in result["culprits"])


@pytest.mark.campaign
def test_first_parent(merged: tuple[Repo, str, dict[str, str]]) -> None:
    """With --first-parent a merge stands for all that it brought in."""
    repo, good, names = merged
    result, progress = bisect(repo, f"{good}..HEAD", "--all", "--first-parent", *COMMAND)
    named = {culprit["commit"]["commit"] for culprit in result["culprits"]}
    assert named == {names["first"], names["merge"], names["last"]}, progress
    assert len(result["order"]) == 7


NOISY = """\
import os, random, sys
rate = 0.1
drawn = random.SystemRandom().random()
os.execv(sys.executable, [sys.executable, "train.py", "--steps", "2", *(["--off"] if drawn < rate else [])])
"""


@pytest.mark.campaign
def test_noisy_metrics_are_weighed(tmp_path: Path) -> None:
    """Where GOOD now and then breaks its own bound, repeated replays name the commit that breaks it nearly always."""
    load, off = 'parser.add_argument("--load")\n', 'parser.add_argument("--off", action="store_true")\n'
    train = TRAIN.replace(load, off + load).replace(SCALE, "scale = 2.0 if options.off else 1.0\n")
    noise = "    scale += 1e-5 * __import__('random').SystemRandom().random()\n"  # never the same bits
    train = train.replace("1.0\n    loss", f"1.0\n{noise}    loss")
    repo = start(tmp_path, train, None)
    (repo.root / "run.py").write_text(NOISY)
    good = repo.commit("Run with noise")
    note(repo, "one")
    repo_edit = (repo.root / "run.py").read_text()
    (repo.root / "run.py").write_text(repo_edit.replace("rate = 0.1", "rate = 0.95"))
    culprit = repo.commit("More noise")
    note(repo, "two")
    command = ("--", sys.executable, "run.py")
    result, progress = bisect(
        repo, f"{good}..HEAD", "--when", "metric:loss rtol=0.2", "--metric", LOSS, "--confidence", "0.9", *command
    )
    assert result["culprit"]["commit"] == culprit, progress
    assert result["posterior"][culprit] >= 0.9
    assert result["rates"][0] < 0.5 < result["rates"][1]
    assert "two replays of GOOD differ" in progress
    assert f"whether commits after {culprit[:10]} move the numbers is not known: verdicts are noisy" in progress


@pytest.mark.campaign
def test_a_timeout_ends_the_whole_tree(tmp_path: Path) -> None:
    """A trainer that hangs in a grandchild runs out of time, is skipped, and nothing of it is left running."""
    mark = f"{tmp_path.name}-{os.getpid()}"
    case = f"""\
[case]
name = "toy"
steps = 2

[subject]
kind = "command"
command = "{{python}} train.py --steps 2"
path = "train.py"
timeout = "20s"
env = {{ MARK = "{mark}" }}
"""
    repo = start(tmp_path, case=case)
    good = repo.git("rev-parse", "HEAD")
    hang = "import subprocess, sys\nsubprocess.run([sys.executable, '-c', 'import time; time.sleep(999)'])\n"
    (repo.root / "train.py").write_text(hang + TRAIN)
    repo.commit("Hang")
    (repo.root / "train.py").write_text(TRAIN.replace(SCALE, "scale = 1.0 + 1e-6\n"))
    repo.commit("Go on")
    result, _ = bisect(repo, f"{good}..HEAD", code=3)
    assert result["outcome"] == "ambiguous"
    assert "runs out of time" in next(iter(result["skips"].values()))
    time.sleep(0.2)
    assert not [p for p in psutil.process_iter(["environ"]) if (p.info["environ"] or {}).get("MARK") == mark]


@pytest.mark.whole
def test_what_comes_after_suspects_is_told_and_searched(tmp_path: Path) -> None:
    """Of commits that no test tells apart the difference is their own; `--all` names the culprit behind them."""
    repo = start(tmp_path, case=None)
    good = repo.git("rev-parse", "HEAD")
    future = "import torch\n"
    broken = [edit(repo, future, f"import nothing_{n}\n{future}", f"Break {n}") for n in (1, 2)]
    edit(repo, SCALE, "scale = 1.0 + 1e-6\n", "Warm up")
    text = (repo.root / "train.py").read_text()
    (repo.root / "train.py").write_text(text.replace("import nothing_1\n", "").replace("import nothing_2\n", ""))
    mended = repo.commit("Mend")
    culprit = edit(repo, "1e-6", "1e-2", "Warm up more")
    last = note(repo, "end")
    result, _ = bisect(repo, f"{good}..HEAD", *COMMAND, code=3)
    assert set(result["suspects"]) >= {*broken, mended} and culprit not in result["suspects"]
    assert result["behind"] == mended
    assert result["divergence"] == result["apart"]
    apart = result["apart"]
    result, _ = bisect(repo, f"{good}..HEAD", "--all", *COMMAND, code=3)
    assert [each["commit"]["commit"] for each in result["culprits"]] == [culprit]
    assert result["divergence"] == result["culprits"][0]["divergence"] != apart
    assert result["apart"] == apart and not result["behind"]
    done = repo.repro("bisect", "--no-explain", f"{good}..HEAD", *COMMAND)
    assert f"`repro explain {good[:10]}..{mended[:10]}` shows what they do together." in done.stdout
    assert f"`repro bisect {mended[:10]}..{last[:10]}`" in done.stdout


@pytest.mark.whole
def test_compiled_extensions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Probes at once have folders of their own for them, those of two searches too, unless the user names one.

    A lock that an ended probe left there is gone.
    """
    seen, locks = tmp_path / "seen", tmp_path / "locks"
    train = (
        f"import os, pathlib\nplace = os.environ.get('TORCH_EXTENSIONS_DIR', '')\n"
        f"open({str(seen)!r}, 'a').write(place + '\\n')\nif 'repro' in place:\n"
        f"    lock = pathlib.Path(place, 'kernel', 'lock')\n    open({str(locks)!r}, 'a').write(str(lock.exists()))\n"
        f"    lock.parent.mkdir(parents=True, exist_ok=True)\n    lock.touch()\n"
    )
    repo = start(tmp_path, train + TRAIN, None)
    good = repo.git("rev-parse", "HEAD")
    note(repo, "one")
    edit(repo, SCALE, "scale = 1.0 + 1e-6\n", "Warm up")
    base, mine = repo.root / ".git" / "repro" / "torch-extensions", str(tmp_path / "mine")
    base.mkdir(parents=True)
    with (base / "0.lock").open("w") as another:
        fcntl.flock(another, fcntl.LOCK_EX)  # as another search holds it
        for jobs, named, expected in (("1", "", {"1"}), ("2", "", {"0", "1"}), ("2", mine, {"mine"})):
            seen.write_text("")
            if named:
                monkeypatch.setenv("TORCH_EXTENSIONS_DIR", named)
            bisect(repo, f"{good}..HEAD", "-j", jobs, "--fresh", *COMMAND)
            another.close()
            assert {Path(line).name for line in seen.read_text().splitlines()} == expected
    assert set(locks.read_text()) <= set("False") and "False" in locks.read_text()


@pytest.mark.whole
def test_gpu_slots(tmp_path: Path) -> None:
    """Probes at once get GPUs of their own; more than there are is refused with the number that fits."""
    case = """\
[case]
name = "toy"
steps = 2

[subject]
kind = "command"
command = "{python} train.py --steps 2"
path = "train.py"

[resources]
gpus = 2
"""
    seen = tmp_path / "seen"
    train = f"import os\nopen({str(seen)!r}, 'a').write(os.environ['CUDA_VISIBLE_DEVICES'] + '\\n')\n"
    repo = start(tmp_path, train + TRAIN, case)
    good = repo.git("rev-parse", "HEAD")
    for n in range(2):
        note(repo, str(n))
    culprit = edit(repo, SCALE, "scale = 1.0 + 1e-6\n", "Warm up")
    old = os.environ.get("CUDA_VISIBLE_DEVICES")
    os.environ["CUDA_VISIBLE_DEVICES"] = "3,1,2,0"
    try:
        result, progress = bisect(repo, f"{good}..HEAD", "-j", "2")
        done = repo.repro("bisect", "--no-explain", f"{good}..HEAD", "-j", "3")
    finally:
        if old is None:
            del os.environ["CUDA_VISIBLE_DEVICES"]
        else:
            os.environ["CUDA_VISIBLE_DEVICES"] = old
    assert result["culprit"]["commit"] == culprit, progress
    assert set(seen.read_text().split()) == {"3,1", "2,0"}
    assert done.returncode == 2
    assert "use -j 2" in done.stderr
