"""The RL step on megatron-core against the built-in policy: estimators, masked tokens, replayed experts, a critic."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron_jobs_kit import EP, PP, SP, TP, Jobs, Key, eps_units, same
from once_kit import once
from torch import Tensor

torch.set_num_threads(1)

ESTIMATORS: dict[str, dict[str, Any]] = {
    "grpo": {"whiten_advantages": True, "use_tis": True, "entropy_coef": 0.01, "temperature": 0.8},
    "gspo": {"kl_coef": 0.05, "kl_loss_coef": 0.0, "use_tis": True, "tis_clip": 1.5, "loss_aggregation": "token"},
    "cispo": {"entropy_coef": 0.01, "use_tis": True, "kl_estimator": "k2"},
    "reinforce_plus_plus": {"gamma": 0.9, "kl_coef": 0.05, "kl_loss_coef": 0.0, "weight_decay": 0.1},
    "reinforce_plus_plus_baseline": {"kl_coef": 0.05, "kl_loss_coef": 0.0, "entropy_coef": 0.02, "clip_grad": 0.5},
    "ppo": {"gamma": 0.95, "lambd": 0.9, "whiten_advantages": True, "use_tis": True, "critic_lr": 2e-3},
}
POLICIES = ("torch", "megatron")
REPLAY = {"use_rollout_routing_replay": True}
FULL = {"recompute_granularity": "full"}
ROUTED: dict[str, tuple[int, dict[str, Any], str]] = {
    # who trains on rotated experts: (processes, layout, policy)
    "alone": (1, {}, "megatron"),
    "torch": (1, {}, "torch"),
    "recompute": (1, FULL, "megatron"),
    "pp2": (2, {**PP, **FULL}, "megatron"),
    "dp2": (2, {}, "megatron"),
    "ep2": (2, EP, "megatron"),
    "sp2": (2, SP, "megatron"),
    "sp2, recompute": (2, {**SP, **FULL}, "megatron"),
    "sp2 ep2": (4, {**SP, **EP, "moe_token_dispatcher_type": "allgather"}, "megatron"),
}
BOUND = 150.0  # epsilons; three times what was measured
WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "world": (
        {"tensor_model_parallel_size": 4},
        "2 processes cannot be TP x PP x CP = 4 x 1 x 1 = 4 times any number: start a multiple of that many",
    ),
    "experts": (EP, "expert_model_parallel_size 2 needs a model with experts (model_type qwen3_moe), not qwen2"),
    "sequence": (
        {"sequence_parallel": True},
        "sequence_parallel needs tensor_model_parallel_size of at least 2, not 1",
    ),
    "interleaved": (
        {**PP, "virtual_pipeline_model_parallel_size": 2},
        "num_hidden_layers 2 must be a multiple of pipeline_model_parallel_size x "
        "virtual_pipeline_model_parallel_size = 2 x 2",
    ),
    "padding": (
        {**TP, "sequence_parallel": True, "pad_to_multiple": 5},
        "pad_to_multiple 5 must be a multiple of 2, tensor_model_parallel_size 2: each process takes an equal part of "
        "a sequence",
    ),
    "engine": (
        {"transformer_impl": "transformer_engine", "attention_backend": "auto"},
        "transformer_impl transformer_engine needs a GPU: on a CPU use transformer_impl local and attention_backend "
        "local",
    ),
}


def changed(jobs: Jobs, source: str, name: str, **change: Any) -> str:
    """The path of a copy of a rollout; a change gives a tensor, or None to leave it out."""
    meta, tensors = torch.load(jobs.path(f"{source}.rollout"), weights_only=False)
    tensors |= {key: make(tensors) for key, make in change.items()}
    torch.save((meta, {key: value for key, value in tensors.items() if value is not None}), jobs.path(name))
    return jobs.path(name)


def poisoned(t: Mapping[str, Tensor]) -> Tensor:
    """The rollout's log-probs with NaN and infinities at masked tokens."""
    log_probs, masked = t["rollout_log_probs"].clone(), t["loss_mask"] == 0
    poison = torch.tensor([math.nan, math.inf, -math.inf])
    log_probs[masked] = poison[torch.arange(int(masked.sum())) % 3]
    return log_probs


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Jobs:
    """All jobs of this file in one interpreter."""
    return Jobs(once(tmp_path_factory, "megatron-estimators", _run), ())


