"""Train dumps: columns, ranks, and the rollout that they were made of."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from repro.doctor.artefacts.kinds import Rollout, TrainStep
from repro.doctor.facts.samples.train_columns import (
    Column,
    Floats,
    columns,
    floats,
    masks,
    of_one_run,
    response_lengths,
    sample_name,
)
from repro.doctor.facts.sources import SLIME
from repro_golden.base.checks import Found, Where, rule
from repro_golden.dumps.train.files import length_of


@rule(
    title="Per-token columns of a train dump that do not have their response's length",
    severity="warning",
    certainty="likely",
    why="values shift against the tokens they belong to, or the loss fails on the first such sample",
    fix="append to every per-token column together; look at what cuts responses (length filters, context parallel)",
    sources=(f"{SLIME} slime/utils/types.py:418 (Sample)",),
)
def _train_columns_lengths(step: TrainStep) -> Iterator[Found]:
    responses = response_lengths(step)
    for name, replicas in step.joined.columns.items():
        for values in replicas.values():
            sizes = [length_of(value) for value in values]
            if len(sizes) != len(responses) or name in ("tokens", "loss_masks"):
                continue
            pairs = [
                (i, size - want)
                for i, (size, want) in enumerate(zip(sizes, responses, strict=True))
                if size is not None
            ]
            if len(pairs) < 2 or len(set(responses)) < 2:
                continue
            usual, count = Counter(over for _, over in pairs).most_common(1)[0]
            odd = [(i, over) for i, over in pairs if over != usual]
            # per token is what nearly all samples have in the length of their response, or in one more
            if usual not in (0, 1) or not odd or 4 * len(odd) > count:
                continue
            i, over = odd[0]
            expected = f"{usual} more than tokens" if usual else "as many as tokens"
            yield Found(
                f"{name} of rollout {step.rollout_id} has {responses[i] + over} entries for the {responses[i]} "
                f"tokens of {sample_name(step, i)}; {count} other samples have {expected}",
                Where(str(step.path), item=f"{name} of {sample_name(step, i)}", value=str(responses[i] + over)),
            )
            break


_ENOUGH = 64
"""Pairs of tokens from which a correlation tells anything."""
_NEAR = 0.98
_FAR = 0.8
_COLUMNS = ("log_probs", "old_log_probs", "ref_log_probs")


def _correlation(column: Column, rollout: Column, shift: int) -> float | None:
    """Of all samples' tokens, the one side `shift` tokens later than the other; None where too few tell."""
    ours: list[Floats] = []
    theirs: list[Floats] = []
    for a, b in zip(column.values, rollout.values, strict=True):
        if a is None or b is None or len(a) != len(b):
            continue
        x, y = (a, b) if not shift else (a[1:], b[:-1]) if shift > 0 else (a[:-1], b[1:])
        keep = np.isfinite(x) & np.isfinite(y) & (y != 0)  # what no model sampled has 0
        ours.append(x[keep])
        theirs.append(y[keep])
    if not ours:
        return None
    x, y = np.concatenate(ours), np.concatenate(theirs)
    if len(x) < _ENOUGH:
        return None
    with np.errstate(over="ignore", invalid="ignore"):
        x, y = x - x.mean(), y - y.mean()
        scale = float(np.sqrt((x * x).sum() * (y * y).sum()))
        return float((x * y).sum()) / scale if 0 < scale < np.inf else None


@rule(
    title="Log-probs of the trainer that are shifted by one token",
    severity="error",
    certainty="likely",
    why="every importance ratio and every KL is of two different tokens: the gradient is noise",
    fix="the log-prob of token t is in the logits of token t-1: look at the shift where responses are cut out of the "
    "packed sequence, and at a BOS that one side adds",
    sources=("Miles guide: Debugging (KL > 1, configuration error)", "radixark/miles#2215 (double shift of labels)"),
)
def _train_log_probs_misaligned(step: TrainStep) -> Iterator[Found]:
    rollout = next(columns(step, "rollout_log_probs"), None)
    if rollout is None:
        return
    for column in columns(step, *_COLUMNS):
        here = _correlation(column, rollout, 0)
        if here is None or here > _FAR:
            continue
        for shift in (1, -1):
            there = _correlation(column, rollout, shift)
            if there is not None and there > _NEAR:
                side = "behind" if shift > 0 else "ahead of"
                yield Found(
                    f"{column.name} of rollout {step.rollout_id} are one token {side} rollout_log_probs: their "
                    f"correlation is {there:.3f} shifted by one, and {here:.3f} as they stand",
                    Where(str(step.path), item=column.name, value=f"shift {shift}"),
                )
                break


