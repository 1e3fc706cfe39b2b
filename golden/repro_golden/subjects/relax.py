"""What a replay by Relax takes (redai-infra/Relax: relax/utils/arguments.py@05149ae1a)."""

from __future__ import annotations

from repro_golden.subjects.trainers import Trainer

__all__ = ["TRAINER"]

TRAINER = Trainer("relax", ("relax/entrypoints/train.py", "relax.entrypoints.train", "train.py"), "--num-rollout")
