"""Mappings and lists of tensors that variables lead to: looked for at every step, so the look must be cheap."""

from __future__ import annotations

import sys
import weakref
from typing import Any

import torch

from repro_golden.fingerprint.kinds import PLAIN_TENSORS
from repro_golden.recording.attach.alive.opened import is_foreign
from repro_golden.recording.attach.alive.variables import NOT_HOLDERS, attributes, variables
from repro_golden.recording.attach.base.by_identity import id_of

__all__ = ["Reached", "first_of", "is_array", "is_tensor"]

_DEPTH, _LONG, _WIDE, _MOST = 4, 64, 1000, 20_000
"""How far attributes of attributes are followed, in which mappings (see `_may_hold`), and to how many values in all.

Counts and not time bound the look, so that two runs find the same.
"""
_NOTHING, _MAPPING, _LIST, _HOLDER, _MODULE = range(5)
_OWN = frozenset(vars(torch.nn.Module()))
"""What every module has: its tensors and its parts, which are found otherwise."""

_PLAIN = {bool, int, float, str, tuple, type(None)}


class Reached:
    """Looks from the variables of this thread's frames, by the same rules as `variables.names_of`, but for less.

    It does not go into parts of modules, optimizers, loggers and the like, and remembers of which types they are.

    Attributes:
        modules: Names of the modules whose code the frames were in at the last look before the end.
        networks: Torch's modules that the last look came by, but for parts of others, the nearest first, each with a
            name: of two that are equally near, the one with the shorter, or in the alphabet the first.
    """

    def __init__(self) -> None:
        self._kinds: dict[type, int] = {}
        self.modules: set[str] = set()
        self.networks: list[tuple[str, weakref.ref[torch.nn.Module]]] = []

    def containers(self, *, end: bool = False) -> list[tuple[str, Any]]:
        """Mappings and lists whose first value is a tensor or an array, each with its name, the nearest first.

        Args:
            end: Whether the program has ended: its frames have gone, and the modules that they were in are looked at.
        """
        met: set[str] = set()
        level = list(variables(met, self.modules if end else {"__main__"}))
        self.modules = self.modules if end else met
        containers: list[tuple[str, Any]] = []
        seen: set[int] = set()
        self.networks = []
        left = _MOST
        for depth in range(_DEPTH):
            left -= len(level)
            if left < 0:
                break
            here: dict[int, tuple[str, Any]] = {}
            holders: list[tuple[int, Any]] = []
            modules: dict[int, tuple[str, Any]] = {}
            for name, value in level:
                kind = self._kinds.get(type(value))
                if kind is None:
                    kind = self._decide(type(value))
                if kind == _MODULE and id_of(value) in modules:
                    modules[id_of(value)] = min(
                        modules[id_of(value)], (name, value), key=lambda pair: (len(pair[0]), pair[0])
                    )
                if kind == _NOTHING or id_of(value) in seen:
                    continue
                if kind in (_LIST, _MAPPING):
                    first = first_of(value)
                    if is_tensor(first) or is_array(first):
                        known = here.get(id_of(value))
                        if known is None or (len(name), name) < (len(known[0]), known[0]):
                            here[id_of(value)] = name, value
                    # what begins with an array may hold anything
                    if is_tensor(first) or kind == _LIST or not _may_hold(value):
                        continue
                if kind == _MODULE:
                    modules[id_of(value)] = name, value
                seen.add(id_of(value))
                holders.append((kind, value))
            containers += here.values()
            self.networks += [(name, weakref.ref(module)) for name, module in modules.values()]
            seen |= here.keys()
            if depth + 1 < _DEPTH:
                level = [pair for kind, holder in holders for pair in _held(kind, holder)]
        return containers

    def _decide(self, type_: type) -> int:
        if issubclass(type_, dict):
            kind = _MAPPING
        elif type_ is list:
            kind = _LIST
        elif issubclass(type_, torch.nn.Module):
            kind = _MODULE
        elif issubclass(type_, (*NOT_HOLDERS, torch.Tensor, torch.optim.Optimizer)) or not type_.__dictoffset__:
            kind = _NOTHING
        else:
            kind = _NOTHING if is_foreign(type_) else _HOLDER
        if "<locals>" not in type_.__qualname__:  # a class of a function would keep alive what its methods refer to
            self._kinds[type_] = kind
        return kind


def first_of(container: Any) -> Any:
    """The first value of a dict or a list; None where it is empty, or another thread changes it."""
    try:
        if issubclass(type(container), dict):  # one may import half the world when it is asked itself
            return next(iter(dict.values(container)), None)
        return container[0] if container else None
    except (IndexError, RuntimeError):
        return None


def _may_hold(mapping: Any) -> bool:
    """Whether a mapping is worth going into: a long one that begins with a text is a vocabulary, or the like."""
    length = dict.__len__(mapping)
    if length <= _LONG:
        return length > 0
    return length <= _WIDE and not issubclass(type(first_of(mapping)), NOT_HOLDERS)


def _held(kind: int, holder: Any) -> list[tuple[str, Any]]:
    if kind == _MAPPING:
        return [(name, value) for name, value in list(dict.items(holder)) if type(name) is str]
    if kind == _MODULE:
        space = object.__getattribute__(holder, "__dict__")
        if len(space) == len(_OWN):
            return []
        return [(name, value) for name, value in list(space.items()) if name not in _OWN and type(value) not in _PLAIN]
    return attributes(holder)


_STANDING_IN = ("torch._subclasses.fake_tensor", "torch._subclasses.functional_tensor")


def is_tensor(value: Any) -> bool:
    """Without asking the object, which may answer for another.

    What stands for a tensor while torch traces a program is none: it has no bytes, and its shape may be of symbols.
    """
    kind = type(value)
    return kind in PLAIN_TENSORS or (issubclass(kind, torch.Tensor) and kind.__module__ not in _STANDING_IN)


def is_array(value: Any) -> bool:
    """Whether it is NumPy's, of floating-point or complex numbers."""
    kind = getattr(sys.modules.get("numpy"), "ndarray", None)
    return type(value) is kind and value.dtype.kind in "fc"
