"""Flags of sizes: GPUs, parallel groups, batches, memory."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator

from repro.doctor.artefacts.kinds import Launch, Machine
from repro.doctor.facts.launches import absent, fsdp, known_text, ranks, samples, seen, severed, size, trains
from repro.doctor.facts.sources import MILES_ARGS, RELAX_ARGS, SLIME, SLIME_ARGS
from repro_golden.base.checks import Certainty, Found, Severity, Where, rule

_HIGH = 0.85
"""The most that the guides name; they name it for engines that have their GPUs for themselves."""


@rule(
    title="A high --sglang-mem-fraction-static on GPUs that are shared",
    severity="warning",
    certainty="possible",
    why="what is not given back between sampling and training adds up: the second step runs out of memory",
    fix="lower --sglang-mem-fraction-static to 0.7 (or 0.6)",
    sources=("Miles guide: Debugging", "slime guide: Troubleshooting"),
)
def _colocate_memory(launch: Launch) -> Iterator[Found]:
    share = launch.number("--sglang-mem-fraction-static")
    if share is None or not samples(launch):
        return
    if not 0 < share < 1:
        yield Found(
            f"--sglang-mem-fraction-static {share:g} is no share between 0 and 1",
            launch.where("--sglang-mem-fraction-static"),
            "error",
            "certain",
            "--sglang-mem-fraction-static 0.7",
        )
    elif launch.has("--colocate") and trains(launch):
        stays = launch.has("--no-offload-train", "--no-offload-rollout")
        if share > _HIGH or (stays and share > 0.6):
            more = ", and nothing is offloaded" if stays else ""
            message = f"the engines keep {share:g} of each GPU's memory that the trainer needs too (--colocate){more}"
            lower = "0.7, or 0.6" if share > 0.7 else "0.6"
            yield Found(
                message,
                launch.where("--sglang-mem-fraction-static"),
                fix=f"--sglang-mem-fraction-static {lower}; down to 0.4 for a large model",
            )


_NEEDERS = ("--balance-by-flops", "--use-dynamic-global-batch-size")


@rule(
    title="--max-tokens-per-gpu and --use-dynamic-batch-size, one without the other",
    severity="warning",
    certainty="certain",
    why="the cap on tokens that was meant to prevent running out of memory does not hold, or the launch is refused",
    fix="give both: --use-dynamic-batch-size --max-tokens-per-gpu N; start at rollout_max_response_len / cp_size",
    sources=("Miles FAQ", f"{SLIME_ARGS}:1868", f"{MILES_ARGS}:3156,3167,3174", RELAX_ARGS),
)
def _dynamic_batch_size(launch: Launch) -> Iterator[Found]:
    if not trains(launch):
        return
    dynamic, cap = launch.has("--use-dynamic-batch-size"), launch.has("--max-tokens-per-gpu")
    if dynamic and not cap:
        message = "--use-dynamic-batch-size is given without --max-tokens-per-gpu: the trainer stops at its arguments"
        yield Found(message, launch.where("--use-dynamic-batch-size"), *absent(launch, "error"))
    if dynamic:
        return
    if cap:
        message = (
            f"--max-tokens-per-gpu {launch.value('--max-tokens-per-gpu') or ''} is not looked at without"
            " --use-dynamic-batch-size: micro-batches have --micro-batch-size samples, however long"
        )
        yield Found(message, launch.where("--max-tokens-per-gpu"), *absent(launch, "warning"))
    for name in _NEEDERS:
        if launch.has(name) and not (name == _NEEDERS[1] and launch.has("--multi-lora-n-adapters")):
            message = f"{name} is given without --use-dynamic-batch-size: the trainer stops at its arguments"
            yield Found(message, launch.where(name), *absent(launch, "error"))


_GPUS, _EACH = "--rollout-num-gpus", "--rollout-num-gpus-per-engine"
_OTHERS = ("--sglang-config", "--prefill-num-servers", "--rollout-external-engine-addrs")
"""Engines that differ in size, or are started elsewhere."""


@rule(
    title="Rollout GPUs that do not divide by the GPUs of an engine",
    severity="error",
    certainty="certain",
    why="an engine does not start, or GPUs that are waited for stay without one",
    fix="make --rollout-num-gpus a multiple of --rollout-num-gpus-per-engine",
    sources=("Relax guide: Debugging", "Miles FAQ", f"{SLIME_ARGS}:45-60"),
)
def _engine_gpus(launch: Launch) -> Iterator[Found]:
    engine = size(launch, _EACH)
    if engine is None or not launch.has(_EACH) or not samples(launch) or launch.has(*_OTHERS):
        return
    shared = launch.has("--colocate") and not launch.has(_GPUS)
    gpus = ranks(launch) if shared else size(launch, _GPUS) if launch.has(_GPUS) else None
    if gpus is None or gpus % engine == 0:
        return
    what = "nodes x GPUs per node" if shared else _GPUS
    if gpus < engine:
        message = f"{what} {gpus} is less than the {engine} GPUs of one engine: no engine can start"
        yield Found(message, launch.where(_EACH), fix=f"{_EACH} {gpus}, or more GPUs")
        return
    message = f"{what} {gpus} does not divide by {engine} GPUs of an engine: {gpus % engine} are left without one"
    fits = max(n for n in range(1, engine + 1) if gpus % n == 0) if engine <= 4096 else 1
    yield Found(message, launch.where(_EACH), "warning", fix=f"{_EACH} {fits}, or {gpus // engine * engine} GPUs")


_ROLLOUT = "--rollout-num-gpus"
_SIZES = ("--actor-num-nodes", "--actor-num-gpus-per-node", "--rollout-batch-size")
_ELSEWHERE = ("--rollout-external-engine-addrs", "--rollout-external", "--resource", "--sglang-config")
"""Flags that place GPUs in another way."""


def _needed(launch: Launch) -> tuple[int, str] | None:
    """GPUs of the placement group, and how they come about."""
    train = ranks(launch)
    rollout = size(launch, _ROLLOUT) if launch.has(_ROLLOUT) and launch.value(_ROLLOUT) != "0" else 0
    if train is None or rollout is None:
        return None
    if launch.has("--debug-rollout-only"):
        return (rollout, f"{_ROLLOUT} {rollout} =") if rollout else (train, "nodes x GPUs per node =")
    training = f"{size(launch, '--actor-num-nodes')} nodes x {size(launch, '--actor-num-gpus-per-node', 8)}"
    if not samples(launch):
        return train, f"{training} = {train}"
    if launch.has("--colocate"):
        return max(train, rollout), f"{training} (colocated) = {max(train, rollout)}"
    return train + rollout, f"{training} + {rollout} for sampling = {train + rollout}"


def _had(launch: Launch, machine: Machine | None) -> Iterator[tuple[int, str, Where]]:
    """GPUs that are said to be there, for launches on one node."""
    if size(launch, "--actor-num-nodes") != 1 or any(map(_more_nodes, launch.text.splitlines())):
        return
    counts = [
        int(count)
        for argv in launch.commands
        if argv[:2] == ("ray", "start") and (count := _after(argv, "--num-gpus")).isdecimal() and len(count) < 6
    ]
    if counts and launch.submitted:
        line = next((n for n, text in enumerate(launch.text.splitlines(), 1) if "ray start" in text), None)
        yield max(counts), "ray start gives", Where(str(launch.path), line, "--num-gpus", str(max(counts)))
        return
    visible = known_text(seen(launch, "CUDA_VISIBLE_DEVICES"))
    if visible is not None:
        number = len([entry for entry in visible.split(",") if entry.strip()])
        where = launch.env["CUDA_VISIBLE_DEVICES"].where
        yield number, "CUDA_VISIBLE_DEVICES names", where
    if machine is not None and machine.gpus:
        yield machine.gpus, "this machine has", Where(machine.source, item="GPUs", value=str(machine.gpus))


def _more_nodes(line: str) -> bool:
    """Whether a line of the script starts something on other machines."""
    joins = "ray start" in line and "--address" in line
    return joins or re.match(r"[^#]*\b(srun|ssh|pdsh|mpirun)\b", line) is not None


def _after(argv: tuple[str, ...], name: str) -> str:
    for number, word in enumerate(argv):
        if word == name and number + 1 < len(argv):
            return argv[number + 1]
        if word.startswith(f"{name}="):
            return word.partition("=")[2]
    return ""


def _fix(launch: Launch, have: int) -> str:
    train, rollout = ranks(launch) or 0, size(launch, _ROLLOUT) or 0
    if samples(launch) and not launch.has("--colocate") and not launch.asynchronous and max(train, rollout) <= have:
        return "was --colocate forgotten? With it, training and sampling share these GPUs"
    return f"ask for {have} GPUs in all, or start Ray with more"


@rule(
    title="GPUs that the launch asks for and does not have",
    severity="error",
    certainty="certain",
    why="Ray waits for ever for GPUs that never come: the job hangs at its submission",
    fix="colocated: nodes x GPUs per node; apart: that plus --rollout-num-gpus",
    sources=(
        "Miles FAQ",
        "Relax guide: Debugging",
        f"{SLIME} slime/ray/placement_group.py:_get_placement_group_layout",
    ),
)
def _gpu_count(launch: Launch, machine: Machine | None) -> Iterator[Found]:
    if launch.has(*_ELSEWHERE) or launch.system == "relax" or not launch.entry or severed(launch):
        return
    if not launch.has(*_SIZES):
        return
    if samples(launch) and not launch.has("--colocate") and not launch.has(_ROLLOUT):
        message = f"neither --colocate nor {_ROLLOUT} is given: sampling has no GPUs"
        fix = f"give --colocate to sample on the GPUs of training, or {_ROLLOUT} N for GPUs of its own"
        yield Found(message, Where(str(launch.path), item="--colocate"), *absent(launch, "error"), fix=fix)
        return
    need = _needed(launch)
    if need is None:
        return
    for have, what, where in _had(launch, machine):
        if have < need[0]:
            message = f"the launch asks for {need[1]} GPUs, and {what} {have}"
            if what.startswith("ray"):
                yield Found(message, where, fix=_fix(launch, have))
            else:
                yield Found(message, where, "warning", "likely", _fix(launch, have))
            return


_FAR = 16
"""Times the starting point from which the value is worth a word."""


@rule(
    title="--max-tokens-per-gpu far from what the longest sample asks for",
    severity="note",
    certainty="certain",
    why="too high runs out of memory in training, too low splits every rollout into more micro-batches than needed",
    fix="start at rollout_max_response_len / cp_size, raise it until memory runs out, then go back by 10%",
    sources=("Miles FAQ", f"{SLIME_ARGS}:758", f"{RELAX_ARGS} (max_tokens_per_gpu * context_parallel_size)"),
)
def _max_tokens_per_gpu(launch: Launch) -> Iterator[Found]:
    text, context_parallel = launch.value("--max-tokens-per-gpu"), size(launch, "--context-parallel-size")
    if text is None or not trains(launch):
        return
    cap = size(launch, "--max-tokens-per-gpu")
    if cap is None or not text.isdecimal():
        yield Found(
            f"--max-tokens-per-gpu {text[:40]} is no whole number above 0",
            launch.where("--max-tokens-per-gpu"),
            "error",
        )
        return
    if context_parallel is None or not launch.has("--use-dynamic-batch-size"):
        return
    budget, context = cap * context_parallel, launch.number("--rollout-max-context-len")
    if launch.system == "relax" and context and budget < context and not launch.has("--dynamic-context-parallel"):
        message = (
            f"--max-tokens-per-gpu {cap} x CP {context_parallel} = {budget} is below --rollout-max-context-len "
            f"{context:.0f}"
        )
        fix = (
            f"--max-tokens-per-gpu {math.ceil(context / context_parallel)}, or a larger --context-parallel-size: "
            "Relax refuses less"
        )
        yield Found(message, launch.where("--max-tokens-per-gpu"), "error", fix=fix)
    response = launch.number("--rollout-max-response-len")
    if response and (start := math.ceil(response / context_parallel)) * _FAR < cap:
        formula = f"response {response:.0f} / CP {context_parallel}"
        message = f"--max-tokens-per-gpu {cap} is {cap / start:.1f} times the safe start of {start} ({formula})"
        yield Found(
            message,
            launch.where("--max-tokens-per-gpu"),
            "note",
            "possible",
            f"out of memory in training? Start at --max-tokens-per-gpu {start}",
        )
    log_probs = size(launch, "--log-probs-max-tokens-per-gpu", cap)
    if log_probs is not None and log_probs < cap:
        message = (
            f"--log-probs-max-tokens-per-gpu {log_probs} is below --max-tokens-per-gpu {cap}: without gradients "
            "more fit"
        )
        yield Found(message, launch.where("--log-probs-max-tokens-per-gpu"), "note")


_MULTIPLIER = "--data-pad-size-multiplier"
_USUAL = 128
_WASTE = 8
"""Part of a micro-batch's tokens, as 1/N, that padding may take."""


