"""Losses and gradients of the first steps."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from statistics import median
from typing import Literal

from repro.doctor.artefacts.kinds import Launch, Metrics, Rollout, Series
from repro.doctor.artefacts.logs.records import is_gradient_norm, is_loss
from repro.doctor.facts.curves import (
    Kind,
    Point,
    curve,
    falls,
    is_moe,
    number,
    replays_routing,
    rises,
    setting,
    switched_on,
    updates_of,
)
from repro.doctor.facts.samples.texts import CLEAN, Garble, began, garbled_where, judged
from repro.doctor.facts.sources import GUIDES, SLIME
from repro_golden.base.checks import Found, rule
from repro_golden.dumps.rollout.files import RolloutDump

_SHARE = 0.1
_LOW = 0.05
"""Nats per token; below it two samples of one prompt are hardly ever two."""
_LEAST = 6
_PLACES: tuple[tuple[Kind, str], ...] = (("step", "entropy_loss"), ("rollout", "entropy"))


@rule(
    title="The policy's entropy fell below a tenth of what it was, and below 0.05 nats",
    severity="warning",
    certainty="likely",
    why="all samples of a prompt become one, groups have one reward, and nothing more is learned",
    fix="raise --entropy-coef or --eps-clip-high (0.28), and look whether the reward can be had by one fixed answer",
    sources=("slime guide: Troubleshooting", "Relax guide: Debugging"),
)
def _entropy_collapse(series: Series) -> Iterator[Found]:
    for kind, metric in _PLACES:
        points = [point for point in curve(series, kind, metric) if math.isfinite(point.value)]
        if len(points) < _LEAST:
            continue
        before = median(point.value for point in points[:3])
        edge = min(_LOW, _SHARE * before)
        if before > 0 and all(point.value < edge for point in points[-3:]):
            since = next(k for k in range(len(points)) if all(point.value < edge for point in points[k:]))
            point = points[since]
            yield Found(
                f"the policy's entropy falls from {before:.3g} to {points[-1].value:.3g} nats per token",
                series.where(kind, point.number, metric, point.value),
            )
            return


_USUAL_CLIP = 1.0
"""Megatron's own; a first level below it says little, as first updates may be small."""


@rule(
    title="Gradient norm ten times its level (of the first updates, a hundred) for three updates in a row",
    severity="warning",
    certainty="likely",
    why="clipped or not, updates now follow a few samples, and the run seldom comes back by itself",
    fix="check the chat template first: data that has it already, fed to a run that applies it again, does this; then"
    " --clip-grad 1.0, a lower --lr (1e-6), and the rewards of the rollouts before it; `repro bisect` finds the "
    "commit where the same run did not do it before",
    sources=("Miles FAQ", "slime guide: Troubleshooting", "Relax guide: Debugging"),
)
def _grad_norm_explodes(series: Series, launch: Launch | None) -> Iterator[Found]:
    clip = number(setting(launch, series, "--clip-grad")) or 0.0
    rise = rises(curve(series, "step", "grad_norm"), least=clip, least_first=clip or _USUAL_CLIP)
    if rise is not None:
        yield Found(
            f"the gradient norm leaves its level of {rise.level:.3g} at update {rise.at.number} and reaches "
            f"{rise.top:.3g}",
            series.where("step", rise.at.number, "grad_norm", rise.at.value),
        )


_ANY_TRAINERS = (
    "look at the samples of that update for empty prompts and responses, rewards and log-probs that are NaN, and a "
    "chat template applied twice; then a lower learning rate, gradients that are clipped, bf16 instead of fp16"
)
"""What to do, without a flag of slime's or Miles'."""


@rule(
    title="Gradient norms that are NaN or infinite",
    severity="error",
    certainty="certain",
    why="the update is lost, or makes the weights NaN, after which every rollout is garbage",
    fix="check the chat template of the prompts and empty responses, and overflow of activations in FP8; "
    "--no-check-for-nan-in-loss-and-grad skips such updates for the time being, then look for the sample in the "
    "dumps of that rollout",
    sources=("Miles guide: Debugging", "Miles FAQ"),
    any_program=True,
)
def _gradient_not_finite(series: Metrics, launch: Launch | None) -> Iterator[Found]:
    any_trainers = not isinstance(series, Series)
    place = "on line" if any_trainers else "at update"
    for metric in sorted({name for step in series.steps.values() for name in step if is_gradient_norm(name)}):
        norms = curve(series, "step", metric)
        bad = [point for point in norms if not math.isfinite(point.value)]
        if bad:
            fp8 = setting(launch, series, "--fp8-format") or setting(launch, series, "--fp8")
            yield Found(
                f"{metric} is {bad[0].value} {place} {bad[0].number}, and not finite at {len(bad)} of {len(norms)}",
                series.where("step", bad[0].number, metric, bad[0].value),
                # in fp16 many trainers find their loss scale by updates that overflow, and are left out
                severity="warning" if any_trainers and math.isfinite(norms[-1].value) else None,
                fix=f"activations may overflow in FP8 ({fp8}): try once without it; then {_gradient_not_finite.fix}"
                if fp8
                else _ANY_TRAINERS
                if any_trainers
                else "",
            )


