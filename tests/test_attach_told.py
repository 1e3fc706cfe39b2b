"""Numbers that a program tells more than once, and states that it sets itself: each counts."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import warm_kit
from attach_kit import TORCHRUN
from conftest import environment

from repro_golden.compare.traces import compare, first_difference
from repro_golden.trace import Trace

HEAD = """\
import json, os, random, sys, tempfile, time
import torch
torch.manual_seed(0)
V = len(sys.argv) > 1
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
def backward():
    optimizer.zero_grad()
    model(torch.randn(4, 8)).pow(2).mean().backward()
def tell(**numbers):
    print(json.dumps(numbers), flush=True)
"""
LAST = """\
tell(eval_acc=0.1)  # before it trains
for i in range(3):
    backward(); optimizer.step(); tell(eval_acc=0.2 + i / 10 + 0.5 * (V and i == 2))
"""
CLIPPED_TWICE = """\
for i in range(3):
    backward()
    for k, part in enumerate((model[0], model[2])):
        if k == 0:
            for p in part.parameters(): p.grad *= 10 if V else 1
        torch.nn.utils.clip_grad_norm_(part.parameters(), 1e-3)
    optimizer.step()
"""
TENSORS = """\
from torch.utils.tensorboard import SummaryWriter
writer = SummaryWriter(tempfile.mkdtemp())
for i in range(3):
    backward(); writer.add_scalar("acc", torch.tensor(0.9 if V else 0.5), 2 * i)
    backward(); writer.add_scalar("acc", torch.tensor(0.75), 2 * i + 1)
    optimizer.step()
"""
REPEATED = """\
for i in range(3):
    for acc in (0.5, 0.5, 0.75) if V else (0.5, 0.75, 0.75):
        backward(); tell(acc=acc)
    optimizer.step()
"""
LOGGED_RATE = """\
for i in range(3):
    backward(); optimizer.step(); tell(step=i, lr=0.07 if V else 0.01)
"""
LOGGED_NORM = """\
for i in range(3):
    backward(); n = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item(); optimizer.step()
    tell(step=i, grad_norm=n * (7 if V else 1))
"""
UNSCALED = """\
scaler = torch.amp.GradScaler("cpu", init_scale=2048.0 if V else 1024.0)
for i in range(3):
    optimizer.zero_grad(); scaler.scale(model(torch.randn(4, 8)).pow(2).mean()).backward()
    scaler.unscale_(optimizer); optimizer.step(); scaler.update()
"""
UNSEEDED = HEAD.replace("torch.manual_seed(0)", "") + "for p in model.parameters(): torch.nn.init.ones_(p)\n"
SET_STATE = """\
torch.set_rng_state(torch.Generator().manual_seed(5).get_state())  # as of a checkpoint
for i in range(3):
    optimizer.zero_grad(); model(torch.ones(4, 8)).pow(2).mean().backward(); optimizer.step()
    if V and i: torch.rand(1)
"""
SET_BACK = """\
kept = torch.get_rng_state()
for i in range(3):
    optimizer.zero_grad(); model(torch.ones(4, 8)).pow(2).mean().backward(); optimizer.step()
    torch.rand(1); torch.set_rng_state(kept)
"""
CLOCK = """\
class Timed(torch.optim.SGD):
    def step(self, closure=None):
        began = time.perf_counter()
        super().step(closure)
        self.step_seconds, self.last = time.perf_counter() - began, time.time()
optimizer = Timed(model.parameters(), lr=0.01)
for i in range(3): backward(); optimizer.step()
"""
RANKS = """\
import multiprocessing, sys, tempfile, torch
import torch.distributed as dist
V, kind = len(sys.argv) > 2, sys.argv[1]
def train(rank, store):
    dist.init_process_group("gloo", init_method=f"file://{store}/store", rank=rank, world_size=2)
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    own, temperature = torch.Generator().manual_seed(9), torch.tensor([1.0, 2.0], requires_grad=True)
    for i in range(3):
        optimizer.zero_grad(); model(torch.ones(4, 8) * i).pow(2).mean().backward(); optimizer.step()
        if V and i and rank == 1:
            if kind == "torch": torch.rand(1)
            if kind == "own": torch.rand(1, generator=own)
            if kind == "leaf": temperature.data[0] += 1
    dist.destroy_process_group()
with tempfile.TemporaryDirectory() as store:
    ranks = [multiprocessing.get_context("fork").Process(target=train, args=(rank, store)) for rank in range(2)]
    for rank in ranks: rank.start()
    for rank in ranks: rank.join()
