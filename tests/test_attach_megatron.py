"""Megatron-core's own optimizers, on the CPU: their steps, the ones they leave out, and the norm that they clip by."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from repro_golden.recording.attach.alive.readings import Held
from repro_golden.trace import Trace

PROGRAM = """
import hashlib, os, sys, warnings

warnings.filterwarnings("ignore")
os.environ.update(MASTER_ADDR="127.0.0.1", RANK="0", WORLD_SIZE="1")
import torch
from torch.overrides import TorchFunctionMode
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.transformer.transformer_config import TransformerConfig

class OnCpu(TorchFunctionMode):
    # Megatron asks for tensors on "cuda" and looks for their type's name
    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device")).startswith("cuda"):
            kwargs["device"] = "cpu"
        out = function(*args, **kwargs)
        named = function is torch.Tensor.type and len(args) == 1 and not kwargs
        return out.replace("torch.", "torch.cuda.") if named else out

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = torch.nn.Linear(4, 8), torch.nn.Linear(8, 2)
    def forward(self, x):
        return self.last(self.first(x).tanh())

torch.manual_seed(0)
torch.set_num_threads(1)
torch.cuda.current_device = lambda: torch.device("cpu")
store = f"file://{os.getcwd()}/store-{os.getpid()}"
torch.distributed.init_process_group("gloo", init_method=store, rank=0, world_size=1)
parallel_state.initialize_model_parallel()
config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1, use_cpu_initialization=True)
bf16 = sys.argv[1] == "bf16"
with OnCpu():
    model = Model()
    model = model.bfloat16() if bf16 else model
    model = DistributedDataParallel(config, DistributedDataParallelConfig(grad_reduce_in_fp32=bf16), model)
    dtype = model.module.first.weight.dtype
    asked = OptimizerConfig(optimizer="adam", lr=1e-2, clip_grad=0.5, bf16=bf16, params_dtype=dtype)
    optimizer = get_megatron_optimizer(asked, [model])
    for step in range(4):
        model.zero_grad_buffer()
        optimizer.zero_grad()
        model(torch.randn(4, 4, dtype=dtype)).float().square().mean().backward()
        model.finish_grad_sync()
        done, norm, _ = optimizer.step()
        print(done, repr(float(norm)))
state = [p.float().tolist() for p in model.parameters()] + [torch.get_rng_state().tolist()]
print(hashlib.sha256(repr(state).encode()).hexdigest())
torch.distributed.destroy_process_group()
"""


@pytest.mark.whole
@pytest.mark.skipif(find_spec("megatron") is None, reason="Megatron-core 0.16.1 is not for this Python")
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_megatron_steps(tmp_path: Path, precision: str) -> None:
    """Each of Megatron's steps is one step, read after it returned, with its clipped norm; the program's bits stay."""
    (tmp_path / "program.py").write_text(PROGRAM)
    command = [sys.executable, "program.py", precision]
    outputs = []
    for before in ([], [sys.executable, "-m", "repro", "trace", "--out", "trace", "--"]):
        done = subprocess.run([*before, *command], cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        outputs.append(done.stdout)
    assert outputs[0] == outputs[1]
    trace = Trace(tmp_path / "trace")
    assert (len(trace.steps), trace.complete) == (4, True)
    norms = [float(line.split()[1]) for line in outputs[0].splitlines()[:4]]
    assert [s.metrics["grad_norm"] for s in trace.steps] == norms
    updated = [r for r in trace.rows(1) if r.phase == "update" and r.name.startswith("exp_avg/")]
    assert len(updated) == 4
    names = {f"{layer}.{kind}" for layer in ("first", "last") for kind in ("weight", "bias")}
    assert {r.name for r in updated} == {f"exp_avg/{name}" for name in names}
    copies = {r.name for r in trace.rows(1) if r.name.startswith("main/")}
    assert copies == ({f"main/{name}" for name in names} if precision == "bf16" else set())


def test_optimizers_of_which_a_rank_has_no_part() -> None:
    """A chain of no optimizers, as on a rank that trains nothing, holds nothing: its state only looks like a dict."""
    optimizers = pytest.importorskip("megatron.core.optimizer.optimizer")
    chain = optimizers.ChainedOptimizer([])
    held = Held(chain, {}, {})
    assert not hasattr(chain.state, "values")
    assert held.state() == {} and held.gradients() == held.mains() == ({}, {})
