"""Steps of optimizers inside graphs: those that must be whole (``fullgraph=True``), and CUDA's.

Nothing of ours may run in one. In the compiler's the hooks only append the optimizer to a list, which is done anew
after each call without a change to the graph. Of a CUDA graph it is known which optimizers it makes step since it was
captured. The step is taken when the call, or the replay, has returned; nothing looks at what its optimizer began with.
"""

from __future__ import annotations

import functools
import types
import weakref
from collections.abc import Callable
from typing import Any

import torch

from repro_golden.fingerprint.in_flight import under_way
from repro_golden.recording.attach.base.by_identity import id_of
from repro_golden.recording.attach.base.guard import stand_in
from repro_golden.recording.attach.base.steps import Steps

__all__ = ["hooks"]


class _Graph:
    """The call under way; the compiler reads these two.

    Attributes:
        whole: Whether there is one.
        stepped: The optimizers that stepped in it.
    """

    def __init__(self) -> None:
        self.whole = False
        self.stepped: list[Any] = []


def hooks(
    steps: Steps,
    begun: Callable[[Any, bool], None],
    untraced: Callable[[Callable[..., Any]], Callable[..., Any]],
    keep_last: Callable[[], None],
) -> tuple[Callable[..., None], Callable[..., None]]:
    """What torch is to call before and after each step of an optimizer; whole graphs are watched from now on.

    Args:
        steps: Told of each step.
        begun: Called with an optimizer that stepped at the last call, before the next one.
        untraced: Keeps the compiler out of a function; outside of whole graphs it leaves off there and goes on behind.
        keep_last: Called before each step, for the second hook to be torch's last.
    """
    graph = _Graph()

    def entered(optimizer: Any, *given: Any) -> None:
        keep_last()
        steps.enter(optimizer, *given)

    enter, leave = untraced(entered), untraced(lambda optimizer: steps.leave(optimizer))

    def before(optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not (torch.compiler.is_compiling() and graph.whole):
            enter(optimizer, *args[1:], *kwargs.values())

    def after(optimizer: Any, *_: Any) -> None:
        if torch.compiler.is_compiling() and graph.whole:
            graph.stepped.append(optimizer)
        else:
            leave(optimizer)

    def of_compile(compile_: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(compile_)
        def call(model: Any = None, *args: Any, **kwargs: Any) -> Any:
            compiled = compile_(model, *args, **kwargs)
            # without a model it gives a decorator, which calls this one again
            if model is None or not kwargs.get("fullgraph") or type(compiled) is not types.FunctionType:
                return compiled
            return _watched(compiled, graph, steps, begun)

        return call

    stand_in([torch], "compile", of_compile)
    _watch_replays(steps, begun, untraced)
    return before, after


def _watch_replays(
    steps: Steps, begun: Callable[[Any, bool], None], untraced: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> None:
    """Take a step after each replay of a CUDA graph in whose capture an optimizer's step was called."""
    kept: weakref.WeakKeyDictionary[Any, list[Any]] = weakref.WeakKeyDictionary()
    kind = torch.cuda.CUDAGraph
    start, end, again = kind.capture_begin, kind.capture_end, kind.replay

    @functools.wraps(start)
    def capture_begin(self: Any, *args: Any, **kwargs: Any) -> None:
        under_way.add(id_of(self))
        try:
            start(self, *args, **kwargs)
        except BaseException:
            under_way.discard(id_of(self))
            raise

    @functools.wraps(end)
    def capture_end(self: Any) -> None:
        kept[self] = list({id_of(optimizer): optimizer for optimizer in steps.captured}.values())
        steps.captured.clear()
        try:
            end(self)
        finally:
            under_way.discard(id_of(self))

    @functools.wraps(again)
    def replay(self: Any) -> None:
        optimizers = kept.get(self, ())
        for number, optimizer in enumerate(optimizers):
            begun(optimizer, not number)
        again(self)
        if optimizers:
            steps.took(optimizers, replayed=True)

    for name, wrapper in (("capture_begin", capture_begin), ("capture_end", capture_end), ("replay", replay)):
        setattr(kind, name, untraced(wrapper))


def _watched(
    compiled: Callable[..., Any], graph: _Graph, steps: Steps, begun: Callable[[Any, bool], None]
) -> Callable[..., Any]:
    last: list[weakref.ref[Any]] = []

    @functools.wraps(compiled)
    def call(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or graph.whole:
            return compiled(*args, **kwargs)
        for number, reference in enumerate(last):
            if (optimizer := reference()) is not None:
                begun(optimizer, not number)
        graph.whole = True
        graph.stepped.clear()
        try:
            out = compiled(*args, **kwargs)
        finally:
            graph.whole = False
        if graph.stepped:
            optimizers = list({id_of(optimizer): optimizer for optimizer in graph.stepped}.values())
            graph.stepped.clear()
            last[:] = [weakref.ref(optimizer) for optimizer in optimizers]
            steps.took(optimizers)
        return out

    return call
