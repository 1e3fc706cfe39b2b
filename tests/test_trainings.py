"""Trainings beside each other, as an actor's and a critic's in processes of their own, are one recording."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import warm_kit
from conftest import Repo, environment

from repro_golden.trace import Trace

BOTH = """\
import os, sys
import torch
torch.set_num_threads(1)
def train(outputs, scale, steps=3):
    torch.manual_seed(0)
    model = torch.nn.Linear(4, outputs)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(steps):
        optimizer.zero_grad()
        loss = (model(torch.ones(2, 4) * (step + 1)) ** 2).mean() * scale
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
critic = os.fork()
if not critic:
    train(OUTPUTS, SCALE)
    sys.exit()
train(3, 1.0)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(critic, 0)[1]))
"""


def program(outputs: int = 1, scale: float = 1.0) -> str:
    """An actor with three outputs, and a critic with so many."""
    return BOTH.replace("OUTPUTS", str(outputs)).replace("SCALE", str(scale))


def traced(folder: Path, out: str, text: str, *options: str) -> tuple[int, str]:
    """The exit code and stderr of a program under `repro trace`."""
    (folder / "train.py").write_text(text)
    words = [sys.executable, "-m", "repro", "trace", "--out", out, *options, "--", sys.executable, "train.py"]
    done = warm_kit.run(words, folder, environment() | {"OMP_NUM_THREADS": "1"})
    return done.returncode, done.stderr


def critic_in(trace: Path) -> str:
    """What the names of the critic's signals begin with."""
    shapes = {row.name: list(row.shape) for row in Trace(trace).rows(2) if row.phase == "update"}
    assert sorted([shapes["weight"], shapes["training.1/weight"]]) == [[1, 4], [3, 4]]
    return "" if shapes["weight"] == [1, 4] else "training.1/"


def test_a_critic_beside_an_actor(tmp_path: Path) -> None:
    """Both are recorded and compared, each with its own norm, and a change in the critic alone is named as its own."""
    for out, scale in (("a", 1.0), ("b", 1.0), ("c", 1.5)):
        code, said = traced(tmp_path, out, program(scale=scale), "--ranks", "2")
        assert (code, "3 steps of 2 ranks" in said) == (0, True), said
    critic = critic_in(tmp_path / "a")
    assert {"grad_norm", "training.1/grad_norm"} <= {row.name for row in Trace(tmp_path / "a").rows(0)}
    diff = [sys.executable, "-m", "repro", "diff", "a"]
    same = warm_kit.run([*diff, "b"], tmp_path, environment())
    assert (same.returncode, "looked at 4 parameters, 4 gradients" in same.stdout) == (0, True), same.stdout
    other = warm_kit.run([*diff, "c"], tmp_path, environment())
    assert other.returncode == 1
    assert f"differs at step 0, phase grad, signal {critic}bias" in other.stdout, other.stdout


def test_that_there_is_a_critic_must_be_said(tmp_path: Path) -> None:
    """Which of the two begins first is chance: without a word about the second there is no trace of either."""
    code, said = traced(tmp_path, "a", program())
    assert code == 2
    assert "2 processes trained as rank 0: trace one program at a time, or say how many processes train" in said


def test_two_alike_are_refused(tmp_path: Path) -> None:
    """Of two with the same parameters nobody could say in the next run which is which."""
    code, said = traced(tmp_path, "a", program(outputs=3), "--ranks", "2")
    assert (code, "2 processes trained as rank 0, and nothing tells them apart" in said) == (2, True), said


@pytest.mark.parametrize("steps", [2, 4])
def test_trainings_of_other_lengths_are_not_whole(tmp_path: Path, steps: int) -> None:
    """What the longer one did behind the other's end stands in no step: the recording says that it is not whole."""
    longer = program().replace("train(1, 1.0)", f"train(1, 1.0, {steps})")
    _, said = traced(tmp_path, "a", longer, "--ranks", "2")
    assert "ranks recorded different numbers of steps" in said, said


CASE = """\
[case]
name = "both"
steps = 3

[subject]
kind = "command"
command = "python train.py"

[resources]
other_ranks = 1
"""


@pytest.mark.whole
def test_a_critics_commit_is_found(fork: Repo) -> None:
    """By a case that says so, the commit that changes the critic's loss is named, and at the critic."""
    (fork.root / "golden" / "cases").mkdir(parents=True, exist_ok=True)
    (fork.root / "golden" / "cases" / "both.toml").write_text(CASE)
    for message, scale in (("One", 1.0), ("Two", 1.0), ("Three", 1.5), ("Four", 1.5)):
        (fork.root / "train.py").write_text(program(scale=scale) + f"# {message}\n")
        fork.commit(message)
    done = fork.repro("bisect", "HEAD~3..HEAD", "--case", "both", "--quick")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Three" in done.stdout, done.stdout
    assert "bias (float32 [1])" in done.stderr, "it is the critic's"
