"""Flags of the loss: KL, corrections, clipping, estimators."""

from __future__ import annotations

import math
from collections.abc import Iterator

from repro.doctor.artefacts.kinds import Launch
from repro.doctor.facts.launches import absent, fsdp, moe, multi_latent_attention, nonzero, samples, sft, size, trains
from repro.doctor.facts.sources import GUIDES, MEGATRON_ARGS, MILES, MILES_ARGS, RELAX_ARGS, SLIME, SLIME_ARGS
from repro_golden.base.checks import Certainty, Found, Severity, rule


@rule(
    title="Context parallelism without --attention-backend flash",
    severity="warning",
    certainty="possible",
    why="fused attention under context parallelism is not stable in some versions: KL is not 0 at step 1",
    fix="add --attention-backend flash (leave it out for models with MLA)",
    sources=GUIDES,
)
def _attention_backend(launch: Launch) -> Iterator[Found]:
    context_parallel = size(launch, "--context-parallel-size")
    # with latent attention the launch scripts leave the choice to Transformer Engine: flash does not take its heads
    if context_parallel in (None, 1) or fsdp(launch) or not trains(launch) or multi_latent_attention(launch):
        return
    if not launch.has("--attention-backend"):
        message = (
            f"--context-parallel-size {context_parallel} without --attention-backend flash: Transformer Engine may fuse"
        )
        yield Found(message, launch.where("--context-parallel-size"), *absent(launch, "warning", "possible"))
    elif launch.value("--attention-backend") in ("fused", "auto"):
        message = (
            f"--context-parallel-size {context_parallel} with --attention-backend {launch.value('--attention-backend')}"
        )
        yield Found(message, launch.where("--attention-backend"))


_PROMPTS, _SAMPLES = "--rollout-batch-size", "--n-samples-per-prompt"
_OTHERWISE = ("--use-dynamic-global-batch-size", "--multi-lora", "--allow-partial-train-step")
_GLOBAL, _STEPS = "--global-batch-size", "--num-steps-per-rollout"


def _steps(total: int, steps: int) -> str:
    """The nearest number of steps that divides the samples."""
    near = min(
        (n for n in range(1, min(total, 2 * steps, 100_000) + 1) if total % n == 0), key=lambda n: abs(n - steps)
    )
    return f"{_STEPS} {near} with {_GLOBAL} {total // near}"


def _fitting(prompts: int, per_prompt: int, batch: int) -> str:
    """Numbers of prompts that fit: the nearest ones."""
    step = batch // math.gcd(batch, per_prompt)
    below, above = prompts // step * step, (prompts // step + 1) * step
    return f"{_PROMPTS} " + (f"{below} or {above}" if below else f"{above}") + f" with {per_prompt} samples each"


@rule(
    title="rollout_batch_size x n_samples_per_prompt that is not global_batch_size x num_steps_per_rollout",
    severity="error",
    certainty="certain",
    why="the trainer refuses the numbers, or rounds down and leaves samples of every rollout untrained",
    fix="set --global-batch-size to rollout_batch_size x n_samples_per_prompt / num_steps_per_rollout",
    sources=(
        "slime guide: Troubleshooting",
        "Miles FAQ",
        f"{SLIME_ARGS}:1971-1979",
        f"{SLIME} slime/utils/dp_schedule.py:135",
        f"{MILES_ARGS}:3431-3439",
    ),
)
def _batch_invariant(launch: Launch) -> Iterator[Found]:
    # lists of adapters and data-dependent batches have sizes of their own
    if not launch.has(_PROMPTS) or launch.has(*_OTHERWISE):
        return
    prompts, per_prompt = size(launch, _PROMPTS), size(launch, _SAMPLES)
    batch, steps = size(launch, _GLOBAL), size(launch, _STEPS)
    if prompts is None or per_prompt is None:
        return
    total = prompts * per_prompt
    product = f"{prompts} x {per_prompt} = {total} samples of a rollout"
    sure: tuple[Severity, Certainty] = ("error", "certain") if launch.has(_SAMPLES) else absent(launch, "error")
    severity, certainty = sure
    if launch.has(_STEPS) and launch.has(_GLOBAL):
        if steps is None or batch is None or total == batch * steps:
            return
        fix = f"{_GLOBAL} {total // steps}" if total % steps == 0 else _steps(total, steps)
        message = f"{product} are not {batch} x {steps} = {batch * steps}"
        if batch == total // steps:
            # the trainers compare after `//`, and take this
            message += f": the trainer rounds down, and trains on {batch * steps} of them"
            yield Found(message, launch.where(_STEPS), severity, certainty, fix)
        else:
            yield Found(message, launch.where(_GLOBAL), severity, certainty, fix)
    elif launch.has(_STEPS) and steps is not None and total % steps:
        message = (
            f"{product} do not divide into {steps} steps: the trainer rounds down, {total % steps} are never trained on"
        )
        yield Found(message, launch.where(_STEPS), severity, certainty)
    elif launch.has(_GLOBAL) and batch is not None and trains(launch):
        if total < batch:
            message = f"{product} are fewer than a global batch of {batch}"
            yield Found(message, launch.where(_GLOBAL), severity, certainty, f"{_GLOBAL} {total}, or more prompts")
        elif total % batch:
            message = (
                f"{product} do not divide into global batches of {batch}: {total % batch} are left over in each rollout"
            )
            yield Found(message, launch.where(_GLOBAL), "warning", certainty, _fitting(prompts, per_prompt, batch))


