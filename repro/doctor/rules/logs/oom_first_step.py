"""GPU memory that ran out in the first cycle where trainer and engines share GPUs: they do not fit together."""

from __future__ import annotations

from collections.abc import Iterator

from repro.doctor.artefacts.kinds import Launch, Log
from repro.doctor.artefacts.log_lines import MEMORY, SYNC, argument, colocated, goes_on, memory_errors, speaker
from repro.doctor.rule import Found, Rule

__all__ = ["RULE"]


def _check(log: Log, launch: Launch | None) -> Iterator[Found]:
    if not colocated(launch, log):
        return
    for error in memory_errors(log, launch):
        if error.rollouts < 1:
            side = "an inference engine" if error.engine else "the trainer"
            who = f", {speaker(error.hit)}" if speaker(error.hit) else ""
            now = argument("sglang_mem_fraction_static", launch, log)
            yield Found(
                f"GPU memory ran out in {side}{who}, before the first rollout was trained on, "
                f"after {error.steps} of its optimizer steps"
                + (f"; --sglang-mem-fraction-static is {now}" if now else ""),
                log.where(error.hit),
                severity="warning" if goes_on(log, error.hit) else None,
            )
            return


RULE = Rule(
    id="oom-first-step",
    title="GPU memory that ran out before the first rollout of shared GPUs was trained on",
    inputs=(Log,),
    uses=(Launch,),
    severity="error",
    certainty="likely",
    why="trainer and engine together never fit: this is not yet the cycle of offload and reload",
    cure="lower the trainer's own peak first "
    "(--max-tokens-per-gpu, --recompute-granularity full), then --sglang-mem-fraction-static",
    sources=("slime guide: Debugging", "slime guide: Troubleshooting"),
    check=_check,
    phrases=(*MEMORY, SYNC),
)
