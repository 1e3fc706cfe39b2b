"""A reward that rose or stood, and then fell to its floor for good."""

from __future__ import annotations

from collections.abc import Iterator

from repro.doctor.artefacts.kinds import Series
from repro.doctor.facts.curves import curve, falls
from repro.doctor.rule import Found, Rule

__all__ = ["RULE"]


def _check(series: Series) -> Iterator[Found]:
    points = curve(series, "rollout", "raw_reward")
    fall = falls(points)
    if fall is None:
        return
    value = next(point.value for point in points if point.number == fall.since)
    yield Found(
        f"the mean reward falls from {fall.level:.3g} to {fall.now:.3g}, and stays there from rollout {fall.since} on"
        + _beside(series, fall.since),
        series.where("rollout", fall.since, "raw_reward", value),
    )


def _beside(series: Series, since: int) -> str:
    """What else changed: the share of responses cut at the limit, and their length."""
    said = []
    for metric, name in (("truncated", "truncated responses"), ("response_lengths", "response length")):
        points = curve(series, "rollout", metric)
        before = [p.value for p in points if p.number < since]
        after = [p.value for p in points if p.number >= since]
        if before and after and abs(after[-1] - before[0]) > 0.3 * max(abs(before[0]), 0.1):
            said.append(f"{name} {before[0]:.3g} before, {after[-1]:.3g} now")
    return "; " + ", ".join(said) if said else ""


RULE = Rule(
    id="reward-collapse",
    title="The mean reward falls back to its floor",
    inputs=(Series,),
    severity="warning",
    certainty="likely",
    why="the policy has left what it could do, and what it writes now rewards nothing that it could learn from",
    cure="go back to a checkpoint before it; raise --kl-loss-coef (0.01), --n-samples-per-prompt (4 and more), lower "
    "--lr; test the reward function by itself; read the rollout dumps around it",
    sources=("slime guide: Troubleshooting", "Relax guide: Debugging"),
    check=_check,
)  # fmt: skip
