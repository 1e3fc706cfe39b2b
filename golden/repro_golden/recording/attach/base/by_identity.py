"""What is known of objects for as long as they live."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Generic, TypeVar

__all__ = ["ByIdentity", "id_of"]

id_of: Callable[[object], int] = object.__hash__
"""A number that no other object has as long as it lives, as `id` gives one too: but that is an audit event, for which a
function of Python's is called where somebody hears these, and a step has thousands."""

T = TypeVar("T")


class ByIdentity(Generic[T]):
    """By identity: a program's classes may be equal to others, or not hashable, as a dataclass with fields is."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[weakref.ref[Any], T]] = {}

    def get(self, item: Any) -> T | None:
        """What was put for it; None where nothing was."""
        known = self._known.get(id_of(item))
        return known[1] if known is not None and known[0]() is item else None

    def put(self, item: Any, value: T) -> None:
        """Know this of it from now on."""
        number = id_of(item)

        def let_go(reference: weakref.ref[Any]) -> None:
            known = self._known.get(number)
            if known is not None and known[0] is reference:
                del self._known[number]

        self._known[number] = weakref.ref(item, let_go), value

    def __len__(self) -> int:
        """How many are alive."""
        return len(self._known)

    def clear(self) -> None:
        """Know nothing any more."""
        self._known.clear()
