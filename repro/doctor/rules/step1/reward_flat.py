"""A mean reward that never changes."""

from __future__ import annotations

from collections.abc import Iterator

from repro.doctor.artefacts.kinds import Series
from repro.doctor.facts.curves import curve
from repro.doctor.rule import Found, Rule

__all__ = ["RULE"]

_LEAST = 4


def _check(series: Series) -> Iterator[Found]:
    points = curve(series, "rollout", "raw_reward")
    values = {point.value for point in points}
    if len(points) >= _LEAST and len(values) == 1 and points[0].value == points[0].value:
        yield Found(
            f"the mean reward is exactly {points[0].value:g} in all {len(points)} rollouts",
            series.where("rollout", points[0].number, "raw_reward", points[0].value),
        )


RULE = Rule(
    id="reward-flat",
    title="A mean reward that is the same in every rollout",
    inputs=(Series,),
    severity="warning",
    certainty="likely",
    why="a reward that does not depend on the answers teaches nothing",
    cure="test the reward on answers known to be right and wrong; check --rm-type, --label-key and --reward-key",
    sources=("Miles guide: Debugging", "Relax guide: Debugging"),
    check=_check,
)  # fmt: skip
