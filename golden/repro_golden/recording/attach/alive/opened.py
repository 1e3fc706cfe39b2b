"""What is in containers and objects, to any depth, by paths that are the same in every run."""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import functools
import itertools
import logging
import re
import sys
import types
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import PurePath
from typing import Any

import torch

from repro_golden.recording.attach.base.by_identity import id_of

__all__ = ["addressed", "as_torch", "everything", "is_foreign", "leaves"]

_AGAIN = 100_000
"""Containers that are opened once more, in all: each of fifty lists that holds the next one twice would never end."""
_MOST, _OBJECTS = 1_000, 100
"""Things that are looked at in an object, which may know a trainer and all of its data, and objects inside of it."""
_LEAVES = {torch.Tensor, torch.nn.Parameter, int, float}
_FOLLOWED = {"types", "argparse", "collections"}
"""Modules of the standard library whose objects may hold a program's."""
_WHOLE = (torch.Tensor, int, float, str, bytes, Mapping, list, tuple, deque, set, frozenset)
_ELSEWHERE = (torch.nn.Module, torch.optim.Optimizer)
"""They are found by themselves, and read where they are."""
_NO_NUMBERS = (
    str, bytes, type(None), type, enum.Enum, PurePath, logging.Logger, types.ModuleType, types.FunctionType,
    types.BuiltinFunctionType, types.MethodType, torch.dtype, torch.device, torch.layout, torch.memory_format,
)  # fmt: skip
_SILENT = (*_NO_NUMBERS, *_ELSEWHERE)
_CLOSED = (*_WHOLE, *_SILENT)
_NAMES = (str, int, float, bytes, type(None), enum.Enum, PurePath, torch.dtype, torch.device)
_SORTED = (int, float, str, bytes, type(None))


def leaves(
    value: Any,
    path: str = "",
    called: Callable[[torch.nn.Module], str] | None = None,
    unread: dict[str, str] | None = None,
    *,
    nested: bool = True,
) -> Iterator[tuple[str, Any]]:
    """The tensors and numbers in containers and objects, with their path (see `everything`).

    Args:
        value: What is looked into.
        path: Its own.
        called: See `everything`.
        unread: Takes why an object is left out that may hold some.
        nested: Whether objects in objects are looked into: what an optimizer has as an attribute may lead anywhere.
    """
    if not path and type(value) is dict and all(_is_leaf(*pair) for pair in list(value.items())):
        return iter(list(value.items()))  # what nearly every optimizer keeps of a parameter
    return _leaves(
        everything(value, path, functools.partial(_opened, nested=nested), called), {} if unread is None else unread
    )


def _is_leaf(key: Any, value: Any) -> bool:
    return type(value) in _LEAVES and type(key) is str and not addressed(key)


def _leaves(items: Iterable[tuple[str, Any]], unread: dict[str, str]) -> Iterator[tuple[str, Any]]:
    for name, item in items:
        if isinstance(item, (torch.Tensor, int, float)):
            yield name, item
        elif not isinstance(item, _SILENT) and type(item) is not object:
            unread[name] = f"it is {_More.what if isinstance(item, _More) else f'a {type(item).__name__}'}"


class _More:
    """Stands for the rest of an object that was looked at in part."""

    what = f"more than {_MOST:,} things"


def _opened(item: Any, *, nested: bool) -> Any:
    """What is looked at in place of an object: an array as a tensor, a record as its fields, of others the tensors.

    Numbers of other objects are clocks, ids and counters of all kinds, and no state.
    """
    if isinstance(item, _CLOSED):
        return item
    if (array := as_torch(item)) is not item:
        return array
    held = _attributes(item)
    if held is None or dataclasses.is_dataclass(item):
        return item if held is None else held
    objects = itertools.count()

    def inside(inner: Any) -> Any:
        if not nested or isinstance(inner, _CLOSED) or is_foreign(type(inner)) or next(objects) >= _OBJECTS:
            return inner
        known = as_torch(inner)
        return known if known is not inner else _attributes(inner) or inner

    named_items = list(itertools.islice(everything(held, plain=inside), _MOST))
    shown = {name: each for name, each in named_items if isinstance(each, torch.Tensor) or (nested and _is_shut(each))}
    # an object that is left over is named as not looked at
    return shown | {"more": _More()} if len(named_items) == _MOST else shown or item


def _is_shut(item: Any) -> bool:
    return not isinstance(item, _CLOSED) and _attributes(item) is None


