"""A trace seen under the names of another: what was only renamed is no difference.

Names are part of a step's root, so two runs whose signals have other names have other roots in every step. Where the
names of the first such step differ, rows are read and matched by their bits (`name_matching`), and the other trace is
shown with the baseline's names, and with the roots and the chain that it has under them.
"""

from __future__ import annotations

import bisect
import functools
import itertools
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from repro_golden.base.canonical import digest
from repro_golden.base.errors import NotVerifiableError, ReproError
from repro_golden.compare.name_matching import (
    Content,
    Matching,
    by_head,
    by_metric,
    by_optimizer,
    by_place,
    by_tail,
    content,
    exchanged,
    inner,
    of_groups,
    positional,
    regrouped,
    retold,
    rule_of,
)
from repro_golden.compare.step_difference import alone, differing, one_sided, unlike
from repro_golden.fingerprint.definition import SCHEME
from repro_golden.trace import Row, Trace
from repro_golden.trace.families import BESIDE, UNREAD, family, optimizers
from repro_golden.trace.model import METRIC, StepRecord, chain, root
from repro_golden.trace.step_log import IndexedSteps

__all__ = ["NOTHING", "Alignment", "Parting", "Renames", "aligned", "first_other_chain"]

_SHOWN = 3
"""Renames that a line names."""
_FIRST = "optimizer.0/"
"""What the first of several optimizers would be called: its signals have no such prefix."""


@dataclass(frozen=True)
class Renames:
    """What has another name in the second of two runs.

    Attributes:
        signals: How many signals have, over all phases.
        names: The parts of names that changed, before and after: ``fc.weight``, ``proj.weight``.
    """

    signals: int = 0
    names: Sequence[tuple[str, str]] = ()

    def __bool__(self) -> bool:
        return bool(self.signals)

    def __str__(self) -> str:
        """``12 signals were renamed (fc.* -> proj.*)``."""
        what = "1 signal was" if self.signals == 1 else f"{self.signals} signals were"
        return f"{what} renamed ({self.short})"

    @property
    def short(self) -> str:
        """The renames themselves: those of one module as one, and of many the first."""
        by_rule: dict[tuple[str, str], list[tuple[str, str]]] = {}
        for old, new in self.names:
            by_rule.setdefault((old, new) if positional(old) else rule_of(old, new), []).append((old, new))
        texts = []
        for (before, after), pairs in by_rule.items():
            old, new = pairs[0] if len(pairs) == 1 else (f"{before}.*".lstrip("."), f"{after}.*".lstrip("."))
            texts.append(f"{old or _FIRST} -> {new or _FIRST}")
        more = f" and {len(texts) - _SHOWN} more" if len(texts) > _SHOWN else ""
        return ", ".join(texts[:_SHOWN]) + more

    def to_mapping(self) -> dict[str, Any]:
        """JSON types."""
        return {
            "signals": self.signals,
            "names": [list(pair) for pair in self.names],
            "text": str(self) if self else "",
        }


NOTHING = Renames()


@dataclass(frozen=True)
class Alignment:
    """A trace beside its baseline.

    Attributes:
        trace: It, under the baseline's names; the trace itself where they are its own.
        renames: What was renamed.
        alone: Objects that only one of both has, with the side, ``a`` or ``b``, and metrics that who recorded them put
            elsewhere, with ``ab``: they are not compared.
    """

    trace: Trace
    renames: Renames = NOTHING
    alone: Mapping[str, str] = field(default_factory=dict)

    @property
    def names(self) -> Mapping[tuple[str, str], str]:
        """From phase and own name of a renamed signal to the baseline's name."""
        return self.trace.shown if isinstance(self.trace, _Renamed) else {}