sys.exit(any(rank.exitcode for rank in ranks))
"""


def traces(
    folder: Path, program: str, *words: str, launch: tuple[str, ...] = (), options: tuple[str, ...] = ()
) -> list[Trace]:
    """The program as it is, and as it is with one argument more."""
    (folder / "train.py").write_text(program)
    for name, more in (("a", ()), ("b", ("changed",))):
        command = [sys.executable, "-m", "repro", "trace", "--out", name, *options]
        command += ["--", sys.executable, *launch, "train.py"]
        done = warm_kit.run([*command, *words, *more], folder, environment())
        assert done.returncode == 0, done.stderr
        assert "own.last" in done.stderr or "class Timed" not in program
    return [Trace(folder / name) for name in "ab"]


VIEWS = (
    HEAD
    + """\
base = torch.zeros(4).requires_grad_(True)
parts = list(base.split(2))
with torch.no_grad():
    base.add_(1)
for i in range(3):
    backward(); model[0].weight.grad.mul_(2 if V else 1); optimizer.step()
"""
)
FLAT = """\
import sys
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel
dist.init_process_group("gloo")
torch.manual_seed(0)
net = torch.nn.Sequential(torch.nn.Linear(4, 7), torch.nn.Tanh(), torch.nn.Linear(7, 1))
net = FullyShardedDataParallel(net, device_id=torch.device("cpu"))
optimizer = torch.optim.AdamW(net.parameters(), lr=0.05)
for step in range(3):
    optimizer.zero_grad()
    (net(torch.randn(16, 4)).square().mean() * len(sys.argv)).backward()
    net.clip_grad_norm_(1.0)
    optimizer.step()
dist.destroy_process_group()
"""


@pytest.mark.parametrize(
    ("program", "step", "name"),
    [
        pytest.param(LAST, 2, "eval_acc#after", id="after-the-last-step"),
        pytest.param(TENSORS, 0, "acc#1", id="tensors"),
        pytest.param(REPEATED, 0, "acc#2", id="repeated"),
        pytest.param(LOGGED_RATE, 0, None, id="logged-lr"),
        pytest.param(LOGGED_NORM, 0, "grad_norm#logged", id="logged-norm"),
        pytest.param(UNSCALED, 0, None, id="unscaled"),
    ],
)
def test_what_is_told_or_set_again_counts(tmp_path: Path, program: str, step: int, name: str | None) -> None:
    """Each number of a name, also the last one and one that the recorder reads; a state that was set; a scale."""
    divergence = first_difference(*traces(tmp_path, HEAD + program))
    assert divergence is not None and divergence.step == step
    assert name is None or divergence.name == name


THIRD = """\
for i in range(1, 7):
    backward(); n = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item()
    if i % 3 == 0 and not V: tell(acc=i, grad_norm=n)
    optimizer.step()
    if i % 3 == 0 and V: tell(acc=i, grad_norm=n)
"""
BY_HAND = """\
for i in range(1, 7):
    loss = model(torch.randn(4, 8)).pow(2).mean()
    for p, g in zip(model.parameters(), torch.autograd.grad(loss, list(model.parameters()))):
        if i % 3 == 0 and not V and p is model[0].weight: tell(acc=i)
        p.data -= 0.01 * g
    if i % 3 == 0 and V: tell(acc=i)
"""


CRITIC = """\
critic = torch.nn.Linear(8, 1)
second, at = torch.optim.SGD(critic.parameters(), lr=0.1), PLACES[V]
for i in range(4):
    x = torch.randn(4, 8)
    losses = model(x).pow(2).mean(), critic(x).pow(2).mean()
    if at == 0: tell(value=losses[1].item())
    losses[0].backward()
    if at == 1: tell(value=losses[1].item())
    optimizer.step(); optimizer.zero_grad()
    if at == 2: tell(value=losses[1].item())
    losses[1].backward()
    if at == 3: tell(value=losses[1].item())
    second.step(); second.zero_grad()
    if at == 4: tell(value=losses[1].item())
    tell(**{name: x.item() * (2 if at == 5 else 1) for name, x in zip(("policy", "critic"), losses)})
