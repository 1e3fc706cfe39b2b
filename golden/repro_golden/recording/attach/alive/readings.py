"""What is read of an optimizer after its step, by name."""

from __future__ import annotations

import contextlib
import fnmatch
import hashlib
import itertools
import weakref
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.nn.modules import module as modules
from torch.nn.parameter import is_lazy

from repro_golden.base.printed.machine_numbers import is_clock, measures_time
from repro_golden.fingerprint.placement import Part, Placement, whole
from repro_golden.recording.attach.alive import megatron
from repro_golden.recording.attach.alive.megatron import Main, is_copy
from repro_golden.recording.attach.alive.opened import addressed, leaves
from repro_golden.recording.attach.base.by_identity import id_of

__all__ = [
    "CLOSED",
    "TIMES",
    "Activations",
    "Held",
    "Places",
    "Reading",
    "Tensors",
    "folded",
    "gradients_of",
    "groups_of",
    "handed_to",
    "is_leaf",
    "learning_rates",
    "parameters_of",
    "shapeless",
]


class Tensors(dict[str, torch.Tensor]):
    """Tensors by name, as they are read: of a type of its own, for a search would take a dict for the program's."""

    __slots__ = ()


Places = dict[str, Placement]

_NOTHING: dict[Any, Any] = {}


class Reading(NamedTuple):
    """Tensors by name, and where those lie that are parts of theirs."""

    tensors: Tensors
    places: Places

    def but(self, leave_out: Callable[[str], bool], prefix: str = "") -> Reading:
        """The same without the tensors of some names, which begin with the prefix."""
        names = [name for name in self.tensors if not leave_out(prefix + name)]
        places = {name: self.places[name] for name in names if name in self.places}
        return Reading(Tensors((name, self.tensors[name]) for name in names), places)


