"""Gradient norms that are NaN or infinite."""

from __future__ import annotations

import math
from collections.abc import Iterator

from repro.doctor.artefacts.kinds import Launch, Series
from repro.doctor.facts.curves import curve, setting
from repro.doctor.rule import Found, Rule

__all__ = ["RULE"]


def _check(series: Series, launch: Launch | None) -> Iterator[Found]:
    for metric in ("grad_norm", "critic-grad_norm"):
        norms = curve(series, "step", metric)
        bad = [point for point in norms if not math.isfinite(point.value)]
        if bad:
            fp8 = setting(launch, series, "--fp8-format") or setting(launch, series, "--fp8")
            yield Found(
                f"{metric} is {bad[0].value} at update {bad[0].number}, and not finite at {len(bad)} of {len(norms)}",
                series.where("step", bad[0].number, metric, bad[0].value),
                cure=f"activations may overflow in FP8 ({fp8}): try once without it; then {RULE.cure}" if fp8 else "",
            )


RULE = Rule(
    id="gradient-not-finite",
    title="Gradient norms that are NaN or infinite",
    inputs=(Series,),
    uses=(Launch,),
    severity="error",
    certainty="certain",
    why="the update is lost, or makes the weights NaN, after which every rollout is garbage",
    cure="check the chat template of the prompts and empty responses, and overflow of activations in FP8; "
    "--no-check-for-nan-in-loss-and-grad skips such updates for the time being, then look for the sample in the dumps "
    "of that rollout",
    sources=("Miles guide: Debugging", "Miles FAQ"),
    check=_check,
)  # fmt: skip