@rule(
    title="Padding by hand where samples are packed",
    severity="note",
    certainty="certain",
    why="samples of any length are packed into micro-batches; padding costs compute and memory and corrects nothing",
    fix="--qkv-format thd (the default) with --use-dynamic-batch-size; bshd only for attention that cannot pack",
    sources=(
        "Miles FAQ",
        f"{MILES_ARGS}:270,3514; miles/backends/training_utils/data.py:83",
        f"{SLIME_ARGS}:717,1423; slime/backends/megatron_utils/data.py:47",
    ),
)
def _padded_manually(launch: Launch) -> Iterator[Found]:
    if not trains(launch):
        return
    dynamic = launch.has("--use-dynamic-batch-size")
    if launch.value("--qkv-format") == "bshd":
        where = launch.where("--qkv-format")
        if dynamic:
            yield Found("--qkv-format bshd with --use-dynamic-batch-size: the trainer stops", where, "error")
        elif fsdp(launch):
            yield Found("--qkv-format bshd is for Megatron alone: the trainer stops", where, "error")
        else:
            yield Found("--qkv-format bshd pads each sample of a micro-batch to the longest one", where)
    if dynamic and launch.has("--micro-batch-size"):
        message = "--micro-batch-size is not looked at with --use-dynamic-batch-size"
        yield Found(message, launch.where("--micro-batch-size"), fix="remove --micro-batch-size")
    multiplier, tensor = size(launch, _MULTIPLIER, _USUAL), size(launch, "--tensor-model-parallel-size")
    cap = launch.number("--max-tokens-per-gpu")
    if dynamic and cap and multiplier and tensor and multiplier > _USUAL and multiplier * tensor * _WASTE > cap:
        step = multiplier * tensor
        message = (
            f"{_MULTIPLIER} {multiplier} x TP {tensor}: micro-batches of {cap:.0f} tokens get up to {step} of padding"
        )
        yield Found(message, launch.where(_MULTIPLIER), fix=f"remove it: {_USUAL} is the default")


