"""A small training program on Megatron's own gradient buffers, optimizer and schedules: one run for each job it gets.

``python megatron_train_kit.py JOBS.json`` runs the jobs one after the other in the same processes, each with a start
and a stop, and rank 0 prints a line of JSON for each: the sum of the losses and the gradient norm of each step, and how
far the gradients of the last step and the weights after it are from a reference run's (largest difference over largest
value). A job says:

- ``config``: of the run, besides its policy; ``steps``; ``head``: lm or value.
- ``save``: a file for the gradients and weights; ``compare``: such a file of another job.
- ``leave_out``: numbers of `cpu.CHANGES` that are not made; ``layout``: one that `layout.check` would refuse.
- ``checkpoint``: a directory to save the model in.
- ``fails``: the job is to fail, and its line says how.
"""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from repro_core.config import ModelConfig, TrainConfig
from repro_core.engines.megatron import cpu, layout, parallel
from repro_core.engines.megatron.weights import Held, Where, join, to_local
from repro_core.model.decoder import Policy, init_weights

MICRO_BATCHES, ROWS, SEQ = 4, 2, 32


def policy_of(model: ModelConfig) -> Policy:
    """A policy whose weights are alike in no two places, biases and norms included."""
    policy = Policy(model)
    init_weights(policy, 3)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.05)
    return policy


def places(config: TrainConfig, made: layout.Layout, at: parallel.Coordinates, *, critic: bool = False) -> list[Where]:
    """Which part of the model each chunk of this rank is."""
    out = []
    for chunk in range(made.vpp or 1):
        layers = made.layers(config.model, at.pp_rank, chunk)
        out.append(
            Where(
                tp=made.tp,
                tp_rank=at.tp_rank,
                ep=made.ep,
                ep_rank=at.ep_rank,
                first_layer=layers.start,
                layers=len(layers),
                first=at.is_first_stage and chunk == 0,
                last=at.is_last_stage and chunk == (made.vpp or 1) - 1,
                vocab=made.padded_vocab_size(config.model),
                critic=critic,
            )
        )
    return out


def run(job: dict[str, Any]) -> dict[str, Any]:
    """Run one job; the line that it prints."""
    config = TrainConfig.from_mapping({"policy": "megatron", **job["config"]})
    _, world = parallel.rank_and_world()
    made = layout.Layout(**job["layout"]) if "layout" in job else layout.check(config, world_size=world, cuda=False)
    missing = [cpu.CHANGES[number] for number in job.get("leave_out", ())]
    with cpu.without_cuda(leave_out=missing):
        at = parallel.start(made, seed=1, timeout_s=60)
        try:
            return _trained(job, config, made, at)
        finally:
            parallel.stop()


