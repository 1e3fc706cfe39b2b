"""GPU memory that ran out in the second cycle where trainer and engines share GPUs: offload and reload."""

from __future__ import annotations

from collections.abc import Iterator

from repro.doctor.artefacts.kinds import Launch, Log
from repro.doctor.artefacts.log_lines import MEMORY, SYNC, colocated, memory_errors
from repro.doctor.facts.memory import ran_out
from repro.doctor.rule import Found, Rule

__all__ = ["RULE"]


def _check(log: Log, launch: Launch | None) -> Iterator[Found]:
    if not colocated(launch, log):
        return
    error = next((error for error in memory_errors(log, launch) if error.rollouts == 1), None)
    if error:
        when = f"after the first rollout was trained on ({error.steps} optimizer steps) and before the second was"
        yield ran_out(log, launch, error, when)


RULE = Rule(
    id="oom-second-step",
    title="GPU memory that ran out in the second rollout of shared GPUs",
    inputs=(Log,),
    uses=(Launch,),
    severity="error",
    certainty="likely",
    why="the first rollout's training fits, but the trainer's offload and reload does not find its memory again beside "
    "the engine",
    cure="lower --sglang-mem-fraction-static to 0.7, then 0.6; 0.4 and a shorter --seq-length as last resort",
    sources=("Miles guide: Debugging", "slime guide: Debugging", "slime guide: Troubleshooting"),
    check=_check,
    phrases=(*MEMORY, SYNC),
)