class Held:
    """What can be read of an optimizer; neither this nor its parameters are kept alive.

    Args:
        optimizer: One of torch's or Megatron's.
        parameters: The model's that it updates, by name.
        places: Where those lie that are parts of theirs.
        called: The path of a module, whose state the optimizer may keep.
    """

    def __init__(
        self,
        optimizer: Any,
        parameters: Mapping[str, torch.Tensor],
        places: Places,
        called: Callable[[torch.nn.Module], str] | None = None,
    ) -> None:
        self._parameters = {name: weakref.ref(parameter) for name, parameter in parameters.items()}
        self._optimizer: weakref.ref[Any] = weakref.ref(optimizer)
        self._places, self._called = places, called
        # asked now: at the program's end there are no process groups any more
        self._copied = {id_of(p) for p in parameters.values() if is_copy(p)}
        self._flat: dict[tuple[str, tuple[int, int]], Placement] = {}

    @property
    def parameters(self) -> Tensors:
        """Those that are alive, by name."""
        return Tensors((name, p) for name, known in self._parameters.items() if (p := known()) is not None)

    def weights(self) -> Reading:
        """The parameters; a slice of those that are gathered later."""
        mains = self._mains()
        if not any(main.late for main in mains.values()):
            return Reading(self.parameters, self._places)
        out, places = Tensors(), Places()
        for name, parameter in self.parameters.items():
            self._put(out, places, name, parameter, mains.get(id_of(parameter)))
        return Reading(out, places)

    def gradients(self, begun: Mapping[int, tuple[torch.Tensor]] = _NOTHING) -> Reading:
        """The gradients that there are: ``main_grad`` where Megatron's DDP keeps it, else ``grad``.

        Sparse ones are read as their indices and values, for `to_dense` would allocate. With the distributed
        optimizer, a rank has the sum over ranks of its own slice only.

        Args:
            begun: What the step began with (`gradients_of`): it may have let go of some.
        """
        out, places = Tensors(), Places()
        mains = self._mains()
        for name, parameter in self.parameters.items():
            grad = getattr(parameter, "main_grad", None)
            if grad is None and (grad := parameter.grad) is None:
                if (freed := begun.get(id_of(parameter))) is None:
                    continue
                (grad,) = freed
            if grad.is_sparse:
                out |= {f"{name}.indices": grad._indices(), f"{name}.values": grad._values()}
            elif mains:
                self._put(out, places, name, grad, mains.get(id_of(parameter)), parameter)
            else:
                out[name] = grad
                if name in self._places:
                    places[name] = self._places[name]
        return Reading(out, places)

    def mains(self) -> Reading:
        """The fp32 copies of parameters, or this rank's slices of them."""
        out, places = Tensors(), Places()
        mains = self._mains()
        for name, parameter in self.parameters.items() if mains else ():
            main = mains.get(id_of(parameter))
            if main is not None and main.tensor is not None and main.tensor.dtype != parameter.dtype:
                self._shard(out, places, name, main.tensor, parameter, main.flat)
        return Reading(out, places)

    def state(self) -> dict[str, Reading]:
        """The optimizer's state to any depth by kind, then by parameter; the copies of parameters are ``main``.

        Numbers of a kind are one tensor, ``number/KIND``. What lies in the state under another key than a parameter,
        and in the optimizer's public attributes, is ``own/KEY``.
        """
        readings: dict[str, Reading] = {}
        mains, parameters = self._mains(), self.parameters
        copies = self.mains()
        if copies.tensors:
            readings["main"] = copies
        optimizer = self._optimizer()
        state = getattr(optimizer, "state", _NOTHING)
        states = None if mains else state if isinstance(state, Mapping) or megatron.is_megatron(optimizer) else _NOTHING
        numbers: dict[str, list[float]] = {}
        alike = None if states is None or self._places else _alike(states, parameters)
        for kind, tensors in (alike or {}).items():
            readings["main" if kind == "master_param" else kind] = Reading(tensors, {})
        by_id: dict[int, Any] = {}
        if (
            alike is None and states is not None and type(states) in _DICTS
        ):  # no tensor is asked whether it is a number that is a key
            by_id = {key if type(key) is int else id(key): value for key, value in states.items()}
        for name, parameter in () if alike is not None else parameters.items():
            main = mains.get(id_of(parameter))
            values: Mapping[Any, Any] = _NOTHING
            if states is not None:
                values = (
                    by_id.get(id(parameter), _NOTHING) if type(states) in _DICTS else states.get(parameter, _NOTHING)
                )
            elif main is not None:
                values = main.state
            closed = dict[str, str]()
            for kind, value in leaves(values, "", self._called, closed):
                if not isinstance(value, torch.Tensor):
                    numbers.setdefault(kind, []).append(value)
                    continue
                kind = "main" if kind == "master_param" else kind
                held = readings.get(kind)
                if held is None:
                    held = readings[kind] = Reading(Tensors(), {})
                self._shard(*held, name, value, parameter, None if main is None else main.flat)
            CLOSED.update({f"{kind}/{name}": why for kind, why in closed.items()})
        if optimizer is not None:
            _beside(optimizer, _NOTHING if mains else state, parameters.values(), self._called, readings, numbers)
        if numbers:
            readings["number"] = Reading(Tensors((kind, _tensor_of(v)) for kind, v in sorted(numbers.items())), {})
        return {kind: readings[kind] for kind in sorted(readings)}

    def kinds(self, *, state: bool = True) -> Iterator[tuple[str, Reading]]:
        """The parameters and, where it is asked for, the state, by the prefix of their names."""
        yield "", self.weights()
        for kind, reading in self.state().items() if state else ():
            yield f"{kind}/", reading

    def _mains(self) -> dict[int, Main]:
        optimizer = self._optimizer()
        return megatron.mains(optimizer) if megatron.is_megatron(optimizer) else {}

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
        elif id_of(parameter) in self._copied:
            return  # it is cut elsewhere than the first stage's, whose slices are all there is to read
        else:
            place = self._flat.get((name, flat))
            if place is None:
                place = self._flat[name, flat] = _slice(self._places.get(name), tuple(parameter.shape), *flat)
        out[name] = tensor
        if place is not None:
            places[name] = place


def groups_of(optimizer: Any) -> Sequence[Mapping[str, Any]]:
    """The groups of an optimizer; none of one that has let go of them."""
    groups: Sequence[Mapping[str, Any]] = getattr(optimizer, "param_groups", ())
    return groups


def parameters_of(group: Mapping[str, Any]) -> list[torch.Tensor]:
    """The parameters of a group, which may have them by keys of its own; those that have no shape yet are left out."""
    given = group["params"]
    return [p for p in (given.values() if isinstance(given, Mapping) else given) if not is_lazy(p)]


def shapeless(tensor: torch.Tensor) -> bool:
    """Whether a tensor has no shape: it is nested, or no data has given it one yet."""
    return tensor.is_nested or is_lazy(tensor)


def gradients_of(optimizer: Any) -> dict[int, tuple[torch.Tensor]]:
    """The gradients that there are, by id of their parameter.

    Each is alone in a tuple: a mapping to tensors of these shapes would pass for a copy of the parameters.
    """
    # of whatever passes for an optimizer: who reads it says what is wrong with it, and a handler's exception passes
    with contextlib.suppress(AttributeError, KeyError, TypeError):
        parameters = [p for group in groups_of(optimizer) for p in parameters_of(group)]
        return {id_of(p): (grad,) for p in parameters if (grad := p.grad) is not None}
    return {}


