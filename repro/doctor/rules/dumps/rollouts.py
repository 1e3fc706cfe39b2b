"""Rollout dumps: lengths, groups, texts and weights, and the checks that `repro rollout show` makes of a dump."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from repro.doctor.artefacts.kinds import HfConfig, Launch, Rollout
from repro.doctor.facts.samples.train_columns import (
    EXPERTS,
    config_number,
    executions,
    expert_config,
    first_routed_experts,
    floats,
    routed_experts,
    token_ids,
    weight_versions,
)
from repro.doctor.facts.sources import SLIME, SLIME_ARGS
from repro_golden.base.checks import Certainty, Found, Rule, Severity, Where, rule
from repro_golden.dumps.rollout.arrays import Array
from repro_golden.dumps.rollout.checks import RULES as CHECKS
from repro_golden.dumps.rollout.checks.inputs import batch_of

__all__ = ["RULES"]


def _blank(value: Any) -> bool:
    """Whether there is nothing in a prompt or response: no text, or a chat none of whose messages has any."""
    if isinstance(value, str):
        return not value.strip()
    if isinstance(value, list) and all(isinstance(message, dict) for message in value):
        return not any(message.get("content") or message.get("tool_calls") for message in value)
    return False


@rule(
    title="Samples with an empty prompt, or with response tokens and no text",
    severity="warning",
    certainty="certain",
    why="rewards are computed from the text: an empty one is scored as a wrong answer, and an empty prompt teaches "
    "noise",
    fix="look at the rows of the prompt data (--input-key), and at the generate function, which must set "
    "sample.response",
    sources=("slime guide: Troubleshooting (verify no empty prompts or responses)",),
)
def _dump_empty_text(rollout: Rollout) -> Iterator[Found]:
    dump = rollout.dump
    for field in ("prompt", "response"):
        held = [i for i, missing in enumerate(dump.missing) if field not in missing]
        empty = [
            i for i in held
            if _blank(dump.samples[i].get(field)) and (field == "prompt" or dump.samples[i]["response_length"] > 0)
        ]  # fmt: skip
        if not empty:
            continue
        # a program that never sets the text is another thing than a row of the data that is empty
        never = len(empty) == len(held) > 1
        severity: Severity | None = "note" if never else None
        what = "no sample has" if never else f"{len(empty)} of {len(held)} samples have no"
        detail = "" if field == "prompt" else ", though they have response tokens"
        yield Found(
            f"{what} text in {field}{detail}",
            Where(
                str(rollout.path), item=f"{field} of sample {empty[0]}", value=repr(dump.samples[empty[0]][field])[:80]
            ),
            severity=severity,
        )


_ENOUGH = 128
"""Tokens among which a router that works chooses more than one set of experts."""


@rule(
    title="Layers in which every token goes to the same experts",
    severity="warning",
    certainty="likely",
    why="the router has collapsed, its weights are lost (all zero after quantisation), or one row was written to all",
    fix="look at the router's weights on the engine's side (int4-router, hf-zero-tensor), and capture again",
    sources=(
        f"{SLIME} slime/observability/rollout_data_utils.py:58-95",
        "slime guide: Debugging (MoE router weights become all zeros)",
    ),
)
def _dump_experts_constant(rollout: Rollout) -> Iterator[Found]:
    chosen = [np.sort(array, axis=2) for _, array in first_routed_experts(rollout)]
    if not chosen or len({array.shape[1:] for array in chosen}) > 1:
        return
    every = np.concatenate(chosen)
    if len(every) < _ENOUGH:
        return
    same = (every == every[:1]).all(axis=(0, 2)) & every.any(axis=(0, 2))
    if same.any():
        layers = np.flatnonzero(same)
        listed = ", ".join(map(str, layers[:8].tolist())) + (", ..." if len(layers) > 8 else "")
        yield Found(
            f"in layers {listed} all {len(every)} tokens that were looked at go to the same experts "
            f"({every[0, layers[0]].tolist()})",
            Where(str(rollout.path), item=EXPERTS, value=str(every[0, layers[0]].tolist())),
        )


@rule(
    title="Routed experts that the model does not have",
    severity="error",
    certainty="certain",
    why="the trainer replays routing on an expert that is not there: it fails in the dispatch, or reads past the end",
    fix="make sure that engine and trainer load one model (--hf-checkpoint, --num-experts); shared experts that the "
    "engine fuses into the routed ones must not be captured (--sglang-disable-shared-experts-fusion)",
    sources=(f"{SLIME} slime/observability/rollout_data_utils.py:58-95",),
)
def _dump_experts_out_of_range(rollout: Rollout, launch: Launch | None, config: HfConfig | None) -> Iterator[Found]:
    _, _, count = expert_config(launch, config)
    if not count:
        return
    for place, array in routed_experts(rollout):
        if (highest := int(array.max())) >= count:
            token, layer, _ = np.argwhere(array >= count)[0]
            yield Found(
                f"sample {place} is routed to expert {highest}, and the model has {count} (the first at token {token}, "
                f"layer {layer})",
                Where(str(rollout.path), item=f"{EXPERTS} of sample {place}", value=str(highest)),
            )
            return


@rule(
    title="Tokens whose experts hold one expert twice",
    severity="warning",
    certainty="likely",
    why="a router chooses different experts: rows were overwritten, padded or put together wrongly",
    fix="capture the rollout again with one engine; look at how captures of pipeline stages and turns are joined",
    sources=(f"{SLIME} slime/observability/rollout_data_utils.py:58-95",),
)
def _dump_experts_repeated(rollout: Rollout) -> Iterator[Found]:
    for place, array in first_routed_experts(rollout):
        ordered = np.sort(array, axis=2)
        twice = (ordered[:, :, 1:] == ordered[:, :, :-1]).any(axis=2) & array.any(axis=2)
        if twice.any():
            token, layer = np.argwhere(twice)[0]
            yield Found(
                f"sample {place}, token {token}, layer {layer}: one expert stands twice among "
                f"{array[token, layer].tolist()}"
                f" ({int(twice.sum())} of {twice.size} choices that were looked at)",
                Where(str(rollout.path), item=f"{EXPERTS} of sample {place}", value=str(array[token, layer].tolist())),
            )
            return


_RUN = 4
"""So many equal ids in a row, at least, at an end of a sample."""


def _rectangle(long: Sequence[tuple[int, int, int]], count: int) -> bool:
    """Whether half of the samples or more end in runs of one id, of several lengths."""
    return 2 * len(long) >= count and len({t for _, t, _ in long}) == 1 and len({run for *_, run in long}) > 1


def _how(sample: Mapping[str, Any], token: int, run: int, side: str, pad: int | None, eos: int | None) -> str:
    """What shows that a run of one id is padding; '' where nothing does."""
    if pad is not None and token == pad != eos:
        return "pad_token_id of the model's config.json"
    response = sample["response_length"]
    # one that hit the limit of length may be a loop of one token, of which the model is sure
    if side != "end" or run > response or sample["status"] != "completed":
        return ""
    log_probs, mask = floats(sample["rollout_log_probs"]), floats(sample["loss_mask"])
    # the sampled end of sequence may be the same id as the padding behind it
    if log_probs is not None and len(log_probs) == response and not log_probs[response - run + 1 :].any():
        return "with rollout_log_probs of exactly 0"
    if mask is not None and len(mask) == response and not mask[response - run + 1 :].any() and mask.any():
        return "masked"
    return ""


def _run(ids: Array) -> int:
    """How many ids at the beginning are equal."""
    other = np.flatnonzero(ids != ids[0])
    return int(other[0]) if len(other) else len(ids)


@rule(
    title="Samples that are padded",
    severity="warning",
    certainty="likely",
    why="the trainer packs samples of any length itself: padding is computed on, counted as tokens, and trained on "
    "where the mask does not say otherwise",
    fix="leave tokens as long as they are; --use-dynamic-batch-size with --max-tokens-per-gpu balances them",
    sources=("Miles FAQ (you never need to pad manually)",),
)
def _dump_padded(rollout: Rollout, config: HfConfig | None) -> Iterator[Found]:
    samples = rollout.dump.samples
    tokens = [token_ids(sample["tokens"]) for sample in samples]
    known = [ids for ids in tokens if ids is not None and len(ids)]
    if not known:
        return
    pad, eos = config_number(config, "pad_token_id"), config_number(config, "eos_token_id")
    equal_lengths = len(known) > 2 and len({len(ids) for ids in known}) == 1
    for side, which in (("end", slice(None, None, -1)), ("beginning", slice(None))):
        runs = [
            (i, int(ids[which][0]), _run(ids[which])) for i, ids in enumerate(tokens) if ids is not None and len(ids)
        ]
        long = [(i, token, run) for i, token, run in runs if run >= _RUN]
        padded = [
            (i, token, run, how) for i, token, run in long if (how := _how(samples[i], token, run, side, pad, eos))
        ]
        # a batch whose samples all have one length, and runs of one id of several lengths: it was made a rectangle
        if not padded and equal_lengths and _rectangle(long, len(known)):
            padded = [(i, token, run, "all samples have one length") for i, token, run in long]
        if padded:
            i, token, run, how = padded[0]
            certainty: Certainty = "certain" if how.startswith("pad_token_id") else "likely"
            yield Found(
                f"{len(padded)} of {len(known)} samples have padding at their {side}: sample {i} has {run} tokens "
                f"{token} there ({how})",
                Where(str(rollout.path), item=f"tokens of sample {i}", value=f"{token} x {run}"),
                certainty=certainty,
            )


_OTHER_COUNT = (
    "--rollout-function-path", "--custom-generate-function-path", "--buffer-filter-path", "--partial-rollout",
    "--rollout-all-samples-process-path", "--rollout-data-postprocess-path", "--load-debug-rollout-data-subsample",
)  # fmt: skip
"""Flags under which a rollout may rightly have another number of samples."""


@rule(
    title="A rollout with more or fewer samples than the launch asks for",
    severity="warning",
    certainty="certain",
    why="the batch is cut into optimizer steps by the launch's numbers: samples are dropped, or a step is short",
    fix="make sure that the dump is of this launch, and that no filter drops samples without sampling others for them",
    sources=("Miles FAQ (samples of a rollout)", f"{SLIME_ARGS}:1971"),
)
def _dump_sample_count(rollout: Rollout, launch: Launch) -> Iterator[Found]:
    prompts, per_prompt = launch.number("--rollout-batch-size"), launch.number("--n-samples-per-prompt", 1)
    if rollout.dump.evaluation or not prompts or not per_prompt:
        return
    wanted, count = int(prompts * per_prompt), executions(rollout)
    if count == wanted:
        return
    explained = [flag for flag in _OTHER_COUNT if launch.has(flag)]
    text = f"{count} samples, and {prompts:g} prompts x {per_prompt:g} samples are {wanted}"
    step = launch.number("--global-batch-size")
    if step and count % step:
        text += f"; {count} do not divide into batches of {step:g}"
    if explained:
        text += f" (the launch has {explained[0]}, which may change the number)"
    yield Found(
        text,
        Where(str(rollout.path), item="samples", value=str(count)),
        severity="note" if explained else None,
        certainty="possible" if explained else None,
    )


@rule(
    title="Samples whose weights are more than one update old",
    severity="warning",
    certainty="certain",
    why="the older the weights, the further off-policy the sample: importance ratios grow and clipping drops tokens",
    fix="--update-weights-interval 1; sample less ahead (a smaller buffer or --over-sampling-batch-size); correct the"
    " rest with --use-tis, or --mask-offpolicy-in-partial-rollout for partial rollouts",
    sources=("slime guide: Troubleshooting (stale weights in async mode)", f"{SLIME} train_async.py:66"),
)
def _dump_stale_weights(rollout: Rollout, launch: Launch | None) -> Iterator[Found]:
    versions = weight_versions(rollout.dump)
    if rollout.dump.evaluation or len(versions) < 2:
        return
    staleness = launch.number("--max-staleness") if launch else None
    allowed = max(int(staleness), 1) if staleness else 1
    oldest, newest = min(versions), max(versions)
    if newest - oldest <= allowed:
        return
    overlaps = launch is not None and (launch.asynchronous or launch.has("--partial-rollout"))
    yield Found(
        f"weights of versions {oldest} to {newest} in one rollout: the oldest are {newest - oldest} updates behind, "
        f"{allowed} is what " + ("the launch allows" if staleness else "sampling one rollout ahead explains"),
        Where(str(rollout.path), item=f"weight_versions of sample {versions[oldest]}", value=str(oldest)),
        certainty="likely" if overlaps or launch is None else "certain",
    )


@rule(
    title="Rollouts of a run that were all sampled with the same weights",
    severity="warning",
    certainty="likely",
    why="the engine goes on sampling with weights that training has long left behind",
    fix="look for the weight update in the log, and at --update-weights-interval; --check-weight-update-equal "
    "compares both sides at the start",
    sources=("slime guide: Troubleshooting (stale weights in async mode)", f"{SLIME} train_async.py:66"),
)
def _dump_weights_never_updated(rollout: Rollout, launch: Launch | None) -> Iterator[Found]:
    first = rollout.first
    if first is None or rollout.dump.evaluation:
        return
    before, now = weight_versions(first), weight_versions(rollout.dump)
    interval, ahead = 1, 1  # without a launch it may sample one rollout ahead
    if launch is not None:
        if launch.has("--debug-rollout-only", "--debug-skip-weight-update"):
            return
        interval = max(int(launch.number("--update-weights-interval", 1) or 1), 1)
        ahead = int(launch.asynchronous) + int(launch.number("--num-critic-only-steps", 0) or 0)
    apart = rollout.dump.rollout_id - first.rollout_id
    if before.keys() != now.keys() or len(now) != 1 or apart < interval + ahead:
        return
    version = next(iter(now))
    yield Found(
        f"rollouts {first.rollout_id} and {rollout.dump.rollout_id} were sampled with the same weights (version "
        f"{version}), {apart} rollouts apart",
        Where(str(rollout.path), item="weight_versions", value=str(version)),
        certainty="likely" if launch else "possible",
    )


_ELSEWHERE = ("reward-equal", "truncated")
"""`reward-constant` and `truncated-ratio` say these with more of the run before them."""

_SHOWN = 3
"""Samples that are named; the others are counted."""

_NAMES = {"versions-in-batch": "weight-versions", "experts-missing": "routed-experts-missing"}
"""What the doctor calls a check, where it is not by the check's own name."""