@rule(
    title="A training step whose masks are all 0",
    severity="error",
    certainty="certain",
    why="the loss is 0 or 0/0: nothing is learned of the rollout, or everything becomes NaN",
    fix="look at what sets loss_mask and remove_sample (generate function, filters, "
    "--mask-offpolicy-in-partial-rollout)",
    sources=("slime guide: Troubleshooting (build_loss_mask)",),
)
def _train_mask_all_zero(step: TrainStep) -> Iterator[Found]:
    known = [mask for mask in masks(step) if mask is not None and len(mask)]
    if (
        known
        and len(known) == sum(bool(length) for length in response_lengths(step))
        and not any(mask.any() for mask in known)
    ):
        yield Found(
            f"rollout {step.rollout_id}: the masks of all {len(known)} samples are 0 throughout",
            Where(str(step.path), item="loss_masks", value="0"),
        )


def _first(a: Column, b: Column) -> tuple[int | None, str]:
    for place, (x, y) in enumerate(zip(a.values, b.values, strict=True)):
        if x is None or y is None or x.shape != y.shape:
            continue
        differ = ~((x == y) | (np.isnan(x) & np.isnan(y)))
        if differ.any():
            at = int(differ.argmax())
            return place, f": {x[at]:.9g} and {y[at]:.9g} at token {at}"
    return None, ""


@rule(
    title="Ranks that should hold the same numbers and do not",
    severity="warning",
    certainty="likely",
    why="replicas that compute different numbers from the same samples drift apart, and checkpoints hold those of one"
    " of them",
    fix="look for a kernel that is not deterministic, a parameter that is not synchronised, and another seed on one "
    "rank",
    sources=("Miles: event log, cross-replica equality (radixark/miles@31f1ca961 miles/utils)",),
)
def _train_ranks_disagree(step: TrainStep) -> Iterator[Found]:
    for name, replicas in step.joined.columns.items():
        if len(replicas) < 2:
            continue
        first, *others = columns(step, name)
        for other in others:
            place, text = _first(first, other)
            where = f" of {sample_name(step, place)}" if place is not None else ""
            yield Found(
                f"rollout {step.rollout_id}: ranks {first.rank} and {other.rank} hold the same samples and other "
                f"{name}{where}" + text,
                Where(str(step.path), item=f"{name}{where}"),
            )
            break


def _equal(a: Floats | None, b: Floats | None) -> bool:
    return a is None or b is None or (a.shape == b.shape and bool((a == b).all()))


def _difference(ours: Floats | None, theirs: Floats | None) -> str:
    if ours is None or theirs is None:
        return "one side has none"
    if len(ours) != len(theirs):
        return f"{len(ours)} tokens, there {len(theirs)}"
    at = int((ours != theirs).argmax())
    return (
        f"{ours[at]:g}, there {theirs[at]:g}" if len(ours) == 1 else f"token {at} is {ours[at]:g}, there {theirs[at]:g}"
    )


@rule(
    title="Samples that were trained on other tokens than were sampled",
    severity="error",
    certainty="certain",
    why="log-probs and rewards belong to the sampled tokens: the gradient is that of a text that nobody scored",
    fix="look for a second tokenisation of the text, for truncation between rollout and trainer, and for two runs "
    "that wrote into one folder",
    sources=("Miles guide: Debugging (rollout or training?)", "slime guide: Debugging (the model input is fixed)"),
)
def _train_rollout_tokens_differ(step: TrainStep, rollout: Rollout) -> Iterator[Found]:
    if not of_one_run(step, rollout):
        return
    sampled: dict[int, list[Mapping[str, Any]]] = defaultdict(list)
    for sample in rollout.dump.samples:
        if type(sample["index"]) is int:
            sampled[sample["index"]].append(sample)
    trained: dict[int, list[int]] = defaultdict(list)
    for place, index in enumerate(step.joined.indices):
        if type(index) is int:
            trained[index].append(place)
    for name, other in (("tokens", "tokens"), ("response_lengths", "response_length")):
        column = next(columns(step, name), None)
        if column is None:
            continue
        differ = []
        for index, places in trained.items():
            same = sampled.get(index, ())
            if not same or any(sample.get("multimodal_train_inputs") for sample in same):
                continue  # which samples there are is another matter; images may become more tokens
            theirs = [floats(sample.get(other)) for sample in same]
            wrong = [p for p in places if not any(_equal(column.values[p], values) for values in theirs)]
            differ += [(index, column.values[p], theirs[0]) for p in wrong]
        if differ:
            index, ours, others = differ[0]
            yield Found(
                f"rollout {step.rollout_id}: {name} of sample {index} were trained on otherwise than {rollout.path} "
                f"has them: {_difference(ours, others)} ({len(differ)} of {len(step.joined.indices)} samples)",
                Where(str(step.path), item=f"{name} of sample {index}"),
            )
            return
