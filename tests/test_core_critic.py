"""The critic of ppo: the policy's decoder with a value head, and its engine in plain torch."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from trainer_kit import ONE_STEP, bits, ignore, quiet, with_rewards

from repro_core import Rollout
from repro_core.config import ModelConfig, TrainConfig
from repro_core.model.decoder import Critic, Policy, ValueHead, init_weights
from repro_core.rl.batching import plan_updates

torch.set_num_threads(1)

MOE = ModelConfig(
    model_type="qwen3_moe",
    hidden_size=16,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=8,
)
PPO = replace(ONE_STEP, advantage_estimator="ppo", critic_lr=0.01)


def made(model: ModelConfig, dtype: torch.dtype = torch.float32) -> Policy:
    policy = Policy(model)
    init_weights(policy, 1)
    return policy.to(dtype)


@pytest.mark.parametrize("model", [ONE_STEP.model, replace(ONE_STEP.model, tie_word_embeddings=False), MOE], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_critic_is_the_policys_decoder(model: ModelConfig, dtype: torch.dtype) -> None:
    """Its names are the policy's but for the head, its weights equal copies; the head stays fp32, and starts at 0."""
    policy = made(model, dtype)
    critic = Critic(policy)
    parameters, theirs = dict(critic.named_parameters()), dict(policy.named_parameters())
    assert parameters.keys() - theirs.keys() == {"score.weight"} and theirs.keys() - parameters.keys() <= {
        "lm_head.weight"
    }
    shared = parameters.keys() & theirs.keys()
    assert all(bits(parameters[name]) == bits(theirs[name]) for name in shared)
    assert not {parameters[name].data_ptr() for name in shared} & {theirs[name].data_ptr() for name in shared}
    assert critic.score.weight.dtype == torch.float32 and not critic.score.weight.any()
    tokens = torch.arange(12).view(2, 6)
    values = critic(tokens)
    assert values.shape == (2, 6, 1) and values.dtype == torch.float32 and not values.any()
    with torch.no_grad():
        critic.score.weight.copy_(torch.linspace(-1, 1, model.hidden_size)[None])
    expected = policy.hidden(tokens).float() @ critic.score.weight[0]
    assert torch.allclose(critic(tokens)[..., 0], expected, rtol=1e-5, atol=1e-6)


def test_a_value_head_keeps_its_precision() -> None:
    """Casting the model around it changes nothing of the weight; moving it does not either."""
    head = ValueHead(4)
    with torch.no_grad():
        head.weight.fill_(1 / 3)
    assert bits(torch.nn.Sequential(head).bfloat16()[0].weight) == bits(torch.full((1, 4), 1 / 3))
    assert head(torch.ones(2, 4, dtype=torch.bfloat16)).dtype == torch.float32


def test_values_read_no_later_token() -> None:
    """The value of a position depends on what came before it and on itself."""
    critic = Critic(made(ONE_STEP.model))
    torch.nn.init.ones_(critic.score.weight)
    tokens = torch.arange(10)[None]
    other = tokens.clone()
    other[0, 6:] = 99
    first, second = critic(tokens)[0], critic(other)[0]
    assert bits(first[:6]) == bits(second[:6]) and bits(first[6:]) != bits(second[6:])


def rollout_of(config: TrainConfig) -> Rollout:
    """With one masked token."""
    rollout = with_rewards(quiet(config).sample(0))
    mask = rollout.tensors["loss_mask"].clone()
    mask[1] = 0
    return Rollout(rollout.meta, {**rollout.tensors, "loss_mask": mask})


def test_a_column_holds_the_value_before_each_token() -> None:
    """Of each response token: the value of the position that chose it, whatever the micro-batches; masked ones 0."""
    rollout = rollout_of(PPO)
    t, columns = rollout.tensors, []
    for budget in (9, 24, 1000):
        trainer = quiet(replace(PPO, max_tokens_per_micro_batch=budget))
        critic = trainer.engines.critic
        assert critic is not None and trainer.engines.critic is critic
        torch.nn.init.ones_(critic.model.score.weight)
        columns.append(critic.score(t, plan_updates(t, 8, budget))["values"])
        assert set(critic.names) == {"values"}
    expected = []
    total = torch.cumsum(t["total_lengths"], 0).tolist()
    for end, length, response in zip(total, t["total_lengths"].tolist(), t["response_lengths"].tolist(), strict=True):
        values = critic.model(t["tokens"][end - length : end][None])[0, :, 0].detach()
        expected.append(values[length - response - 1 : length - 1])
    wanted = torch.where(t["loss_mask"] != 0, torch.cat(expected), 0.0)
    for column in columns:
        assert float(column[1]) == 0.0 and torch.allclose(column, wanted, rtol=1e-5, atol=1e-5)


def test_critic_and_policy_have_their_own_learning_rates() -> None:
    """Another critic_lr moves the critic alone; another lr the policy alone."""
    rollout = rollout_of(PPO)

    def state(config: TrainConfig) -> dict[str, bytes]:
        trainer = quiet(config)
        list(trainer.train(rollout, ignore))
        return {name: bits(value) for name, value in trainer.state().items()}

    base, slow, fast = (state(replace(PPO, **change)) for change in ({}, {"critic_lr": 0.001}, {"lr": 0.01}))
    head, norm = "critic/main/score.weight", "main/model.norm.weight"
    assert slow[head] != base[head] and slow[norm] == base[norm]
    assert fast[head] == base[head] and fast[norm] != base[norm]


def test_a_critic_routes_for_itself() -> None:
    """Replayed experts are the policy's: other ones move its columns and none of the critic's."""
    config = replace(PPO, model=MOE, use_rollout_routing_replay=True)
    trainer, rollout = quiet(config), rollout_of(config)
    critic = trainer.engines.critic
    assert critic is not None
    torch.nn.init.ones_(critic.model.score.weight)
    turned = {**rollout.tensors, "routed_experts": (rollout.tensors["routed_experts"] + 1) % 4}
    plan = plan_updates(turned, 8, 24)
    assert bits(critic.score(rollout.tensors, plan)["values"]) == bits(critic.score(turned, plan)["values"])
    ours = [trainer.engines.policy.score(t, plan)["log_probs"] for t in (rollout.tensors, turned)]
    assert bits(ours[0]) != bits(ours[1])


@pytest.mark.parametrize("name", ["grpo", "reinforce_plus_plus"])
def test_only_ppo_has_a_critic(name: str) -> None:
    """No other estimator makes one, nor keeps its state."""
    trainer = quiet(TrainConfig.from_mapping({**ONE_STEP.to_mapping(), "advantage_estimator": name}))
    assert trainer.engines.critic is None and not [key for key in trainer.state() if key.startswith("critic/")]