_R3 = "--use-rollout-routing-replay"
_OWN_CODE = ("--custom-generate-function-path", "--rollout-function-path", "--buffer-filter-path")
"""With these a prompt may rightly have more or fewer samples than the flag says."""


def _check(check: Rule, rollout: Rollout, launch: Launch | None, config: HfConfig | None) -> Iterator[Found]:
    """All that one check finds in one dump, as one finding."""
    dump = rollout.dump
    layers, topk, _ = expert_config(launch, config)
    if check.id == "experts-missing":
        if launch is None or not launch.has(_R3):
            return
        layers = layers or 1  # which number it is plays no part in this check
    size = launch.number("--n-samples-per-prompt") if launch else None
    batch = batch_of(dump, int(size) if size else None, layers, topk)
    findings = list(check.check(batch)) if isinstance(batch, check.inputs) else []
    if not findings or (check.id == "mask-all-zero" and len(findings) == len(dump.samples)):
        return  # of a whole rollout `loss-mask-all-zero` says it
    listed = "; ".join(
        finding.message if finding.where.sample is None else f"sample {finding.where.sample}: {finding.message}"
        for finding in findings[:_SHOWN]
    )
    more = f"; and {len(findings) - _SHOWN} more, {len(findings)} in all" if len(findings) > _SHOWN else ""
    first = findings[0].where
    item = first.item if first.sample is None else f"{first.item} of sample {first.sample}"
    yield Found(listed + more, Where(str(rollout.path), item=item), _severity(check, rollout, len(findings), launch))


def _severity(check: Rule, rollout: Rollout, count: int, launch: Launch | None) -> Severity | None:
    """Where something else explains what was found, it is no error."""
    if check.id == "reward-missing" and count == len(rollout.dump.samples):
        return "warning"  # a program that never sets it scores elsewhere, or distils
    if launch is None:
        return None
    if check.id == "group-size" and launch.has(*_OWN_CODE):
        return "warning"
    if check.id == "versions-in-batch" and (launch.asynchronous or launch.has("--partial-rollout")):
        return "note"
    return None


def _rule(check: Rule) -> Rule:
    name = f"dump-{_NAMES.get(check.id, check.id)}"
    return replace(check, id=name, inputs=(Rollout,), uses=(Launch, HfConfig), check=functools.partial(_check, check))


RULES = tuple(_rule(check) for check in CHECKS if check.id not in _ELSEWHERE)
"""One for each of the others, in their order."""
