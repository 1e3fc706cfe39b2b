"""What the garbage collector knows of, as far as it is looked at."""

from __future__ import annotations

import gc
import itertools
from typing import Any, NamedTuple

import torch

from repro_golden.fingerprint.kinds import PLAIN_TENSORS
from repro_golden.recording.attach.alive.names import modules_of
from repro_golden.recording.attach.alive.reached import first_of, is_tensor
from repro_golden.recording.attach.alive.readings import Tensors

__all__ = ["Alive"]


class Alive(NamedTuple):
    """What the garbage collector knows of, as far as it matters here: some hundred thousand objects are looked at.

    Attributes:
        modules: Those that are made.
        optimizers: Of torch's.
        tensors: Plain tensors and parameters.
        containers: Mappings and lists whose first value is a tensor.
    """

    modules: list[torch.nn.Module]
    optimizers: list[torch.optim.Optimizer]
    tensors: list[torch.Tensor]
    containers: list[Any]

    @classmethod
    def now(cls) -> Alive:
        """Look."""
        places: tuple[list[Any], ...] = ([], [], [], [], [])
        kinds: dict[type, int] = {}
        # the oldest generation first: so they come as they were made, whenever the collector ran
        for item in itertools.chain.from_iterable(map(gc.get_objects, (2, 1, 0))):
            known = kinds.get(type(item))
            if known is None:
                known = kinds[type(item)] = _kind(type(item))
            if known >= 0:
                places[known].append(item)
        modules, optimizers, tensors, mappings, lists = places
        containers = [m for m, first in zip(mappings, map(first_of, mappings), strict=True) if is_tensor(first)]
        containers += [items for items in lists if items is not tensors and is_tensor(first_of(items))]
        lists.clear()  # it has itself in it, and would keep all of this alive until garbage is collected
        # a wrapper that is made without torch's own __init__ may have none of its own
        ready = [o for o in optimizers if hasattr(o, "param_groups") and hasattr(o, "state")]
        return cls(modules_of(modules), ready, tensors, containers)


def _kind(type_: type) -> int:
    """Where `Alive` puts objects of a type; -1 for nowhere."""
    if issubclass(type_, torch.nn.Module):
        return 0
    if issubclass(type_, torch.optim.Optimizer):
        return 1
    if type_ in PLAIN_TENSORS:
        return 2
    if type_ is Tensors:
        return -1
    return 3 if issubclass(type_, dict) else 4 if type_ is list else -1
