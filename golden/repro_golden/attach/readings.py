"""What is read of an optimizer after its step, by name."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from repro_golden.attach import megatron_mains
from repro_golden.attach.megatron_mains import Main
from repro_golden.attach.megatron_names import is_copy
from repro_golden.fingerprint.placement import Part, Placement, whole

__all__ = ["Held", "Reading", "learning_rates", "state"]

Tensors = dict[str, torch.Tensor]
Places = dict[str, Placement]

_NOTHING: dict[Any, Any] = {}


class Reading(NamedTuple):
    """Tensors by name, and where those lie that are parts of theirs."""

    tensors: Tensors
    places: Places


class Held:
    """What can be read of an optimizer, which it does not keep alive.

    Args:
        optimizer: One of torch's or Megatron's.
        parameters: The model's that it updates, by name.
        places: Where those lie that are parts of theirs.
    """

    def __init__(self, optimizer: Any, parameters: Tensors, places: Places) -> None:
        self.parameters = parameters
        self._optimizer: weakref.ref[Any] = weakref.ref(optimizer)
        self._places = places
        self._flat: dict[tuple[str, tuple[int, int]], Placement] = {}

    def weights(self) -> Reading:
        """The parameters; a slice of those that are gathered later."""
        mains = self._mains()
        if not any(main.late for main in mains.values()):
            return Reading(self.parameters, self._places)
        out, places = Tensors(), Places()
        for name, parameter in self.parameters.items():
            self._put(out, places, name, parameter, mains.get(id(parameter)))
        return Reading(out, places)

    def gradients(self) -> Reading:
        """The gradients that there are: ``main_grad`` where Megatron's DDP keeps it, else ``grad``.

        Sparse ones are read as their indices and values, for `to_dense` would allocate. With the distributed
        optimizer, a rank has the sum over ranks of its own slice only.
        """
        out, places = Tensors(), Places()
        mains = self._mains()
        for name, parameter in self.parameters.items():
            grad = getattr(parameter, "main_grad", None)
            grad = parameter.grad if grad is None else grad
            if grad is None:
                continue
            if grad.layout == torch.sparse_coo:
                out |= {f"{name}.indices": grad._indices(), f"{name}.values": grad._values()}
            else:
                self._put(out, places, name, grad, mains.get(id(parameter)), parameter)
        return Reading(out, places)

    def mains(self) -> Reading:
        """The fp32 copies of parameters, or this rank's slices of them."""
        out, places = Tensors(), Places()
        mains = self._mains()
        for name, parameter in self.parameters.items():
            main = mains.get(id(parameter))
            if main is not None and main.tensor is not None and main.tensor.dtype != parameter.dtype:
                self._shard(out, places, name, main.tensor, parameter, main.flat)
        return Reading(out, places)

    def state(self) -> dict[str, Reading]:
        """Tensors of the optimizer's state by kind, then by parameter; the copies of parameters are ``main``."""
        found: dict[str, Reading] = {}
        own = self._mains()
        copies = self.mains()
        if copies.tensors:
            found["main"] = copies
        states = None if own else getattr(self._optimizer(), "state", _NOTHING)
        for name, parameter in self.parameters.items():
            main = own.get(id(parameter))
            values: Mapping[Any, Any] = _NOTHING
            if states is not None:
                values = states.get(parameter, _NOTHING)
            elif main is not None:
                values = main.state
            for kind, value in values.items():
                if isinstance(value, torch.Tensor):
                    kind = "main" if kind == "master_param" else str(kind)
                    held = found.get(kind)
                    if held is None:
                        held = found[kind] = Reading({}, {})
                    self._shard(*held, name, value, parameter, None if main is None else main.flat)
        return {kind: found[kind] for kind in sorted(found)}

    def _mains(self) -> dict[int, Main]:
        optimizer = self._optimizer()
        return megatron_mains.mains(optimizer) if megatron_mains.is_megatron(optimizer) else {}

    def _put(
        self,
        out: Tensors,
        places: Places,
        name: str,
        tensor: torch.Tensor,
        main: Main | None,
        parameter: torch.Tensor | None = None,
    ) -> None:
        """A tensor of a parameter's shape: the slice of it that is this rank's, or all of it."""
        if main is not None and main.flat is not None:
            piece = tensor.detach().reshape(-1)[slice(*main.flat)]
            self._shard(out, places, name, piece, tensor if parameter is None else parameter, main.flat)
            return
        out[name] = tensor
        if name in self._places:
            places[name] = self._places[name]

    def _shard(
        self,
        out: Tensors,
        places: Places,
        name: str,
        tensor: torch.Tensor,
        parameter: torch.Tensor,
        flat: tuple[int, int] | None,
    ) -> None:
        """A tensor that belongs to a parameter, if it has the shape of what is updated."""
        if flat is None:
            place = self._places.get(name) if tensor.shape == parameter.shape else None
        elif tuple(tensor.shape) != (flat[1] - flat[0],):
            place = None
        elif is_copy(parameter):
            return  # it is cut elsewhere than the first stage's, whose slices are all there is to read
        else:
            place = self._flat.get((name, flat))
            if place is None:
                place = self._flat[name, flat] = _slice(self._places.get(name), tuple(parameter.shape), *flat)
        out[name] = tensor
        if place is not None:
            places[name] = place


def _slice(place: Placement | None, shape: tuple[int, ...], start: int, stop: int) -> Placement:
    """A slice of a flattened parameter. One with nothing in it still says of which tensor it is."""
    place = place or whole("", shape)
    found = place.flat(start, stop)
    nothing = Part("", place.parts[0].shape, (0,), 0, (1,), 0, (1,))
    return found if found.parts else Placement(found.shape, (nothing,))


def state(optimizer: Any, parameters: Tensors) -> dict[str, Tensors]:
    """Tensors of the optimizer's state by kind, then by parameter, as this rank has them."""
    return {kind: held.tensors for kind, held in Held(optimizer, parameters, {}).state().items()}


def learning_rates(optimizer: Any) -> dict[str, float | torch.Tensor]:
    """``lr`` of the first group, ``lr/K`` of the others."""
    groups = megatron_mains.groups(optimizer) if megatron_mains.is_megatron(optimizer) else optimizer.param_groups
    rates = {f"lr/{k}" if k else "lr": group.get("lr") for k, group in enumerate(groups)}
    numbers = {name: float(rate) for name, rate in rates.items() if isinstance(rate, (int, float))}
    return numbers | {name: rate for name, rate in rates.items() if isinstance(rate, torch.Tensor)}
