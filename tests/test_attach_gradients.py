"""Which gradients a step is recorded with: of one that is skipped, that frees them, and behind a program's hooks."""

from __future__ import annotations

import weakref
from pathlib import Path

import pytest
import torch
from attach_kit import traced
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from repro_golden.compare.traces import compare, first_difference
from repro_golden.recording.attach.alive.readings import gradients_of, handed_to
from repro_golden.recording.attach.base.steps import Steps
from repro_golden.trace import Trace
from repro_golden.trace.families import family, plain

SCALED = """
import torch

torch.manual_seed(0)
torch.set_num_threads(1)
class Looks(torch.optim.SGD):  # as torch's contract has it for optimizers of one's own
    _step_supports_amp_scaling = True
    def step(self, closure=None):
        for group in self.param_groups if not self.found_inf else ():
            for p in group["params"]: p.data.sub_(p.grad)
class Own:  # none of torch's
    def __init__(self, params): self.param_groups = [{"params": list(params), "lr": 0.1}]
    def step(self):
        for p in self.param_groups[0]["params"]: p.data.sub_(p.grad, alpha=0.1)
models = [torch.nn.Linear(3, 2 + k) for k in range(4)]
first, second, third, fourth = (model.parameters() for model in models)
optimizers = [torch.optim.AdamW(first, fused=True), torch.optim.SGD(second), Looks(third), Own(fourth)]
scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
for step in range(6):
    for number, (model, optimizer) in enumerate(zip(models, optimizers)):
        loss = model(torch.randn(5, 3)).square().mean()
        model.zero_grad()
        scaler.scale(loss * (float("inf") if step == number else 1)).backward()
        scaler.step(optimizer)
        print(loss.item())
    scaler.update()
"""


def test_a_scaler_skips_steps_of_one_optimizer(tmp_path: Path) -> None:
    """Whoever looks for infinities, scaler or optimizer: the step that was left out is skipped, and no other."""
    trace, _ = traced(tmp_path, SCALED, "trace", ())
    assert len(trace.steps) == 24
    turns = {name.removesuffix("lr"): [] for step in trace.steps for name in step.metrics if name.endswith("lr")}
    for step in trace.steps:
        (turn,) = (name.removesuffix("lr") for name in step.metrics if name.endswith("lr"))
        turns[turn].append(step.metrics.get(f"{turn}skipped"))
    assert sorted(map(str, turns.values())) == sorted(
        str([1.0 if step == number else None for step in range(6)]) for number in range(4)
    )
    assert compare(trace, trace).equal, "gradients of skipped steps are no fault"


FREED = """
import sys
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

torch.manual_seed(0)
torch.set_num_threads(1)
class Sharp(torch.optim.SGD):  # as SAM: gradients are made and freed in its step
    def step(self, closure=None):
        with torch.enable_grad(): closure()
        self.inner.step()
        self.zero_grad()
class Once(torch.optim.SGD):
    @torch.no_grad()
    def step(self, closure=None):
        with torch.enable_grad(): closure()
        for p in self.param_groups[0]["params"]: p.sub_(p.grad, alpha=0.1)
        self.zero_grad()
kind = sys.argv[1]
model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Tanh(), torch.nn.Linear(3, 1))
inner = torch.optim.SGD(model.parameters(), lr=0.1)
optimizer = {"sharp": Sharp, "once": Once}.get(kind, torch.optim.SGD)(model.parameters(), lr=0.1)
optimizer.inner = inner
free = lambda *_: optimizer.zero_grad()
if kind == "hook": optimizer.register_step_post_hook(free)
if kind == "global": register_optimizer_step_post_hook(free)
for step in range(3):
    batch = torch.randn(5, 4)
    def closure():
        optimizer.zero_grad()
        model(batch).square().mean().backward()
    if kind not in ("sharp", "once"): closure()
    optimizer.step(closure if kind in ("sharp", "once") else None)
"""


def gradients(trace: Trace) -> list[dict[str, str]]:
    """Fingerprints of each step's gradients of parameters, by name."""
    rows = ((row for row in trace.rows(step) if row.phase == "grad") for step in range(len(trace.steps)))
    return [{plain(row.name): row.fingerprint for row in step} for step in rows]


@pytest.mark.parametrize("kind", ["hook", "global", "sharp", "once"])
def test_gradients_that_a_step_frees_are_read(tmp_path: Path, kind: str) -> None:
    """By a hook behind it or by itself; those that nobody could see before are named as unread. None is a copy."""
    kept, _ = traced(tmp_path, FREED, "kept", (), "kept")
    freed, _ = traced(tmp_path, FREED, "freed", (), kind)
    assert len(gradients(kept)[0]) == 4
    assert gradients(freed) == (gradients(kept) if kind != "once" else [{}] * 3)
    assert ("gradients" in (freed.end or {})["unread"]) is (kind == "once")
    assert not any(family(row.phase, row.name) == "copy" for row in freed.rows(0))


CLAMPED = """
import sys
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
made = []
def clamp(*_):
    made.append(1)
    if len(made) == 2: model.bias.data.fill_(float(sys.argv[1]))
register_optimizer_step_post_hook(clamp)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(4):
    optimizer.zero_grad()
    model(torch.ones(2, 4)).square().mean().backward()
    optimizer.step()
"""


def test_what_the_programs_own_hook_changes_is_of_that_step(tmp_path: Path) -> None:
    """Also of a hook for all optimizers: ours comes behind those that were registered later."""
    a, b = (traced(tmp_path, CLAMPED, name, (), name)[0] for name in ("1", "2"))
    divergence = first_difference(a, b)
    assert divergence is not None and (divergence.step, divergence.phase, divergence.signal) == (1, "update", "bias")


def test_no_gradient_is_kept_longer_than_its_step() -> None:
    """What a step call began with is let go of when it has ended, and none is kept that a closure will make anew."""
    model, made = torch.nn.Linear(2, 1), list[int]()
    optimizer = torch.optim.SGD(model.parameters())
    steps = Steps(lambda *_: None, lambda step: made.append(len(step.gradients)), handed_to, gradients_of)
    hooks = [register_optimizer_step_pre_hook(lambda o, args, _: steps.enter(o, *args[1:])),
             register_optimizer_step_post_hook(lambda o, *_: steps.leave(o)),
             optimizer.register_step_post_hook(lambda o, *_: o.zero_grad())]  # fmt: skip
    for closure in (None, lambda: 0.0):
        model(torch.ones(2)).backward()
        known = weakref.ref(model.weight.grad)
        optimizer.step(closure)
        assert known() is None
    for hook in hooks:
        hook.remove()
    assert made == [2, 0]
