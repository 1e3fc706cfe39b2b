"""What modules own beside the optimizers, found once and again only where a module owns something else."""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Iterable, Sequence, Set
from typing import Any, NamedTuple

import torch

from repro_golden.fingerprint.placement import Placement
from repro_golden.recording.attach.alive import megatron

__all__ = ["ModulePlan", "Owning", "Part", "Root"]


class Part(NamedTuple):
    """A module of a root, with its path in it."""

    module: weakref.ref[torch.nn.Module]
    path: str
    config: Any


class Root(NamedTuple):
    """A module that no other holds.

    Attributes:
        name: What the program calls it; '' where it is the only one with a parameter that an optimizer holds.
        stepped: Whether it has one.
        parts: Those of its modules that have something of their own to read.
    """

    name: str
    stepped: bool
    parts: list[Part]


class Owning(NamedTuple):
    """A tensor that a module owns, and no optimizer.

    Attributes:
        whole: The prefix of its name.
        path: Its name.
        tensor: The tensor.
        place: Where it lies, if it is a part.
        managed: Whether something else may have taken its memory away.
    """

    whole: str
    path: str
    tensor: weakref.ref[torch.Tensor]
    place: Placement | None
    managed: bool


class ModulePlan:
    """What modules own; walking through hundreds of them at every step would cost more than the step's own work."""

    def __init__(self) -> None:
        self._look: _Look | None = None
        self._owned: list[Owning] = []

    def owned(self, roots: list[Root], held: Set[int]) -> list[Owning]:
        """All of it: a tensor that several own comes several times.

        Args:
            roots: The modules, the same at every call.
            held: Ids of what optimizers hold, which is left out.
        """
        if self._look is None or not self._look.same():
            alive = [(root, part, m) for root in roots for part in root.parts if (m := part.module()) is not None]
            self._look = _Look.of([module for _, _, module in alive])
            self._owned = [one for root, part, module in alive for one in _owned_by(root, part, module, held)]
        return self._owned


class _Look(NamedTuple):
    """What modules owned when they were looked at, by which it is known again.

    Attributes:
        modules: The modules.
        keys: Of each one's parameters, then of its buffers, then those of its buffers that are not saved.
        tensors: The parameters and buffers, None where there was None.
    """

    modules: list[weakref.ref[torch.nn.Module]]
    keys: list[Any]
    tensors: Sequence[Callable[[], torch.Tensor | None]]

    @classmethod
    def of(cls, modules: Sequence[torch.nn.Module]) -> _Look:
        keys, tensors = _owns(modules)
        known = [_none if tensor is None else weakref.ref(tensor) for tensor in tensors]
        return cls([weakref.ref(module) for module in modules], keys, known)

    def same(self) -> bool:
        """Whether they own these still, by these names."""
        # equal keys are of as many modules, and of as many tensors
        keys, tensors = _owns(module for known in self.modules if (module := known()) is not None)
        return keys == self.keys and all(map(operator.is_, tensors, [known() for known in self.tensors]))


def _none() -> None:
    """What stands for a reference to nothing."""


def _owns(modules: Iterable[torch.nn.Module]) -> tuple[list[Any], list[torch.Tensor | None]]:
    """All keys, a list for each module's parameters and buffers, and all tensors; it runs at every step."""
    keys: list[Any] = []
    tensors: list[torch.Tensor | None] = []
    for module in modules:
        # a scripted module's mappings cannot be iterated over themselves
        parameters, buffers = module._parameters, module._buffers
        keys += [*parameters.keys()], [*buffers.keys()]
        if unsaved := module._non_persistent_buffers_set:
            keys.append(set(unsaved))
        tensors += parameters.values()
        tensors += buffers.values()
    return keys, tensors


def _owned_by(root: Root, part: Part, module: torch.nn.Module, held: Set[int]) -> list[Owning]:
    where = f"{root.name}/" if root.name else ""
    out = []
    for owned, kind in ((module._parameters, "frozen"), (module._buffers, "buffer")):
        for key, tensor in owned.items():
            if tensor is None or id(tensor) in held:
                continue
            path, place = f"{part.path}.{key}" if part.path else key, None
            if kind == "frozen":
                path = megatron.parameter_path(path, tensor, module)
                place = megatron.placement(path, tensor, part.config)
            saved = kind == "frozen" or key not in module._non_persistent_buffers_set
            whole = f"{(kind if saved else 'unsaved') if root.stepped else 'module'}/{where}"
            out.append(Owning(whole, path, weakref.ref(tensor), place, not root.stepped))
    return out
