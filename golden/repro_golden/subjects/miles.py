"""What a replay by Miles takes (radixark/miles@31f1ca961: miles/utils/arguments.py, train.py, tracking_utils)."""

from __future__ import annotations

from repro_golden.subjects.trainers import Trainer

__all__ = ["TRAINER"]

TRAINER = Trainer(
    "miles",
    ("train.py", "train_async.py"),
    "--debug-exit-after-rollout",  # which leaves the schedule of the learning rate alone
    more=("--save-local-weight-checksum",),
    variables=lambda replay: {"MILES_CI_GATE_RECORD_DIR": f"{replay.details}/ci_gate_record"},
)
