"""What a program does is the same under the recorder: what it gives to torch, pickles, scripts, copies and swaps."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import warm_kit

from repro_golden.compare.traces import first_difference
from repro_golden.trace import Trace

HEAD = """
import copy, pickle, sys, torch
torch.manual_seed(0)
torch.set_num_threads(1)
model = torch.nn.Linear(3, 2)
"""
MAKE = "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
STEP = """
optimizer.zero_grad(); model(torch.ones(4, 3, dtype=model.weight.dtype)).square().mean().backward(); optimizer.step()
print(model.weight.tolist())
"""
PROGRAMS = {
    "gradients of an iterator": """
for _ in range(2):
    loss = model(torch.randn(5, 3)).square().mean()
    grads = torch.autograd.grad(loss, filter(lambda p: p.requires_grad, model.parameters()))
    for p, g in zip(model.parameters(), grads): p.grad = g
    optimizer.step()
    print(len(grads), loss.item())
""",
    "gradients of an iterator without an optimizer": """
for _ in range(2):
    grads = torch.autograd.grad(model(torch.randn(5, 3)).square().mean(), model.parameters())
    with torch.no_grad():
        for p, g in zip(model.parameters(), grads): p -= 0.1 * g
    print(model.weight.tolist())
""",
    "gradients of a mapping's values without an optimizer": """
for _ in range(2):
    parameters = dict(model.named_parameters())
    grads = torch.autograd.grad(model(torch.randn(5, 3)).square().mean(), parameters.values())
    with torch.no_grad():
        for p, g in zip(parameters.values(), grads): p -= 0.1 * g
    print(model.weight.tolist())
""",
    "gradients of an edge": """
from torch.autograd.graph import get_gradient_edge
hidden = model(torch.randn(5, 3))
for edge in (get_gradient_edge(hidden), [get_gradient_edge(hidden)]):
    print(torch.autograd.grad(hidden.square().mean(), edge, retain_graph=True)[0].shape)
""",
    "a postfix of pairs": """
from tqdm import tqdm
bar = tqdm(range(2), file=sys.stdout)
bar.set_postfix(zip(("loss", "k"), (1.5, 2)))
print(bar.postfix)
bar.close()
""",
    "a script": """
@torch.jit.script
def gradient(x: torch.Tensor):
    y = x * x
    return torch.autograd.grad([y.sum()], [x])
print(gradient(torch.ones(3, requires_grad=True))[0])
@torch.jit.script
def seeded():
    torch.manual_seed(3)
    return torch.rand(1)
print(seeded())
""",
    "functions that are pickled": """
import random, numpy
functions = [random.seed, random.getstate, numpy.random.seed, numpy.random.get_state, torch.get_rng_state,
    torch.set_rng_state, torch.cuda.manual_seed, torch.cuda.manual_seed_all, torch.cuda.get_rng_state,
    torch.random.get_rng_state, torch.nn.utils.clip_grad_norm_, torch.nn.utils.clip_grads_with_norm_,
    torch.autograd.grad, torch.autograd.backward, torch.save, torch.serialization.save, torch.utils.swap_tensors]
for function in functions:
    try:
        print(function.__name__, callable(pickle.loads(pickle.dumps(function))))
    except Exception as error:
        print(function.__name__, type(error).__name__)
""",
    "files that are closed, and others opened": """
import os
class Mine(torch.optim.SGD):
    __hash__ = None
optimizer = Mine(model.parameters(), lr=0.1)
def step():
    optimizer.zero_grad(); model(torch.ones(4, 3)).square().mean().backward(); optimizer.step()
step()
os.closerange(3, 200)  # as daemons do
files = [open(f"own-{k}", "wb", buffering=0) for k in range(6)]
step()
print([os.path.getsize(file.name) for file in files])
""",
    "a stream that is copied and pickled": """
import io
class Tee(io.TextIOBase):
    def __init__(self): self.lines = []
    def write(self, text): self.lines.append(text); return len(text)
real, tee, text = sys.stdout, Tee(), io.StringIO()
for stream in (tee, text):
    sys.stdout = stream
    optimizer.zero_grad(); loss = model(torch.ones(4, 3)).square().mean(); loss.backward(); optimizer.step()
    print("loss", loss.item())
