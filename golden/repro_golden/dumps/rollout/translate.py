"""A dump of one trainer in the form of another, and what that form has no place for."""

from __future__ import annotations

from collections import Counter
from typing import Any, NamedTuple

import numpy as np

from repro_golden.base.systems import System
from repro_golden.dumps.archive.bounds import shown
from repro_golden.dumps.rollout.arrays import numbers
from repro_golden.dumps.rollout.columns import NATIVE, as_kind, kind_of
from repro_golden.dumps.rollout.fields import NAMES, defaults
from repro_golden.dumps.rollout.files import RolloutDump
from repro_golden.dumps.values import same

__all__ = ["Loss", "translate"]


class Loss(NamedTuple):
    """Something that a format has no place for.

    Attributes:
        what: The field, and what becomes of it.
        samples: How many samples have it; 0 for something of the whole rollout.
    """

    what: str
    samples: int

    def __str__(self) -> str:
        return f"{self.what}: {self.samples} samples" if self.samples else self.what


_ROUTING = {"slime": "session_id", "miles": "routing_key", "relax": "session_id"}
"""What the router hashes by has two names."""


def translate(dump: RolloutDump, system: System) -> tuple[RolloutDump, list[Loss]]:
    """A dump in the form of another system.

    Fields that both have are kept, whatever they hold; so are fields that no system has. Fields that the other has no
    place for are lost where they are set.

    Args:
        dump: It.
        system: Whose form.

    Returns:
        The dump, and what it lost; the dump itself, and nothing, where it has that form.
    """
    if dump.system == system:
        return dump, []
    lost: Counter[str] = Counter()
    unset, theirs = defaults(dump.system), NAMES[dump.system]
    samples = []
    for sample in dump.samples:
        made = defaults(system)
        for name, value in sample.items():
            place = _ROUTING[system] if name == _ROUTING[dump.system] else name
            if name == _ROUTING[system] != _ROUTING[dump.system]:  # a field that no system has, where ours is to go
                lost[f"{name}, whose place is that of {_ROUTING[dump.system]}"] += 1
            elif place == "rollout_routed_experts":
                made[place] = _experts(value, system, lost)
            elif place in NAMES[system] or name not in theirs:
                made[place] = value
            elif not same(value, unset[name]):
                lost[f"{name} of {dump.system}"] += 1
        samples.append(made)
    head = sorted([*map(str, dump.extra), *(["metadata"] if dump.metadata else [])])
    whole = [Loss(f"{shown(name)} of the file", 0) for name in head]
    losses = [Loss(what, count) for what, count in lost.items()]
    return RolloutDump(system, dump.rollout_id, dump.evaluation, {}, samples), [*losses, *whole]


def _experts(value: Any, system: System, lost: Counter[str]) -> Any:
    """Routed experts in the system's own way; as they are where they are no whole numbers of 32 bits."""
    array, wanted = numbers(value), NATIVE[system]
    if value is None or array is None or array.dtype.kind != "i" or kind_of(value) == wanted:
        return value
    if array.size and not np.iinfo(np.int32).min <= array.min() <= array.max() <= np.iinfo(np.int32).max:
        return value
    lost[f"rollout_routed_experts as {kind_of(value)}: now {wanted}"] += 1
    return as_kind(array, wanted)
