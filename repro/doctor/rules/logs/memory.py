"""Memory and disks that ran out."""

from __future__ import annotations

import re
from collections.abc import Iterator

from repro.doctor.artefacts.kinds import Launch, Log
from repro.doctor.artefacts.logs.lines import (
    MEMORY,
    SYNC,
    above,
    argument,
    below,
    by,
    colocated,
    goes_on,
    memory_errors,
    said,
    times,
    told,
)
from repro.doctor.facts.launches import ran_out
from repro_golden.base.checks import Found, rule


@rule(
    title="A file system that is full",
    severity="error",
    certainty="certain",
    why="a checkpoint or dump that is written then is cut short, and the process that writes it fails",
    fix="make room where --save, the dumps and Ray's temporary folder (/tmp/ray) lie, and check the newest checkpoint",
    sources=("ray-project/ray src/ray/util/filesystem_monitor.cc",),
    phrases=("No space left on device", "Disk quota exceeded", "is over 95% full, available space"),
)
def _disk_full(log: Log) -> Iterator[Found]:
    for hit in said(log, *_disk_full.phrases)[:1]:
        shared = any("/dev/shm" in line for line in above(log, hit, 10))  # noqa: S108 - looked for, not written to
        nearly = _disk_full.phrases[2] in hit.text
        yield Found(
            f"a file system is {'nearly full' if nearly else 'full'}{by(hit, ' for ')}{times(log, *_disk_full.phrases)}"
            + (": /dev/shm, shared memory" if shared else ""),
            log.where(hit),
            severity="warning" if nearly or goes_on(log, hit) else None,
            fix="a larger /dev/shm: `docker run --shm-size` or --ipc=host" if shared else "",
        )


_ILLEGAL_ACCESS = (
    "an illegal memory access was encountered",
    "CUDA_ERROR_ILLEGAL_ADDRESS",
    "cudaErrorIllegalAddress",
)
_TOLD = ("mem_fraction_static=", "disable_cuda_graph=True", "speculative_algorithm='")


def _ladder(log: Log, launch: Launch | None) -> tuple[list[str], list[str]]:
    """The rungs that the launch or the log shows to be taken, and those left."""
    taken, left = [], []
    fraction = _fraction(log, launch)
    if fraction is not None and fraction <= 0.6:
        taken.append(f"--sglang-mem-fraction-static {fraction:g}")
    else:
        now = "" if fraction is None else f" (now {fraction:g})"
        lower = "0.6" if fraction is not None and fraction <= 0.7 else "0.7, then 0.6"
        left.append(f"lower --sglang-mem-fraction-static{now} to {lower}")
    variables = {} if launch is None else {name: variable.value for name, variable in launch.env.items()}
    rungs = [
        (variables.get("CUDA_LAUNCH_BLOCKING") == "1", "CUDA_LAUNCH_BLOCKING=1", "set {} to see the kernel that fails"),
        (
            argument("sglang_disable_cuda_graph", launch, log) == "True" or bool(said(log, "disable_cuda_graph=True")),
            "--sglang-disable-cuda-graph",
            "add {}: such accesses often appear in the padding of a graph's replay",
        ),
    ]
    for done, name, step in rungs:
        (taken if done else left).append(name if done else step.format(name))
    known = launch is not None or bool(log.series.flags)  # else nothing says how it was launched
    if argument("sglang_speculative_algorithm", launch, log) or said(log, "speculative_algorithm='"):
        left.append("remove --sglang-speculative-algorithm: draft and main model may differ")
    elif not known:
        left.append("switch speculative decoding off, if it is on: draft and main model may differ")
    backends = (argument("sglang_moe_a2a_backend", launch, log), argument("moe_token_dispatcher_type", launch, log))
    if "deepep" in backends or "flex" in backends or argument("sglang_enable_deepep_moe", launch, log):
        left.append("turn DeepEP off")
    elif not known:
        left.append("turn DeepEP off, if it is on")
    if variables.get("CUDA_ENABLE_COREDUMP_ON_EXCEPTION") == "1":
        taken.append("a CUDA core dump")
    else:
        left.append("set CUDA_ENABLE_COREDUMP_ON_EXCEPTION=1 and open the core dump in cuda-gdb for the kernel's name")
    return taken, left


def _fraction(log: Log, launch: Launch | None) -> float | None:
    configured = argument("sglang_mem_fraction_static", launch, log)
    printed = next((m for hit in said(log, "mem_fraction_static=") if (m := _FRACTION.search(hit.text))), None)
    try:
        return float(configured if configured is not None else printed[1] if printed else "")
    except ValueError:
        return None


_FRACTION = re.compile(r"mem_fraction_static=([0-9.]{1,10})")