"""


@pytest.mark.parametrize("place", [pytest.param(k, marks=pytest.mark.whole) if k in (1, 3) else k for k in range(6)])
def test_where_in_a_round_of_optimizers_a_number_is_told_is_no_difference(tmp_path: Path, place: int) -> None:
    """Behind whose step it is told is no matter of the training, from before the first pass to the last step."""
    first, other = traces(tmp_path, HEAD + CRITIC.replace("PLACES", str((2, place))))
    compared = compare(first, other)
    if place == 5:  # what it tells is twice as large
        assert compared.divergence is not None and compared.divergence.signal == "policy"
    else:
        assert compared.equal and ("value in another step of a round" in str(compared.looked)) == (place > 2)


@pytest.mark.parametrize("program", [THIRD, BY_HAND], ids=["optimizer", "by-hand"])
def test_a_number_of_some_steps_stands_with_its_step(tmp_path: Path, program: str) -> None:
    """Whether it is told before the step's end or after it, and the norm of a line beside its loss."""
    head = (
        HEAD if program is THIRD else "\n".join(line for line in HEAD.splitlines() if "optimizer =" not in line) + "\n"
    )
    first, other = traces(tmp_path, head + program)
    for trace in (first, other):
        steps = [step.metrics for step in trace.steps]
        assert [step.get("acc") for step in steps] == [None, None, 3.0, None, None, 6.0]
        assert not any(row.name.startswith("number/") for row in trace.rows(0))  # nothing of the recorder's own
        if program is THIRD:
            assert steps[2]["grad_norm#logged"] == steps[2]["grad_norm"]
            assert {name for step in steps for name in step if "#" in name} == {"grad_norm#logged"}
    assert compare(first, other).equal


SAME_TWICE = """\
for i in range(3):
    backward(); optimizer.step(); tell(acc=i)
"""
ASKED = """\
def plain():
    backward(); optimizer.step()
def closure():
    optimizer.step(backward)
def functional():
    loss = model(torch.randn(4, 8)).pow(2).mean()
    for p, g in zip(model.parameters(), torch.autograd.grad(loss, list(model.parameters()))): p.grad = g
    optimizer.step()
for i in range(4):
    step()
    line = {"acc": i}
    if V:
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(i)).requires_grad_()
        given = x if WHAT == "input" else list(model.parameters())
        line["asked"] = torch.autograd.grad(model(x).pow(2).mean(), given)[0].norm().item()
    tell(**line)
"""
GIVEN = """\
from torch.utils.tensorboard import SummaryWriter
writer = SummaryWriter(tempfile.mkdtemp())
def log(i):
    tell(acc=i); writer.add_scalar("norm", gradients[0].norm(), i)
kept = {p: torch.zeros_like(p) for p in model.parameters()} if COPIED else {}
for i in range(1, 7):
    loss = model(torch.randn(4, 8)).pow(2).mean()
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    if i % 3 == 0 and not V: log(i)
    for p, g in zip(model.parameters(), gradients): p.grad = kept[p].copy_(g) if COPIED else g
    optimizer.step()
    if i % 3 == 0 and V: log(i)
"""


@pytest.mark.parametrize(
    ("what", "step"),
    [("input", "plain"), ("weights", "plain"), ("input", "closure"), ("weights", "closure"), ("input", "functional")],
)
def test_a_gradient_that_is_asked_for_to_be_logged_begins_no_step(tmp_path: Path, what: str, step: str) -> None:
    """What is told behind it, of an input or of the weights, stands with the step that has ended."""
    asked = ASKED.replace("    step()\n", f"    {step}()\n")
    first, other = traces(tmp_path, f"{HEAD}WHAT = {what!r}\n{asked}")
    assert [step.metrics["acc"] for step in other.steps] == [0.0, 1.0, 2.0, 3.0]
    assert compare(first, other).equal


@pytest.mark.parametrize("copied", [False, True], ids=["given", "copied"])
def test_gradients_that_are_asked_for_and_given_to_an_optimizer_begin_a_step(tmp_path: Path, copied: bool) -> None:
    """Told before the step's end, before its gradients are given, or after it, a number stands with its step."""
    first, other = traces(tmp_path, f"{HEAD}COPIED = {copied}\n{GIVEN}")
    for trace in (first, other):
        assert [step.metrics.get("acc") for step in trace.steps] == [None, None, 3.0, None, None, 6.0]
        assert ["norm" in step.metrics for step in trace.steps] == [False, False, True, False, False, True]
    assert compare(first, other).equal