def is_foreign(kind: type) -> bool:
    """Whether a class is torch's or Python's own, but for those whose objects hold a program's."""
    top = str(getattr(kind, "__module__", "")).partition(".")[0]
    return top == "torch" or (top in sys.stdlib_module_names and top not in _FOLLOWED)


def _attributes(item: Any) -> dict[str, Any] | None:
    """What an object holds by name, without asking it; None where that cannot be seen."""
    held: dict[str, Any] = {}
    known = False
    for kind in type(item).__mro__:
        for name, member in vars(kind).items():
            if type(member) is types.MemberDescriptorType and name != "__dict__":  # a slot
                known = True
                with contextlib.suppress(AttributeError):  # one that is empty
                    held[name] = member.__get__(item, kind)
    if dataclasses.is_dataclass(item):
        known = True
        held |= {field.name: getattr(item, field.name, None) for field in dataclasses.fields(item)}
    with contextlib.suppress(AttributeError):
        space = object.__getattribute__(item, "__dict__")
        if type(space) is dict:
            return held | space
    return held if known else None


def as_torch(value: Any) -> Any:
    """An array of NumPy as a tensor or a list, its numbers as Python's; all else as it is."""
    numpy = sys.modules.get("numpy")
    if numpy is None or not isinstance(value, (numpy.generic, numpy.ndarray)):
        return value
    if isinstance(value, numpy.generic):
        return value.item()
    if value.dtype.kind in "OSU":
        return value.tolist()
    with contextlib.suppress(TypeError, ValueError):  # a kind or an order of bytes that torch has not
        held = numpy.ascontiguousarray(value)
        return torch.from_numpy(held if held.flags.writeable else held.copy())
    return value


def everything(
    value: Any,
    path: str = "",
    plain: Callable[[Any], Any] = lambda item: item,
    called: Callable[[torch.nn.Module], str] | None = None,
) -> Iterator[tuple[str, Any]]:
    """What is in mappings, lists, tuples, deques and sets, to any depth, with its path; no path is there twice.

    A container inside of itself is passed over.

    Args:
        value: What is looked into.
        path: Its own.
        plain: What is looked at in place of an object.
        called: The path of a module that is a key.
    """
    used: Counter[str] = Counter()
    opened, inside, again = set[int](), set[int](), 0
    stack: list[tuple[Iterator[tuple[str, Any]], int, Any]] = [(iter([(path, value)]), 0, None)]
    while stack:
        items, ident, _ = stack[-1]  # the last is kept alive: another could get its id
        for name, item in items:
            if id_of(item) in inside:
                continue
            stand_in = plain(item)
            inner = _items(name, stand_in, called)
            again += inner is not None and id_of(item) in opened
            if inner is None or again > _AGAIN:
                used[name] += 1
                yield name if used[name] == 1 else f"{name}#{used[name] - 1}", stand_in
                continue
            opened.add(id_of(item))
            inside.add(id_of(item))
            stack.append((inner, id_of(item), (item, stand_in)))
            break
        else:
            inside.discard(ident)
            stack.pop()


def _items(path: str, value: Any, called: Callable[[torch.nn.Module], str] | None) -> Iterator[tuple[str, Any]] | None:
    """What a container holds; None where it is none."""
    if isinstance(value, (torch.Tensor, int, float, str)):
        return None
    if isinstance(value, Mapping):
        pairs: Iterable[tuple[Any, Any]] = [(_label(k, at, called), v) for at, (k, v) in enumerate(list(value.items()))]
    elif isinstance(value, (list, tuple, deque)):
        pairs = enumerate(list(value))
    elif isinstance(value, (set, frozenset)) and all(isinstance(item, _SORTED) for item in value):
        pairs = enumerate(sorted(value, key=lambda item: (type(item).__name__, repr(item))))
    else:
        return None
    return ((f"{path}.{key}" if path else str(key), item) for key, item in pairs)


def _label(key: Any, place: int, called: Callable[[torch.nn.Module], str] | None) -> str:
    """What a key is called; one that has no text which is the same in every run, by its place."""
    if isinstance(key, torch.nn.Module):
        return (called(key) if called is not None else "") or str(place)
    parts = key if isinstance(key, tuple) else (key,)
    if not all(isinstance(part, _NAMES) for part in parts):
        return str(place)
    text = str(key)
    return str(place) if addressed(text) else text


@functools.lru_cache(65536)
def addressed(text: str) -> bool:
    """Whether a text holds an object's address, as `repr` and `id` give it."""
    return _ADDRESS.search(text) is not None


_ADDRESS = re.compile(r"0x[0-9a-f]{6,}|\d{12,}", re.IGNORECASE)