@rule(
    title="A gradient norm of exactly 0",
    severity="warning",
    certainty="certain",
    why="the update changes nothing: all advantages are 0 (every group has one reward), or the loss mask is",
    fix="look at rewards by group (`reward-constant`) and at the loss masks of the dump; "
    "--dynamic-sampling-filter-path leaves out groups with one reward",
    sources=("slime guide: Debugging", f"{SLIME} slime/ray/rollout.py:609"),
)
def _gradient_zero(series: Series) -> Iterator[Found]:
    norms = curve(series, "step", "grad_norm")
    zero = [point for point in norms if point.value == 0.0]
    if zero:
        yield Found(
            f"the gradient norm is exactly 0 at {len(zero)} of {len(norms)} updates: nothing was learned there",
            series.where("step", zero[0].number, "grad_norm", 0.0),
        )


_MANY = 0.3
_LATER_DIVERGENCE_LEAST = 4


def _garbled(dump: RolloutDump) -> Garble | None:
    garble = judged(dump)
    return garble if garble.judged >= _LATER_DIVERGENCE_LEAST and garble.share > _MANY else None


@rule(
    title="Responses in order in the first rollout and no text in later ones",
    severity="warning",
    certainty="likely",
    why="the weights were right at first, so training has diverged",
    fix="go through each step's rewards, gradient norms and clip fractions before it; lower --lr, raise "
    "--kl-loss-coef; where an older commit did not do this, `repro bisect` finds the one that began it",
    sources=("Relax guide: Debugging", "Miles guide: Debugging"),
)
def _later_divergence(rollout: Rollout) -> Iterator[Found]:
    if rollout.first is None:
        return
    garble = began(rollout, _garbled)
    if garble is None:
        return
    before = judged(rollout.first)
    if before.share > CLEAN:
        return  # it began so: `garbled-first-rollout`
    yield Found(
        f"{len(garble.garbled)} of {garble.judged} responses of rollout {rollout.dump.rollout_id} are garbled "
        f"({garble.garbled[0][1]}), and {len(before.garbled)} of {before.judged} of rollout "
        f"{rollout.first.rollout_id} were",
        garbled_where(rollout, garble),
    )


_METRICS = ("loss", "pg_loss", "kl_loss")
_LOSS_EXPLODES_LEAST = 1.0
"""GRPO's loss is near 0 whatever happens: a multiple of that alone says nothing."""
_LEAST_FIRST = 10.0


@rule(
    title="Loss, pg_loss or kl_loss ten times its level (of the first updates, a hundred) for three updates in a row",
    severity="warning",
    certainty="likely",
    why="the policy leaves what the rollouts were sampled with, and a loss that explodes ends in NaN",
    fix="lower --lr (1e-6), keep --clip-grad 1.0, look in the data of the rollouts before it for empty prompts and "
    "responses and for rewards far from the others, train in bf16",
    sources=("slime guide: Troubleshooting",),
)
def _loss_explodes(series: Series, launch: Launch | None) -> Iterator[Found]:
    rising = []
    for metric in _METRICS:
        sizes = [Point(point.number, abs(point.value)) for point in curve(series, "step", metric)]
        rise = rises(sizes, least=_LOSS_EXPLODES_LEAST, least_first=_LEAST_FIRST)
        if rise is not None:
            rising.append((rise, metric))
    if not rising:
        return
    rise, metric = min(rising, key=lambda pair: pair[0].at.number)
    others = [name for _, name in rising if name != metric]
    also = f"; so does {' and '.join(others)}" if others else ""
    fp16 = switched_on(setting(launch, series, "--fp16"))
    yield Found(
        f"{metric} leaves its level of {rise.level:.3g} (absolute) at update {rise.at.number} and reaches "
        f"{rise.top:.3g}{also}",
        series.where("step", rise.at.number, metric, series.steps[rise.at.number][metric]),
        fix=f"train in bf16 instead of fp16 (drop --fp16); then {_loss_explodes.fix}" if fp16 else "",
    )


_ALSO = ("ppo_kl", "log_probs", "ref_log_probs", "rollout_log_probs", "advantages", "returns", "rewards", "raw_reward",
         "entropy", "values", "kl", "train_rollout_logprob_abs_diff")  # fmt: skip


