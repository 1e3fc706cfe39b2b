"""Python's audit events, heard at as little cost to the program as there can be."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

__all__ = ["hear", "of_a_handler"]

_heard: dict[str, list[Callable[..., object]]] = {}


def hear(events: Mapping[str, Callable[..., object]]) -> None:
    """Call a function with the arguments of each event of its name, until the process ends.

    What it raises is dropped: the program's own call would raise it. What a handler of a signal raises meanwhile is the
    program's.

    Args:
        events: Functions by the names of events.
    """
    first, heard = not _heard, _heard
    for name, does in events.items():
        heard.setdefault(name, []).append(does)

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event in heard:
            for does in heard[event]:
                try:
                    does(*arguments)
                except Exception as error:
                    if of_a_handler(error):
                        raise

    if first:  # a function and no bound method, with which each `id`, which is an event too, takes longer
        sys.addaudithook(hook)


def of_a_handler(error: Exception) -> bool:
    """Whether a signal handler of the program raised it while we were at work.

    What we ask of the program's objects may raise too, from the same files: a handler is told by one of its arguments,
    the frame that it interrupted.
    """
    interrupted, trace = None, error.__traceback__
    while trace is not None:
        given: Iterable[Any] = () if interrupted is None else trace.tb_frame.f_locals.values()
        if any(each is interrupted or (type(each) is tuple and _holds(each, interrupted)) for each in given):
            return True
        interrupted, trace = trace.tb_frame, trace.tb_next
    return False


def _holds(several: tuple[Any, ...], item: Any) -> bool:
    return any(each is item for each in several)
