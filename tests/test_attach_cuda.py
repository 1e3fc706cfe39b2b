"""Recording programs on a GPU: their optimizers, a scaler that skips, and no bit changed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from repro_golden.trace.frames import read_frames

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")

PROGRAM = """
import hashlib, sys
import torch
torch.manual_seed(0)
torch.use_deterministic_algorithms(True)
kind = sys.argv[1]
model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.GELU(), torch.nn.Linear(128, 64)).cuda()
if kind == "compiled":
    model = torch.compile(model)
options = {name: True for name in ("fused", "capturable", "foreach") if name in kind}
lr = torch.tensor(0.01, device="cuda") if kind == "capturable" else 0.01
optimizer = torch.optim.AdamW(model.parameters(), lr=lr, **options)
scaler = torch.amp.GradScaler("cuda", init_scale=1024.0) if "scaler" in kind else None
losses = []
for step in range(5):
    optimizer.zero_grad()
    with torch.autocast("cuda", torch.float16, enabled=scaler is not None):
        loss = model(torch.randn(32, 64, device="cuda")).square().mean()
    if scaler:
        scaler.scale(loss * (float("inf") if step == 2 else 1)).backward()
        scaler.unscale_(optimizer)
    else:
        loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer) if scaler else optimizer.step()
    if scaler:
        scaler.update()
    losses.append(loss.detach())
state = [*model.state_dict().values(), torch.cuda.get_rng_state(), torch.stack(losses)]
for held in optimizer.state_dict()["state"].values():
    state += [value for value in held.values() if isinstance(value, torch.Tensor)]
raw = b"".join(t.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() for t in state)
print(hashlib.sha256(raw).hexdigest())
"""

RECORD = """
import os, subprocess, sys
from pathlib import Path
from repro_golden.recording.attach.gathered.run import environment_for
from repro_golden.recording.attach.base.settings import Settings
raw = Path(sys.argv[1])
raw.mkdir()
sys.exit(subprocess.call([sys.executable, *sys.argv[2:]], env=environment_for(Settings(str(raw)), os.environ)))
"""


WRAPPED = """
import sys, tempfile
import torch
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
torch.distributed.init_process_group("nccl", init_method=f"file://{tempfile.mkdtemp()}/s", rank=0, world_size=1)
torch.manual_seed(0)
net = FullyShardedDataParallel(torch.nn.Linear(8, 4).cuda(), sharding_strategy=ShardingStrategy.NO_SHARD)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for step in range(3):
    optimizer.zero_grad()
    net(torch.randn(4, 8, device="cuda")).square().mean().backward()
    net.clip_grad_norm_(1.0) if sys.argv[1] == "own" else torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    optimizer.step()
torch.distributed.destroy_process_group()
"""


@pytest.mark.parametrize("kind", ["own", "torch"])
def test_a_norm_is_told_once_by_clipping_that_calls_another(tmp_path: Path, kind: str) -> None:
    """FSDP clips by torch's function what it does not shard; of two tellings on a GPU each stood for itself."""
    (tmp_path / "program.py").write_text(WRAPPED)
    command = [sys.executable, "-c", RECORD, str(tmp_path / "raw"), str(tmp_path / "program.py"), kind]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    steps = [rows for _, rows in read_frames(tmp_path / "raw" / "rank-00000.log")]
    norms = [[row.name for row in rows if row.name.startswith("grad_norm")] for rows in steps]
    assert norms == [["grad_norm"]] * 3


UNDER_WAY = """
import sys
import torch
torch.manual_seed(0)
kind, late = sys.argv[1], int(sys.argv[2])
model = torch.nn.Linear(64, 64).cuda()
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
named = dict(model.named_parameters())
kept = {name: torch.zeros_like(p) for name, p in named.items()}
if kind != "average":
    kept = {name: torch.zeros(p.shape).pin_memory() for name, p in named.items()}
if kind == "array":
    kept = {name: t.numpy() for name, t in kept.items()}
beside = torch.cuda.Stream()
for step in range(4):
    optimizer.zero_grad()
    model(torch.randn(32, 64, device="cuda")).square().mean().backward()
    optimizer.step()
    now = {name: p.detach().clone() for name, p in named.items()}
    beside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(beside):
        torch.cuda._sleep(late)
        for name, value in now.items():
            value.record_stream(beside)
            if kind == "average":
                kept[name].lerp_(value, 0.1)
            else:
                torch.as_tensor(kept[name]).copy_(value, non_blocking=True)
torch.cuda.current_stream().wait_stream(beside)
"""