sys.stdout = real
other, again = copy.deepcopy(tee), pickle.loads(pickle.dumps(text))
print(other.write("in the copy"), tee.lines, other.lines, again.getvalue())
""",
    "a state by the ids of parameters": """
class Mine(torch.optim.Optimizer):
    def __init__(self, parameters): super().__init__(parameters, {"lr": 0.1})
    @torch.no_grad()
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            mean = self.state.setdefault(id(p), {"mean": torch.zeros_like(p), "rare": torch.eye(2).to_sparse()})["mean"]
            mean.mul_(0.9).add_(p.grad)
            p.sub_(0.1 * mean)
optimizer = Mine(model.parameters())
""",
    "tensors that are swapped after the recorder ended": """
torch.__future__.set_swap_module_params_on_conversion(True)
nowhere = torch.nn.Parameter(torch.zeros(2, device="meta"))
other = torch.optim.SGD([*model.parameters(), nowhere], lr=0.1)
model(torch.ones(4, 3)).square().mean().backward()
other.step()
model.to(torch.float64)
print(model.weight.dtype)
""",
}


def run(folder: Path, program: str, *before: str) -> subprocess.CompletedProcess[str]:
    """A program's end."""
    (folder / "program.py").write_text(program)
    return warm_kit.run([sys.executable, *before, "program.py"], folder)


def traced(folder: Path, program: str, *options: str) -> tuple[Trace, str]:
    """The trace of a program, and what it printed."""
    done = run(folder, program, "-m", "repro", "trace", "--out", "trace", *options, "--", sys.executable)
    assert done.returncode == 0, done.stderr
    return Trace(folder / "trace"), done.stdout


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_prints_what_it_does_alone(tmp_path: Path, name: str) -> None:
    """Under the recorder it ends as it does alone, and prints the same."""
    by_hand = "without an optimizer" in name
    program = HEAD + ("" if by_hand else MAKE) + PROGRAMS[name] + ("" if by_hand else STEP)
    alone = run(tmp_path, program)
    assert alone.returncode == 0, alone.stderr
    done = run(tmp_path, program, "-m", "repro", "trace", "--out", "trace", "--", sys.executable)
    assert done.stdout == alone.stdout, done.stderr
    assert "exit code 0" in done.stderr if "recorder ended" in name else done.returncode == 0, done.stderr


COPIES = """
import copy, sys, torch
torch.manual_seed(0)
torch.set_num_threads(1)
model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x = torch.randn(8, 3)
for step in range(4):
    own, mine = copy.deepcopy((model, optimizer)) if step else (model, optimizer)
    mine.zero_grad()
    own(x).square().mean().backward()
    if step == 1:
        own[1].running_mean.add_(float(sys.argv[1]))
    mine.step()
"""


def test_what_lives_beside_a_copied_optimizer_is_seen(tmp_path: Path) -> None:
    """Each round copies the optimizer and its model: a buffer that moves in one is in the trace of that step."""
    traces = []
    for moved in ("0", "1"):
        folder = tmp_path / moved
        folder.mkdir()
        traces.append(traced(folder, COPIES.replace("sys.argv[1]", repr(moved)))[0])
    rows = [{row.name: row.fingerprint for row in trace.rows(1)} for trace in traces]
    moved_rows = {name for name in rows[0] if rows[0][name] != rows[1][name]}
    assert any(name.endswith("running_mean") for name in moved_rows), rows


BOTH = """
import copy, sys, torch
torch.manual_seed(0)
torch.set_num_threads(1)
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
def step(model, optimizer):
    optimizer.zero_grad(); model(torch.randn(8, 4)).square().mean().backward(); optimizer.step()
step(model, optimizer)
other, its = copy.deepcopy((model, optimizer))
for _ in range(2):
    step(model, optimizer)
    step(other, its)
with torch.no_grad():
    model.weight.add_(MOVED)
"""


def test_an_optimizer_and_its_copy_are_two(tmp_path: Path) -> None:
    """Both step on: what the first ends with is read, and the copy does not stand in its place."""
    ends = []
    for moved in ("0.0", "0.5"):
        folder = tmp_path / moved
        folder.mkdir()
        trace = traced(folder, BOTH.replace("MOVED", moved))[0]
        ends.append({row.name: row.fingerprint for row in trace.rows(4) if row.name.startswith("end/")})
        assert any(row.name.startswith("optimizer.1/") for index in range(5) for row in trace.rows(index))
    assert [name for name in ends[0] if ends[0][name] != ends[1][name]] == ["end/weight"]


