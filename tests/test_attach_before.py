"""Backward passes that a program makes before its optimizer: checks, the way to its first step, or steps by hand."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from test_attach_passes import diff, run

from repro_golden.recording.attach.base.settings import Settings
from repro_golden.recording.attach.gathered.run import run_traced
from repro_golden.trace import Trace

BEFORE = {
    "a check": (2, "loss_of(model).backward(); trained(2)"),
    "a check by torch.autograd.grad": (2, "torch.autograd.grad(loss_of(model), model.parameters()); trained(2)"),
    "the first step's pass": (
        2,
        """
    loss_of(model).backward()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1); optimizer.step()
    step(model, optimizer)
""",
    ),
    "training by hand": (3, "loss_of(model).backward(); by_hand(model.parameters()); trained(2)"),
    "training by hand, of another model": (
        4,
        """
    critic = net()
    loss_of(critic).backward()
    torch.optim.SGD(model.parameters(), lr=0.1)  # holds nothing of it
    trained(2); trained(1)
""",
    ),
    "training by hand, whose parameters are made anew": (
        2,
        """
    params = [p.detach().clone().requires_grad_() for p in model.parameters()]
    loss = sum((p * torch.randn(p.shape)).sum().square() for p in params)
    params = [(p - 0.1 * g).detach().requires_grad_() for p, g in zip(params, torch.autograd.grad(loss, params))]
    optimizer = torch.optim.SGD(params, lr=0.1)
    sum((p * torch.randn(p.shape)).sum().square() for p in params).backward(); optimizer.step()
""",
    ),
}

TWO = """
import torch
torch.manual_seed(0)
body, head = torch.nn.Linear(3, 4), torch.nn.Linear(4, 1)
def loss():
    return head(body(torch.randn(2, 3))).square().mean()
loss().backward()
optimizer = torch.optim.SGD(head.parameters(), lr=0.1)
for _ in range(2):
    optimizer.step()
    optimizer.zero_grad()
    loss().backward()
"""


@pytest.mark.parametrize("kind", BEFORE)
def test_a_pass_before_the_optimizer_is_a_step_where_it_moved_what_that_holds(tmp_path: Path, kind: str) -> None:
    """A check is none, nor what the first step's gradients are of; what is trained by hand before keeps its steps."""
    steps, body = BEFORE[kind]
    begin = """
def main():
    model = net()
    def trained(times):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(times): step(model, optimizer)
    """
    trace = run(tmp_path, f"{begin}{body.strip()}\nmain()\n")
    assert len(trace.steps) == steps
    names = {row.name for index in range(steps) for row in trace.rows(index)}
    assert any("optimizer.1" in name for name in names) == ("by hand" in kind)


def test_the_first_step_that_is_asked_for_is_not_a_check(tmp_path: Path) -> None:
    """What a rate moves shows in it."""
    checked = "model = net()\nloss_of(model).backward()\noptimizer = torch.optim.SGD(model.parameters(), lr=rate)\n"
    code, output = diff(tmp_path, f"{checked}for _ in range(3): step(model, optimizer)\n", "--steps", "1")
    assert code == 1 and "differs at step 0, phase update" in output, output


@pytest.mark.parametrize("at", [(0, "input", "start/weight"), (0, "grad", "weight")])
def test_what_is_planted_in_a_pass_that_is_no_step_is_planted_once(tmp_path: Path, at: tuple[int, str, str]) -> None:
    """One ULP moves no pass before the optimizer to a step, and is not there twice in the first one."""
    alone = TWO.replace("head(body(torch.randn(2, 3)))", "head(torch.randn(2, 4))")  # its gradient has one name in both
    (tmp_path / "train.py").write_text(alone if at[1] == "grad" else TWO)
    values = []
    for name, planted in (("plain", ()), ("planted", (at,))):
        asked = Settings(str(tmp_path / name), perturbation=planted)
        assert run_traced([sys.executable, str(tmp_path / "train.py")], tmp_path / name, asked)[0] == 0
        trace = Trace(tmp_path / name)
        (row,) = [row for row in trace.rows(0) if (row.phase, row.name) == at[1:]]
        values.append(torch.frombuffer(bytearray(row.values or row.sketch), dtype=torch.float32))
        assert len(trace.steps) == 2
    plain, planted = values
    assert planted[0] == torch.nextafter(plain[0], torch.tensor(torch.inf)) and torch.equal(planted[1:], plain[1:])
