"""What reading may cost, and the last look at a value that was read: no cycles, no depths, no hidden multiplication."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import numpy as np

from repro_golden.base.errors import ReproError
from repro_golden.dumps.values import TORCH_DTYPES, Record, Tensor, Unknown

__all__ = ["DEPTH", "LIMIT", "Budget", "check_key", "settle", "shown"]

LIMIT = 16 << 30
"""How many bytes of memory reading one file may need, in estimate, unless the caller says otherwise."""

DEPTH = 100
"""How deep values may be nested."""

_KEY_NODES = 1000  # a tuple of tuples of one shared tuple hashes in exponential time
_ODD_KEYS = 10_000  # floats, tuples and big integers can be chosen to share one hash, and a dict of them is quadratic


class Budget:
    """The memory that reading one file has used, in estimate.

    Attributes:
        where: the file, as messages name it.
        limit: bytes.
        spent: bytes.
        odd_keys: how many keys were seen whose hashes a file can choose.
    """

    def __init__(self, where: str, limit: int) -> None:
        self.where = where
        self.limit = limit
        self.spent = 0
        self.odd_keys = 0

    def spend(self, amount: int) -> None:
        """Count `amount` bytes.

        Raises:
            ReproError: more than the limit.
        """
        self.spent += amount
        if self.spent > self.limit:
            raise self.exceeded()

    def exceeded(self) -> ReproError:
        """What to raise when the limit is passed."""
        size = f"{self.limit / (1 << 30):.4g} GiB" if self.limit >= 1 << 30 else f"{self.limit} bytes"
        return ReproError(
            f"{self.where} needs more than {size} of memory to read: --limit SIZE raises the bound if the file is yours"
        )


def shown(text: object) -> str:
    """A text or a shape out of a file, safe in one line: quoted, escaped and short; of anything else its type."""
    if type(text) is str:
        whole = ascii(text[:200])
    elif type(text) is int and text.bit_length() > 1024:  # Python refuses to print what is much longer
        whole = f"<int of {text.bit_length()} bits>"
    elif type(text) is int or (
        type(text) is tuple and len(text) <= 100 and all(type(n) is int and n.bit_length() <= 64 for n in text)
    ):
        whole = str(text)
    else:  # printing what a pickle made may take for ever
        whole = f"<{type(text).__name__}>"
    return whole if len(whole) <= 120 else f"{whole[:117]}..."


_PLAIN_KEYS = {str, bytes, bool, type(None)}


def check_key(key: Any, budget: Budget) -> None:
    """Refuse what is no plain key, and what would take long to hash.

    Raises:
        ReproError: not a plain key, or too many of those whose hashes can be chosen to collide.
    """
    kind = type(key)
    if kind in _PLAIN_KEYS or (kind is int and -(1 << 60) < key < 1 << 60):
        return
    budget.odd_keys += 1
    if budget.odd_keys > _ODD_KEYS:
        raise ReproError(
            f"{budget.where} has more than {_ODD_KEYS} keys that are floats, tuples or huge integers, "
            "which no rollout dump has: save it without them"
        )
    seen = 0
    todo = [key]
    while todo:
        node = todo.pop()
        seen += 1
        kind = type(node)
        if (kind is tuple or kind is frozenset) and seen + len(node) <= _KEY_NODES:
            todo.extend(node)
        elif not (kind in _PLAIN_KEYS or kind in (int, float, complex) or isinstance(node, np.generic)):
            what = "so large" if kind in (tuple, frozenset) else f"of type {kind.__name__}"
            raise ReproError(f"{budget.where} has a dict or set with a key {what}: save text, numbers or small tuples")


_LEAVES = frozenset({int, float, str, bool, bytes, bytearray, complex, type(None)})
_NUMBERS = frozenset({int, float, bool, type(None)})
_CONTAINERS = frozenset({list, tuple, dict, OrderedDict, set, frozenset, Record})


def settle(value: Any, budget: Budget) -> dict[str, int]:
    """Walk a value that was read, without recursion.

    Args:
        value: what the pickle built.
        budget: shared parts are counted once for each place they stand in, since writing and comparing see them all.

    Returns:
        The names of foreign classes and functions that stand in it, with their `Unknown.parts`.

    Raises:
        ReproError: it holds itself, is nested deeper than `DEPTH`, is too large, or holds what is no plain value.
    """
    names: dict[str, int] = {}
    done: dict[int, tuple[int, int]] = {}  # id -> height, size; every object stays alive through `value`
    if type(value) not in _CONTAINERS:
        _leaf(value, names, budget)
        return names
    path = [_Frame(value)]
    entered = {id(value)}
    while path:
        frame = path[-1]
        child = next(frame.children, _END)
        if child is _END:
            path.pop()
            entered.discard(id(frame.node))
            done[id(frame.node)] = (frame.height, frame.size)
            if frame.size > budget.limit:
                raise budget.exceeded()
            if path:
                path[-1].add(frame.height, frame.size)
        elif type(child) not in _CONTAINERS:
            frame.size += _leaf(child, names, budget)
        elif id(child) in done:
            height, size = done[id(child)]
            frame.add(height, size)
            if len(path) + height > DEPTH:
                raise _too_deep(budget)
        elif id(child) in entered:
            raise ReproError(f"{budget.where} has a {type(child).__name__} that holds itself: save it without")
        else:
            if len(path) >= DEPTH:
                raise _too_deep(budget)
            entered.add(id(child))
            path.append(_Frame(child))
        if type(frame.node) is Record:
            names[frame.node.name] = frame.node.parts
    return names


_END = object()


def _too_deep(budget: Budget) -> ReproError:
    return ReproError(f"{budget.where} is nested deeper than {DEPTH} levels, which no rollout dump is: save it flatter")


class _Frame:
    """One container on the way down: its children that are left, and what is known of those behind."""

    __slots__ = ("children", "height", "node", "size")

    def __init__(self, node: Any) -> None:
        self.node = node
        self.height = 1
        self.size = 64
        self.children = self._children(node)

    def add(self, height: int, size: int) -> None:
        """Count a child container."""
        self.height = max(self.height, height + 1)
        self.size += size

    def _children(self, node: Any) -> Iterator[Any]:
        if isinstance(node, dict):
            for key in node:
                self.size += 64 + (len(key) if isinstance(key, str | bytes) else 0)
            return iter(node.values())
        if type(node) is Record:
            return iter((node.state, node.args, node.kwargs, node.items))
        if set(map(type, node)) <= _NUMBERS:  # the long columns of a dump, which need no walk
            self.size += 40 * len(node)
            return iter(())
        return iter(node)


def _leaf(value: Any, names: dict[str, int], budget: Budget) -> int:
    """The estimated bytes of what holds nothing else.

    Raises:
        ReproError: not a plain value.
    """
    kind = type(value)
    if kind in _LEAVES:
        return 40 + (len(value) if kind in (str, bytes, bytearray) else 0)
    if kind is Tensor:
        return 200 + int(value.array.nbytes)
    if kind is np.ndarray or isinstance(value, np.generic):
        return 200 + int(value.nbytes)
    if isinstance(value, Unknown):
        if not (value.name.startswith("torch.") and value.name.removeprefix("torch.") in TORCH_DTYPES):
            names[value.name] = value.parts
        return 64
    what = kind.__name__.strip("_").lower()  # a storage or a dtype that nothing was made of
    raise ReproError(f"{budget.where} holds a {what} outside of a tensor or array: save it without")
