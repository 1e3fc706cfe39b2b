"""Illegal memory access: out of memory in disguise, and the guides' ladder."""

from __future__ import annotations

import re
from collections.abc import Iterator

from repro.doctor.artefacts.kinds import Launch, Log
from repro.doctor.artefacts.log_lines import argument, said, speaker, times
from repro.doctor.rule import Found, Rule

__all__ = ["RULE"]

_SEEN = ("an illegal memory access was encountered", "CUDA_ERROR_ILLEGAL_ADDRESS", "cudaErrorIllegalAddress")
_TOLD = ("mem_fraction_static=", "disable_cuda_graph=True", "speculative_algorithm='")


def _check(log: Log, launch: Launch | None) -> Iterator[Found]:
    hits = said(log, *_SEEN)
    if not hits:
        return
    taken, left = _ladder(log, launch)
    who = f" by {speaker(hits[0])}" if speaker(hits[0]) else ""
    done = f"; already done: {', '.join(taken)}" if taken else ""
    cure = "take these steps one at a time: " + "; ".join(f"{n}. {step}" for n, step in enumerate(left, 1))
    yield Found(
        f"an illegal memory access{who}{times(log, *_SEEN)}, which is usually memory that ran out{done}",
        log.where(hits[0]),
        cure=cure,
    )


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
    told = launch is not None or bool(log.series.flags)  # else nothing says how it was launched
    if argument("sglang_speculative_algorithm", launch, log) or said(log, "speculative_algorithm='"):
        left.append("remove --sglang-speculative-algorithm: draft and main model may differ")
    elif not told:
        left.append("switch speculative decoding off, if it is on: draft and main model may differ")
    backends = (argument("sglang_moe_a2a_backend", launch, log), argument("moe_token_dispatcher_type", launch, log))
    if "deepep" in backends or "flex" in backends or argument("sglang_enable_deepep_moe", launch, log):
        left.append("turn DeepEP off")
    elif not told:
        left.append("turn DeepEP off, if it is on")
    if variables.get("CUDA_ENABLE_COREDUMP_ON_EXCEPTION") == "1":
        taken.append("a CUDA core dump")
    else:
        left.append("set CUDA_ENABLE_COREDUMP_ON_EXCEPTION=1 and open the core dump in cuda-gdb for the kernel's name")
    return taken, left


def _fraction(log: Log, launch: Launch | None) -> float | None:
    given = argument("sglang_mem_fraction_static", launch, log)
    printed = next((m for hit in said(log, "mem_fraction_static=") if (m := _FRACTION.search(hit.text))), None)
    try:
        return float(given if given is not None else printed[1] if printed else "")
    except ValueError:
        return None


_FRACTION = re.compile(r"mem_fraction_static=([0-9.]{1,10})")

RULE = Rule(
    id="illegal-memory-access",
    title="A CUDA illegal memory access, most often memory that ran out",
    inputs=(Log,),
    uses=(Launch,),
    severity="error",
    certainty="likely",
    why="the process that says so is dead, and the run hangs or ends with it",
    cure="one step at a time: lower --sglang-mem-fraction-static to 0.7, then 0.6; CUDA_LAUNCH_BLOCKING=1 to see the "
    "kernel that fails; CUDA graphs and speculative decoding off, or on; DeepEP off; a CUDA core dump "
    "(CUDA_ENABLE_COREDUMP_ON_EXCEPTION=1) for the kernel's name. What is seen to be done is left out",
    sources=("Miles guide: Debugging", "Miles FAQ", "slime guide: Debugging"),
    check=_check,
    phrases=_SEEN + _TOLD,
)
