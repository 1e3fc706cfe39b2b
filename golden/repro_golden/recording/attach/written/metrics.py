"""The numbers that a program logs, and the step that each belongs to."""

from __future__ import annotations

import fnmatch
import itertools
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch

from repro_golden.base.printed.machine_numbers import is_clock, measures_time, of_the_machine
from repro_golden.recording.attach.written.raw import NORM, SHOWN, number_of

__all__ = ["Metrics", "writable"]


class Metrics:
    """Sorts numbers into the step under way and the one that has just ended.

    Most programs log a step's numbers after it, some before its end. A number that comes while a step is under way, as
    a backward pass since the last one tells, belongs to that step, and so does every number of a name that was seen
    before the first pass, or inside of it before the first step ended; any other, to the step before it. Where hooks
    make steps inside of a pass, what is told before it or behind it stands with the last of these. So no number of the
    last step is lost, and a loss stands beside the gradients that it gave: so does what is told after the last step, as
    one more number of it. What a pass behind it tells under a name that this step has already is ``name#after``; where
    the program is stopped, so is what lines for people tell between that step and the next pass, which may belong to
    either. What the program tells under
    a name that the recorder reads itself, as the norm that gradients are clipped by, is ``name#logged``.

    What is seen over several lines moves none that is not: golden runs hold these from before any such was read.

    Args:
        ignore: Globs of names to leave out; those that measure time, speed or memory or tell of the process are left
            out anyway, and those that first show what the clock does.
        under_way: Whether a step is; None where a pass has only asked for gradients, which is told by what comes next.
    """

    def __init__(self, ignore: Sequence[str] = (), under_way: Callable[[], bool | None] = lambda: False) -> None:
        self._ignore, self._under_way = ignore, under_way
        self._early: set[str] = set()
        self._early_wrapped: set[str] = set()  # in dicts over several lines, which move no other number
        self._wanted: dict[str, bool] = {}
        self._ended = False
        self._own: dict[str, list[Any]] = {}
        self._read = self._read_apart = frozenset[str]()
        self._now: dict[str, list[Any]] = {}
        self._late: dict[str, list[Any]] = {}
        self._between: dict[str, list[Any]] = {}  # of `_now`, in lines for people and before a pass
        self._inside = False  # of a backward pass
        self._aside: dict[str, list[Any]] = {}  # told before it
        self._last: set[str] = set()
        self._settings: dict[str, list[float]] = {}  # told in a dict before anything is trained
        self._open: dict[str, list[Any]] = {}  # told behind a pass that only asked for gradients
        self._written = False  # whether the first step is
        self.held: deque[dict[str, float]] = deque(maxlen=16)
        """Dicts over several lines, printed before anything is trained, which may be settings."""

    def take(
        self,
        name: str,
        value: Any,
        *,
        by_recorder: bool = False,
        setting: bool = False,
        wrapped: bool = False,
        before: bool = False,
    ) -> None:
        """Keep a float, or a tensor of one number, which is not waited for.

        The last one under a name has that name; those before it in the same step are ``name#1``, ``name#2`` and so on.
        Where all are equal they are one: a number is often told in several places. Nobody waits for a GPU to know.
        `by_recorder` says that the recorder reads it, of the step that ends next; `setting`, that it may be none of a
        step's: it is shown, unless its name is told again before the first step is written; `wrapped`, that it stands
        in a dict over several lines; `before`, that such a one was told before anything was trained, and is known by
        now to be a step's: the first's.
        """
        wanted = self._wanted.get(name)
        if wanted is None:
            wanted = self._wanted[name] = not (self._left_out(name.removeprefix(SHOWN)) or is_clock(value))
        if not wanted:
            return
        if isinstance(value, torch.Tensor):
            name, value = _local(name, value.detach())
            if value is None:
                return
            value = value.clone()  # the program may go on with it
        if before or (not (by_recorder or self._ended) and (self._inside or not self._under_way())):
            (self._early_wrapped if wrapped else self._early).add(name)
        if before:
            if not self._written:
                (self._late if self._ended else self._now).setdefault(name, []).append(float(value))
            return
        if setting:
            self._settings.setdefault(name, []).append(float(value))
            return
        if not by_recorder and name in self._settings:
            (self._late if self._ended else self._now).setdefault(name, []).extend(self._settings.pop(name))
        known = name in self._early or (wrapped and name in self._early_wrapped)
        early = by_recorder or known or self._under_way()
        if early is False and isinstance(value, torch.Tensor):
            value = _Coming(name, value)  # on its way now, while its work is queued before the next step's
        step = self._own if by_recorder else self._open if early is None else self._now if early else self._late
        value = float(value) if isinstance(value, (int, float)) else value
        step.setdefault(name, []).append(value)
        if step is self._now and name.startswith(SHOWN) and self._under_way() is False:
            self._between.setdefault(name, []).append(value)

    def _left_out(self, name: str) -> bool:
        return measures_time(name) or of_the_machine(name) or self._unwanted(name)

    def _unwanted(self, name: str) -> bool:
        return any(fnmatch.fnmatchcase(name, glob) for glob in self._ignore)

    def end(self, rates: Iterable[str] = ()) -> dict[str, Any]:
        """The numbers of the step that ends, floats and tensors: our own, and what the program has told so far.

        Args:
            rates: Names of the numbers that are read at its end.
        """
        self._ended = True
        _move(self._open, self._now)
        read_numbers = _told_apart(self._own)
        self._read = frozenset([*(name.partition(NORM)[0] for name in self._own), *rates])
        logged = {self._logged(name): values for name, values in self._now.items()}
        self._last, self._read_apart = {*self._own, *logged}, frozenset(read_numbers)
        self._own, self._now, self._between = {}, {}, {}
        return read_numbers | _told_apart(logged)

    def set_aside(self) -> None:
        """A backward pass begins: which step inside of it is the last, or whether there is one, is known at its end."""
        self._inside = True
        _move(self._now, self._aside)

    def take_up(self, *, stepped: bool) -> None:
        """It has ended: what was told before it belongs to the last step made inside of it, or to that which follows.

        What is told behind it belongs there too.
        """
        self._inside = False
        step = self._late if stepped else self._now
        _move(step, self._aside)
        _move(self._aside, step)

    @property
    def begun(self) -> bool:
        """Whether a step has ended or is under way."""
        return self._ended or self._under_way() is not False

    def is_own(self, name: str) -> bool:
        """Whether a number of the step that has ended is not the program's."""
        return name in self._read_apart

    def _logged(self, name: str) -> str:
        """What a number of the program's is called in the step that has ended."""
        return with_mark(name, "#logged") if name.partition(NORM)[0].removeprefix(SHOWN) in self._read else name

    def left(self) -> None:
        """There is no further step: what was kept for one belongs to the last."""
        _move(self._open, self._late)
        logged = {self._logged(name): values for name, values in self._now.items()}
        for name, values in (*self._own.items(), *logged.items()):
            self._late.setdefault(with_mark(name, "#after") if name in self._last else name, []).extend(values)
        self._now, self._own, self._between = {}, {}, {}

    @property
    def ignored(self) -> list[str]:
        """The names that were left out."""
        return sorted({name.removeprefix(SHOWN) for name, wanted in self._wanted.items() if not wanted})

    @property
    def machine(self) -> list[str]:
        """Those of them that nobody asked to leave out."""
        return [name for name in self.ignored if not self._unwanted(name)]

    def late(self, earlier: Mapping[str, float], *, last: bool = False) -> dict[str, float]:
        """The numbers that belong to the step that has ended, once all of them are there.

        Args:
            earlier: Those that the program told of it before its end.
            last: Whether it is the last that was asked for: nobody reads what comes behind it.
        """
        if self._under_way():  # by a pass behind what was open
            _move(self._open, self._late)
        numbers, self._late = self._late, {}
        for name, values in self._between.items() if last else ():
            numbers.setdefault(with_mark(name, "#after") if name in self._last else name, []).extend(values)
        for name, values in self._settings.items():  # before what lines for people tell of the step under that name
            numbers[f"{SHOWN}{name}"] = values + numbers.get(f"{SHOWN}{name}", [])
        self._settings, self._written = {}, True
        known = {self._logged(name): [_known(value) for value in values] for name, values in numbers.items()}
        return _told_apart(known, earlier)


