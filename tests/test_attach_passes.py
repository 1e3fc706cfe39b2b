"""Backward passes of a program with optimizers that none of these makes a step of: it may step by hand."""

from __future__ import annotations

import contextlib
import importlib
import operator
import sys
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import warm_kit
from attach_kit import NETWORKS
from conftest import environment

from repro_golden.recording.attach.alive.names import Names
from repro_golden.recording.attach.stepping import passes
from repro_golden.recording.attach.stepping.making_state import MAKE_STATE
from repro_golden.trace import Trace

BEGIN = (
    NETWORKS
    + """\
rate = 0.03 if other else 0.01
def step(model, optimizer):
    optimizer.zero_grad()
    loss_of(model).backward()
    optimizer.step()
@torch.no_grad()
def by_hand(parameters, rate=rate):
    for p in parameters:
        p.data -= rate * p.grad.sign()
        p.grad = None
"""
)
BY_HAND = {
    "after an optimizer": """
def main():
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for k in range(5):
        if k < 2:
            step(model, optimizer)
        else:
            loss_of(model).backward(); by_hand(model.parameters())
main()
""",
    "beside an optimizer, at the last": """
def main():
    model = net()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.ndim < 2])
    for k in range(3):
        step(model, optimizer)
        by_hand([p for p in model.parameters() if p.ndim == 2], rate if k == 2 else 0.01)
main()
""",
}


def run(folder: Path, program: str, other: int = 0, *options: str) -> Trace:
    """The trace of a program."""
    (folder / "train.py").write_text(BEGIN + program)
    words = [sys.executable, "-m", "repro", "trace", "--out", f"t{other}", *options, "--", sys.executable, "train.py"]
    done = warm_kit.run(words, folder, environment() | {"OMP_NUM_THREADS": "1", "OTHER": str(other)})
    assert done.returncode == 0, done.stderr
    return Trace(folder / f"t{other}")


def diff(folder: Path, program: str, *options: str) -> tuple[int, str]:
    """The exit code and the words of `repro diff` on a program's run and its other run."""
    for other in (0, 1):
        run(folder, program, other, *options)
    done = warm_kit.run([sys.executable, "-m", "repro", "diff", "t0", "t1"], folder, environment())
    return done.returncode, done.stdout


_ALWAYS = ("after an optimizer", "accumulation with a remainder")


def _kinds(kinds: Iterable[str]) -> list[Any]:
    return [kind if kind in _ALWAYS else pytest.param(kind, marks=pytest.mark.whole) for kind in kinds]


@pytest.mark.parametrize("kind", _kinds(BY_HAND))
def test_what_is_stepped_by_hand_is_read_at_the_end(tmp_path: Path, kind: str) -> None:
    """Steps by hand after or beside those of an optimizer are no agreement; what is gone by then is named."""
    program = BY_HAND[kind]
    code, output = diff(tmp_path, program.replace("\nmain()", "\n    return model, optimizer\nkept = main()"))
    assert code == 1, output
    assert "phase update" in output and "signals that differ in that step: " in output
    end = run(tmp_path, program, 2).end
    assert end is not None
    told = {"the weights at the end": "the program had let go of its optimizers when it ended"}
    if kind == "after an optimizer":
        told["3 backward passes after the last step"] = "no optimizer made a step of them"
    else:
        what = "2 parameters that no optimizer holds and the last backward pass may train"
        told[what] = "the program had let go of them when it ended"
    assert told.items() <= end["unread"].items()