class _Renamed(Trace):
    """A trace whose signals are shown under other names; its folder is that of the trace itself."""

    def __init__(
        self, source: Trace, rename: Sequence[tuple[Matching, Mapping[str, str]]], text: Mapping[str, str]
    ) -> None:
        self.directory, self.header, self.end = source.directory, source.header, source.end
        self._source, self._rename, self._text = source, rename, text
        self._own: dict[tuple[str, str], str] = {("loss", old): new for new, old in text.items()}
        self.steps: list[StepRecord] = []

    def continued(self, previous: str, count: int) -> None:
        """Give the first `count` steps the roots that they have under the new names, from the chain `previous` on.

        Of what the baseline has not, nothing is asked but how many steps it is.
        """
        for index in range(len(self.steps), len(self._source.steps)):
            record = self._source.steps[index]
            if index < count:
                rows, source_rows = self.rows(index), self._source.rows(index)
                names = {y.name: x.name for x, y in zip(rows, source_rows, strict=True) if y.dtype == METRIC}
                names |= self._text
                metrics = {names.get(name, name): value for name, value in record.metrics.items()}
                shown = [names.get(name, name) for name in record.shown]
                record = replace(record, root=root(rows), metrics=metrics, shown=shown)
            previous = chain(previous, record.step, record.root)
            self.steps.append(replace(record, chain=previous))

    def rows(self, index: int) -> list[Row]:
        """See `Trace.rows`."""
        source_rows = self._source.rows(index)
        rows = source_rows
        for matching, names in self._rename:
            rows = matching.rename(rows, names)
        for row, before in zip(rows, source_rows, strict=True):
            self._own[row.phase, row.name] = before.name
        return rows

    def name_of(self, phase: str, name: str) -> str:
        """See `Trace.name_of`."""
        return self._own.get((phase, name), name)

    @property
    def shown(self) -> dict[tuple[str, str], str]:
        """From phase and own name to the name under which a signal is shown, where that is another."""
        return {(phase, name): shown for (phase, shown), name in self._own.items() if shown != name}

    @property
    def renames(self) -> Renames:
        """What has another name than in the trace itself."""
        signals = [
            shown
            for (phase, shown), name in self._own.items()
            # the state at the end shows all once more
            if shown != name and not shown.endswith("#new") and family(phase, name) != "end"
        ]
        every = (self._text, *(names for _, names in self._rename))
        pairs = {(old, new) for names in every for new, old in names.items() if old != new}
        return Renames(len(signals), sorted(pairs))


class _Common(Trace):
    """A trace whose steps have the baseline's roots up to the first that differs in what both sides have."""

    def __init__(self, source: Trace, baseline: Trace, index: int) -> None:
        self.directory, self.header, self.end = source.directory, source.header, source.end
        self._source = source
        self.alone: dict[str, str] = {}
        self.steps: list[StepRecord] = list(source.steps[:index])
        same, one_sees_more = True, unlike(baseline, source)
        self.common = index > 0  # whether there is any signal that both have
        for record, other in itertools.zip_longest(source.steps[index:], baseline.steps[index : len(source.steps)]):
            at = len(self.steps)
            if same and other is not None:
                rows = baseline.rows(at), source.rows(at)
                in_step = one_sees_more.at(at)
                self.alone |= alone(*rows, in_step)
                self.common = self.common or not {row.key for row in rows[0]}.isdisjoint(row.key for row in rows[1])
                same = not differing(*rows, in_step)
            previous = self.steps[-1].chain if self.steps else digest("chain", SCHEME)
            step_root = other.root if same and other is not None else record.root
            self.steps.append(replace(record, root=step_root, chain=chain(previous, record.step, step_root)))

    def rows(self, index: int) -> list[Row]:
        """See `Trace.rows`."""
        return self._source.rows(index)

    def name_of(self, phase: str, name: str) -> str:
        """See `Trace.name_of`."""
        return self._source.name_of(phase, name)


def first_other_chain(a: Trace, b: Trace) -> int | None:
    """Index of the first step with another root, found by binary search on the chains; None when all common ones agree.

    Chains differ for ever once they differ, so the prefix that agrees ends at one place.
    """
    count = min(len(a.steps), len(b.steps))
    index = bisect.bisect_left(range(count), True, key=lambda i: _chain(a, i) != _chain(b, i))
    return None if index == count else index


def _chain(trace: Trace, index: int) -> str:
    """The chain after a step, from the index of the step log where there is one."""
    steps = trace.steps
    return steps.chain(index) if isinstance(steps, IndexedSteps) else steps[index].chain


def aligned(a: Trace, b: Trace, *, strict: bool = False, so_far: bool = False) -> Alignment:
    """`b` under the names of the baseline `a`, and without what only one of both has (`step_difference.alone`).

    No row is read where chains are equal, and only those of one step where the same names differ in their bits.

    Args:
        a: The baseline.
        b: The other trace.
        strict: Whether another name is a difference.
        so_far: Whether `b` goes on, and may yet tell which metric is which.

    Raises:
        NotVerifiableError: what both have is nothing.
        ReproError: rows are needed, and are missing or damaged.
    """
    return _aligned(a, b, (len(a.steps), len(b.steps)), strict=strict, so_far=so_far)


