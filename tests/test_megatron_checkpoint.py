"""Checkpoints of megatron-core: resumed bit for bit, loaded into other layouts, refused in one line."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron_jobs_kit import DENSE, EP, PP, SP, TP, Jobs, Key, same
from once_kit import once
from torch import Tensor

from repro_core.train.command import main

torch.set_num_threads(1)

CORE = Path(__file__).parents[1] / "core"
PPO = {"advantage_estimator": "ppo"}
BF16 = {"dtype": "bf16"}
REPLAY = {"use_rollout_routing_replay": True}
RESUMED: dict[str, tuple[int, str, dict[str, Any], dict[str, Any]]] = {
    "one": (1, "dense", {}, {}),
    "one bf16 ppo": (1, "dense", {}, {**BF16, **PPO}),
    "experts": (1, "moe", {}, REPLAY),
    "tp2": (2, "dense", TP, {}),
    "tp2 bf16": (2, "tied", TP, BF16),
    "pp2": (2, "tied", PP, {}),
    "sp2 ppo": (2, "dense", SP, PPO),
    "ep2": (2, "moe", EP, REPLAY),
    "ep2 bf16 ppo": (2, "moe", EP, {**REPLAY, **BF16, **PPO}),
}
MOVED = {
    # from a checkpoint of RESUMED to other processes and another layout
    "one to tp2": ("one", 2, TP),
    "one to pp2": ("one", 2, PP),
    "one bf16 ppo to tp2": ("one bf16 ppo", 2, TP),
    "tp2 to pp2": ("tp2", 2, PP),
    "tp2 to one": ("tp2", 1, {}),
    "pp2 to tp2": ("pp2", 2, TP),
    "sp2 ppo to pp2": ("sp2 ppo", 2, PP),
    "experts to ep2": ("experts", 2, EP),
    "ep2 to one": ("ep2", 1, {}),
    "ep2 bf16 ppo to one": ("ep2 bf16 ppo", 1, {}),
    "ep2 bf16 ppo to pp2": ("ep2 bf16 ppo", 2, PP),
}


def _edit(**change: Any) -> Callable[[Path], None]:
    def edit(checkpoint: Path) -> None:
        meta = json.loads((checkpoint / "trainer.json").read_text())
        (checkpoint / "trainer.json").write_text(json.dumps({**meta, **change}))

    return edit


def _shard(checkpoint: Path) -> Path:
    return sorted(checkpoint.glob("*.distcp"))[0]


def _flip(checkpoint: Path) -> None:
    data = bytearray(_shard(checkpoint).read_bytes())
    data[len(data) // 2] ^= 1
    _shard(checkpoint).write_bytes(data)


SPOILT: dict[str, tuple[Callable[[Path], None], str]] = {
    "missing shard": (lambda c: _shard(c).unlink(), "__0_0.distcp is missing: fetch it, or use another checkpoint"),
    "damaged": (_flip, "__0_0.distcp is damaged (its SHA-256 differs): use another checkpoint"),
    "newer": (_edit(format=99), "has format 99, this reader knows up to 1: update repro_core"),
    "half": (
        lambda c: (c / "trainer.json").unlink(),
        "is no checkpoint (no trainer.json): give the directory that save wrote",
    ),
    "no JSON": (lambda c: _write(c, "{"), "use another checkpoint"),
    "a list": (_edit(config={"policy": "megatron", "model": [1]}), "use another checkpoint"),
}
OTHER: dict[str, tuple[dict[str, Any], str]] = {
    "architecture": ({"kind": "deep"}, "model.num_hidden_layers is 2 there and 4 here"),
    "tied": ({"kind": "tied"}, "model.tie_word_embeddings is False there and True here"),
    "dtype": (BF16, "dtype is 'fp32' there and 'bf16' here"),
    "estimator": (PPO, "advantage_estimator is 'grpo' there and 'ppo' here"),
}


def _write(checkpoint: Path, text: str) -> None:
    (checkpoint / "trainer.json").write_text(text)


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Jobs:
    """Two interpreters: one that saves, one that loads."""
    return Jobs(once(tmp_path_factory, "megatron-checkpoints", _run), ())


def _run(folder: Path) -> None:
    jobs = Jobs(folder, ("dense", "moe", "tied", "deep"))
    end = [["held"], ["state"], ["sample", 7]]
    for name, (world, kind, layout, settings) in RESUMED.items():
        path, train = jobs.path, ["train", jobs.path(f"{kind}.rollout")]
        whole = [["save", path(f"{name} start")], [*train, 1], ["save", path(f"{name} half")], ["state"], train]
        jobs.add(world, name, kind, layout, do=[*whole, ["save", path(f"{name} end")], *end], **settings)
        jobs.add(world, f"{name}, start", kind, layout, do=[["load", path(f"{name} start")], train, *end], **settings)
        half = [["load", path(f"{name} half")], ["state"], train, *end]
        jobs.add(world, f"{name}, half", kind, layout, do=half, **settings)
    torch_path = jobs.path("torch end")
    jobs.add(1, "torch", policy="torch", do=[["train", jobs.path("dense.rollout")], ["save", torch_path]])
    distributed = {"use_distributed_optimizer": True}
    twice = ["fails"], ["save", jobs.path("never")], ["fails"], ["load", jobs.path("tp2 end")], ["held"]
    jobs.add(2, "distributed", megatron=distributed, do=twice)
    jobs.run("saved")
    later = jobs.more()
    for name, (source, world, layout) in MOVED.items():
        _, kind, _, settings = RESUMED[source]
        later.add(world, name, kind, layout, do=[["load", jobs.path(f"{source} end")], ["held"], *end[2:]], **settings)
    for name, (spoil, _) in SPOILT.items():
        shutil.copytree(jobs.path("one end"), jobs.path(name))
        spoil(jobs.folder / name)
    refused = [verb for name in SPOILT for verb in (["fails"], ["load", jobs.path(name)])]
    wrong = [["fails"], ["load", torch_path], ["fails"], ["save", jobs.path("saved")], ["fails"], ["load", "nowhere"]]
    for world in (1, 2):
        train = ["train", jobs.path("dense.rollout")]
        tried = [["snapshot", "before"], *refused, *wrong, ["snapshot", "after"]]
        do = [[*train, 1], *tried, train, ["load", jobs.path("one end")], ["held"]]
        later.add(world, f"refused {world}", do=do)
    for name, (change, _) in OTHER.items():
        kind = change.get("kind", "dense")
        settings = {key: value for key, value in change.items() if key != "kind"}
        later.add(1, f"other {name}", kind, do=[["fails"], ["load", jobs.path("one end")]], **settings)
    later.add(1, "to torch", policy="torch", do=[["fails"], ["load", jobs.path("one end")]])
    train = ["train", jobs.path("dense.rollout")]
    faster = [["load", jobs.path("one half")], train, ["held"]]
    later.add(1, "faster", do=faster, lr=0.01)
    later.add(1, "as fast", do=faster)
    later.run("loaded")


def placed(jobs: Jobs, name: str, out: str) -> dict[tuple[str, str], Tensor]:
    """All weights, main weights, moments and step counts of a job's end, by phase and canonical name."""
    kinds = ("model", "main", "exp_avg", "exp_avg_sq", "step", "sample")
    tensors = {(phase, key): value for (_, phase, key), value in jobs.joined(name, out).items() if phase in kinds}
    assert {"model", "main", "exp_avg", "exp_avg_sq"} <= {phase for phase, _ in tensors}
    return tensors


