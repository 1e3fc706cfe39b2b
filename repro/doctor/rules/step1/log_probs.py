"""KL and log-probs of the first step."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from repro.doctor.artefacts.kinds import Launch, Series, Tokenizer, TrainStep
from repro.doctor.facts.curves import INSTRUCT, Kind, first_kl, is_moe, kl_where, replays_routing, setting
from repro.doctor.facts.sources import GUIDES, MILES, SLIME, SLIME_ARGS
from repro_golden.base.checks import Found, Severity, Where, rule
from repro_golden.dumps.train.tokens import counted, has_column, sample_means, sample_name

_ELEVATED = 0.7
"""Nats. The guides say about 0.8, the loss of instruction tuning on text that others wrote; of its own text, sampled at
temperature 1 from prompts that it knows, an instruct model has 0.2 to 0.6."""
_LARGE = 1.5
"""From there on it is `log-probs-large`."""


@rule(
    title="Log-probs of the first rollout near -0.8 per token (-0.7 to -1.5) on average",
    severity="warning",
    certainty="likely",
    why="prompts in another form than the model was tuned on make its answers less sure, so training first teaches "
    "the form",
    fix="give `repro doctor` a rollout dump and the tokenizer's folder: it says whether the template was applied "
    "once, twice or not at all; then set or drop --apply-chat-template, or fix the data. A base model, or a cold "
    "start on other data, is right to be so",
    sources=GUIDES,
)
def _chat_template_log_probs(series: Series, launch: Launch | None, tokenizer: Tokenizer | None) -> Iterator[Found]:
    mean = series.rollouts.get(0, {}).get("log_probs")
    if mean is None or not math.isfinite(mean) or not _ELEVATED <= -mean < _LARGE:
        return
    model = setting(launch, series, "--hf-checkpoint") or ""
    applied = launch is not None and launch.has("--apply-chat-template")
    instruct = bool(INSTRUCT.search(model)) or applied or (tokenizer is not None and "instruct" in str(tokenizer.path))
    yield Found(
        f"the mean log-prob of rollout 0 is {mean:.3g} per token, "
        + ("and an instruct model is above -0.7" if instruct else "which an instruct model does not have"),
        series.where("rollout", 0, "log_probs", mean),
        "warning" if instruct else "note",
        "likely" if instruct else "possible",
    )


_JITTER = 1e-4
_REPLAYED = 5e-3
_CONFIGURATION = 1.0


@rule(
    title="KL of the first step from 1e-4 to 1: more than jitter, less than another model",
    severity="warning",
    certainty="likely",
    why="policy and reference compute the same weights differently, so the KL penalty acts on an error from the start",
    fix="add --attention-backend flash; then compare precision (bf16, fp8) and parallelism of policy and reference, "
    "dropout (0), and whether --load already holds trained weights",
    sources=("Miles guide: Debugging", "slime guide: Debugging"),
)
def _kl_between(series: Series, launch: Launch | None) -> Iterator[Found]:
    kl = first_kl(series)
    least = _REPLAYED if replays_routing(launch, series) else _JITTER
    if kl is not None and least <= kl[2] <= _CONFIGURATION:
        yield Found(f"KL of the first step is {kl[2]:.3g}: too much for jitter (below {least:g})", kl_where(series, kl))


@rule(
    title="KL of the first step above 1",
    severity="error",
    certainty="likely",
    why="the run trains towards, or from, weights that are not those it was meant to start with",
    fix="check that --load and --ref-load hold the same weights and were converted with this model's arguments "
    "(rotary base, layer numbers at pipeline stages, tied embeddings), then parallelism and precision",
    sources=GUIDES,
)
def _kl_configuration(series: Series, launch: Launch | None) -> Iterator[Found]:
    kl = first_kl(series)
    if kl is None or kl[2] <= _CONFIGURATION:
        return
    load, ref = (launch.value(flag) if launch else None for flag in ("--load", "--ref-load"))
    named = f": --load {load}, --ref-load {ref}" if load and ref and load != ref else ""
    yield Found(
        f"KL of the first step is {kl[2]:.3g}, above {_CONFIGURATION:g}: policy and reference are not the same "
        f"model{named}",
        kl_where(series, kl),
    )


_ROUNDING = 1e-8
"""What the order of a mean's sum makes of equal log-probs: the bound of slime's and Miles' own CI."""


