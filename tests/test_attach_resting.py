"""What a program holds in resting optimizers, records, variables and calls that raised is recorded, and let go."""

from __future__ import annotations

import contextlib
import gc
import sys
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import warm_kit
from beside_kit import read
from conftest import environment
from torch import nn

from repro_golden.compare.traces import compare
from repro_golden.recording.attach.alive.beside import Beside
from repro_golden.recording.attach.alive.variables import names_of
from repro_golden.recording.attach.base.by_identity import id_of
from repro_golden.recording.attach.base.steps import Steps
from repro_golden.trace import Trace

RESTING = """\
import os, torch
torch.manual_seed(0)
def net():
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
def main():
    actor, critic = net(), net()
    of_actor, of_critic = (torch.optim.AdamW(m.parameters(), 1e-2) for m in (actor, critic))
    for step in range(9):
        x = torch.randn(8, 4)
        if step < 3:
            loss, optimizer = (critic(x) - 1).pow(2).mean(), of_critic
        else:
            loss, optimizer = -(actor(x) * critic(x).sign().detach()).mean(), of_actor
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step == 5 and os.environ.get("PLANT") == "weight":
            critic[2].weight.data.view(torch.int32)[0, 0] += 1
        if step == 5 and os.environ.get("PLANT") == "state":
            of_critic.state[critic[2].bias]["exp_avg_sq"].view(torch.int32)[0] += 1
main()
"""

RECORDS = """\
import dataclasses, os, torch
torch.manual_seed(0)
@dataclasses.dataclass
class Factor:
    factor: torch.Tensor
class Slow:
    def __init__(self):
        self.weights, self.name = torch.zeros(3), "slow"
class Own(torch.optim.SGD):
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p].setdefault("kron", Factor(torch.eye(2)))
                self.state[p].setdefault("slow", Slow())
        return super().step(closure)
model = torch.nn.Linear(4, 1)
optimizer = Own(model.parameters(), 0.1)
for step in range(4):
    loss = model(torch.randn(8, 4)).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step == 1 and os.environ.get("PLANT") == "record":
        optimizer.state[model.bias]["kron"].factor[0, 0] += 1
    if step == 1 and os.environ.get("PLANT") == "object":
        optimizer.state[model.bias]["slow"].weights[0] += 1
"""

RAISING = """\
import torch, weakref
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
model.register_buffer("nothing", torch._efficientzerotensor((4,)))
optimizer, scaler, references = torch.optim.SGD(model.parameters(), 0.1), torch.amp.GradScaler("cpu"), []
class Big:
    pass
def failing(step):
    big = Big()
    references.append(weakref.ref(big))
    def closure():
        assert big is None
    try:
        step(closure)
    except AssertionError:
        pass
for step in range(3):
    loss = model(torch.randn(8, 4)).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    failing(optimizer.step)
print("alive", sum(reference() is not None for reference in references))
"""

FREED = """\
import torch, weakref
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for step in range(3):
    optimizer.zero_grad()
    model(torch.randn(8, 4)).pow(2).mean().backward()
    optimizer.step()
    torch.utils.swap_tensors(model.bias, torch.nn.Parameter(torch.zeros(1)))
weight = weakref.ref(model.weight)
optimizer.param_groups.clear()
del model
print("alive", int(weight() is not None))
"""


def record(tmp_path: Path, source: str, name: str, plant: str = "") -> tuple[Trace, str]:
    """The trace of a program, and what it printed."""
    (tmp_path / "train.py").write_text(source)
    command = [sys.executable, "-m", "repro", "trace", "--out", str(tmp_path / name), "--", sys.executable, "train.py"]
    done = warm_kit.run(command, tmp_path, environment() | {"PLANT": plant})
    assert done.returncode == 0, done.stderr
    return Trace(tmp_path / name), done.stdout


@pytest.mark.parametrize(
    ("source", "plants"),
    [
        (RESTING, {"weight": "resting/1/2.weight", "state": "resting/1/exp_avg_sq/2.bias"}),
        pytest.param(RECORDS, {"record": "kron.factor/bias", "object": "slow.weights/bias"}, marks=pytest.mark.whole),
    ],
    ids=["resting", "records"],
)
def test_what_changes_behind_the_optimizer_that_steps(tmp_path: Path, source: str, plants: dict[str, str]) -> None:
    """A critic that was trained before, and state in records and objects, are read at every step."""
    plain, _ = record(tmp_path, source, "plain")
    assert compare(plain, record(tmp_path, source, "again")[0]).equal
    for plant, signal in plants.items():
        first = compare(plain, record(tmp_path, source, plant, plant)[0]).divergence
        assert first is not None
        step = 6 if source is RESTING else 2
        assert (first.step, first.phase) == (step, "update")
        assert first.signal.replace("resting/0/", "resting/1/") == signal


def test_a_step_that_raised_keeps_nothing_alive(tmp_path: Path) -> None:
    """What its frames held is gone when they are; a buffer of zeros without memory is named, and ends nothing."""
    trace, printed = record(tmp_path, RAISING, "trace")
    assert printed == "alive 0\n"
    assert trace.end is not None and "buffer/nothing" in trace.end["unread"]


def test_weights_go_when_the_program_lets_go_of_them(tmp_path: Path) -> None:
    """What is known of an optimizer's parameters kept them alive, and a second model had no room beside the first."""
    trace, printed = record(tmp_path, FREED, "trace")
    assert printed == "alive 0\n" and len(trace.steps) == 3


def test_a_call_in_the_place_of_one_that_raised() -> None:
    """A call that is made where one raised before is an outermost one, wherever its frame lies."""
    begun, ended = list[bool](), list[int]()

    class FailedError(Exception):
        pass

    def step(optimizer: object, fails: bool) -> object:
        if fails:
            raise FailedError
        return optimizer

    def skipped(_: object, stepped: bool, *__: object) -> bool:
        return stepped

    steps = Steps(
        lambda _, first: begun.append(first), lambda made: ended.append(len(made.optimizers)), lambda item: [item],
        lambda _: {},
    )  # fmt: skip
    outer = steps.outer(step, lambda optimizer, _: optimizer, skipped)
    for number in range(20):
        with pytest.raises(FailedError) if number % 2 else contextlib.nullcontext():
            outer(object(), bool(number % 2))
    assert all(begun) and ended == [1] * 10


def test_a_look_keeps_nothing_alive() -> None:
    """What a function's variable referred to goes when that is given another value."""
    tensor = torch.ones(1)
    gone, beside, model = weakref.ref(tensor), Beside(), nn.Linear(2, 2)
    read(beside, 3, model)
    gc.collect()
    gc.disable()
    try:
        for step in (3, 4):  # a look and a search
            read(beside, step, model)
        del tensor
        assert gone() is None
    finally:
        gc.enable()


def test_a_programs_locals_stay_as_it_made_them() -> None:
    """Settings that a function keeps in what `locals()` gave it are not its arguments again after a look."""

    def train(warm: int, beside: Beside) -> tuple[dict[str, Any], dict[str, Any], nn.Module]:
        settings = locals()
        settings |= {"warm": 2, "more": [3]}
        before, later = dict(settings), nn.Linear(2, 2)
        for step in range(4):
            read(beside, step, later)
        assert names_of([later]) == {id_of(later): "later"}
        return settings, before, later

    after, before, _ = train(100, Beside())
    assert after == before and after["warm"] == 2
