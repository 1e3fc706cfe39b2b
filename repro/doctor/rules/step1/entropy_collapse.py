"""Entropy of the policy that fell to nothing."""

from __future__ import annotations

import math
from collections.abc import Iterator
from statistics import median

from repro.doctor.artefacts.kinds import Series
from repro.doctor.facts.curves import Kind, curve
from repro.doctor.rule import Found, Rule

__all__ = ["RULE"]

_SHARE = 0.1
_LOW = 0.05
"""Nats per token; below it two samples of one prompt are hardly ever two."""
_LEAST = 6
_PLACES: tuple[tuple[Kind, str], ...] = (("step", "entropy_loss"), ("rollout", "entropy"))


def _check(series: Series) -> Iterator[Found]:
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


RULE = Rule(
    id="entropy-collapse",
    title="The policy's entropy fell below a tenth of what it was, and below 0.05 nats",
    inputs=(Series,),
    severity="warning",
    certainty="likely",
    why="all samples of a prompt become one, groups have one reward, and nothing more is learned",
    cure="raise --entropy-coef or --eps-clip-high (0.28), and look whether the reward can be had by one fixed answer",
    sources=("slime guide: Troubleshooting", "Relax guide: Debugging"),
    check=_check,
)  # fmt: skip
