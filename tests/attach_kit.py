"""Training programs that know nothing of the recorder, as text, and how to run them plain and recorded."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import warm_kit

from repro_golden.trace import Row, Trace
from repro_golden.trace.families import family

NETWORKS = """\
import os, torch
from torch import nn
other = os.environ["OTHER"] == "1"
torch.set_num_threads(1)
torch.manual_seed(0)
def net():
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
def loss_of(model):
    x = torch.randn(8, 3)
    return (model(x) - x.sum(-1, keepdim=True)).square().mean()
"""
"""The beginning of programs that do something else where the variable OTHER is 1."""

PRELUDE = """
import hashlib, os, random, sys
import numpy, torch
from torch import nn

torch.set_num_threads(1)
torch.manual_seed(0)
random.seed(0)
numpy.random.seed(0)
losses = []

def network(*middle, out=2):
    return nn.Sequential(nn.Linear(6, 7), nn.Tanh(), *middle, nn.Linear(7, out))

def loss_of(model, batch=None):
    loss = model(torch.randn(4, 6) if batch is None else batch).square().mean()
    losses.append(loss.item())
    return loss

def flat(value):
    if isinstance(value, torch.Tensor):
        value = value.to_local() if hasattr(value, "to_local") else value
        return [str(value.dtype), tuple(value.shape), value.detach().reshape(-1).view(torch.uint8).tolist()]
    if isinstance(value, dict):
        return [(key, flat(item)) for key, item in value.items()]
    return [flat(item) for item in value] if isinstance(value, (list, tuple)) else value

def finish(models, optimizers, *more):
    state = [m.state_dict() for m in models] + [o.state_dict() for o in optimizers] + list(more)
    generators = [torch.get_rng_state().tolist(), random.getstate(), [list(map(str, numpy.random.get_state()))]]
    text = repr([flat(state), generators, [x.hex() for x in losses]])
    if torch.distributed.is_initialized():
        every = [None] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(every, text)
        text = "".join(every)
    if os.environ.get("RANK", "0") == "0":
        print("sha256", hashlib.sha256(text.encode()).hexdigest())
"""

PROGRAMS = {
    # three optimizers in turn, each with other kernels
    "kernels": """
models = [network(), network(), network()]
optimizers = [
    torch.optim.SGD(models[0].parameters(), lr=0.1, momentum=0.9),
    torch.optim.AdamW(models[1].parameters(), foreach=True),
    torch.optim.AdamW(models[2].parameters(), fused=True),
]
for step in range(4):
    for model, optimizer in zip(models, optimizers):
        optimizer.zero_grad()
        loss_of(model).backward()
        optimizer.step()
finish(models, optimizers)
""",
    # a scripted module, with a frozen part and a buffer
    "scripted": """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers, self.frozen = network(), nn.Linear(6, 6).requires_grad_(False)
        self.register_buffer("seen", torch.zeros(6))

    def forward(self, x):
        self.seen.add_(x.sum(0))
        return self.layers(self.frozen(x))

model = torch.jit.script(Net())
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
for step in range(4):
    optimizer.zero_grad()
    loss_of(model).backward()
    optimizer.step()
finish([model], [optimizer])
""",
    "scaler": """
model = network()
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
for step in range(5):
    optimizer.zero_grad()
    with torch.autocast("cpu", torch.bfloat16):
        loss = loss_of(model)
    scaler.scale(loss * (float("inf") if step == 2 else 1)).backward()
    if step % 2:
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
finish([model], [optimizer], scaler.state_dict())
""",
    "accumulation": """
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import checkpoint

model = network(nn.Dropout(0.5), checkpoint_wrapper(nn.Sequential(nn.Linear(7, 7), nn.Dropout(0.5))))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(4):
    for part in range(3):
        (loss_of(lambda x: checkpoint(model, x, use_reentrant=False)) / 3).backward()
    optimizer.step()
    optimizer.zero_grad()
finish([model], [optimizer])
""",
    "compiled": """
model = torch.compile(nn.Linear(6, 1), backend="inductor")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(4):
    optimizer.zero_grad()
    loss_of(model).backward()
    optimizer.step()
finish([model], [optimizer])
""",
    # step calls inside step calls; two of six raise, one of them when the inner call has ended; then a closure
    "nested": """
model = network()
torch.optim.SGD(model.parameters())  # from now on SGD.step is a step call of its own

class Decayed(torch.optim.SGD):
    def step(self, closure=None):
        if number == 1:
            raise ValueError("before")
        out = super().step(closure)
        if number == 3:
            raise ValueError("after")
        return out

class Wrapper:
    def __init__(self, inner):
        self.inner = inner

    def step(self):
        self.inner.step()

inner = Decayed(model.parameters(), lr=0.1)
outer = Wrapper(inner)
kept = []
for number in range(6):
    inner.zero_grad()
    loss_of(model).backward()
    try:
        outer.step()
    except ValueError as error:
        kept.append(error)
assert len(kept) == 2

