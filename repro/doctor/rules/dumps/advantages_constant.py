"""Advantages that are the same for all samples of a prompt."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

import numpy as np

from repro.doctor.artefacts.kinds import TrainStep
from repro.doctor.facts.train_columns import Floats, columns, masks
from repro.doctor.rule import Found, Rule, Where

__all__ = ["RULE"]


def _check(step: TrainStep) -> Iterator[Found]:
    advantages = next(columns(step, "advantages"), None)
    if advantages is None:
        return
    kept = masks(step)
    own: dict[int, set[float]] = {}
    for place, values in enumerate(advantages.values):
        mask = kept[place]
        if values is None or (mask is not None and len(mask) != len(values)):
            continue
        trained = values if mask is None else values[mask]
        if len(trained):
            own[place] = set((trained + 0.0).tolist())  # -0.0 becomes 0.0
    groups = [[i for i in group if i in own] for group in _groups(step).values()]
    groups = [group for group in groups if len(group) > 1]
    if not groups:
        return
    dead = [group for group in groups if len(set().union(*(own[i] for i in group))) == 1]
    rewards = step.joined.whole.get("raw_reward")
    lost = [group for group in dead if _differ(rewards, group, len(step.joined.indices))]
    where = Where(str(step.path), item="advantages")
    if len(dead) == len(groups):
        level = next(iter(own[dead[0][0]]))
        yield Found(
            f"rollout {step.rollout_id}: in each of its {len(groups)} groups all advantages are equal ({level:g} in "
            "the first)",
            Where(where.path, item=where.item, value=f"{level:g}"),
        )
    elif lost:
        yield Found(
            f"rollout {step.rollout_id}: in {len(lost)} of {len(groups)} groups the rewards differ and all "
            "advantages are equal",
            where,
        )
    elif 2 * len(dead) >= len(groups):
        yield Found(
            f"rollout {step.rollout_id}: in {len(dead)} of {len(groups)} groups all advantages are equal: their "
            "samples earned "
            "one reward each and teach nothing",
            where,
            severity="note",
            cure="--dynamic-sampling-filter-path samples other prompts in their place",
        )


def _groups(step: TrainStep) -> dict[bytes, list[int]]:
    """Samples that were sampled from the same prompt, by its tokens."""
    tokens, lengths = next(columns(step, "tokens"), None), next(columns(step, "response_lengths"), None)
    found: dict[bytes, list[int]] = defaultdict(list)
    if tokens is None or lengths is None:
        return found
    for place, (ids, length) in enumerate(zip(tokens.values, lengths.values, strict=True)):
        if ids is not None and length is not None and len(length) == 1 and 0 <= length[0] <= len(ids):
            found[ids[: len(ids) - int(length[0])].tobytes()].append(place)
    return found


def _differ(rewards: Sequence[object] | None, group: Sequence[int], count: int) -> bool:
    """Whether the samples of a group earned several rewards, where the dump says which is whose."""
    if rewards is None or len(rewards) != count:
        return False
    own: Floats = np.array([value for i in group if isinstance(value := rewards[i], float | int)], dtype=np.float64)
    return len(own) == len(group) and len(np.unique(own)) > 1


RULE = Rule(
    id="advantages-constant",
    title="Groups whose advantages are all equal",
    inputs=(TrainStep,),
    severity="warning",
    certainty="certain",
    why="advantages relative to a group that are all equal are 0: the rollout gives no gradient but that of KL and "
    "entropy",
    cure="look at the rewards (--rm-type, --label-key, --reward-key), and at --n-samples-per-prompt, which must be "
    "above 1; "
    "prompts that are too easy or too hard are filtered by --dynamic-sampling-filter-path",
    sources=("Miles guide: Debugging (rewards from the right key)",),
    check=_check,
)