PLUS = """
import torch
torch.manual_seed(0)
modules = torch.nn.ModuleDict({"a+x": torch.nn.Linear(3, 3), "a+y": torch.nn.Linear(3, 3)})
optimizers = [torch.optim.SGD(modules[name].parameters(), lr=0.1) for name in ("a+x", "a+y")]
for _ in range(2):
    for name, optimizer in list(zip(("a+x", "a+y"), optimizers))[::ORDER]:
        optimizer.zero_grad()
        modules[name](torch.ones(2, 3)).square().mean().backward()
        optimizer.step()
"""


def test_names_may_hold_what_joins_others(tmp_path: Path) -> None:
    """Which of two optimizers steps first in a round is no difference, whatever their parameters are called."""
    roots = []
    for order in ("1", "-1"):
        folder = tmp_path / order
        folder.mkdir()
        roots.append([step.root for step in traced(folder, PLUS.replace("ORDER", order))[0].steps])
    assert roots[0] == roots[1]


RESUMED = """
import torch
torch.manual_seed(0)
model = torch.nn.Linear(3, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
torch.save((model, optimizer), "state.pt")
del model, optimizer
model, optimizer = torch.load("state.pt", weights_only=False)
for _ in range(3):
    optimizer.zero_grad()
    for _ in range(2):
        model(torch.ones(2, 3)).square().mean().backward()
    optimizer.step()
"""


@pytest.mark.whole
def test_steps_of_an_unpickled_optimizer_are_counted(tmp_path: Path) -> None:
    """The program makes none itself: its steps are the optimizer's all the same, not its backward passes."""
    (tmp_path / "make.py").write_text(RESUMED.partition("del model")[0])
    subprocess.run([sys.executable, "make.py"], cwd=tmp_path, check=True)
    program = "import torch\n" + RESUMED.partition("del model, optimizer\n")[2]
    trace, _ = traced(tmp_path, program)
    assert len(trace.steps) == 3
    assert sum(row.phase == "grad" for row in trace.rows(1)) == 2


UNEQUAL = """
import torch
torch.manual_seed(0)
actor, critic = torch.nn.Linear(3, 1), torch.nn.Linear(3, 3)
of_actor, of_critic = torch.optim.Adam(actor.parameters()), torch.optim.Adam(critic.parameters())
def step(model, optimizer):
    optimizer.zero_grad(); model(torch.randn(4, 3)).square().sum().backward(); optimizer.step()
for round in range(5):
    for _ in range(2):
        step(critic, of_critic)
    if round:
        step(actor, of_actor)
"""


@pytest.mark.parametrize("steps", [3, *(pytest.param(count, marks=pytest.mark.whole) for count in (1, 5, 6, 7))])
def test_a_shorter_run_of_unequal_optimizers_begins_a_longer_one(tmp_path: Path, steps: int) -> None:
    """Two steps of one optimizer for one of the other, which starts late: a run that is stopped is a prefix."""
    whole = traced(tmp_path, UNEQUAL)[0]
    folder = tmp_path / "short"
    folder.mkdir()
    short = traced(folder, UNEQUAL, "--steps", str(steps))[0]
    assert len(short.steps) == steps
    assert [step.root for step in short.steps] == [step.root for step in whole.steps[:steps]]


WRAPPED = """
import torch
class Scaled(torch.Tensor):
    @staticmethod
    def __new__(cls, codes, scale):
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32)
    def __init__(self, codes, scale):
        self.codes, self.scale = codes, scale
    def __tensor_flatten__(self):
        return ["codes", "scale"], {"bits": 8}
    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        raise NotImplementedError
torch.manual_seed(0)
model = torch.nn.Linear(3, 2)
class Rounding(torch.optim.SGD):
    def step(self, closure=None):
        super().step(closure)
        for p in model.parameters():
            scale = p.detach().abs().amax()
            self.state[p]["rounded"] = Scaled((p.detach() / scale * 127).to(torch.int8), scale)
optimizer = Rounding(model.parameters(), lr=0.1)
for _ in range(2):
    optimizer.zero_grad()
    model(torch.ones(2, 3)).square().mean().backward()
    optimizer.step()
"""