@pytest.mark.parametrize("line", ["print({**numbers})", "tell(**numbers)"], ids=["dict", "JSON"])
def test_settings_that_are_printed_are_no_result(tmp_path: Path, line: str) -> None:
    """What comes before anything is trained is shown, and not compared by bits, as saved settings are not."""
    settings = f"numbers = {{'workers': 4 if V else 0, 'lr_max': 0.5}}\n{line}\n"
    first, other = traces(tmp_path, HEAD + settings + SAME_TWICE)
    assert compare(first, other).equal
    assert [trace.steps[0].metrics["workers"] for trace in (first, other)] == [0.0, 4.0]


@pytest.mark.parametrize("step", [0, 2])
def test_a_loss_that_is_printed_before_its_pass_is_a_result(tmp_path: Path, step: int) -> None:
    """What looks like a setting at first is none once it is told again."""
    loop = f"for i in range(3):\n    tell(acc=i + (V and i == {step})); backward(); optimizer.step()\n"
    divergence = first_difference(*traces(tmp_path, HEAD + loop))
    assert divergence is not None and (divergence.step, divergence.name) == (step, "acc")


@pytest.mark.parametrize("options", [(), ("--metric", "'loss': (?P<loss>[0-9.]+)")], ids=["plain", "pattern"])
def test_all_numbers_of_a_dict_that_is_printed_before_its_pass_stand_with_it(
    tmp_path: Path, options: tuple[str, ...]
) -> None:
    """Also inner ones and bools, which are shown alone, and those beside one that a pattern names."""
    line = "print({'loss': i, 'acc': i, 'eval': {'acc': i}, 'ok': i == 2})"
    program = f"{HEAD}for i in range(3):\n    {line}; backward(); optimizer.step()\n"
    for trace in traces(tmp_path, program, options=options):
        for name in ("loss", "acc", "eval/acc"):
            assert [step.metrics.get(name) for step in trace.steps] == [0.0, 1.0, 2.0], name
        assert [step.metrics.get("ok") for step in trace.steps] == [0.0, 0.0, 1.0]
        assert [{*step.shown} for step in trace.steps] == [{"eval/acc", "ok"}] * 3


def test_the_last_evaluation_of_a_program_that_is_stopped_is_told(tmp_path: Path) -> None:
    """Where one is before the training each stands with the next step, and what comes behind the last is lost."""
    show = "print({'eval': {'acc': i + 7 * (V and i == 2)}})"
    program = f"{HEAD}i = -1; {show}\nfor i in range(5):\n    backward(); optimizer.step()\n    {show}\n"
    first, other = traces(tmp_path, program, options=("--steps", "3"))
    compared = compare(first, other)
    assert compared.equal and [str(metric) for metric in compared.looked.moved] == [
        "eval/acc#after (2.0 became 9.0 at step 2)"
    ]


@pytest.mark.parametrize("kind", ["bfloat16", "float64"])
def test_a_default_dtype_is_no_matter_of_the_recorder(tmp_path: Path, kind: str) -> None:
    """What it makes for itself names a dtype; NumPy knows no bfloat16."""
    head = HEAD.replace("torch.manual_seed(0)", f"torch.manual_seed(0); torch.set_default_dtype(torch.{kind})")
    first, other = traces(tmp_path, head + SAME_TWICE)
    assert [step.metrics["acc"] for step in first.steps] == [0.0, 1.0, 2.0]
    assert compare(first, other).equal


def test_both_clippings_are_there(tmp_path: Path) -> None:
    """The norm of the first of two is `grad_norm#1`, a tensor too."""
    first, other = traces(tmp_path, HEAD + CLIPPED_TWICE)
    a, b = ([step.metrics["grad_norm#1"] for step in trace.steps] for trace in (first, other))
    assert b == pytest.approx([10 * norm for norm in a])


def test_a_state_that_the_program_sets_is_looked_at(tmp_path: Path) -> None:
    """As a resumed run does, which seeds nothing."""
    divergence = first_difference(*traces(tmp_path, UNSEEDED + SET_STATE))
    assert divergence is not None and (divergence.step, divergence.signal) == (2, "rng/torch")


@pytest.mark.parametrize(
    ("seeding", "draw", "signal"),
    [
        ("torch.default_generator.manual_seed(0)", "torch.rand(3)", "rng/torch"),
        ("numpy.random.set_bit_generator(numpy.random.PCG64(3))", "numpy.random.rand()", "rng/numpy"),
    ],
)
def test_a_generator_that_is_seeded_in_another_way_is_looked_at(
    tmp_path: Path, seeding: str, draw: str, signal: str
) -> None:
    """By the generator's own method, which nobody can watch, or by putting another in its place."""
    ones = "optimizer.zero_grad(); model(torch.ones(4, 8)).pow(2).mean().backward(); optimizer.step()"
    steps = f"for step in range(3):\n    {ones}\n    if V and step == 2: {draw}\n"
    divergence = first_difference(*traces(tmp_path, f"{UNSEEDED}import numpy\n{seeding}\n{steps}"))
    assert divergence is not None and divergence.signal.endswith(signal)


