"""Rules about log-probs, loss masks and rewards."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from repro_golden.base.checks import Found, rule
from repro_golden.dumps.rollout.arrays import Array, numbers
from repro_golden.dumps.rollout.checks.inputs import NAN, SAMPLE, Batch, TrainBatch, noted, said
from repro_golden.dumps.values import same

__all__ = ["RULES", "RUN"]

RUN = 8
"""So many tokens in a row with a log-prob of exactly 0 are taken for text that no model sampled."""

_ROUNDING = 1e-6
"""A log-prob may lie so far above 0 by rounding, in nats."""

_LOG_PROBS = ("rollout_log_probs", "teacher_log_probs")
_PER_TOKEN = (*_LOG_PROBS, "opd_reverse_kl")


def _floats(value: Any) -> Array | None:
    """A list of numbers as fp64, ints among floats too."""
    if isinstance(value, list) and value and all(map(_real, value)):
        return np.array(value, dtype=np.float64)
    array = numbers(value)
    return None if array is None or array.ndim != 1 else array.astype(np.float64)


def _every(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """The numbers of a reward by name: it may be one, an array, or a mapping or list of them."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _every(item, f"{name}.{key}" if name else str(key))
    elif isinstance(value, list):
        for item in value:
            yield from _every(item, name)
    elif (array := numbers(value)) is not None:
        yield from ((name, float(number)) for number in array.reshape(-1))
    elif isinstance(value, int):
        try:
            yield name, float(value)
        except OverflowError:  # which no float is
            yield name, math.inf if value > 0 else -math.inf
    elif isinstance(value, (float, np.floating, np.integer, np.bool_)):
        yield name, float(value)


@rule(
    id="log-probs-finite",
    title="NaN or infinite log-probs of a rollout",
    severity="error",
    certainty="certain",
    why="a NaN reaches every parameter even from a masked token, and Miles' metrics hide it",
    fix="look at what the engine returns (-inf of a forbidden token, temperature 0) and at what appends it",
    sources=(NAN,),
)
def _finite(batch: Batch) -> Iterator[Found]:
    for name in _PER_TOKEN:
        for number, value in batch.column(name):
            array = _floats(value)
            if array is None:
                odd = [x for x in value if not _real(x)] if isinstance(value, list) else [value]
                yield noted(number, name, f"{name} is no list of numbers: it holds a {type(odd[0]).__name__}")
                continue
            bad = ~np.isfinite(array)
            if bad.any():
                at = int(bad.argmax())
                yield noted(
                    number, name, f"{name} is {array[at]} at response token {at}, {int(bad.sum())} are not finite"
                )


def _real(value: Any) -> bool:
    if isinstance(value, np.generic):
        value = value.item()
    small = isinstance(value, float) or (isinstance(value, int) and value.bit_length() < 1024)  # float() takes it
    return small and not isinstance(value, bool)


@rule(
    id="log-probs-positive",
    title="Log-probs above 0",
    severity="error",
    certainty="certain",
    why="a probability above 1: these are no log-probs",
    fix="look at what is appended: a reward, a sign, or a log-prob before the softmax",
    sources=(SAMPLE,),
)
def _positive(batch: Batch) -> Iterator[Found]:
    for name in _LOG_PROBS:
        for number, value in batch.column(name):
            log_probs = _floats(value)
            above = log_probs is not None and log_probs > _ROUNDING
            if log_probs is not None and np.any(above):
                at = int(np.argmax(above))
                yield noted(number, name, f"{name} is {log_probs[at]:.6g} at response token {at}")


@rule(
    id="column-in-some",
    title="A column that some samples have and others lack",
    severity="warning",
    certainty="certain",
    why="trainers ask the first sample whether there is such a column, and take it from all",
    fix="set the field in every sample, or in none",
    sources=(SAMPLE,),
)
def _partly(batch: Batch) -> Iterator[Found]:
    for name in ("rollout_log_probs", "teacher_log_probs", "rollout_routed_experts", "train_metadata"):
        have = {number for number, _ in batch.column(name)}
        if have and len(have) < len(batch.samples):
            first = next(number for number in range(len(batch.samples)) if number not in have)
            yield noted(first, name, f"{name} is in {len(have)} of {len(batch.samples)} samples, and not in this one")


