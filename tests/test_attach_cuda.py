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