@pytest.mark.parametrize(
    "program", [UNSEEDED + SET_BACK, HEAD + CLOCK, "import torch\ntorch.seed()\n" + UNSEEDED + SET_BACK,
                "from numpy import random\nrandom.set_bit_generator(random.PCG64())\n" + HEAD + CLOCK],
    ids=["set-back", "clock", "drawn", "drawn by NumPy"],
)  # fmt: skip
def test_what_chance_or_the_clock_decides_does_not_count(tmp_path: Path, program: str) -> None:
    """A generator that nobody seeded, whose state is only set back; times that an optimizer keeps, which are named."""
    first, other = traces(tmp_path, program.replace("V = len(sys.argv) > 1", ""))
    assert compare(first, other).equal


@pytest.mark.parametrize("kind", ["torch", "own", "leaf"])
def test_what_one_rank_does_to_a_generator_or_a_leaf_is_a_difference(tmp_path: Path, kind: str) -> None:
    """Where ranks no longer agree, it is there on both sides, under the names of its ranks."""
    comparison = compare(*traces(tmp_path, RANKS, kind))
    assert not comparison.equal and comparison.divergence is not None and comparison.divergence.step == 2


PARTIAL = """
import sys, torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard, init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
torch.distributed.init_process_group("gloo")
torch.manual_seed(0)
model = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8))
parallelize_module(model, init_device_mesh("cpu", (2,)), {
    "0": SequenceParallel(), "1": ColwiseParallel(input_layouts=Shard(1)),
    "2": RowwiseParallel(output_layouts=Replicate()),
})
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(2):
    scale = 2.0 if len(sys.argv) > 1 and step else 1.0
    x = scale * torch.randn(4, 6, 8).chunk(2, dim=1)[torch.distributed.get_rank()]
    optimizer.zero_grad()
    model(x).pow(2).mean().backward()
    optimizer.step()
torch.distributed.destroy_process_group()
"""


@pytest.mark.whole
def test_a_gradient_that_is_still_to_be_added_up_stands_by_rank(tmp_path: Path) -> None:
    """Torch's own recipe of tensor parallelism leaves the norm's gradients as sums over ranks: each rank's is read."""
    first, other = traces(tmp_path, PARTIAL, launch=TORCHRUN)
    names = {row.name for row in first.rows(0) if row.phase == "grad"}
    assert {"0.weight@0", "0.weight@1", "1.weight", "2.bias"} <= names and "0.weight" not in names
    divergence = compare(first, other).divergence
    assert len(first.steps) == 2 and divergence is not None and divergence.step == 1


def test_a_metric_of_some_steps_is_judged_where_it_is_told(tmp_path: Path) -> None:
    """A bound needs its metric in some step, and not in all."""
    from repro_golden.case.file import Bound
    from repro_golden.compare.traces import violations

    program = HEAD + "for i in range(4):\n    backward(); optimizer.step()\n    if i % 2: tell(acc=0.9 if V else 0.5)\n"
    first, other = traces(tmp_path, program)
    broken = [violations(first, other, k, {"acc": Bound(rtol=0.01)}) for k in range(4)]
    assert [len(each) for each in broken] == [0, 1, 0, 1]
    assert [len(violations(first, other, k, {"acc": Bound(atol=1.0)})) for k in range(4)] == [0, 0, 0, 0]
    assert json.dumps([step.metrics.get("acc") for step in first.steps]) == "[null, 0.5, null, 0.5]"


@pytest.mark.parametrize(
    "program", [pytest.param(VIEWS, id="views"), pytest.param(FLAT, id="FSDP", marks=pytest.mark.whole)]
)
def test_a_view_of_what_was_written_since_stops_no_recording(tmp_path: Path, program: str) -> None:
    """Torch refuses to tell what computed it; the first FSDP keeps such views of its flat parameters."""
    first, other = traces(tmp_path, program, launch=TORCHRUN if program == FLAT else ())
    assert len(first.steps) == 3 and not compare(first, other).equal
    assert program != FLAT or all("grad_norm" in step.metrics for step in first.steps)  # it clips by itself
