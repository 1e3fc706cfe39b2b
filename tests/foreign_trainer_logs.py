"""Log lines as the system's logger writes them, with the prefix that Ray puts before an actor's lines."""

from __future__ import annotations

import datetime
import os
import sys
from pathlib import Path
from typing import Any

from foreign_trainer_arguments import SYSTEM


def log(actor: str, file: str, message: str) -> None:
    """Print one line of an actor.

    Args:
        actor: the actor's class; an empty one stands for the driver, which Ray gives no prefix.
        file: the source file that logs.
        message: what it says.
    """
    now = datetime.datetime.now()
    name = Path(file).name
    line = sys._getframe(1).f_lineno
    if SYSTEM == "slime":
        text = f"[{now:%Y-%m-%d %H:%M:%S}] {name}:{line} - {message}"
    elif SYSTEM == "miles":
        who = {"": "main", "RolloutManager": "rollout_manager"}.get(actor, "actor_cell0_rank0")
        text = f"[{now:%Y-%m-%d %H:%M:%S}.{now.microsecond // 1000:03d} {who}] {name}:{line} - {message}"
    else:
        text = f"\x1b[32m{now:%Y-%m-%d %H:%M:%S} | INFO | relax.{name.removesuffix('.py')}:{line} {message}\x1b[0m"
    prefix = f"\x1b[36m({actor} pid={os.getpid()})\x1b[0m " if actor else ""
    print(prefix + text, flush=True)


def metrics(label: str, number: int, values: dict[str, Any]) -> str:
    """The message of a line of metrics."""
    return f"{label} {number}: {values}"
