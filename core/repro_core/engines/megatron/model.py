"""A policy as Megatron's GPTModel: the layer specification, the flags, and the two heads.

What differs from Megatron's own local specification, and why: see `attention`, `linear`, `norm`, `experts`. With
Transformer Engine its linear layers, norms and attention stay; router and experts compute as ours there too.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - the field's name for it

from repro_core.config import ConfigError, ModelConfig, TrainConfig
from repro_core.engines.megatron.cpu import quiet
from repro_core.engines.megatron.layers import (
    CoreAttention,
    Experts,
    GateUpLinear,
    OutputLayer,
    QkvLinear,
    RmsNorm,
    Rotary,
    Router,
    RowLinear,
    product,
)
from repro_core.engines.megatron.layout import Layout

__all__ = ["ValueHead", "build", "silu", "transformer_config"]

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
_NVTE = ("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN", "NVTE_UNFUSED_ATTN")


def build(
    model: ModelConfig,
    config: TrainConfig,
    layout: Layout,
    *,
    trained: bool,
    head: Literal["lm", "value"] = "lm",
    cuda: bool | None = None,
) -> list[GPTModel]:
    """This process's part of a model, after `parallel.start`; on the CPU inside `cpu.without_cuda`.

    Matrices and biases start at 0 and norms at 1, without a random draw. In bf16 the parameters are bf16 from the
    start (a value head stays fp32); nothing is wrapped.

    Args:
        model: its sizes.
        config: dtype and ``megatron``.
        layout: what was started.
        trained: False freezes the parameters and leaves training mode: no recompute, no checks for training.
        head: ``lm`` gives logits [rows, tokens, vocabulary here] in the parameters' dtype: only the real rows of the
            vocabulary, `Layout.vocab_rows`. ``value`` gives fp32 values [rows, all tokens, 1], the same on every
            tensor-parallel rank, and never ties its weight to the embedding.
        cuda: build on the current GPU; None asks torch.

    Returns:
        One model for each virtual stage, in order; one without virtual stages.

    Raises:
        ConfigError: the environment contradicts `attention_backend`.
    """
    cuda = torch.cuda.is_available() if cuda is None else cuda
    with quiet(), _attention_variables(config):
        chunks = [_build(model, config, layout, head, chunk, cuda=cuda) for chunk in range(layout.vpp or 1)]
    for part in chunks:
        part.train(trained).requires_grad_(trained)
    return chunks


def transformer_config(model: ModelConfig, config: TrainConfig, layout: Layout, *, cuda: bool) -> TransformerConfig:
    """Megatron's flags. Losses are sums over tokens, so that no divisor depends on the layout."""
    m, dtype = config.megatron, DTYPES[config.dtype]
    experts: dict[str, Any] = {}
    if model.has_experts:
        experts = {
            "num_moe_experts": model.num_experts,
            "moe_router_topk": model.num_experts_per_tok,
            "moe_ffn_hidden_size": model.moe_intermediate_size,
            "moe_router_load_balancing_type": "none",
            "moe_router_score_function": "softmax",
            "moe_router_pre_softmax": True,
            "moe_token_dispatcher_type": m.moe_token_dispatcher_type,
            "moe_grouped_gemm": m.moe_grouped_gemm,
        }
    recompute: dict[str, Any] = {}
    if m.recompute_granularity == "full":
        recompute = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    elif m.recompute_granularity == "selective":
        recompute = {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}
    return TransformerConfig(
        num_layers=model.num_hidden_layers,
        hidden_size=model.hidden_size,
        num_attention_heads=model.num_attention_heads,
        num_query_groups=model.num_key_value_heads,
        kv_channels=model.head_dim,
        ffn_hidden_size=model.moe_intermediate_size if model.has_experts else model.intermediate_size,
        normalization="RMSNorm",
        layernorm_epsilon=model.rms_norm_eps,
        qk_layernorm=model.qk_norm,
        gated_linear_unit=True,
        # Hugging Face has gate and up apart in a dense MLP, and side by side in experts.
        activation_func=F.silu if model.has_experts else silu,
        add_bias_linear=False,
        add_qkv_bias=model.qkv_bias,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        attention_softmax_in_fp32=True,
        masked_softmax_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        apply_rope_fusion=m.apply_rope_fusion,
        gradient_accumulation_fusion=False,
        attention_backend=AttnBackend[m.attention_backend],
        deterministic_mode=m.deterministic_mode,
        calculate_per_token_loss=True,
        variable_seq_lengths=False,
        use_cpu_initialization=not cuda,
        init_method=nn.init.zeros_,
        output_layer_init_method=nn.init.zeros_,
        embedding_init_method=nn.init.zeros_,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=config.dtype == "bf16",
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=layout.vpp,
        context_parallel_size=layout.cp,
        expert_model_parallel_size=layout.ep,
        sequence_parallel=m.sequence_parallel,
        overlap_p2p_comm=m.overlap_p2p_comm,
        batch_p2p_comm=m.batch_p2p_comm,
        # A wait for the GPU after each batch of messages; without one there is nothing to wait for.
        batch_p2p_sync=cuda,
        **experts,
        **recompute,
    )


def silu(x: Tensor) -> Tensor:
    """SiLU of a copy that lies densely: torch's kernel rounds the ends of strided rows another way."""
    return F.silu(x.contiguous())


