"""Trainers of kind slime under the recorder: gradients and weights beside what they write, also in Ray's actors."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import ray_kit
from conftest import Repo, environment

from repro_golden.dumps.rollout.files import RolloutDump, write_rollout_dump
from repro_golden.trace import Trace

TRAINER = Path(__file__).parent / "foreign_torch_trainer.py"
CASE = """\
[case]
name = "small"
steps = 2
proof_steps = 1
rollouts = "golden/rollouts/small"

[subject]
kind = "slime"
command = "bash run.sh"
timeout = "3m"
path = "train.py"
env = { OMP_NUM_THREADS = "1", RAY_USAGE_STATS_ENABLED = "0", RAY_AUTH_MODE = "disabled" }
"""
SCRIPT = "set -e\npython3 train.py --num-rollout 50 --save kept --use-tsi --sglang-tp 8\n"


def samples(rollout: int) -> list[dict[str, object]]:
    """Two groups of two, the last sample first."""
    signals: list[dict[str, object]] = []
    for index in range(4):
        tokens = [(7 * index + 3 * k + rollout) % 64 for k in range(8 + index)]
        signals.append(
            {
                "index": 4 * rollout + index, "group_index": 2 * rollout + index // 2, "prompt": "p", "response": "r",
                "tokens": tokens, "response_length": 4 + index, "reward": float(index % 2), "status": "completed",
                "rollout_log_probs": [-0.5 - 0.125 * k for k in range(4 + index)], "label": None,
            }
        )  # fmt: skip
    return signals[::-1]


def start(folder: Path, script: str = SCRIPT) -> Repo:
    """A fork whose trainer is small, with recorded rollouts and a case."""
    repo = Repo(folder / "fork")
    (repo.root / "golden" / "cases").mkdir(parents=True)
    rollouts = repo.root / "golden" / "rollouts" / "small"
    rollouts.mkdir(parents=True)
    for number in range(2):
        write_rollout_dump(rollouts / f"{number}.pt", RolloutDump("slime", number, samples=samples(number)))
    (repo.root / "golden" / "cases" / "small.toml").write_text(CASE)
    (repo.root / "run.sh").write_text(script)
    shutil.copy(TRAINER, repo.root / "train.py")
    repo.git("init", "--quiet", "--initial-branch=main")
    repo.commit("Start")
    return repo


@pytest.mark.whole
def test_a_golden_run_holds_gradients_and_what_the_trainer_wrote(tmp_path: Path) -> None:
    """A launch script becomes a proved golden run: columns, weights and gradients; nothing of the user's is touched."""
    repo = start(tmp_path)
    assert repo.repro("init").returncode == 0
    done = repo.repro("golden", "record")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "note: slime ignores --use-tsi of your launch" in done.stderr
    assert "--sglang-tp" not in done.stderr  # no parser reads the engine's where nothing is sampled
    assert "the recorder changes nothing" in done.stderr
    proofs = [line for line in done.stderr.splitlines() if "one ULP in" in line]
    planted = {line.split("one ULP in ")[1].split()[0]: "planted in what the trainer wrote" in line for line in proofs}
    assert planted == {"input": False, "forward": True, "grad": False, "update": False}
    assert not (repo.root / "kept").exists()  # --save of the launch went elsewhere
    (trace,) = (Trace(path) for path in repo.root.glob("golden/runs/*/small/trace"))
    names = {(row.phase, row.name) for row in trace.rows(0)}
    assert {("input", "rollout_log_probs"), ("forward", "log_probs")} <= names
    assert {("grad", "1.weight"), ("update", "1.weight")} <= names
    assert trace.steps[0].metrics["grad_norm"] > 0
    assert trace.header.subject["flags"][:2] == ["--debug-train-only", "--load-debug-rollout-data"]


@pytest.mark.whole
def test_a_bisect_names_the_column_before_the_gradients(tmp_path: Path) -> None:
    """The first signal that a culprit moves is the column that it computes, not the gradients behind it."""
    repo = start(tmp_path)
    (repo.root / "note").write_text("1")
    good = repo.commit("Note")
    repo.edit("train.py", "SCALE = 1.0", "SCALE = 1.0 + 1e-6")
    culprit = repo.commit("Rescale")
    (repo.root / "note").write_text("2")
    repo.commit("Note again")
    done = repo.repro("bisect", "--no-explain", f"{good}..HEAD", "--case", "small", "--json")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["culprit"]["commit"] == culprit
    divergence = result["divergence"]
    assert (divergence["step"], divergence["phase"], divergence["signal"]) == (0, "forward", "returns")
    assert divergence["differing"]["grad"] > 0


@pytest.fixture
def ray_head() -> Iterator[tuple[list[int], str]]:
    """Ports and folder of a cluster that a launch script starts; its processes, and no other's, end with the test."""
    folder = tempfile.mkdtemp(prefix="ray-")  # short: the path of a socket is bounded
    yield ray_kit.free_ports(4), folder
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if any(folder in word for word in process.cmdline()):
                process.kill()
    shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.whole
@pytest.mark.skipif(importlib.util.find_spec("aiohttp_cors") is None, reason="`ray job submit` needs ray[default]")
def test_a_submitted_job_is_recorded_in_its_actor(tmp_path: Path, ray_head: tuple[list[int], str]) -> None:
    """Flags and recorder get through `ray job submit` with a runtime environment of its own into the training actor."""
    (head, board, agent, client), folder = ray_head
    script = f"""\
set -ex
export PATH={Path(sys.executable).parent}:$PATH
env -u REPRO_TRACE -u PYTHONPATH ray start --head --port {head} --temp-dir {folder} --num-cpus 2 \\
    --dashboard-agent-listen-port {agent} --ray-client-server-port {client} \\
    --disable-usage-stats --include-dashboard true --dashboard-port {board} --object-store-memory 80000000
ray job submit --address=http://127.0.0.1:{board} \\
    --runtime-env-json='{{"env_vars": {{"PYTHONPATH": "{tmp_path}", "NCCL_ALGO": "Tree"}}}}' \\
    -- python3 {tmp_path}/fork/train.py --ray --num-rollout 50
"""
    repo = start(tmp_path, script)
    done = subprocess.run(
        [sys.executable, "-c", LAUNCH, str(repo.root), str(tmp_path / "trace")],
        env=environment(), capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    trace = Trace(tmp_path / "trace")
    names = {(row.phase, row.name) for row in trace.rows(1)}
    assert {("input", "tokens"), ("forward", "log_probs"), ("grad", "1.weight"), ("update", "1.weight")} <= names
    assert trace.header.subject["overridden"] == {"NCCL_ALGO": "Tree"}  # the launch's own wins, and is reported


LAUNCH = """\
import sys
from pathlib import Path
from repro_golden.case.file import find_case
from repro_golden.replay.children import Place, Run
from repro_golden.subjects import launch

root, trace = map(Path, sys.argv[1:])
case = find_case(root, "small")
log = trace.with_suffix(".log")
try:
    launch(case, Place(root), [Run(2, str(root / case.case.rollouts), trace=str(trace))], log)
except BaseException:
    print(log.read_text())
    raise
"""