@rule(
    title="A CUDA illegal memory access, most often memory that ran out",
    severity="error",
    certainty="likely",
    why="the process that says so is dead, and the run hangs or ends with it",
    fix="one step at a time: lower --sglang-mem-fraction-static to 0.7, then 0.6; CUDA_LAUNCH_BLOCKING=1 to see the "
    "kernel that fails; CUDA graphs and speculative decoding off, or on; DeepEP off; a CUDA core dump "
    "(CUDA_ENABLE_COREDUMP_ON_EXCEPTION=1) for the kernel's name. What is seen to be done is left out",
    sources=("Miles guide: Debugging", "Miles FAQ", "slime guide: Debugging"),
    phrases=_ILLEGAL_ACCESS + _TOLD,
)
def _illegal_memory_access(log: Log, launch: Launch | None) -> Iterator[Found]:
    for hit in said(log, *_ILLEGAL_ACCESS)[:1]:
        taken, left = _ladder(log, launch)
        done = f"; already done: {', '.join(taken)}" if taken else ""
        fix = "take these steps one at a time: " + "; ".join(f"{n}. {step}" for n, step in enumerate(left, 1))
        message = f"an illegal memory access{by(hit, ' by ')}{times(log, *_ILLEGAL_ACCESS)}"
        yield Found(f"{message}, which is usually memory that ran out{done}", log.where(hit), fix=fix)


_FEWEST = 10


@rule(
    title="Requests that engines took back for want of KV cache",
    severity="note",
    certainty="certain",
    why="what they had generated is computed again, so rollouts take longer",
    fix="raise --sglang-mem-fraction-static as far as training leaves room, or fewer requests at a time "
    "(--sglang-server-concurrency)",
    sources=("sgl-project/sglang python/sglang/srt/managers/scheduler.py",),
    phrases=("KV cache pool is full. Retract requests.", "Decode out of memory happened"),
)
def _kv_cache_full(log: Log, launch: Launch | None) -> Iterator[Found]:
    if sum(log.counts.get(phrase, 0) for phrase in _kv_cache_full.phrases) < _FEWEST:
        return
    now = argument("sglang_mem_fraction_static", launch, log)
    fix = _kv_cache_full.fix.replace("-static", f"-static (now {now})") if now else ""
    for hit in said(log, *_kv_cache_full.phrases)[:1]:
        message = f"engines took requests back for want of KV cache{times(log, *_kv_cache_full.phrases)}"
        yield Found(message, log.where(hit), fix=fix)


@rule(
    title="GPU memory that ran out in an inference engine",
    severity="error",
    certainty="certain",
    why="the engine ends, and rollouts stop or go on with fewer engines",
    fix="lower --sglang-mem-fraction-static, or --sglang-cuda-graph-max-bs",
    sources=("Miles FAQ", "slime guide: Troubleshooting"),
    phrases=(*MEMORY, SYNC),
)
def _oom_engine(log: Log, launch: Launch | None) -> Iterator[Found]:
    for error in memory_errors(log, launch):
        if error.engine and not (colocated(launch, log) and error.rollouts < 2):
            now = argument("sglang_mem_fraction_static", launch, log)
            fix = f"lower --sglang-mem-fraction-static (now {now}), or --sglang-cuda-graph-max-bs" if now else ""
            message = f"GPU memory ran out in an inference engine{by(error.hit)}, after {error.steps} optimizer steps"
            yield told(log, error.hit, message, fix=fix)
            return


@rule(
    title="GPU memory that ran out before the first rollout of shared GPUs was trained on",
    severity="error",
    certainty="likely",
    why="trainer and engine together never fit: this is not yet the cycle of offload and reload",
    fix="lower the trainer's own peak first (--max-tokens-per-gpu, --recompute-granularity full), then "
    "--sglang-mem-fraction-static",
    sources=("slime guide: Debugging", "slime guide: Troubleshooting"),
    phrases=(*MEMORY, SYNC),
)
def _oom_first_step(log: Log, launch: Launch | None) -> Iterator[Found]:
    yield from ran_out(log, launch, 0, "before the first rollout was trained on, after {} of its optimizer steps")


@rule(
    title="GPU memory that ran out in the second rollout of shared GPUs",
    severity="error",
    certainty="likely",
    why="the first rollout's training fits, but the trainer's offload and reload does not find its memory again "
    "beside the engine",
    fix="lower --sglang-mem-fraction-static to 0.7, then 0.6; 0.4 and a shorter --seq-length as last resort",
    sources=("Miles guide: Debugging", "slime guide: Debugging", "slime guide: Troubleshooting"),
    phrases=(*MEMORY, SYNC),
)
def _oom_second_step(log: Log, launch: Launch | None) -> Iterator[Found]:
    when = "after the first rollout was trained on ({} optimizer steps) and before the second was"
    yield from ran_out(log, launch, 1, when)


