"""A small trainer on megatron-core that knows nothing of the recorder: one layout, a few steps, on the CPU.

Under torchrun it is one rank; without RANK it forks its ranks, so that Megatron is imported once. It prints, from rank
0, the losses and a hash of what all ranks end with.

    python megatron_trainer.py [tp=2] [pp=2] [dp=2] [ep=2] [distopt] [overlap] [bf16] [tie] [moe] [vocab=56] [bump=STEP]
                               [shown]
"""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import sys
import tempfile
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from repro_core.engines.megatron import cpu

cpu.load()

from megatron.core import parallel_state, tensor_parallel  # noqa: E402 - the warnings of importing it are silenced above
from megatron.core.distributed import (  # noqa: E402
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec  # noqa: E402
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer  # noqa: E402
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func  # noqa: E402
from megatron.core.transformer.module import Float16Module  # noqa: E402
from megatron.core.transformer.moe import moe_utils  # noqa: E402
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset  # noqa: E402

STEPS, ROWS, LENGTH, HIDDEN, LAYERS, EXPERTS = 2, 2, 8, 16, 2, 4


class Asked:
    """What the command line says; flags are 0 or 1."""

    def __init__(self, words: Sequence[str]) -> None:
        given = dict(word.partition("=")[::2] for word in words)
        self.numbers = {name: int(value or 1) for name, value in given.items()}

    def __getattr__(self, name: str) -> int:
        return self.numbers.get(name, {"vocab": 64, "bump": -1, "tp": 1, "pp": 1, "dp": 1, "ep": 1}.get(name, 0))

    @property
    def world(self) -> int:
        """Its number of processes."""
        return self.tp * self.pp * max(self.dp, self.ep)


def padded(asked: Asked) -> int:
    """A vocabulary of 64 needs no padding; others are padded to a multiple of 8 x TP, as Megatron's trainers do."""
    multiple = 8 * asked.tp
    return -(-asked.vocab // multiple) * multiple


def fill(model: GPTModel, asked: Asked) -> None:
    """Weights that are the same in every layout: each whole tensor from its name, then this rank's part of it."""
    offset = get_transformer_layer_offset(model.config)
    rank, ranks = parallel_state.get_tensor_model_parallel_rank(), asked.tp
    for name, parameter in model.named_parameters():
        path = name.split(".")
        if "layers" in path:
            at = path.index("layers") + 1
            path[at] = str(int(path[at]) + offset)
        expert = "local_experts" in path
        if expert:
            at = path.index("local_experts") + 1
            path[at] = str(int(path[at]) + parallel_state.get_expert_model_parallel_rank() * EXPERTS // asked.ep)
        whole = ".".join(path)
        if asked.tie and whole == "output_layer.weight":
            whole = "embedding.word_embeddings.weight"
        rows = "word_embeddings" in whole or "output_layer" in whole
        shape, dim = list(parameter.shape), parameter.partition_dim if hasattr(parameter, "partition_dim") else -1
        cut = ranks > 1 and dim >= 0
        if cut:
            shape[dim] *= ranks
        if rows:
            shape[0] = asked.vocab
        values = torch.randn(shape, generator=torch.Generator().manual_seed(zlib.crc32(whole.encode()))) * 0.05
        values = values + 1 if "layernorm" in whole else values
        if rows:
            values = torch.cat([values, torch.zeros(padded(asked) - asked.vocab, *shape[1:])])
        if cut and "linear_fc1" in whole:
            values = torch.cat([half.chunk(ranks)[rank] for half in values.chunk(2)])
        elif cut:
            values = values.chunk(ranks, dim)[rank]
        parameter.data.copy_(values)


def configuration(asked: Asked) -> TransformerConfig:
    dtype = torch.bfloat16 if asked.bf16 else torch.float32
    experts: dict[str, Any] = {}
    if asked.moe:
        experts = {
            "num_moe_experts": EXPERTS, "moe_router_topk": 2, "moe_token_dispatcher_type": "allgather",
            "moe_router_load_balancing_type": "none", "moe_ffn_hidden_size": 16, "moe_grouped_gemm": False,
        }  # fmt: skip
    config = TransformerConfig(
        num_layers=LAYERS, hidden_size=HIDDEN, num_attention_heads=4, num_query_groups=2, ffn_hidden_size=24,
        normalization="RMSNorm", gated_linear_unit=True, activation_func=torch.nn.functional.silu,
        add_bias_linear=False, add_qkv_bias=True, hidden_dropout=0.0, attention_dropout=0.0,
        use_cpu_initialization=True, deterministic_mode=True, batch_p2p_sync=False, attention_softmax_in_fp32=True,
        masked_softmax_fusion=False, params_dtype=dtype, pipeline_dtype=dtype, bf16=bool(asked.bf16),
        tensor_model_parallel_size=asked.tp, pipeline_model_parallel_size=asked.pp,
        expert_model_parallel_size=asked.ep, **experts,
    )  # fmt: skip
    if asked.vocab % 64:
        config.vocab_size = asked.vocab  # as Megatron-Bridge's configurations say it
    return config


def batches(step: int, number: int) -> Iterator[dict[str, torch.Tensor]]:
    """This data-parallel rank's micro-batches, one row each."""
    rows = torch.randint(0, 48, (STEPS, ROWS, LENGTH + 1), generator=torch.Generator().manual_seed(5))[step]
    first = parallel_state.get_data_parallel_rank() * number
    for row in rows[first : first + number]:
        yield {"tokens": row[None, :-1], "labels": row[None, 1:], "places": torch.arange(LENGTH)[None]}


def forward(data: Iterator[dict[str, torch.Tensor]], model: Any) -> Any:
    batch = next(data)
    out = model(batch["tokens"], batch["places"], None, labels=batch["labels"])

    def loss(values: torch.Tensor) -> Any:
        mean = values.float().mean()
        return mean, {"loss": mean.detach().clone()}

    return out, loss


def train(asked: Asked) -> tuple[list[float], str]:
    config = configuration(asked)
    model: Any = GPTModel(
        config, get_gpt_layer_local_spec(num_experts=EXPERTS if asked.moe else None, normalization="RMSNorm"),
        padded(asked), LENGTH, position_embedding_type="rope",
        pre_process=parallel_state.is_pipeline_first_stage(), post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=bool(asked.tie),
    )  # fmt: skip
    fill(model, asked)
    inner = model
    model = Float16Module(config, model) if asked.bf16 else model
    sharded, overlap = bool(asked.distopt), bool(asked.overlap)
    model = DistributedDataParallel(
        config,
        DistributedDataParallelConfig(
            use_distributed_optimizer=sharded, grad_reduce_in_fp32=True, overlap_grad_reduce=overlap,
            overlap_param_gather=overlap,
        ),
        model,
    )  # fmt: skip
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam", lr=0.01, weight_decay=0.01, clip_grad=100.0, bf16=bool(asked.bf16),
            params_dtype=config.params_dtype, use_distributed_optimizer=sharded, overlap_param_gather=overlap,
        ),
        [model],
    )  # fmt: skip
    config.finalize_model_grads_func = finalize_model_grads
    config.grad_scale_func = optimizer.scale_loss
    config.no_sync_func = model.no_sync
    if overlap:
        config.param_sync_func = model.start_param_sync
    number = ROWS // parallel_state.get_data_parallel_world_size()
    losses: list[float] = []
    for step in range(STEPS):
        model.zero_grad_buffer()
        optimizer.zero_grad()
        outputs = get_forward_backward_func()(
            forward_step_func=forward, data_iterator=batches(step, number), model=[model], num_microbatches=number,
            seq_length=LENGTH, micro_batch_size=1, forward_only=False,
        )  # fmt: skip
        if step == asked.bump and dist.get_rank() == dist.get_world_size() - 1:
            weight = dict(inner.named_parameters())["decoder.layers.0.mlp.linear_fc2.weight"]
            weight.main_grad[0, 0] += 0.25  # a defect of one rank
        optimizer.step()
        losses += [float(finding["loss"]) for finding in outputs]
        if asked.shown:
            from repro_golden.fingerprint import fingerprint

            for name, parameter in inner.named_parameters():
                print("shown", step, name, fingerprint(parameter.main_grad), fingerprint(parameter.main_param))
    if overlap:
        model.start_param_sync(force_sync=True)
    end = hashlib.sha256()
    for name, parameter in sorted(inner.named_parameters()):
        for tensor in (parameter.detach(), parameter.main_grad):
            end.update(name.encode() + tensor.contiguous().view(torch.uint8).numpy().tobytes())
    end.update(torch.get_rng_state().numpy().tobytes())
    return losses, end.hexdigest()


def run(words: Sequence[str], rank: int, store: str) -> None:
    """One rank of one layout."""
    asked = Asked(words)
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None  # its router asks for it where Transformer Engine is absent
    if store:
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=asked.world)
    else:
        dist.init_process_group("gloo")
    with cpu.without_cuda():
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=asked.tp, pipeline_model_parallel_size=asked.pp,
            expert_model_parallel_size=asked.ep,
        )  # fmt: skip
        torch.manual_seed(3)
        tensor_parallel.model_parallel_cuda_manual_seed(3, inference_rng_tracker=True, force_reset_rng=True)
        ended = train(asked)
    every: list[Any] = [None] * asked.world
    dist.all_gather_object(every, ended)
    if dist.get_rank() == 0:
        print(*words, "|", [value for losses, _ in every for value in losses], *(end for _, end in every), flush=True)
    dist.destroy_process_group()


def main(words: Sequence[str]) -> None:
    if "RANK" in os.environ:
        run(words, int(os.environ["RANK"]), "")
        return
    fork = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder) / "store")
        ranks = [fork.Process(target=run, args=(words, rank, store)) for rank in range(Asked(words).world)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
    if any(process.exitcode for process in ranks):
        sys.exit(f"{' '.join(words)} failed")


if __name__ == "__main__":
    main(sys.argv[1:])
