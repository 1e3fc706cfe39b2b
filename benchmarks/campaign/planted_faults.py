"""The changes that are planted: at one operation's result, or in what a program holds just before it.

A change is drawn from a seed, and is as small as there is: one ULP, one bit, two elements that change places, a result
that went through another dtype, one entry of a mask, one number of a configuration.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["HOW", "WHERE", "Injector", "change", "changeable"]

HOW = ("ulp", "bit", "order", "dtype")
WHERE = ("operation", "weight", "gradient", "state", "buffer", "input", "generator", "number", "nothing")
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def changeable(value: Any) -> bool:
    """Whether it is a tensor with elements, of which none lies where another does."""
    if not isinstance(value, torch.Tensor):
        return False
    tensor = value._values() if value.is_sparse else value
    return tensor.numel() > 0 and tensor.layout == torch.strided and 0 not in tensor.stride()


def change(tensor: torch.Tensor, how: str, draw: random.Random) -> str:
    """Change one tensor in place, in the way that suits its dtype; what was done, '' for nothing."""
    if not changeable(tensor):
        return ""
    if tensor.is_sparse:
        tensor = tensor._values()
    place = tuple(draw.randrange(size) for size in tensor.shape)
    if tensor.dtype == torch.bool:
        tensor[place] = not bool(tensor[place])
        return f"mask {list(place)}"
    if not tensor.is_floating_point() or how == "order":  # other integers would lead out of a table
        other = tuple(draw.randrange(size) for size in tensor.shape)
        mine, theirs = tensor[place].clone(), tensor[other].clone()
        tensor[place], tensor[other] = theirs, mine
        return f"order {list(place)} {list(other)}"
    if how == "dtype":
        tensor.copy_(tensor.to(torch.bfloat16))
        return "dtype bfloat16"
    bits = tensor[place].view(_INTEGERS[tensor.element_size()])
    width = 8 * tensor.element_size()
    shift = 0 if how == "ulp" else draw.randrange(width)
    mask = -(1 << (width - 1)) if shift == width - 1 else 1 << shift
    bits.copy_(bits + 1 if how == "ulp" else bits ^ mask)
    return f"{how} {shift} {list(place)}"


class Injector(TorchDispatchMode):
    """Counts the operations of a program, and makes one change at one of them.

    Args:
        asked: ``at`` (the number of the operation; of another ``where`` the next one at which the change can be made),
            ``where`` (of `WHERE`), ``how`` (of `HOW`) and ``seed``; None for none.
        held: The tensors that the program holds, of a kind of `WHERE`.
        numbers: Owners of numbers (mappings, or objects with attributes) and the numbers' names.

    Attributes:
        count: Operations so far.
        done: What was changed, in words.
        marks: Numbers of the operations that come next where something begins, by what does.
        places: Numbers of the operations whose result can be changed, where no change is asked for.
    """

    def __init__(
        self,
        asked: Mapping[str, Any] | None,
        held: Callable[[str], Sequence[tuple[str, torch.Tensor]]],
        numbers: Callable[[], Sequence[tuple[Any, str]]],
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count, self.done = 0, ""
        self.marks: dict[str, list[int]] = {}
        self.places: list[int] = []
        self._asked, self._held, self._numbers = asked, held, numbers

    def mark(self, what: str) -> None:
        """Something begins."""
        self.marks.setdefault(what, []).append(self.count)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation, changed or not."""
        del types
        at, asked = self.count, self._asked
        self.count += 1
        if asked is not None and asked["where"] != "operation" and not self.done and asked["at"] <= at:
            self.done = self._edit(asked, random.Random(asked["seed"]))
        out = func(*args, **(kwargs or {}))
        if asked is not None and (asked["where"] != "operation" or asked["at"] != at):
            return out
        tensors = [t for t in (out if isinstance(out, (list, tuple)) else [out]) if changeable(t)]
        if asked is None:
            self.places += [at] if tensors else []
        elif tensors:
            draw = random.Random(asked["seed"])
            self.done = f"{func} {change(draw.choice(tensors), asked['how'], draw)}"
        return out

    def told(self) -> dict[str, Any]:
        """What was done, and of a run without a change where one could be made; JSON types."""
        told = {"done": self.done, "count": self.count, "marks": self.marks}
        return told if self._asked else told | {"places": self.places}

    def _edit(self, asked: Mapping[str, Any], draw: random.Random) -> str:
        where, how = asked["where"], asked["how"]
        if where == "nothing":
            return "nothing"
        if where == "generator":
            torch.rand(1) if draw.random() < 0.5 else random.random()
            return "one number more"
        if where == "number":
            return self._turn(draw)
        tensors = self._held(where)
        if not tensors:
            return ""
        name, tensor = draw.choice(tensors)
        made = change(tensor, how, draw)
        return f"{where} {name} {made}" if made else ""

    def _turn(self, draw: random.Random) -> str:
        """Move one hyperparameter by its last bit, or by a thousandth."""
        owner, key = draw.choice([(o, key) for o, key in self._numbers() if _is_number(_get(o, key))])
        before = _get(owner, key)
        far = draw.random() < 0.5
        _set(owner, key, _moved(before, far))
        return f"number {key} {before!r} to {_get(owner, key)!r}"


def _is_number(value: Any) -> bool:
    return isinstance(value, float) or (isinstance(value, tuple) and bool(value) and isinstance(value[0], float))


def _moved(value: Any, far: bool) -> Any:
    if isinstance(value, tuple):
        return (_moved(value[0], far), *value[1:])
    return value * 1.001 if far else math.nextafter(value, math.inf)


def _get(owner: Any, key: str) -> Any:
    return owner.get(key) if isinstance(owner, dict) else getattr(owner, key)


def _set(owner: Any, key: str, value: Any) -> None:
    if isinstance(owner, dict):
        owner[key] = value
    else:
        object.__setattr__(owner, key, value)  # a configuration may be frozen