def _move(source: dict[str, list[Any]], step: dict[str, list[Any]]) -> None:
    for name, values in source.items():
        step.setdefault(name, []).extend(values)
    source.clear()


_MOST = 16
"""Numbers of one name in a step that are kept each; of more the sum is."""


def with_mark(name: str, mark: str) -> str:
    """A name with what tells it from others like it, before what ranks are put together by."""
    base, norm, order = name.partition(NORM)
    return f"{base}{mark}{norm}{order}"


def _told_apart(step: Mapping[str, list[Any]], earlier: Mapping[str, float] = MappingProxyType({})) -> dict[str, Any]:
    """The numbers of a step by name: micro-batches log several under one, and two splits.

    Args:
        step: Those to be told apart, in their order.
        earlier: Those before them, whose names are taken.
    """
    numbers: dict[str, Any] = {}
    for name, values in step.items():
        there = [earlier[name]] if name in earlier else []
        before = [] if _all_equal([*there, *values]) else values if there else values[:-1]
        free = (with_mark(name, f"#{k}") for k in itertools.count(1))
        aliases = (alias for alias in free if alias not in step and alias not in earlier)  # there may be a name like it
        rest = with_mark(name, "#more")
        for k, value in enumerate(before, 1):
            alias = next(aliases) if k < _MOST else rest
            numbers[alias] = value + numbers[alias] if alias == rest and alias in numbers else value
        if not there:
            numbers[name] = values[-1]
    return numbers


