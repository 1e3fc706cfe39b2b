"""Of trainings beside each other, such as an actor's and a critic's in processes of their own, one is recorded."""

from __future__ import annotations

from pathlib import Path

import pytest
from attach_kit import traced
from conftest import Repo

from repro_bisect.probe.executors.local import _slots
from repro_golden.case.file import Case

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
    train(OUTPUTS, 1.0)
    sys.exit()
train(3, SCALE)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(critic, 0)[1]))
"""


def program(outputs: int = 1, scale: float = 1.0) -> str:
    """An actor with three outputs, and a critic with so many."""
    return BOTH.replace("OUTPUTS", str(outputs)).replace("SCALE", str(scale))


CASE = """\
[case]
name = "both"
steps = 3

[subject]
kind = "command"
command = "python train.py"

[resources]
other_ranks = {others}
"""


def start(repo: Repo, others: int, *scales: float, outputs: int = 1) -> None:
    """A case, and a commit for each scale of the actor's loss."""
    (repo.root / "golden" / "cases" / "both.toml").write_text(CASE.format(others=others))
    for number, scale in enumerate(scales):
        (repo.root / "train.py").write_text(program(outputs, scale) + f"# {number}\n")
        repo.commit(f"commit {number}")


@pytest.mark.whole
def test_the_actor_is_recorded_whichever_begins_first(fork: Repo) -> None:
    """The larger training's commit is found, and the verdict says that there was another one."""
    start(fork, 1, 1.0, 1.0, 1.5, 1.5)
    done = fork.repro("bisect", "HEAD~3..HEAD", "--case", "both", "--quick")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "commit 2" in done.stdout
    assert "bias (float32 [3])" in done.stderr, "it is the actor's"
    assert "looked at 2 parameters, 2 gradients" in done.stdout
    assert "seen but not looked at: a training beside it (resources.other_ranks = 1)" in done.stdout


@pytest.mark.whole
@pytest.mark.parametrize(
    ("others", "outputs", "why"),
    [
        (
            0,
            1,
            "2 processes trained as rank 0: trace one program at a time, or say in a case that another training runs",
        ),
        (1, 3, "nothing tells which training is the one to record: two have 15 elements each"),
    ],
)
def test_what_nobody_said_or_can_tell_is_refused(fork: Repo, others: int, outputs: int, why: str) -> None:
    """That there is another training must be said, and two of one size could be taken for each other."""
    start(fork, others, 1.0, 1.0, outputs=outputs)
    done = fork.repro("bisect", "HEAD~1..HEAD", "--case", "both", "--quick")
    assert (done.returncode, why in done.stderr) == (2, True), done.stderr


@pytest.mark.whole
def test_a_golden_run_beside_another_training(fork: Repo) -> None:
    """Its proofs hold: planted changes are seen, and the recorder moves no number of either."""
    start(fork, 1, 1.0)
    done = fork.repro("golden", "record", "both")
    assert done.returncode == 0, done.stdout + done.stderr
    done = fork.repro("golden", "verify", "both")
    assert done.returncode == 0, done.stdout + done.stderr


def test_two_trainings_meet_at_a_port_of_their_probe() -> None:
    """Probes at once that train in several processes, an actor and a critic of one rank each too, share no port."""
    told = {"case": {"name": "both", "steps": 2}, "subject": {"kind": "command", "command": "python train.py"}}
    for processes, ports in (({"other_ranks": 1}, 2), ({"ranks": 2}, 2), ({}, 0)):
        slots = _slots(Case.model_validate(told | {"resources": processes}), 2)
        assert len({slot["MASTER_PORT"] for slot in slots if slot}) == ports


SERVED = """
import os, sys, torch, torch.distributed as dist
dist.init_process_group("gloo")
rank, trains = dist.get_rank(), int(sys.argv[1])
torch.manual_seed(0)
model = torch.nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1) if rank in (trains, int(sys.argv[2])) else None
for step in range(2):
    data = torch.full((2, 3), 1.0 + step)
    dist.broadcast(data, 0)
    if optimizer:
        model(data).sum().backward()
        optimizer.step()
dist.destroy_process_group()
"""


@pytest.mark.whole
def test_a_rank_that_only_serves(tmp_path: Path) -> None:
    """Whichever rank it is, the one that trains is recorded where one is asked for, and who does not is named."""
    first, _ = traced(tmp_path, SERVED, "first", ("--ranks", "1"), "0", "0")
    second, _ = traced(tmp_path, SERVED, "second", ("--ranks", "1"), "1", "1")
    assert [step.root for step in first.steps] == [step.root for step in second.steps]
    assert {trace.header.identity["layout"]["ranks"] for trace in (first, second)} == {"1"}, "as a case says"
    unread = [trace.end and trace.end["unread"] for trace in (first, second)]
    assert unread == [{f"rank {rank}": "no training step was recorded there"} for rank in (1, 0)]


DIED = """\
import os, subprocess, sys
if "RANK" not in os.environ:
    for rank in "01":
        subprocess.run([sys.executable, __file__], env={**os.environ, "RANK": rank, "WORLD_SIZE": "2"})
    sys.exit()
import torch
weight = torch.nn.Parameter(torch.ones(2))
optimizer = torch.optim.SGD([weight])
if os.environ["RANK"] == "0":
    raise RuntimeError("no data")
weight.sum().backward()
optimizer.step()
"""


def test_a_rank_that_died_is_not_said_to_serve(tmp_path: Path) -> None:
    """Where a launcher hides it, the verdict says with the rank that a process ended by an exception."""
    trace, _ = traced(tmp_path, DIED, "t", ("--ranks", "1"))
    why = "no training step was recorded there, and a process ended by RuntimeError: no data"
    assert trace.end and trace.end["unread"] == {"rank 0": why}
