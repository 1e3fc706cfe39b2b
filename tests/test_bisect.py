"""Bisecting real histories of the real trainer: what is found, what is refused, and what is left untouched."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from conftest import Repo, environment

from repro_golden.repository.checkout import find_checkout
from repro_golden.repository.worktrees import Worktrees

LOSS = "core/repro_core/rl/loss.py"
SHARP = "rows.float() / temperature, dim"
DULL = "(rows.float() / temperature).bfloat16().float(), dim"


def note(repo: Repo, text: str, path: str = LOSS) -> str:
    """A commit that changes the subject's code and no bit."""
    file = repo.root / path
    file.write_text(file.read_text() + f"# {text}\n")
    return repo.commit(text)


def bisect(repo: Repo, spec: str, *arguments: str) -> tuple[int, dict[str, Any], str]:
    """Exit code, JSON and progress of one bisect."""
    done = repo.repro("bisect", "--no-explain", spec, "--json", *arguments)
    assert done.stdout, done.stderr
    result = json.loads(done.stdout)
    assert "error" not in result, done.stderr
    return done.returncode, result, done.stderr


def fingerprint_of_checkout(repo: Repo) -> dict[str, bytes]:
    """Everything of the user's that a bisect must not touch: files, index, refs, configuration, hooks, stash."""
    git = repo.root / ".git"
    files = [p for p in repo.root.rglob("*") if p.is_file() and ".git" not in p.relative_to(repo.root).parts]
    for part in ("index", "HEAD", "config", "packed-refs", "hooks", "refs", "logs", "info"):
        files += [p for p in [git / part, *(git / part).rglob("*")] if p.is_file()]
    return {str(p): p.read_bytes() for p in files}


def left_behind(repo: Repo) -> list[Path]:
    """Worktrees and scratch folders that outlived their command."""
    return [*repo.worktrees, *(repo.root / ".git" / "repro" / "tmp").glob("*")]


@pytest.fixture
def hidden(recorded: Repo) -> tuple[Repo, str, str]:
    """A history with a merge, a window that does not import, and a culprit on the side branch; repo, GOOD, culprit."""
    repo = recorded
    good = repo.git("rev-parse", "HEAD")
    note(repo, "one")
    repo.git("checkout", "--quiet", "-b", "side")
    note(repo, "side one", "core/repro_core/rl/kl.py")
    repo.edit(LOSS, SHARP, DULL)
    culprit = repo.commit("Tidy the log-prob path")
    repo.git("checkout", "--quiet", "main")
    note(repo, "two", "core/repro_core/data/task.py")
    repo.git("merge", "--quiet", "--no-ff", "--message", "Merge side", "side")
    repo.edit("core/repro_core/contract.py", "CONTRACT = 1\n", "CONTRACT = 1\nimport repro_core.missing\n")
    repo.commit("Start a module")
    for n in range(3):
        note(repo, f"broken {n}")
    repo.edit("core/repro_core/contract.py", "CONTRACT = 1\nimport repro_core.missing\n", "CONTRACT = 1\n")
    repo.commit("Leave it out")
    for n in range(3):
        note(repo, f"after {n}")
    return repo, good, culprit