@functools.lru_cache(maxsize=16)
def _aligned(
    a: Trace,
    b: Trace,
    lengths: tuple[int, int],  # noqa: ARG001 - one may grow
    *,
    strict: bool,
    so_far: bool,
) -> Alignment:
    index = first_other_chain(a, b)
    if index is None or isinstance(b, (_Renamed, _Common)):
        return Alignment(b)
    renamed = Alignment(b) if strict else _renamed(a, b, index, so_far=so_far)
    if index == 0 and not strict and first_other_chain(a, renamed.trace) == 0 and (turned := _in_order_of(a, b)):
        whole = _renamed(a, turned, 0, so_far=so_far)
        other = first_other_chain(a, whole.trace)
        differences = (
            [] if other is None else differing(a.rows(other), whole.trace.rows(other), unlike(a, whole.trace).at(other))
        )
        # else steps would be told under numbers that are not their own; what lives beside stands with the same step
        if other is None or (differences and all(_beside(row) for _, row, _ in differences)):
            return whole
    rows, only_one = (a.rows(index), renamed.trace.rows(index)), unlike(a, renamed.trace).at(index)
    if not one_sided(*rows, only_one) and differing(*rows, only_one):
        return renamed
    common = _Common(renamed.trace, a, index)
    if not common.common:
        raise NotVerifiableError(f"{a.directory} and {b.directory} have no signal in common: nothing was looked at")
    return Alignment(common, renamed.renames, common.alone)


def _renamed(a: Trace, b: Trace, index: int, *, so_far: bool) -> Alignment:
    pair = a.rows(index), b.rows(index)
    keys = [{row.key for row in rows} for rows in pair]
    places = index == 0 and any(positional(by_tail(row).part) or row.name.startswith("optimizer.") for row in pair[0])
    # a list that was saved before has its order
    listed = not (any(map(by_place, pair[0])) and any(by_place(row) for at in range(index) for row in a.rows(at)))
    places = places or (listed and any(map(by_place, pair[0])))
    swapped = exchanged(*pair) if index == 0 else set()
    if keys[0] == keys[1] and not (places or swapped or regrouped(*pair)):
        return Alignment(b)
    count = min(len(a.steps), len(b.steps))
    # what had one name on both sides in the steps before is known by it, places too
    matchings = [
        Matching(by_place, lambda _: listed),
        Matching(by_optimizer, lambda _: index == 0),
        Matching(by_tail, lambda part: of_groups(part) or (index == 0 and (positional(part) or part in swapped))),
        Matching(by_head, lambda _: False),
    ]
    if not any("optimizer." in row.name for rows in pair for row in rows):
        del matchings[1]
    metrics = Matching(by_metric, lambda _: False)
    metric_names = retold(*([record.compared for record in trace.steps] for trace in (a, b)), so_far=so_far)
    text = _text_names(a, b, metric_names)
    parted: list[Mapping[str, str]] | None = None
    last, only_one = count, unlike(a, b)
    for at in range(index, count):
        if at > last:
            break
        rows_a, rows_b = a.rows(at), metrics.rename(b.rows(at), metric_names)
        for matching in matchings:
            matching.take(rows_a, rows_b)
            rows_b = matching.rename(rows_b, matching.names())
        same = {row.key: content(row) for row in rows_a} == {row.key: content(row) for row in rows_b}
        if parted is None and not same and differing(rows_a, rows_b, only_one):
            # a later step of its round may be the one that was made first, and have names that were not met so far
            parted, last = [matching.names() for matching in matchings], max(a.as_made(at))
    names = [matching.names() for matching in matchings]
    later = [(m, {**new, **old}) for m, new, old in zip(matchings, names, parted or names, strict=True)]
    rename = [(metrics, metric_names), *later]
    if not text and not any(new != old for _, names in rename for new, old in names.items()):
        return Alignment(b)
    renamed = _Renamed(b, rename, text)
    renamed.steps = list(b.steps[:index])
    renamed.continued(a.steps[index - 1].chain if index else digest("chain", SCHEME), count)
    return Alignment(renamed, renamed.renames)


def _text_names(a: Trace, b: Trace, known: Mapping[str, str]) -> dict[str, str]:
    """From metrics of `b` in lines of text to the baseline's that it prints in an inner dict (`inner`)."""
    shown = [{name: record.metrics[name] for name in record.shown} for record in b.steps]
    names = (
        {name for record in a.steps for name in record.metrics},
        {name for record in b.steps for name in record.metrics},
    )
    return inner([record.compared for record in a.steps], shown, (names[0], names[1] | {*known.values()}))


# -- whether a replay that is under way has left its baseline, so that it need go no further


class Parting:
    """Told of every step that was written.

    Steps are told apart by their roots, of which names are a part. Where one differs, rows are looked at once: a replay
    in which signals were only renamed makes all of its steps, and is judged when it has.

    Args:
        baseline: Folder of the baseline's trace; None for a replay without one.
        trace: Folder of the trace that is being written; None where nothing is.
    """

    def __init__(self, baseline: str | None, trace: str | None) -> None:
        self._baseline = Trace(Path(baseline)) if baseline and trace else None
        self._trace = Path(trace or "")
        self._roots = {record.step: record.root for record in self._baseline.steps} if self._baseline else {}

    def seen(self, records: Iterable[StepRecord]) -> bool:
        """Whether one of the steps that were just written differs from the baseline's by more than names."""
        if all(self._roots.get(record.step, record.root) == record.root for record in records):
            return False
        if self._only_renamed():
            self._roots = {}
            return False
        return True

    def _only_renamed(self) -> bool:
        assert self._baseline is not None, "without one there are no roots"
        try:
            trace = Trace(self._trace)
            if trace.header.first_step != self._baseline.header.first_step:
                return False
            return first_other_chain(self._baseline, aligned(self._baseline, trace, so_far=True).trace) is None
        except ReproError:  # rows that cannot be read here: the whole is judged by who can, or who says so
            return True


