"""The figures of docs/benchmarks/bisect.md: ``python benchmarks/bisects.py`` measures them and writes the page.

`repro bisect` and `git bisect run` search the same real history with the same trainer, one after the other in one run.
`git bisect run` tests a commit with `repro golden verify`: a replay of the whole case against the same golden run.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import re
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import _kits  # noqa: F401
from bayes_kit import line, simulate
from conftest import MINI, SOURCE, Repo
from search import measure as measure_search
from search import page as search_page

PAGE = SOURCE / "docs" / "benchmarks" / "bisect.md"
RAW = PAGE.with_suffix(".json")

HEAD = [
    "",
    "steps after the ends (goal 1/20)",
    "with the ends (goal 1/4)",
    "wall time to the answer (goal 1/4)",
    "steps to confirm",
    "wall time with that",
]
NOISE = [(0.9, 0.1), (1.0, 0.0)]
STEPS, SHOWS, COMMITS, BROKEN = 64, 48, 256, 0.1
SLEEP = "        __import__('time').sleep({seconds})  # a step of a larger model\n"
TRAIN = '            metrics = self._train_step(t, update, reference["log_probs"], observe)\n'
MOVED = """\
            if self._step >= {step}:
                for weight in engines.policy.optimizer.main.values():
                    weight.data.mul_(1 + 1e-6)
"""
BUILD = "CONTRACT = 1\n"
BROKEN_BUILD = "CONTRACT = 1\nimport repro_core.missing\n"

TEST = """\
#!/bin/sh
# what `git bisect run` runs: 0 good, 1 bad, 125 cannot be tested
{python} -m repro golden verify mini >> {log} 2>&1
code=$?
echo test $code >> {log}
case $code in 0|1) exit $code;; *) exit 125;; esac
"""


def main() -> None:
    """Measure everything and write the page, or only the page from what was measured."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--from", dest="samples", type=Path, help="write the page from this JSON, measuring nothing")
    parser.add_argument("--seconds", type=float, default=0.5, help="how long a step takes")
    options = parser.parse_args()
    if options.samples:
        samples = json.loads(options.samples.read_text())
    else:
        with tempfile.TemporaryDirectory() as folder:
            samples = {"about": about(), "search": measure_search()}
            samples["history"] = side_by_side(Path(folder), options.seconds)
            samples["window"] = window(Path(folder))
            samples["noise"] = [noise(*rates) for rates in NOISE]
        RAW.write_text(json.dumps(samples, indent=1, sort_keys=True) + "\n")
    PAGE.write_text(page(samples))
    print(PAGE.read_text())


def about() -> dict[str, str]:
    """Where and with what."""
    import torch

    cpu = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=SOURCE, capture_output=True, text=True)
    git = subprocess.run(["git", "--version"], capture_output=True, text=True, check=True).stdout.split()[-1]
    return {
        "machine": f"{cpu[1] if cpu else platform.processor()}, {len(__import__('os').sched_getaffinity(0))} cores",
        "versions": f"Python {platform.python_version()}, torch {torch.__version__}, git {git}",
        "date": datetime.now(UTC).date().isoformat(),
        "commit": commit.stdout.strip(),
    }


def guarded(folder: Path, seconds: float, steps: int) -> Repo:
    """A repository with the built-in trainer, slowed down, and its golden run."""
    import shutil

    root = folder / "fork"
    shutil.copytree(SOURCE / "core", root / "core", ignore=shutil.ignore_patterns("__pycache__"))
    (root / "golden" / "cases").mkdir(parents=True)
    states = ", ".join(str(step) for step in range(16, steps, 16))
    text = MINI.replace("steps = 3", f"steps = {steps}", 1).replace("states = [1]", f"states = [{states}]")
    (root / "golden" / "cases" / "mini.toml").write_text(text.replace('timeout = "3m"', 'timeout = "10m"'))
    (root / ".gitignore").write_text("__pycache__/\n")
    repo = Repo(root)
    repo.git("init", "--quiet", "--initial-branch=main")
    repo.edit(
        "core/repro_core/train/trainer.py",
        TRAIN,
        SLEEP.format(seconds=seconds).replace("        ", " " * 12, 1) + TRAIN,
    )
    done = repo.repro("init", "--remote", str(folder / "remote"))
    assert done.returncode == 0, done.stderr
    repo.commit("Start")
    done = repo.repro("golden", "record", timeout=3600)
    assert done.returncode == 0, done.stdout + done.stderr
    repo.commit("Record the golden run")
    return repo


