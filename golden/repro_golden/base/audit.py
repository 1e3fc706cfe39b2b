"""Python's audit events, heard at as little cost to the program as there can be."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Mapping
from typing import Any

__all__ = ["hear"]

_heard: dict[str, list[Callable[..., object]]] = {}


def hear(events: Mapping[str, Callable[..., object]]) -> None:
    """Call a function with the arguments of each event of its name, until the process ends.

    What it raises is dropped: the program's own call would raise it.

    Args:
        events: Functions by the names of events.
    """
    first, heard = not _heard, _heard
    for name, does in events.items():
        heard.setdefault(name, []).append(does)

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event in heard:
            for does in heard[event]:
                with contextlib.suppress(Exception):
                    does(*arguments)

    if first:  # a function and no bound method, with which each `id`, which is an event too, takes longer
        sys.addaudithook(hook)