class ValueHead(nn.Module):
    """A critic's head: hidden to one value, in fp32, the same on every tensor-parallel rank.

    Attributes:
        weight: fp32 [1, hidden], fp32 also where the model is bf16.
    """

    def __init__(self, config: TransformerConfig, tp_group: Any) -> None:
        super().__init__()
        device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
        self.weight = nn.Parameter(torch.zeros(1, config.hidden_size, dtype=torch.float32, device=device))
        self.sequence_parallel, self.tp_group = config.sequence_parallel, tp_group

    def _apply(self, fn: Any, recurse: bool = True) -> ValueHead:
        """As `nn.Module._apply`, but `bfloat16()` of the whole model leaves the weight fp32."""
        # the device alone: through bf16 and back the weight would come rounded
        super()._apply(lambda tensor: tensor.to(fn(tensor).device), recurse)  # type: ignore[no-untyped-call]
        return self

    def forward(self, hidden: Tensor, **_unused: object) -> tuple[Tensor, None]:
        """Values fp32 [tokens, rows, 1] of hidden [tokens here, rows, hidden]."""
        if self.sequence_parallel:
            # Every rank then computes all values, and takes its own tokens' part of their gradient.
            hidden = gather_from_sequence_parallel_region(
                hidden, tensor_parallel_output_grad=False, group=self.tp_group
            )
        return product(hidden.float(), self.weight), None


def _build(model: ModelConfig, config: TrainConfig, layout: Layout, head: str, chunk: int, *, cuda: bool) -> GPTModel:
    made = transformer_config(model, config, layout, cuda=cuda)
    stage = None if layout.vpp is None else chunk
    vocab_size = layout.padded_vocab_size(model)
    part = GPTModel(
        made,
        _specification(model, config, made, stage),
        vocab_size,
        model.max_position_embeddings,
        pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=stage),
        post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=stage),
        parallel_output=True,
        share_embeddings_and_output_weights=model.tie_word_embeddings and head == "lm",
        position_embedding_type="rope",
        rotary_percent=1.0,
        rotary_base=model.rope_theta,
        vp_stage=stage,
    )
    part.rotary_pos_emb = Rotary(
        made.kv_channels,
        rotary_percent=1.0,
        rotary_base=model.rope_theta,
        use_cpu_initialization=True,
        cp_group=part.pg_collection.cp,
    )
    for module in part.modules():
        if isinstance(module, Router):
            module.norm_topk_prob = model.norm_topk_prob
    if part.post_process:
        group = part.pg_collection.tp
        if head == "value":
            part.output_layer = ValueHead(made, group)
        else:
            old = part.output_layer
            part.output_layer = OutputLayer(
                made.hidden_size,
                vocab_size,
                config=made,
                init_method=made.init_method,
                bias=False,
                skip_weight_param_allocation=True,
                tp_group=group,
            )
            # The same parameter: what Megatron noted on it (whether it is shared between stages) stays.
            part.output_layer.weight = old.weight
            part.output_layer.rows = len(layout.vocab_rows(model, group.rank()))
    return part


def _specification(
    model: ModelConfig, config: TrainConfig, made: TransformerConfig, stage: int | None
) -> TransformerBlockSubmodules | Any:
    """Which module stands where in each layer."""
    m, count = config.megatron, model.num_experts or None
    local = m.transformer_impl == "local"
    make = get_gpt_layer_local_spec if local else get_gpt_layer_with_transformer_engine_spec
    norm = {"normalization": "RMSNorm"} if local else {}
    layer = make(num_experts=count, moe_grouped_gemm=m.moe_grouped_gemm, qk_layernorm=model.qk_norm, **norm)
    if model.has_experts:
        layer.submodules.mlp.submodules.router = Router
        if not m.moe_grouped_gemm:
            layer.submodules.mlp.submodules.experts.module = Experts
    if not local:
        return layer
    parts = layer.submodules
    parts.input_layernorm = parts.pre_mlp_layernorm = RmsNorm
    parts.self_attention.submodules.core_attention = CoreAttention
    parts.self_attention.submodules.linear_qkv = QkvLinear
    parts.self_attention.submodules.linear_proj = RowLinear
    if not model.has_experts:
        parts.mlp.submodules.linear_fc1, parts.mlp.submodules.linear_fc2 = GateUpLinear, RowLinear
    if model.qk_norm:
        parts.self_attention.submodules.q_layernorm = parts.self_attention.submodules.k_layernorm = RmsNorm
    layers = get_num_layers_to_build(made, vp_stage=stage)
    return TransformerBlockSubmodules(layer_specs=[layer] * layers, layer_norm=RmsNorm)


@contextmanager
def _attention_variables(config: TrainConfig) -> Iterator[None]:
    """Megatron sets three variables for Transformer Engine when a model is made, and trips over others' values.

    Transformer Engine reads them when it first attends, so there they stay; without it they go as they came.
    """
    m = config.megatron
    if m.transformer_impl == "transformer_engine":
        auto = m.attention_backend == "auto"
        for name, kind in zip(_NVTE, ("flash", "fused", "unfused"), strict=True):
            wanted = "1" if auto or kind == m.attention_backend else "0"
            if os.environ.get(name, wanted) != wanted:
                raise ConfigError(
                    f"{name}={os.environ[name]} in the environment contradicts attention_backend "
                    f"{m.attention_backend}: unset it"
                )
        yield
        return
    before = {name: os.environ.pop(name, None) for name in _NVTE}
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
