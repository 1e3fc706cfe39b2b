"""Time that a trainer waits for data."""

from __future__ import annotations

import math
from collections.abc import Iterator
from statistics import median

from repro.doctor.artefacts.kinds import Launch, Log
from repro.doctor.rule import Found, Rule

__all__ = ["RULE"]

_PREPARING, _WAITING = 0.2, 0.9
_SKIPPED = 1
"""Rollouts at the beginning that compile and warm up."""


def _check(log: Log, launch: Launch | None) -> Iterator[Found]:
    preparing, waiting = [], []
    for number, metrics in sorted(log.series.rollouts.items())[_SKIPPED:]:
        step, data = metrics.get("perf/step_time", math.nan), metrics.get("perf/data_preprocess_time", math.nan)
        ratio = metrics.get("perf/wait_time_ratio", math.nan)
        if step > 0 and math.isfinite(data / step):
            preparing.append((data / step, number))
        if math.isfinite(ratio):
            waiting.append((ratio, number))
    for shares, bound, name, what in (
        (preparing, _PREPARING, "perf/data_preprocess_time", "goes into preparing data"),
        (waiting, _WAITING, "perf/wait_time_ratio", "is waited for rollouts"),
    ):
        share = median(value for value, _ in shares) if shares else 0.0
        if len(shares) >= 2 and share > bound:
            number = shares[0][1]
            yield Found(
                f"{100 * share:.0f}% of the trainer's time {what} (median of {len(shares)} rollouts)",
                log.series.where("perf", number, name, shares[0][0]),
                severity="note" if name == "perf/wait_time_ratio" else None,
                cure="" if name != "perf/wait_time_ratio" else _cure(launch),
            )


def _cure(launch: Launch | None) -> str:
    if launch is not None and launch.asynchronous:
        return "give rollouts more GPUs (--rollout-num-gpus): the trainer is faster than they are"
    return "the trainer idles while engines sample: train_async.py overlaps both, or give rollouts more GPUs"


RULE = Rule(
    id="data-wait",
    title="A trainer that waits for its data",
    inputs=(Log,),
    uses=(Launch,),
    severity="warning",
    certainty="likely",
    why="GPUs idle meanwhile",
    cure="tokenize the data beforehand, and keep it on a local disk",
    sources=(
        "slime guide: Troubleshooting",
        "THUDM/slime@624b824a8 slime/observability/train_metric_utils.py:395",
    ),
    check=_check,
    phrases=(),
)
