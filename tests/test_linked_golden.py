"""Golden runs of programs that read what the checkout holds and no commit does."""

from __future__ import annotations

import contextlib
import json
import re
import shlex
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import flaky_kit
import pytest
from conftest import Repo
from history_kit import CASE, TRAIN, edit, note, start
from trace_kit import write

from repro_bisect.driver.circumstances import refuse_explained
from repro_bisect.predicates.predicates import Bitwise
from repro_bisect.probe.around import watched_rollouts
from repro_bisect.probe.executors import Outcome, Task
from repro_bisect.probe.prober import Prober
from repro_bisect.probe.request import Request
from repro_bisect.probe.scheduler import Scheduler
from repro_golden.base.errors import NotVerifiableError
from repro_golden.repository.checkout import find_checkout
from repro_golden.store.rollouts import RolloutFiles
from repro_golden.trace import Trace
from repro_golden.trace.writer import metric_row

READS = TRAIN.replace("import torch\n", "import torch\nSEED = int(open('data/seed').read())\n").replace(
    "seed(3)", "seed(SEED)"
)


@pytest.fixture
def reading(tmp_path: Path) -> Repo:
    """A trainer that reads ignored data."""
    repo = start(tmp_path, READS, None)
    (repo.root / ".gitignore").write_text("data\n")
    (repo.root / "data").mkdir()
    (repo.root / "data" / "seed").write_text("3")
    assert repo.repro("init", "--remote", str(tmp_path / "remote")).returncode == 0
    repo.commit("Ignore data")
    return repo


COMMAND = ("--", sys.executable, "train.py", "--steps", "2")


def test_recording_what_no_worktree_could_run(reading: Repo) -> None:
    """A program that needs ignored data is refused when it is recorded, before it is run, and the cure is printed."""
    done = reading.repro("golden", "record", "toy", *COMMAND)
    message = done.stderr.splitlines()[-1]
    assert done.returncode == 2 and "in a worktree of its commit" in message, done.stderr
    assert "data/seed is in your checkout" in message
    assert "run repro golden record toy --link data -- " in message
    assert not (reading.root / "golden" / "cases" / "toy.toml").exists()


def test_recording_what_the_checkout_has_built(tmp_path: Path) -> None:
    """An extension that is built in place keeps a bisect from a worktree, not a golden run from its checkout."""
    look = "if not os.path.exists('kern.so'): raise ModuleNotFoundError(\"No module named 'kern'\")"
    repo = start(tmp_path, TRAIN.replace("import torch\n", f"import torch\n{look}\n"), None)
    (repo.root / ".gitignore").write_text("*.so\n")
    (repo.root / "kern.so").touch()
    assert repo.repro("init", "--remote", str(tmp_path / "remote")).returncode == 0
    repo.commit("Ignore it")
    done = repo.repro("golden", "record", "toy", *COMMAND)
    assert done.returncode == 0, done.stderr
    assert "note: in a worktree of its commit" in done.stderr and "kern is built in your checkout" in done.stderr


@pytest.mark.whole
def test_a_golden_run_of_linked_data(reading: Repo) -> None:
    """With --link it is recorded, the case says so, and it is GOOD's first run in a bisect until the data changes."""
    done = reading.repro("golden", "record", "toy", "--link", "data/", *COMMAND)
    assert done.returncode == 0, done.stderr
    assert 'link = ["data"]' in (reading.root / "golden" / "cases" / "toy.toml").read_text()
    good = reading.commit("Golden run")
    note(reading, "one")
    culprit = edit(reading, "scale = 1.0\n", "scale = 1.0 + 1e-6\n", "Scale")
    bisect = ("bisect", "--no-explain", "--case", "toy", f"{good}..HEAD", "--json", "-j", "1")
    first = reading.repro(*bisect)
    data = json.loads(first.stdout)
    assert (data["culprit"]["commit"], data["golden"] is None) == (culprit, False), first.stderr
    (reading.root / "data" / "seed").write_text("4")
    second = reading.repro(*bisect)
    data = json.loads(second.stdout)
    assert (data["culprit"]["commit"], data["golden"], data["cost"]["reused"]) == (culprit, None, 0), second.stderr
    assert "recorded with other files beside its code" in second.stderr
    (reading.root / "data" / "seed").write_text("3")
    reading.git("config", "core.autocrlf", "true")
    third = reading.repro(*bisect)
    data = json.loads(third.stdout)
    assert (data["culprit"]["commit"], data["golden"], data["cost"]["reused"]) == (culprit, None, 0), third.stderr
    assert "recorded with other line ends or attributes" in third.stderr


OPTIONAL = TRAIN.replace(
    "    scale = 1.0\n", "    scale = 2.0 if step >= LATE and os.path.exists('local.json') else 1.0\n"
)


def optional(folder: Path, late: int, case: str | None = None) -> Repo:
    """A trainer that reads an ignored file only if it is there, from a step on, and two more commits of it."""
    repo = start(folder, OPTIONAL.replace("LATE", str(late)), case)
    (repo.root / ".gitignore").write_text("local.json\n__pycache__\n")
    (repo.root / "local.json").write_text("{}")
    assert repo.repro("init", "--remote", str(folder / "remote")).returncode == 0
    repo.commit("Ignore it")
    return repo