def _all_equal(values: Sequence[Any]) -> bool:
    """Whether that can be known without waiting for a device, and is so; NaN is equal to NaN here."""
    if any(isinstance(value, torch.Tensor) and value.device.type != "cpu" for value in values):
        return len(values) == 1
    first, *others = (value.hex() if isinstance(value, float) else _known(value).hex() for value in values)
    return all(other == first for other in others)


def _known(value: Any) -> float:
    return value.value() if isinstance(value, _Coming) else float(value)


def _local(name: str, value: Any) -> tuple[str, torch.Tensor | None]:
    """A number as this rank has it: asking others for their parts would be communication of our own.

    Clipping sharded gradients gives a DTensor whose ranks hold the norms of their shards. Replicas of shards (as HSDP
    has them) count once.
    """
    if not hasattr(value, "to_local"):
        return name, value
    local, mesh = value.to_local(), value.device_mesh
    partial = [dim for dim, placement in enumerate(value.placements) if placement.is_partial()]
    norms = {str(getattr(value.placements[dim], "norm_type", "")) for dim in partial}
    if len(norms) != 1 or norms == {""}:
        return name, local
    elsewhere = [c for dim, c in enumerate(mesh.get_coordinate() or ()) if dim not in partial]
    return f"{name}{NORM}{norms.pop()}", None if any(elsewhere) else local


class _Coming:
    """A tensor of one number on its way to the host."""

    def __init__(self, name: str, value: torch.Tensor) -> None:
        from repro_golden.trace.signals import Signals

        self._signals = Signals()
        with torch.no_grad():
            self._signals.take("loss", name, value)
        self._signals.finish()

    def value(self) -> float:
        (row,) = self._signals.rows()
        return number_of(row)


def writable(name: object) -> str:
    """A name that can be written: as it is, but for lone surrogates."""
    return str(name).encode("utf-8", "replace").decode("utf-8")
