"""Which metrics the programs of two traces tell, in which steps and to how many digits.

How often a program logs, how many times in a step and in what form is no matter of the training.
"""

from __future__ import annotations

import functools
import math
import re
import threading
import weakref
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence, Set
from decimal import Decimal
from typing import NamedTuple

from repro_golden.base.canonical import encode_float, same_float
from repro_golden.base.printed.machine_numbers import words_of
from repro_golden.trace import Trace
from repro_golden.trace.families import is_norm
from repro_golden.trace.model import METRIC, StepRecord

__all__ = [
    "BOTH",
    "COUNTED",
    "COUNTED_ONCE",
    "Moved",
    "ToldMetrics",
    "base_of",
    "moved_text",
    "once_more",
    "told_under",
]

_TOLD_SINCE = 20
"""The first recorder that puts each number to its step as today, and under its name of today."""
_EARLY_UNTIL = {False: 19, True: 20}
"""The first that puts none a step too early: without patterns, and with them, in a dict beside a number of theirs."""
BOTH = "ab"
"""The side of a metric that both tell and nobody can compare."""
COUNTED = "counted"
"""The side of one by which both count their steps, from different numbers on."""
COUNTED_ONCE = "counted once"
"""The side of one by which the baseline alone counts its steps."""
_COUNTER = re.compile(
    r"(?:(?:global|train|training|trainer|total|current|cur|num|n|opt|optimizer|batch) )*"
    r"(?:steps?|iters?|iterations?|it|i|idx|index|updates?|epoch|round)(?: (?:id|idx|index|no|num|number))?"
)
"""Words of the name of a counter of steps: ``train/global_step``; not ``sched_step``, nor ``buffer_size``."""
_ENOUGH = 3
"""Steps from which on it is known that a number counts them."""
_SOME = " of some steps"
_TELLING = re.compile("#(?:[0-9]|more|new|after)")