def handed_to(optimizer: Any) -> list[Any]:
    """The optimizers that one only hands its steps on to, as torchtitan's container does; any other by itself.

    It has a list ``optimizers``, whose parameters are all of its own, and keeps neither state nor tensors itself.
    """
    inner = vars(optimizer).get("optimizers")
    if type(inner) is not list or not inner or not all(isinstance(each, torch.optim.Optimizer) for each in inner):
        return [optimizer]
    held = {id_of(p) for each in inner for group in groups_of(each) for p in parameters_of(group)}
    parameter_ids = {id_of(p) for group in groups_of(optimizer) for p in parameters_of(group)}
    return [optimizer] if parameter_ids - held or optimizer.state or Held(optimizer, {}, {}).state() else inner


_DICTS = (dict, defaultdict, OrderedDict)
"""Whose values are those that they give by key: what derives from them may answer otherwise."""


def _alike(states: Mapping[Any, Any], parameters: Tensors) -> dict[str, Tensors] | None:
    """The state of parameters that all have tensors of the same kinds, as nearly always; None where they have not."""
    if not parameters or type(states) not in _DICTS:  # Megatron's of several optimizers only looks like one
        return None
    known: dict[int, Any] = dict(zip(map(id_of, states), states.values(), strict=True))  # a tensor's hash is dear
    held: list[Any] = [known.get(id_of(parameter)) for parameter in parameters.values()]
    if set(map(type, held)) != {dict} or len(set(map(tuple, held))) > 1:
        return None
    kinds = {kind: [values[kind] for values in held] for kind in held[0]}
    if any(
        type(kind) is not str or addressed(kind) or set(map(type, values)) != {torch.Tensor}
        for kind, values in kinds.items()
    ):
        return None
    return {kind: Tensors(zip(parameters, values, strict=True)) for kind, values in kinds.items()}


def _slice(place: Placement | None, shape: tuple[int, ...], start: int, stop: int) -> Placement:
    """A slice of a flattened parameter. One with nothing in it still says of which tensor it is."""
    place = place or whole("", shape)
    sliced = place.flat(start, stop)
    nothing = Part("", place.parts[0].shape, (0,), 0, (1,), 0, (1,))
    return sliced if sliced.parts else Placement(sliced.shape, (nothing,))


_OURS = ("state", "param_groups", "defaults")


def is_leaf(tensor: torch.Tensor) -> bool:
    """Whether nothing computed a tensor.

    Of a view of several, whose base was written since, torch refuses to tell; such are FSDP's of its flat parameters.
    """
    try:
        return tensor.grad_fn is None
    except RuntimeError:
        return False


def folded(values: Iterable[bytes]) -> torch.Tensor:
    """What stands for any number of values, in their order."""
    hasher = hashlib.sha256()
    for value in values:
        hasher.update(len(value).to_bytes(8, "little") + value)
    return torch.frombuffer(bytearray(hasher.digest()), dtype=torch.uint8)


TIMES: set[str] = set()
"""What optimizers of this process keep that the clock decides: left out, and named."""
CLOSED: dict[str, str] = {}
"""What they keep in their state that cannot be looked into, by name, and why."""


def _beside(
    optimizer: Any,
    states: Any,
    parameters: Collection[torch.Tensor],
    called: Callable[[torch.nn.Module], str] | None,
    readings: dict[str, Reading],
    numbers: dict[str, list[float]],
) -> None:
    """What an optimizer keeps that is none of the parameters', but for what the clock decides.

    A state that is no mapping says of nothing in it whose it is: all of it is looked into, as ``own/state``.
    """
    items = states.items() if isinstance(states, Mapping) else ()
    read = set(map(id_of, parameters))
    numbers_read = set(map(id, parameters)) if any(type(key) is int for key, _ in items) else set[int]()
    # keys that were read are left out, and no others: a copy of a parameter is a key too, and so is one that was its
    loose = {k: v for k, v in items if (k not in numbers_read if type(k) is int else id_of(k) not in read)}
    ours = megatron.is_megatron(optimizer)  # whose state may answer as a mapping does, and be none
    whole_state = {} if ours or isinstance(states, Mapping) else {"state": states}
    attributes = {} if ours else vars(optimizer)
    public = {k: v for k, v in list(attributes.items()) if not k.startswith("_") and k not in _OURS}
    closed = dict[str, str]()
    used = Counter[str]()
    in_states = ((True, *pair) for pair in leaves(whole_state or loose, "", called, closed))
    shown = ((False, *pair) for pair in leaves(public, "", called, nested=False))
    for in_state, path, value in itertools.chain(in_states, shown):
        used[path] += 1
        name = path if used[path] == 1 else f"{path}#{used[path] - 1}"
        if isinstance(value, torch.Tensor):
            if id_of(value) not in read and (in_state or (not value.requires_grad and is_leaf(value))):
                readings.setdefault("own", Reading(Tensors(), {})).tensors[name] = value
        elif measures_time(path) or is_clock(value):
            TIMES.add(f"own.{name}")
        else:
            numbers[f"own.{name}"] = [value]
    CLOSED.update({f"own/{name}": why for name, why in closed.items()})
    if not hasattr(optimizer, "param_groups"):
        CLOSED[f"the parameters of {type(optimizer).__name__}"] = "it has no param_groups"
    for number, group in enumerate(groups_of(optimizer)):
        if isinstance(group.get("step"), (int, float)):
            numbers[f"step/{number}" if number else "step"] = [group["step"]]


