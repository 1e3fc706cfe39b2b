"""What a replay by Miles takes (radixark/miles@31f1ca961: miles/utils/arguments.py, train.py, tracking_utils)."""

from __future__ import annotations

from repro_golden.subjects.trainers import Replay, Trainer

__all__ = ["TRAINER"]


def _flags(replay: Replay) -> list[list[str]]:
    return [
        ["--debug-train-only"],
        ["--load-debug-rollout-data", replay.rollouts],
        ["--dump-details", replay.details],
        ["--start-rollout-id", "0"],  # a launch that goes on from a checkpoint would begin behind the recorded ones
        # ends the run without changing the schedule of the learning rate
        ["--debug-exit-after-rollout", str(replay.count)],
        ["--save-local-weight-checksum"],
        ["--deterministic-mode"],
    ]


def _capture(replay: Replay) -> list[list[str]]:
    return [
        ["--debug-rollout-only"],
        ["--save-debug-rollout-data", replay.rollouts],
        ["--start-rollout-id", "0"],
        ["--debug-exit-after-rollout", str(replay.count)],
    ]


TRAINER = Trainer(
    "miles",
    ("train.py", "train_async.py"),
    _flags,
    _capture,
    variables=lambda replay: {"MILES_CI_GATE_RECORD_DIR": f"{replay.details}/ci_gate_record"},
)
