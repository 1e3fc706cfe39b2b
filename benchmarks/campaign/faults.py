"""Faults: whatever is full, read-only, late or lying, no verdict is wrong and the next run heals."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context

from attempts import warm
from fault_kinds import clock, places, remotes, shapes
from promise import Asked, Promise

__all__ = ["promises"]


def promises(asked: Asked) -> Iterator[Promise]:
    """A promise for each kind of fault."""
    warm()
    kinds = [partial(places.of, asked, name) for name in filter(asked.wants, places.names(asked))]
    if not asked.only or not kinds:
        kinds += [partial(kind.promises, asked) for kind in (remotes, shapes, clock)]
    # processes and no threads: see `kills`
    with ProcessPoolExecutor(max(1, asked.jobs), get_context("fork")) as pool:
        for kept in pool.map(_all, kinds):
            yield from kept


def _all(kind: Callable[[], Iterator[Promise]]) -> list[Promise]:
    return list(kind())
