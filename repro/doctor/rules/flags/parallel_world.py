"""Parallel sizes against the number of GPUs."""

from __future__ import annotations

import math
from collections.abc import Iterator

from repro.doctor.artefacts.kinds import Launch
from repro.doctor.facts.launches import absent, fsdp, ranks, size, trains
from repro.doctor.rule import Certainty, Found, Rule, Severity

__all__ = ["RULE"]

_NODES, _EACH = "--actor-num-nodes", "--actor-num-gpus-per-node"
_TENSOR, _PIPELINE = "--tensor-model-parallel-size", "--pipeline-model-parallel-size"
_CONTEXT, _EXPERT = "--context-parallel-size", "--expert-model-parallel-size"
_EXPERT_TENSOR = "--expert-tensor-parallel-size"


def _check(launch: Launch) -> Iterator[Found]:
    world = ranks(launch)
    if world is None or fsdp(launch) or not trains(launch) or launch.system == "relax":
        return
    groups = [(_TENSOR, _PIPELINE, _CONTEXT)]
    if launch.has(_EXPERT) and launch.has(_EXPERT_TENSOR):
        groups.append((_EXPERT_TENSOR, _EXPERT, _PIPELINE))
    sure: tuple[Severity, Certainty] = ("error", "certain") if launch.has(_EACH) else absent(launch, "error")
    for names in groups:
        # a product of those that are known must divide too
        known = {name: one for name in names if launch.has(name) and (one := size(launch, name)) is not None}
        product = math.prod(known.values())
        if product > 1 and world % product:
            shown = " x ".join(f"{name} {one}" for name, one in known.items())
            nodes, each = size(launch, _NODES), size(launch, _EACH, 8)
            message = f"{shown} = {product} does not divide {nodes} nodes x {each} GPUs = {world}"
            largest = max(known, key=lambda name: known[name])
            cure = f"use a multiple of {product} GPUs, or smaller sizes"
            yield Found(message, launch.where(largest), *sure, cure)


RULE = Rule(
    id="parallel-world",
    title="Tensor x pipeline x context parallel sizes that do not divide the GPUs",
    inputs=(Launch,),
    severity="error",
    certainty="certain",
    why="Megatron refuses a world that is no multiple of the model's parallel size, after every rank has started",
    cure="make nodes x GPUs per node a multiple of the product",
    sources=(
        "NVIDIA/Megatron-LM@d98e8a64d megatron/training/arguments.py:432 (total_model_size)",
        "NVIDIA/Megatron-LM@d98e8a64d megatron/core/parallel_state.py:881 (experts)",
        "Miles guide: Debugging",
    ),
    check=_check,
)
