"""Which containers of tensors are copies of parameters, such as a moving average."""

from __future__ import annotations

import contextlib
import operator
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import torch

from repro_golden.recording.attach.alive.opened import leaves
from repro_golden.recording.attach.alive.reached import first_of, is_array, is_tensor
from repro_golden.recording.attach.alive.readings import is_leaf, shapeless
from repro_golden.recording.attach.base.by_identity import id_of

__all__ = ["CopyTest", "Owned", "held_in", "shapes_of", "tensors_in", "unused"]


class Owned(NamedTuple):
    """What belongs to modules and optimizers.

    Attributes:
        tensors: Of modules, and parameters.
        others: Gradients of these, and what lies in optimizers' state.
    """

    tensors: list[torch.Tensor]
    others: list[torch.Tensor]

    @classmethod
    def of(
        cls,
        modules: Iterable[torch.nn.Module],
        optimizers: Iterable[torch.optim.Optimizer],
        parameters: Iterable[torch.Tensor],
    ) -> Owned:
        """Collect it."""
        tensors = {id_of(p): p for p in parameters}
        others = [p.grad for p in tensors.values() if p.grad is not None]
        for module in modules:
            for tensor in (*module._parameters.values(), *module._buffers.values()):
                if tensor is not None:
                    tensors[id_of(tensor)] = tensor
        for optimizer in optimizers:
            states: Any = optimizer.state
            for state in list(states.values()) if isinstance(states, Mapping) else [states]:
                for value in list(state.values()) if type(state) is dict else [state]:
                    if is_tensor(value):
                        others.append(value)
                    elif not isinstance(value, (int, float)):
                        others += [leaf for _, leaf in leaves(value) if is_tensor(leaf)]
        return cls(list(tensors.values()), others)

    def ids(self) -> set[int]:
        """Of all."""
        return set(map(id_of, self.tensors)) | set(map(id_of, self.others))


class CopyTest:
    """Whether a container has copies of parameters.

    Args:
        wholes: Shapes of the parameters of each optimizer and root.
        parameters: Of the optimizers.
        owned: Gives tensors that belong to these. It is dear, and asked only of a container that has the right shapes
            and none of the parameters and their gradients, which many programs keep in lists.
    """

    def __init__(
        self,
        wholes: Sequence[Counter[tuple[int, ...]]],
        parameters: Sequence[torch.Tensor],
        owned: Callable[[], Owned],
    ) -> None:
        self._wholes, self._owned, self._parameters = wholes, owned, parameters
        sizes = [sum(whole.values()) for whole in wholes]
        self._least, self.most = min(sizes, default=0), max(sizes, default=0)
        self._known: tuple[set[int], set[int]] | None = None

    @cached_property
    def _near(self) -> set[int]:
        """Ids of the parameters and their gradients; most programs have no container that is looked at so closely."""
        return {*map(id_of, self._parameters), *map(id_of, map(_grad, self._parameters))} - {id_of(None)}

    def passes(self, container: Any, *, named: bool) -> bool:
        """Whether it has one of each parameter's shape, or is a mapping by text of nothing but such tensors.

        Args:
            container: A mapping or list.
            named: Whether a mapping may have copies of only some parameters.
        """
        is_list = type(container) is list
        if not self._wholes or (is_list and len(container) < self._least):
            return False
        # the first of them tells it mostly; what is no tensor is none of them
        if not self._near.isdisjoint(map(id_of, _values(container))):
            return False
        held = held_in(container)
        tensors = [(key, t) for key, t in held if is_tensor(t)]
        arrays = [value for _, value in held if is_array(value)]
        looks = shapes_of(t for _, t in tensors if not t.requires_grad and is_leaf(t))
        looks.update(array.shape for array in arrays)
        whole = any(_within(shapes, looks) for shapes in self._wholes)
        if not whole and (is_list or arrays or not named or not self._some(tensors, looks)):
            return False
        if self._known is None:
            owned = self._owned()
            self._known = owned.ids(), {_address(t) for t in owned.tensors} - {0}
        ids, addresses = self._known
        # a module's state has other tensors than the module, in the same memory
        return not any(id_of(t) in ids or _address(t) in addresses for _, t in held)

    def _some(self, tensors: Sequence[tuple[Any, torch.Tensor]], looks: Counter[tuple[int, ...]]) -> bool:
        """Two or more of parameters' shapes and of no other. Numbers are more likely metrics, and integers a batch."""
        if (
            len(tensors) < 2
            or sum(looks.values()) < len(tensors)
            or not any(_within(looks, shapes) for shapes in self._wholes)
        ):
            return False
        floats = all(t.is_floating_point() or t.is_complex() for _, t in tensors)
        return floats and any(t.numel() > 1 for _, t in tensors) and all(isinstance(key, str) for key, _ in tensors)


def _address(held: Any) -> int:
    """Where the numbers of a tensor or an array lie; 0 where that cannot be said."""
    address = 0
    if is_array(held):
        address = held.ctypes.data
    elif type(held) in (torch.Tensor, torch.nn.Parameter) and held.layout == torch.strided:
        with contextlib.suppress(RuntimeError):
            address = held.data_ptr()
    return address


def unused(name: str, copies: Iterable[tuple[str, Any]]) -> str:
    """A name that none of them has."""
    used = {label for label, _ in copies}
    numbers = (f"{name}#{number}" for number in range(1, len(used) + 1))
    return name if name not in used else next(label for label in numbers if label not in used)


_grad = operator.attrgetter("grad")


def shapes_of(tensors: Iterable[torch.Tensor]) -> Counter[tuple[int, ...]]:
    """How many tensors have each shape. One whose shape is of symbols is part of a program, not of its numbers."""
    shapes = [t.shape for t in tensors if not shapeless(t)]
    try:
        return Counter(shapes)
    except TypeError:
        return Counter(shape for shape in shapes if all(type(n) is int for n in shape))


def _within(few: Counter[tuple[int, ...]], many: Counter[tuple[int, ...]]) -> bool:
    return all(many.get(shape, 0) >= number for shape, number in few.items())


def _values(container: Any) -> list[Any]:
    return list(dict.values(container) if issubclass(type(container), dict) else container)


def tensors_in(container: Any) -> list[tuple[Any, torch.Tensor]]:
    """The tensors that it holds itself, with their keys or places."""
    return [(key, value) for key, value in held_in(container) if is_tensor(value)]


def held_in(container: Any) -> list[tuple[Any, Any]]:
    """These, and arrays of NumPy where it begins with one."""
    pairs = dict.items(container) if issubclass(type(container), dict) else enumerate(container)
    arrays = is_array(first_of(container))
    return [(key, value) for key, value in list(pairs) if is_tensor(value) or (arrays and is_array(value))]
