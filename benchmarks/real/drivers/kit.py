"""What the drivers share: upstream's code of the commit under test first on the path, and numbers to compare.

A driver trains a few steps through upstream's own code, which it imports from the folder that it is started in; on a
CPU, or on a GPU where it asks for DEVICE and the variable of that name says ``cuda``. It prints one line a step, with
every digit, so that `git bisect run` has something to compare too.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable
from pathlib import Path

import torch

__all__ = ["DEVICE", "norm_of", "report", "seed", "upstream"]

DEVICE = os.environ.get("DEVICE", "cpu")


def upstream(*folders: str) -> None:
    """Put the checkout under test, or folders of it, before all that is installed."""
    sys.path[:0] = [str(Path.cwd() / folder) for folder in folders or ("",)]


def seed(number: int = 0) -> None:
    """One thread, deterministic operations, seeded generators."""
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.manual_seed(number)


def norm_of(parameters: Iterable[torch.nn.Parameter]) -> float:
    """The 2-norm of all gradients, in float64."""
    squares = [p.grad.detach().double().square().sum() for p in parameters if p.grad is not None]
    return float(torch.stack(squares).sum().sqrt())


def report(step: int, **numbers: float) -> None:
    """One line of a step's numbers, as Python writes them: every digit."""
    print(f"step {step}: {json.dumps({name: float(value) for name, value in numbers.items()})}", flush=True)
