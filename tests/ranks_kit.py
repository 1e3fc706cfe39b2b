"""Cases of a trainer on several ranks (`ranks_interface`), and runs of them without a repository around."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import warm_kit
from conftest import Repo

from repro_golden.case.file import Case
from repro_golden.replay.children import ChildFailure, Run, RunResult
from repro_golden.repository.checkout import Place
from repro_golden.subjects import launch
from repro_golden.trace import Trace

__all__ = ["case_of", "failing", "place_of", "repository", "run", "traced"]

CASE = """\
[case]
name = "bandit"
steps = 3
proof_steps = 1
rollouts = "golden/rollouts/bandit"

[subject]
module = "interface"
path = "training"
timeout = "10m"

[subject.config]
arms = 4
seed = 3

[first_step]
check = false

[resources]
ranks = 2

[layouts.one]
ranks = 1
"""


def place_of(folder: Path) -> Place:
    """A folder with the trainer in it."""
    (folder / "training").mkdir(parents=True)
    shutil.copy(Path(__file__).parent / "ranks_interface.py", folder / "training" / "interface.py")
    return Place(folder)


def case_of(ranks: int = 2, *, steps: int = 3, timeout: float = 120.0, **config: Any) -> Case:
    """The case of a trainer on so many ranks."""
    config = {"arms": 4, "seed": 3, **config}
    subject = {"module": "interface", "path": "training", "timeout": timeout, "config": config}
    experiment = {"name": "bandit", "steps": steps, "rollouts": "golden/rollouts/bandit"}
    return Case.model_validate({"case": experiment, "subject": subject, "resources": {"ranks": ranks}})


def run(case: Case, place: Place, *asked: Run, log: str = "log") -> list[RunResult]:
    """Make runs."""
    return warm_kit.called(launch)(case, place, asked, place.root / log)


def traced(case: Case, place: Place, name: str, steps: int = 3, **asked: Any) -> Trace:
    """The trace of one run."""
    run(case, place, Run(steps, trace=str(place.root / name), **asked), log=f"{name}.log")
    return Trace(place.root / name)


def failing(case: Case, place: Place, name: str = "trace") -> ChildFailure:
    """How a run fails."""
    with pytest.raises(ChildFailure) as raised:
        traced(case, place, name)
    return raised.value


def repository(folder: Path) -> Repo:
    """A repository that guards the trainer on two ranks, with its first golden run."""
    repo = Repo(folder / "fork")
    place_of(repo.root)
    (repo.root / "golden" / "cases").mkdir(parents=True)
    (repo.root / "golden" / "cases" / "bandit.toml").write_text(CASE)
    (repo.root / ".gitignore").write_text("__pycache__/\n")
    repo.git("init", "--quiet")
    done = repo.repro("init", "--remote", str(folder / "remote"))
    assert done.returncode == 0, done.stderr
    repo.commit("Start")
    done = repo.repro("golden", "record")
    assert done.returncode == 0, done.stdout + done.stderr
    return repo


def answer(repo: Repo, *command: str) -> Any:
    """What a command says as JSON."""
    return json.loads(repo.repro(*command, "--json").stdout)
