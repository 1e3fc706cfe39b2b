"""The signals of one step: from tensors of any device to rows of a trace.

It runs inside foreign programs too, so it needs nothing but torch; NumPy, numba and Triton make it fast.
"""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from repro_golden.base.errors import ReproError
from repro_golden.fingerprint import Scan, dtype_name
from repro_golden.fingerprint.kinds import PLAIN_TENSORS
from repro_golden.trace.frames import ABSENT, Packed, json_column
from repro_golden.trace.model import Row
from repro_golden.trace.step import Step
from repro_golden.trace.writer import metric_row

if TYPE_CHECKING:
    from repro_golden.fingerprint.collector import Batch, Collector, Pending
    from repro_golden.fingerprint.plain import PlainCollector, PlainPending

__all__ = ["Signals", "collector"]

_KEEPS_VALUES = ("input", "forward", "loss")


def collector() -> Collector | PlainCollector:
    """What reads tensors here: the fast collector, and where torch has no NumPy the one that needs none."""
    return _collector_type()()


@functools.cache
def _collector_type() -> type[Collector] | type[PlainCollector]:
    try:
        torch.empty(0, dtype=torch.uint8, device="cpu").numpy()
    except RuntimeError:  # it is missing, broken, or of a version that this torch does not know
        from repro_golden.fingerprint.plain import PlainCollector

        return PlainCollector
    from repro_golden.fingerprint.collector import Collector

    return Collector


@dataclass(slots=True)
class _Group:
    """Tensors that were taken in one call, as signals ``name + key``; `batch` is where their results lie together."""

    phase: str
    name: str
    tensors: dict[str, tuple[torch.dtype, tuple[int, ...]]]
    batch: Batch | None

    @property
    def names(self) -> list[str]:
        """Of all of its signals."""
        return [self.name + key for key in self.tensors]

    def rows(self, scans: Iterable[list[Scan]], *, placed: bool) -> list[Row]:
        """Its rows; several for a tensor that holds parts of several. For `placed` see `Step.parts`."""
        looks = zip(self.names, self.tensors.values(), scans, strict=True)
        return [
            _row(self.phase, name, dtype, shape, scan, placed)
            for name, (dtype, shape), parts in looks for scan in parts
        ]  # fmt: skip


class Signals:
    """The signals of one step. Nothing waits for a GPU until `rows` or `into` does."""

    def __init__(self) -> None:
        self._collector = collector()
        self._seen: list[Row | _Group] = []
        self._pending: Pending | PlainPending | None = None

    def __len__(self) -> int:
        """How many calls took something."""
        return len(self._seen)

    def take(self, phase: str, name: str, value: object, placement: Any = None) -> None:
        """Take one signal, or a mapping of names to tensors that are read in one pass as signals ``name + key``.

        Tensors of at most one dimension before the backward pass keep all their values.

        Raises:
            ReproError: `value` is neither a tensor, a float nor a mapping to tensors, or it has no content.
        """
        if isinstance(value, (int, float)):
            self._seen.append(metric_row(phase, name, float(value)))
            return
        group: dict[str, Any] = dict(value) if isinstance(value, Mapping) else {"": value}
        where = placement if isinstance(value, Mapping) else {"": placement}
        if not set(map(type, group.values())).issubset(PLAIN_TENSORS):  # else there is nothing to look for
            for key, tensor in group.items():
                if not isinstance(tensor, torch.Tensor):
                    raise ReproError(
                        f"signal {name + key!r} is a {type(tensor).__name__}: observe takes tensors and floats"
                    )
        small: dict[str, torch.Tensor] = {}
        if phase in _KEEPS_VALUES:
            small = {key: tensor for key, tensor in group.items() if tensor.ndim <= 1}
            group = {key: tensor for key, tensor in group.items() if key not in small}
        for tensors, keep in ((small, True), (group, False)):
            if tensors:
                places = None if placement is None else [where.get(key) for key in tensors]
                batch = self._collector.add(list(tensors.values()), places, keep=keep)
                self._seen.append(_group(phase, name, tensors, batch))

    def finish(self) -> None:
        """Start the results' way home."""
        self._pending = self._collector.finish()

    def ready(self) -> bool:
        """Whether `rows` would return at once."""
        return self._pending is None or self._pending.ready()

    def rows(self) -> list[Row]:
        """The trace's rows, in the order of observation; several for a tensor that holds parts of several."""
        return [row for row in self._each(packed=False, placed=False) if isinstance(row, Row)]

    def into(self, step: Step, change: Callable[[Row], Row | None] = lambda row: row) -> None:
        """Give `rows` to a step, many at a time where it `packs` and their results lie together.

        Args:
            step: Takes them.
            change: Makes what is taken of a row that was not packed many at a time; None is nothing.

        Raises:
            ReproError: see `Step.add`.
        """
        for seen in self._each(packed=step.packs, placed=step.parts):
            if not isinstance(seen, Row):
                step.add_packed(seen)
            elif (row := change(seen)) is not None:
                step.add(row)

    def _each(self, *, packed: bool, placed: bool) -> Iterator[Row | Packed]:
        pending, at = self._home(), 0
        result = functools.cache(pending.result)  # of all tensors, which a group whose results lie apart asks for
        for seen in self._seen:
            if isinstance(seen, Row):
                yield seen
                continue
            if packed and (many := _packed(seen, pending)):
                yield many
            else:
                scans = None if seen.batch is None else pending.scans(seen.batch)
                yield from seen.rows(scans or result()[at : at + len(seen.tensors)], placed=placed)
            at += len(seen.tensors)

    def _home(self) -> Pending | PlainPending:
        if self._pending is None:
            self.finish()
        assert self._pending is not None
        return self._pending