@rule(
    id="log-probs-missing",
    title="A rollout without log-probs",
    severity="note",
    certainty="certain",
    why="no importance ratio and no mismatch of train and rollout can be computed",
    fix="return log-probs from the engine (return_logprob), and append them",
    sources=(SAMPLE,),
)
def _none(batch: TrainBatch) -> Iterator[Found]:
    if (
        batch.samples
        and any(s["response_length"] for s in batch.samples)
        and not any(True for _ in batch.column("rollout_log_probs"))
    ):
        yield noted(None, "rollout_log_probs", "no sample has rollout_log_probs")


@rule(
    id="mask-all-zero",
    title="Samples whose response is masked whole",
    severity="warning",
    certainty="certain",
    why="the sample takes its place in the batch and teaches nothing",
    fix="leave it out (--dynamic-sampling-filter-path), or set remove_sample on purpose",
    sources=(SAMPLE,),
)
def _mask_zero(batch: TrainBatch) -> Iterator[Found]:
    for number, value in batch.column("loss_mask"):
        mask = numbers(value)
        if mask is not None and mask.size and not mask.any() and not batch.samples[number]["remove_sample"]:
            yield noted(number, "loss_mask", f"all {mask.size} response tokens are masked")


@rule(
    id="tool-tokens",
    title="Trained tokens that no model sampled, by their log-probs of exactly 0",
    severity="warning",
    certainty="likely",
    why="tokens of a tool or of the environment are trained on as if the model had said them",
    fix="append them with trainable=False, which masks them",
    sources=("slime guide: Troubleshooting (tool responses included in loss)",),
)
def _tool_tokens(batch: TrainBatch) -> Iterator[Found]:
    for number, value in batch.column("rollout_log_probs"):
        log_probs = _floats(value)
        mask = batch.samples[number]["loss_mask"]
        trained = np.ones(0 if log_probs is None else len(log_probs)) if mask is None else _floats(mask)
        if batch.samples[number].get("remove_sample"):
            continue
        if log_probs is None or trained is None or len(trained) != len(log_probs):
            continue
        start, size = _longest((log_probs == 0) & (trained != 0))
        if size >= RUN:
            yield noted(
                number, "loss_mask",
                f"{size} tokens from response token {start} on are trained on with rollout_log_probs of exactly 0",
            )  # fmt: skip


def _longest(flags: Array) -> tuple[int, int]:
    """Start and length of the longest run of true entries."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], flags.astype(np.int8), [0]])))
    starts, ends = edges[::2], edges[1::2]
    if not len(starts):
        return 0, 0
    best = int((ends - starts).argmax())
    return int(starts[best]), int(ends[best] - starts[best])


@rule(
    id="reward-missing",
    title="Samples without a reward",
    severity="error",
    certainty="certain",
    why="there is no advantage without a reward",
    fix="look at the reward function, and at samples that were aborted before it",
    sources=("Miles guide: Debugging (rewards)",),
)
def _reward_missing(batch: TrainBatch) -> Iterator[Found]:
    for number, sample in enumerate(batch.samples):
        if sample["reward"] is None:
            yield noted(number, "reward", f"there is no reward (status {sample['status']})")
        elif next(_every(sample["reward"]), None) is None:
            yield noted(number, "reward", f"there is no number in the reward {said(sample['reward'])}")


@rule(
    id="reward-finite",
    title="NaN or infinite rewards",
    severity="error",
    certainty="certain",
    why="one NaN or infinity makes every advantage of its group one",
    fix="look at the reward function",
    sources=("Miles guide: Debugging (rewards)",),
)
def _reward_finite(batch: Batch) -> Iterator[Found]:
    for number, value in batch.column("reward"):
        for name, reward in _every(value):
            if not math.isfinite(reward):
                yield noted(number, "reward", f"the reward{f' {said(name)}' if name else ''} is {reward}")


@rule(
    id="reward-equal",
    title="A rollout whose rewards are all equal",
    severity="warning",
    certainty="certain",
    why="advantages relative to a group are all 0: nothing is learned",
    fix="look at --rm-type, --label-key and --reward-key",
    sources=(SAMPLE,),
)
def _reward_equal(batch: TrainBatch) -> Iterator[Found]:
    rewards = [value for _, value in batch.column("reward")]
    if len(rewards) > 1 and all(same(reward, rewards[0]) for reward in rewards):
        yield noted(None, "reward", f"all {len(rewards)} rewards are {said(rewards[0])}")


RULES = (_finite, _positive, _partly, _none, _mask_zero, _tool_tokens, _reward_missing, _reward_finite, _reward_equal)