def test_the_culprit_is_named_with_its_difference(hidden: tuple[Repo, str, str], tmp_path: Path) -> None:
    """Through a merge and a broken window the planted commit is found, with step, phase, signal and exact size."""
    repo, good, culprit = hidden
    hook = repo.root / ".git" / "hooks" / "post-checkout"
    hook.parent.mkdir(exist_ok=True)
    hook.write_text(f"#!/bin/sh\ntouch {tmp_path}/hook-ran\n")
    hook.chmod(0o755)
    (repo.root / "untracked.txt").write_text("mine")
    before = fingerprint_of_checkout(repo)
    code, result, progress = bisect(repo, f"{good}..HEAD", "--out", str(tmp_path / "report"))
    assert (code, result["outcome"], result["culprit"]["commit"]) == (0, "found", culprit), progress
    divergence = result["divergence"]
    assert (divergence["step"], divergence["phase"], divergence["signal"]) == (0, "forward", "log_probs")
    assert divergence["magnitude"]["elements"] == divergence["magnitude"]["total"] > 0
    assert result["explains_bad"] is True
    assert result["golden"] is not None, "the golden run of GOOD's code counts as its first run"
    assert result["skips"] and all("repro_core.missing" in reason for reason in result["skips"].values())
    assert fingerprint_of_checkout(repo) == before
    assert left_behind(repo) == [] and not (tmp_path / "hook-ran").exists()
    page, text = (tmp_path / "report" / name for name in ("report.html", "report.md"))
    assert culprit in page.read_text() and "<svg" in page.read_text() and culprit in text.read_text()
    # a second search reuses every finished probe, the confirming replays with their dumps too, and says so
    code, again, progress = bisect(repo, f"{good}..HEAD")
    assert (code, again["culprit"]["commit"], again["divergence"]) == (0, culprit, divergence)
    assert again["cost"]["search"]["probes"] == again["cost"]["confirmation"]["probes"] == 0
    assert again["cost"]["reused"] >= 5 and "resuming" in progress


def test_filters_of_the_repository_do_not_run(hidden: tuple[Repo, str, str], tmp_path: Path) -> None:
    """A smudge filter that the repository configures is not run for a worktree."""
    repo, good, culprit = hidden
    repo.git("config", "filter.loud.smudge", f"touch {tmp_path}/filter-ran; cat")
    repo.git("config", "filter.loud.required", "true")
    (repo.root / ".git" / "info").mkdir(exist_ok=True)
    (repo.root / ".git" / "info" / "attributes").write_text("*.py filter=loud\n")
    code, result, _ = bisect(repo, f"{good}..{culprit}")
    assert (code, result["culprit"]["commit"]) == (0, culprit)
    assert not (tmp_path / "filter-ran").exists()


def start(repo: Repo, *arguments: str) -> subprocess.Popen[str]:
    """A bisect in the background."""
    return subprocess.Popen(
        [sys.executable, "-m", "repro", "bisect", "--no-explain", *arguments],
        cwd=repo.root, env=environment(), text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
    )  # fmt: skip


def wait_for(ready: Callable[[], bool], seconds: float = 120) -> None:
    """Wait until something is so."""
    limit = time.monotonic() + seconds
    while not ready():
        assert time.monotonic() < limit
        time.sleep(0.05)


@pytest.mark.whole
@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL], ids=["term", "kill"])
def test_a_killed_bisect_loses_no_finished_probe(how: signal.Signals, hidden: tuple[Repo, str, str]) -> None:
    """Killed in the middle, the next call resumes from the journal, says so, and leaves no worktree."""
    repo, good, culprit = hidden
    journal = repo.root / ".git" / "repro" / "journal.jsonl"
    running = start(repo, f"{good}..HEAD", "-j", "1")
    wait_for(lambda: journal.exists() and len(journal.read_text().splitlines()) >= 2)
    os.kill(running.pid, how)
    running.communicate(timeout=60)
    assert running.returncode in (130, -signal.SIGKILL)
    finished = len(journal.read_text().splitlines())
    if how == signal.SIGTERM:
        assert left_behind(repo) == []
    with journal.open("a") as file:
        file.write('{"format":1,"key":"torn')  # what a crash in the middle of a write leaves
    code, result, progress = bisect(repo, f"{good}..HEAD")
    assert (code, result["culprit"]["commit"]) == (0, culprit), progress
    assert f"resuming: {finished} finished probes" in progress
    assert result["cost"]["reused"] >= 2
    assert left_behind(repo) == []


