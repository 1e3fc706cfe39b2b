"""Megatron's GPTModel with our attention, norms, linear layers and experts: the bits of the policy in plain torch."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from megatron_kit import launch, outputs

if find_spec("megatron") is None:
    pytest.skip("megatron-core 0.16.1 is not for this Python", allow_module_level=True)

import torch

from repro_core.config import ConfigError, TrainConfig
from repro_core.engines.megatron import cpu, parallel
from repro_core.engines.megatron.layout import Layout, check
from repro_core.model.decoder import Policy

cpu.load()
PROGRAM = Path(__file__).with_name("megatron_train_kit.py")
TP, PP, CP, EP, VPP = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "context_parallel_size",
    "expert_model_parallel_size",
    "virtual_pipeline_model_parallel_size",
)
SP = {TP: 2, "sequence_parallel": True}
INTERLEAVED = {PP: 2, VPP: 2, "overlap_p2p_comm": True, "batch_p2p_comm": False}
EXPERTS = {
    "model_type": "qwen3_moe",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
    "tie_word_embeddings": False,
}
# Sizes that no vector length divides: there the order of sums depends on how a product is called.
ODD = {"hidden_size": 256, "intermediate_size": 688, "num_attention_heads": 8, "vocab_size": 1000}
MODELS: dict[str, dict[str, Any]] = {
    "tied": {},
    "qwen2": {"tie_word_embeddings": False},
    "qwen3": {"model_type": "qwen3", "kv_channels": 32},
    "experts": EXPERTS,
    "experts, not renormalised": {**EXPERTS, "norm_topk_prob": False},
    "odd qwen2": ODD,
    "odd qwen3": {**ODD, "model_type": "qwen3"},
    "deep": {"num_hidden_layers": 4},
}


@pytest.fixture(autouse=True)
def calm() -> Iterator[None]:
    """One thread, deterministic kernels, and no layout left over."""
    threads, strict = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    yield
    parallel.stop()
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(strict)


def config_of(model: str, **rest: Any) -> TrainConfig:
    """A configuration of policy megatron."""
    return TrainConfig.from_mapping({"policy": "megatron", "model": MODELS[model], **rest})


def both(config: TrainConfig, *, trained: bool = True) -> tuple[Policy, Any]:
    """The same weights as the policy in plain torch and as GPTModel, in one process."""
    from megatron_train_kit import places, policy_of

    from repro_core.engines.megatron.model import build
    from repro_core.engines.megatron.weights import to_local

    layout = check(config, world_size=1, cuda=False)
    at = parallel.start(layout, seed=1)
    policy = policy_of(config.model).to(torch.bfloat16 if config.dtype == "bf16" else torch.float32)
    (model,) = build(config.model, config, layout, trained=trained)
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for name, value in to_local(
            config.model, places(config, layout, at)[0], dict(policy.named_parameters())
        ).items():
            parameters[name].copy_(value)
    return policy.requires_grad_(trained), model


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("model", MODELS)
def test_logits_are_the_policys(model: str, dtype: str) -> None:
    """Logits agree bit for bit with the policy in plain torch, whatever the batch, trained or frozen."""
    config = config_of(model, dtype=dtype)
    generator = torch.Generator().manual_seed(7)
    for trained in (True, False):
        with cpu.without_cuda(cuda=False):
            policy, part = both(config, trained=trained)
            for shape in ((2, 32), (1, 16), (3, 48)):
                tokens = torch.randint(0, config.model.vocab_size, shape, generator=generator)
                assert torch.equal(part(tokens, None, None), policy(tokens)), shape
            assert all(p.requires_grad is trained for p in part.parameters())
            parallel.stop()


@pytest.mark.parametrize("dispatcher", ["alltoall", "allgather"])
def test_dispatchers_agree(dispatcher: str) -> None:
    """How tokens reach their experts changes no bit."""
    with cpu.without_cuda(cuda=False):
        policy, part = both(config_of("experts", megatron={"moe_token_dispatcher_type": dispatcher}))
        tokens = torch.arange(64).view(2, 32)
        assert torch.equal(part(tokens, None, None), policy(tokens))


def test_gradients_of_one_row_are_the_policys() -> None:
    """With one row, where both sum over tokens in the same order, gradients of every weight agree bit for bit too."""
    from megatron_train_kit import places

    from repro_core.engines.megatron.weights import Held, join

    config = config_of("qwen2")
    with cpu.without_cuda(cuda=False):
        policy, part = both(config)
        tokens = torch.arange(16)[None]
        for model in (policy, part):
            out = model(tokens) if model is policy else model(tokens, None, None)
            out.square().sum().backward()
        where = places(config, check(config, world_size=1, cuda=False), parallel.current())[0]
        whole = join(config.model, [Held(where, {n: p.grad for n, p in part.named_parameters()})])
    for name, parameter in policy.named_parameters():
        assert torch.equal(whole[name], parameter.grad), name


def test_values() -> None:
    """A critic's head is fp32 also in a bf16 model, is never tied, and gives one fp32 value a token."""
    from repro_core.engines.megatron.model import build

    config = config_of("tied", dtype="bf16")
    layout = check(config, world_size=1, cuda=False)
    with cpu.without_cuda(cuda=False):
        parallel.start(layout, seed=1)
        (critic,) = build(config.model, config, layout, trained=True, head="value")
        critic = critic.bfloat16()
        assert critic.output_layer.weight.dtype == torch.float32
        assert {p.dtype for n, p in critic.named_parameters() if n != "output_layer.weight"} == {torch.bfloat16}
        values = critic(torch.arange(32).view(2, 16), None, None)
    assert (values.shape, values.dtype) == ((2, 16, 1), torch.float32)


