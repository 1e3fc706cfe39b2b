"""What a run ends with, where it is asked for: a run that is recorded and one that is not are compared by it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from repro_golden.recording.attach.alive.generators import states
from repro_golden.recording.attach.alive.names import Names
from repro_golden.recording.attach.alive.parts import of_parts
from repro_golden.recording.attach.alive.readings import Reading
from repro_golden.recording.attach.by_identity import id_of
from repro_golden.recording.attach.written.raw import SHOWN

__all__ = ["Terminal"]

_FIRST = "first "
"""Before the names of generators as they were before the first step."""


class Terminal:
    """The state of optimizers and generators, and the metrics. The optimizers are kept alive for it.

    Args:
        asked: Whether it is asked for; else nothing is done.
        met: Gives every optimizer that has made a step, as long as it is alive, and its label.
        names: Where their parameters' names are known.
    """

    def __init__(self, asked: bool, met: Mapping[int, tuple[Callable[[], Any], str]], names: Names) -> None:
        self._asked, self._met, self._names = asked, met, names
        self._kept: dict[int, Any] = {}
        self._first: dict[str, str] = {}
        self._final: dict[str, str] = {}
        self._logged: list[tuple[int, str, str]] = []

    def begin(self) -> None:
        """A step begins. A generator that differs before the first from run to run was never seeded."""
        if self._asked and not self._met:
            self._first = _generators()

    def keep(self, optimizer: Any) -> None:
        """An optimizer makes its first step."""
        if self._asked:
            self._kept[id_of(optimizer)] = optimizer

    def let_go(self, optimizer: Any) -> None:
        """It made none."""
        self._kept.pop(id_of(optimizer), None)

    def told(self, step: int, numbers: Mapping[str, float]) -> None:
        """A step's metrics are known."""
        if self._asked:
            logged = {name: value for name, value in numbers.items() if not name.startswith(SHOWN)}
            self._logged += [(step, name, value.hex()) for name, value in sorted(logged.items())]

    def take(self, *, end: bool) -> None:
        """Read the optimizers' state. At the `end` none is kept: what is alive then is so in a run without all this."""
        if self._asked:
            self._final = _state_of([optimizer() for optimizer, _ in self._met.values()], self._names)
        if end:
            self._kept.clear()

    def put(self, log: Any) -> None:
        """Write it."""
        if not self._asked:
            return
        prints = dict(self._final)
        for name in sorted({name for _, name, _ in self._logged}):
            prints[f"metric {name}"] = _hash([f"{step} {value}" for step, n, value in self._logged if n == name])
        first = {f"{_FIRST}{name}": value for name, value in self._first.items()}
        log.put(".terminal", prints | first | _generators())


def _state_of(optimizers: Iterable[Any], names: Names) -> dict[str, str]:
    """Fingerprints of parameters and optimizer state.

    Args:
        optimizers: Those that made steps, in their order.
        names: Where their parameters' names are known.
    """
    tensors: dict[str, torch.Tensor] = {}
    for k, optimizer in enumerate(optimizers):
        if optimizer is None:
            continue
        held = names.held(optimizer)
        for kind, reading in {"": Reading(held.parameters, {}), **held.state()}.items():
            for name, tensor in reading.tensors.items():
                local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
                tensors[f"{k}/{kind}/{name}"] = local
    return _prints(of_parts(tensors))


def _generators() -> dict[str, str]:
    """The states of the process's random number generators."""
    return {f"generator {name}": value for name, value in _prints(states()).items()}


def _prints(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """What stands for each tensor: its lanes, dtype and shape."""
    from repro_golden.trace.signals import collector

    reading = collector()
    reading.add(list(tensors.values()))
    lanes = [scan.lanes for (scan,) in reading.finish().result()]
    parts = zip(tensors.items(), lanes, strict=True)
    return {name: f"{pair.a:016x}{pair.b:016x} {t.dtype} {list(t.shape)}" for (name, t), pair in parts}


def _hash(value: object) -> str:
    return hashlib.sha256(repr(value).encode()).hexdigest()[:32]
