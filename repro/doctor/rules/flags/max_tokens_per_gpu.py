"""The cap on tokens per GPU against the longest sample: no number, refused by Relax, or far above where to start."""

from __future__ import annotations

import math
from collections.abc import Iterator

from repro.doctor.artefacts.kinds import Launch
from repro.doctor.facts.launches import size, tempered, trains
from repro.doctor.rule import Found, Rule

__all__ = ["RULE"]

_NAME = "--max-tokens-per-gpu"
_FAR = 16
"""Times the starting point from which the value is worth a word."""


@tempered("note")
def _check(launch: Launch) -> Iterator[Found]:
    text, context_parallel = launch.value(_NAME), size(launch, "--context-parallel-size")
    if text is None or not trains(launch):
        return
    cap = size(launch, _NAME)
    if cap is None or not text.isdecimal():
        yield Found(f"{_NAME} {text[:40]} is no whole number above 0", launch.where(_NAME), "error")
        return
    if context_parallel is None or not launch.has("--use-dynamic-batch-size"):
        return
    budget, context = cap * context_parallel, launch.number("--rollout-max-context-len")
    if launch.system == "relax" and context and budget < context and not launch.has("--dynamic-context-parallel"):
        message = f"{_NAME} {cap} x CP {context_parallel} = {budget} is below --rollout-max-context-len {context:.0f}"
        cure = (
            f"{_NAME} {math.ceil(context / context_parallel)}, or a larger --context-parallel-size: Relax refuses less"
        )
        yield Found(message, launch.where(_NAME), "error", cure=cure)
    response = launch.number("--rollout-max-response-len")
    if response and (start := math.ceil(response / context_parallel)) * _FAR < cap:
        said = f"response {response:.0f} / CP {context_parallel}"
        message = f"{_NAME} {cap} is {cap / start:.1f} times the safe start of {start} ({said})"
        yield Found(
            message, launch.where(_NAME), "note", "possible", f"out of memory in training? Start at {_NAME} {start}"
        )
    log_probs = size(launch, "--log-probs-max-tokens-per-gpu", cap)
    if log_probs is not None and log_probs < cap:
        message = f"--log-probs-max-tokens-per-gpu {log_probs} is below {_NAME} {cap}: without gradients more fit"
        yield Found(message, launch.where("--log-probs-max-tokens-per-gpu"), "note")


RULE = Rule(
    id="max-tokens-per-gpu",
    title="--max-tokens-per-gpu far from what the longest sample asks for",
    inputs=(Launch,),
    severity="note",
    certainty="certain",
    why="too high runs out of memory in training, too low splits every rollout into more micro-batches than needed",
    cure="start at rollout_max_response_len / cp_size, raise it until memory runs out, then go back by 10%",
    sources=(
        "Miles FAQ",
        "THUDM/slime@624b824a8 slime/utils/arguments.py:758",
        "redai-infra/Relax@05149ae1a relax/utils/arguments.py (max_tokens_per_gpu * context_parallel_size)",
    ),
    check=_check,
)
