from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from examples_kit import at_most
from hypothesis import given
from hypothesis import strategies as st
from model_kit import backward_with, make, same_bits, some_tokens
from moe_kit import (
    CONFIGS,
    DTYPES,
    EXPERTS,
    MOE,
    MOE_TIED,
    QWEN3,
    fused,
    own_routing,
    transformers_model,
)
from torch import Tensor

from repro_core.config import ModelConfig
from repro_core.model.decoder import KvCache, Policy, init_weights
from repro_core.model.experts import route
from repro_core.rollout.sampler import sample


@CONFIGS
@DTYPES
def test_logits_and_gradients_equal_transformers(config: ModelConfig, dtype: torch.dtype) -> None:
    """Logits and all gradients have the bits of transformers' eager Qwen3 and Qwen3-MoE, at any batch."""
    policy, theirs = make(config, dtype=dtype), transformers_model(config, dtype)
    theirs.load_state_dict(fused(config, policy.state_dict()))
    for _ in backward_with(policy, theirs):
        # An expert that no token chose has no gradient of its own here, and a part of zeros in the fused tensor there.
        mine = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in policy.named_parameters()}
        for name, gradient in fused(config, mine).items():
            other = theirs.get_parameter(name).grad
            # + 0.0: the fused tensor sums one expert's part with zeros, which turns -0.0 into 0.0.
            assert same_bits(gradient + 0.0, other + 0.0), name


def test_an_unused_expert_has_no_gradient() -> None:
    """One token goes through top-k experts: the others are not run, and their gradients are absent, not garbage."""
    policy = make(MOE)
    _, routing = own_routing(policy, some_tokens(1, 1))
    policy(some_tokens(1, 1)).sum().backward()
    used = set(routing[0, 0, 1].tolist())
    for number, expert in enumerate(policy.model.layers[1].mlp.experts):
        assert (expert.up_proj.weight.grad is not None) == (number in used)


def test_router_weights_follow_the_definition() -> None:
    """fp32 softmax over all experts, the most probable first, renormalised if asked, rounded once at the end."""
    logits = torch.randn(5, 8, generator=torch.Generator().manual_seed(3)).bfloat16()
    wide = torch.softmax(logits.float(), dim=-1)
    values, order = wide.sort(dim=-1, descending=True)
    for normalize in (False, True):
        experts, weights = route(logits, 3, normalize=normalize)
        wanted = values[:, :3] / values[:, :3].sum(-1, keepdim=True) if normalize else values[:, :3]
        assert torch.equal(experts, order[:, :3]) and same_bits(weights, wanted.bfloat16())
    replay = torch.tensor([[7, 0, 3]] * 5)
    experts, weights = route(logits, 3, replay=replay)
    assert torch.equal(experts, replay) and same_bits(weights, wide[:, [7, 0, 3]].bfloat16())


@given(st.integers(1, 9), st.integers(1, 4), st.data())
def test_equal_probabilities_give_one_answer(experts: int, tokens: int, data: st.DataObject) -> None:
    """Which of equally probable experts are taken is torch's affair, but they are distinct and the same each time."""
    top_k = data.draw(st.integers(1, experts))
    logits = torch.tensor(data.draw(st.lists(st.sampled_from([0.0, 1.0]), min_size=experts, max_size=experts)))
    first, weights = route(logits.expand(tokens, -1), top_k)
    again, _ = route(logits.expand(tokens, -1).clone(), top_k)
    assert torch.equal(first, again)
    assert all(len(set(row)) == top_k for row in first.tolist())
    assert bool((weights[:, :-1] >= weights[:, 1:]).all())


@EXPERTS
@at_most(10)
@given(lengths=st.lists(st.integers(1, 6), min_size=1, max_size=4), steps=st.integers(1, 3))
def test_cached_decoding_equals_the_full_forward(config: ModelConfig, lengths: list[int], steps: int) -> None:
    """Prefill and decoding give the uncached logits within 1e-4, and the very same experts.

    Logits may differ in their last bits, since matrices of other shapes are multiplied; an expert would change only
    where two probabilities lie that close.
    """
    policy, rows, width = make(config), len(lengths), max(lengths)
    tokens, ends = some_tokens(rows, width + steps), torch.tensor(lengths)
    cache = KvCache.allocate(policy, rows, width + steps)
    with torch.no_grad():
        full, wanted = own_routing(policy, tokens)
        chosen: list[Tensor] = []
        logits = policy(tokens[:, :width], torch.arange(width).expand(rows, width), cache, chosen=chosen)
        assert torch.equal(torch.stack(chosen, dim=2), wanted[:, :width])
        torch.testing.assert_close(logits, full[:, :width], rtol=0, atol=1e-4)
        for step in range(steps):
            positions = (ends + step)[:, None]
            chosen = []
            logits = policy(tokens.gather(1, positions), positions, cache, chosen=chosen)
            at = torch.arange(rows), ends + step
            assert torch.equal(torch.stack(chosen, dim=2)[:, 0], wanted[at])
            torch.testing.assert_close(logits[:, 0], full[at], rtol=0, atol=1e-4)