def _run(folder: Path) -> None:
    jobs = Jobs(folder, ("dense", "moe"))
    dense, moe = (jobs.path(f"{kind}.rollout") for kind in ("dense", "moe"))
    bad = changed(jobs, "dense", "poisoned.rollout", rollout_log_probs=poisoned)
    rotated = changed(jobs, "moe", "rotated.rollout", routed_experts=lambda t: (t["routed_experts"] + 1) % 4)
    unrouted = changed(jobs, "moe", "unrouted.rollout", routed_experts=lambda _: None)
    for name, settings in ESTIMATORS.items():
        for policy in POLICIES:
            given = {**settings, "advantage_estimator": name, "policy": policy}
            jobs.add(1, f"{name} {policy}", do=[["train", dense]], **given)
            jobs.add(1, f"{name} {policy} poisoned", do=[["train", bad]], **given)
    for policy in POLICIES:
        jobs.add(1, f"moe {policy}", "moe", do=[["train", moe]], policy=policy)
        jobs.add(1, f"moe {policy} replayed", "moe", do=[["train", moe]], policy=policy, **REPLAY)
        both = [["fails"], ["train", unrouted], ["train", moe]]
        jobs.add(1, f"moe {policy} unrouted", "moe", do=both, policy=policy, **REPLAY)
        critic = {"advantage_estimator": "ppo", "num_critic_only_steps": 1, "policy": policy}
        first = [["weights"], ["train", dense, 1], ["weights"], ["train", dense], ["weights"]]
        jobs.add(1, f"critic {policy}", do=first, **critic)
    for name, (world, layout, policy) in ROUTED.items():
        jobs.add(world, f"rotated {name}", "moe", layout, do=[["train", rotated]], policy=policy, **REPLAY)
    jobs.add(2, "critic tp2", megatron=TP, do=first, **critic)
    for name, (layout, _) in WRONG.items():
        jobs.add(2, f"wrong {name}", megatron=layout, do=[["fails"], ["new"]])
    jobs.run()


def trained(jobs: Jobs, name: str) -> dict[Key, Tensor]:
    """What a job observed; the rollout's own columns left out."""
    signals = {key: value for key, value in jobs.joined(name).items() if key[1] != "weights"}
    assert {key[0] for key in signals} == {0, 1}, "two updates"
    return {key: value for key, value in signals.items() if key[1] != "input" or key[2].startswith("start/")}


def distances(a: Mapping[Key, Tensor], b: Mapping[Key, Tensor]) -> dict[str, float]:
    """By phase, in epsilons."""
    assert a.keys() == b.keys()
    return {phase: eps_units(a, b, phase) for phase in ("input", "forward", "loss", "grad", "update")}


@pytest.mark.whole
@pytest.mark.parametrize("name", ESTIMATORS)
def test_both_policies_train_the_same(name: str, jobs: Jobs) -> None:
    """Columns, loss, metrics, gradients, norm, weights and moments of two updates are epsilons apart."""
    distance = distances(trained(jobs, f"{name} megatron"), trained(jobs, f"{name} torch"))
    assert max(distance.values()) <= BOUND, distance


@pytest.mark.whole
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", ESTIMATORS)
def test_masked_tokens_reach_no_bit_of_an_update(name: str, policy: str, jobs: Jobs) -> None:
    """NaN and infinities in the rollout's columns at masked tokens: every signal of two updates is the same."""
    clean, bad = trained(jobs, f"{name} {policy}"), trained(jobs, f"{name} {policy} poisoned")
    assert clean.keys() == bad.keys() and [key for key in clean if not same(clean[key], bad[key])] == []
    assert all(bool(torch.isfinite(value).all()) for value in bad.values())


@pytest.mark.whole
def test_estimators_differ(jobs: Jobs) -> None:
    """No two of them make the same gradients: a policy that ignored its estimator would not pass for right."""
    gradients = [trained(jobs, f"{name} megatron")[0, "grad", "model.norm.weight"] for name in ESTIMATORS]
    assert len({tuple(gradient.tolist()) for gradient in gradients}) == len(ESTIMATORS)


@pytest.mark.whole
@pytest.mark.parametrize("policy", POLICIES)
def test_replaying_a_policys_own_choice_changes_nothing(policy: str, jobs: Jobs) -> None:
    """While the weights are those that sampled, recorded experts are the routers' own: nothing moves but rounding.

    Nothing is recorded for a sample's last token and for padding: these go elsewhere, and an expert's matrix product
    has other rows besides those that count.
    """
    states, replayed = trained(jobs, f"moe {policy}"), trained(jobs, f"moe {policy} replayed")
    first = [{key: value for key, value in signals.items() if key[0] == 0} for signals in (states, replayed)]
    distance = distances(first[0], first[1])
    assert max(distance.values()) <= BOUND, distance