# -- optimizers that step in turn, in the order in which another trace has them


_NAME = re.compile(r"((?:start/|end/)?)(optimizer\.\d+/)?(.*)", re.DOTALL)


def _in_order_of(a: Trace, b: Trace) -> Trace | None:
    """`b` with the steps of each round in the baseline `a`'s order, and its optimizers numbered so; None for no other.

    Raises:
        ReproError: rows of the first round are missing or damaged.
    """
    turns, others = _turns(a), _turns(b)
    if len(turns) < 2 or len(turns) != len(others):
        return None
    shown = [_shown(b.rows(index)) for index in range(len(others))]
    order = list[int]()
    for index in range(len(turns)):
        wanted = _shown(a.rows(index))
        place = next((k for k, signals in enumerate(shown) if signals == wanted and k not in order), None)
        if place is None:
            return None
        order.append(place)
    numbers = {others[place]: turn for place, turn in zip(order, turns, strict=True)}
    return None if order == sorted(order) and others == turns else _Turned(b, order, numbers)


def _turns(trace: Trace) -> list[str]:
    """The optimizers of the first round in the order of their steps, as their signals' names begin."""
    turns = list[str]()
    for index in range(len(trace.steps)):
        stepped = optimizers(trace.rows(index))
        if len(stepped) != 1 or (turn := next(iter(stepped))) in turns:
            return turns
        turns.append(turn)
    return turns


def _shown(rows: Sequence[Row]) -> Counter[tuple[str, Content]]:
    """What one optimizer showed, without names."""
    return Counter((row.phase, content(row)) for row in rows if not _beside(row))


def _beside(row: Row) -> bool:
    return family(row.phase, row.name) in BESIDE


class _Turned(Trace):
    """A trace whose rounds are in another order; what lives beside the optimizers stands with the last of a round.

    Args:
        source: The trace.
        order: For each place in a round, the place of that step in the source's.
        numbers: For the beginning of an optimizer's names, the one that it has here.
    """

    def __init__(self, source: Trace, order: Sequence[int], numbers: Mapping[str, str]) -> None:
        self.directory, self.header = source.directory, source.header
        self.end = source.end and {key: value for key, value in source.end.items() if key != "rounds"}
        self._source, self._order, self._numbers = source, order, numbers
        self.steps: list[StepRecord] = []
        previous = digest("chain", SCHEME)
        for index, record in enumerate(source.steps):
            source_rows, rows = self._own(index), self.rows(index)
            names = {x.name: y.name for x, y in zip(source_rows, rows, strict=True) if x.dtype == METRIC}
            made = source.steps[self._place(index)]
            metrics = {names.get(name, name): value for name, value in made.metrics.items()}
            previous = chain(previous, record.step, step_root := root(rows))
            self.steps.append(replace(made, step=record.step, root=step_root, chain=previous, metrics=metrics))

    def rows(self, index: int) -> list[Row]:
        """See `Trace.rows`."""
        return [replace(row, name=self._name(row)) for row in self._own(index)]

    def _own(self, index: int) -> list[Row]:
        """A step's rows, under the source's names."""
        size = len(self._order)
        first = index - index % size
        rows = [row for row in self._source.rows(self._place(index)) if not _beside(row)]
        last = min(first + size, len(self._source.steps)) - 1
        beside = [row for row in self._source.rows(last) if _beside(row)] if index == last else []
        return rows + beside

    def name_of(self, phase: str, name: str) -> str:
        """See `Trace.name_of`."""
        return self._source.name_of(phase, name)

    def _place(self, index: int) -> int:
        """Where a step is in the source; a round that was cut off is left as it is."""
        size = len(self._order)
        first = index - index % size
        return first + self._order[index % size] if first + size <= len(self._source.steps) else index

    def _name(self, row: Row) -> str:
        match = _NAME.fullmatch(row.name)
        assert match is not None, "the pattern fits every text"
        start, number, rest = match[1], match[2] or "", match[3]
        of_one = row.phase in ("grad", "update") and row.name != UNREAD and family(row.phase, rest) not in BESIDE
        if not (number or start == "start/" or of_one):
            return row.name
        return f"{start}{self._numbers.get(number, number)}{rest}"
