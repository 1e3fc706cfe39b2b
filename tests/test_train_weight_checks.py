"""The trainer's flags that judge weight syncs, through its command line: what is said, and what fails a run."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from sglang_kit import CORE, Served, sglang_server  # noqa: F401 - a fixture
from weight_sync_kit import CONFIG, TABLE, Fused, brought

from repro_core.engines.torch_engine import TorchEngines
from repro_golden.recording.weight_sync import SyncJudge

MODEL = """\
max_response_len = 4
rollout_batch_size = 2
n_samples_per_prompt = 2
global_batch_size = 4

[model]
model_type = "qwen3"
kv_channels = 32
initializer_range = 0.1
tie_word_embeddings = false
"""
FLAGS = ("--check-weight-update-equal", "--debug-weight-sync", "2")
SENT = "sent = tensor.to(self._dtype).contiguous()"
"""Where the trainer makes what goes over the wire, in `repro_core.rollout.sync`."""


def trained(folder: Path, *arguments: str, code: Path = CORE) -> subprocess.CompletedProcess[str]:
    """``python -m repro_core.train`` with a small model, on the trainer's code in a folder."""
    config = folder / "config.toml"
    config.write_text(MODEL)
    command = [sys.executable, "-m", "repro_core.train", "--config", str(config), *arguments]
    environment = os.environ | {"PYTHONPATH": str(code)}
    out, err = folder / "stdout", folder / "stderr"  # not pipes, which would wait for whoever else has them
    with out.open("w") as to_out, err.open("w") as to_err:
        code_ = subprocess.run(
            command, cwd=folder, env=environment, stdout=to_out, stderr=to_err, timeout=120, check=False
        ).returncode
    return subprocess.CompletedProcess(command, code_, out.read_text(), err.read_text())


@pytest.mark.whole
@pytest.mark.parametrize("flags", [FLAGS[:1], FLAGS[1:]])
def test_a_check_of_nothing_is_no_success(tmp_path: Path, flags: tuple[str, ...]) -> None:
    """Where the policy samples itself there is no sync: the run says so in one line, with exit 2."""
    done = trained(tmp_path, "--num-rollout", "1", *flags)
    assert done.returncode == 2, done.stderr
    (line,) = done.stderr.splitlines()
    assert line.startswith("python -m repro_core.train: error: no weight sync was made: rollout_engine is the policy")


@pytest.mark.whole
def test_every_sync_of_a_run_is_judged(tmp_path: Path, sglang_server: Served) -> None:  # noqa: F811
    """Each of two syncs to SGLang is reported: its version, that all arrived, how many changed, and the first of them.

    The same run with a tensor that is zeroed on its way ends in exit 2 at the first sync, in one line that names it.
    """
    engine = ("--rollout-engine", "sglang", "--sglang-url", sglang_server.url, "--num-rollout", "2")
    done = trained(tmp_path, *engine, *FLAGS)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    first, second = (at for at, line in enumerate(lines) if line.startswith("weights '") and " (tensor): " in line)
    assert lines[first].startswith("weights '0' (tensor): ") and ", all arrived, digest " in lines[first]
    assert lines[second].startswith("weights '1' (tensor): ") and " changed since '0', all arrived" in lines[second]
    assert lines[first].rpartition(" ")[2] != lines[second].rpartition(" ")[2]
    for at in (first, second):
        assert all(line.startswith("  ") and " absmax " in line for line in lines[at + 1 : at + 3])
        assert lines[at + 3].startswith("  and ") and lines[at + 3].endswith(" more")

    shutil.copytree(CORE / "repro_core", tmp_path / "planted/repro_core", ignore=shutil.ignore_patterns("__pycache__"))
    path = tmp_path / "planted/repro_core/rollout/sync.py"
    text = path.read_text()
    assert text.count(SENT) == 1
    path.write_text(text.replace(SENT, f"{SENT} * (name != 'model.norm.weight')"))
    done = trained(tmp_path, *engine, *FLAGS[:1], code=tmp_path / "planted")
    assert done.returncode == 2, done.stdout + done.stderr
    (line,) = done.stderr.splitlines()
    assert "weights '0' did not arrive whole (tensor): model.norm.weight: all zero in the engine" in line


def test_a_buffer_that_is_gone_is_named() -> None:
    """An engine that no longer holds a table of its own is no engine whose weights all arrived."""
    engines, engine = TorchEngines(CONFIG, "."), Fused(CONFIG.model, 1)
    judge = SyncJudge(None, print)
    assert not brought(engines, engine, judge, "1")
    del engine.processes[0][TABLE]
    assert f"{TABLE} of engine process 0: a buffer that is gone since it was first seen (version '1')" in brought(
        engines, engine, judge, "2"
    )
