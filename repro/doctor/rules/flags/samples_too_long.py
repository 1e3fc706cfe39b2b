"""One sample at full length does not fit the cap on tokens per GPU."""

from __future__ import annotations

import math
from collections.abc import Iterator

from repro.doctor.artefacts.kinds import Launch
from repro.doctor.facts.launches import ranks, sft, size, trains
from repro.doctor.rule import Found, Rule

__all__ = ["RULE"]

_WORLD = 1 << 17
"""Ranks among whose sizes is searched."""


def _longest(launch: Launch) -> tuple[int, str] | None:
    """Tokens of the longest sample that the flags allow, and which flags say so."""
    context, response = launch.number("--rollout-max-context-len"), launch.number("--rollout-max-response-len")
    prompt = launch.number("--rollout-max-prompt-len", 0.0)
    if context and (not response or response <= context or launch.has("--custom-generate-function-path")):
        return int(context), "--rollout-max-context-len"
    if response and prompt:
        return int(response + prompt), "--rollout-max-prompt-len + --rollout-max-response-len"
    return (int(response), "--rollout-max-response-len") if response else None


def _enough(launch: Launch, longest: int, cap: int) -> int | None:
    """The smallest context parallel size that holds the sample and divides the ranks; None where none does."""
    current, world = size(launch, "--context-parallel-size") or 1, ranks(launch)
    tensor, pipeline = size(launch, "--tensor-model-parallel-size"), size(launch, "--pipeline-model-parallel-size")
    if world is None or world > _WORLD or tensor is None or pipeline is None:
        factor = math.ceil(longest / cap / current)
        return current * (1 << (factor - 1).bit_length())
    found = (n for n in range(current + 1, world + 1) if n * cap >= longest and world % (n * tensor * pipeline) == 0)
    return next(found, None)


def _check(launch: Launch) -> Iterator[Found]:
    cap, context_parallel = size(launch, "--max-tokens-per-gpu"), size(launch, "--context-parallel-size")
    dynamic = launch.has("--max-tokens-per-gpu") and launch.has("--use-dynamic-batch-size")
    if not dynamic or cap is None or context_parallel is None or not trains(launch) or sft(launch):
        return
    longest = _longest(launch)
    if longest is None or cap * context_parallel >= longest[0]:
        return
    tokens, flags = longest
    message = (
        f"a sample of {tokens} tokens ({flags}) does not fit {cap} x CP {context_parallel} = {cap * context_parallel}:"
        f" it takes {math.ceil(tokens / context_parallel)} tokens of each GPU, past the cap"
    )
    enough = _enough(launch, tokens, cap)
    cure = f"--max-tokens-per-gpu {math.ceil(tokens / context_parallel)} where memory allows it"
    if enough is not None:
        cure = f"--context-parallel-size {enough} ({enough} x {cap} = {enough * cap}), or {cure}"
    yield Found(message, launch.where("--max-tokens-per-gpu"), cure=cure)


RULE = Rule(
    id="samples-too-long",
    title="A sample at full length is longer than --max-tokens-per-gpu x --context-parallel-size",
    inputs=(Launch,),
    severity="warning",
    certainty="certain",
    why="such a sample gets a micro-batch of its own above the cap, and the first one may run out of memory",
    cure="spread a sample over more ranks with --context-parallel-size",
    sources=(
        "Miles FAQ",
        "THUDM/slime@624b824a8 slime/utils/dp_schedule.py:29,120",
        "radixark/miles@31f1ca961 miles/utils/dp_schedule.py:52",
    ),
    check=_check,
)
