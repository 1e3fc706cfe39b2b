"""Outputs of modules and their gradients, recorded for the modules that the user names."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
import warm_kit

from repro_golden.fingerprint import fingerprint
from repro_golden.trace import Trace

PROGRAM = """
import hashlib, sys
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

torch.manual_seed(0)
torch.set_num_threads(1)

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)
    def forward(self, x):
        hidden = self.up(x)
        hidden = torch.nn.functional.relu(hidden, inplace=True)  # what full-backward hooks of modules would break
        return {"out": x + self.down(hidden), "pair": (hidden, hidden.detach())}

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
    def forward(self, x):
        for block in self.blocks[:2]:
            x = block(x)["out"]
        return checkpoint(lambda y: self.blocks[2](y)["out"], x, use_reentrant=False)

model = Model()
if "compiled" in sys.argv:
    model.blocks[1].compile(backend="aot_eager")
optimizer = torch.optim.Adam(model.parameters())
for step in range(3):
    with torch.no_grad():
        model(torch.ones(2, 4))  # generation, say: not part of the step
    for _ in range(2):
        model(torch.randn(2, 4)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
state = [p.tolist() for p in model.parameters()] + [torch.get_rng_state().tolist()]
print(hashlib.sha256(repr(state).encode()).hexdigest())
"""


def run(folder: Path, *before: str, arguments: tuple[str, ...] = ()) -> str:
    """What the program prints, started by `before`."""
    (folder / "program.py").write_text(PROGRAM)
    command = [sys.executable, *before, *([sys.executable] if before else []), "program.py", *arguments]
    done = warm_kit.run(command, folder)
    assert done.returncode == 0, done.stderr
    assert "recording stopped" not in done.stderr, done.stderr
    return done.stdout


def traced(*globs: str) -> tuple[str, ...]:
    """The recorder, with the modules that are meant."""
    return ("-m", "repro", "trace", "--out", "trace", *(w for g in globs for w in ("--activations", g)), "--")


def test_outputs_and_their_gradients(tmp_path: Path) -> None:
    """Named modules' outputs are recorded once for each call with gradients, and the program's bits stay."""
    assert run(tmp_path, *traced("blocks.?", "*.up")) == run(tmp_path)
    trace = Trace(tmp_path / "trace")
    forward = {r.name for r in trace.rows(1) if r.phase == "forward"}
    parts = [f"blocks.{k}.{what}" for k in range(3) for what in ("output.out", "output.pair.0", "output.pair.1")]
    ups = [f"blocks.{k}.up.output" for k in range(3)]
    both = [name + again for name in parts + ups for again in ("", ".1")]  # two micro-batches
    assert forward == set(both)
    gradients = {r.name for r in trace.rows(1) if r.phase == "grad" and ".output" in r.name}
    assert {"blocks.0.output.out", "blocks.0.output.out.1", "blocks.1.up.output"} <= gradients
    assert "blocks.0.output.pair.1" not in gradients


def test_the_values_are_those_of_the_program(tmp_path: Path) -> None:
    """What is recorded of an activation is its content, before anything in place changes it."""
    run(tmp_path, *traced("blocks.0.up"))
    row = Trace(tmp_path / "trace").row(0, "forward", "blocks.0.up.output")
    torch.manual_seed(0)
    layer = torch.nn.Linear(4, 8)
    for size in ((8, 4), (4, 8), (8, 4), (4, 8), (8, 4)):
        torch.nn.Linear(*size)
    assert row is not None
    assert row.fingerprint == fingerprint(layer(torch.randn(2, 4)))


@pytest.mark.whole
def test_compiled_regions_are_left_alone(tmp_path: Path) -> None:
    """A compiled module computes what it does unrecorded; nothing inside it is seen."""
    assert run(tmp_path, *traced("*"), arguments=("compiled",)) == run(tmp_path, arguments=("compiled",))
    names = {r.name for r in Trace(tmp_path / "trace").rows(0) if r.phase == "forward"}
    assert any(name.startswith("blocks.0.up") for name in names)
    assert not any(name.startswith("blocks.1.up") for name in names)


def test_nothing_by_default(tmp_path: Path) -> None:
    """Without a glob no activation is recorded."""
    run(tmp_path, *traced())
    assert not [r for r in Trace(tmp_path / "trace").rows(0) if r.phase == "forward"]
