"""One step on its way into a log: the one place where its signals are checked and packed, whoever records them.

It needs the standard library alone, so that it can run inside a foreign trainer.
"""

from __future__ import annotations

from repro_golden.base.errors import ReproError
from repro_golden.trace.frames import Packed, join, pack_rows
from repro_golden.trace.model import METRIC, PHASES, Row

__all__ = ["Step"]


class Step:
    """The signals of the step under way, in the order in which they came, each checked as it comes unless it `packs`.

    Attributes:
        rows: Those that did not come packed.
        metrics: The numbers among them, by name.
        parts: Whether one rank of several writes. Tensors that hold parts of several then share a name, and one that
            its placement calls whole keeps the placement: it may be one rank's alone, which cannot be told without it.
        packs: Whether rows may come packed (by `signals`), many at a time. Nobody looks at each then, so none is
            checked: the names are a recorder's, and `attach.gathered.collect` tells apart those that a program chose.
    """

    def __init__(self, *, parts: bool = False, packs: bool = False) -> None:
        self.parts, self.packs = parts, packs
        self._names: set[tuple[str, str]] = set()
        self._begin()

    def _begin(self) -> None:
        self.rows: list[Row] = []
        self.metrics: dict[str, float] = {}
        self._names.clear()
        self._packed: list[Packed] = []
        self._loose: list[Row] = []  # those that are packed together before the next that come packed

    def add(self, row: Row) -> None:
        """Take one signal.

        Raises:
            ReproError: an unknown phase, or a signal seen twice in one step; never where it `packs`.
        """
        if not self.packs:
            self._check(row)
        self.rows.append(row)
        self._loose.append(row)
        if (number := row.number) is not None:
            self.metrics[row.name] = number

    def add_packed(self, packed: Packed) -> None:
        """Take many signals, of a step that `packs`."""
        self._pack_loose()
        self._packed.append(packed)

    def end(self, number: int, label: str = "") -> bytes:
        """The step's frame; the next one begins.

        Args:
            number: The step's.
            label: What tells it from others of its rank: the optimizers that made it.
        """
        self._pack_loose()
        packed = join(number, self._packed, label)
        self._begin()
        return packed

    def _pack_loose(self) -> None:
        if self._loose:
            self._packed.append(pack_rows(self._loose))
            self._loose = []

    def _check(self, row: Row) -> None:
        if row.phase not in PHASES:
            raise ReproError(f"unknown phase {row.phase!r} for signal {row.name!r}: use one of {', '.join(PHASES)}")
        if (row.phase, row.name) in self._names and not (self.parts and not row.whole):
            raise ReproError(f"signal {row.name!r} was observed twice in phase {row.phase!r} of one step: rename one")
        if row.dtype == METRIC and row.name in self.metrics:
            raise ReproError(f"metric {row.name!r} was observed in two phases of one step: rename one")
        self._names.add((row.phase, row.name))