searched = network()
optimizer = torch.optim.LBFGS(searched.parameters(), lr=0.1, max_iter=3, line_search_fn="strong_wolfe")

def closure():
    optimizer.zero_grad()
    loss = loss_of(searched, batch)
    loss.backward()
    return loss

for number in range(4):
    batch = torch.randn(4, 6)
    optimizer.step(closure)
finish([model, searched], [inner, optimizer])
""",
    # arguments: the learning rate of the third step, and "reversed" to register everything the other way round
    "ordered": """
names = ["a", "b", "c"]
if "reversed" in sys.argv:
    names.reverse()

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleDict()
        for name in names:
            torch.manual_seed(ord(name))
            self.layers[name] = nn.Linear(6, 6)

    def forward(self, x):
        for name in sorted(names):
            x = torch.tanh(self.layers[name](x))
        return x

model = Net()
torch.manual_seed(1)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
for step in range(4):
    optimizer.zero_grad()
    loss_of(model).backward()
    optimizer.param_groups[0]["lr"] = float(sys.argv[1]) if step == 2 else 0.01
    optimizer.step()
finish([model], [optimizer])
""",
    # DDP and FSDP2 under torchrun; alone, the same without either. Argument: how many outputs the sharded model has
    "ranks": """
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

replicated = network()
sharded = network(out=int(sys.argv[1]))
many = "RANK" in os.environ
if many:
    dist.init_process_group("gloo")
    mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
    replicated = nn.parallel.DistributedDataParallel(replicated)
    for module in (sharded[0], sharded):
        fully_shard(module, mesh=mesh)
    torch.manual_seed(dist.get_rank())
models = [replicated, sharded]
optimizers = [torch.optim.SGD(replicated.parameters(), lr=0.1), torch.optim.AdamW(sharded.parameters())]
from repro_golden.fingerprint import fingerprint
for step in range(4):
    for model, optimizer in zip(models, optimizers):
        optimizer.zero_grad()
        loss_of(model).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    norm = norm.full_tensor() if many else norm
    if os.environ.get("RANK", "0") == "0":
        print("norm", repr(norm.item()))
    for name, p in sharded.named_parameters():
        for kind, t in (("grad", p.grad), ("update", p.detach())):
            whole = fingerprint(t.full_tensor() if many else t)
            if os.environ.get("RANK", "0") == "0":
                print(step, kind, name, whole)
finish(models, optimizers)
if many:
    dist.destroy_process_group()
""",
}

TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


@dataclass(frozen=True)
class Programs:
    """The programs in a folder of their own."""

    folder: Path

    def plain(self, name: str, arguments: Sequence[str] = (), launcher: Sequence[str] = ()) -> str:
        """What a program prints when nobody records."""
        return self._run([sys.executable, *launcher, self._write(name), *arguments]).stdout

    def recorded(
        self, out: str, name: str, arguments: Sequence[str] = (), launcher: Sequence[str] = ()
    ) -> tuple[Trace, str]:
        """The trace of a program, and what it printed."""
        command = [sys.executable, *launcher, self._write(name), *arguments]
        done = self._run([sys.executable, "-m", "repro", "trace", "--out", out, "--", *command])
        assert "recording stopped" not in done.stderr, done.stderr
        return Trace(self.folder / out), done.stdout

    def _write(self, name: str) -> str:
        (self.folder / f"{name}.py").write_text(PRELUDE + PROGRAMS[name])
        return f"{name}.py"

    def _run(self, command: list[str]) -> subprocess.CompletedProcess[str]:
        cache = {"TORCHINDUCTOR_CACHE_DIR": str(self.folder / "inductor")}
        settings = {"OMP_NUM_THREADS": "1", "PYTHONHASHSEED": warm_kit.SEED}
        done = warm_kit.run(command, self.folder, os.environ | cache | settings)
        assert done.returncode == 0, done.stdout + done.stderr
        return done


def names(trace: Trace, step: int, phase: str) -> list[str]:
    """The sorted names of one step's tensors of a phase, but for what lives beside the optimizers."""
    rows = (row for row in trace.rows(step) if family(row.phase, row.name) is None)
    return sorted(row.name for row in rows if row.phase == phase and row.dtype != "metric")


def row(trace: Trace, step: int, phase: str, name: str) -> Row:
    """A row that must be there."""
    row = trace.row(step, phase, name)
    assert row is not None, (step, phase, name, [r.name for r in trace.rows(step)])
    return row


def traced(folder: Path, program: str, out: str, options: tuple[str, ...], *arguments: str) -> tuple[Trace, str]:
    """The trace of a program, and what it printed."""
    (folder / "program.py").write_text(program)
    two = "torch.distributed" in program
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2") if two else ()
    command = [sys.executable, *launcher, "program.py", *arguments]
    done = warm_kit.run([sys.executable, "-m", "repro", "trace", "--out", out, *options, "--", *command], folder)
    assert done.returncode == 0, done.stderr
    return Trace(folder / out), done.stdout
