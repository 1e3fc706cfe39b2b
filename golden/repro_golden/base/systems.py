"""The RL trainers whose launches and dumps are known by name."""

from __future__ import annotations

from typing import Literal, get_args

__all__ = ["SYSTEMS", "System"]

System = Literal["slime", "miles", "relax"]
SYSTEMS: tuple[System, ...] = get_args(System)