class ToldMetrics:
    """What two traces tell.

    Args:
        a: The baseline.
        b: The other.
    """

    def __init__(self, a: Trace, b: Trace) -> None:
        self._a, self._b = a, b
        self._count = min(len(a.steps), len(b.steps))
        self._elsewhere: dict[str, str] = {}
        self._unsure: dict[str, bool] = {}
        self._counts: dict[str, bool] = {}
        self._instead: dict[tuple[str, str], Set[str]] = {}
        patterns = any(trace.header.subject.get("observe", {}).get("metrics") for trace in (a, b))
        self._early = _recorders_part(a, b, _EARLY_UNTIL[patterns])
        self.otherwise = _recorders_part(a, b, _TOLD_SINCE)
        """Whether one recorder alone put some numbers to another step, or under other names."""

    def metric(self, name: str) -> str:
        """The metric that a name tells: ``loss`` for ``loss#1`` and ``loss@0``.

        What the program logs of what the recorder reads itself (``lr#logged``) is a metric of its own.
        """
        return _metric(name, _ranks(self._b))

    def new(self, name: str) -> str:
        """Which metric a name of the other side tells that the baseline tells in no step, '' for one that it does."""
        metric = self.metric(name)
        return "" if metric in _said(self._a).last else metric

    def counts(self, metric: str) -> bool:
        """Whether a metric is no number of the training: each side that tells it counts its steps by it.

        By its name it is a counter, and in every step that tells it the number is the step's and one integer that is
        the same in all of them. A side of three such steps says so; the other may have made fewer so far.
        """
        if metric not in self._counts:
            named = _COUNTER.fullmatch(" ".join(words_of(metric.rpartition("/")[2])))
            numbers = [self._beyond_steps(trace, metric) for trace in (self._a, self._b)] if named else []
            whole = all(len({*side}) <= 1 and all(map(float.is_integer, side)) for side in numbers)
            self._counts[metric] = whole and any(len(side) >= _ENOUGH for side in numbers)
        return self._counts[metric]

    def counted_once(self, metric: str) -> bool:
        """Whether it is such a counter (`counts`), and the other side tells it in no step."""
        return metric not in _said(self._b).last and self.counts(metric)

    def _beyond_steps(self, trace: Trace, metric: str) -> list[float]:
        """By how much the numbers that tell a metric exceed those of their steps; of each step, each once."""
        numbers = [{x - s.step for name, x in s.compared.items() if self.metric(name) == metric} for s in trace.steps]
        return [number for step in numbers for number in step]

    def instead(self, side: str, norm: str) -> Set[str]:
        """Names by which the program of a side, ``a`` or ``b``, tells a norm that the recorder reads in the other.

        None unless the one's is read in every step, and the other's in no step: who clips less often than before clips
        otherwise. A name is one that the other's program tells in every step. What the one's tells too, beside its
        clipping, says nothing of who clips, in whatever dict it is.
        """
        if (side, norm) not in self._instead:
            mine, read = (self._a, self._b) if side == "a" else (self._b, self._a)
            beside = {base_of(name) for step in read.steps for name in step.metrics} - {norm}
            known = {name.rpartition("/")[2] for name in beside}
            told = [{base_of(name) for name in step.metrics if _ends_as_norm(name, step)} for step in mine.steps]
            names = set[str]().union(*told[:1]).intersection(*told[: self._count])
            names = {name for name in names if name == norm or name.rpartition("/")[2] not in known}
            if names and (any(self._reads(mine, norm)) or not all(self._reads(read, norm))):
                names = set()
            self._instead[side, norm] = names
        return self._instead[side, norm]

    def _reads(self, trace: Trace, norm: str) -> Iterator[bool]:
        """For each step that both have, whether the recorder reads a norm in it."""
        for index in range(self._count):
            rows = trace.rows(index)
            yield any(row.phase == "grad" and row.dtype == METRIC and base_of(row.name) == norm for row in rows)

    def in_text(self, side: str, number: float, index: int) -> list[str]:
        """The metrics that a side tells in lines of text of a step and that are a number, to their digits."""
        trace = self._a if side == "a" else self._b
        step = trace.steps[index]
        return [name for name in step.shown if _said(trace).form(name).of(number, step.metrics[name])]

    def elsewhere(self, metric: str, index: int | None) -> str:
        """Why a step in which one side alone tells a metric is no difference, behind its name; '' where it is one.

        It is none where both tell it in another step, in which it is compared, and where one side tells it in lines of
        text, to whose digits it is the other's. Before the last step in which any side tells it this is not known: the
        other may have been stopped, or be under way. A step in which it is another number in text is one.

        Args:
            metric: Its name.
            index: Of the step; None where it is the last.
        """
        if metric not in self._elsewhere:
            self._elsewhere[metric] = self._compared_elsewhere(metric)
        if index is not None and not self._elsewhere[metric] and self._moved_in_text(metric, index):
            return ""
        last = max(_said(trace).last.get(metric, 0) for trace in (self._a, self._b))
        return self._elsewhere[metric] or (_SOME if index is not None and index < last else "")

    def _compared_elsewhere(self, metric: str) -> str:
        presence = [[metric in step for step in _said(trace).steps[: self._count]] for trace in (self._a, self._b)]
        if any(map(all, zip(*presence, strict=True))) or (self.otherwise and all(map(any, presence))):
            return _SOME
        if all(map(any, presence)):
            return " in another step of a round" if self._same_in_rounds(metric) else ""
        if any(presence[0]) != any(presence[1]):
            mine, theirs = (self._a, self._b) if any(presence[0]) else (self._b, self._a)
            both = [pair for pair in zip(mine.steps, theirs.steps, strict=False) if metric in pair[1].shown]
            if pairs := [(x.metrics[metric], y.metrics[metric]) for x, y in both if metric in x.compared]:
                form = _said(theirs).form(metric)
                return " as a number" if all(form.of(x, y) for x, y in pairs) else ""
        return ""

    def _moved_in_text(self, metric: str, index: int) -> bool:
        """Whether the other side tells the baseline's number of a step in lines of text alone, and tells another."""
        x, y = self._a.steps[index], self._b.steps[index]
        if self.otherwise or metric not in x.compared or metric not in y.shown or metric in _said(self._b).last:
            return False
        return not _said(self._b).form(metric).of(x.metrics[metric], y.metrics[metric])

    def _same_in_rounds(self, metric: str) -> bool:
        """Whether both tell the same of it in each round of several optimizers in which both tell it.

        Behind whose step of a round a number is told is no matter of the training.
        """
        both = (self._a, self._b)
        rounds = {frozenset(trace.as_made(index)) for index in range(self._count) for trace in both}
        pairs = [[self._told_in(trace, metric, steps) for trace in both] for steps in rounds if len(steps) > 1]
        shared = [pair for pair in pairs if all(pair)]
        return bool(shared) and all(before == after for before, after in shared)

    def _told_in(self, trace: Trace, metric: str, steps: Set[int]) -> list[tuple[str, str]]:
        """Names and numbers that tell a metric in some steps."""
        pairs = (pair for step in steps if step < self._count for pair in trace.steps[step].compared.items())
        return sorted((name, str(encode_float(number))) for name, number in pairs if self.metric(name) == metric)

    def unsure(self, name: str) -> bool:
        """Whether a number stands in another step because of who recorded it, or under another name.

        So it may where both tell it, in other steps, or where the later trace tells a step later what the earlier one
        tells. What both tell in the same steps did not move else.
        """
        if not self.otherwise:
            return False
        if name not in self._unsure:
            early = self._early and _a_step_early(self._a, self._b, name)
            self._unsure[name] = early or "#" in name or self._other_steps(self.metric(name))
        return self._unsure[name]

    def _other_steps(self, metric: str) -> bool:
        presence = [[metric in step for step in _said(trace).steps[: self._count]] for trace in (self._a, self._b)]
        after = [any(f"{metric}#after" in step.metrics for step in trace.steps) for trace in (self._a, self._b)]
        if not all(map(any, presence)):
            return False
        if self._early:
            return presence[0] != presence[1] or after[0] != after[1]
        first, other = (side.index(True) for side in presence)  # a step late is what a pass tells that made its steps
        return first > other if self._a.header.recorder < self._b.header.recorder else other > first


