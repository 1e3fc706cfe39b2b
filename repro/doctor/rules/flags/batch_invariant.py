"""rollout_batch_size x n_samples_per_prompt = global_batch_size x num_steps_per_rollout, without integer division."""

from __future__ import annotations

import math
from collections.abc import Iterator

from repro.doctor.artefacts.kinds import Launch
from repro.doctor.facts.launches import absent, size, trains
from repro.doctor.rule import Certainty, Found, Rule, Severity

__all__ = ["RULE"]

_PROMPTS, _SAMPLES = "--rollout-batch-size", "--n-samples-per-prompt"
_OTHERWISE = ("--use-dynamic-global-batch-size", "--multi-lora", "--allow-partial-train-step")
_GLOBAL, _STEPS = "--global-batch-size", "--num-steps-per-rollout"


def _check(launch: Launch) -> Iterator[Found]:
    # lists of adapters and data-dependent batches have sizes of their own
    if not launch.has(_PROMPTS) or any(launch.has(name) for name in _OTHERWISE):
        return
    prompts, each = size(launch, _PROMPTS), size(launch, _SAMPLES)
    batch, steps = size(launch, _GLOBAL), size(launch, _STEPS)
    if prompts is None or each is None:
        return
    total = prompts * each
    shown = f"{prompts} x {each} = {total} samples of a rollout"
    sure: tuple[Severity, Certainty] = ("error", "certain") if launch.has(_SAMPLES) else absent(launch, "error")
    severity, certainty = sure
    if launch.has(_STEPS) and launch.has(_GLOBAL):
        if steps is None or batch is None or total == batch * steps:
            return
        cure = f"{_GLOBAL} {total // steps}" if total % steps == 0 else _steps(total, steps)
        message = f"{shown} are not {batch} x {steps} = {batch * steps}"
        if batch == total // steps:
            # the trainers compare after `//`, and take this
            message += f": the trainer rounds down, and trains on {batch * steps} of them"
            yield Found(message, launch.where(_STEPS), severity, certainty, cure)
        else:
            yield Found(message, launch.where(_GLOBAL), severity, certainty, cure)
    elif launch.has(_STEPS) and steps is not None and total % steps:
        message = (
            f"{shown} do not divide into {steps} steps: the trainer rounds down, {total % steps} are never trained on"
        )
        yield Found(message, launch.where(_STEPS), severity, certainty)
    elif launch.has(_GLOBAL) and batch is not None and trains(launch):
        if total < batch:
            message = f"{shown} are fewer than a global batch of {batch}"
            yield Found(message, launch.where(_GLOBAL), severity, certainty, f"{_GLOBAL} {total}, or more prompts")
        elif total % batch:
            message = (
                f"{shown} do not divide into global batches of {batch}: {total % batch} are left over in each rollout"
            )
            yield Found(message, launch.where(_GLOBAL), "warning", certainty, _fitting(prompts, each, batch))


def _steps(total: int, steps: int) -> str:
    """The nearest number of steps that divides the samples."""
    near = min(
        (n for n in range(1, min(total, 2 * steps, 100_000) + 1) if total % n == 0), key=lambda n: abs(n - steps)
    )
    return f"{_STEPS} {near} with {_GLOBAL} {total // near}"


def _fitting(prompts: int, each: int, batch: int) -> str:
    """Numbers of prompts that fit: the nearest ones."""
    step = batch // math.gcd(batch, each)
    below, above = prompts // step * step, (prompts // step + 1) * step
    return f"{_PROMPTS} " + (f"{below} or {above}" if below else f"{above}") + f" with {each} samples each"


RULE = Rule(
    id="batch-invariant",
    title="rollout_batch_size x n_samples_per_prompt that is not global_batch_size x num_steps_per_rollout",
    inputs=(Launch,),
    severity="error",
    certainty="certain",
    why="the trainer refuses the numbers, or rounds down and leaves samples of every rollout untrained",
    cure="set --global-batch-size to rollout_batch_size x n_samples_per_prompt / num_steps_per_rollout",
    sources=(
        "slime guide: Troubleshooting",
        "Miles FAQ",
        "THUDM/slime@624b824a8 slime/utils/arguments.py:1971-1979",
        "THUDM/slime@624b824a8 slime/utils/dp_schedule.py:135",
        "radixark/miles@31f1ca961 miles/utils/arguments.py:3431-3439",
    ),
    check=_check,
)
