"""Which layouts of a model over processes work, which are refused by name, and what follows from a layout.

Pure: neither torch nor megatron-core is imported, so that a configuration is refused before anything starts.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import lcm

from repro_core.config import ConfigError, MegatronConfig, ModelConfig, TrainConfig

__all__ = ["VOCAB_MULTIPLE", "Layout", "check", "check_saving"]

VOCAB_MULTIPLE = 16
"""The vocabulary is padded to a multiple of it (and of TP) in every layout."""


@dataclass(frozen=True)
class Layout:
    """How many processes share what.

    Attributes:
        world_size: Processes: tp x pp x cp x dp.
        tp: Processes that share each weight matrix (tensor parallel).
        pp: Pipeline stages.
        vpp: Model chunks of each stage (interleaved pipeline), or None.
        cp: Processes that share each sequence (context parallel).
        ep: Processes that share the experts of a layer; they are some of the dp x cp.
        dp: Processes that share the micro-batches (data parallel).
    """

    world_size: int
    tp: int
    pp: int
    vpp: int | None
    cp: int
    ep: int
    dp: int

    def padded_vocab_size(self, model: ModelConfig) -> int:
        """Rows of the embedding and of the output layer over all processes, padding included.

        The canonical tensor has the first `model.vocab_size` rows alone; the others are zero, never looked up and
        never scored.
        """
        multiple = lcm(VOCAB_MULTIPLE, self.tp)
        return -(-model.vocab_size // multiple) * multiple

    def vocab_rows(self, model: ModelConfig, tp_rank: int) -> range:
        """The canonical rows of the vocabulary that a tensor-parallel rank holds, in order; its padding comes after."""
        share = self.padded_vocab_size(model) // self.tp
        return range(min(tp_rank * share, model.vocab_size), min((tp_rank + 1) * share, model.vocab_size))

    def layers(self, model: ModelConfig, pp_rank: int, chunk: int = 0) -> range:
        """The canonical layers of a stage's model chunk: chunk c of stage p is number c x pp + p of all chunks."""
        count = model.num_hidden_layers // (self.pp * (self.vpp or 1))
        first = (chunk * self.pp + pp_rank) * count
        return range(first, first + count)

    def experts(self, model: ModelConfig, ep_rank: int) -> range:
        """The canonical experts of each layer that an expert-parallel rank holds; none in a dense model."""
        count = model.num_experts // self.ep
        return range(ep_rank * count, (ep_rank + 1) * count)


