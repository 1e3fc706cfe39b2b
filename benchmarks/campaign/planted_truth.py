"""What a run held, read without a line of the recorder: raw bytes, by step, phase and name.

The instants are those that the recorder promises: an optimizer's own tensors when its step has ended, what lives beside
the optimizers with the last of them in a round, and everything once more at the end. Names are made here by the same
published rules (docs/reference/trace.md), from the program's own modules.
"""

from __future__ import annotations

import builtins
import random
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.optim import optimizer as optimizers
from torch.utils._python_dispatch import _disable_current_modes

__all__ = ["ORDER", "Signals", "Truth", "first_difference", "of_tensor"]

ORDER = ("input", "forward", "loss", "grad", "update")
Signals = dict[tuple[int, str, str], bytes]


def of_tensor(tensor: torch.Tensor) -> bytes:
    """Dtype, shape and every byte."""
    raw = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return f"{tensor.dtype} {list(tensor.shape)} ".encode() + raw


def of_number(value: float) -> bytes:
    return struct.pack("<d", value)


def first_difference(clean: Signals, other: Signals) -> tuple[int, str, list[str]] | None:
    """The first step and phase in which two runs differ, and all names that do there."""
    keys = [key for key in {**clean, **other} if clean.get(key) != other.get(key)]
    if not keys:
        return None
    step, phase = min(((step, phase) for step, phase, _ in keys), key=lambda at: (at[0], ORDER.index(at[1])))
    return step, phase, sorted(name for s, p, name in keys if (s, p) == (step, phase))


class Truth:
    """Hooked into a process before the recorder is, so that both see the same.

    Args:
        parts: Modules by name ('' for the one that the optimizers train) and optimizers in their order.
    """

    def __init__(self, parts: Callable[[], tuple[Mapping[str, Any], Sequence[Any]]]) -> None:
        self.signals: Signals = {}
        self.ended = 0
        self._parts = parts
        self._rounds: dict[int, int] = {}
        self._early: set[str] = set()
        self._now: dict[str, bytes] = {}
        self._last = -1

    def watch(self) -> None:
        """Begin."""
        optimizers.register_optimizer_step_pre_hook(lambda optimizer, *_: self._quiet(self._before, optimizer))
        optimizers.register_optimizer_step_post_hook(lambda optimizer, *_: self._quiet(self._after, optimizer))
        clip = torch.nn.utils.clip_grad_norm_

        def clipped(*args: Any, **kwargs: Any) -> Any:
            norm = clip(*args, **kwargs)
            with _disable_current_modes():
                self._now["grad_norm"] = of_number(float(norm))
            return norm

        torch.nn.utils.clip_grad_norm_ = torch.nn.utils.clip_grad.clip_grad_norm_ = clipped
        say = builtins.print

        def heard(*values: Any, **options: Any) -> None:
            for value in values:
                if isinstance(value, dict):
                    self._logged(value)
            say(*values, **options)

        builtins.print = heard

    def end(self) -> None:
        """The program has ended."""
        with _disable_current_modes():
            _, known = self._parts()
            for number, optimizer in enumerate(known):
                for name, value in self._of(number, optimizer):
                    self.signals[self._last, "update", f"end/{name}"] = value
            for name, value in self._beside():
                self.signals[self._last, "update", f"end/{name}"] = value

    def _quiet(self, what: Callable[[Any], None], optimizer: Any) -> None:
        with torch.no_grad(), _disable_current_modes():
            what(getattr(optimizer, "optimizer", optimizer))

    def _logged(self, numbers: Mapping[str, Any]) -> None:
        for name, value in numbers.items():
            if isinstance(value, (int, float)):
                if not self.ended:
                    self._early.add(name)
                if name in self._early:
                    self._now[name] = of_number(float(value))
                else:
                    self.signals[self._last, "loss", name] = of_number(float(value))

    def _before(self, optimizer: Any) -> None:
        number = self._number(optimizer)
        if number in self._rounds:
            return
        prefix = f"start/optimizer.{number}/" if number else "start/"
        for name, parameter in self._named(optimizer):
            self.signals[number, "input", prefix + name] = of_tensor(parameter)

    def _after(self, optimizer: Any) -> None:
        number, (_, known) = self._number(optimizer), self._parts()
        turn = self._rounds[number] = self._rounds.get(number, -1) + 1
        step = turn * len(known) + number
        prefix = f"optimizer.{number}/" if number else ""
        for name, parameter in self._named(optimizer):
            if parameter.grad is None:
                continue
            if parameter.grad.is_sparse:
                parts = {".indices": parameter.grad._indices(), ".values": parameter.grad._values()}
            else:
                parts = {"": parameter.grad}
            for part, tensor in parts.items():
                self.signals[step, "grad", prefix + name + part] = of_tensor(tensor)
        for name, value in self._now.items():
            self.signals[step, "grad" if name == "grad_norm" else "loss", name] = value
        self._now = {}
        for name, value in self._of(number, optimizer):
            self.signals[step, "update", name] = value
        for name, value in self._beside():
            self.signals[turn * len(known) + len(known) - 1, "update", name] = value
        self.ended += 1
        self._last = step

    def _number(self, optimizer: Any) -> int:
        return [id(known) for known in self._parts()[1]].index(id(optimizer))

    def _named(self, optimizer: Any) -> Iterator[tuple[str, Any]]:
        names = {id(p): name for name, p in self._parts()[0][""].named_parameters()}
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                yield names[id(parameter)], parameter

    def _of(self, number: int, optimizer: Any) -> Iterator[tuple[str, bytes]]:
        """An optimizer's parameters, state and rates."""
        prefix = f"optimizer.{number}/" if number else ""
        for name, parameter in self._named(optimizer):
            yield prefix + name, of_tensor(parameter)
            for key, value in optimizer.state.get(parameter, {}).items():
                if isinstance(value, torch.Tensor):
                    yield f"{prefix}{key}/{name}", of_tensor(value)
                else:
                    yield f"{prefix}number/{key}", of_number(value)
        for place, group in enumerate(optimizer.param_groups):
            yield f"{prefix}lr{f'/{place}' if place else ''}", of_number(float(group["lr"]))

    def _beside(self) -> Iterator[tuple[str, bytes]]:
        modules, known = self._parts()
        trained = {id(p) for optimizer in known for group in optimizer.param_groups for p in group["params"]}
        for root, module in modules.items():
            kinds = {"frozen": [pair for pair in module.named_parameters() if id(pair[1]) not in trained]}
            saved = module.state_dict().keys()
            kinds["buffer"] = [pair for pair in module.named_buffers() if pair[0] in saved]
            kinds["unsaved"] = [pair for pair in module.named_buffers() if pair[0] not in saved]
            for kind, held in kinds.items():
                for name, tensor in held:
                    yield (f"module/{root}/{name}" if root else f"{kind}/{name}"), of_tensor(tensor)
        yield "rng/torch", of_tensor(torch.get_rng_state())
        yield "rng/random", repr(random.getstate()).encode()
        kind, words, *rest = np.random.get_state()  # type: ignore[misc]
        yield "rng/numpy", f"{kind}{rest}".encode() + words.tobytes()