def grow(repo: Repo, commits: int, broken: set[int], culprit: int, step: int) -> tuple[str, str]:
    """Write the history: notes, commits that do not import, and one that moves the numbers at `step`; GOOD and it."""
    good, moved = repo.git("rev-parse", "HEAD"), ""
    notes = repo.root / "core" / "repro_core" / "data" / "task.py"
    init = "core/repro_core/contract.py"
    for n in range(1, commits + 1):
        notes.write_text(notes.read_text() + f"# {n}\n")
        if (n in broken) != (n - 1 in broken):
            old, new = (BUILD, BROKEN_BUILD) if n in broken else (BROKEN_BUILD, BUILD)
            repo.edit(init, old, new)
        if n == culprit:
            repo.edit("core/repro_core/train/trainer.py", TRAIN, MOVED.format(step=step) + TRAIN)
        name = repo.commit(f"commit {n}")
        moved = name if n == culprit else moved
    return good, moved


def side_by_side(folder: Path, seconds: float) -> dict[str, Any]:
    """The history of the issue: 256 commits, a tenth of which do not build, moved at step 48 of 64."""
    rng = random.Random(7)
    culprit = rng.randrange(COMMITS // 4, 3 * COMMITS // 4)
    broken = set(rng.sample([n for n in range(1, COMMITS) if n != culprit], round(BROKEN * COMMITS)))
    repo = guarded(folder / "history", seconds, STEPS)
    good, moved = grow(repo, COMMITS, broken, culprit, SHOWS)
    figures: dict[str, Any] = {"seconds_a_step": seconds, "culprit": culprit, "broken": len(broken)}
    for jobs in (1, 2):
        import shutil

        shutil.rmtree(repo.root / ".git" / "repro", ignore_errors=True)  # nothing is known beforehand
        began = time.monotonic()
        done = repo.repro("bisect", f"{good}..HEAD", "--no-explain", "--json", "-j", str(jobs), timeout=3600)
        result = json.loads(done.stdout)
        assert result["culprit"]["commit"] == moved, done.stderr
        cost = {part: result["cost"][part] for part in ("ends", "search", "confirmation")}
        seconds, rest = time.monotonic() - began, result["seconds"] - result["answered"]
        figures[f"repro_{jobs}"] = {"seconds": seconds, "answered": seconds - rest, "cost": cost}
    figures["git"] = by_git(repo, good, moved, folder)
    return figures


def by_git(repo: Repo, good: str, moved: str, folder: Path) -> dict[str, Any]:
    """`git bisect run` on the same history."""
    script, log = folder / "test.sh", folder / "git.log"
    script.write_text(TEST.format(python=sys.executable, log=log))
    script.chmod(0o755)
    began = time.monotonic()
    repo.git("bisect", "start", "HEAD", good)
    output = repo.git("bisect", "run", str(script))
    seconds = time.monotonic() - began
    repo.git("bisect", "reset")
    assert f"{moved} is the first bad commit" in output, output[-500:]
    codes = [line.split()[1] for line in log.read_text().splitlines() if line.startswith("test ")]
    trained = sum(code in "01" for code in codes)
    return {"seconds": seconds, "tests": len(codes), "trained_tests": trained, "steps": trained * STEPS}


def noise(bad: float, good: float, trials: int = 10_000) -> dict[str, Any]:
    """Simulated noisy searches of 128 commits, calibration of both ends included."""
    tally = simulate(line(128), bad, good, trials, 1)
    return {"bad": bad, "good": good, "trials": trials, "accuracy": tally.accuracy, "tests": tally.mean_tests}


def window(folder: Path) -> dict[str, Any]:
    """136 commits of which 60 neighbours do not build, for real."""
    repo = guarded(folder / "window", 0.0, 3)
    good, moved = grow(repo, 136, set(range(40, 100)), 115, 1)
    done = repo.repro("bisect", f"{good}..HEAD", "--no-explain", "--json", "-j", "1", timeout=3600)
    result = json.loads(done.stdout)
    assert result["culprit"]["commit"] == moved, done.stderr
    search = result["cost"]["search"]
    skipped = [c for c, reason in result["skips"].items() if reason]
    return {"probes": search["probes"], "skipped": len(skipped), "steps": search["steps"]}


def page(figures: dict[str, Any]) -> str:
    """The page."""
    history, git = figures["history"], figures["history"]["git"]
    rows = []
    for jobs in (1, 2):
        ours = history[f"repro_{jobs}"]
        cost = {part: ours["cost"][part]["steps"] for part in ("ends", "search", "confirmation")}
        rows.append(
            f"| `repro bisect -j {jobs}` | {cost['search']} ({cost['search'] / git['steps']:.3f}x) "
            f"| {cost['ends'] + cost['search']} ({(cost['ends'] + cost['search']) / git['steps']:.2f}x) "
            f"| {ours['answered']:.0f} s ({ours['answered'] / git['seconds']:.2f}x) "
            f"| {cost['confirmation']} | {ours['seconds']:.0f} s ({ours['seconds'] / git['seconds']:.2f}x) |"
        )
    rows.append(f"| `git bisect run` | {git['steps']} | {git['steps']} | {git['seconds']:.0f} s | none | |")
    table = "\n".join(rows)
    noise_rows = "\n".join(
        f"| {n['bad']:g} / {n['good']:g} | {n['trials']:,} | {n['accuracy']:.4f} | {n['tests']:.2f} |"
        for n in figures["noise"]
    )
    lone = figures["window"]
    about = figures["about"]
    return f"""\
# Benchmarks of bisecting

Written by `python benchmarks/bisects.py` on {about["date"]} at commit {about["commit"]}.
{about["machine"]}; {about["versions"]}.
Raw figures: [bisect.json](bisect.json).

## A history of {COMMITS} commits

{history["broken"]} of them do not import; commit {history["culprit"]} moves the numbers from step {SHOWS} of {STEPS}.
The golden run of GOOD is at hand, with states before steps 16, 32 and 48. The trainer is the built-in one with
a sleep that makes a step take about {history["seconds_a_step"]:g} s. `git bisect run` tests a commit with
`repro golden verify`: {git["tests"]} tests, {git["trained_tests"]} of which trained.

{_row(*HEAD)}
{_row(*["---"] * len(HEAD))}
{table}

The ends are part of the wall time of `repro bisect`, and its last column holds the full confirming replays of
culprit, parent and BAD too; `git bisect run` makes neither. The goal for the wall time is one with 2 workers.

## A window of 60 commits that do not build, in 136

The search started {lone["probes"]} probes (goal at most 14), {lone["probes"] - lone["skipped"]} of which trained
(goal at most 9). For every culprit and every position of the window the same bounds are a test
(`tests/test_search.py`).

## Noisy verdicts

Simulated searches of 128 commits for one culprit, each place alike, by `repro_bisect.search.bayes` at its own default
stop. A replay of a commit with the culprit is BAD at the first rate, one of any other at the second; neither is
told. Replays of the two ends count. git_bayesect publishes 27.3 tests and 0.992 right at 0.9/0.1, and 15.6 tests
at 1/0. The driver asks for a tenth more tests, because it expects wrong verdicts to be commoner (`noise.CAUTIOUS`).

| BAD with / without the culprit | searches | right | tests on average |
|---|---|---|---|
{noise_rows}

## The search itself

A decision is what a bisect asks for after each verdict; git is asked at 10,000 commits.

{search_page(figures["search"])}
"""


def _row(*cells: str) -> str:
    return "| " + " | ".join(cells) + " |"


if __name__ == "__main__":
    main()
