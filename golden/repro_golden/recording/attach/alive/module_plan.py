"""What modules own beside the optimizers, found once and again only where a module owns something else."""

from __future__ import annotations

import itertools
import operator
import weakref
from collections.abc import Callable, Iterator, Sequence, Set
from typing import Any, NamedTuple

import torch

from repro_golden.fingerprint.placement import Placement
from repro_golden.recording.attach.alive import megatron
from repro_golden.recording.attach.alive.opened import leaves
from repro_golden.recording.attach.alive.readings import Places, Reading, Tensors, is_leaf, shapeless
from repro_golden.recording.attach.base.by_identity import id_of

__all__ = ["ModulePlan", "Owned", "Owning", "Part", "Root"]


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
        place: Where it lies, if it is a part.
        managed: Whether something else may have taken its memory away.
    """

    whole: str
    path: str
    place: Placement | None
    managed: bool


class _Group(NamedTuple):
    """What has names of one prefix; a tensor that several own is there once."""

    whole: str
    paths: list[str]
    at: list[int]
    places: Places


class _Mapping(NamedTuple):
    """An attribute of a module that is a mapping with tensors."""

    whole: str
    path: str
    module: weakref.ref[torch.nn.Module]
    key: str


_TORCHS = frozenset(vars(torch.nn.Module()))
"""What every module has: its tensors and its parts, which are found otherwise."""


def _tensors_in(mapping: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """What lies in a mapping, but for what is computed and what is trained."""
    for name, item in leaves(mapping, nested=False) if type(mapping) is dict else ():
        if isinstance(item, torch.Tensor) and not item.requires_grad and is_leaf(item):
            yield name, item


class Owned(NamedTuple):
    """What modules own now; a tensor that several own comes several times."""

    all: list[Owning]
    tensors: list[torch.Tensor]
    groups: list[_Group]

    def readings(self) -> dict[str, Reading]:
        """All of it, by the prefix of its names."""
        read = self.tensors.__getitem__
        return {
            whole: Reading(Tensors(zip(paths, map(read, at), strict=True)), dict(places))
            for whole, paths, at, places in self.groups
        }


class ModulePlan:
    """What modules own; walking through hundreds of them at every step would cost more than the step's own work."""

    def __init__(self) -> None:
        self._look: _Look | None = None
        self._held: Set[int] = frozenset()
        self._all: list[Owning] = []
        self._at: list[int] = []  # their places in what was looked at
        self._groups: list[_Group] = []
        self._mappings: list[_Mapping] = []

    def mapped(self) -> list[tuple[str, str, torch.Tensor]]:
        """The prefix, the name and the tensor of what they have in mappings, of those known since `owned` looked."""
        tensors = []
        for whole, path, reference, key in self._mappings:
            module = reference()
            for name, tensor in _tensors_in(None if module is None else vars(module).get(key)):
                tensors.append((whole, f"{path}.{name}", tensor))
        return tensors

    def owned(self, roots: list[Root], held: Set[int]) -> Owned:
        """All that they own.

        Args:
            roots: The modules, the same at every call.
            held: Ids of what optimizers hold, which is left out.
        """
        tensors = None if self._look is None or held != self._held else self._look.again()
        if tensors is None:
            self._held = held
            alive = [(root, part, m) for root in roots for part in root.parts if (m := part.module()) is not None]
            owns = _Owns.of([module for _, _, module in alive])
            self._look = _Look.of([module for _, _, module in alive], owns)
            self._note(alive, owns, held)
            tensors = owns.tensors
        return Owned(self._all, [t for at in self._at if (t := tensors[at]) is not None], self._groups)

    def _note(self, alive: list[tuple[Root, Part, torch.nn.Module]], owns: _Owns, held: Set[int]) -> None:
        self._all, self._at, self._mappings = [], [], []
        groups: dict[str, _Group] = {}
        starts = [0, *itertools.accumulate(owns.lengths)]
        taken: set[int] = set()
        labels: dict[tuple[str, str], int] = {}
        for number, (root, part, module) in enumerate(alive):
            self._mappings += [
                _Mapping(_prefix(root, "unsaved"), f"{part.path}.{key}" if part.path else key, part.module, key)
                for key, value in list(vars(module).items())
                if type(value) is dict and value and key not in _TORCHS and any(True for _ in _tensors_in(value))
            ]
            for space in (number, len(alive) + number):
                for at in range(starts[space], starts[space + 1]):
                    tensor = owns.tensors[at]
                    if tensor is None or id_of(tensor) in held:
                        continue
                    kind = "frozen" if space == number else "buffer"
                    owning = _owning(root, part, module, kind, owns.keys[at], tensor)
                    # a wrapper has the path of what it wraps
                    paths = itertools.chain([owning.path], (f"{owning.path}#{k}" for k in itertools.count(1)))
                    free = (p for p in paths if labels.setdefault((owning.whole, p), id_of(tensor)) == id_of(tensor))
                    owning = owning._replace(path=next(free))
                    self._all.append(owning)
                    self._at.append(at)
                    if id_of(tensor) in taken:
                        continue
                    taken.add(id_of(tensor))
                    group = groups.setdefault(owning.whole, _Group(owning.whole, [], [], {}))
                    group.paths.append(owning.path)
                    group.at.append(len(self._at) - 1)
                    if owning.place is not None:
                        group.places[owning.path] = owning.place
        self._groups = list(groups.values())