def test_building_leaves_no_traces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Building draws no random number, and leaves Transformer Engine's variables as they were, whatever they say."""
    monkeypatch.setenv("NVTE_FUSED_ATTN", "1")
    monkeypatch.delenv("NVTE_FLASH_ATTN", raising=False)
    state = torch.get_rng_state()
    with cpu.without_cuda(cuda=False):
        from repro_core.engines.megatron.model import build

        config = config_of("tied")
        layout = check(config, world_size=1, cuda=False)
        parallel.start(layout, seed=1)
        (part,) = build(config.model, config, layout, trained=True)
    assert torch.equal(torch.get_rng_state(), state)
    assert os.environ["NVTE_FUSED_ATTN"] == "1"
    assert "NVTE_FLASH_ATTN" not in os.environ
    kinds = {bool((p == (1.0 if "norm" in name else 0.0)).all()) for name, p in part.named_parameters()}
    assert kinds == {True}


def test_one_layout_at_a_time() -> None:
    """A second start is refused until the first is stopped; stopping twice is nothing."""
    layout = Layout(1, 1, 1, None, 1, 1, 1)
    with cpu.without_cuda(cuda=False):
        for _ in range(2):
            assert parallel.start(layout, seed=1) == parallel.current()
            with pytest.raises(RuntimeError, match="already started in this process: stop it first"):
                parallel.start(layout, seed=1)
            parallel.stop()
            parallel.stop()
        with pytest.raises(RuntimeError, match="no layout is started"):
            parallel.current()


@pytest.mark.parametrize(
    ("variables", "says"),
    [
        ({"RANK": "0"}, "RANK=0 and WORLD_SIZE=None must both be numbers"),
        ({"RANK": "one", "WORLD_SIZE": "2"}, "RANK=one and WORLD_SIZE=2 must both be numbers"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK=2 must be at least 0 and below WORLD_SIZE=2"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "WORLD_SIZE=2, but TP1 x PP1 x CP1 x DP1 (EP1) is for 1 processes"),
    ],
)
def test_bad_variables(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], says: str) -> None:
    """Variables that say nothing sensible about this process are refused in one line."""
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError) as refused, cpu.without_cuda(cuda=False):
        parallel.start(Layout(1, 1, 1, None, 1, 1, 1), seed=1)
    assert says in str(refused.value)


