"""Layouts of a model over processes: the ones that are refused, by the text that says why, and what the others give."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from megatron_kit import CORE

from repro_core.config import ConfigError, ModelConfig, TrainConfig
from repro_core.engines.megatron.layout import VOCAB_MULTIPLE, Layout, check, check_saving

MOE = {
    "model_type": "qwen3_moe",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "tie_word_embeddings": False,
}
TP, PP, CP, EP, VPP = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "context_parallel_size",
    "expert_model_parallel_size",
    "virtual_pipeline_model_parallel_size",
)
INTERLEAVED = {PP: 2, VPP: 2, "overlap_p2p_comm": True, "batch_p2p_comm": False}


def config(megatron: dict[str, Any], model: dict[str, Any] | None = None, **rest: Any) -> TrainConfig:
    """A configuration of policy megatron."""
    return TrainConfig.from_mapping({"policy": "megatron", "megatron": megatron, "model": model or {}, **rest})


@pytest.mark.parametrize(
    ("world", "megatron", "model", "says"),
    [
        (1, {TP: 0}, {}, "tensor_model_parallel_size 0 must be at least 1"),
        (1, {"pad_to_multiple": 0}, {}, "pad_to_multiple 0 must be at least 1"),
        (3, {TP: 2}, {}, "3 processes cannot be TP x PP x CP = 2 x 1 x 1 = 2 times any number"),
        (2, {TP: 2, PP: 2}, {}, "2 processes cannot be TP x PP x CP = 2 x 2 x 1 = 4 times any number"),
        (8, {TP: 8}, {}, "num_attention_heads 4 must be a multiple of tensor_model_parallel_size 8"),
        (4, {TP: 4}, {}, "num_key_value_heads 2 must be a multiple of tensor_model_parallel_size 4"),
        (2, {TP: 2}, {"intermediate_size": 129}, "intermediate_size 129 must be a multiple of"),
        (2, {TP: 2}, {"vocab_size": 8}, "vocab_size 8 is too small for tensor_model_parallel_size 2"),
        (3, {PP: 3}, {}, "num_hidden_layers 2 must be a multiple of pipeline_model_parallel_size 3"),
        (2, INTERLEAVED, {}, "num_hidden_layers 2 must be a multiple of pipeline_model_parallel_size x virtual"),
        (2, {PP: 2, VPP: 1}, {}, "virtual_pipeline_model_parallel_size 1 must be at least 2"),
        (1, {VPP: 2}, {}, "virtual_pipeline_model_parallel_size 2 needs pipeline_model_parallel_size of at least 2"),
        (2, {PP: 2, VPP: 2}, {"num_hidden_layers": 4}, "needs overlap_p2p_comm = true and batch_p2p_comm = false"),
        (2, {PP: 2, "overlap_p2p_comm": True}, {}, "overlap_p2p_comm = true needs batch_p2p_comm = false"),
        (2, {PP: 2, "overlap_p2p_comm": True, "batch_p2p_comm": False}, {}, "only an interleaved pipeline overlaps"),
        (2, {EP: 2}, {}, "expert_model_parallel_size 2 needs a model with experts"),
        (3, {EP: 3}, MOE, "num_experts 4 must be a multiple of expert_model_parallel_size 3"),
        (2, {PP: 2, EP: 2}, MOE, "expert_model_parallel_size 2 must divide DP x CP = 1 x 1 = 1"),
        (2, {TP: 2}, MOE, "experts with tensor_model_parallel_size 2 need sequence_parallel = true"),
        (1, {"sequence_parallel": True}, {}, "sequence_parallel needs tensor_model_parallel_size of at least 2, not 1"),
        (
            2,
            {TP: 2, "sequence_parallel": True, "pad_to_multiple": 3},
            {},
            "pad_to_multiple 3 must be a multiple of 2, tensor_model_parallel_size 2",
        ),
        (
            2,
            {CP: 2, "pad_to_multiple": 6},
            {},
            "pad_to_multiple 6 must be a multiple of 4, 2 x context_parallel_size 2",
        ),
        (
            4,
            {CP: 2, TP: 2, "sequence_parallel": True, "pad_to_multiple": 4},
            {},
            "must be a multiple of 8, 2 x context_parallel_size 2 x tensor_model_parallel_size 2",
        ),
        (
            1,
            {"attention_backend": "fused"},
            {},
            "attention_backend fused belongs to transformer_impl transformer_engine",
        ),
        (
            1,
            {"transformer_impl": "transformer_engine"},
            {},
            "attention_backend local belongs to transformer_impl local",
        ),
        (
            1,
            {"transformer_impl": "transformer_engine", "attention_backend": "auto"},
            {},
            "transformer_impl transformer_engine needs a GPU",
        ),
        (1, {"apply_rope_fusion": True}, {}, "apply_rope_fusion needs a GPU with Transformer Engine"),
        (1, {"moe_grouped_gemm": True}, {}, "moe_grouped_gemm needs a model with experts"),
        (1, {"moe_grouped_gemm": True}, MOE, "moe_grouped_gemm needs transformer_impl transformer_engine"),
        (
            1,
            {},
            {"model_type": "qwen3", "attention_bias": True},
            "attention_bias true gives the output projection a bias",
        ),
        (4, {TP: 2, EP: 2, "sequence_parallel": True}, MOE, "which gloo cannot: on a CPU use allgather"),
    ],
)
def test_refused(world: int, megatron: dict[str, Any], model: dict[str, Any], says: str) -> None:
    """What cannot work on a CPU is refused in one line that names both sides."""
    with pytest.raises(ConfigError) as refused:
        check(config(megatron, model), world_size=world, cuda=False)
    assert says in str(refused.value)
    assert "\n" not in str(refused.value)


def test_refused_routing_replay() -> None:
    """Experts of a dense model cannot be replayed."""
    with pytest.raises(ConfigError, match="use_rollout_routing_replay needs a model with experts"):
        check(config({}, use_rollout_routing_replay=True), world_size=1, cuda=False)


@pytest.mark.parametrize(
    "megatron",
    [
        {"transformer_impl": "transformer_engine", "attention_backend": "fused"},
        {"apply_rope_fusion": True},
        {TP: 2, EP: 2, "sequence_parallel": True},
        {"transformer_impl": "transformer_engine", "attention_backend": "auto", "moe_grouped_gemm": True},
    ],
)
def test_a_gpu_can(megatron: dict[str, Any]) -> None:
    """What a CPU alone cannot do is not refused where there is a GPU."""
    assert check(config(megatron, MOE), world_size=4, cuda=True).world_size == 4


def test_saving() -> None:
    """The distributed optimizer saves nothing on a CPU, because what it saves there cannot be resumed."""
    distributed = config({"use_distributed_optimizer": True})
    with pytest.raises(ConfigError, match="use_distributed_optimizer cannot save or resume on a CPU"):
        check_saving(distributed, cuda=False)
    check_saving(distributed, cuda=True)
    check_saving(config({}), cuda=False)


@given(
    vocab=st.integers(64, 500),
    tp=st.sampled_from([1, 2, 3, 4, 8]),
    pp=st.sampled_from([1, 2, 4]),
    vpp=st.sampled_from([None, 2]),
    ep=st.sampled_from([1, 2, 4]),
)
def test_shares_cover_the_model_once(vocab: int, tp: int, pp: int, vpp: int | None, ep: int) -> None:
    """Rows of the vocabulary, layers and experts of all ranks are those of the model, each once and in order."""
    model = ModelConfig(vocab_size=vocab, num_hidden_layers=8, num_experts=4)
    layout = Layout(tp * pp, tp, pp, vpp, 1, ep, 1)
    padded = layout.padded_vocab_size(model)
    assert vocab <= padded < vocab + VOCAB_MULTIPLE * tp
    assert padded % tp == 0
    assert [row for rank in range(tp) for row in layout.vocab_rows(model, rank)] == list(range(vocab))
    layers = [n for chunk in range(vpp or 1) for stage in range(pp) for n in layout.layers(model, stage, chunk)]
    assert layers == list(range(8))
    assert [n for rank in range(ep) for n in layout.experts(model, rank)] == list(range(4))


@given(st.integers(1, 1000), st.sampled_from([1, 2, 4, 8, 16]))
def test_padding_is_the_same_in_usual_layouts(vocab: int, tp: int) -> None:
    """How far the vocabulary is padded does not depend on TP where TP divides the multiple."""
    size, other = (Layout(n, n, 1, None, 1, 1, 1).padded_vocab_size(ModelConfig(vocab_size=vocab)) for n in (1, tp))
    assert size == other


def test_layout_needs_no_torch() -> None:
    """A configuration is refused before torch or megatron-core is imported."""
    code = "import sys, repro_core.engines.megatron.layout as l; assert not {'torch', 'megatron'} & set(sys.modules), l"
    done = subprocess.run(
        [sys.executable, "-c", code], env={"PYTHONPATH": str(CORE)}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
