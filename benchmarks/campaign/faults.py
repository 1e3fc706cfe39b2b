"""Faults: whatever is full, read-only, late or lying, no verdict is wrong and the next run heals."""

from __future__ import annotations

from collections.abc import Iterator

from attempts import warm
from fault_kinds import clock, places, remotes, shapes
from promise import Asked, Promise

__all__ = ["promises"]


def promises(asked: Asked) -> Iterator[Promise]:
    """A promise for each kind of fault."""
    warm()
    for kind in (places, remotes, shapes, clock):
        yield from kind.promises(asked)
