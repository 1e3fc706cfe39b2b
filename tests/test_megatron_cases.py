"""Cases of the Megatron policy on two processes: planted regressions bisected, states resumed, a dying rank named."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from conftest import SOURCE, Repo

import repro_core
from repro_golden.case.file import find_case
from repro_golden.replay.children import ChildFailure, Run
from repro_golden.repository.checkout import Place
from repro_golden.store.rollout_file import RolloutData, write_rollout
from repro_golden.store.rollouts import RolloutSet
from repro_golden.subjects import launch
from repro_golden.trace import Trace

CASE = """\
[case]
name = "tp2"
steps = 2
rollouts = "golden/rollouts/tp2"

[subject]
module = "repro_core"
path = "core"
timeout = "3m"

[subject.config]
policy = "megatron"
rollout_batch_size = 2
n_samples_per_prompt = 4
global_batch_size = 8
max_tokens_per_micro_batch = 64

[subject.config.model]
hidden_size = 32
intermediate_size = 32

[subject.config.megatron]
tensor_model_parallel_size = 2
sequence_parallel = true

[resources]
ranks = 2

[layouts.one]
ranks = 1
config = { megatron = { tensor_model_parallel_size = 1, sequence_parallel = false } }
"""
UNTIED = """\
[case]
name = "untied"
steps = 2
rollouts = "golden/rollouts/untied"

[subject]
module = "repro_core"
path = "core"
timeout = "3m"

[subject.config]
policy = "megatron"
rollout_batch_size = 2
n_samples_per_prompt = 4
global_batch_size = 8
max_tokens_per_micro_batch = 64
clip_grad = 0.0

[subject.config.model]
hidden_size = 32
intermediate_size = 32
tie_word_embeddings = false

[layouts.pp2]
ranks = 2
config = { megatron = { pipeline_model_parallel_size = 2 } }
tolerance = 0
absolute = { grad_norm = 1e-6 }

[layouts.recompute]
config = { megatron = { recompute_granularity = "full" } }
tolerance = 0

[layouts.tp2]
ranks = 2
config = { megatron = { tensor_model_parallel_size = 2 } }
tolerance = 0

[nightly]
tolerance = 1e9
"""
ENGINE = "core/repro_core/engines/megatron/engine.py"
FORWARD = "        scores = self._score(tensors, update)\n        self._update ="
BATCH = "        batch, self._update ="
LOSS = "            return total, torch.zeros((), dtype=torch.int, device=total.device), {}\n"


def started(root: Path, name: str, text: str) -> Repo:
    """A repository with the trainer's code, a small case, and its rollouts."""
    shutil.copytree(SOURCE / "core", root / "core", ignore=shutil.ignore_patterns("__pycache__"))
    (root / "golden" / "cases").mkdir(parents=True)
    (root / "golden" / "cases" / f"{name}.toml").write_text(text)
    case = find_case(root, name)
    config = {**case.subject.model_dump()["config"], "policy": "torch", "megatron": {}}
    rollouts = root / "golden" / "rollouts" / name
    rollouts.mkdir(parents=True)
    sampler = repro_core.build({"config": config})
    for number in range(case.steps):
        rollout = sampler.sample(number)
        write_rollout(rollouts / f"{number}.safetensors", RolloutData(rollout.meta, rollout.tensors))
    RolloutSet.write_index(rollouts)
    (root / ".gitignore").write_text("__pycache__/\n")
    repo = Repo(root)
    repo.git("init", "--quiet", "--initial-branch=main")
    repo.commit("Start")
    repo.git("tag", "first")
    return repo


@pytest.fixture(scope="module")
def repo(tmp_path_factory: pytest.TempPathFactory) -> Repo:
    """That of the case on two processes, with good commits and two that are wrong."""
    repo = started(tmp_path_factory.mktemp("megatron") / "fork", "tp2", CASE)
    root = repo.root
    repo.edit(ENGINE, '"""See `interface.Engine.forward`."""', '"""As `interface.Engine.forward` says."""')
    repo.commit("Say it in other words")
    # slime ef0a7eb1d: the trainer's log-probs in bf16, where autocast was left on
    repo.edit(ENGINE, FORWARD, "        with torch.autocast('cpu', torch.bfloat16):\n    " + FORWARD)
    repo.commit("Score under autocast")
    repo.git("tag", "autocast")
    (root / "NOTES.md").write_text("Nothing that trains.\n")
    repo.commit("Write notes")
    repo.edit(ENGINE, BATCH, "        # the micro-batches of one update\n" + BATCH)
    repo.commit("Explain a name")
    # slime 763f18d5b: what is a mean over tokens already is divided by their number again
    repo.edit(ENGINE, LOSS, LOSS.replace("total,", "total / (max(1, int(share.mask.sum())) if self.updates else 1),"))
    repo.commit("Scale the loss per token")
    return repo