@pytest.mark.whole
@pytest.mark.parametrize("at", ["start", "half"])
@pytest.mark.parametrize("name", RESUMED)
def test_a_resumed_run_is_the_run(name: str, at: str, jobs: Jobs) -> None:
    """Saved before any update and between two of one rollout: every rank's signals and state go on bit for bit."""
    for whole, resumed in zip(jobs.ranks(name, "saved"), jobs.ranks(f"{name}, {at}", "saved"), strict=True):
        keys: list[Key] = [key for key in resumed.signals if not key[2].startswith("start/")]
        assert {step for step, phase, _ in keys if phase == "grad"} == ({0, 1} if at == "start" else {1})
        assert any(phase == "state" for _, phase, _ in keys) and set(keys) <= set(whole.signals)
        assert [key for key in keys if not same(resumed.signals[key][0], whole.signals[key][0])] == []


@pytest.mark.whole
@pytest.mark.parametrize("name", MOVED)
def test_another_layout_loads_the_same_bytes(name: str, jobs: Jobs) -> None:
    """Joined over ranks, weights, main weights, moments, steps and reference are what was saved, in every layout."""
    wanted, placements = placed(jobs, MOVED[name][0], "saved"), placed(jobs, name, "loaded")
    exact = [key for key in wanted if key[0] not in ("sample", "step")]
    assert set(exact) <= set(placements) and [key for key in exact if not same(wanted[key], placements[key])] == []
    assert {float(value) for (phase, _), value in placements.items() if phase == "step"} == {2.0}
    drawn = [key for key in wanted if key[0] == "sample"]
    assert drawn and [key for key in drawn if not same(wanted[key], placements[key])] == [], (
        "weights alone decide a sample"
    )