def jobs_of(tmp_path: Path, cases: list[tuple[str, dict[str, Any], dict[str, Any]]]) -> list[dict[str, Any]]:
    """Jobs that compare with the one-process run of the same model and head."""
    return [
        {
            "config": {"model": MODELS[model], "megatron": megatron},
            "steps": 1,
            "compare": str(tmp_path / f"{model}-{more.get('head', 'lm')}"),
            **more,
        }
        for model, megatron, more in cases
    ]


def run(tmp_path: Path, world: int, jobs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What rank 0 prints for each job."""
    (tmp_path / "jobs.json").write_text(json.dumps(jobs))
    lines = outputs(launch(PROGRAM, world, [str(tmp_path / "jobs.json")], cwd=tmp_path))[0].splitlines()
    assert len(lines) == len(jobs)
    return [json.loads(line) for line in lines]


@pytest.mark.campaign  # test_megatron_trainer trains the layouts in process in every run
def test_layouts_train_the_same_model(tmp_path: Path) -> None:
    """One step on 1, 2 and 4 processes, one layout after the other in the same processes, against one process.

    Losses, the gradient norm and every gradient agree within a few fp32 epsilons; bit for bit where the arithmetic is
    the same (recompute; pipeline stages of an untied model). An interleaved pipeline without the flags that
    `layout.check` asks for is wrong by far more, and says nothing.
    """
    heads: list[tuple[str, dict[str, Any]]] = [("tied", {}), ("qwen3", {}), ("experts", {}), ("deep", {})]
    references = jobs_of(tmp_path, [(model, {}, more) for model, more in [*heads, ("tied", {"head": "value"})]])
    for job in references:
        job["save"] = job.pop("compare")
    alone = [
        *[("tied", {"recompute_granularity": kind}, {}) for kind in ("full", "selective")],
        ("experts", {"recompute_granularity": "full"}, {}),
    ]
    two: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
        ("tied", {TP: 2}, {}),
        ("qwen3", SP, {}),
        ("tied", {PP: 2}, {}),
        ("experts", {PP: 2}, {}),
        ("deep", INTERLEAVED, {}),
        ("tied", {"overlap_grad_reduce": True}, {}),
        ("tied", {"use_distributed_optimizer": True}, {}),
        ("tied", {CP: 2}, {}),
        ("experts", {CP: 2, EP: 2, "recompute_granularity": "full"}, {}),
        ("experts", SP, {}),
        ("tied", SP, {"head": "value"}),
        ("tied", {TP: 2}, {"head": "value"}),
        ("deep", {PP: 2, VPP: 2}, {"layout": {"world_size": 2, "tp": 1, "pp": 2, "vpp": 2, "cp": 1, "ep": 1, "dp": 1}}),
    ]
    four: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
        ("tied", {TP: 2, PP: 2}, {}),
        ("experts", {**SP, EP: 2, "moe_token_dispatcher_type": "allgather"}, {}),
    ]
    first = run(tmp_path, 1, [*references, *jobs_of(tmp_path, alone)])
    base = {(model, more.get("head", "lm")): line for (model, more), line in zip(
        [*heads, ("tied", {"head": "value"})], first, strict=False)}  # fmt: skip
    lines = [(finding, line, 0.0) for finding, line in zip(alone, first[len(references) :], strict=True)]
    lines += [
        (case, line, 0.0 if case[0] == "experts" and case[1] == {PP: 2} else 2e-6)
        for world, cases in ((2, two), (4, four))
        for case, line in zip(cases, run(tmp_path, world, jobs_of(tmp_path, cases)), strict=True)
    ]
    for (model, megatron, more), line, bound in lines:
        if "layout" in more:
            assert line["grad"] > 1e-2, line
            continue
        known, what = base[model, more.get("head", "lm")], (model, megatron, more, line)
        assert line.get("grad", 0.0) <= bound, what
        assert line["losses"] == pytest.approx(known["losses"], rel=1e-6), what
        assert line["norms"] == pytest.approx(known["norms"], rel=1e-6), what
    assert base["tied", "value"]["dtypes"] == ["torch.float32"]
