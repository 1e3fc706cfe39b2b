"""Steps of a program that has no optimizer of torch's: it changes its parameters itself after each backward pass.

A step begins where gradients are there, at the end of the outermost backward pass, and ends where the next one begins
or the program does. As soon as an optimizer of torch's is made, its steps are what counts, and these end. A first pass
since which nothing moved of what it holds was a check, or the way to its first step.
"""

from __future__ import annotations

import functools
import threading
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from repro_golden.recording.attach.alive.readable import unreadable
from repro_golden.recording.attach.alive.readings import Held, Reading, Tensors, groups_of, is_leaf, parameters_of
from repro_golden.recording.attach.base.by_identity import id_of
from repro_golden.recording.attach.base.guard import harmless, stand_in

__all__ = ["ByHand", "Depth", "hook"]


class ByHand:
    """Stands for the optimizer that there is not: what has a gradient is a parameter.

    A program may write to its parameters, or make new ones in each step: `params = [(p - rate * g) ...]`.

    Args:
        parameters: Those known at first.
        unread: Takes why something was not read, by name.
    """

    def __init__(self, parameters: list[torch.Tensor], unread: dict[str, str]) -> None:
        self.param_groups: list[dict[str, Any]] = [{"params": parameters}]
        self.state: Mapping[Any, Any] = {}
        self._led_to: Mapping[str, torch.Tensor] = {}
        self._anew = False
        self._begun = False
        self._first: Any = None
        self._unread = unread

    @property
    def begun(self) -> bool:
        """Whether a step is. A public attribute would be read as what the optimizer keeps."""
        return self._begun

    def begin(self, parameters: list[torch.Tensor], led_to: Mapping[str, torch.Tensor]) -> None:
        """A step begins with these, and with what names lead to now."""
        self.param_groups, self._led_to = [{"params": parameters}], led_to

    def hold(self, *, first: bool) -> None:
        """What it begins with is read. Of the first step, what the parameters hold now is asked for later."""
        self._begun, self._first = True, _contents(self.param_groups[0]["params"]) if first else None

    def moved_nothing(self, optimizer: Any) -> bool:
        """Whether no parameter has other bits than before the first step, and an optimizer holds some of them."""
        parameters = self.param_groups[0]["params"]
        held = {id_of(parameter) for group in groups_of(optimizer) for parameter in parameters_of(group)}
        if held.isdisjoint(map(id_of, parameters)) or any(map(unreadable, parameters)):
            return False
        before, now = (reading.result() for reading in (self._first, _contents(parameters)))
        return [[scan.lanes for scan in scans] for scans in before] == [[scan.lanes for scan in scans] for scans in now]

    def gradients(self, held: Held, given: Mapping[int, tuple[torch.Tensor, torch.Tensor]]) -> Reading:
        """The gradients that a step begins with: those that the program got, by id of a parameter, or in ``grad``."""
        reading = held.gradients()
        for name, parameter in held.parameters.items():
            if id_of(parameter) in given:
                reading.tensors[name] = given[id_of(parameter)][1]
        return Reading(Tensors(sorted(reading.tensors.items())), reading.places)

    def follow(self, led_to: Mapping[str, torch.Tensor]) -> None:
        """A step has ended: what it made anew, by what names lead to now, takes the place of what was there."""
        names, now = defaultdict[int, list[str]](list), set(map(id_of, led_to.values()))
        for name, tensor in self._led_to.items():
            names[id_of(tensor)].append(name)
        parameters = []
        for parameter in self.param_groups[0]["params"]:
            there = _led_from(parameter, names.get(id_of(parameter), []), led_to)
            new = next((tensor for tensor in there if id_of(tensor) not in names), None)
            self._anew = self._anew or new is not None
            if new is None and self._anew and id_of(parameter) not in now:
                self._unread["the last update"] = "it made its parameters anew, and they were gone when it was read"
            parameters.append(parameter if new is None else new)
        self.begin(parameters, {})
        self._begun, self._first = False, None


def _contents(tensors: Sequence[torch.Tensor]) -> Any:
    """The reading of what tensors hold now, of those that can be read."""
    from repro_golden.trace.signals import collector

    reading = collector()
    reading.add([tensor for tensor in tensors if not unreadable(tensor)])
    return reading.finish()


