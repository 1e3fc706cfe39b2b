"""GPU memory that ran out in training, outside of what shared GPUs explain."""

from __future__ import annotations

from collections.abc import Iterator

from repro.doctor.artefacts.kinds import Launch, Log
from repro.doctor.artefacts.log_lines import MEMORY, SYNC, argument, colocated, goes_on, memory_errors, speaker
from repro.doctor.rule import Found, Rule

__all__ = ["RULE"]


def _check(log: Log, launch: Launch | None) -> Iterator[Found]:
    for error in memory_errors(log, launch):
        if error.engine or (colocated(launch, log) and error.rollouts < 2):
            continue
        who = f" on {speaker(error.hit)}" if speaker(error.hit) else ""
        when = " in a backward pass" if error.backward else ""
        yield Found(
            f"GPU memory ran out{when}{who}, after {error.steps} optimizer steps",
            log.where(error.hit),
            severity="warning" if goes_on(log, error.hit) else None,
            cure=_ladder(launch, log),
        )
        return


def _ladder(launch: Launch | None, log: Log) -> str:
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


RULE = Rule(
    id="oom-training",
    title="GPU memory that ran out in training",
    inputs=(Log,),
    uses=(Launch,),
    severity="error",
    certainty="certain",
    why="the rank ends, and the run with it",
    cure="--recompute-activations, --micro-batch-size 1, --sequence-parallel, a smaller --max-tokens-per-gpu",
    sources=("slime guide: Troubleshooting", "Miles FAQ"),
    check=_check,
    phrases=(*MEMORY, SYNC),
)