@rule(
    title="KL of the first step above 0, but below 1e-4",
    severity="note",
    certainty="likely",
    why="two passes over the same weights gave other bits, so no run can be reproduced bit by bit",
    fix="nothing, if runs need not be reproduced; else --attention-backend flash and --deterministic-mode",
    sources=(*GUIDES, f"{SLIME} slime/backends/megatron_utils/model.py:900"),
)
def _kl_jitter(series: Series, launch: Launch | None) -> Iterator[Found]:
    kl = first_kl(series)
    if kl is not None and _ROUNDING < kl[2] < _JITTER and not replays_routing(launch, series):
        yield Found(
            f"KL of the first step is {kl[2]:.3g}, not 0: jitter of kernels, which can be lived with",
            kl_where(series, kl),
        )


_APART = 0.5
_LOG_PROBS_LARGE_ROUNDING = 1e-6


@rule(
    title="Log-probs of the first rollout below -1.5 per token on average",
    severity="warning",
    certainty="likely",
    why="text that its own model finds so unlikely comes of weights that were not loaded, of prompts that the model "
    "does not know, or of a high temperature: rewards then reward noise",
    fix="look for the line that says which checkpoint was loaded, check the chat template and --rollout-temperature; "
    "a model that was never trained is right to be so",
    sources=(
        "slime guide: Debugging",
        "Relax guide: Debugging",
        f"{SLIME} slime/observability/train_metric_utils.py:231",
    ),
)
def _log_probs_large(series: Series) -> Iterator[Found]:
    rollout = series.rollouts.get(0, {})
    mean, engine = rollout.get("log_probs"), rollout.get("rollout_log_probs")
    if mean is None or not math.isfinite(mean):
        return
    where = series.where("rollout", 0, "log_probs", mean)
    if mean > _LOG_PROBS_LARGE_ROUNDING:
        yield Found(f"the mean log-prob of rollout 0 is {mean:.3g}, above 0: these are no log-probs", where, "error")
        return
    if -mean < _LARGE:
        return
    text = (
        f"the mean log-prob of rollout 0 is {mean:.3g} per token, as of {math.exp(min(-mean, 50.0)):.3g} equal choices"
    )
    if engine is None or not math.isfinite(engine):
        yield Found(text, where)
    elif engine - mean > _APART:
        yield Found(
            f"{text}, and the engine that sampled them says {engine:.3g}: the trainer's weights are others",
            where,
            fix="check the conversion of the checkpoint that --load or --ref-load names (rotary base, layer numbers "
            "at pipeline stages), and that the log says that it was loaded",
        )
    else:
        yield Found(
            f"{text}; the engine that sampled them says the same, so it is the weights, the prompts or the temperature",
            where,
        )


_BOUND = 5e-3


@rule(
    title="With R3: means of log_probs and ref_log_probs of rollout 0 more than 5e-3 apart",
    severity="warning",
    certainty="likely",
    why="the reference routes for itself, which moves the mean a little; more than that means that the replayed "
    "routing is not the rollout's, or that the reference is another model",
    fix="check that the dumps' rollout_routed_experts have the model's layers and top-k, and that --load and "
    "--ref-load hold the same weights",
    sources=(f"{MILES} miles/backends/training_utils/log_utils.py:262",),
)
def _r3_log_probs(step: TrainStep, launch: Launch | None) -> Iterator[Found]:
    if step.rollout_id != 0 or not (replays_routing(launch) or has_column(step.joined, "rollout_routed_experts")):
        return
    policy, ref = sample_means(step.joined, "log_probs"), sample_means(step.joined, "ref_log_probs")
    if policy is None or ref is None or abs(policy - ref) <= _BOUND:
        return
    yield Found(
        f"with routing replay, the means of log_probs and ref_log_probs of rollout 0 lie {abs(policy - ref):.3g} "
        f"apart, more than {_BOUND:g}",
        Where(str(step.path), item="log_probs, ref_log_probs", value=f"{policy:.6g}, {ref:.6g}"),
    )


