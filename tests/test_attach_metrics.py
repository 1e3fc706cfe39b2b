from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import pytest
import warm_kit

import repro_golden
from repro_golden.compare.coverage import coverage_of
from repro_golden.trace import Trace

LOGGED = """
import torch
from torch.utils.tensorboard import SummaryWriter

torch.manual_seed(0)
torch.set_num_threads(1)
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
board = SummaryWriter("board")
running = torch.zeros(())
for step in range(3):
    loss = model(torch.randn(4, 8)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    board.add_scalar("train/loss", loss, step)
    board.add_scalar(global_step=step, scalar_value=step + 0.5, tag="named")
    board.add_scalar("array", torch.tensor([step + 0.25]).numpy(), step)
    board.add_scalars("pair", {"a": step, "b": -step}, step)
    running += loss.detach()
    board.add_scalar("running", running, step)
    running.zero_()
    optimizer.step()
    print(repr(loss.item()), repr(norm.item()))
board.close()
"""

RUN = """
import wandb
import torch

model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
run = wandb.init(mode="offline", dir=".", settings=wandb.Settings(silent=True))
for step in range(3):
    optimizer.zero_grad()
    model(torch.randn(4, 8)).square().mean().backward()
    wandb.log({"reward": step / 3, "note": "text"})
    optimizer.step()
run.finish()
"""

SHOWN = """
import torch, repro_golden

torch.manual_seed(0)
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(3):
    out = model(torch.randn(4, 8))
    repro_golden.observe("activations", out)
    repro_golden.column("log_probs", out[:, 0])
    loss = out.square().mean()
    repro_golden.observe("loss", loss.item(), phase="loss")
    repro_golden.observe("activations", -out)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


PRINTED = """
import json, logging, sys
import torch

form = "[2026-01-01 00:00:00] %(filename)s:%(lineno)d - %(message)s"
logging.basicConfig(stream=sys.stderr, format=form, level="INFO")
torch.manual_seed(0)
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
print(json.dumps({"eval": 1.0}), flush=True)
sys.stdout = open(sys.stdout.fileno(), "w", closefd=False)  # another stream: heard from the next step on
for step in range(4):
    loss = model(torch.randn(4, 8)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(json.dumps({"loss": loss.item(), "step": step, "step_time": 1.5}))
    logging.info(f"step {step}: {{'train/kl': nan, 'train/odd': {step % 2}}}")
    if step % 2:
        print(f"after {step + 1} steps: accuracy={0.1 * step!r} skipme={step}")
    sys.stdout.flush()
print(json.dumps({"eval": 2.0, "lone \\ud800": 1}))
sys.stdout.flush()
"""


def traced(folder: Path, program: str, *options: str) -> tuple[Trace, str]:
    """The trace of a program, and what it printed."""
    (folder / "program.py").write_text(program)
    command = [sys.executable, "-m", "repro", "trace", "--out", "trace", *options, "--", sys.executable, "program.py"]
    done = warm_kit.run(command, folder)
    assert done.returncode == 0, done.stderr
    return Trace(folder / "trace"), done.stdout


def test_numbers_given_to_loggers_are_metrics(tmp_path: Path) -> None:
    """TensorBoard's scalars, the clipped norm and the learning rate are in the step log exactly, also of arrays."""
    trace, printed = traced(tmp_path, LOGGED)
    lines = [line.split() for line in printed.splitlines() if line[:1].isdigit()]
    assert [(s.metrics["train/loss"], s.metrics["grad_norm"]) for s in trace.steps] == [
        (float(loss), float(norm)) for loss, norm in lines
    ]
    assert [s.metrics["running"] for s in trace.steps] == [s.metrics["train/loss"] for s in trace.steps]
    assert [(s.metrics["named"], s.metrics["pair/b"]) for s in trace.steps] == [(0.5, 0), (1.5, -1), (2.5, -2)]
    assert [s.metrics["array"] for s in trace.steps] == [0.25, 1.25, 2.25]
    assert all(s.metrics["lr"] == 0.01 for s in trace.steps)
    assert trace.complete


@pytest.mark.whole
def test_numbers_given_to_wandb_are_metrics(tmp_path: Path) -> None:
    """What a program logs to Weights & Biases is in the step log, without its texts."""
    trace, _ = traced(tmp_path, RUN)
    assert [s.metrics["reward"] for s in trace.steps] == [0, 1 / 3, 2 / 3]
    assert all("note" not in s.metrics for s in trace.steps)


def test_numbers_in_the_output_belong_to_the_step_before_them(tmp_path: Path) -> None:
    """JSON lines, log lines and a pattern's numbers stand beside the step that they follow; times are left out."""
    trace, printed = traced(tmp_path, PRINTED, "--metric", r"(?P<name>\w+)=(?P<value>\S+)", "--ignore", "skip*")
    losses = [json.loads(line)["loss"] for line in printed.splitlines() if '"loss"' in line]
    assert [s.metrics.get("eval") for s in trace.steps] == [1.0, None, None, 2.0]
    assert [s.metrics["loss"] for s in trace.steps] == losses
    assert [s.metrics["train/odd"] for s in trace.steps] == [0, 1, 0, 1]
    assert all(math.isnan(s.metrics["train/kl"]) for s in trace.steps)
    assert [s.metrics.get("accuracy") for s in trace.steps] == [None, 0.1, None, 0.1 * 3]
    assert all({"step_time", "skipme"}.isdisjoint(s.metrics) for s in trace.steps)
    assert coverage_of(trace).left_out == ["step_time"], "what nobody asked to leave out is named"


def test_a_pattern_that_cannot_serve_is_refused(tmp_path: Path) -> None:
    """A regular expression that is none, or names no metric, is one line, and the program is not started."""
    for pattern in ("loss=(", "loss=(.*)"):
        command = [sys.executable, "-m", "repro", "trace", "--out", "trace", "--metric", pattern, "--", "touch", "ran"]
        done = warm_kit.run(command, tmp_path)
        assert (done.returncode, len(done.stderr.splitlines())) == (2, 1)
    assert not (tmp_path / "ran").exists()


def test_a_program_may_show_more(tmp_path: Path) -> None:
    """What a program observes itself is in the record of the step under way; a column keeps all its values."""
    trace, _ = traced(tmp_path, SHOWN)
    assert len(trace.steps) == 3
    for index in range(3):
        column = trace.row(index, "forward", "log_probs")
        shown = trace.row(index, "forward", "activations")
        assert column is not None and shown is not None and shown.shape == (4, 1)
        assert column.values is not None and len(column.values) == 16
        assert "loss" in trace.steps[index].metrics
        again = trace.row(index, "forward", "activations.1")  # shown twice in one step
        assert again is not None and again.fingerprint != shown.fingerprint


def test_nothing_is_taken_when_nobody_records() -> None:
    """Outside a recording `observe` and `column` take anything and keep nothing."""
    assert repro_golden._sink is None
    repro_golden.observe("anything", object())
    repro_golden.column("anything", None)