def test_what_a_wrapper_in_an_optimizer_is_around_is_read(tmp_path: Path) -> None:
    """As an optimizer of eight bits keeps its state: its codes and scales, by the names that it gives them."""
    trace, _ = traced(tmp_path, WRAPPED)
    names = {row.name for row in trace.rows(1)}
    assert {"rounded/weight.codes", "rounded/weight.scale", "rounded/weight.context", "rounded/bias.codes"} <= names


SHARDED = """
import torch
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, init_device_mesh
from torch.testing._internal.two_tensor import TwoTensor
torch.distributed.init_process_group("gloo", rank=0, world_size=1, store=torch.distributed.HashStore())
torch.manual_seed(0)
model = torch.nn.Linear(3, 2)
fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
class Rounding(torch.optim.SGD):
    def step(self, closure=None):
        super().step(closure)
        for p in model.parameters():
            held = p.to_local().detach().clone()
            self.state[p]["rounded"] = DTensor.from_local(
                TwoTensor(held, held.clone()), p.device_mesh, p.placements, run_check=False
            )
optimizer = Rounding(model.parameters(), lr=0.1)
for _ in range(2):
    optimizer.zero_grad()
    model(torch.ones(2, 3)).square().mean().backward()
    optimizer.step()
torch.distributed.destroy_process_group()
"""


def test_a_sharded_wrapper_in_an_optimizer_is_named(tmp_path: Path) -> None:
    """What a DTensor holds here may have no bytes of its own: it is told as not looked at, and the program goes on."""
    trace, _ = traced(tmp_path, SHARDED)
    assert len(trace.steps) == 2 and trace.end is not None
    assert trace.end["unread"]["rounded/weight"] == "it is a TwoTensor"
    assert {"weight", "bias"} <= {row.name for row in trace.rows(1) if row.phase == "update"}


LEFT = """
import torch
def main():
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.ones(2, 3)).square().mean().backward()
        optimizer.step()
main()
"""


def test_weights_that_are_gone_at_the_end_are_named(tmp_path: Path) -> None:
    """A trainer that lives in a function is gone when the program ends: that its last state was not seen is told."""
    trace, _ = traced(tmp_path, LEFT)
    assert trace.end is not None and "the weights at the end" in trace.end["unread"]


ANEW = """
import copy, sys, torch
torch.manual_seed(0)
torch.set_num_threads(1)
class Algorithm:
    def __init__(self):
        self.policy = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))
        self.optimizer = torch.optim.SGD(self.policy.parameters(), lr=0.1)
    def update(self, step):
        criterion = torch.nn.MSELoss()  # each module that is made has what is new searched for, at first
        x = torch.randn(8, 4)
        self.optimizer.zero_grad(); criterion(self.policy(x), x[:, :2]).backward(); self.optimizer.step()
        if step < int(sys.argv[1]):
            self.old = copy.deepcopy(self.policy)
        if step == 20:
            self.reward = torch.nn.Linear(3, 1, bias=False)
            self.reward.weight.data.fill_(float(sys.argv[2]))
algorithm = Algorithm()
for step in range(40):
    algorithm.update(step)
"""


@pytest.mark.parametrize(("others", "at", "name"), [
    (("30", "1"), 31, "old"), pytest.param(("99", "2"), 21, "reward", marks=pytest.mark.whole),
])  # fmt: skip
def test_modules_that_are_made_anew_are_read_to_the_end(
    tmp_path: Path, others: tuple[str, str], at: int, name: str
) -> None:
    """However many modules a program has made: an old policy that is not renewed, and a late one with other weights."""
    (tmp_path / "program.py").write_text(ANEW)
    for out, arguments in (("a", ("99", "1")), ("b", others)):
        command = [sys.executable, "-m", "repro", "trace", "--out", out, "--", sys.executable, "program.py", *arguments]
        assert warm_kit.run(command, tmp_path).returncode == 0
    divergence = first_difference(Trace(tmp_path / "a"), Trace(tmp_path / "b"))
    assert divergence and divergence.step == at and divergence.name.startswith(f"module/{name}/"), divergence
