"""Whatever lies at masked tokens, nothing else moves: not by a bit, not forward, not in a gradient."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from repro_core import Rollout
from repro_core.config import Estimator, ModelConfig, TrainConfig
from repro_core.rl.advantages import advantages, baseline, estimate, whiten
from repro_core.rl.first_step import first_step_checks
from repro_core.rl.kl import kl_per_token
from repro_core.rl.loss import Columns, policy_loss, token_log_probs, token_weights
from repro_core.rl.values import discounted_sums, gae, token_rewards, value_loss
from repro_core.train.trainer import Trainer

torch.set_num_threads(1)

LENGTHS = torch.tensor([3, 2, 4, 1, 2])
MASK = torch.tensor([1, 0, 1, 0, 1, 1, 1, 0, 1, 1, 0, 0])  # the last sample is masked whole
GROUPS = torch.tensor([0, 0, 1, 1, 1])
REWARDS = torch.tensor([1.0, 0.25, 0.5, 0.0, 7.0])
VOCAB = 7

Inputs = dict[str, Tensor]
Quantity = Callable[[Inputs], dict[str, Tensor]]


def make_inputs() -> Inputs:
    generator = torch.Generator().manual_seed(5)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    n = len(MASK)
    return {
        "logits": draw(n, VOCAB),
        "targets": torch.randint(0, VOCAB, (n,), generator=generator),
        "log_probs": -draw(n).abs(),
        "old_log_probs": -draw(n).abs(),
        "ref_log_probs": -draw(n).abs(),
        "rollout_log_probs": -draw(n).abs(),
        "entropy": draw(n).abs(),
        "kl": draw(n).abs(),
        "advantages": draw(n),
        "values": draw(n),
        "old_values": draw(n),
        "returns": draw(n),
    }


def bits(tensor: Tensor) -> tuple[str, list[int], bytes]:
    plain = tensor.detach().contiguous()
    return str(plain.dtype), list(plain.shape), plain.reshape(-1).view(torch.uint8).numpy().tobytes()


def kl_quantity(estimator: Any) -> Quantity:
    def quantity(x: Inputs) -> dict[str, Tensor]:
        ours = x["log_probs"].clone().requires_grad_()
        value = kl_per_token(ours, x["ref_log_probs"], MASK, estimator)
        # A gradient that is not uniform, so that a leak cannot cancel.
        value.backward(torch.arange(1.0, len(MASK) + 1))
        assert ours.grad is not None
        return {"kl": value, "gradient": ours.grad}

    return quantity


def from_logits(x: Inputs) -> dict[str, Tensor]:
    logits = x["logits"].clone().requires_grad_()
    log_probs, entropy = token_log_probs(logits, x["targets"], MASK, 0.7)
    (log_probs.sum() + 2 * entropy.sum()).backward()
    assert logits.grad is not None
    return {"log_probs": log_probs, "entropy": entropy, "gradient": logits.grad}


def group_statistics(x: Inputs) -> dict[str, Tensor]:
    out = {}
    for std in (True, False):
        base = baseline(
            REWARDS,
            GROUPS,
            MASK,
            LENGTHS,
            kl=x["kl"],
            kl_coef=0.1,
            std_normalization=std,
        )
        out |= {f"{name}/{std}": getattr(base, name) for name in ("returns", "values")}
        out[f"advantages/{std}"] = advantages(base, MASK)
        out[f"whitened/{std}"] = whiten(advantages(base, MASK), MASK)
    return out


def loss_quantity(aggregation: Any, **settings: Any) -> Quantity:
    def quantity(x: Inputs) -> dict[str, Tensor]:
        ours, entropy = x["log_probs"].clone().requires_grad_(), x["entropy"].clone().requires_grad_()
        config = TrainConfig(entropy_coef=0.01, **settings)
        columns = Columns(
            log_probs=ours,
            entropy=entropy,
            kl=kl_per_token(ours, x["ref_log_probs"], MASK, "k3"),
            old_log_probs=x["old_log_probs"],
            rollout_log_probs=x["rollout_log_probs"],
            advantages=x["advantages"],
            loss_mask=MASK,
            response_lengths=LENGTHS,
        )
        terms = policy_loss(columns, token_weights(MASK, LENGTHS, aggregation), config)
        terms.loss.backward()
        assert ours.grad is not None and entropy.grad is not None
        # Every metric: pg_loss, pg_clipfrac, ppo_kl, kl_loss, entropy_loss, the log-prob gap and TIS.
        return terms.sums | {
            "loss": terms.loss,
            "abs_diff_max": terms.abs_diff_max,
            "gradient": ours.grad,
            "entropy gradient": entropy.grad,
        }

    return quantity


def estimator_quantity(**settings: Any) -> Quantity:
    def quantity(x: Inputs) -> dict[str, Tensor]:
        estimated = estimate(
            TrainConfig(gamma=0.9, lambd=0.8, **settings),
            rewards=REWARDS,
            group_index=GROUPS,
            loss_mask=MASK,
            response_lengths=LENGTHS,
            kl=x["kl"],
            values=x["values"],
        )
        return estimated._asdict()

    return quantity


def token_sums(x: Inputs) -> dict[str, Tensor]:
    rewards = token_rewards(REWARDS, MASK, LENGTHS, kl=x["kl"], kl_coef=0.1)
    advantages = gae(x["returns"], x["values"], MASK, LENGTHS, gamma=0.9, lambd=0.8)
    return {"rewards": rewards, "sums": discounted_sums(x["advantages"], MASK, LENGTHS, 0.9), **advantages._asdict()}


def value_loss_quantity(aggregation: Any) -> Quantity:
    def quantity(x: Inputs) -> dict[str, Tensor]:
        ours = x["values"].clone().requires_grad_()
        weights = token_weights(MASK, LENGTHS, aggregation)
        loss, metrics = value_loss(ours, x["old_values"], x["returns"], MASK, weights, 0.5)
        loss.backward()
        assert ours.grad is not None
        return metrics | {"loss": loss, "gradient": ours.grad}

    return quantity


ESTIMATOR_SETTINGS: list[dict[str, Any]] = [
    {"advantage_estimator": name, "whiten_advantages": whitened}
    for name in get_args(Estimator)
    for whitened in (False, True)
]


QUANTITIES: dict[str, tuple[Quantity, tuple[str, ...]]] = {
    "kl k1": (kl_quantity("k1"), ("log_probs", "ref_log_probs")),
    "kl k2": (kl_quantity("k2"), ("log_probs", "ref_log_probs")),
    "kl k3": (kl_quantity("k3"), ("log_probs", "ref_log_probs")),
    "kl low_var": (kl_quantity("low_var"), ("log_probs", "ref_log_probs")),
    "log-probs and entropy": (from_logits, ("logits", "targets")),
    "returns, values, advantages, whitening": (group_statistics, ("kl",)),
    "whitening": (lambda x: {"whitened": whiten(x["advantages"], MASK)}, ("advantages",)),
    **{
        f"loss {aggregation} {settings}": (
            loss_quantity(aggregation, **settings),
            ("log_probs", "old_log_probs", "ref_log_probs", "rollout_log_probs", "entropy", "advantages"),
        )
        for aggregation in ("token", "sample")
        for settings in (
            {},
            {"eps_clip_c": 1.5},
            {"use_tis": True, "tis_clip": 1.1, "tis_clip_low": 0.9},
            {"advantage_estimator": "gspo"},
            {"advantage_estimator": "gspo", "eps_clip_c": 1.5, "use_tis": True},
            {"advantage_estimator": "cispo"},
            {"advantage_estimator": "cispo", "use_tis": True},
        )
    },
    **{
        f"estimate {settings}": (
            estimator_quantity(kl_coef=0.1, **settings),
            ("kl", "values") if settings["advantage_estimator"] == "ppo" else ("kl",),
        )
        for settings in ESTIMATOR_SETTINGS
    },
    "token rewards, discounted sums, GAE": (token_sums, ("kl", "advantages", "returns", "values")),
    **{
        f"value loss {aggregation}": (value_loss_quantity(aggregation), ("values", "old_values", "returns"))
        for aggregation in ("token", "sample")
    },
    "first-step checks": (
        lambda x: {
            result.name: torch.tensor(list(result.detail.encode()))
            for result in first_step_checks(
                {**x, "ref_log_probs": x["log_probs"], "kl": x["kl"] - make_inputs()["kl"], "loss_mask": MASK},
                {"kl_loss": 0.0, "grad_norm": 1.0},
            )
        },
        ("log_probs", "kl"),
    ),
}


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf, 1e30, -3e38, -0.0])
@pytest.mark.parametrize("name", QUANTITIES)
def test_masked_tokens_reach_no_bit(name: str, poison: float) -> None:
    """For every quantity and each of its inputs: poison at masked tokens changes neither value nor gradient."""
    quantity, reads = QUANTITIES[name]
    wanted = {key: bits(value) for key, value in quantity(make_inputs()).items()}
    for column in (*reads, "all"):
        x = make_inputs()
        for read in reads if column == "all" else (column,):
            # A masked target may even be an id that the vocabulary does not have.
            x[read][MASK == 0] = poison if x[read].is_floating_point() else 10**9
        assert {key: bits(value) for key, value in quantity(x).items()} == wanted, column


@pytest.mark.parametrize("name", QUANTITIES)
def test_unmasked_tokens_do_reach(name: str) -> None:
    """The table can fail: NaN at an unmasked token changes every quantity, through each of its inputs."""
    quantity, reads = QUANTITIES[name]
    wanted = {key: bits(value) for key, value in quantity(make_inputs()).items()}
    for read in reads:
        x = make_inputs()
        x[read][0] = math.nan if x[read].is_floating_point() else (x[read][0] + 1) % VOCAB
        assert {key: bits(value) for key, value in quantity(x).items()} != wanted, read


def test_masked_columns_are_exactly_zero() -> None:
    """Log-probs, entropy, KL, rewards, returns, values, advantages and gradients hold 0 where the mask does."""
    x = make_inputs()
    estimators = [estimator_quantity(kl_coef=0.1, **settings) for settings in ESTIMATOR_SETTINGS]
    for quantity in (kl_quantity("k3"), from_logits, group_statistics, token_sums, *estimators):
        for value in quantity(x).values():
            assert not value[MASK == 0].any()
    assert not token_weights(MASK, LENGTHS, "sample")[MASK == 0].any()


@pytest.mark.parametrize("aggregation", ["token", "sample"])
def test_counts_are_of_unmasked_tokens(aggregation: Any) -> None:
    """More masked tokens at a sample's end leave the other tokens' weights alone, and the weights add up to 1."""
    weights = token_weights(MASK, LENGTHS, aggregation)
    longer = token_weights(
        torch.cat([MASK, torch.zeros(9).long()]), LENGTHS + torch.tensor([0, 0, 0, 0, 9]), aggregation
    )
    assert bits(longer[: len(MASK)]) == bits(weights)
    assert float(weights.sum()) == pytest.approx(1.0)


def test_a_wholly_masked_sample_is_not_in_its_group() -> None:
    """Its reward, NaN included, moves neither mean nor deviation of the group it was sampled in."""

    def columns(reward: float) -> dict[str, Any]:
        rewards = torch.tensor([1.0, 0.25, 0.5, 0.0, reward])
        base = baseline(rewards, GROUPS, MASK, LENGTHS, kl=torch.zeros(len(MASK)), kl_coef=0.0, std_normalization=True)
        return {name: bits(getattr(base, name)) for name in base._fields} | {"adv": bits(advantages(base, MASK))}

    assert columns(7.0) == columns(-3.0) == columns(math.nan)


@pytest.mark.parametrize("settings", ESTIMATOR_SETTINGS, ids=str)
def test_a_wholly_masked_sample_is_in_no_estimate(settings: dict[str, Any]) -> None:
    """Under every estimator its reward, NaN included, moves no bit; that of a counted sample does."""
    x = make_inputs()

    def columns(sample: int, reward: float) -> list[Any]:
        rewards = REWARDS.clone()
        rewards[sample] = reward
        estimated = estimate(
            TrainConfig(**settings),
            rewards=rewards,
            group_index=GROUPS,
            loss_mask=MASK,
            response_lengths=LENGTHS,
            kl=x["kl"],
            values=x["values"],
        )
        return [bits(column) for column in estimated]

    assert columns(4, 7.0) == columns(4, -3.0) == columns(4, math.nan) == columns(4, math.inf)
    for sample in range(4):
        assert columns(sample, -2.5) != columns(4, 7.0)


def test_masked_tokens_reach_no_bit_of_a_training_step() -> None:
    """Through the whole trainer: log-probs at masked tokens, and all of a wholly masked sample, change no update."""
    model = ModelConfig(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
    config = TrainConfig(model=model, rollout_batch_size=2, n_samples_per_prompt=3, global_batch_size=6, use_tis=True)
    rollout = Trainer(config, log=lambda _: None).sample(0)
    t = dict(rollout.tensors)
    ends = torch.cumsum(t["response_lengths"], 0)
    mask = t["loss_mask"].clone()
    mask[0] = 0
    mask[ends[0] : ends[1]] = 0  # the second sample goes whole
    rewards = torch.tensor([1.0, 9.0, 0.0, 0.5, 0.25, 0.0])

    def trained(log_prob: float, reward: float, token: int) -> dict[str, Any]:
        tensors = {**t, "loss_mask": mask, "rewards": rewards.clone(), "tokens": t["tokens"].clone()}
        tensors["rollout_log_probs"] = torch.where(mask != 0, t["rollout_log_probs"], log_prob)
        tensors["rewards"][1] = reward
        total = t["total_lengths"]
        tensors["tokens"][int(total[0]) + 1 : int(total[0] + total[1])] = token
        trainer = Trainer(config, log=lambda _: None)
        list(trainer.train(Rollout(rollout.meta, tensors), lambda *_: None))
        return {name: bits(value) for name, value in trainer.state().items()}

    wanted = trained(-1.0, 9.0, 65)
    assert trained(math.nan, math.nan, 70) == wanted
    assert trained(math.inf, -5.0, 0) == wanted
