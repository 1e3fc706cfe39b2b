"""A model with experts whose reward collapses, or whose trainer and engine drift apart, after a while."""

from __future__ import annotations

import math
from collections.abc import Iterator
from statistics import median

from repro.doctor.artefacts.kinds import Launch, Series
from repro.doctor.facts.curves import curve, falls, is_moe, replays_routing
from repro.doctor.rule import Found, Rule

__all__ = ["RULE"]

_AFTER = 10
_TIMES = 5.0
_GAP = 0.1
_METRIC = "train_rollout_logprob_abs_diff"


def _check(series: Series, launch: Launch | None) -> Iterator[Found]:
    if not is_moe(launch, series):
        return
    replayed = replays_routing(launch, series)
    state = "routing is replayed (R3)" if replayed else "R3 is not on"
    cure = (
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
            cure=cure,
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
                cure=cure,
            )


RULE = Rule(
    id="moe-collapse",
    title="A model with experts whose reward, or agreement of trainer and engine, breaks down after tens of steps",
    inputs=(Series,),
    uses=(Launch,),
    severity="warning",
    certainty="likely",
    why="trainer and engine send tokens to other experts, so the gradient is of a model that did not sample",
    cure="add --use-rollout-routing-replay (R3), and record again from a checkpoint before the collapse",
    sources=("Miles guide: Debugging",),
    check=_check,
)  # fmt: skip
