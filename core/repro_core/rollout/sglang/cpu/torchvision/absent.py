"""What every function of the stand-in does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

__all__ = ["absent"]


def absent(name: str) -> Callable[..., NoReturn]:
    """A function that says that it is not there.

    Raises:
        AttributeError: for Python's own names, which it asks every module for.
    """
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*_: Any, **__: Any) -> NoReturn:
        raise NotImplementedError(f"torchvision {name}: repro's stand-in for machines without a GPU does not have it")

    return missing