@rule(
    title="--clip-grad is 0",
    severity="warning",
    certainty="certain",
    why="one bad batch moves the weights as far as its gradient says, and the loss explodes",
    fix="--clip-grad 1.0 (the default of the trainers)",
    sources=("slime guide: Troubleshooting", f"{SLIME_ARGS}:878"),
)
def _clip_grad_off(launch: Launch) -> Iterator[Found]:
    clip = launch.number("--clip-grad", 1.0)
    if clip is not None and clip <= 0 and trains(launch):
        yield Found(f"--clip-grad {launch.value('--clip-grad')} switches clipping off", launch.where("--clip-grad"))


@rule(
    title="--fp16 instead of bfloat16",
    severity="warning",
    certainty="certain",
    why="fp16 overflows above 65504, so that losses and gradients become NaN or inf where bf16 goes on",
    fix="remove --fp16 (slime and Miles then train in bf16). If it is meant, sample with --sglang-dtype float16 too",
    sources=(
        "slime guide: Troubleshooting",
        f"{SLIME} slime/backends/megatron_utils/arguments.py:157",
        f"{MILES} miles/backends/megatron_utils/arguments.py:22",
        MEGATRON_ARGS,
    ),
)
def _fp16(launch: Launch) -> Iterator[Found]:
    if not launch.has("--fp16") or not trains(launch):
        return
    where, experts = launch.where("--fp16"), size(launch, "--expert-model-parallel-size")
    if experts not in (None, 1) and not fsdp(launch):
        message = f"--fp16 with --expert-model-parallel-size {experts}: Megatron refuses expert parallelism in fp16"
        yield Found(message, where, "error")
    elif launch.has("--bf16"):
        yield Found("--fp16 and --bf16 are both given: --fp16 wins and --bf16 is dropped", where)
    else:
        yield Found("--fp16 is given: the trainer leaves bfloat16", where)


@rule(
    title="--kl-loss-coef without --use-kl-loss",
    severity="warning",
    certainty="certain",
    why="the KL penalty that was asked for is not applied, silently, and the policy may drift from the reference",
    fix="add --use-kl-loss (and --ref-load), or set --kl-loss-coef 0",
    sources=(f"{SLIME} slime/backends/megatron_utils/loss.py:1116,1130",),
)
def _kl_loss_unused(launch: Launch) -> Iterator[Found]:
    if nonzero(launch, "--kl-loss-coef") and not launch.has("--use-kl-loss") and not sft(launch):
        message = f"--kl-loss-coef {launch.value('--kl-loss-coef')} does nothing without --use-kl-loss"
        yield Found(message, launch.where("--kl-loss-coef"), *absent(launch, "warning"))


@rule(
    title="A KL term is asked for without --ref-load",
    severity="error",
    certainty="certain",
    why="the path of the reference model is looked up without being set, which stops the launch after it was queued",
    fix="--ref-load CHECKPOINT, or no KL: remove --use-kl-loss and set --kl-coef 0",
    sources=(f"{SLIME_ARGS}:1775", f"{MILES_ARGS}:2975", RELAX_ARGS),
)
def _kl_without_ref(launch: Launch) -> Iterator[Found]:
    asking = "--use-kl-loss" if launch.has("--use-kl-loss") else "--kl-coef" if nonzero(launch, "--kl-coef") else ""
    if not asking or launch.has("--ref-load") or (launch.system == "relax" and sft(launch)):
        return
    flag = f"{asking} {launch.value(asking)}" if asking == "--kl-coef" else asking
    message = f"{flag} asks for a reference model, and --ref-load is not given: the trainer stops with a TypeError"
    yield Found(message, launch.where(asking), *absent(launch, "error"))


@rule(
    title="--get-mismatch-metrics without --custom-tis-function-path",
    severity="error",
    certainty="certain",
    why="the metrics come out of that function; the launch is refused when its arguments are checked",
    fix="--custom-tis-function-path MODULE.FUNCTION, or remove --get-mismatch-metrics",
    sources=(f"{SLIME_ARGS}:1859", f"{MILES_ARGS}:3147", RELAX_ARGS),
)
def _mismatch_needs_tis(launch: Launch) -> Iterator[Found]:
    if launch.has("--get-mismatch-metrics") and not launch.has("--custom-tis-function-path"):
        message = "--get-mismatch-metrics is given without --custom-tis-function-path: the trainer stops"
        yield Found(message, launch.where("--get-mismatch-metrics"), *absent(launch, "error"))


