"""The trainer's log-probs, one token off those of the rollout."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from repro.doctor.artefacts.kinds import TrainStep
from repro.doctor.facts.train_columns import Column, Floats, columns
from repro.doctor.rule import Found, Rule, Where

__all__ = ["RULE"]

_ENOUGH = 64
"""Pairs of tokens from which a correlation tells anything."""
_NEAR = 0.98
_FAR = 0.8
_COLUMNS = ("log_probs", "old_log_probs", "ref_log_probs")


def _check(step: TrainStep) -> Iterator[Found]:
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
                    "correlation is "
                    f"{there:.3f} shifted by one, and {here:.3f} as they stand",
                    Where(str(step.path), item=column.name, value=f"shift {shift}"),
                )
                break


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


RULE = Rule(
    id="train-log-probs-misaligned",
    title="Log-probs of the trainer that are shifted by one token",
    inputs=(TrainStep,),
    severity="error",
    certainty="likely",
    why="every importance ratio and every KL is of two different tokens: the gradient is noise",
    cure="the log-prob of token t is in the logits of token t-1: look at the shift where responses are cut out of "
    "the packed "
    "sequence, and at a BOS that one side adds",
    sources=("Miles guide: Debugging (KL > 1, configuration error)", "radixark/miles#2215 (double shift of labels)"),
    check=_check,
)