def test_recording_what_the_checkout_alone_makes(tmp_path: Path) -> None:
    """A file that git ignores, and that a program reads only if it is there, is named; the printed command records.

    So it is where what the file says first counts in a later step.
    """
    repo = optional(tmp_path, 1)
    (repo.root / "__pycache__").mkdir()
    (repo.root / "__pycache__" / "x.pyc").touch()
    done = repo.repro("golden", "record", "toy", *COMMAND)
    message = done.stderr.splitlines()[-1]
    assert done.returncode == 1 and "makes other numbers than your checkout, from step 1, grad" in message, done.stderr
    assert "may be local.json of your checkout, which no worktree has" in message
    command = shlex.split(message.rpartition("; run repro ")[2])
    assert command[:5] == ["golden", "record", "toy", "--link", "local.json"], message
    done = repo.repro(*command)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("again", "recorded", "told"),
    [
        (
            2.0,
            "a",
            r"two replays of a agree, and its golden run.* does not \(it differs at step 0.* may be local\.json",
        ),
        (2.0, "z", r"it was recorded at z, which has other files outside of train\.py: widen that .*else what decides"),
        (3.0, "a", ""),
    ],
)
def test_replays_that_agree_and_their_golden_run(tmp_path: Path, again: float, recorded: str, told: str) -> None:
    """Where a third replay is like the second, the golden run is what differs, and what may decide is named."""
    Repo(tmp_path).git("init", "--quiet")
    (tmp_path / "local.json").touch()
    (case, identity), axis = flaky_kit.experiment(), flaky_kit.Points({"b": ["a"]}, "a", "b")

    def run(_: Task, folder: Path) -> Outcome:
        write(folder / "trace", [[metric_row("loss", "loss", again)]])
        return Outcome()

    golden, replay = (
        Trace(write(tmp_path / ".git" / str(value), [[metric_row("loss", "loss", value)]])) for value in (1.0, 2.0)
    )
    kept: Any = SimpleNamespace(trace=golden, record={"commit": recorded})
    rollouts, executor = watched_rollouts(case, RolloutFiles(None)), flaky_kit.Told(run)
    checkout = find_checkout(tmp_path)
    prober = Prober(checkout, case, axis, rollouts, identity, executor, Bitwise(), first=kept)
    asked = Request("a", 1)
    with ThreadPoolExecutor(1) as pool, contextlib.closing(prober):
        scheduler = Scheduler(prober, axis, pool, lambda _: None)
        raised = pytest.raises(NotVerifiableError, match=told) if told else contextlib.nullcontext()
        with raised:
            refuse_explained(scheduler, (asked, golden), (replace(asked, run=1), replay))
    assert executor.runs == {"a": 1}


@pytest.mark.whole
def test_a_golden_run_that_only_the_checkout_makes_is_no_noise(tmp_path: Path) -> None:
    """Where worktrees agree with each other and not with it, neither a bisect nor a pull request calls GOOD flaky."""
    repo = optional(tmp_path, 3, CASE)
    done = repo.repro("golden", "record", "toy")
    assert done.returncode == 0, done.stderr
    good = repo.commit("Golden run")
    edit(repo, "lr=0.01", "lr=0.02", "Faster")
    why = rf"two replays of {good[:10]} agree, and its golden run.* does not \(it differs at step 3,.*local\.json"
    for arguments in (("bisect", "--no-explain"), ("history",)):
        done = repo.repro(*arguments, "--case", "toy", f"{good}..HEAD", "-j", "1")
        message = done.stderr.splitlines()[-1]
        assert done.returncode == 3 and re.search(why, message) and "FLAKY" not in message, done.stderr
    done = repo.repro("report", "pr", f"{good}..HEAD", "--case", "toy", "-j", "1")
    assert re.search(f"toy: not verifiable: {why}", done.stdout), done.stdout + done.stderr


def test_the_folder_around_a_file_among_others_is_linked(tmp_path: Path) -> None:
    """Where git tracks a script beside data that it ignores, the data come together: one of them may be optional."""
    repo = start(tmp_path, READS, None)
    (repo.root / "data").mkdir()
    for name, text in (("seed", "3"), ("meta", "1"), ("prepare.py", "")):
        (repo.root / "data" / name).write_text(text)
    (repo.root / ".gitignore").write_text("data/seed\ndata/meta\n")
    assert repo.repro("init", "--remote", str(tmp_path / "remote")).returncode == 0
    repo.commit("Ignore data")
    assert "`--link data/` before --" in repo.repro("golden", "record", "toy", *COMMAND).stderr
    (repo.root / "data" / "meta").unlink()
    assert "`--link data/seed` before --" in repo.repro("golden", "record", "toy", *COMMAND).stderr


def test_a_case_says_its_own_links(reading: Repo) -> None:
    """--link is for a command alone."""
    path = reading.root / "golden" / "cases" / "toy.toml"
    path.parent.mkdir(parents=True)
    path.write_text(CASE)
    done = reading.repro("bisect", "--case", "toy", "--link", "data", "HEAD~1..HEAD")
    assert done.returncode == 2 and "--link are for a command after --" in done.stderr