_EXCUSES = ("--megatron-deepgemm-moe-forward-layers", "--multi-lora-n-adapters")
"""What only works with the fusion off."""


@rule(
    title="A mixture of experts without --moe-permute-fusion",
    severity="warning",
    certainty="likely",
    why="some versions of Megatron and Transformer Engine have wrong gradients of experts without it",
    fix="add --moe-permute-fusion",
    sources=(
        *GUIDES,
        f"{SLIME} slime/backends/megatron_utils/alignment/deepgemm_moe_forward.py:1664",
        f"{MILES} miles/backends/megatron_utils/bridge_lora_helpers.py:107",
    ),
)
def _moe_permute_fusion(launch: Launch) -> Iterator[Found]:
    if not moe(launch) or fsdp(launch) or not trains(launch) or launch.has("--moe-permute-fusion"):
        return
    if not launch.has(*_EXCUSES):
        message = f"--num-experts {launch.value('--num-experts')} is given without --moe-permute-fusion"
        yield Found(message, launch.where("--num-experts"), *absent(launch, "warning", "likely"))


@rule(
    title="A mixture of experts without rollout routing replay (R3)",
    severity="note",
    certainty="possible",
    why="engine and trainer pick other experts for the same token, which can collapse training after some 50 steps",
    fix="add --use-rollout-routing-replay; watch train_rollout_logprob_abs_diff",
    sources=("Miles guide: Debugging", f"{SLIME_ARGS}:1098,2011"),
)
def _moe_without_r3(launch: Launch) -> Iterator[Found]:
    if not moe(launch) or not samples(launch) or not trains(launch) or launch.has("--use-rollout-routing-replay"):
        return
    message = f"--num-experts {launch.value('--num-experts')}, sampled by SGLang, without --use-rollout-routing-replay"
    if launch.has("--use-routing-replay"):
        message += " (--use-routing-replay repeats the trainer's own routes, not the engine's)"
    yield Found(message, launch.where("--num-experts"))


@rule(
    title="--no-check-for-nan-in-loss-and-grad is given",
    severity="note",
    certainty="certain",
    why="the flag is a help for the moment: what makes the NaN (data, template, overflow) stays and costs steps",
    fix="remove it once the cause is found: chat template, empty samples, FP8 overflow",
    sources=("Miles FAQ",),
)
def _nan_check_disabled(launch: Launch) -> Iterator[Found]:
    if launch.has("--no-check-for-nan-in-loss-and-grad") and trains(launch):
        yield Found(
            "--no-check-for-nan-in-loss-and-grad is given: steps with NaN are skipped, not reported",
            launch.where("--no-check-for-nan-in-loss-and-grad"),
        )


_ESTIMATORS = ("reinforce_plus_plus", "reinforce_plus_plus_baseline")


@rule(
    title="REINFORCE++ without --normalize-advantages",
    severity="error",
    certainty="certain",
    why="these estimators are defined on normalised advantages; the launch is refused when its arguments are checked",
    fix="add --normalize-advantages",
    sources=(f"{SLIME_ARGS}:1849", f"{MILES_ARGS}:3137", RELAX_ARGS),
)
def _reinforce_pp_normalize(launch: Launch) -> Iterator[Found]:
    estimator = launch.value("--advantage-estimator")
    if estimator in _ESTIMATORS and not launch.has("--normalize-advantages"):
        message = f"--advantage-estimator {estimator} is given without --normalize-advantages: the trainer stops"
        yield Found(message, launch.where("--advantage-estimator"), *absent(launch, "error"))


@rule(
    title="--update-weights-interval above 1: stale weights by design",
    severity="warning",
    certainty="certain",
    why="the policy trains on what an older policy said; without a correction the two drift apart",
    fix="--update-weights-interval 1, or a correction: --use-tis, or --use-rollout-logprobs",
    sources=("slime guide: Troubleshooting", f"{SLIME} train_async.py:66, train.py", f"{MILES} train_async.py:107"),
)
def _update_interval(launch: Launch) -> Iterator[Found]:
    interval = launch.number("--update-weights-interval", 1.0)
    if interval is None or interval == 1 or not samples(launch):
        return
    if launch.asynchronous and interval < 1:
        yield Found(
            f"--update-weights-interval {launch.value('--update-weights-interval')}: an interval is at least 1",
            launch.where("--update-weights-interval"),
            "error",
        )
    elif launch.asynchronous:
        message = (
            f"--update-weights-interval {interval:.0f}: samples are up to {interval:.0f} rollouts older than the "
            "weights they train"
        )
        yield Found(message, launch.where("--update-weights-interval"))
    elif launch.entry == "train.py":
        message = (
            f"--update-weights-interval {interval:.0f} is not looked at by train.py, which updates weights at "
            "each rollout"
        )
        yield Found(
            message,
            launch.where("--update-weights-interval"),
            "note",
            fix="remove --update-weights-interval, or start train_async.py",
        )
