"""The checks of a rollout engine that a case may name; `engine_checks` makes them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from repro_golden.base.errors import ReproError

__all__ = ["CHECKS", "Expected", "known_name"]

Expected = Literal["equal", "differs", "any"]

CHECKS: Mapping[str, Expected] = {
    "run-to-run": "equal",
    "batch-of-2": "equal",
    "batch-of-8": "equal",
    "batch-of-32": "equal",
    "shuffled": "equal",
    "prefix-cache": "equal",
    "seeded-run-to-run": "equal",
    "seeded-batch": "equal",
    "seed": "differs",
    "unseeded": "any",
    "memory": "equal",
    "weight-update": "differs",
    "weight-reversal": "equal",
}
"""Names, in the order in which they are made, with what must come out."""


def known_name(name: str) -> str:
    """The name of a check.

    Raises:
        ReproError: it is none.
    """
    if name not in CHECKS:
        raise ReproError(f"no rollout check {name!r}; known: {', '.join(CHECKS)}")
    return name
