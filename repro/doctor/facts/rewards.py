"""Rewards of a rollout dump as the trainer takes them, and by group."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

from repro.doctor.artefacts.kinds import Rollout
from repro_golden.dumps.rollout.files import RolloutDump
from repro_golden.dumps.run.records import number_of

__all__ = ["Group", "began", "groups_of", "reward_of"]

T = TypeVar("T")


class Group(NamedTuple):
    """The samples of one prompt: the group's index, its samples' places, and their rewards."""

    index: Any
    places: tuple[int, ...]
    rewards: tuple[float, ...]


def reward_of(sample: Any, key: str | None) -> float | None:
    """A sample's reward as a number.

    Args:
        sample: Of a dump.
        key: ``--reward-key``; without one, a dict's only entry is its reward.

    Returns:
        None where there is none, or no finite one.
    """
    value = sample.get("reward")
    if isinstance(value, dict):
        value = value.get(key) if key is not None else next(iter(value.values())) if len(value) == 1 else None
    found = number_of(value)
    return found if found is not None and math.isfinite(found) else None


def groups_of(dump: RolloutDump, key: str | None) -> list[Group] | None:
    """The groups of a rollout in the order in which they begin; None where a sample has no group or no reward."""
    found: dict[Any, list[tuple[int, float]]] = {}
    for place, sample in enumerate(dump.samples):
        index, reward = sample.get("group_index"), reward_of(sample, key)
        if index is None or reward is None:
            return None
        found.setdefault(int(index), []).append((place, reward))
    return [
        Group(index, tuple(place for place, _ in own), tuple(reward for _, reward in own))
        for index, own in found.items()
    ]


def began(rollout: Rollout, seen: Callable[[RolloutDump], T | None]) -> T | None:
    """What a check sees in a rollout and did not see in the one before: a thing that stays is said once."""
    found = seen(rollout.dump)
    return None if found is None or (rollout.before is not None and seen(rollout.before) is not None) else found
