"""The first gradient norm where a rollout is one update."""

from __future__ import annotations

import math
from collections.abc import Iterator
from statistics import median

from repro.doctor.artefacts.kinds import Launch, Series
from repro.doctor.facts.curves import curve, is_moe, number, setting, updates_of
from repro.doctor.rule import Found, Rule

__all__ = ["RULE"]

_TIMES = 10.0
_CLIP = 1.0
_NEXT = 10


def _check(series: Series, launch: Launch | None) -> Iterator[Found]:
    norms = [point for point in curve(series, "step", "grad_norm") if math.isfinite(point.value)]
    if not norms or norms[0].number != 0 or updates_of(launch, series) != 1:
        return
    first, others = norms[0].value, [point.value for point in norms[1 : 1 + _NEXT]]
    clip = number(setting(launch, series, "--clip-grad"))
    clip = _CLIP if clip is None or clip <= 0 else clip
    usual = median(others) if others else 0.0
    if first <= _TIMES * max(usual, clip if not others else 0.0) or first <= clip:
        return
    beside = (
        f"the next {len(others)} have {usual:.3g} in the middle" if others else f"gradients are clipped at {clip:g}"
    )
    moe = is_moe(launch, series) and not (launch is not None and launch.has("--moe-permute-fusion"))
    yield Found(
        f"the gradient norm of update 0 is {first:.4g}, and {beside}",
        series.where("step", 0, "grad_norm", first),
        cure="add --moe-permute-fusion, which MoE models need; then " + RULE.cure if moe else "",
    )


RULE = Rule(
    id="step1-grad-norm",
    title="A large gradient norm of update 0 where a rollout is one update",
    inputs=(Series,),
    uses=(Launch,),
    severity="warning",
    certainty="likely",
    why="with one update a rollout, the ratio is 1 and the KL term's gradient is 0, so only advantages are left, whose "
    "mean is 0: a first norm above the clip and ten times the next ones is an error of a kernel, of the weights or of "
    "the reward, and it turns the first update into one of that error's direction",
    cure="check the rewards (is --label-key the column with the answers, --reward-key the right one?), the loss mask, "
    "and known bugs of the installed Megatron and Transformer Engine; MoE models need --moe-permute-fusion",
    sources=("Miles guide: Debugging", "slime guide: Debugging", "Relax guide: Debugging"),
    check=_check,
)  # fmt: skip
