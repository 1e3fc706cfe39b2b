"""What modules own beside the optimizers, found once and again only where a module owns something else."""

from __future__ import annotations

import weakref
from collections.abc import Set
from typing import Any, NamedTuple

import torch

from repro_golden.fingerprint.placement import Placement
from repro_golden.recording.attach import megatron

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
        self._looks: list[_Look] = []
        self._owned: list[Owning] = []

    def owned(self, roots: list[Root], held: Set[int]) -> list[Owning]:
        """All of it: a tensor that several own comes several times.

        Args:
            roots: The modules, the same at every call.
            held: Ids of what optimizers hold, which is left out.
        """
        if not self._looks or not all(look.same() for look in self._looks):
            alive = [(root, part, m) for root in roots for part in root.parts if (m := part.module()) is not None]
            self._looks = [_Look.of(module) for _, _, module in alive]
            self._owned = [one for root, part, module in alive for one in _owned_by(root, part, module, held)]
        return self._owned


class _Look(NamedTuple):
    """What a module owned when it was looked at, by which it is known again.

    Attributes:
        module: The module.
        keys: Of its parameters, then of its buffers.
        tensors: With these, None where there was None.
        transient: Its buffers that are not saved.
    """

    module: weakref.ref[torch.nn.Module]
    keys: tuple[str, ...]
    tensors: tuple[weakref.ref[torch.Tensor] | None, ...]
    transient: frozenset[str]

    @classmethod
    def of(cls, module: torch.nn.Module) -> _Look:
        tensors = (*module._parameters.values(), *module._buffers.values())
        return cls(
            weakref.ref(module),
            _keys(module),
            tuple(tensor if tensor is None else weakref.ref(tensor) for tensor in tensors),
            frozenset(module._non_persistent_buffers_set),
        )

    def same(self) -> bool:
        """Whether it owns these still, by these names."""
        module = self.module()
        if module is None or _keys(module) != self.keys:
            return False
        now = (*module._parameters.values(), *module._buffers.values())
        return module._non_persistent_buffers_set == self.transient and all(
            tensor is (known if known is None else known()) for tensor, known in zip(now, self.tensors, strict=True)
        )


def _keys(module: torch.nn.Module) -> tuple[str, ...]:
    """Of its parameters and buffers. A scripted module's mappings cannot be iterated over themselves."""
    return (*module._parameters.keys(), *module._buffers.keys())


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
