"""Wrappers that stand where a function of torch's or the program's stood, for whoever pickles or scripts it too."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

__all__ = ["stand_in"]


def stand_in(owners: Sequence[Any], name: str, wrap: Callable[[Any], Any]) -> None:
    """Put a wrapper in the place of a function, one for all modules that have the same one.

    It is pickled as the function was: by the first of `owners` and its name. TorchScript, which knows its own functions
    by their identity, takes it for the function. A wrapper hands on what it is given as it came: an iterator can be
    gone through once.

    Args:
        owners: Modules; those without a function of the name are passed over.
        name: The function's.
        wrap: Makes the wrapper of it.
    """
    wrappers: dict[int, Any] = {}
    for owner in owners:
        function = getattr(owner, name, None)
        if function is None or getattr(function, "_repro", False):
            continue
        wrapper = wrappers.get(id(function))
        if wrapper is None:
            wrapper = wrappers[id(function)] = wrap(function)
            wrapper.__module__, wrapper.__qualname__ = owner.__name__, name
            wrapper._repro = True
            _script_as(function, wrapper)
        setattr(owner, name, wrapper)


def _script_as(function: Any, wrapper: Any) -> None:
    """Have TorchScript take a wrapper for what it wraps."""
    try:
        table = torch.jit._builtins._get_builtin_table()  # type: ignore[no-untyped-call]
    except AttributeError:  # another torch's
        return
    operator = table.get(id(function))
    if operator is not None:
        table[id(wrapper)] = operator