@EXPERTS
def test_right_padding_reaches_no_real_token(config: ModelConfig) -> None:
    """What stands in the padding sends other rows to the experts, but moves no real token's logits or experts.

    To the bit where an expert's product keeps its shape; padding that goes elsewhere changes the number of rows.
    """
    policy, tokens = make(config), some_tokens(3, 9)
    other = tokens.clone()
    other[1, 4:] = 5
    (ours, experts), (changed, changed_experts) = own_routing(policy, tokens), own_routing(policy, other)
    torch.testing.assert_close(changed[1, :4], ours[1, :4], rtol=0, atol=1e-5)
    assert torch.equal(changed_experts[1, :4], experts[1, :4]) and not torch.equal(ours[1, 4:], changed[1, 4:])
    # The same experts at the padding: the same shapes, hence the same bits.
    replayed = policy(other, routing=experts)
    assert same_bits(replayed[1, :4].detach(), ours[1, :4].detach())


def test_initial_weights_of_experts_are_drawn() -> None:
    """Routers and experts are drawn with the given deviation, norms over heads start at 1, biases at 0."""
    policy = Policy(MOE_TIED)
    init_weights(policy, 3)
    for name, parameter in policy.named_parameters():
        if name.endswith("norm.weight"):
            assert bool((parameter == 1).all()), name
        elif name.endswith("bias"):
            assert bool((parameter == 0).all()), name
        else:
            assert 0.015 < float(parameter.detach().std()) < 0.025, name
    assert {"q_norm", "k_norm", "gate", "0"} <= {
        part for name, _ in policy.named_parameters() for part in name.split(".")
    }


# ---- routing replay


@EXPERTS
@DTYPES
def test_replaying_the_own_choice_changes_no_bit(config: ModelConfig, dtype: torch.dtype) -> None:
    """Logits and all gradients are those without replay, and the record repeats itself."""
    policy, tokens = make(config, dtype=dtype), some_tokens(3, 7)
    logits, routing = own_routing(policy, tokens)
    logits.float().logsumexp(-1).sum().backward()
    gradients = {name: p.grad for name, p in policy.named_parameters()}
    policy.zero_grad()
    chosen: list[Tensor] = []
    again = policy(tokens, routing=routing, chosen=chosen)
    again.float().logsumexp(-1).sum().backward()
    assert same_bits(again.detach(), logits.detach()) and torch.equal(torch.stack(chosen, dim=2), routing)
    for name, parameter in policy.named_parameters():
        before = gradients[name]
        assert (before is None) == (parameter.grad is None), name
        assert before is None or same_bits(parameter.grad, before), name


def test_replayed_experts_are_used_and_the_router_learns() -> None:
    """Other experts give other logits; only they are trained; and the gradient reaches the router through them."""
    policy, tokens = make(MOE), some_tokens(2, 6)
    logits, routing = own_routing(policy, tokens)
    forced = torch.tensor([6, 1]).expand(routing.shape)
    replayed = policy(tokens, routing=forced)
    assert float((replayed - logits).detach().abs().max()) > 1e-2
    replayed.logsumexp(-1).sum().backward()
    for layer in policy.model.layers:
        assert float(layer.mlp.gate.weight.grad.abs().max()) > 0
        trained = {e for e, expert in enumerate(layer.mlp.experts) if expert.down_proj.weight.grad is not None}
        assert trained == {1, 6}


def test_replay_weighs_by_the_current_router() -> None:
    """Only the choice is replayed: another router gives the recorded experts other weights."""
    policy, tokens = make(MOE), some_tokens(2, 6)
    logits, routing = own_routing(policy, tokens)
    with torch.no_grad():
        policy.model.layers[0].mlp.gate.weight.mul_(0.5)
    moved = policy(tokens, routing=routing)
    assert float((moved - logits).detach().abs().max()) > 1e-3