def check(config: TrainConfig, *, world_size: int, cuda: bool) -> Layout:
    """The layout that a configuration asks for on so many processes.

    Args:
        config: with ``policy = "megatron"``.
        world_size: number of processes.
        cuda: whether they run on GPUs.

    Raises:
        ConfigError: it cannot be had, or would be silently wrong; one line with both sides and the cure.
    """
    m = config.megatron
    sizes = {
        "tensor_model_parallel_size": m.tensor_model_parallel_size,
        "pipeline_model_parallel_size": m.pipeline_model_parallel_size,
        "context_parallel_size": m.context_parallel_size,
        "expert_model_parallel_size": m.expert_model_parallel_size,
        "pad_to_multiple": m.pad_to_multiple,
    }
    _refuse([(size >= 1, f"{name} {size} must be at least 1") for name, size in sizes.items()])
    tp, pp, cp, ep = list(sizes.values())[:4]
    if world_size < 1 or world_size % (tp * pp * cp) != 0:
        raise ConfigError(
            f"{world_size} processes cannot be TP x PP x CP = {tp} x {pp} x {cp} = {tp * pp * cp} times any number: "
            "start a multiple of that many"
        )
    layout = Layout(world_size, tp, pp, m.virtual_pipeline_model_parallel_size, cp, ep, world_size // (tp * pp * cp))
    _refuse([*_divisions(config.model, layout), *_combinations(config, layout)])
    _refuse(_places(config, layout, cuda=cuda))
    return layout


def check_saving(config: TrainConfig, *, cuda: bool) -> None:
    """Refuse a checkpoint that could not be resumed from.

    Raises:
        ConfigError: the distributed optimizer on the CPU: its resumed state differs, and nothing says so.
    """
    if config.megatron.use_distributed_optimizer and not cuda:
        raise ConfigError(
            "use_distributed_optimizer cannot save or resume on a CPU: megatron-core 0.16.1 needs Transformer Engine's "
            "optimizer for that; leave it out, or save nothing"
        )


def _refuse(rules: list[tuple[bool, str]]) -> None:
    for holds, message in rules:
        if not holds:
            raise ConfigError(message)


def _divisions(model: ModelConfig, layout: Layout) -> list[tuple[bool, str]]:
    """What must divide what."""
    tp, pp, cp, ep, dp, vpp = layout.tp, layout.pp, layout.cp, layout.ep, layout.dp, layout.vpp
    stages = pp * (vpp or 1)
    width = model.moe_intermediate_size if model.has_experts else model.intermediate_size
    return [
        (
            vpp is None or vpp >= 2,
            f"virtual_pipeline_model_parallel_size {vpp} must be at least 2: leave it out for one chunk a stage",
        ),
        (
            vpp is None or pp >= 2,
            f"virtual_pipeline_model_parallel_size {vpp} needs pipeline_model_parallel_size of at least 2, not {pp}",
        ),
        (
            model.num_attention_heads % tp == 0,
            f"num_attention_heads {model.num_attention_heads} must be a multiple of tensor_model_parallel_size {tp}",
        ),
        (
            # Megatron would gather the projection and let several processes share a head; the weights' placement has
            # no name for a part of a head.
            model.num_key_value_heads % tp == 0,
            f"num_key_value_heads {model.num_key_value_heads} must be a multiple of tensor_model_parallel_size {tp}: "
            "sharing one head among processes is not supported",
        ),
        (
            width % tp == 0,
            f"{'moe_' if model.has_experts else ''}intermediate_size {width} must be a multiple of "
            f"tensor_model_parallel_size {tp}",
        ),
        (
            len(layout.vocab_rows(model, tp - 1)) > 0,
            f"vocab_size {model.vocab_size} is too small for tensor_model_parallel_size {tp}: the last process would "
            "hold padding alone",
        ),
        (
            model.num_hidden_layers % stages == 0,
            f"num_hidden_layers {model.num_hidden_layers} must be a multiple of pipeline_model_parallel_size"
            + (f" {pp}" if vpp is None else f" x virtual_pipeline_model_parallel_size = {pp} x {vpp}"),
        ),
        (
            ep == 1 or model.has_experts,
            f"expert_model_parallel_size {ep} needs a model with experts (model_type qwen3_moe), not "
            f"{model.model_type}",
        ),
        (
            not model.has_experts or model.num_experts % ep == 0,
            f"num_experts {model.num_experts} must be a multiple of expert_model_parallel_size {ep}",
        ),
        (
            dp * cp % ep == 0,
            f"expert_model_parallel_size {ep} must divide DP x CP = {dp} x {cp} = {dp * cp}: experts are spread over "
            "the processes that share micro-batches and sequences",
        ),
    ]


def _combinations(config: TrainConfig, layout: Layout) -> list[tuple[bool, str]]:
    """What cannot be asked for together, wherever it runs."""
    m, model, tp, cp = config.megatron, config.model, layout.tp, layout.cp
    multiple = lcm(tp if m.sequence_parallel else 1, 2 * cp if cp > 1 else 1)
    # With both, each process's share of a sequence is split again among its tensor-parallel group.
    multiple = 2 * cp * tp if m.sequence_parallel and cp > 1 else multiple
    return [
        (
            not model.output_bias,
            "attention_bias true gives the output projection a bias, which Megatron has only together with biases in "
            "the MLP: leave attention_bias out",
        ),
        (
            not m.sequence_parallel or tp > 1,
            f"sequence_parallel needs tensor_model_parallel_size of at least 2, not {tp}",
        ),
        (
            not (model.has_experts and tp > 1) or m.sequence_parallel,
            f"experts with tensor_model_parallel_size {tp} need sequence_parallel = true: Megatron trains them no "
            "other way",
        ),
        (
            m.pad_to_multiple % multiple == 0,
            f"pad_to_multiple {m.pad_to_multiple} must be a multiple of {multiple}, "
            + " x ".join(
                [f"2 x context_parallel_size {cp}"] * (cp > 1)
                + [f"tensor_model_parallel_size {tp}"] * m.sequence_parallel
            )
            + ": each process takes an equal part of a sequence",
        ),
        (
            layout.vpp is None or (m.overlap_p2p_comm and not m.batch_p2p_comm),
            f"virtual_pipeline_model_parallel_size {layout.vpp} needs overlap_p2p_comm = true and batch_p2p_comm = "
            "false: without them an interleaved pipeline mixes up its messages and trains on wrong gradients",
        ),
        (
            not (m.overlap_p2p_comm and m.batch_p2p_comm),
            "overlap_p2p_comm = true needs batch_p2p_comm = false: batched messages cannot overlap",
        ),
        (
            layout.vpp is not None or not m.overlap_p2p_comm,
            "overlap_p2p_comm needs virtual_pipeline_model_parallel_size: only an interleaved pipeline overlaps",
        ),
        (
            m.attention_backend == "local" or m.transformer_impl == "transformer_engine",
            f"attention_backend {m.attention_backend} belongs to transformer_impl transformer_engine, not "
            f"{m.transformer_impl}",
        ),
        (
            m.attention_backend != "local" or m.transformer_impl == "local",
            "attention_backend local belongs to transformer_impl local: with transformer_engine choose fused, flash, "
            "unfused or auto",
        ),
        (
            m.qkv_format == "bshd" or m.transformer_impl == "transformer_engine",
            "qkv_format thd (packed sequences) needs transformer_impl transformer_engine: the local attention has no "
            "such kernel",
        ),
        (
            m.qkv_format == "bshd" or cp == 1,
            f"qkv_format thd cannot be split over context_parallel_size {cp}: use bshd",
        ),
        (
            not m.moe_grouped_gemm or model.has_experts,
            f"moe_grouped_gemm needs a model with experts (model_type qwen3_moe), not {model.model_type}",
        ),
        (
            not (m.moe_grouped_gemm and m.transformer_impl == "local"),
            "moe_grouped_gemm needs transformer_impl transformer_engine: the local GroupedMLP has no kernel that runs "
            "here and its weights no name in the mapping",
        ),
        (
            not config.use_rollout_routing_replay or model.has_experts,
            f"use_rollout_routing_replay needs a model with experts (model_type qwen3_moe), not {model.model_type}",
        ),
    ]


def _places(config: TrainConfig, layout: Layout, *, cuda: bool) -> list[tuple[bool, str]]:
    """What a CPU cannot do."""
    m: MegatronConfig = config.megatron
    return [
        (
            cuda or layout.tp == 1 or layout.ep == 1 or m.moe_token_dispatcher_type != "alltoall",  # noqa: S105 - a flag
            f"moe_token_dispatcher_type alltoall with TP{layout.tp} and EP{layout.ep} gathers unequal parts, which "
            "gloo cannot: on a CPU use allgather",
        ),
        (
            cuda or m.transformer_impl == "local",
            "transformer_impl transformer_engine needs a GPU: on a CPU use transformer_impl local and "
            "attention_backend local",
        ),
        (
            cuda or not m.apply_rope_fusion,
            "apply_rope_fusion needs a GPU with Transformer Engine: on a CPU leave it out",
        ),
    ]