@pytest.mark.whole
def test_two_bisects_at_once_do_not_disturb_each_other(hidden: tuple[Repo, str, str]) -> None:
    """Two searches of one repository at the same time both find the culprit."""
    repo, good, culprit = hidden
    other = start(repo, f"{good}..HEAD", "-j", "1", "--json")
    code, result, _ = bisect(repo, f"{good}..HEAD", "-j", "1")
    out, err = other.communicate(timeout=300)
    assert (code, result["culprit"]["commit"]) == (0, culprit)
    assert (other.returncode, json.loads(out)["culprit"]["commit"]) == (0, culprit), err
    assert left_behind(repo) == []


def test_a_flaky_culprit_is_its_own_verdict(recorded: Repo) -> None:
    """A commit whose two replays differ is FLAKY, not merely BAD (exit 3)."""
    repo, good = recorded, recorded.git("rev-parse", "HEAD")
    note(repo, "one")
    repo.edit(LOSS, SHARP, "rows.float() / temperature * (1 + int.from_bytes(__import__('os').urandom(2)) * 1e-6), dim")
    culprit = repo.commit("Warm the cache")
    done = repo.repro("bisect", f"{good}..HEAD", "--json")
    result = json.loads(done.stdout)
    assert (done.returncode, result["outcome"], result["flaky"]["commit"]["commit"]) == (3, "flaky", culprit)
    assert (result["culprit"], result["culprits"]) == (None, [])
    assert "\nconfirmed: " not in done.stderr
    assert result["verdicts"][culprit] == "FLAKY"


@pytest.mark.whole
def test_a_flaky_good_end_is_not_verifiable(fork: Repo) -> None:
    """When GOOD does not reproduce itself there is no baseline: exit 3, and the line says FLAKY."""
    repo = fork
    assert repo.repro("golden", "record").returncode == 0
    repo.edit(LOSS, SHARP, "rows.float() / temperature * (1 + int.from_bytes(__import__('os').urandom(2)) * 1e-6), dim")
    good = repo.commit("Noise")
    note(repo, "one")
    done = repo.repro("bisect", "--no-explain", f"{good}..HEAD")
    assert done.returncode == 3 and "FLAKY" in done.stderr.strip().splitlines()[-1]


@pytest.mark.whole
def test_only_skips_left_gives_the_exact_suspects(recorded: Repo) -> None:
    """A culprit inside a window that cannot be tested gives the ambiguous set and exit 3; a hang is a skip."""
    repo, good = recorded, recorded.git("rev-parse", "HEAD")
    repo.edit("golden/cases/mini.toml", 'timeout = "3m"', 'timeout = "20s"')
    future = "from __future__ import annotations\n"
    repo.edit("core/repro_core/data/task.py", future, f"{future}\nimport time\n\ntime.sleep(99)\n")
    first = repo.commit("Wait for the cluster")
    repo.edit(LOSS, SHARP, DULL)
    second = repo.commit("Tidy the log-prob path")
    repo.edit("core/repro_core/data/task.py", "\n\nimport time\n\ntime.sleep(99)\n", "\n")
    third = repo.commit("Do not wait")
    code, result, _ = bisect(repo, f"{good}..HEAD")
    assert (code, result["outcome"], set(result["suspects"])) == (3, "ambiguous", {first, second, third})
    assert all("runs out of time" in reason for reason in result["skips"].values())


def test_later_culprits_are_announced(recorded: Repo) -> None:
    """When two commits move the numbers the first is named, and the report says that it does not explain BAD alone."""
    repo, good = recorded, recorded.git("rev-parse", "HEAD")
    repo.edit(LOSS, SHARP, DULL)
    first = repo.commit("Tidy the log-prob path")
    repo.edit("core/repro_core/engines/optimizer.py", "eps=self.config.adam_eps", "eps=self.config.adam_eps * 2")
    repo.commit("Steady the optimizer")
    code, result, _ = bisect(repo, f"{good}..HEAD")
    assert (code, result["culprit"]["commit"], result["explains_bad"]) == (0, first, False)