ORDINARY = {
    "a pass at the end": (2, "for k in range(3): loss_of(model).backward(); k < 2 and optimizer.step()"),
    "accumulation with a remainder": (
        2,
        "for k in range(7): loss_of(model).backward(); k % 3 == 2 and optimizer.step()",
    ),
    "passes for evaluation": (
        2,
        """
    for _ in range(2):
        step(model, optimizer)
        for _ in range(3):
            x = torch.randn(2, 3, requires_grad=True)
            torch.autograd.grad(model(x).sum(), x)
            model(x.detach().requires_grad_()).sum().backward()
""",
    ),
    "a penalty on gradients": (
        2,
        """
    for _ in range(2):
        x = torch.randn(2, 3, requires_grad=True)
        (g,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        optimizer.zero_grad(); (g.square().sum() + loss_of(model)).backward(); optimizer.step()
""",
    ),
    "two passes a step": (
        4,
        """
    critic = net()
    of_critic = torch.optim.SGD(critic.parameters(), lr=0.1)
    for _ in range(2):
        of_critic.zero_grad(); loss_of(critic).backward(); loss_of(critic).backward(); of_critic.step()
        optimizer.zero_grad(); critic(model[0](torch.randn(8, 3))[:, :3]).mean().backward(); optimizer.step()
""",
    ),
    "an optimizer that steps now and then": (
        6,
        """
    critic = net()
    of_critic = torch.optim.SGD(critic.parameters(), lr=0.1)
    for k in range(4):
        step(model, optimizer)
        loss_of(critic).backward()
        if k % 2:
            of_critic.step(); of_critic.zero_grad()
""",
    ),
    "weights that are moved and put back": (
        2,
        """
    for _ in range(2):
        optimizer.zero_grad(); loss_of(model).backward()
        before = [p.detach().clone() for p in model.parameters()]
        by_hand(model.parameters(), 0.05)
        loss_of(model).backward()
        with torch.no_grad():
            for p, q in zip(model.parameters(), before): p.copy_(q)
        optimizer.step()
""",
    ),
    "a step that is tried again": (
        3,
        """
    for k in range(4):
        try:
            optimizer.zero_grad(); loss_of(model).backward()
            if k == 1: raise MemoryError
            optimizer.step()
        except MemoryError:
            pass
""",
    ),
    "passes inside of a pass": (
        2,
        """
    from torch.utils.checkpoint import checkpoint
    for _ in range(2):
        x = torch.randn(2, 3, requires_grad=True)
        for layer in model: x = checkpoint(layer, x, use_reentrant=True)
        optimizer.zero_grad(); x.mean().backward(); optimizer.step()
""",
    ),
    "a scaler that leaves steps out": (
        3,
        """
    scaler = torch.amp.GradScaler("cpu")
    for k in range(3):
        optimizer.zero_grad(); scaler.scale(loss_of(model) * (float("inf") if k == 1 else 1)).backward()
        scaler.step(optimizer); scaler.update()
""",
    ),
}


@pytest.mark.parametrize("kind", _kinds(ORDINARY))
def test_an_ordinary_program_has_the_same_steps_and_signals(tmp_path: Path, kind: str) -> None:
    """Nothing in it is taken for a step by hand; passes that are left at the end are named."""
    steps, body = ORDINARY[kind]
    begin = "def main():\n    model = net()\n    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n    "
    trace = run(tmp_path, f"{begin}{body.strip()}\nmain()\n")
    assert len(trace.steps) == steps and trace.end is not None
    names = {row.name for index in range(steps) for row in trace.rows(index)}
    assert not [name for name in names if "by_hand" in name or "resting" in name]
    left = any("after the last step" in name for name in trace.end["unread"])
    assert left == (kind in ("a pass at the end", "accumulation with a remainder", "passes for evaluation"))


IN_PASSES = """
model = net()
layers = list(model.parameters())
def hooked(parameters):
    own = {p: torch.optim.SGD([p], lr=0.01) for p in parameters}
    def hook(p):
        if last:
            own[p].step(); p.grad = None
    for p in parameters: p.register_post_accumulate_grad_hook(hook)
behind = []
def iteration():
    for o in behind: o.zero_grad()
    loss = loss_of(model)
    if not other: print({"loss": loss.item()})
    loss.backward()
    if other: print({"loss": loss.item()})
    for o in behind: o.step()
"""
ENDS = {
    "hooks": ("hooked(layers)", 2, 8),
    "torch's own": (
        "from torch.distributed.optim import _apply_optimizer_in_backward as apply\n"
        "apply(torch.optim.SGD, layers, {'lr': 0.01})",
        2,
        8,
    ),
    "one behind": ("hooked(layers[2:]); behind += [torch.optim.SGD(layers[:2], lr=0.01)]", 2, 6),
    "accumulation": ("hooked(layers)", 6, 8),
    "a last call": (
        "optimizer = torch.optim.SGD(layers, lr=0.01)\n"
        "def end(): optimizer.step(); optimizer.zero_grad()\n"
        "queue = torch.autograd.Variable._execution_engine.queue_callback\n"
        "layers[0].register_post_accumulate_grad_hook(lambda _: queue(end))",
        2,
        2,
    ),
}