def _oom_training_ladder(launch: Launch | None, log: Log) -> str:
    """What lowers memory and is not done yet, the cheapest first."""
    steps = []
    tokens, length = argument("max_tokens_per_gpu", launch, log), argument("rollout_max_response_len", launch, log)
    context = argument("context_parallel_size", launch, log) or "1"
    if argument("use_dynamic_batch_size", launch, log) not in (None, "False"):
        start = ""
        if length and length.isdecimal() and context.isdecimal() and int(context) and len(length) < 10:
            start = f" to {int(length) // int(context)} (--rollout-max-response-len / --context-parallel-size)"
        now = f" (now {tokens})" if tokens else ""
        steps.append(
            f"lower --max-tokens-per-gpu{now}{start}, raise it until it fails, and take 10% off; where samples alone "
            "are too long, a larger --context-parallel-size"
        )
    elif argument("micro_batch_size", launch, log) != "1":
        steps.append("--micro-batch-size 1, or --use-dynamic-batch-size with a small --max-tokens-per-gpu")
    recompute = (argument("recompute_activations", launch, log), argument("recompute_granularity", launch, log))
    if not any(value not in (None, "False", "None") for value in recompute):
        steps.append("--recompute-activations, or --recompute-granularity full")
    if argument("sequence_parallel", launch, log) in (None, "False"):
        steps.append("--sequence-parallel with --tensor-model-parallel-size over 1")
    return "; ".join([*steps, "a smaller --global-batch-size does not lower the peak unless it lowers the micro-batch"])


@rule(
    title="GPU memory that ran out in training",
    severity="error",
    certainty="certain",
    why="the rank ends, and the run with it",
    fix="--recompute-activations, --micro-batch-size 1, --sequence-parallel, a smaller --max-tokens-per-gpu",
    sources=("slime guide: Troubleshooting", "Miles FAQ"),
    phrases=(*MEMORY, SYNC),
)
def _oom_training(log: Log, launch: Launch | None) -> Iterator[Found]:
    for error in memory_errors(log, launch):
        if error.engine or (colocated(launch, log) and error.rollouts < 2):
            continue
        when = " in a backward pass" if error.backward else ""
        message = f"GPU memory ran out{when}{by(error.hit, ' on ')}, after {error.steps} optimizer steps"
        yield told(log, error.hit, message, fix=_oom_training_ladder(launch, log))
        return


_USED = re.compile(r"was ([\d.]{1,12} ?[KMGT]i?B / [\d.]{1,12} ?[KMGT]i?B)")
_NAME = re.compile(r"\bname=([^,\s]{1,120})")


@rule(
    title="Processes that Ray's memory monitor killed",
    severity="error",
    certainty="certain",
    why="CPU memory ran out, which GPU settings do not change, and Ray ended the newest task for it",
    fix="give the node more memory, or need less: fewer samples at a time, no CPU copy of weights that nobody uses, a"
    " smaller object store; RAY_memory_usage_threshold only moves the limit",
    sources=("ray-project/ray doc/source/ray-core/scheduling/ray-oom-prevention.rst",),
    phrases=(
        "killed due to the node running low on memory",
        "Workers (tasks / actors) killed due to memory pressure (OOM)",
        "ray.exceptions.OutOfMemoryError",
        "RayOutOfMemoryError",
    ),
)
def _ray_oom(log: Log) -> Iterator[Found]:
    for hit in said(log, *_ray_oom.phrases)[:1]:
        text = " ".join(below(log, hit, 8))
        used, name = _USED.search(text), _NAME.search(text)
        which = f" {name[1]}" if name else " processes"
        full = f" at {used[1]} of the node's memory" if used else ", the node's memory being nearly full"
        yield Found(f"Ray killed{which}{full}{times(log, *_ray_oom.phrases)}", log.where(hit))


@rule(
    title="A process that crashed in native code",
    severity="error",
    certainty="certain",
    why="it is gone without an exception, so others only see that it does not answer",
    fix="the innermost Python frame names the library; compare its version with what the trainer's image pins; "
    "PYTHONFAULTHANDLER=1 where no frame is shown",
    sources=("python/cpython Doc/library/faulthandler.rst",),
    phrases=(
        "Fatal Python error: ",
        "Segmentation fault",
        "*** SIGSEGV received at",
        "*** SIGABRT received at",
        "(core dumped)",
    ),
)
def _segfault(log: Log) -> Iterator[Found]:
    for hit in said(log, *_segfault.phrases)[:1]:
        frame = next((line.strip() for line in below(log, hit, 15) if line.strip().startswith('File "')), "")
        message = f"a process{by(hit, ' of ')} crashed in native code{times(log, *_segfault.phrases)}"
        yield told(log, hit, message + (f", in {frame[:160]}" if frame else ""))