@pytest.mark.whole
@pytest.mark.parametrize("name", ROUTED)
def test_recorded_experts_are_the_ones_used(name: str, jobs: Jobs) -> None:
    """Other recorded experts move the columns; in every layout, recomputed or not, they move them the same way."""
    alone, states = trained(jobs, "rotated alone"), trained(jobs, "moe megatron replayed")
    moved = (alone[0, "forward", "log_probs"] - states[0, "forward", "log_probs"]).abs().max()
    assert float(moved) > 0.05
    there = trained(jobs, f"rotated {name}")
    distance = distances(there, alone)
    assert max(distance.values()) <= BOUND, distance
    if name in ("recompute", "pp2", "dp2"):  # the same arithmetic; stages add up the norm in another order
        apart = [key for key in alone if not same(there[key], alone[key])]
        assert {key[2] for key in apart} <= ({"grad_norm"} if name == "pp2" else set())
        assert all(float(there[key]) == pytest.approx(float(alone[key]), rel=2.0**-21) for key in apart)


@pytest.mark.whole
def test_a_layer_run_again_uses_the_same_experts(jobs: Jobs) -> None:
    """Gradients of recompute full are those without it, bit for bit, under sequence parallelism too."""
    for plain, again in (("alone", "recompute"), ("sp2", "sp2, recompute")):
        a, b = trained(jobs, f"rotated {plain}"), trained(jobs, f"rotated {again}")
        assert [key for key in a if not same(a[key], b[key])] == []


@pytest.mark.whole
@pytest.mark.parametrize("policy", POLICIES)
def test_a_rollout_without_experts_is_refused(policy: str, jobs: Jobs) -> None:
    """By name, and nothing has changed: the trainer goes on with a whole rollout as if nothing had been."""
    (rank,) = jobs.ranks(f"moe {policy} unrouted")
    assert rank.said == [
        (
            "ConfigError",
            "rollout 0 has no routed_experts, but use_rollout_routing_replay needs [layers, experts per token] = "
            "[2, 2]: record rollouts with this model, or turn it off",
        )
    ]
    after, whole = trained(jobs, f"moe {policy} unrouted"), trained(jobs, f"moe {policy} replayed")
    assert after.keys() == whole.keys() and all(same(after[key], whole[key]) for key in whole)


@pytest.mark.whole
@pytest.mark.parametrize("name", ["torch", "megatron", "tp2"])
def test_the_critic_trains_alone_at_first(name: str, jobs: Jobs) -> None:
    """In num_critic_only_steps no bit of the policy moves, and the critic's do; afterwards both do."""
    gathered = jobs.joined(f"critic {name}")
    weights = {(step, key): value for (step, phase, key), value in gathered.items() if phase == "weights"}
    names = {key for _, key in weights}
    assert all(same(weights[0, key], gathered[0, "input", f"start/{key}"]) for key in names)
    assert all(same(weights[1, key], weights[0, key]) for key in names)
    assert sum(not same(weights[2, key], weights[1, key]) for key in names) == len(names)
    first = {(phase, key) for step, phase, key in gathered if step == 0 and phase in ("grad", "update")}
    assert first and all(key.startswith("critic/") for _, key in first)
    moved = {key: not same(gathered[0, "update", f"critic/{key}"], gathered[0, "input", f"start/critic/{key}"])
             for key in ("score.weight", "model.norm.weight")}  # fmt: skip
    assert moved == {"score.weight": True, "model.norm.weight": False}, "the head starts at 0, so it alone moves"
    assert not same(
        gathered[1, "update", "critic/model.norm.weight"], gathered[0, "update", "critic/model.norm.weight"]
    )
    assert same(gathered[1, "forward", "log_probs"], gathered[1, "forward", "old_log_probs"])


@pytest.mark.whole
@pytest.mark.parametrize("name", WRONG)
def test_a_layout_that_cannot_be_had_is_refused_on_every_rank(name: str, jobs: Jobs) -> None:
    """One line, the same on all ranks; the processes go on."""
    for rank in jobs.ranks(f"wrong {name}"):
        ((kind, text),) = rank.said
        assert kind == "ConfigError" and "\n" not in text
        assert text == WRONG[name][1]
