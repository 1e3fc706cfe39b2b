"""NaN and infinity in what a trainer dumped of training."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from repro.doctor.artefacts.kinds import TrainStep
from repro.doctor.facts.train_columns import columns, masks, sample_name
from repro.doctor.rule import Found, Rule, Where

__all__ = ["RULE", "SOURCE", "NotFinite", "not_finite", "text_of", "where_of"]

_TRAINED = (
    "log_probs", "rollout_log_probs", "ref_log_probs", "old_log_probs", "advantages", "returns", "values", "rewards",
    "teacher_log_probs",
)  # fmt: skip
"""Columns that enter the loss."""


class NotFinite(NamedTuple):
    """A column with values that are not finite.

    Attributes:
        column: Its name.
        values: How many of them are not finite.
        samples: Of how many samples.
        place: The first of these samples.
        token: The first such value in it, as a token of its response.
        value: That value.
        masked: Whether that token is masked.
    """

    column: str
    values: int
    samples: int
    place: int
    token: int
    value: float
    masked: bool


def not_finite(step: TrainStep) -> list[NotFinite]:
    """Columns with values that are not finite, each with the first of them."""
    kept = masks(step)
    found: dict[str, NotFinite] = {}
    for column in columns(step):
        each = [(place, values) for place, values in enumerate(column.values) if values is not None]
        wrong = [(place, values, odd) for place, values in each if (odd := ~np.isfinite(values)).any()]
        if not wrong or column.name in found:
            continue
        place, values, odd = wrong[0]
        token = int(odd.argmax())
        mask = kept[place]
        masked = mask is not None and len(mask) == len(values) and not mask[token]
        count = sum(int(one.sum()) for _, _, one in wrong)
        found[column.name] = NotFinite(column.name, count, len(wrong), place, token, float(values[token]), masked)
    return list(found.values())


def where_of(step: TrainStep, bad: NotFinite) -> Where:
    """Where the first value of a column that is not finite stands."""
    return Where(
        str(step.path), item=f"{bad.column} of {sample_name(step, bad.place)}", value=f"{bad.value} at {bad.token}"
    )


def text_of(step: TrainStep, bad: NotFinite) -> str:
    """What is said of a column that is not finite."""
    masked = ", a masked token" if bad.masked else ""
    return (
        f"{bad.column} of rollout {step.rollout_id} holds {bad.values} values that are not finite, in {bad.samples} "
        "samples: "
        f"{bad.value} at token {bad.token} of {sample_name(step, bad.place)}{masked}"
    )


def _check(step: TrainStep) -> Iterator[Found]:
    for bad in not_finite(step):
        yield Found(text_of(step, bad), where_of(step, bad), severity=None if bad.column in _TRAINED else "warning")


SOURCE = "radixark/miles@31f1ca961 miles/backends/training_utils/loss_hub/losses.py:198-357 (nan_to_num)"

RULE = Rule(
    id="dump-not-finite",
    title="NaN or infinity in the columns of a train dump",
    inputs=(TrainStep,),
    severity="error",
    certainty="certain",
    why="a NaN in one token reaches every parameter with the next update, even from a masked token (NaN x 0 is NaN)",
    cure="look at that sample: -inf of a forbidden token, a log-prob of an empty softmax, a reward that is none, "
    "a group "
    "whose standard deviation is 0",
    sources=("Miles guide: Debugging (gradient NaN/Inf)", SOURCE),
    check=_check,
)
