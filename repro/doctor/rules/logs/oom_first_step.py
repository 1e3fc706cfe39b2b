"""GPU memory that ran out in the first cycle where trainer and engines share GPUs: they do not fit together."""

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
    error = next((error for error in memory_errors(log, launch) if error.rollouts < 1), None)
    if error:
        when = f"before the first rollout was trained on, after {error.steps} of its optimizer steps"
        yield ran_out(log, launch, error, when)


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
