"""Python's audit events, heard at as little cost to the program as there can be."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any

__all__ = ["hear"]

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
                    if _is_of_a_handler(error.__traceback__):
                        raise

    if first:  # a function and no bound method, with which each `id`, which is an event too, takes longer
        sys.addaudithook(hook)


def _is_of_a_handler(trace: TracebackType | None) -> bool:
    """Whether a function was called with the frame that called it, as handlers of signals are."""
    while trace is not None and trace.tb_next is not None:
        before, trace = trace.tb_frame, trace.tb_next
        values = list(trace.tb_frame.f_locals.values())
        values += [item for value in values if type(value) is tuple for item in value]
        if any(value is before for value in values):
            return True
    return False
