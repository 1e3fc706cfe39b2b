"""A gradient norm of exactly 0."""

from __future__ import annotations

from collections.abc import Iterator

from repro.doctor.artefacts.kinds import Series
from repro.doctor.facts.curves import curve
from repro.doctor.rule import Found, Rule

__all__ = ["RULE"]


def _check(series: Series) -> Iterator[Found]:
    norms = curve(series, "step", "grad_norm")
    zero = [point for point in norms if point.value == 0.0]
    if zero:
        yield Found(
            f"the gradient norm is exactly 0 at {len(zero)} of {len(norms)} updates: nothing was learned there",
            series.where("step", zero[0].number, "grad_norm", 0.0),
        )


RULE = Rule(
    id="gradient-zero",
    title="A gradient norm of exactly 0",
    inputs=(Series,),
    severity="warning",
    certainty="certain",
    why="the update changes nothing: all advantages are 0 (every group has one reward), or the loss mask is",
    cure="look at rewards by group (`reward-constant`) and at the loss masks of the dump; "
    "--dynamic-sampling-filter-path leaves out groups with one reward",
    sources=("slime guide: Debugging", "THUDM/slime@624b824a8 slime/ray/rollout.py:609"),
    check=_check,
)  # fmt: skip
