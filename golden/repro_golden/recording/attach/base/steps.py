"""When a step ends: after the outermost step call in flight has returned or is about to.

Optimizers call others (a subclass its base class, a wrapper the wrapped, a gradient scaler its optimizer), and torch's
hooks fire for each; a call that raised never fires its second hook. So calls are told by their frames, of which no
more is kept than what they are told by: a frame keeps alive all that its callers hold.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import sys
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import CodeType, FrameType
from typing import Any, ClassVar, NamedTuple

import torch

from repro_golden.fingerprint.in_flight import captures
from repro_golden.recording.attach.base.by_identity import ByIdentity, id_of
from repro_golden.recording.attach.base.rounds import Rounds, written

__all__ = ["Labels", "Made", "Steps", "Turns"]

_HOOKED = sys.modules[torch.optim.Optimizer.__module__].__file__
"""Where the frames of step calls live: torch wraps each optimizer's `step` in one."""


_Call = tuple[int, CodeType]
"""A call under way, as long as its frame is: the frame's place and code."""


@dataclass
class Made:
    """A step: what the outermost step call has done so far, with those that it made in turn.

    Attributes:
        optimizers: Those that stepped, in order.
        skipped: By id, whether an optimizer left its step out; a number that is not 0 then, where a device knows it.
        gradients: By id of a parameter, alone in a tuple, the gradient that the last call of these began with, which it
            may let go of. It is kept until the step has ended.
        closure: Whether a step was given what makes its gradients.
        replayed: Whether it was part of a CUDA graph, which may have done more behind it.
    """

    optimizers: list[Any] = field(default_factory=list)
    skipped: dict[int, bool | torch.Tensor] = field(default_factory=dict)
    gradients: dict[int, tuple[torch.Tensor]] = field(default_factory=dict)
    closure: bool = False
    replayed: bool = False


