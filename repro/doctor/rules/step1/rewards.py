"""Rewards of the first rollouts."""

from __future__ import annotations

from collections.abc import Iterator

from repro.doctor.artefacts.kinds import Launch, Rollout, Series
from repro.doctor.facts.curves import curve, falls
from repro.doctor.facts.samples.texts import began, groups_of, reward_of
from repro.doctor.facts.sources import SLIME
from repro_golden.base.checks import Found, Where, rule
from repro_golden.dumps.archive.bounds import shown
from repro_golden.dumps.rollout.files import RolloutDump


def _beside(series: Series, since: int) -> str:
    """What else changed: the share of responses cut at the limit, and their length."""
    changes = []
    for metric, name in (("truncated", "truncated responses"), ("response_lengths", "response length")):
        points = curve(series, "rollout", metric)
        before = [p.value for p in points if p.number < since]
        after = [p.value for p in points if p.number >= since]
        if before and after and abs(after[-1] - before[0]) > 0.3 * max(abs(before[0]), 0.1):
            changes.append(f"{name} {before[0]:.3g} before, {after[-1]:.3g} now")
    return "; " + ", ".join(changes) if changes else ""


@rule(
    title="The mean reward falls back to its floor",
    severity="warning",
    certainty="likely",
    why="the policy has left what it could do, and what it writes now rewards nothing that it could learn from",
    fix="go back to a checkpoint before it; raise --kl-loss-coef (0.01), --n-samples-per-prompt (4 and more), lower "
    "--lr; test the reward function by itself; read the rollout dumps around it",
    sources=("slime guide: Troubleshooting", "Relax guide: Debugging"),
)
def _reward_collapse(series: Series) -> Iterator[Found]:
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


_BY_GROUP = (None, "grpo", "gspo", "cispo", "reinforce_plus_plus_baseline")
"""Estimators that take the mean of the group off; None is the default, grpo."""


@rule(
    title="Groups of a rollout in which all rewards are the same",
    severity="warning",
    certainty="certain",
    why="advantages are relative to the group, so they are all 0 and nothing is learned from the rollout",
    fix="test the reward on answers known to be right and wrong; check --rm-type, --label-key and --reward-key, and "
    "whether the prompts are far too easy or too hard",
    sources=("Miles guide: Debugging", "Relax guide: Debugging", f"{SLIME} slime/ray/rollout.py:609"),
)
def _reward_constant(rollout: Rollout, launch: Launch | None) -> Iterator[Found]:
    key = launch.value("--reward-key") if launch else None
    estimator = launch.value("--advantage-estimator") if launch else None

    def constant(dump: RolloutDump) -> list[list[float]] | None:
        groups = [rewards for rewards in groups_of(dump, key) if len(rewards) > 1]
        if len(groups) < 2 or any(len(set(rewards)) > 1 for rewards in groups):
            return None
        same = len({rewards[0] for rewards in groups}) == 1
        return groups if same or estimator in _BY_GROUP else None

    if rollout.dump.evaluation or (groups := began(rollout, constant)) is None:
        return
    values = sorted({rewards[0] for rewards in groups})
    count = sum(map(len, groups))
    what = (
        f"all {count} rewards are {values[0]:g}" if len(values) == 1 else f"each of {len(groups)} groups has one reward"
    )
    yield Found(
        f"{what}: every advantage is 0",
        Where(str(rollout.path), item="reward", value=", ".join(f"{value:g}" for value in values[:6])),
    )


_LEAST = 4


@rule(
    title="A mean reward that is the same in every rollout",
    severity="warning",
    certainty="likely",
    why="a reward that does not depend on the answers teaches nothing",
    fix="test the reward on answers known to be right and wrong; check --rm-type, --label-key and --reward-key",
    sources=("Miles guide: Debugging", "Relax guide: Debugging"),
)
def _reward_flat(series: Series) -> Iterator[Found]:
    points = curve(series, "rollout", "raw_reward")
    values = {point.value for point in points}
    if len(points) >= _LEAST and len(values) == 1 and points[0].value == points[0].value:
        yield Found(
            f"the mean reward is exactly {points[0].value:g} in all {len(points)} rollouts",
            series.where("rollout", points[0].number, "raw_reward", points[0].value),
        )


_OWN = ("--custom-reward-post-process-path", "--custom-convert-samples-to-train-data-path")
"""With these the user's code takes the rewards, whatever they are."""


def _dicts(rollout: Rollout, dump: RolloutDump, launch: Launch | None) -> Found | None:
    """Whether the trainer can take a number from each reward."""
    flag = "--reward-key"
    if dump.evaluation and launch is not None and launch.has("--eval-reward-key"):
        flag = "--eval-reward-key"
    key = launch.value(flag) if launch else None
    if launch is not None and launch.has(flag) and key is None:
        return None  # a shell variable
    for place, sample in enumerate(dump.samples):
        reward = sample.get("reward")
        where = Where(str(rollout.path), item=f"sample {place} reward", value=shown(reward))
        if isinstance(reward, dict):
            keys = ", ".join(shown(name) for name in list(reward)[:8])
            if launch is None:
                return Found(f"rewards are dicts of {keys}: the launch must say which with {flag}", where, "note")
            if key is None:
                fix = f"add {flag} with one of {keys}"
                return Found(f"rewards are dicts of {keys}, and there is no {flag}", where, fix=fix)
            if key not in reward:
                return Found(f"{flag} is {key}, and the reward has {keys}", where, fix=f"set {flag} to one of {keys}")
        elif key is not None and isinstance(reward, (int, float)):
            return Found(f"{flag} is {key}, and rewards are plain numbers", where, fix=f"take {flag} away")
    return None


def _labels(rollout: Rollout, dump: RolloutDump) -> Found | None:
    """Whether nothing was right because there was nothing to compare with."""
    rewards = [reward_of(sample, None) for sample in dump.samples]
    if dump.evaluation or len(rewards) < 4 or any(reward is None or reward > 0 for reward in rewards):
        return None
    if len(set(rewards)) != 1 or any(_labelled(sample.get("label")) for sample in dump.samples):
        return None
    return Found(
        f"all {len(rewards)} rewards are {rewards[0]:g}, and no sample has a label to be compared with",
        Where(str(rollout.path), item="label", value="None"),
        "warning",
        "likely",
        "set --label-key to the column of the answers (a typo in it, or leaving it out, does this)",
    )


def _labelled(label: object) -> bool:
    return label is not None and not (isinstance(label, str) and not label)


@rule(
    title="Rewards that are no numbers, or dicts that --reward-key does not open; labels that are missing",
    severity="error",
    certainty="certain",
    why="the trainer takes the reward for a number: it fails on the first rollout, or learns from zeros",
    fix="set --reward-key to the entry of the reward, --label-key to the column of the answers",
    sources=("Miles guide: Debugging", f"{SLIME} slime/utils/types.py:247"),
)
def _reward_key_data(rollout: Rollout, launch: Launch | None) -> Iterator[Found]:
    if launch is not None and launch.has(*_OWN):
        return

    def seen(dump: RolloutDump) -> Found | None:
        return _dicts(rollout, dump, launch) or _labels(rollout, dump)

    finding = began(rollout, seen)
    if finding is not None:
        yield finding
