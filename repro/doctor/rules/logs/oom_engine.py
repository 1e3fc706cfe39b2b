"""GPU memory that ran out in an inference engine."""

from __future__ import annotations

from collections.abc import Iterator

from repro.doctor.artefacts.kinds import Launch, Log
from repro.doctor.artefacts.log_lines import MEMORY, SYNC, argument, colocated, goes_on, memory_errors, speaker
from repro.doctor.rule import Found, Rule

__all__ = ["RULE"]


def _check(log: Log, launch: Launch | None) -> Iterator[Found]:
    for error in memory_errors(log, launch):
        if error.engine and not (colocated(launch, log) and error.rollouts < 2):
            who = f" {speaker(error.hit)}" if speaker(error.hit) else ""
            now = argument("sglang_mem_fraction_static", launch, log)
            yield Found(
                f"GPU memory ran out in an inference engine{who}, after {error.steps} optimizer steps",
                log.where(error.hit),
                severity="warning" if goes_on(log, error.hit) else None,
                cure=f"lower --sglang-mem-fraction-static (now {now}), or --sglang-cuda-graph-max-bs" if now else "",
            )
            return


RULE = Rule(
    id="oom-engine",
    title="GPU memory that ran out in an inference engine",
    inputs=(Log,),
    uses=(Launch,),
    severity="error",
    certainty="certain",
    why="the engine ends, and rollouts stop or go on with fewer engines",
    cure="lower --sglang-mem-fraction-static, or --sglang-cuda-graph-max-bs",
    sources=("Miles FAQ", "slime guide: Troubleshooting"),
    check=_check,
    phrases=(*MEMORY, SYNC),
)