def _trained(job: dict[str, Any], config: TrainConfig, made: layout.Layout, at: parallel.Coordinates) -> dict[str, Any]:
    from megatron.core import dist_checkpointing
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
    from megatron.core.transformer.module import Float16Module

    from repro_core.engines.megatron.model import build
    from repro_core.engines.megatron.shares import held_positions

    model, m, bf16 = config.model, config.megatron, config.dtype == "bf16"
    critic = job.get("head") == "value"
    chunks = build(model, config, made, trained=True, head="value" if critic else "lm")
    where = places(config, made, at, critic=critic)
    whole = dict(policy_of(model).named_parameters())
    if critic:
        whole = {name: value for name, value in whole.items() if name != "lm_head.weight"}
        whole["score.weight"] = torch.linspace(-1, 1, model.hidden_size)[None]
    for chunk, place in zip(chunks, where, strict=True):
        parameters = dict(chunk.named_parameters())
        with torch.no_grad():
            for name, value in to_local(model, place, whole).items():
                parameters[name].copy_(value)
    shared = chunks[0].config
    asked = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=m.use_distributed_optimizer,
        overlap_grad_reduce=m.overlap_grad_reduce,
        bucket_size=5000 if m.overlap_grad_reduce else None,
    )
    wrapped = [
        DistributedDataParallel(shared, asked, Float16Module(shared, c) if bf16 else c, disable_bucketing=n > 0)
        for n, c in enumerate(chunks)
    ]
    shared.finalize_model_grads_func = lambda parts, _=None, **how: finalize_model_grads(parts, None, **how)
    shared.no_sync_func = [w.no_sync for w in wrapped] if len(wrapped) > 1 else wrapped[0].no_sync
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=1e-2,
            clip_grad=1.0,
            bf16=bf16,
            params_dtype=torch.bfloat16 if bf16 else torch.float32,
            use_distributed_optimizer=m.use_distributed_optimizer,
        ),
        wrapped,
        use_gloo_process_groups=False,
    )
    generator = torch.Generator().manual_seed(99)
    tokens = torch.randint(0, model.vocab_size, (MICRO_BATCHES, ROWS, SEQ), generator=generator)
    aims = torch.randn(MICRO_BATCHES, ROWS, SEQ, model.vocab_size, generator=generator)
    columns = made.vocab_rows(model, at.tp_rank)
    here = held_positions(SEQ, at.cp_rank, made.cp)
    mine = range(MICRO_BATCHES)[at.dp_rank * MICRO_BATCHES // made.dp : (at.dp_rank + 1) * MICRO_BATCHES // made.dp]
    total = torch.zeros(())

    def loss(number: int, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
        nonlocal total
        tap = aims[number][:, here][:, :, :1] if critic else aims[number][:, here][:, :, columns.start : columns.stop]
        value = 0.5 * (logits.float() - tap).pow(2).sum() / (aims[0].numel() / (model.vocab_size if critic else 1))
        total = total + value.detach() / (made.tp if critic else 1)  # every rank of the group has all values
        return value, torch.zeros((), dtype=torch.int), {}

    def forward(numbers: Any, chunk: Any) -> Any:
        number = next(numbers)
        return chunk(tokens[number][:, here].contiguous(), None, None), partial(loss, number)

    result: dict[str, Any] = {"losses": [], "norms": []}
    for _ in range(job.get("steps", 2)):
        total = torch.zeros(())
        for part in wrapped:
            part.zero_grad_buffer()
        optimizer.zero_grad()
        get_forward_backward_func()(
            forward_step_func=forward,
            data_iterator=[iter(mine) for _ in wrapped] if len(wrapped) > 1 else iter(mine),
            model=wrapped,
            num_microbatches=len(mine),
            seq_length=SEQ,
            micro_batch_size=ROWS,
            forward_only=False,
        )
        gradients = [{n: p.main_grad.clone() for n, p in chunk.named_parameters()} for chunk in chunks]
        result["norms"].append(float(optimizer.step()[1]))
        dist.all_reduce(total)
        result["losses"].append(float(total))
    parts: list[Any] = [None] * made.world_size
    if m.use_distributed_optimizer:
        gradients = []  # each rank has the sum of its shard alone
    weights = [{n: p.detach() for n, p in chunk.named_parameters()} for chunk in chunks]
    dist.all_gather_object(parts, ([*map(Held, where, gradients)], [*map(Held, where, weights)]))
    held = {
        kind: join(model, [shard for rank in parts for shard in rank[number]])
        for number, kind in enumerate(("grad", "weight"))
        if parts[0][number]
    }
    if "checkpoint" in job:
        Path(job["checkpoint"]).mkdir()
        dist_checkpointing.save(chunks[0].sharded_state_dict(), job["checkpoint"])
    result["dtypes"] = sorted({str(p.dtype) for chunk in chunks for p in chunk.parameters()})
    if at.rank == 0 and "save" in job:
        torch.save(held, job["save"])
    if at.rank == 0 and "compare" in job:
        reference = torch.load(job["compare"])
        for kind, tensors in held.items():
            scale = max(float(t.abs().max()) for t in reference[kind].values())
            result[kind] = max(
                float((tensor.float() - reference[kind][name].float()).abs().max()) / scale
                for name, tensor in tensors.items()
            )
    return result


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    for job in json.loads(Path(sys.argv[1]).read_text()):
        try:
            line = run(job)
        except Exception as error:
            if not job.get("fails"):
                raise
            line = {"error": f"{type(error).__name__}: {error}"}
        if parallel.rank_and_world()[0] == 0:
            print(json.dumps(line), flush=True)
