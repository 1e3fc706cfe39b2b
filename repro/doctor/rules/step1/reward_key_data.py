"""Rewards that are dicts, the key that picks the number, and labels that are not there."""

from __future__ import annotations

from collections.abc import Iterator

from repro.doctor.artefacts.kinds import Launch, Rollout
from repro.doctor.facts.rewards import began, reward_of
from repro.doctor.rule import Found, Rule, Where
from repro_golden.dumps.archive.bounds import shown
from repro_golden.dumps.rollout.files import RolloutDump

__all__ = ["RULE"]

_OWN = ("--custom-reward-post-process-path", "--custom-convert-samples-to-train-data-path")
"""With these the user's code takes the rewards, whatever they are."""


def _check(rollout: Rollout, launch: Launch | None) -> Iterator[Found]:
    if launch is not None and any(launch.has(flag) for flag in _OWN):
        return

    def seen(dump: RolloutDump) -> Found | None:
        return _dicts(rollout, dump, launch) or _labels(rollout, dump)

    found = began(rollout, seen)
    if found is not None:
        yield found


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
                cure = f"add {flag} with one of {keys}"
                return Found(f"rewards are dicts of {keys}, and there is no {flag}", where, cure=cure)
            if key not in reward:
                return Found(f"{flag} is {key}, and the reward has {keys}", where, cure=f"set {flag} to one of {keys}")
        elif key is not None and isinstance(reward, (int, float)):
            return Found(f"{flag} is {key}, and rewards are plain numbers", where, cure=f"take {flag} away")
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


RULE = Rule(
    id="reward-key-data",
    title="Rewards that are no numbers, or dicts that --reward-key does not open; labels that are missing",
    inputs=(Rollout,),
    uses=(Launch,),
    severity="error",
    certainty="certain",
    why="the trainer takes the reward for a number: it fails on the first rollout, or learns from zeros",
    cure="set --reward-key to the entry of the reward, --label-key to the column of the answers",
    sources=("Miles guide: Debugging", "THUDM/slime@624b824a8 slime/utils/types.py:247"),
    check=_check,
)  # fmt: skip