_NODES, _PARALLEL_WORLD_EACH = "--actor-num-nodes", "--actor-num-gpus-per-node"
_TENSOR, _PIPELINE = "--tensor-model-parallel-size", "--pipeline-model-parallel-size"
_CONTEXT, _EXPERT = "--context-parallel-size", "--expert-model-parallel-size"
_EXPERT_TENSOR = "--expert-tensor-parallel-size"


@rule(
    title="Tensor x pipeline x context parallel sizes that do not divide the GPUs",
    severity="error",
    certainty="certain",
    why="Megatron refuses a world that is no multiple of the model's parallel size, after every rank has started",
    fix="make nodes x GPUs per node a multiple of the product",
    sources=(
        "NVIDIA/Megatron-LM@d98e8a64d megatron/training/arguments.py:432 (total_model_size)",
        "NVIDIA/Megatron-LM@d98e8a64d megatron/core/parallel_state.py:881 (experts)",
        "Miles guide: Debugging",
    ),
)
def _parallel_world(launch: Launch) -> Iterator[Found]:
    world = ranks(launch)
    if world is None or fsdp(launch) or not trains(launch) or launch.system == "relax":
        return
    groups = [(_TENSOR, _PIPELINE, _CONTEXT)]
    if launch.has(_EXPERT) and launch.has(_EXPERT_TENSOR):
        groups.append((_EXPERT_TENSOR, _EXPERT, _PIPELINE))
    sure: tuple[Severity, Certainty] = (
        ("error", "certain") if launch.has(_PARALLEL_WORLD_EACH) else absent(launch, "error")
    )
    for names in groups:
        # a product of those that are known must divide too
        known = {name: degree for name in names if launch.has(name) and (degree := size(launch, name)) is not None}
        product = math.prod(known.values())
        if product > 1 and world % product:
            factors = " x ".join(f"{name} {degree}" for name, degree in known.items())
            nodes, per_node = size(launch, _NODES), size(launch, _PARALLEL_WORLD_EACH, 8)
            message = f"{factors} = {product} does not divide {nodes} nodes x {per_node} GPUs = {world}"
            largest = max(known, key=lambda name: known[name])
            fix = f"use a multiple of {product} GPUs, or smaller sizes"
            yield Found(message, launch.where(largest), *sure, fix)
