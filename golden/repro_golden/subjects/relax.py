"""What a replay by Relax takes (redai-infra/Relax: relax/utils/arguments.py@05149ae1a)."""

from __future__ import annotations

from repro_golden.subjects.trainers import Replay, Trainer

__all__ = ["TRAINER"]


def _flags(replay: Replay) -> list[list[str]]:
    return [
        ["--debug-train-only"],
        ["--load-debug-rollout-data", replay.rollouts],
        ["--dump-details", replay.details],
        ["--start-rollout-id", "0"],  # a launch that goes on from a checkpoint would begin behind the recorded ones
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


TRAINER = Trainer("relax", ("relax/entrypoints/train.py", "relax.entrypoints.train", "train.py"), _flags, _capture)
