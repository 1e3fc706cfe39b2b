"""Faults: whatever is killed, full, damaged, read-only or late, no verdict is wrong and the next run heals."""

from __future__ import annotations

from collections.abc import Iterator

from attempts import warm
from fault_kinds import clock, damage, kills, places, remotes, shapes
from promise import Asked, Promise

__all__ = ["promises"]


def promises(asked: Asked) -> Iterator[Promise]:
    """A promise for each kind of fault."""
    warm()
    for kind in (damage, kills, places, remotes, shapes, clock):
        yield from kind.promises(asked)