@pytest.mark.whole
@pytest.mark.parametrize("world", [1, 2])
def test_what_cannot_be_loaded_is_refused_in_one_line(world: int, jobs: Jobs) -> None:
    """On every rank, and nothing has changed: the next update is the one without refusals, and a whole one loads."""
    texts = [text for _, text in SPOILT.values()]
    texts += [
        "was saved with policy 'torch': load it with that",
        "exists and is no checkpoint: choose another directory",
        "nowhere is no checkpoint (no trainer.json): give the directory that save wrote",
    ]
    for rank in jobs.ranks(f"refused {world}", "loaded"):
        for (kind, message), text in zip(rank.said, texts, strict=True):
            assert kind == "CheckpointError" and "\n" not in message and message.endswith(text), message
        before, after = (
            {(phase.replace(when, ""), key): tensor for (_, phase, key), (tensor, _) in rank.signals.items()
             if phase.startswith(f"state {when}")}
            for when in ("before", "after")
        )  # fmt: skip
        assert before.keys() == after.keys() and [key for key in before if not same(before[key], after[key])] == []
        moments = [value for (_, key), value in before.items() if key.startswith("exp_avg/")]
        assert moments and all(bool(value.any()) for value in moments), "there was something to change"
    whole, again = jobs.joined("one", "saved"), jobs.joined(f"refused {world}", "loaded")
    second = [key for key in again if key[0] == 1 and key[1] in ("forward", "loss", "grad", "update")]
    assert second and [key for key in second if not same(again[key], whole[key])] == []
    after, whole = placed(jobs, f"refused {world}", "loaded"), placed(jobs, "one", "saved")
    kept = [key for key in after if key[0] not in ("sample", "step")]
    assert kept and all(same(after[key], whole[key]) for key in kept)


@pytest.mark.whole
@pytest.mark.parametrize("name", OTHER)
def test_a_checkpoint_of_another_run_is_refused(name: str, jobs: Jobs) -> None:
    """Another architecture, dtype or kind of estimator: one line with both sides, and the cure."""
    (rank,) = jobs.ranks(f"other {name}", "loaded")
    ((kind, message),) = rank.said
    told = f"{OTHER[name][1]}; use the configuration that saved it"
    assert kind == "CheckpointError" and "\n" not in message and message.endswith(told), message


@pytest.mark.whole
def test_policies_refuse_each_others_checkpoints(jobs: Jobs) -> None:
    """The built-in policy names what it was given."""
    (rank,) = jobs.ranks("to torch", "loaded")
    ((kind, message),) = rank.said
    assert kind == "CheckpointError" and message.endswith("was saved with policy 'megatron': load it with that"), (
        message
    )


@pytest.mark.whole
def test_a_distributed_optimizer_saves_nothing_on_a_cpu(jobs: Jobs) -> None:
    """Neither does it load, and no directory is left."""
    for rank in jobs.ranks("distributed", "saved"):
        assert [kind for kind, _ in rank.said] == ["ConfigError"] * 2
        assert all(
            message.startswith("use_distributed_optimizer cannot save or resume on a CPU") for _, message in rank.said
        )
    assert not (jobs.folder / "never").exists()


@pytest.mark.whole
def test_the_learning_rate_is_the_configurations(jobs: Jobs) -> None:
    """A run that resumes with another one trains with it."""
    slow, fast = (placed(jobs, name, "loaded") for name in ("as fast", "faster"))
    start = jobs.joined("one", "saved")
    key = "model.norm.weight"
    before = start[0, "update", key]
    moved = [(state["main", key] - before).abs().sum() for state in (slow, fast)]
    assert float(moved[1] / moved[0]) == pytest.approx(10, rel=0.05)


@pytest.mark.whole
def test_no_temporary_directories_are_left(jobs: Jobs) -> None:
    """Neither what was being written nor what was replaced."""
    assert not list(jobs.folder.glob(".*"))


def train(folder: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    """The command line on two processes."""
    given = {name: value for name, value in DENSE.items() if name != "tie_word_embeddings"}
    model = [text for name, value in given.items() for text in ("--" + name.replace("_", "-"), str(value))]
    small = ["--rollout-batch-size", "2", "--n-samples-per-prompt", "2", "--global-batch-size", "4", "--save", "saved"]
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*launch, "-m", "repro_core.train", "--policy", "megatron", *model, *small, *flags]
    env = {**os.environ, "PYTHONPATH": str(CORE), "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=120)


@pytest.mark.whole
def test_the_command_line_saves_and_resumes_on_two_processes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rank 0 alone prints; the latest checkpoint is named; a resumed run prints what a whole one does."""
    flags = ["--tensor-model-parallel-size", "2", "--save-interval", "1"]
    whole = train(tmp_path, *flags, "--num-rollout", "2")
    assert whole.returncode == 0, whole.stderr[-2000:]
    lines = [line for line in whole.stdout.splitlines() if line.startswith(("rollout", "step"))]
    assert [line.split(":")[0] for line in lines] == ["rollout 0", "step 0", "rollout 1", "step 1"]
    assert "Warning" not in whole.stderr
    saved = tmp_path / "saved"
    assert (saved / "latest_checkpointed_iteration.txt").read_text() == "1\n"
    assert sorted(path.name for path in saved.iterdir()) == [
        "iter_0000000",
        "iter_0000001",
        "latest_checkpointed_iteration.txt",
    ]
    (saved / "latest_checkpointed_iteration.txt").write_text("0\n")
    again = train(tmp_path, *flags, "--num-rollout", "2", "--load", "saved")
    assert again.returncode == 0, again.stderr[-2000:]
    assert [line for line in again.stdout.splitlines() if line.startswith(("rollout", "step"))] == lines[2:]
    assert main(["--policy", "torch", "--load", str(saved), "--num-rollout", "1"]) == 2
    assert "was saved with policy 'megatron'" in capsys.readouterr().err
