from __future__ import annotations

import ast
import random
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from trainer_kit import (
    COLUMNS,
    ONE_STEP,
    PHASES,
    TINY,
    WEIGHT,
    Recorder,
    bits,
    ignore,
    quiet,
    run,
    state_bits,
    with_rewards,
)

from repro_core import Rollout, Subject, build
from repro_core.config import ConfigError, ModelConfig, TrainConfig
from repro_core.data.rollout_file import read_rollout, write_rollout
from repro_core.train.trainer import Trainer


def test_the_trainer_is_a_subject() -> None:
    """`build` opens the interface with a plain mapping, and the trainer starts at step 0 of rollout 0."""
    subject: Subject = build({"config": {"model": {"hidden_size": 16, "num_attention_heads": 2}}})
    assert subject.position == (0, 0)


def test_signals_come_in_the_order_of_the_phases() -> None:
    """Each step observes input, forward, loss, grad, update; starting parameters once; every column and moment."""
    recorder = Recorder()
    trainer = quiet()
    names = [name for name, _ in trainer.engines.generator().named_parameters()]
    run(trainer, range(1), recorder)
    order = [PHASES.index(phase) for phase, _, _ in recorder.seen]
    second = next(i for i in range(1, len(order)) if order[i] < order[i - 1])
    assert order[:second] == sorted(order[:second]) and order[second:] == sorted(order[second:])
    step_0 = [(phase, name) for phase, name, _ in recorder.seen[:second]]
    step_1 = [(phase, name) for phase, name, _ in recorder.seen[second:]]
    starts = [("input", f"start/{name}") for name in names]
    assert step_0[: len(starts)] == starts and step_0[len(starts) :] == step_1
    assert [name for phase, name in step_1 if phase == "forward"] == list(COLUMNS)
    assert [name for phase, name in step_1 if phase == "grad"] == [*names, "grad_norm"]
    moments = [f"{kind}/{name}" for kind in ("exp_avg", "exp_avg_sq") for name in names]
    assert [name for phase, name in step_1 if phase == "update"] == [*names, *moments, "number/step"]


def test_the_optimizers_count_of_steps_is_shown() -> None:
    """A count of one weight that is off shows after the step in which it is, whatever it does to weights."""
    counts: list[list[float]] = []

    def observe(phase: str, name: str, value: Any) -> None:
        if phase == "update" and name == "number/":
            counts.append(value["step"].tolist())

    trainer = quiet()
    run(trainer, range(1), observe)
    count = trainer.engines.policy.optimizer.moments("step")[WEIGHT]
    count.copy_(count + 2e-6)
    run(trainer, range(1, 2), observe)
    assert counts[:2] == [[1.0], [2.0]] and [len(distinct) for distinct in counts[2:]] == [2, 2]


def test_bf16_observes_its_rounded_weights() -> None:
    """bf16 keeps fp32 main weights, observes both, and the model's are the main ones rounded to nearest even."""
    seen: dict[str, Tensor] = {}

    def observe(phase: str, name: str, value: Any) -> None:
        if phase == "update":
            seen.update({name + key: tensor for key, tensor in value.items()})

    trainer = quiet(replace(TINY, dtype="bf16"))
    run(trainer, range(1), observe)
    for name, parameter in trainer.engines.generator().named_parameters():
        assert seen[name].dtype == torch.float32 and seen[f"model/{name}"].dtype == torch.bfloat16
        assert torch.equal(seen[name].bfloat16(), parameter)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_two_runs_agree_to_the_bit(dtype: Any) -> None:
    """Two trainers see the same signals in the same order with the same bits, whatever the global generators hold."""
    runs = []
    for seed in (0, 1):
        trainer, recorder = quiet(replace(TINY, dtype=dtype)), Recorder()
        torch.manual_seed(seed)
        random.seed(seed)
        run(trainer, range(2), recorder)
        runs.append(recorder.seen)
    assert runs[0] == runs[1]


def test_observing_changes_nothing() -> None:
    """A run that copies every signal ends in the same state as a run that ignores them."""
    watched, alone = quiet(), quiet()
    run(watched, range(2), Recorder())
    run(alone, range(2))
    assert state_bits(watched) == state_bits(alone)


