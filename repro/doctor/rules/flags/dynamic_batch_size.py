"""Tokens per GPU are asked for, and the batching that heeds them is off, or the other way round."""

from __future__ import annotations

from collections.abc import Iterator

from repro.doctor.artefacts.kinds import Launch
from repro.doctor.facts.launches import absent, tempered, trains
from repro.doctor.rule import Found, Rule

__all__ = ["RULE"]

_NEEDERS = ("--balance-by-flops", "--use-dynamic-global-batch-size")


@tempered("warning")
def _check(launch: Launch) -> Iterator[Found]:
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


RULE = Rule(
    id="dynamic-batch-size",
    title="--max-tokens-per-gpu and --use-dynamic-batch-size, one without the other",
    inputs=(Launch,),
    severity="warning",
    certainty="certain",
    why="the cap on tokens that was meant to prevent running out of memory does not hold, or the launch is refused",
    cure="give both: --use-dynamic-batch-size --max-tokens-per-gpu N; start at rollout_max_response_len / cp_size",
    sources=(
        "Miles FAQ",
        "THUDM/slime@624b824a8 slime/utils/arguments.py:1868",
        "radixark/miles@31f1ca961 miles/utils/arguments.py:3156,3167,3174",
        "redai-infra/Relax@05149ae1a relax/utils/arguments.py",
    ),
    check=_check,
)