@pytest.mark.parametrize("kind", ["average", "backup", "array"])
def test_what_is_read_is_the_same_however_far_the_gpu_is(tmp_path: Path, kind: str) -> None:
    """A moving average on a stream of its own, or a backup on its way to pinned memory, is read when it is there."""
    (tmp_path / "program.py").write_text(UNDER_WAY)
    read = []
    for late in ("0", str(1 << 29)):
        command = [sys.executable, "-c", RECORD, str(tmp_path / late), str(tmp_path / "program.py"), kind, late]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        steps = [rows for _, rows in read_frames(tmp_path / late / "rank-00000.log")]
        read.append([{(row.phase, row.name): row.lanes for row in rows} for rows in steps])
    assert [("update", "copy/kept/weight") in step for step in read[0]] == [True] * 4
    assert ("update", "end/copy/kept/weight") in read[0][-1]
    assert read[0] == read[1]


CAPTURED = """
import sys
import torch
torch.manual_seed(0)
torch.use_deterministic_algorithms(True)
model = torch.nn.Linear(64, 64).cuda()
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, capturable=True)
x = torch.randn(32, 64, device="cuda")
def train():
    optimizer.zero_grad()
    model(x).square().mean().backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=False)
    optimizer.step()
beside = torch.cuda.Stream()
beside.wait_stream(torch.cuda.current_stream())
with torch.cuda.stream(beside):
    for _ in range(3):
        train()
torch.cuda.current_stream().wait_stream(beside)
graph = torch.cuda.CUDAGraph()
if sys.argv[1] == "graph":
    with torch.cuda.graph(graph):
        train()
for step in range(4):
    x.copy_(torch.randn(32, 64, device="cuda"))
    graph.replay() if sys.argv[1] == "graph" else train()
"""


def test_a_step_in_a_cuda_graph_is_recorded_when_it_is_replayed(tmp_path: Path) -> None:
    """A captured step is none. What a replay trains is what the same calls train that are made one by one."""
    (tmp_path / "program.py").write_text(CAPTURED)
    read = []
    for how in ("graph", "calls"):
        command = [sys.executable, "-c", RECORD, str(tmp_path / how), str(tmp_path / "program.py"), how]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert "recording stopped" not in done.stderr
        steps = [rows for _, rows in read_frames(tmp_path / how / "rank-00000.log")]
        read.append([{row.name: row.lanes for row in rows if row.phase == "update"} for rows in steps])
    graph, calls = ([(step["weight"], step["exp_avg/weight"]) for step in steps] for steps in read)
    assert len(graph) == 7
    assert graph == calls


@pytest.mark.parametrize("kind", ["plain", "fused", "foreach", "capturable", "scaler", "scaler-fused", "compiled"])
def test_recording_changes_no_bit(tmp_path: Path, kind: str) -> None:
    """A recorded program on a GPU ends with the unrecorded one's state, and each step is in the record."""
    (tmp_path / "program.py").write_text(PROGRAM)
    outputs = []
    for before in ([], ["-c", RECORD, str(tmp_path / "raw")]):
        done = subprocess.run(
            [sys.executable, *before, str(tmp_path / "program.py"), kind], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        assert "recording stopped" not in done.stderr
        outputs.append(done.stdout)
    assert outputs[0] == outputs[1]
    steps = [rows for _, rows in read_frames(tmp_path / "raw" / "rank-00000.log")]
    assert len(steps) == 5
    names = {r.name for r in steps[0] if r.phase == "update"}
    assert {"0.weight", "2.bias", "exp_avg/0.weight", "exp_avg_sq/2.bias", "lr"} <= names
    assert all(any(r.name == "grad_norm" for r in rows) for rows in steps)
    skipped = [any(r.name == "skipped" for r in rows) for rows in steps]
    assert skipped == ["scaler" in kind and step == 2 for step in range(5)]
    weights = [next(r for r in rows if r.phase == "update" and r.name == "0.weight").fingerprint for rows in steps]
    assert len(set(weights)) == 5 - any(skipped)