@rule(
    title="Losses, log-probs, advantages or rewards that are NaN or infinite",
    severity="error",
    certainty="certain",
    why="from there on the weights are NaN, or every update is skipped",
    fix="look for empty prompts and responses, rewards that are NaN, and log-probs of -inf in the dump of that "
    "rollout; lower --lr (1e-6), keep --clip-grad 1.0, train in bf16",
    sources=("slime guide: Troubleshooting", "Miles guide: Debugging"),
    any_program=True,
)
def _loss_not_finite(series: Metrics, launch: Launch | None) -> Iterator[Found]:
    fp16 = switched_on(setting(launch, series, "--fp16"))
    fix = f"train in bf16 instead of fp16 (drop --fp16); then {_loss_not_finite.fix}" if fp16 else ""
    fix = fix if isinstance(series, Series) else _ANY_TRAINERS
    kinds: tuple[tuple[Literal["step", "rollout"], Mapping[int, Mapping[str, float]]], ...] = (
        ("rollout", series.rollouts), ("step", series.steps),
    )  # fmt: skip
    for kind, table in kinds:
        how, unit = ("at", kind) if isinstance(series, Series) else ("on", "line")
        first: dict[str, tuple[int, float]] = {}
        count: dict[str, int] = {}
        for at in sorted(table):
            for metric, value in table[at].items():
                of_loss = metric.endswith("loss") or is_loss(metric)
                if (of_loss or metric in _ALSO) and not math.isfinite(value):
                    first.setdefault(metric, (at, value))
                    count[metric] = count.get(metric, 0) + 1
        for metric, (at, value) in first.items():
            yield Found(
                f"{metric} is {value} {how} {unit} {at}, and not finite {how} {count[metric]} of {len(table)} {unit}s",
                series.where(kind, at, metric, value),
                fix=fix,
            )


_AFTER = 10
_TIMES = 5.0
_GAP = 0.1
_METRIC = "train_rollout_logprob_abs_diff"


@rule(
    title="A model with experts whose reward, or agreement of trainer and engine, breaks down after tens of steps",
    severity="warning",
    certainty="likely",
    why="trainer and engine send tokens to other experts, so the gradient is of a model that did not sample",
    fix="add --use-rollout-routing-replay (R3), and record again from a checkpoint before the collapse",
    sources=("Miles guide: Debugging",),
)
def _moe_collapse(series: Series, launch: Launch | None) -> Iterator[Found]:
    if not is_moe(launch, series):
        return
    replayed = replays_routing(launch, series)
    state = "routing is replayed (R3)" if replayed else "R3 is not on"
    fix = (
        "look whether every sample has routed experts of all layers in the dumps (`dump-routed-experts-missing`), also "
        "after a partial rollout, a restart of an engine, or a radix cache hit" if replayed else ""
    )  # fmt: skip
    points = curve(series, "rollout", "raw_reward")
    fall = falls(points)
    if fall is not None and fall.since >= _AFTER:
        value = next(point.value for point in points if point.number == fall.since)
        yield Found(
            f"a model with experts: reward falls from {fall.level:.3g} to {fall.now:.3g} at rollout {fall.since}; "
            f"{state}",
            series.where("rollout", fall.since, "raw_reward", value),
            fix=fix,
        )
    gaps = [point for point in curve(series, "step", _METRIC) if math.isfinite(point.value)]
    if len(gaps) > _AFTER:
        before, now = median(point.value for point in gaps[:5]), median(point.value for point in gaps[-5:])
        if now > _GAP and now > _TIMES * before:
            last = gaps[-1]
            yield Found(
                f"a model with experts: trainer and engine drift apart, from {before:.3g} to {now:.3g} nats per token; "
                f"{state}",
                series.where("step", last.number, _METRIC, last.value),
                fix=fix,
            )


_STEP1_GRAD_NORM_TIMES = 10.0
_CLIP = 1.0
_NEXT = 10


@rule(
    title="A large gradient norm of update 0 where a rollout is one update",
    severity="warning",
    certainty="likely",
    why="with one update a rollout, the ratio is 1 and the KL term's gradient is 0, so only advantages are left, "
    "whose mean is 0: a first norm above the clip and ten times the next ones is an error of a kernel, of the "
    "weights or of the reward, and it turns the first update into one of that error's direction",
    fix="check the rewards (is --label-key the column with the answers, --reward-key the right one?), the loss mask, "
    "and known bugs of the installed Megatron and Transformer Engine; MoE models need --moe-permute-fusion",
    sources=GUIDES,
)
def _step1_grad_norm(series: Series, launch: Launch | None) -> Iterator[Found]:
    norms = [point for point in curve(series, "step", "grad_norm") if math.isfinite(point.value)]
    if not norms or norms[0].number != 0 or updates_of(launch, series) != 1:
        return
    first, others = norms[0].value, [point.value for point in norms[1 : 1 + _NEXT]]
    clip = number(setting(launch, series, "--clip-grad"))
    clip = _CLIP if clip is None or clip <= 0 else clip
    usual = median(others) if others else 0.0
    if first <= _STEP1_GRAD_NORM_TIMES * max(usual, clip if not others else 0.0) or first <= clip:
        return
    beside = (
        f"the next {len(others)} have {usual:.3g} in the middle" if others else f"gradients are clipped at {clip:g}"
    )
    moe = is_moe(launch, series) and not (launch is not None and launch.has("--moe-permute-fusion"))
    yield Found(
        f"the gradient norm of update 0 is {first:.4g}, and {beside}",
        series.where("step", 0, "grad_norm", first),
        fix="add --moe-permute-fusion, which MoE models need; then " + _step1_grad_norm.fix if moe else "",
    )
