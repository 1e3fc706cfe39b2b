"""Losses that leave their level and stay far above it."""

from __future__ import annotations

from collections.abc import Iterator

from repro.doctor.artefacts.kinds import Launch, Series
from repro.doctor.facts.curves import Point, curve, rises, setting, switched_on
from repro.doctor.rule import Found, Rule

__all__ = ["RULE"]

_METRICS = ("loss", "pg_loss", "kl_loss")
_LEAST = 1.0
"""GRPO's loss is near 0 whatever happens: a multiple of that alone says nothing."""
_LEAST_FIRST = 10.0


def _check(series: Series, launch: Launch | None) -> Iterator[Found]:
    found = []
    for metric in _METRICS:
        sizes = [Point(point.number, abs(point.value)) for point in curve(series, "step", metric)]
        rise = rises(sizes, least=_LEAST, least_first=_LEAST_FIRST)
        if rise is not None:
            found.append((rise, metric))
    if not found:
        return
    rise, metric = min(found, key=lambda one: one[0].at.number)
    others = [name for _, name in found if name != metric]
    also = f"; so does {' and '.join(others)}" if others else ""
    fp16 = switched_on(setting(launch, series, "--fp16"))
    yield Found(
        f"{metric} leaves its level of {rise.level:.3g} (absolute) at update {rise.at.number} and reaches "
        f"{rise.top:.3g}{also}",
        series.where("step", rise.at.number, metric, series.steps[rise.at.number][metric]),
        cure=f"train in bf16 instead of fp16 (drop --fp16); then {RULE.cure}" if fp16 else "",
    )


RULE = Rule(
    id="loss-explodes",
    title="Loss, pg_loss or kl_loss ten times its level (of the first updates, a hundred) for three updates in a row",
    inputs=(Series,),
    uses=(Launch,),
    severity="warning",
    certainty="likely",
    why="the policy leaves what the rollouts were sampled with, and a loss that explodes ends in NaN",
    cure="lower --lr (1e-6), keep --clip-grad 1.0, look in the data of the rollouts before it for empty prompts and "
    "responses and for rewards far from the others, train in bf16",
    sources=("slime guide: Troubleshooting",),
    check=_check,
)  # fmt: skip
