"""The names of parameters and modules: their module paths, the same whatever wraps the model or splits it."""

from __future__ import annotations

import gc
import operator
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import torch

from repro_golden.fingerprint.placement import Placement
from repro_golden.recording.attach.alive import megatron
from repro_golden.recording.attach.alive.readings import Held, groups_of, parameters_of
from repro_golden.recording.attach.base.by_identity import ByIdentity, id_of

__all__ = ["Names", "modules_of", "walk"]

_WRAPPED = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_forward_module")
"""What torch.compile, FSDP, checkpoint wrappers and Lightning's Fabric call the module inside them."""

T = TypeVar("T", torch.Tensor, torch.nn.Module)
Known = dict[int, tuple["weakref.ref[T]", str, Any]]
"""By id: the object, its name, and the nearest ``config`` of a module around it."""


class Names:
    """Looked up among the modules that are alive, when a parameter or module without a name is met.

    Where a model is split over ranks, a parameter has the name of the tensor that its parts add up to.
    """

    def __init__(self) -> None:
        self._parameters: Known[torch.Tensor] = {}
        self._modules: Known[torch.nn.Module] = {}
        self._held = ByIdentity[tuple[list[weakref.ref[torch.Tensor]], Held]]()

    def held(self, optimizer: Any) -> Held:
        """What an optimizer holds, its parameters sorted by name: the order of registration plays no part.

        Parameters of the same name, of models that nothing holds together, are ``NAME``, ``NAME#1`` and so on.
        """
        groups = megatron.parameters(optimizer)
        if groups is None:
            groups = [parameters_of(group) for group in groups_of(optimizer)]
        parameters = [p for group in groups for p in group]
        known = self._held.get(optimizer)
        if known is not None and _are(known[0], parameters):
            return known[1]
        named: dict[str, torch.Tensor] = {}
        for g, group in enumerate(groups):
            for k, parameter in enumerate(group):
                name = unique = self._known(parameter, f"param_groups.{g}.{k}")[1]
                count = 0
                while unique in named:
                    count += 1
                    unique = f"{name}#{count}"
                named[unique] = parameter
        named = dict(sorted(named.items()))
        held = Held(optimizer, named, self._places(named), self.of_module)
        self._held.put(optimizer, ([weakref.ref(p) for p in parameters], held))
        return held

    def let_go(self, *tensors: torch.Tensor) -> Callable[[], None]:
        """Refer to none of some tensors for now; a call of what is returned takes them up again."""
        self._held.clear()  # it is found again when it is asked for
        named = [tensor for tensor in tensors if id_of(tensor) in self._parameters]
        known = [(tensor, self._parameters.pop(id_of(tensor))[1:]) for tensor in named]

        def again() -> None:
            for tensor, entry in known:
                self._parameters[id_of(tensor)] = (weakref.ref(tensor), *entry)
            known.clear()

        return again

    def _places(self, parameters: dict[str, torch.Tensor]) -> dict[str, Placement]:
        """Where parameters lie in the tensors of one process, by name: those that are a part of theirs."""
        placements: dict[str, Placement] = {}
        for name, parameter in parameters.items():
            _, path, config = self._known(parameter, name)
            place = megatron.placement(path, parameter, config)
            if place is not None:
                placements[name] = place
        return placements

    def of_module(self, module: torch.nn.Module) -> str:
        """A module's path; '' for a root."""
        known = self._modules.get(id_of(module))
        if known is None or known[0]() is not module:
            self._look()
            known = self._modules.setdefault(id_of(module), (weakref.ref(module), "", None))
        return known[1]

    def _known(self, parameter: torch.Tensor, fallback: str) -> tuple[weakref.ref[torch.Tensor], str, Any]:
        """With the name `fallback` for a parameter that no module owns."""
        known = self._parameters.get(id_of(parameter))
        if known is None or known[0]() is not parameter:
            self._look()
            known = self._parameters.setdefault(id_of(parameter), (weakref.ref(parameter), fallback, None))
            if known[0]() is not parameter:  # the place of one that is gone
                known = self._parameters[id_of(parameter)] = (weakref.ref(parameter), fallback, None)
        return known

    def _look(self) -> None:
        """Name the parameters and modules of every root: a module that no other module holds."""
        modules = modules_of(gc.get_objects())
        inner = {id_of(child) for m in modules for child in list(m._modules.values()) if child is not None}
        parameters: Known[torch.Tensor] = {}
        named: Known[torch.nn.Module] = {}
        for root in (m for m in modules if id_of(m) not in inner):
            seen: set[int] = set()  # within one root the first name stands, as in `named_parameters`
            for path, module, config in walk(root, "", None, set()):
                _take(named, module, path, config)
                for key, parameter in list(module._parameters.items()):
                    if parameter is not None and id_of(parameter) not in seen:
                        seen.add(id_of(parameter))
                        name = f"{path}.{key}" if path else key
                        _take(parameters, parameter, megatron.parameter_path(name, parameter, module), config)
        self._parameters = {k: v for k, v in self._parameters.items() if v[0]() is not None} | parameters
        self._modules = {k: v for k, v in self._modules.items() if v[0]() is not None} | named


def _are(references: list[weakref.ref[torch.Tensor]], parameters: list[torch.Tensor]) -> bool:
    """Whether they refer to these."""
    if len(references) != len(parameters):
        return False
    return all(map(operator.is_, [reference() for reference in references], parameters))


def modules_of(objects: Iterable[Any]) -> list[torch.nn.Module]:
    """The modules among some objects, but for those that are not made yet."""
    # by type(): isinstance asks objects for __class__, and some answer with a warning
    return [o for o in objects if issubclass(type(o), torch.nn.Module) and "_modules" in o.__dict__]


def walk(module: torch.nn.Module, path: str, config: Any, seen: set[int]) -> Iterator[tuple[str, torch.nn.Module, Any]]:
    """Every module of a root with its path, which leaves out what wrappers add, and the nearest config around it.

    Graphs that the compiler made have the program's parameters under other names, and are left out.
    """
    meta = module.__dict__.get("meta")
    if id_of(module) in seen or (type(meta) is dict and "dynamo_compile_id" in meta):
        return
    seen.add(id_of(module))
    config = module.__dict__.get("config", config)
    yield path, module, config
    children = [(key, child) for key, child in list(module._modules.items()) if child is not None]
    # DDP, FSDP and others: nothing of their own but the one that they wrap
    wraps = [key for key, _ in children] == ["module"] and not any(
        p is not None for p in list(module._parameters.values())
    )
    for key, child in children:
        if wraps or key in _WRAPPED:
            yield from walk(child, path, config, seen)
        else:
            name = megatron.child_key(path, module, key, child)
            yield from walk(child, f"{path}.{name}" if path else name, config, seen)


def _take(known: Known[T], item: T, name: str, config: Any) -> None:
    """Among several owners (a trainer and its model): the shortest path, then the first by name."""
    other = known.get(id_of(item))
    if other is None or (name.count("."), name) < (other[1].count("."), other[1]):
        known[id_of(item)] = (weakref.ref(item), name, config)
