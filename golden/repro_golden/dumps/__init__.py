"""What slime, Miles and Relax write: rollout dumps, train dumps and records, read without running any of their code."""

from __future__ import annotations