def base_of(name: str) -> str:
    """A metric's name without what tells several of one name apart."""
    return re.split("[#@]", name, maxsplit=1)[0]


def _ends_as_norm(name: str, step: StepRecord) -> bool:
    """Whether a number of a step may be a norm: in lines of text, where its digits are few, only as ``grad_norm``."""
    return is_norm(name) or (name not in step.shown and base_of(name).endswith("norm"))


def _recorders_part(a: Trace, b: Trace, since: int) -> bool:
    """Whether one of two recorders is later than the other, which is earlier than `since`."""
    old, new = sorted((a.header.recorder, b.header.recorder))
    return old < min(new, since)


def _a_step_early(a: Trace, b: Trace, name: str) -> bool:
    """Whether, where a number first differs, the earlier recorder has what the later one has a step later."""
    old, new = sorted((a, b), key=lambda trace: trace.header.recorder)
    series = [[step.metrics.get(name) for step in trace.steps] for trace in (old, new)]
    for index, (x, y) in enumerate(zip(*series, strict=False)):
        if x is None or y is None or same_float(x, y):
            continue
        before = series[0][index - 1] if index else y
        if before is None or not same_float(before, y):
            return False
        if index + 1 == len(series[1]):  # it may come, or be what nobody asked for
            return index > 0 or new.end is None
        after = series[1][index + 1]
        return after is not None and same_float(x, after)
    return False


@functools.lru_cache(maxsize=1 << 16)
def _metric(name: str, ranks: float) -> str:
    """Of fewer ranks than the number behind an @ says, that is part of the name: ``pass@8``."""
    base, at, rank = _TELLING.split(name, maxsplit=1)[0].rpartition("@")
    return base if at and rank.isdecimal() and int(rank) < ranks else base + at + rank


def _ranks(trace: Trace) -> float:
    """How many ranks a trace is of; infinite where it does not say."""
    return float(trace.header.identity.get("layout", {}).get("ranks") or math.inf)


class _Form(NamedTuple):
    """How a metric is written in a trace's lines of text.

    Attributes:
        decimals: Most digits behind the point.
        digits: Most significant digits.
        times: How often it is written.
    """

    decimals: int = 0
    digits: int = 1
    times: int = 0

    def with_(self, value: float) -> _Form:
        """With one more number that is written."""
        if not math.isfinite(value):
            return self
        decimal = Decimal(repr(value)).normalize().as_tuple()
        return _Form(max(self.decimals, -int(decimal.exponent)), max(self.digits, len(decimal.digits)), self.times + 1)

    def of(self, value: float, text: float) -> bool:
        """Whether a value would be written so."""
        if math.isnan(value) or math.isnan(text):
            return math.isnan(value) and math.isnan(text)
        return abs(value - text) <= 0.5000001 * 10.0**-self.decimals or float(f"{value:.{self.digits}g}") == text


def once_more(before: Sequence[tuple[str, object]], after: Sequence[tuple[str, object]]) -> bool:
    """Whether a metric is told by the same ranks, with each number of the baseline and others beside them.

    What comes after the last step stands in for no number of a step, nor one of a step for it.

    Args:
        before: Names and numbers by which one step of the baseline tells it.
        after: Those of the other.
    """
    tellers = [{_AFTER.sub("", _AGAIN.sub("", name)) for name, _ in numbers} for numbers in (before, after)]
    counts = [Counter((_AGAIN.sub("", name), number) for name, number in numbers) for numbers in (before, after)]
    return len(after) > len(before) and tellers[0] == tellers[1] and not counts[0] - counts[1]


