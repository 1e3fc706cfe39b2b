"""What a program calls the objects that it holds: the variables and attributes that refer to them."""

from __future__ import annotations

import ctypes
import inspect
import sys
import types
from collections import deque
from collections.abc import Collection, Iterable, Iterator
from typing import Any

from repro_golden.recording.attach.base.by_identity import id_of

__all__ = ["NOT_HOLDERS", "attributes", "names_of", "of_type", "variables"]

_DEPTH, _MOST, _LONG = 4, 5000, 256
"""How far attributes of attributes are followed, from how many objects on they are not, and in lists of what length."""
_WORD = ctypes.sizeof(ctypes.c_void_p)
NOT_HOLDERS = (
    types.ModuleType,
    type,
    types.FunctionType,
    types.BuiltinFunctionType,
    types.MethodType,
    str,
    bytes,
    int,
    float,
)
"""What an attribute of leads no further."""


def names_of(objects: Iterable[Any]) -> dict[int, str]:
    """By id, the name of each object: a variable of a frame at work, a global of one, or an attribute of either.

    The shortest name is taken, and of these the first in the alphabet, so that the order of variables plays no part.
    What nothing of this refers to has none.
    """
    wanted = {id_of(item) for item in objects}
    names: dict[int, str] = {}
    for level in _reach():
        for name, value in level:
            if id_of(value) in wanted:
                _shortest(names, id_of(value), name)
        if len(names) == len(wanted):
            break
    return names


def of_type(kind: type, also: Collection[str] = (), but_of: tuple[type, ...] = ()) -> list[tuple[str, Any]]:
    """The objects of a type that variables, attributes and what stands in their lists lead to, by name.

    Args:
        kind: The type itself, not what derives from it.
        also: Names of more modules to begin in.
        but_of: Types whose own objects of that type are left out, whatever else leads to them.
    """
    names: dict[int, str] = {}
    objects: dict[int, Any] = {}
    left_out: set[int] = set()
    for level in _reach(also):
        for name, value in level:
            for place, item in [("", value), *_items(value)]:
                if type(item) is kind:
                    _shortest(names, id_of(item), f"{name}.{place}" if place != "" else name)
                    objects[id_of(item)] = item
                elif issubclass(type(item), but_of):
                    left_out |= {id_of(inner) for _, inner in attributes(item) if type(inner) is kind}
    return sorted(((names[number], item) for number, item in objects.items() if number not in left_out), key=_by_name)


def _by_name(pair: tuple[str, Any]) -> str:
    return pair[0]


def _items(value: Any) -> list[tuple[Any, Any]]:
    """What a list, a tuple or a deque holds, by place, and a mapping under numbers."""
    if type(value) in (list, tuple, deque) and len(value) <= _LONG:
        return [*enumerate(list(value))]
    if type(value) is dict and len(value) <= _LONG:  # those of text are found as attributes are
        return [(key, item) for key, item in list(value.items()) if type(key) is int]
    return []


def _reach(also: Collection[str] = ()) -> Iterator[list[tuple[str, Any]]]:
    """Variables first, then attributes of what they refer to, and so on; each holder once."""
    seen: set[int] = set()
    level = list(variables(also=also))
    for _ in range(_DEPTH):
        yield level
        holders = {id_of(value): value for _, value in level if not issubclass(type(value), NOT_HOLDERS)}
        holders = {number: value for number, value in holders.items() if number not in seen}
        if len(holders) > _MOST:
            return
        seen |= holders.keys()
        level = [pair for holder in holders.values() for pair in attributes(holder)]


def variables(met: set[str] | None = None, also: Collection[str] = ()) -> Iterator[tuple[str, Any]]:
    """Of this thread's frames and of the modules that their code lies in.

    Args:
        met: Where to put the names of these modules.
        also: Names of more modules, by their names.
    """
    frame: types.FrameType | None = sys._getframe(1)
    seen: set[int] = set()
    while frame is not None:
        module = str(frame.f_globals.get("__name__", ""))
        if not module.startswith(("repro_golden", "torch.")):
            if id_of(frame.f_globals) not in seen:
                seen.add(id_of(frame.f_globals))
                yield from _public(frame.f_globals.items())
                if met is not None:
                    met.add(module)
            if frame.f_code.co_name != "<module>":
                yield from _public(_locals(frame))
        frame = frame.f_back
    for name in sorted(also):
        space = getattr(sys.modules.get(name), "__dict__", None)
        if type(space) is dict and id_of(space) not in seen:
            yield from _public(space.items())


def _public(pairs: Iterable[tuple[str, Any]]) -> list[tuple[str, Any]]:
    return [(name, value) for name, value in list(pairs) if not name.startswith("__")]


def _locals(frame: types.FrameType) -> list[tuple[str, Any]]:
    """A function's variables.

    Until Python 3.13 a function has one mapping of them, which is filled anew whenever it is asked for: what the
    program has put into the one that it got from `locals()` would be gone. So another one is filled, and forgotten.
    That keeps nothing alive either.
    """
    if sys.version_info >= (3, 13) or not frame.f_code.co_flags & inspect.CO_OPTIMIZED:
        return list(frame.f_locals.items())
    slot = _slot_of_locals(frame)
    if slot is None:
        return []
    programs, slot.value = slot.value, None
    try:
        return list(frame.f_locals.items())
    finally:
        ours, slot.value = slot.value, programs
        ctypes.pythonapi.Py_DecRef(ctypes.c_void_p(ours))


def _slot_of_locals(frame: types.FrameType) -> ctypes.c_void_p | None:
    """Where a frame keeps that mapping: behind its builtins and globals, in each layout that a frame has had.

    None where they do not lie there.
    """
    place = id(frame)
    if sys.version_info >= (3, 11):  # noqa: UP036 - where the object leads to it; a program may have 3.10
        place = ctypes.c_void_p.from_address(place + 3 * _WORD).value or 0
    pointers = [ctypes.c_void_p.from_address(place + k * _WORD) for k in range(8)]
    known = {id(frame.f_globals), id(frame.f_builtins)}
    pairs = zip(pointers, pointers[1:], pointers[2:], strict=False)
    return next((slot for first, other, slot in pairs if {first.value, other.value} == known), None)


def attributes(holder: Any) -> list[tuple[str, Any]]:
    """What an object refers to by name: its own attributes, or the entries of a mapping."""
    if type(holder) is dict:
        return [(name, value) for name, value in list(holder.items()) if isinstance(name, str)]
    try:
        space = object.__getattribute__(holder, "__dict__")
    except AttributeError:
        return []
    items = list(space.items()) if type(space) is dict else []  # another thread may change it
    return [(name, value) for name, value in items if isinstance(name, str)]


def _shortest(names: dict[int, str], number: int, name: str) -> None:
    known = names.get(number)
    if known is None or (len(name), name) < (len(known), known):
        names[number] = name