@rule(
    title="log_probs and ref_log_probs of rollout 0 that are not exactly equal, token by token (R3 exempt)",
    severity="warning",
    certainty="likely",
    why="policy and reference are the same weights before the first update: what differs is numerics or another "
    "model, and the KL penalty pulls towards it",
    fix="add --attention-backend flash (fused attention of some Transformer Engine versions is not deterministic "
    "under context parallelism); where the gap is large, check that --load and --ref-load hold the same weights, "
    "and parallelism and precision of both",
    sources=(*GUIDES, f"{SLIME} slime/observability/train_metric_utils.py:222"),
)
def _ref_log_probs_differ(step: TrainStep, launch: Launch | None) -> Iterator[Found]:
    joined = step.joined
    if step.rollout_id != 0 or replays_routing(launch) or has_column(joined, "rollout_routed_experts"):
        return  # with routing replayed in the policy alone they differ by design: `r3-log-probs`
    tokens = differ = 0
    means: list[float] = []
    worst: tuple[float, str, float, float] | None = None
    for sample in counted(joined, "log_probs", "ref_log_probs"):
        policy, ref = sample.values
        # NaN in both is equal here: that they are no numbers is another rule's
        other = ~((policy == ref) | (np.isnan(policy) & np.isnan(ref)))
        tokens += policy.size
        differ += int(other.sum())
        with np.errstate(invalid="ignore"):
            gap = np.where(other, np.nan_to_num(np.abs(policy - ref), nan=np.inf), 0.0)
        if gap.size:
            means.append(float(gap.mean()))
            at = int(gap.argmax())
            if gap[at] > (worst[0] if worst else 0.0):
                place = f"{sample_name(joined, sample.row)} response token {sample.positions[at]}"
                worst = (float(gap[at]), place, float(policy[at]), float(ref[at]))
    if worst is None:
        return
    mean = float(np.mean(means))
    severity: Severity = "note" if mean < _JITTER else "warning"
    yield Found(
        f"log_probs and ref_log_probs of rollout 0 differ at {differ} of {tokens} tokens, by {mean:.3g} on average",
        Where(str(step.path), item=f"{worst[1]} log_probs, ref_log_probs", value=f"{worst[2]!r}, {worst[3]!r}"),
        severity,
    )


_SEEN = 0.03
"""Miles' CI takes no more between the two means; bf16 gives 0.005 to 0.02 for each token of a dense model."""
_LIKELY = 0.1
"""slime's CI takes no more by default."""
_OTHER = 1.0
"""A factor of e for each token: no kernel's rounding does that."""


def _gap(series: Series) -> tuple[Kind, str, float] | None:
    step, rollout = series.steps.get(0, {}), series.rollouts.get(0, {})
    name = "train_rollout_logprob_abs_diff"
    if name in step:
        return "step", name, step[name]
    if name in rollout:
        return "rollout", name, rollout[name]
    if "log_probs" in rollout and "rollout_log_probs" in rollout:
        return "rollout", "log_probs - rollout_log_probs", abs(rollout["log_probs"] - rollout["rollout_log_probs"])
    return None


@rule(
    title="train_rollout_logprob_abs_diff of the first step of 0.03 and more, 0.1 and more, above 1",
    severity="warning",
    certainty="likely",
    why="the policy that is trained is not the one that sampled, so the gradient is of another distribution; above 1 "
    "they are other weights",
    fix="above 1: compare the weights that the engine has with the checkpoint (--check-weight-update-equal), and "
    "--rollout-temperature with the trainer's; below: precision of both sides (fp8, quantised KV cache), "
    "--use-tis corrects for the rest",
    sources=(f"{SLIME_ARGS}:1529", f"{MILES} miles/backends/training_utils/log_utils.py:281"),
)
def _train_rollout_gap(series: Series, launch: Launch | None) -> Iterator[Found]:
    measured = _gap(series)
    if measured is None or not math.isfinite(measured[2]) or measured[2] < _SEEN:
        return
    kind, name, gap = measured
    severity: Severity = "error" if gap > _OTHER else "warning" if gap > _LIKELY else "note"
    moe = is_moe(launch, series) and not replays_routing(launch, series)
    fix = (
        "--use-rollout-routing-replay makes training route as the engine did; then as for dense models: " if moe else ""
    )
    yield Found(
        f"trainer and engine differ by {gap:.3g} nats per token in the first step"
        + ("" if gap <= _LIKELY else f", and slime's CI takes {_LIKELY:g} at most"),
        series.where(kind, 0, name, gap),
        severity,
        fix=fix + _train_rollout_gap.fix if fix else "",
    )