_MANY = 8  # tensors from which on packing them together is worth it
_KEPT_GROUPS = 64
_groups: OrderedDict[tuple[str, str], _Known] = OrderedDict()
"""The last large group of each phase and name: most steps take what the last one did."""


class _Known(NamedTuple):
    frames: list[bytes]  # dtypes and shapes are in them
    tensors: dict[str, tuple[torch.dtype, tuple[int, ...]]]
    table: tuple[str, ...]


def _group(phase: str, name: str, tensors: Mapping[str, torch.Tensor], batch: Batch | None) -> _Group:
    known = _groups.get((phase, name))
    if batch is not None and known and known.frames == batch.frames and list(known.tensors) == list(tensors):
        return _Group(phase, name, known.tensors, batch)
    return _Group(phase, name, {key: (tensor.dtype, tuple(tensor.shape)) for key, tensor in tensors.items()}, batch)


def _packed(group: _Group, pending: Pending | PlainPending) -> Packed | None:
    """The rows of a group without making any; None where each must be looked at."""
    if group.batch is None or group.batch.frames is None or len(group.tensors) < _MANY:
        return None
    block = pending.block(group.batch)
    if block is None:
        return None
    import numpy as np

    table = np.empty((len(block.lengths), 7), np.uint64)  # as `trace.frames` has them: all of eight bytes
    table[:, :2] = block.lanes
    columns: list[Any] = [block.nonfinite, block.absmax, block.l2, block.lengths, ABSENT]
    for k, (column, kind) in enumerate(zip(columns, ("<i8", "<f8", "<f8", "<i8", "<i8"), strict=True)):
        table[:, 2 + k] = np.asarray(column, kind).view(np.uint64)
    return Packed(_table(group, group.batch.frames), table.tobytes(), block.sketches)


def _table(group: _Group, frames: list[bytes]) -> tuple[str, ...]:
    key = (group.phase, group.name)
    known = _groups.get(key)
    if known is not None and known.tensors is group.tensors:
        return known.table
    looks = list(group.tensors.values())
    columns: tuple[list[Any], ...] = (
        [group.phase] * len(looks),
        group.names,
        [dtype_name(dtype) for dtype, _ in looks],
        [shape for _, shape in looks],
        [None] * len(looks),
    )
    table = tuple(json_column(column) for column in columns)
    _groups[key] = _Known(frames, group.tensors, table)
    if len(_groups) > _KEPT_GROUPS:
        _groups.popitem(last=False)
    return table


def _row(phase: str, name: str, dtype: torch.dtype, shape: tuple[int, ...], scan: Scan, placed: bool) -> Row:
    part = scan.share is not None and not scan.share.whole
    # by position: this runs for every tensor of every step
    return Row(
        phase,
        scan.name or name,
        dtype_name(dtype),
        scan.share.shape if scan.share else shape,
        scan.lanes,
        scan.nonfinite,
        scan.absmax,
        scan.l2,
        scan.sketch if scan.values is None or part else b"",
        None if part else scan.values,
        scan.share.cover_text() if scan.share and (part or placed) else None,
    )