def test_ends_that_agree_are_said_to(recorded: Repo) -> None:
    """A range that moved no number exits 0 and says that the ends agree, without a search."""
    repo, good = recorded, recorded.git("rev-parse", "HEAD")
    note(repo, "one")
    (repo.root / "README").write_text("words")
    repo.commit("words")
    done = repo.repro("bisect", "--no-explain", f"{good}..HEAD")
    assert done.returncode == 0 and "agree bit for bit" in done.stdout


def test_a_crash_after_the_numbers_moved_is_bad(recorded: Repo) -> None:
    """A trainer that crashes in a later step than the one where its numbers moved is judged by what it left."""
    repo, good = recorded, recorded.git("rev-parse", "HEAD")
    repo.edit(LOSS, SHARP, DULL)
    repo.edit(
        "core/repro_core/train/trainer.py",
        "        rollout_id = self._accept(rollout)\n",
        "        rollout_id = self._accept(rollout)\n        assert self._step < 2, 'too far'\n",
    )
    culprit = repo.commit("Tidy the log-prob path")
    repo.edit("core/repro_core/train/trainer.py", "        assert self._step < 2, 'too far'\n", "")
    repo.commit("Go on")
    code, result, progress = bisect(repo, f"{good}..HEAD")
    assert (code, result["culprit"]["commit"], result["verdicts"][culprit]) == (0, culprit, "BAD"), progress


@pytest.mark.whole
def test_numbers_that_moved_and_came_back(recorded: Repo) -> None:
    """Change, revert, re-land: a commit that moved the numbers is named, and twins of one tree do no harm."""
    repo, good = recorded, recorded.git("rev-parse", "HEAD")
    note(repo, "one")
    repo.edit(LOSS, SHARP, DULL)
    first = repo.commit("Tidy the log-prob path")
    repo.edit(LOSS, DULL, SHARP)
    repo.commit("Revert")
    repo.edit(LOSS, SHARP, DULL)
    again = repo.commit("Tidy the log-prob path again")
    (repo.root / "README").write_text("words")
    repo.commit("words")
    for jobs in ("1", "2"):
        code, result, progress = bisect(repo, f"{good}..HEAD", "-j", jobs)
        assert (code, result["outcome"]) == (0, "found"), progress
        assert result["culprit"]["commit"] in (first, again)
        assert result["explains_bad"] is True


def test_a_misused_door_is_a_skip(recorded: Repo) -> None:
    """A commit that observes one signal twice cannot be tested: it is skipped with that reason, and nothing stops."""
    repo, good = recorded, recorded.git("rev-parse", "HEAD")
    line = '            observe("input", "", {name: t[name][update.of(name)] for name in _inputs(self.config)})\n'
    repo.edit("core/repro_core/train/trainer.py", line, line + line)
    broken = repo.commit("Observe more")
    repo.edit("core/repro_core/train/trainer.py", line + line, line)
    repo.edit(LOSS, SHARP, DULL)
    last = repo.commit("Observe less")
    code, result, _ = bisect(repo, f"{good}..HEAD")
    assert (code, result["outcome"], set(result["suspects"])) == (3, "ambiguous", {broken, last})
    assert "observed twice" in result["skips"][broken]


def test_worktrees_are_made_side_by_side(fork: Repo) -> None:
    """Many worktrees made and removed at once, by several owners, do not stumble over each other's halves."""
    commit, checkout = fork.git("rev-parse", "HEAD"), find_checkout(fork.root)
    owners = [Worktrees(checkout) for _ in range(2)]

    def make(owner: Worktrees) -> bool:
        for _ in range(6):
            with owner.at(commit, None) as place:
                if not (place.root / LOSS).exists():
                    return False
        return True

    with ThreadPoolExecutor(max_workers=8) as pool:
        made = list(pool.map(make, owners * 4))
    for owner in owners:
        owner.close()
    assert all(made)
    assert not left_behind(fork)
