"""Steps of a program that has no optimizer of torch's: it changes its parameters itself after each backward pass.

A step begins where gradients are there, at the end of the outermost backward pass, and ends where the next one begins
or the program does. Passes before a parameter first moves are of one step. As soon as an optimizer of torch's is made,
its steps are what counts, and these end: passes since which nothing moved were a check, or the way to its first step.
"""

from __future__ import annotations

import functools
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from repro_golden.recording.attach.alive.readable import unreadable
from repro_golden.recording.attach.alive.readings import Held, Reading, Tensors, is_leaf
from repro_golden.recording.attach.by_identity import id_of
from repro_golden.recording.attach.standing_in import stand_in

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
        self._anew = self._begun = self._moving = False
        self._passes = 0
        self._before: list[_Contents] = []
        self._unread = unread

    @property
    def begun(self) -> bool:
        """Whether a step is. A public attribute would be read as what the optimizer keeps."""
        return self._begun

    @begun.setter
    def begun(self, value: bool) -> None:
        self._begun = value

    def begin(self, parameters: list[torch.Tensor], led_to: Mapping[str, torch.Tensor]) -> None:
        """A step begins with these, or has one more pass, and with what names lead to now."""
        self.param_groups, self._led_to = [{"params": parameters}], led_to

    def read(self) -> None:
        """Read what parameters begin with that were not there when the last step ended."""
        known = {number for contents in self._before for number in contents.ids}
        if new := [p for p in self.param_groups[0]["params"] if id_of(p) not in known]:
            self._before.append(_Contents(new))

    def gradients(self, held: Held, given: Mapping[int, tuple[torch.Tensor, torch.Tensor]]) -> Reading:
        """The gradients of a pass: those that the program got, by id of a parameter, or in ``grad``.

        The k-th one more pass of a step has them as ``name.k``.
        """
        reading = held.gradients()
        for name, parameter in held.parameters.items():
            if id_of(parameter) in given:
                reading.tensors[name] = given[id_of(parameter)][1]
        more = f".{self._passes}" if self._passes else ""
        self._passes += 1
        tensors = Tensors((name + more, tensor) for name, tensor in sorted(reading.tensors.items()))
        return Reading(tensors, {name + more: place for name, place in reading.places.items()})

    @property
    def passes(self) -> int:
        """How many the step under way has."""
        return self._passes

    @property
    def moving(self) -> bool:
        """Whether a step was made: each pass from then on is one."""
        return self._moving

    def ends(self, led_to: Callable[[], Mapping[str, torch.Tensor]], *, left: bool) -> bool:
        """Whether the step that has begun ends now, with the next pass, or is one at all where it is `left`.

        Args:
            led_to: Gives what names lead to now.
            left: Whether no pass by hand follows.
        """
        return (self._moving and not left) or self._moved() or any(new is not None for new in self._made_anew(led_to()))

    def _moved(self) -> bool:
        """Whether a parameter has other bits than when the last step ended."""
        now = _Contents(self.param_groups[0]["params"]).lanes()
        before = [known for contents in self._before for known in contents.lanes().items()]
        return any(now.get(number) != lanes for number, lanes in before)

    def drop(self) -> None:
        """What has begun is no step; where none was made before, nothing was trained by hand."""
        self._begun, self._passes = False, 0
        if not self._moving:
            self.begin([], {})
            self._before = []

    def follow(self, led_to: Mapping[str, torch.Tensor]) -> None:
        """A step has ended: what it made anew, by what names lead to now, takes the place of what was there."""
        now = set(map(id_of, led_to.values()))
        parameters = []
        for parameter, new in zip(self.param_groups[0]["params"], self._made_anew(led_to), strict=True):
            self._anew = self._anew or new is not None
            if new is None and self._anew and id_of(parameter) not in now:
                self._unread["the last update"] = "it made its parameters anew, and they were gone when it was read"
            parameters.append(parameter if new is None else new)
        self.begin(parameters, {})
        self._begun, self._passes, self._moving, self._before = False, 0, True, []
        self.read()

    def _made_anew(self, led_to: Mapping[str, torch.Tensor]) -> list[torch.Tensor | None]:
        """What was made in the place of each parameter, by what names lead to now; None where nothing was."""
        names = defaultdict[int, list[str]](list)
        for name, tensor in self._led_to.items():
            names[id_of(tensor)].append(name)
        there = [(p, names.get(id_of(p), [])) for p in self.param_groups[0]["params"]]
        return [next((t for t in _led_from(p, own, led_to) if id_of(t) not in names), None) for p, own in there]


class _Contents:
    """What tensors hold when it is made, of those that can be read. No device is waited for until it is asked."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        from repro_golden.trace.signals import collector

        there, reading = [tensor for tensor in tensors if not unreadable(tensor)], collector()
        self.ids = list(map(id_of, there))
        reading.add(there)
        self._pending = reading.finish()

    def lanes(self) -> dict[int, list[Any]]:
        """What stands for each content, by id of its tensor."""
        results = zip(self.ids, self._pending.result(), strict=True)
        return {number: [scan.lanes for scan in scans] for number, scans in results}


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
        depth.value += 1
        try:
            out = backward(*args, **kwargs)
        finally:
            depth.value -= 1
        if session.has_optimizer:
            given = args[0] if args else kwargs["tensors"]
            session.passed((given,) if isinstance(given, torch.Tensor) else given, inner=depth.value > 0)
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
            out = grad(outputs, inputs, *args, **kwargs)
            session.passed(given, asked=True)
            return out
        session.end_by_hand()
        out = grad(outputs, inputs, *args, **kwargs)
        session.begin_by_hand({id_of(p): (p, g) for p, g in zip(given, out, strict=True) if g is not None})
        return out

    stand_in([torch.autograd], "backward", lambda _: watched)
    stand_in([torch.autograd], "grad", lambda _: watched_grad)
    _hook_making(session)


def _hook_making(session: Any) -> None:
    """Watch for optimizers that are made, copied or unpickled."""
    make, set_ = torch.optim.Optimizer.__init__, torch.optim.Optimizer.__setstate__

    @functools.wraps(make)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807 - it stands for one
        session.end_by_hand(left=True)
        make(self, *args, **kwargs)
        session.optimizer_made(self)

    @functools.wraps(set_)
    def __setstate__(self: Any, state: Any) -> None:  # noqa: N807 - likewise: one that is copied or unpickled
        known = session.knows(self)
        if not known:
            session.end_by_hand(left=True)
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