def bisect(repo: Repo, *arguments: str) -> dict[str, Any]:
    """What a bisect says as JSON."""
    done = repo.repro("bisect", "--no-explain", "--json", *arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    data: dict[str, Any] = json.loads(done.stdout)
    return data


def place(repo: Repo, folder: Path) -> Place:
    """The code as it was first, in a folder of its own."""
    repo.git("worktree", "add", "--quiet", "--detach", str(folder / "tree"), "first")
    return Place(folder / "tree")


# -- bisects


@pytest.mark.whole
def test_log_probs_under_autocast_are_bisected_on_two_processes(repo: Repo) -> None:
    """The commit that scores under autocast is named, in the forward pass, by the column that it moved first."""
    result = bisect(repo, "first..autocast")
    assert result["culprit"]["commit"] == repo.git("rev-parse", "autocast")
    assert (result["divergence"]["step"], result["divergence"]["phase"]) == (0, "forward")
    assert result["divergence"]["signal"] == "log_probs"


@pytest.mark.campaign
def test_a_loss_that_is_scaled_twice_is_bisected_from_a_saved_state(repo: Repo) -> None:
    """It is wrong from the second update on: probes make that step alone, from a checkpoint of both processes."""
    result = bisect(repo, "autocast..HEAD")
    assert result["culprit"]["commit"] == repo.git("rev-parse", "HEAD")
    assert (result["divergence"]["step"], result["divergence"]["phase"]) == (1, "grad")
    assert result["one_step"] is True


# -- layouts


@pytest.fixture(scope="module")
def untied(tmp_path_factory: pytest.TempPathFactory) -> Repo:
    """A case whose layouts must be equal to the bit; at its second commit pipeline stages are not."""
    repo = started(tmp_path_factory.mktemp("untied") / "fork", "untied", UNTIED)
    stages = "self.config.megatron.pipeline_model_parallel_size"
    moved = LOSS.replace("total,", f"total * (1 + 2.0**-22 * ({stages} > 1)),")
    repo.edit(ENGINE, LOSS, moved)
    repo.commit("Scale the loss of pipeline stages")
    return repo


@pytest.mark.whole
@pytest.mark.parametrize(
    ("layout", "outcome", "first"),
    [
        pytest.param("pp2", "agree", "grad_norm"),
        pytest.param("recompute", "equal", None, marks=pytest.mark.campaign),
        pytest.param("tp2", "part", "log_probs", marks=pytest.mark.campaign),
    ],
)
def test_a_case_asks_for_equal_bits(untied: Repo, layout: str, outcome: str, first: str | None) -> None:
    """Stages and recomputed layers keep every bit but the norm's, whose bound is the table's; TP keeps not all."""
    comparison = bisect(untied, "--layout", f"case..{layout}", "--at", "first")["comparison"]
    assert (comparison["tolerance"], comparison["verdict"]) == (0, outcome)
    assert (comparison["first"] or {}).get("signal") == first


@pytest.mark.campaign
def test_stages_that_compute_something_else_part_by_one_bit(untied: Repo) -> None:
    """A quarter of a millionth in the loss of stages is a night's alarm, though the tolerance of the case allows it."""
    comparison = bisect(untied, "--layout", "case..pp2", "--at", "HEAD")["comparison"]
    assert (comparison["verdict"], comparison["parted"]["phase"]) == ("part", "grad")
    assert comparison["parted"]["beyond"] == "every bit must be equal" and comparison["parted"]["units"] < 16


# -- processes


@pytest.mark.campaign
def test_two_processes_go_on_from_their_checkpoint(repo: Repo, tmp_path: Path) -> None:
    """The second update is the same bit for bit after a state that both processes saved is loaded by others."""
    case, tree = find_case(repo.root, "tp2"), place(repo, tmp_path)
    rollouts, states = str(repo.root / "golden" / "rollouts" / "tp2"), {1: str(tmp_path / "state")}
    launch(case, tree, [Run(2, rollouts, trace=str(tmp_path / "a"), states=states)], tmp_path / "log")
    run = Run(1, rollouts, trace=str(tmp_path / "b"), load=states[1], first_step=1)
    launch(case, tree, [run], tmp_path / "again.log")
    straight, resumed = (Trace(tmp_path / name) for name in ("a", "b"))
    assert [r.step for r in resumed.steps] == [1]
    again = {row.key: row.lanes for row in resumed.rows(0) if not row.name.startswith("start/")}
    assert again == {row.key: row.lanes for row in straight.rows(1)}


@pytest.mark.whole
def test_the_process_of_megatron_that_dies_is_named(repo: Repo, tmp_path: Path) -> None:
    """One fails in the first update while the other waits for it in a collective: its own words are the verdict."""
    tree = place(repo, tmp_path)
    fail = "        parts = self.mains\n        if dist.get_rank() == 1:\n            raise ValueError('no moment')\n"
    Repo(tree.root).edit(ENGINE, "        parts = self.mains\n", fail)
    with pytest.raises(ChildFailure) as raised:
        launch(
            find_case(repo.root, "tp2"),
            tree,
            [Run(1, str(repo.root / "golden" / "rollouts" / "tp2"))],
            tmp_path / "log",
        )
    error = raised.value
    assert (error.stage, error.step, error.message) == ("start", 0, "rank 1: ValueError: no moment")
    assert error.log.endswith(".rank-1")