class Steps(threading.local):
    """The step calls in flight, of each thread.

    Args:
        begun: called with the optimizer of each step call before it, and whether that call is the outermost.
        ended: called with each step that was made.
        handed_to: The optimizers that a step call of one is a step of.
        gradients_of: By id of a parameter, an optimizer's gradients, each alone in a tuple.
        closure: Called before `begun` where a closure is to make the step's passes.
        is_none: Whether a step call of an optimizer, without a closure and inside of no other, is none.

    Attributes:
        captured: The optimizers whose step calls were captured for a CUDA graph, and not made; of all threads, for
            autograd's have hooks that step.
    """

    captured: ClassVar[list[Any]] = []

    def __init__(
        self,
        begun: Callable[[Any, bool], None],
        ended: Callable[[Made], None],
        handed_to: Callable[[Any], Sequence[Any]],
        gradients_of: Callable[[Any], Mapping[int, tuple[torch.Tensor]]],
        closure: Callable[[], None] = lambda: None,
        is_none: Callable[[Any], object] = lambda _: False,
    ) -> None:
        self._closure, self._is_none = closure, is_none
        self._begun, self._ended, self._handed_to, self._gradients_of = begun, ended, handed_to, gradients_of
        self._calls: list[_Call] = []
        self._made = Made()
        self._left = 0  # step calls that have returned
        self._whole: _Call | None = None

    def enter(self, optimizer: Any, *given: Any) -> None:
        """Torch's hook before a step: the nearest frame of torch's wrapper is the step call.

        Args:
            optimizer: It is to step.
            given: What its step is given, closures among it.
        """
        if captures():
            return
        this_call = self._push(_step_call())
        if self._whole is not None:
            return
        if closure := any(map(callable, given)):
            self._closure()
        elif self._calls == [this_call] and self._is_none(optimizer):
            self._whole = this_call
            return
        for number, each in enumerate(self._handed_to(optimizer)):
            self._begun(each, len(self._calls) == 1 and not number)
        if closure:
            self._made.closure = True  # what is there now is of the step before
        else:
            self._made.gradients.update(self._gradients_of(optimizer))

    def leave(self, optimizer: Any) -> None:
        """Torch's hook after a step: nothing but the hooks is left of it."""
        if captures():
            self.captured.append(optimizer)
            return
        this_call = _call_of(_step_call())
        none = this_call == self._whole
        self._pop(this_call)
        if not none:
            self._took(optimizer)

    def took(self, optimizers: Sequence[Any], *, replayed: bool = False) -> None:
        """Optimizers have stepped in a call in which none could be seen, or in the replay of a CUDA graph."""
        self._made.replayed = replayed
        self._pop(self._push(sys._getframe(0)))  # calls that raised are gone
        self._took(*optimizers)

    def none_in(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """A function whose step calls are none."""

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            this_call = self._push(sys._getframe(0))
            self._whole = self._whole or this_call
            try:
                return function(*args, **kwargs)
            finally:
                self._pop(this_call)

        return call

    def outer(
        self,
        step: Callable[..., Any],
        inner: Callable[..., Any],
        skipped: Callable[..., bool | torch.Tensor],
        *,
        whole: bool = False,
    ) -> Callable[..., Any]:
        """A method that makes optimizers step, as a step call of its own: it may do more, or leave them out.

        Args:
            step: The method.
            inner: From its arguments, the optimizer that it makes step; None where that is not known before.
            skipped: From what it returned, whether a step call was seen in it, and its arguments, whether the step was
                left out.
            whole: Whether `inner` gives all that steps: the optimizers that it calls in turn are parts of it.
        """

        @functools.wraps(step)
        def call(*args: Any, **kwargs: Any) -> Any:
            this_call = self._push(sys._getframe(0))
            optimizer = inner(*args, **kwargs)
            parts = [] if optimizer is None else [optimizer] if whole else self._handed_to(optimizer)
            if self._whole is None:
                for number, each in enumerate(parts):
                    self._begun(each, len(self._calls) == 1 and not number)
                self._whole = this_call if whole and parts else None
            left = self._left
            try:
                out = step(*args, **kwargs)
            except BaseException:
                self._pop(this_call)
                raise
            self._pop(this_call)
            if not self._calls:
                left_out = skipped(out, self._left > left, *args, **kwargs)
                self._made.optimizers = self._made.optimizers or list(parts)
                if left_out is not False:
                    self._made.skipped |= {id_of(each): left_out for each in self._made.optimizers}
                if self._made.optimizers:
                    self._end()
            return out

        return call

    def _took(self, *optimizers: Any) -> None:
        if self._whole is None:
            self._left += 1
            for optimizer in optimizers:
                parts = self._handed_to(optimizer)
                known = {id_of(o) for o in self._made.optimizers}
                self._made.optimizers += [each for each in parts if id_of(each) not in known]
                if (left_out := _found_by_scaler(optimizer)) is not None:
                    self._made.skipped |= {id_of(each): left_out for each in parts}
        if not self._calls:
            self._end()

    def _end(self) -> None:
        made, self._made = self._made, Made()
        self._ended(made)

    def _push(self, frame: FrameType) -> _Call:
        alive = set()
        outer = frame.f_back  # not itself, which may have the place of one that is gone
        while outer is not None:
            alive.add(_call_of(outer))
            outer = outer.f_back
        if any(call not in alive for call in self._calls):  # a call that raised
            self._calls = [call for call in self._calls if call in alive]
            self._made = self._made if self._calls else Made()
            self._whole = self._whole if self._whole in alive else None
        this_call = _call_of(frame)
        self._calls.append(this_call)
        return this_call

    def _pop(self, this_call: _Call) -> None:
        if this_call == self._whole:
            self._whole = None
        while self._calls and self._calls.pop() != this_call:
            pass


def _found_by_scaler(optimizer: Any) -> torch.Tensor | None:
    """What a gradient scaler gave to an optimizer that looks itself whether it must leave its step out, as fused ones.

    It is not 0 then. Nobody waits for a device to know.
    """
    flag = getattr(optimizer, "found_inf", None) if getattr(optimizer, "_step_supports_amp_scaling", False) else None
    return flag if isinstance(flag, torch.Tensor) and flag.numel() == 1 else None


def _call_of(frame: FrameType) -> _Call:
    return id_of(frame), frame.f_code


def _step_call() -> FrameType:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename != _HOOKED:
        frame = frame.f_back
    return frame or sys._getframe(1)


class Labels:
    """Names of optimizers, and the round that they step in (`rounds`)."""

    def __init__(self) -> None:
        self._made_at = ByIdentity[int]()
        self._classes: dict[str, list[str]] = {}  # by what they update, in the order in which they stepped first
        self._alike: dict[str, tuple[int, int]] = {}  # how many of one generation, and the step at which it began
        self._copies = ByIdentity[bool]()
        self._holders: dict[tuple[str, int], weakref.ref[Any]] = {}
        self._rounds = Rounds()
        self.last: dict[str, int] = {}  # the last step that each made

    @property
    def count(self) -> int:
        """How many optimizers the program has, or has made steps of: at least as many as step in a round."""
        return max(1, len(self._made_at), len(self._holders))

    def knows(self, optimizer: Any) -> bool:
        """Whether it is known when the program made it."""
        return self._made_at.get(optimizer) is not None

    def made(self, optimizer: Any, step: int, *, copied: bool = False) -> None:
        """The program has made an optimizer after so many steps, or a copy of one."""
        with contextlib.suppress(TypeError):  # a class that cannot be referred to weakly
            self._made_at.put(optimizer, step)
            self._copies.put(optimizer, copied)

    def of(self, optimizer: Any, parameters: Mapping[str, Any], step: int) -> str:
        """Label an optimizer by what tells it from others in every rank and run: what it updates, and its class.

        Of classes that update the same, as a wrapper and what it wraps, the first to step is the first, for a name says
        nothing. Those alike in both are counted, in the order in which they step first. One that was made after another
        such has stepped takes its place. A copy takes that of one that is gone: what it is a copy of may step on.
        """
        looks = [(name, tuple(p.shape), str(p.dtype)) for name, p in parameters.items()]
        label = f"{next(iter(parameters), '')} {hashlib.sha256(repr(looks).encode()).hexdigest()[:8]}"
        classes = self._classes.setdefault(label, [])
        if (name := type(optimizer).__qualname__) not in classes:
            classes.append(name)
        label = f"{label} {classes.index(name):04d}"
        alike, first = self._alike.get(label, (0, step))
        place = alike
        if (self._made_at.get(optimizer) or 0) > first:
            if self._copies.get(optimizer):
                place = next((k for k in range(alike) if self._holders[label, k]() is None), alike)
            else:
                alike, first, place = 0, step, 0
        self._alike[label] = max(alike, place + 1), first
        self._holders[label, place] = weakref.ref(optimizer)
        return f"{label} {place:04d}"

    def stepped(self, labelled: Sequence[tuple[str, Any]], step: int) -> str:
        """A step of these optimizers, behind their labels, was made; how the raw log has it."""
        labels = [label for label, _ in labelled]
        anew = any(self._anew(label, optimizer, step) for label, optimizer in labelled)
        self._rounds.step(frozenset(labels), anew=anew)
        self.last |= dict.fromkeys(labels, step)
        return written(labels, anew=anew)

    def again(self, label: str, optimizer: Any, step: int) -> bool:
        """Whether a step of this one begins a round."""
        return self._rounds.begins(frozenset([label]), anew=self._anew(label, optimizer, step))

    def _anew(self, label: str, optimizer: Any, step: int) -> bool:
        return label not in self.last and self._made_at.get(optimizer) == step


# -- which thread makes whose steps: two that train at once cannot be told apart from one run to the next


class _Turn(NamedTuple):
    """Steps in a row of the same optimizers by one thread.

    Attributes:
        labels: The optimizers'.
        number: The thread's, which another may have when it has ended.
        by: The thread.
        beside: Those that lived when one of its steps was made; of the main one, which outlives all, none is kept.
    """

    labels: tuple[str, ...]
    number: int
    by: weakref.ref[threading.Thread]
    beside: weakref.WeakSet[threading.Thread]


class Turns:
    """The steps made so far, as turns of optimizers and threads.

    Threads that train one after the other, or hand one optimizer to each other, are as good as one. Two that live at
    the same time and have an optimizer each race: which step comes first is chance, and so is what random numbers it
    gets.
    """

    def __init__(self) -> None:
        self._turns: list[_Turn] = []
        self._users: dict[str, set[int]] = {}

    def own(self, thread: int) -> bool:
        """Whether the thread of a number has made a step."""
        return any(thread == turn.number for turn in self._turns)

    def take(self, labels: tuple[str, ...]) -> str:
        """Note a step of these optimizers by this thread; why it is refused, or ''."""
        thread, this = threading.get_ident(), threading.current_thread()
        for label in labels:
            self._users.setdefault(label, set()).add(thread)
        if not self._turns or self._turns[-1][:2] != (labels, thread):
            if refused := self._race(labels, this):
                return refused
            self._turns = [*self._turns[-3:], _Turn(labels, thread, weakref.ref(this), weakref.WeakSet())]
        if this is not threading.main_thread():
            self._turns[-1].beside.update(threading.enumerate())
        return ""

    def _race(self, labels: tuple[str, ...], this: threading.Thread) -> str:
        main = threading.main_thread()
        rivals = [turn for turn in self._turns if turn.number != this.ident and self._apart(labels, this, turn)]
        again = any(turn[:2] == (labels, this.ident) for turn in self._turns)
        both = this is not main and any(turn.number != main.ident for turn in rivals)
        if rivals and (again or both):
            return (
                "two threads train, each with an optimizer of its own, and chance may decide whose step comes first: "
                "let one thread (one executor) make the steps of both, or record them one at a time"
            )
        return ""

    def _apart(self, labels: tuple[str, ...], this: threading.Thread, turn: _Turn) -> bool:
        """Whether this thread lived beside that of another turn, and neither used the other's optimizers."""
        other = turn.by()
        together = this in turn.beside or (other is not None and other.is_alive())
        shared = any(this.ident in self._users[o] for o in turn.labels)
        return together and not shared and not any(turn.number in self._users[m] for m in labels)
