"""What a replay by slime takes (THUDM/slime@624b824a8: slime/utils/arguments.py, train.py)."""

from __future__ import annotations

from repro_golden.subjects.trainers import Replay, Trainer

__all__ = ["TRAINER"]


def _flags(replay: Replay) -> list[list[str]]:
    return [
        ["--debug-train-only"],
        ["--load-debug-rollout-data", replay.rollouts],
        ["--dump-details", replay.details],
        ["--start-rollout-id", "0"],  # a launch that goes on from a checkpoint would begin behind the recorded ones
        # slime has no flag that ends a run early, so the schedule of the learning rate is that of a run of this length
        ["--num-rollout", str(replay.count)],
        ["--deterministic-mode"],
    ]


def _capture(replay: Replay) -> list[list[str]]:
    return [
        ["--debug-rollout-only"],
        ["--save-debug-rollout-data", replay.rollouts],
        ["--start-rollout-id", "0"],
        ["--num-rollout", str(replay.count)],
    ]


TRAINER = Trainer("slime", ("train.py", "train_async.py"), _flags, _capture)