class _Owns(NamedTuple):
    """What modules own: all parameters, module by module, then all buffers.

    Attributes:
        lengths: How many parameters each has, then how many buffers, then how many of these are not saved.
        keys: The names of all, then those of buffers that are not saved, in any order.
        tensors: The parameters and buffers, None where there is none.
    """

    lengths: list[int]
    keys: list[str]
    tensors: list[torch.Tensor | None]

    @classmethod
    def of(cls, modules: Sequence[torch.nn.Module]) -> _Owns:
        """Look; it runs at every step, so nothing is made for a module by itself."""
        spaces: list[Any] = [*map(_parameters, modules), *map(_buffers, modules)]
        unsaved = [*map(_unsaved, modules)]
        try:
            tensors = [*itertools.chain.from_iterable(map(dict.values, spaces))]
        except TypeError:  # a scripted module has mappings of its own, which cannot be iterated over themselves
            spaces = [dict(zip(space.keys(), space.values(), strict=True)) for space in spaces]
            tensors = [*itertools.chain.from_iterable(map(dict.values, spaces))]
        keys = [*itertools.chain.from_iterable(spaces), *itertools.chain.from_iterable(unsaved)]
        return cls([*map(len, spaces), *map(len, unsaved)], keys, tensors)


_parameters, _buffers = operator.attrgetter("_parameters"), operator.attrgetter("_buffers")
_unsaved = operator.attrgetter("_non_persistent_buffers_set")


class _Look(NamedTuple):
    """What modules owned when they were looked at, by which it is known again."""

    modules: list[weakref.ref[torch.nn.Module]]
    lengths: list[int]
    keys: list[str]
    tensors: Sequence[Callable[[], torch.Tensor | None]]

    @classmethod
    def of(cls, modules: Sequence[torch.nn.Module], owns: _Owns) -> _Look:
        known = [_none if tensor is None else weakref.ref(tensor) for tensor in owns.tensors]
        return cls([weakref.ref(module) for module in modules], owns.lengths, owns.keys, known)

    def again(self) -> list[torch.Tensor | None] | None:
        """The tensors, if the modules own these still, by these names."""
        owns = _Owns.of([module for known in self.modules if (module := known()) is not None])
        if owns.lengths != self.lengths or owns.keys != self.keys:
            return None
        known = [reference() for reference in self.tensors]
        if sum(map(operator.is_, known, itertools.repeat(None))) != self.tensors.count(_none):  # one has gone
            return None
        return owns.tensors if all(map(operator.is_, owns.tensors, known)) else None


def _none() -> None:
    """What stands for a reference to nothing."""


def _owning(root: Root, part: Part, module: torch.nn.Module, kind: str, key: str, tensor: torch.Tensor) -> Owning:
    path, place = f"{part.path}.{key}" if part.path else key, None
    if kind == "frozen":
        path = megatron.parameter_path(path, tensor, module)
        place = None if shapeless(tensor) else megatron.placement(path, tensor, part.config)
    elif key in module._non_persistent_buffers_set:
        kind = "unsaved"
    return Owning(_prefix(root, kind), path, place, not root.stepped)


def _prefix(root: Root, kind: str) -> str:
    where = f"{root.name}/" if root.name else ""
    return f"{kind if root.stepped or kind == 'unsaved' else 'module'}/{where}"