def told_under(a: Trace, b: Trace, index: int) -> tuple[Mapping[str, float], Set[str]]:
    """The metrics of a step of `b`, each number of the baseline's under its name there; and the names of those beside.

    Where a metric is told once more (`once_more`), which of its numbers has which name is chance. What is not finite
    is left as it is.
    """
    return _told_under(a.steps[index], b.steps[index], _ranks(b))


def _told_under(x: StepRecord, y: StepRecord, ranks: float) -> tuple[Mapping[str, float], Set[str]]:
    metrics, beside = dict(y.metrics), set[str]()
    for metric in sorted({_metric(name, ranks) for name in y.metrics.keys() - x.metrics.keys()}):
        before, after = (
            {name: value for name, value in step.metrics.items() if _metric(name, ranks) == metric} for step in (x, y)
        )
        pairs = [[(name, value.hex()) for name, value in numbers.items()] for numbers in (before, after)]
        if not once_more(*pairs) or not all(map(math.isfinite, after.values())):
            continue
        metrics = {name: value for name, value in metrics.items() if name not in after} | before
        every, known = (Counter((_AGAIN.sub("", name), number) for name, number in numbers) for numbers in pairs[::-1])
        left = [*(every - known).elements()]
        for name in (name for name in after if name not in before):
            beside.add(name)
            if pair := next((pair for pair in left if pair[0] == _AGAIN.sub("", name)), None):
                left.remove(pair)
                metrics[name] = float.fromhex(pair[1])
    return metrics, beside


_AGAIN = re.compile(r"#(?:[0-9]+|more)")
_AFTER = re.compile("#after")


class _Said:
    """What the steps of a trace tell.

    Attributes:
        steps: The metrics of each, however often and by whom they are told.
        last: By metric, the last step that tells it.
    """

    def __init__(self) -> None:
        self.steps: list[Set[str]] = []
        self.last: dict[str, int] = {}
        self._forms: dict[str, _Form] = {}

    def form(self, name: str) -> _Form:
        """How a metric is written in lines of text."""
        return self._forms.get(name, _Form())

    def read(self, trace: Trace) -> None:
        """Read on: the trace may have grown."""
        ranks = _ranks(trace)
        for number, record in enumerate(trace.steps[len(self.steps) :], len(self.steps)):
            names = frozenset(_metric(name, ranks) for name in record.compared)
            self.last.update(dict.fromkeys(names, number))
            self._forms |= {name: self.form(name).with_(record.metrics[name]) for name in record.shown}
            self.steps.append(names)


_traces: weakref.WeakKeyDictionary[Trace, _Said] = weakref.WeakKeyDictionary()
_reading = threading.Lock()  # probes that end at once are compared with one baseline


def _said(trace: Trace) -> _Said:
    with _reading:
        told_so_far = _traces.setdefault(trace, _Said())
        if len(told_so_far.steps) < len(trace.steps):
            told_so_far.read(trace)
        return told_so_far


# -- numbers in lines of text

_SURE = 4
"""Numbers of a form from which on it is known: the last digits of one may be zeros, which nobody sees."""


class Moved(NamedTuple):
    """A number in lines of text that is another on the other side.

    Attributes:
        metric: Its name.
        step: The first step in which it is.
        a: The baseline's.
        b: The other side's.
    """

    metric: str
    step: int
    a: float
    b: float

    def __str__(self) -> str:
        return f"{self.metric} ({self.a!r} became {self.b!r} at step {self.step})"


def moved_text(a: Trace, b: Trace) -> list[Moved]:
    """Each number in lines of text that differs by more than the digits that are shown, where it first does."""
    moved = dict[str, Moved]()
    part = _recorders_part(a, b, _TOLD_SINCE)
    for x, y in zip(a.steps, b.steps, strict=False):
        metrics = _told_under(x, y, _ranks(b))[0]
        for name in x.metrics.keys() & metrics.keys() & {*x.shown, *y.shown} - moved.keys():
            before, after = x.metrics[name], metrics[name]
            if same_float(before, after) or before == after:
                continue
            form, other = _said(a).form(name), _said(b).form(name)
            fits = _rounds(name, x, y, form, other) and form.of(after, before)
            if not fits and not (_rounds(name, y, x, other, form) and other.of(before, after)):
                moved[name] = Moved(name, x.step, before, after)
    every = (number for number in moved.values() if not (part and _a_step_early(a, b, number.metric)))
    return sorted(every, key=lambda number: (number.step, number.metric))


def _rounds(name: str, x: StepRecord, y: StepRecord, form: _Form, other: _Form) -> bool:
    """Whether `x` is known to show fewer digits of a number than `y`."""
    if name not in x.shown or name not in y.shown:
        return name in x.shown
    return form.decimals < other.decimals and form.times >= _SURE