def _led_from(
    parameter: torch.Tensor, names: Sequence[str], led_to: Mapping[str, torch.Tensor]
) -> Iterator[torch.Tensor]:
    """What the names of a parameter lead to now, where it could be the same one.

    Of a list or mapping that has it, its place there counts: a variable may be left over from a loop.
    """
    for name in [name for name in names if "." in name] or names:
        tensor = led_to.get(name)
        if tensor is not None and (tensor.shape, tensor.dtype) == (parameter.shape, parameter.dtype):
            yield tensor


class Depth(threading.local):
    """How many calls of this thread are inside of each other."""

    value = 0


def hook(session: Any) -> None:
    """Watch backward passes of this process: a step is made by each until it makes an optimizer."""
    depth = Depth()
    backward, grad = torch.autograd.backward, torch.autograd.grad

    @functools.wraps(backward)
    def watched(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return backward(*args, **kwargs)
        if not depth.value and not session.has_optimizer:
            session.end_by_hand()
        made = None if depth.value else _begins(session)
        depth.value += 1
        try:
            out = backward(*args, **kwargs)
        finally:
            depth.value -= 1
            stepped = made is not None and _ends(session, made)
        if session.has_optimizer:
            given = args[0] if args else kwargs["tensors"]
            given = (given,) if isinstance(given, torch.Tensor) else given
            _passed(session, given, inner=depth.value > 0, stepped=stepped)
        elif not depth.value:
            session.begin_by_hand()
        return out

    @functools.wraps(grad)
    def watched_grad(outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        again = kwargs.get("create_graph") or any(args[2:3])
        if torch.compiler.is_compiling():
            return grad(outputs, inputs, *args, **kwargs)
        if depth.value or again:
            session.passes.inside()
            return grad(outputs, inputs, *args, **kwargs)
        if not isinstance(inputs, Sequence) and not hasattr(inputs, "__torch_function__"):
            inputs = tuple(inputs)  # as torch does: an iterator, or what a mapping holds
        given = (inputs,) if isinstance(inputs, torch.Tensor) else inputs
        if not _all_parameters(given):
            return grad(outputs, inputs, *args, **kwargs)
        if session.has_optimizer:
            made = _begins(session, asked=True)
            try:
                out = grad(outputs, inputs, *args, **kwargs)
            finally:
                stepped = made is not None and _ends(session, made)
            _passed(session, given, asked=True, stepped=stepped)
            return out
        session.end_by_hand()
        out = grad(outputs, inputs, *args, **kwargs)
        session.begin_by_hand({id_of(p): (p, g) for p, g in zip(given, out, strict=True) if g is not None})
        return out

    stand_in([torch.autograd], "backward", lambda _: watched)
    stand_in([torch.autograd], "grad", lambda _: watched_grad)
    _hook_making(session)


@harmless
def _begins(session: Any, *, asked: bool = False) -> int:
    """A pass begins that is inside of no other, one that only asks for gradients or not; how many steps there are."""
    session.metrics.set_aside()
    if session.has_optimizer and not asked:
        session.passes.begins()
    made: int = session.made
    return made


@harmless
def _ends(session: Any, made: int) -> bool:
    """It has ended, or raised; whether steps were made inside of it, behind so many."""
    stepped: bool = session.made > made
    session.metrics.take_up(stepped=stepped)
    return stepped


@harmless
def _passed(session: Any, given: Iterable[Any], **how: bool) -> None:
    """A pass was made in a program that has optimizers (`Passes.passed`)."""
    session.passes.passed(given, **how)


def _hook_making(session: Any) -> None:
    """Watch for optimizers that are made, copied or unpickled."""
    make, set_ = torch.optim.Optimizer.__init__, torch.optim.Optimizer.__setstate__

    @functools.wraps(make)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807 - it stands for one
        make(self, *args, **kwargs)
        session.drop_by_hand(self)
        session.end_by_hand()
        session.optimizer_made(self)

    @functools.wraps(set_)
    def __setstate__(self: Any, state: Any) -> None:  # noqa: N807 - likewise: one that is copied or unpickled
        known = session.knows(self)
        if not known:
            session.end_by_hand()
        set_(self, state)
        if not known:
            session.optimizer_made(self, copied=True)

    torch.optim.Optimizer.__init__ = __init__  # type: ignore[method-assign]
    torch.optim.Optimizer.__setstate__ = __setstate__  # type: ignore[method-assign]


def _all_parameters(given: Any) -> bool:
    """Whether gradients are asked for of nothing but what the program may step by."""
    return isinstance(given, Sequence) and all(
        isinstance(item, torch.Tensor) and is_leaf(item) and item.requires_grad for item in given
    )