PLANTS = [
    ("input", f"start/{WEIGHT}"),
    *[("input", name) for name in ("tokens", "rewards", "rollout_log_probs")],
    *[("forward", name) for name in COLUMNS if name != "entropy"],
    ("grad", WEIGHT),
    ("update", WEIGHT),
    ("update", f"exp_avg/{WEIGHT}"),
]


@pytest.mark.parametrize("plant", PLANTS, ids="/".join)
def test_the_observed_tensor_is_the_one_in_use(plant: tuple[str, str]) -> None:
    """One element changed in an observed tensor is first seen there, and something after it changes too."""
    config = replace(TINY, use_tis=True, kl_loss_coef=0.5)
    clean, planted = Recorder(), Recorder(plant)
    run(quiet(config), range(1), clean)
    run(quiet(config), range(1), planted)
    differ = [(ours[0], ours[1]) for ours, theirs in zip(clean.seen, planted.seen, strict=True) if ours != theirs]
    assert planted.planted and differ[0] == plant
    assert len(differ) > 1, "nothing that follows depends on it"


def test_masked_input_columns_are_views_of_the_rollout() -> None:
    """A plant reaches the rollout's own storage: no copy stands between the observer and the trainer."""
    rollout = quiet().sample(0)
    where = {name: tensor.untyped_storage().data_ptr() for name, tensor in rollout.tensors.items()}
    seen: dict[str, int] = {}

    def observe(phase: str, name: str, value: Any) -> None:
        if phase == "input" and not name:
            seen.update({key: tensor.untyped_storage().data_ptr() for key, tensor in value.items()})

    list(quiet().train(rollout, observe))
    assert seen == where


# Numbers


def test_the_first_step_is_on_policy_to_the_bit() -> None:
    """At step 0 log_probs, old_log_probs and ref_log_probs have the same bits, also over several micro-batches."""
    for dtype in ("fp32", "bf16"):
        recorder = Recorder()
        run(quiet(replace(TINY, dtype=dtype)), range(1), recorder)  # type: ignore[arg-type]
        first: dict[str, bytes] = {}
        for _, name, value in recorder.seen:
            first.setdefault(name, value)
        assert first["log_probs"] == first["old_log_probs"] == first["ref_log_probs"]
        assert first["ppo_kl"] == first["kl_loss"] == first["pg_clipfrac"] == bits(0.0)


def gradients(config: TrainConfig, rollout: Rollout) -> tuple[dict[str, Tensor], float]:
    """The gradients of the first step, and its loss."""
    out: dict[str, Tensor] = {}
    metrics: dict[str, float] = {}

    def observe(phase: str, name: str, value: Any) -> None:
        if isinstance(value, float):
            metrics[name] = value
        elif phase == "grad":
            out.update({key: tensor.clone() for key, tensor in value.items()})

    next(quiet(config).train(rollout, observe))
    return out, metrics["loss"]