@pytest.mark.parametrize(
    "kind", [kind if kind == "accumulation" else pytest.param(kind, marks=pytest.mark.whole) for kind in ENDS]
)
def test_steps_in_a_pass_are_made_by_it(tmp_path: Path, kind: str) -> None:
    """Where hooks step, a loss stands with the pass' last step, told before it or behind it; no pass is left over."""
    begin, passes_, steps = ENDS[kind]
    loop = f"for k in range({passes_}):\n    last = {passes_} == 2 or k % 3 == 2\n    iteration()\n"
    code, output = diff(tmp_path, f"{IN_PASSES}{begin}\n{loop}")
    assert code == 0, output
    trace = Trace(tmp_path / "t1")
    told = [sum(name.startswith("loss") for name in step.metrics) for step in trace.steps]
    assert len(told) == steps and sum(told[: steps // 2]) == sum(told[steps // 2 :]) == passes_ // 2
    assert sum(map(bool, told)) == 2 and trace.end is not None
    assert not [name for name in trace.end["unread"] if "pass" in name]


SCHEDULED = """
model = net()
rates = torch.optim.lr_scheduler.StepLR(torch.optim.SGD(model.parameters(), lr=0.1), 2)
for _ in range(2):
    loss_of(model).backward(); by_hand(model.parameters()); rates.step()
"""


def test_an_optimizer_that_is_there_for_its_schedule_is_named(tmp_path: Path) -> None:
    """Steps by hand beside one of torch's that makes none are not seen: the refusal says so, and how they are."""
    (tmp_path / "train.py").write_text(BEGIN + SCHEDULED)
    words = [sys.executable, "-m", "repro", "trace", "--out", "t", "--", sys.executable, "train.py"]
    done = warm_kit.run(words, tmp_path, environment() | {"OTHER": "0"})
    assert done.returncode == 2
    assert "2 backward passes were made, and no step of SGD was seen: let what makes the steps derive" in done.stderr


LOADED = """
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
def made():
    model = net()
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)
def zeros(optimizer):  # a library's own way
    for group in optimizer.param_groups:
        was, group["lr"] = group["lr"], 0.0
        for p in group["params"]:
            p.grad = torch.zeros_like(p)
    optimizer.step()
    group["lr"] = was
    optimizer.zero_grad()
def main():
    model, optimizer = made()
    step(model, optimizer)
    state = get_state_dict(model, optimizer) if other else (model.state_dict(), optimizer.state_dict())
    model, optimizer = made()
    if other:
        set_state_dict(model, optimizer, model_state_dict=state[0], optim_state_dict=state[1])
    else:
        model.load_state_dict(state[0]); optimizer.load_state_dict(state[1])
    state = None
    step(model, optimizer)
    state = optimizer.state_dict()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    if other:
        zeros(optimizer)
    optimizer.load_state_dict(state)
    state = None
    step(model, optimizer)
    plain = torch.optim.SGD(model.parameters(), lr=0.01)
    for k in range(2):
        if other:
            get_state_dict(model, plain)
        step(model, plain)
main()
"""
ZEROS = """
model = net()
optimizer = torch.optim.Adam(model.parameters(), lr=0.0)  # a warm-up begins there
def given(number):
    for p in model.parameters():
        p.grad = torch.full_like(p, number)
other = torch.optim.Adam(net().parameters(), lr=0.0)
for p in other.param_groups[0]["params"]: p.grad = torch.zeros_like(p)  # rows that no sample has looked up
(loss_of(model) * 0).backward(); optimizer.step()  # no sample had an advantage
other.step()  # of the same pass
optimizer = torch.optim.Adam(model.parameters(), lr=0.0)
given(1.0); optimizer.step()  # of an evolution strategy
given(0.0); optimizer.step()
optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
given(0.0); optimizer.step()
each = torch.optim.SGD([model[0].bias], lr=0.0)
model[0].bias.register_post_accumulate_grad_hook(lambda p: each.step())
optimizer.zero_grad()
(loss_of(model) * 0).backward()
torch.optim.SGD(model.parameters(), lr=0.0).step(lambda: (loss_of(model) * 0).backward())
optimizer = torch.optim.Adam(model.parameters(), lr=0.0)
def scaled(parameters):
    return torch.func.functional_call(model, parameters, torch.ones(1, 3)).sum() * 0
gradients = torch.func.grad(scaled)(dict(model.named_parameters()))
for name, p in model.named_parameters(): p.grad = gradients[name].detach()
optimizer.step()
"""
WAITS = """
actor, critic = net(), net()
optimizer = torch.optim.Adam(actor.parameters(), lr=0.1)
waits = torch.optim.Adam(critic.parameters(), lr=0.0)
step(actor, optimizer)
for p in critic.parameters(): p.grad = torch.zeros_like(p)  # for its checkpoint to be loaded into
waits.step()
step(actor, optimizer)
"""


def test_a_step_that_only_makes_state_is_none(tmp_path: Path) -> None:
    """What makes an optimizer's state for a checkpoint to be loaded into, torch's way or a library's, is no step."""
    code, output = diff(tmp_path, LOADED)
    assert (code, output.splitlines()[0]) == (0, "agrees: 5 steps compared")
    (tmp_path / "asked").mkdir()
    asked = run(tmp_path / "asked", LOADED, 1, "--steps", "4")
    assert [step.root for step in asked.steps] == [step.root for step in Trace(tmp_path / "t1").steps][:4]


def test_steps_of_no_rate_or_no_gradient_stay_steps(tmp_path: Path) -> None:
    """A warm-up from 0, gradients by hand, in a backward pass, a closure or torch.func, and 0 at some rate."""
    assert len(run(tmp_path, ZEROS).steps) == 8


def test_a_step_that_only_makes_state_is_none_after_the_passes_of_another(tmp_path: Path) -> None:
    """They left its optimizer without gradients, though it was made before them."""
    assert len(run(tmp_path, WAITS).steps) == 2


MASTERS = """
parts = [torch.nn.Parameter(torch.zeros(2)), torch.nn.Parameter(torch.ones(2))]
masters = [torch.nn.Parameter(part.detach().clone()) for part in parts]
optimizers = [torch.optim.AdamW([master], lr=0.1) for master in masters]
rates = [torch.optim.lr_scheduler.LambdaLR(optimizer, lambda k: k / 2) for optimizer in optimizers]
for _ in range(3):
    for part in parts:
        part.grad = None
    (parts[0] * parts[1] - 1).pow(2).sum().backward()
    for part, master, optimizer, rate in zip(parts, masters, optimizers, rates):
        master.grad = part.grad.clone()
        optimizer.step(); rate.step(); optimizer.zero_grad()
        part.data.copy_(master.data)
"""


def test_a_step_whose_gradients_are_copied_from_a_shared_pass_is_one(tmp_path: Path) -> None:
    """The pass was of all masters, though those of an optimizer had none when another stepped; so of LoRA's zeros."""
    assert len(run(tmp_path, MASTERS).steps) == 6


def test_the_functions_that_make_state_are_there() -> None:
    """Torch and megatron-core still call them so: by another name, what they do would be training steps."""
    for module, paths in MAKE_STATE.items():
        with contextlib.suppress(ModuleNotFoundError), warnings.catch_warnings(action="ignore"):
            package = importlib.import_module(module)
            assert all(callable(operator.attrgetter(path)(package)) for path in paths)


def test_what_the_program_lets_go_of_is_gone(tmp_path: Path) -> None:
    """A network outside of the optimizer, copies that an evaluation trains, and all of a training with a last pass."""
    run(
        tmp_path,
        """
import gc, weakref
def alive(known):
    gc.collect()
    return [reference() is not None for reference in known]
body, head = net(), net()
optimizer = torch.optim.SGD(head.parameters(), lr=0.01)
for k in range(4):
    optimizer.zero_grad()
    (loss_of(body) + loss_of(head)).backward()
    optimizer.step()
gone = [weakref.ref(body), *map(weakref.ref, body.parameters())]
del body
assert not any(alive(gone)), alive(gone)
for _ in range(3):
    copy = net()
    loss_of(copy).backward(); by_hand(copy.parameters())
    gone = [weakref.ref(copy), *map(weakref.ref, copy.parameters())]
    del copy
    assert not any(alive(gone)), alive(gone)
loss_of(head).backward()
gone = [weakref.ref(head), weakref.ref(optimizer), *map(weakref.ref, head.parameters())]
del head, optimizer
assert not any(alive(gone)), alive(gone)
""",
    )


def test_graphs_are_looked_through_within_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that makes an optimizer for each of its passes pays for so many nodes in all, not for each pass."""
    monkeypatch.setattr(passes, "_NODES", 10)
    seen = passes.Passes(Names(), {})
    for k in range(4):
        bias = torch.nn.Parameter(torch.ones(2))
        seen.optimizer_made(torch.optim.SGD([bias], lr=0.1))
        loss = (bias * 2 * 2 * 2).sum()
        loss.backward()
        seen.passed([loss], inner=False)
        assert len(seen._known) == (k < 2)
        assert any("too large to be looked through" in why for why in seen.unread().values()) == (k > 0)