def _tensor_of(values: list[float]) -> torch.Tensor:
    """Numbers as they are: integers of 64 bits where all are, else floats, which Python has of 64 bits too.

    Where neither holds them all, as with an integer that is larger, one tensor stands for them.
    """
    whole = [value for value in values if isinstance(value, int)]
    if len(whole) == len(values) and all(-(1 << 63) <= value < 1 << 63 for value in whole):
        return torch.tensor(values, dtype=torch.int64, device="cpu")
    if all(abs(value) <= 1 << 53 for value in whole):
        return torch.tensor(values, dtype=torch.float64, device="cpu")
    return folded((f"{v:x}" if isinstance(v, int) else v.hex()).encode() for v in values)


def learning_rates(optimizer: Any) -> dict[str, float | torch.Tensor]:
    """``lr`` of the first group, ``lr/K`` of the others."""
    groups = megatron.groups(optimizer) if megatron.is_megatron(optimizer) else groups_of(optimizer)
    rates = {f"lr/{k}" if k else "lr": group.get("lr") for k, group in enumerate(groups)}
    numbers = {name: float(rate) for name, rate in rates.items() if isinstance(rate, (int, float))}
    return numbers | {name: rate for name, rate in rates.items() if isinstance(rate, torch.Tensor)}


# -- outputs of modules and their gradients, for the modules that the user names


class Activations:
    """Forward hooks on modules whose path fits a glob, and tensor hooks on what they return.

    Not full-backward hooks of modules, which break in-place operations. What is computed without gradients, in a
    compiled region, or again in the backward pass by activation checkpointing is left out.

    Args:
        globs: Of module paths; a root's path is ''.
        session: Takes the signals.
        untraced: Keeps the compiler out of a function.
    """

    def __init__(
        self, globs: Sequence[str], session: Any, untraced: Callable[[Callable[..., Any]], Callable[..., Any]]
    ) -> None:
        self._globs, self._session = globs, session
        self._take = untraced(lambda module, output: self._harmless(module, output))

    def watch(self) -> None:
        """Hook all modules of this process; those that fit no glob cost a look-up each call."""
        modules.register_module_forward_hook(self._called)

    def _called(self, module: torch.nn.Module, _: Any, output: Any) -> None:
        if not torch.compiler.is_compiling() and torch.is_grad_enabled():
            self._take(module, output)

    def _harmless(self, module: torch.nn.Module, output: Any) -> None:
        try:
            self._observe(module, output)
        except Exception as error:  # noqa: BLE001 - whatever it is, the program goes on
            self._session.fail(error)

    def _observe(self, module: torch.nn.Module, output: Any) -> None:
        name = self._session.names.of_module(module)
        if not any(fnmatch.fnmatchcase(name, glob) for glob in self._globs):
            return
        backward = torch._C._current_graph_task_id() != -1
        for key, tensor in _tensors(output, f"{name}.output" if name else "output"):
            if backward and self._session.seen("forward", key):
                continue
            self._session.observe("forward", key, tensor.detach())
            if tensor.requires_grad and tensor.grad_fn is not None:
                tensor.register_hook(self._gradient(key))  # type: ignore[no-untyped-call]

    def _gradient(self, name: str) -> Callable[[torch.Tensor], None]:
        return lambda gradient: self._session.observe("grad", name, gradient.detach())


def _tensors(value: Any, name: str) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors in what a module returned: itself, or those in tuples, lists and mappings, by position or key."""
    if isinstance(value, torch.Tensor):
        yield name, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _tensors(item, f"{name}.{key}")
    elif isinstance(value, (tuple, list)):
        for k, item in enumerate(value):
            yield from _tensors(item, f"{name}.{k}")