@pytest.mark.parametrize("aggregation", ["token", "sample"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_micro_batches_do_not_change_the_gradient(aggregation: Any, dtype: Any) -> None:
    """One micro-batch, several, or one per sample: the same loss and gradient up to rounding, masks included."""
    config = replace(ONE_STEP, loss_aggregation=aggregation, dtype=dtype, kl_loss_coef=0.0, entropy_coef=0.01)
    rollout = with_rewards(quiet(config).sample(0))
    mask = rollout.tensors["loss_mask"].clone()
    mask[::3] = 0
    rollout = Rollout(rollout.meta, {**rollout.tensors, "loss_mask": mask})
    whole, loss = gradients(replace(config, max_tokens_per_micro_batch=10_000), rollout)
    for budget in (24, 1):
        parts, part_loss = gradients(replace(config, max_tokens_per_micro_batch=budget), rollout)
        assert part_loss == pytest.approx(loss, abs=1e-6)
        for name, wanted in whole.items():
            assert parts[name].dtype == torch.float32
            tolerance = 1e-5 if dtype == "fp32" else 2e-2  # bf16: one rounding of each micro-batch's gradient
            torch.testing.assert_close(parts[name], wanted, rtol=tolerance, atol=tolerance * float(wanted.abs().max()))


SETTINGS: list[dict[str, Any]] = [
    {"kl_estimator": "k1"},
    {"kl_loss_coef": 0.0},
    {"grpo_std_normalization": False},
    {"whiten_advantages": True},
    {"eps_clip": 1e-4},
    {"eps_clip_high": 1e-4},
    {"eps_clip_c": 1.0001},
    {"entropy_coef": 0.1},
    {"loss_aggregation": "token"},
    {"use_tis": True, "tis_clip": 0.5},
    {"use_tis": True, "tis_clip_low": 1.5},
    {"temperature": 0.5},
    {"lr": 1e-3},
    {"betas": (0.5, 0.95)},
    {"betas": (0.9, 0.5)},
    {"adam_eps": 1e-3},
    {"weight_decay": 0.1},
    {"clip_grad": 0.01},
    {"dtype": "bf16"},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_every_setting_takes_effect(settings: dict[str, Any]) -> None:
    """No flag is dead: each changes the weights that two updates of one recorded rollout end in."""
    config = replace(TINY, kl_loss_coef=0.1, lr=0.01)
    rollout = with_rewards(quiet(config).sample(0))
    rollout.tensors["loss_mask"][::4] = 0  # so that samples differ in their number of tokens
    ends = []
    for variant in (config, replace(config, **settings)):
        trainer = quiet(variant)
        list(trainer.train(rollout, ignore))
        ends.append(bits(trainer.state()[f"main/{WEIGHT}"]))
    assert ends[0] != ends[1]


def test_kl_in_the_reward_takes_effect_once_the_policy_has_moved() -> None:
    """kl_coef changes nothing in the first rollout, where the KL is 0, and the weights in the second."""
    ends = []
    for kl_coef in (0.0, 0.5):
        trainer = quiet(replace(TINY, kl_loss_coef=0.0, kl_coef=kl_coef))
        run(trainer, range(1))
        ends.append(bits(trainer.state()[f"main/{WEIGHT}"]))
        run(trainer, range(1, 2))
        ends.append(bits(trainer.state()[f"main/{WEIGHT}"]))
    assert ends[0] == ends[2] and ends[1] != ends[3]


def test_the_reference_stays_what_the_policy_was() -> None:
    """Its bits never move, the policy's do, and the KL between them leaves 0 with the second step."""
    trainer, recorder = quiet(), Recorder()
    start = {name: bits(p) for name, p in trainer.engines.generator().named_parameters()}
    run(trainer, range(2), recorder)
    assert {name: bits(trainer.state()[f"ref/{name}"]) for name in start} == start
    assert all(bits(trainer.state()[f"main/{name}"]) != value for name, value in start.items())
    kl = [value for _, name, value in recorder.seen if name == "kl_loss"]
    assert kl[0] == bits(0.0) and bits(0.0) not in kl[1:]


def test_training_raises_the_reward_it_is_given() -> None:
    """Thirty rollouts with a reward for ending in an id below 128 raise it from a half: the signs are right."""
    config = replace(ONE_STEP, rollout_batch_size=4, n_samples_per_prompt=8, global_batch_size=32, lr=3e-2)
    trainer = quiet(config)
    means = []
    for rollout_id in range(30):
        rollout = trainer.sample(rollout_id)
        small = (rollout.tensors["tokens"] < 128).float()
        totals = rollout.tensors["total_lengths"].tolist()
        rewards = torch.stack([part[-1] for part in torch.split(small, totals)])  # type: ignore[no-untyped-call]
        means.append(float(rewards.mean()))
        list(trainer.train(Rollout(rollout.meta, {**rollout.tensors, "rewards": rewards}), ignore))
    assert sum(means[-5:]) / 5 > sum(means[:5]) / 5 + 0.2


def test_the_metric_lines_are_the_fields() -> None:
    """One `rollout N:` line a rollout and one `step N:` line an update, each a literal that reads back as floats."""
    lines: list[str] = []
    trainer = Trainer(TINY, log=lines.append)
    observed: dict[str, float] = {}

    def observe(_: str, name: str, value: Any) -> None:
        if isinstance(value, float):
            observed[name] = value

    run(trainer, range(1), observe)
    assert [line.split(":")[0] for line in lines] == ["rollout 0", "step 0", "step 1"]
    last = ast.literal_eval(lines[-1].removeprefix("step 1: "))
    assert last == {f"train/{name}": value for name, value in observed.items()} | {"train/step": 1}
    assert "train/grad_norm" in last and "train/loss" in last
    first = ast.literal_eval(lines[0].removeprefix("rollout 0: "))
    assert first["rollout/rewards"] == 1.5 and 0.0 <= first["rollout/truncated"] <= 1.0


# Rollouts


def test_a_rollout_depends_on_weights_seed_and_number_alone(tmp_path: Path) -> None:
    """Sampled in another order, after other draws, it is the same file; another number or seed gives another."""
    trainer, twin = quiet(), quiet()
    trainer.sample(5)
    random.random()
    first, again, other = trainer.sample(1), twin.sample(1), twin.sample(2)
    for name, path in (("a", first), ("b", again)):
        write_rollout(tmp_path / name, path)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    assert bits(other.tensors["tokens"]) != bits(first.tensors["tokens"])
    assert bits(quiet(replace(TINY, seed=5)).sample(1).tensors["tokens"]) != bits(first.tensors["tokens"])
    back = read_rollout(tmp_path / "a")
    assert back.meta == first.meta and back.meta["rollout_id"] == 1
    assert len(back.meta["prompts"]) == 2 and len(back.meta["statuses"]) == 8
    assert back.tensors["group_index"].tolist() == [0, 0, 0, 0, 1, 1, 1, 1]


def test_the_sampler_and_the_trainer_agree_on_log_probs() -> None:
    """At any temperature: what the engine reports is what the trainer computes, up to rounding in another shape."""
    seen: dict[str, float] = {}
    run(
        quiet(replace(ONE_STEP, temperature=0.5)),
        range(1),
        lambda _, name, value: seen.update({name: value}) if _ == "loss" else None,
    )
    assert 0.0 <= seen["train_rollout_logprob_abs_diff"] <= seen["train_rollout_logprob_abs_diff_max"] < 1e-5


def test_a_rollout_that_does_not_fit_is_refused() -> None:
    """Another number of samples names both sides; a half-trained rollout is finished before another begins."""
    trainer = quiet()
    rollout = trainer.sample(0)
    with pytest.raises(ConfigError, match=r"rollout 0 has 8 samples.* = 4 x 1 = 4"):
        next(quiet(replace(TINY, rollout_batch_size=1, num_steps_per_rollout=1)).train(rollout, ignore))
    assert next(trainer.train(rollout, ignore)) == 0
    assert trainer.position == (1, 0)
    with pytest.raises(ConfigError, match="rollout 0 is half trained"):
        next(trainer.train(trainer.sample(1), ignore))
    assert list(trainer.train(rollout, ignore)) == [1]
    assert trainer.position == (2, 1)


# Checkpoints


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda _: None, "has no routed_experts"),
        (lambda routed: routed[:, :1], "routed_experts of [1, 2] a token"),
        (lambda routed: routed + 3, "but the model has 0 to 3"),
        (lambda routed: routed * 0, "one expert twice, at token 0"),
    ],
)
def test_experts_that_cannot_be_replayed_are_refused(spoil: Any, words: str) -> None:
    """Routing replay takes what this model's routers could have chosen, and says in one line what it misses."""
    model = ModelConfig(
        model_type="qwen3_moe", hidden_size=16, num_hidden_layers=2, num_attention_heads=2, num_experts=4,
        num_experts_per_tok=2, moe_intermediate_size=8,
    )  # fmt: skip
    trainer = quiet(replace(TINY, model=model, use_rollout_routing_replay=True))
    rollout = with_rewards(trainer.sample(0))
    for _ in trainer.train(rollout, ignore):
        pass
    spoilt = {**rollout.tensors, "routed_experts": spoil(rollout.tensors["routed_experts"])}
    with pytest.raises(ConfigError, match=re.escape(words)):
        next(trainer.train(replace(rollout, tensors={k: v for k, v in spoilt.items() if v is not None}), ignore))
