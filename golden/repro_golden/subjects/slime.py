"""What a replay by slime takes (THUDM/slime@624b824a8: slime/utils/arguments.py, train.py)."""

from __future__ import annotations

from repro_golden.subjects.trainers import Trainer

__all__ = ["TRAINER"]

# slime has no flag that ends a run early, so the schedule of the learning rate is that of a run of this length
TRAINER = Trainer("slime", ("train.py", "train_async.py"), "--num-rollout")
