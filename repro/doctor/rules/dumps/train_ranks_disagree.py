"""Ranks that hold the same samples, and different numbers of them."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from repro.doctor.artefacts.kinds import TrainStep
from repro.doctor.facts.train_columns import Column, columns, sample_name
from repro.doctor.rule import Found, Rule, Where

__all__ = ["RULE"]


def _check(step: TrainStep) -> Iterator[Found]:
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


def _first(a: Column, b: Column) -> tuple[int | None, str]:
    for place, (x, y) in enumerate(zip(a.values, b.values, strict=True)):
        if x is None or y is None or x.shape != y.shape:
            continue
        differ = ~((x == y) | (np.isnan(x) & np.isnan(y)))
        if differ.any():
            at = int(differ.argmax())
            return place, f": {x[at]:.9g} and {y[at]:.9g} at token {at}"
    return None, ""


RULE = Rule(
    id="train-ranks-disagree",
    title="Ranks that should hold the same numbers and do not",
    inputs=(TrainStep,),
    severity="warning",
    certainty="likely",
    why="replicas that compute different numbers from the same samples drift apart, and checkpoints hold those of "
    "one of them",
    cure="look for a kernel that is not deterministic, a parameter that is not synchronised, and another seed on one "
    "rank",
    sources=("Miles: event log, cross-replica equality (radixark/miles@31f1ca961 miles/utils)",),
    check=_check,
)
