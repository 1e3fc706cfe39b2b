"""A rollout of which no group has two rewards."""

from __future__ import annotations

from collections.abc import Iterator

from repro.doctor.artefacts.kinds import Launch, Rollout
from repro.doctor.facts.rewards import Group, began, groups_of
from repro.doctor.rule import Found, Rule, Where
from repro_golden.dumps.rollout.files import RolloutDump

__all__ = ["RULE"]

_BY_GROUP = (None, "grpo", "gspo", "cispo", "reinforce_plus_plus_baseline")
"""Estimators that take the mean of the group off; None is the default, grpo."""


def _check(rollout: Rollout, launch: Launch | None) -> Iterator[Found]:
    key = launch.value("--reward-key") if launch else None
    estimator = launch.value("--advantage-estimator") if launch else None

    def constant(dump: RolloutDump) -> list[Group] | None:
        groups = [group for group in groups_of(dump, key) or () if len(group.rewards) > 1]
        if len(groups) < 2 or any(len(set(group.rewards)) > 1 for group in groups):
            return None
        one = len({group.rewards[0] for group in groups}) == 1
        return groups if one or estimator in _BY_GROUP else None

    if rollout.dump.evaluation or (groups := began(rollout, constant)) is None:
        return
    values = sorted({group.rewards[0] for group in groups})
    count = sum(len(group.rewards) for group in groups)
    what = (
        f"all {count} rewards are {values[0]:g}" if len(values) == 1 else f"each of {len(groups)} groups has one reward"
    )
    yield Found(
        f"{what}: every advantage is 0",
        Where(str(rollout.path), item="reward", value=", ".join(f"{value:g}" for value in values[:6])),
    )


RULE = Rule(
    id="reward-constant",
    title="Groups of a rollout in which all rewards are the same",
    inputs=(Rollout,),
    uses=(Launch,),
    severity="warning",
    certainty="certain",
    why="advantages are relative to the group, so they are all 0 and nothing is learned from the rollout",
    cure="test the reward on answers known to be right and wrong; check --rm-type, --label-key and --reward-key, and "
    "whether the prompts are far too easy or too hard",
    sources=("Miles guide: Debugging", "Relax guide: Debugging", "THUDM/slime@624b824a8 slime/ray/rollout.py:609"),
    check=_check,
)  # fmt: skip