def test_replay_at_a_position_touches_no_earlier_one() -> None:
    """Experts replayed at one position reach that position and later ones alone."""
    policy, tokens = make(MOE), some_tokens(1, 6)
    logits, routing = own_routing(policy, tokens)
    other = routing.clone()
    other[:, 3] = (routing[:, 3] + 1) % MOE.num_experts
    replayed = policy(tokens, routing=other)
    torch.testing.assert_close(replayed[:, :3], logits[:, :3], rtol=0, atol=1e-5)
    assert float((replayed - logits)[:, 3].detach().abs().max()) > 1e-2


def test_dropped_positions_take_any_experts() -> None:
    """Zeros at padding and at a last token, as records hold them, leave the other logits where they were."""
    policy, tokens = make(MOE), some_tokens(2, 8)
    logits, routing = own_routing(policy, tokens)
    zeroed = routing.clone()
    zeroed[0, 5:], zeroed[1, 7:] = 0, 0
    replayed = policy(tokens, routing=zeroed)
    torch.testing.assert_close(replayed[0, :5], logits[0, :5], rtol=0, atol=1e-5)
    torch.testing.assert_close(replayed[1, :7], logits[1, :7], rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("routing", "message"),
    [
        (torch.zeros(2, 6, 2, 2, dtype=torch.int32), "must be int64"),
        (torch.zeros(2, 6, 2, 3, dtype=torch.int64), r"\[2, 6, 2, 2\]"),
        (torch.zeros(2, 5, 2, 2, dtype=torch.int64), r"\[2, 6, 2, 2\]"),
        (torch.full((2, 6, 2, 2), 8), "experts 8 to 8"),
        (torch.full((2, 6, 2, 2), -1), "experts -1 to -1"),
    ],
)
def test_routing_that_does_not_fit_is_refused(routing: Tensor, message: str) -> None:
    """Another dtype, another shape, or a number that no expert has."""
    with pytest.raises(ValueError, match=message):
        make(MOE)(some_tokens(2, 6), routing=routing)


def test_a_dense_model_has_no_routing() -> None:
    """Nothing is recorded, and replay is refused."""
    policy, chosen = make(QWEN3), []
    policy(some_tokens(1, 3), chosen=chosen)
    assert chosen == []
    with pytest.raises(ValueError, match="qwen3, which has no experts"):
        policy(some_tokens(1, 3), routing=torch.zeros(1, 3, 2, 2, dtype=torch.int64))


@EXPERTS
def test_the_sampler_records_the_experts_of_every_token(config: ModelConfig) -> None:
    """One row per token of prompt and response, equal to a full forward's; the last token's is 0."""
    policy = make(config)
    prompts = [[1, 2, 3], [4], [5, 6, 7, 8, 9, 10], [11, 2]] * 6
    responses = sample(policy, prompts, max_response_len=9, temperature=4.0, seeds=range(24), eos_id=12)
    layers, top_k = config.num_hidden_layers, config.num_experts_per_tok
    for prompt, response in zip(prompts, responses, strict=True):
        whole, record = prompt + response.tokens, response.routed_experts
        assert record is not None and record.dtype == torch.uint8 and record.shape == (len(whole), layers, top_k)
        with torch.no_grad():
            _, wanted = own_routing(policy, torch.tensor([whole]))
        assert torch.equal(record[:-1].long(), wanted[0, :-1]) and not bool(record[-1].any())
    assert {r.status for r in responses} == {"completed", "truncated"}


def test_the_record_is_as_narrow_as_the_experts_allow() -> None:
    """256 experts fit uint8, 257 need int16; a dense model has no record, and one-token responses have one."""
    for experts, dtype in ((256, torch.uint8), (257, torch.int16)):
        policy = make(replace(MOE, num_experts=experts, num_hidden_layers=1, moe_intermediate_size=2))
        (response,) = sample(policy, [[1, 2]], max_response_len=1, temperature=1.0, seeds=[0], eos_id=12)
        assert response.routed_experts is not None
        assert response.routed_experts.dtype == dtype and response.routed_experts.shape == (3, 1, 2)
    (dense,) = sample(make(QWEN3), [[1]], max_response_len=2, temperature=1.0, seeds=[0], eos_id=12)
    assert dense.routed_experts is None


# ---- checkpoints
