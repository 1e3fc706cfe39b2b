"""TensorBoard event files as a baseline: their scalars, and how a trace's metrics compare with them.

A scalar in an event file is a float32, so a trace's fp64 is rounded to float32 before the two are compared bit for bit.
"""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from repro_golden.base.canonical import mapping_of
from repro_golden.base.errors import ReproError
from repro_golden.base.extras import require
from repro_golden.case.file import Bound
from repro_golden.compare.traces import MetricChange

__all__ = ["EventsComparison", "agreeing_offset", "differences", "event_files", "matched", "read_events"]


def event_files(folder: Path) -> list[Path]:
    """The event files of a folder and of those in it, in the order of their names."""
    return sorted(p for p in folder.rglob("*tfevents*") if p.is_file() and not p.name.endswith(".profile-empty"))


def read_events(folder: Path) -> dict[int, dict[str, float]]:
    """The scalars of TensorBoard event files, read by TensorBoard's own reader.

    Values are float32, as event files hold them: ``0.1`` comes back as ``0.10000000149011612``. NaN and infinities are
    kept. A step that was logged twice, as after a restart, has the value with the later wall time; tags keep their
    whole name (``train/grad_norm``). Everything that is no scalar is passed over. A file that was cut short counts up
    to its last whole record.

    What ``add_scalars("loss", {"policy": ...})`` wrote, in a folder of its own, is ``loss/policy``. Another tag that
    several folders hold is one metric where they wrote it one after the other, as after a restart. Where they wrote it
    at the same time it is one in each of them: ``eval/loss``, by what tells the folders apart beside when they began.

    Args:
        folder: Searched with all folders in it.

    Returns:
        By step, in their order, the values by tag.

    Raises:
        ReproError: TensorBoard is not installed; or there is no event file, or no scalar in any.
    """
    files = event_files(folder)
    if not files:
        raise ReproError(f"{folder} holds no TensorBoard event file (*tfevents*): give the folder that the run wrote")
    by_tag: dict[str, dict[Path, _Values]] = {}
    for of, values in itertools.groupby(sorted(files, key=lambda path: path.parent), key=lambda path: path.parent):
        for tag, each in _of_folder(values).items():
            by_tag.setdefault(_grouped(tag, of, {path.parent for path in files}), {})[of] = each
    newest: dict[tuple[int, str], tuple[float, float]] = {}
    for tag, folders in by_tag.items():
        names = _labels([of.relative_to(folder).as_posix() for of in folders]) if _at_once(folders.values()) else {}
        for of, each in folders.items():
            label = names.get(of.relative_to(folder).as_posix(), "")
            name = f"{label}/{tag}" if label else tag
            for step, (at, value) in each.items():
                if at >= newest.get((step, name), (at, 0.0))[0]:
                    newest[step, name] = at, value
    if not newest:
        raise ReproError(f"the TensorBoard event files of {folder} hold no scalar: is it the training run's folder?")
    scalars: dict[int, dict[str, float]] = {}
    for step, tag in sorted(newest):
        scalars.setdefault(step, {})[tag] = newest[step, tag][1]
    return scalars


_Values = dict[int, tuple[float, float]]
"""By step, the wall time at which a value was written, and the value."""


def _of_folder(files: Iterable[Path]) -> dict[str, _Values]:
    """The values of one folder's files, by tag: those that count."""
    by_tag: dict[str, _Values] = {}
    began: list[tuple[float, int]] = []
    for path in files:
        for at, step, tag, value in _scalars(path):
            if tag is None:
                began.append((at, step))
            elif at >= by_tag.setdefault(tag, {}).get(step, (at, 0.0))[0]:
                by_tag[tag][step] = at, value
    for at, first in began:  # a run that began anew there took back what was logged from that step on
        for values in by_tag.values():
            for step in [step for step, (then, _) in values.items() if step >= first and then < at]:
                del values[step]
    return {tag: values for tag, values in by_tag.items() if values}


def _grouped(tag: str, folder: Path, folders: Set[Path]) -> str:
    """A tag, with the name of its value where `add_scalars` wrote it: that makes a folder for each beside its own."""
    begin = f"{tag.replace('/', '_')}_"
    grouped = folder.parent in folders and folder.name.startswith(begin) and folder.name != begin
    return f"{tag}/{folder.name.removeprefix(begin)}" if grouped else tag


_WHEN = re.compile(r"[A-Z][a-z]{2}\d\d_\d\d-\d\d-\d\d|\d{4}-?\d\d-?\d\d([-_T]?\d\d[-:]?\d\d([-:]?\d\d)?)?|\d{9,}")
"""When a run began, as folders are called: two runs differ in it."""


def _labels(folders: Sequence[str]) -> dict[str, str]:
    """What tells folders apart that were written at the same time: no time, and nothing that all have in common."""
    plain = [[word for word in re.split("[/_]", _WHEN.sub("", folder)) if word not in ("", ".")] for folder in folders]
    names = ["_".join(word for word in parts if not all(word in other for other in plain)) for parts in plain]
    return dict(zip(folders, names if len({*names}) == len(names) else folders, strict=True))


def _at_once(folders: Collection[_Values]) -> bool:
    """Whether several folders hold values that were not written one folder after the other."""
    spans = sorted((min(at for at, _ in each.values()), max(at for at, _ in each.values())) for each in folders)
    return any(start <= end for (_, end), (start, _) in itertools.pairwise(spans))


def _scalars(path: Path) -> Iterator[tuple[float, int, str | None, float]]:
    """(wall time, step, tag, value) of every scalar of a file, whichever way it was written.

    Without a tag: where a run that was taken up again says from which step on it logs anew.
    """
    require("a TensorBoard event file", "tensorboard")
    from google.protobuf.message import DecodeError
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
    from tensorboard.compat.proto.event_pb2 import SessionLog
    from tensorboard.util.tensor_util import make_ndarray

    scalars: set[str] = set()
    try:
        for event in EventFileLoader(str(path)).Load():
            if event.HasField("session_log") and event.session_log.status == SessionLog.START:
                yield event.wall_time, event.step, None, 0.0
            for value in event.summary.value:
                # TensorBoard turns old simple_value into tensors; only a tag's first value must name its plugin
                if value.metadata.plugin_data.plugin_name == "scalars":
                    scalars.add(value.tag)
                if value.tag in scalars and value.HasField("tensor"):
                    yield event.wall_time, event.step, value.tag, float(make_ndarray(value.tensor).item())
    except (DecodeError, ValueError, TypeError) as error:
        raise ReproError(f"{path} is a damaged event file ({error}): leave it out or write it again") from None


@dataclass(frozen=True)
class EventsComparison:
    """How metrics compare with a baseline from event files. All values are float32, in fp64.

    Attributes:
        metrics: (the baseline's name, our name) of every metric that both have.
        changes: Every value that both have: step and metric as the baseline has them, its value, ours.
        differing: Those that differ: in any bit, or by more than the metric's bound; also where one side alone is not
            finite.
        nonfinite: Those that are not finite on both sides: two runs that broke down alike agree on nothing.
        last: The last step at which each side has one of these metrics, as the baseline counts; None where one side is
            a part of a run.
        ended: Which side ended before the other, in words; empty where none did.
        apart: By metric that both have, at how many steps the baseline alone and we alone have it, where that is any:
            those were not compared.
        alone: The metrics that the baseline alone has, and those that we alone have.
    """

    metrics: Sequence[tuple[str, str]]
    changes: Sequence[MetricChange]
    differing: Sequence[MetricChange]
    nonfinite: Sequence[MetricChange]
    last: tuple[int, int] | None = None
    ended: str = ""
    apart: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    alone: tuple[Sequence[str], Sequence[str]] = ((), ())

    @property
    def values(self) -> int:
        """How many values were compared."""
        return len(self.changes)

    @property
    def agrees(self) -> bool:
        """Whether something was compared, all of it finite, nothing differs, and neither side ended early."""
        return bool(self.changes) and not self.differing and not self.nonfinite and not self.ended

    def to_mapping(self) -> dict[str, Any]:
        """JSON types; floats that are not finite as the hex of their bits."""
        facts = {"equal": self.agrees, "metrics": dict(self.metrics), "values": self.values, "last_steps": self.last}
        return mapping_of(self, "changes", "last", **facts)


def matched(baseline: Sequence[str], ours: Sequence[str]) -> list[tuple[str, str]]:
    """Which names mean the same metric: equal ones, then equal last parts that no other name of either side has.

    ``train/loss`` is ``loss``, unless there is an ``eval/loss`` too.
    """
    pairs = {name: name for name in baseline if name in set(ours)}
    count_a, count_b = (Counter(_last_part(n) for n in set(names)) for names in (baseline, ours))
    by_part = {_last_part(name): name for name in ours}
    for name in baseline:
        part = _last_part(name)
        if count_a[part] == count_b[part] == 1:
            pairs.setdefault(name, by_part[part])
    return [(name, pairs[name]) for name in dict.fromkeys(baseline) if name in pairs]


def _last_part(name: str) -> str:
    return name.rpartition("/")[2]


def differences(
    baseline: Mapping[int, Mapping[str, float]],
    metrics: Mapping[int, Mapping[str, float]],
    bounds: Mapping[str, Bound],
    offset: int = 0,
    *,
    prefix: bool = False,
) -> EventsComparison:
    """Compare metrics with a baseline, step by step, in float32.

    Args:
        baseline: By step, values by name, as from `read_events`.
        metrics: Ours, likewise, in fp64.
        bounds: How far a metric may be from the baseline's, by either side's name; without one, bits count.
        offset: The baseline's number of our step 0.
        prefix: One of both was asked for fewer steps than the other: that it is shorter is no difference.
    """
    names = _names(baseline), _names(metrics)
    pairs = matched(*names)
    outcomes = list(_changes(baseline, dict(sorted(metrics.items())), pairs, bounds, offset))
    changes = [change for change, _ in outcomes]
    differing, nonfinite = ([c for c, how in outcomes if how == which] for which in ("differs", "not finite"))
    seen = {change.metric for change in changes}
    used = [p for p in pairs if p[0] in seen]
    last, ended = None, ""
    if used and not prefix:
        logged, ended = _both(baseline, metrics, used, offset)
        last = logged[0][-1], logged[1][-1]
    apart: dict[str, tuple[int, int]] = {}
    for pair in pairs:  # one metric may end while the others go on
        each, early = _both(baseline, metrics, [pair], offset)
        if last and pair in used:
            ended = ended or (f"{pair[0]}: {early}" if early else "")
        counts = len(set(each[0]) - set(each[1])), len(set(each[1]) - set(each[0]))
        apart |= {pair[0]: counts} if any(counts) else {}
    known = [{pair[side] for pair in pairs} for side in (0, 1)]
    a, b = (sorted(set(of) - common) for of, common in zip(names, known, strict=True))
    return EventsComparison(used, changes, differing, nonfinite, last, ended, apart, (a, b))


_TELLING = 3
_SCHEDULE = re.compile(r"(?:^|[/_.])(?:lr|learning_rate|epoch|step|global_step)$")


def agreeing_offset(
    baseline: Mapping[int, Mapping[str, float]],
    metrics: Mapping[int, Mapping[str, float]],
    bounds: Mapping[str, Bound],
    offset: int = 0,
) -> int | None:
    """The other offset at which all values agree, and no fewer than are compared at this one.

    Args:
        baseline: As in `differences`.
        metrics: Likewise.
        bounds: Likewise.
        offset: At which they do not.

    Returns:
        None where there is none, or more than one: where values hardly move, that they agree says nothing. So where
        fewer than `_TELLING` different values agree, or a schedule's alone, which a change may have moved by one.
    """
    pairs = matched(_names(baseline), _names(metrics))
    ours = dict(sorted(metrics.items()))
    least = max(1, sum(1 for _ in _changes(baseline, ours, pairs, bounds, offset)))
    logged = [_logged(side, {pair[k] for pair in pairs}) for k, side in enumerate((baseline, metrics))]

    def agrees(other: int) -> bool:
        values, different = 0, set[tuple[str, float | None]]()
        for change, how in _changes(baseline, ours, pairs, bounds, other):
            if how != "agrees":
                return False
            values += 1
            if not _SCHEDULE.search(change.metric):
                different.add((change.metric, change.a))
        return values >= least and len(different) >= _TELLING

    others = {theirs - step for theirs in logged[0] for step in logged[1]} - {offset}
    offsets = list(itertools.islice(filter(agrees, others), 2))
    return offsets[0] if len(offsets) == 1 else None


def _changes(
    baseline: Mapping[int, Mapping[str, float]],
    metrics: Mapping[int, Mapping[str, float]],
    pairs: Sequence[tuple[str, str]],
    bounds: Mapping[str, Bound],
    offset: int,
) -> Iterator[tuple[MetricChange, Literal["agrees", "differs", "not finite"]]]:
    """Every value that both have, in the order of our steps, and how it compares."""
    for step, ours in metrics.items():
        theirs = baseline.get(step + offset, {})
        for name, other in pairs:
            if name not in theirs or other not in ours:
                continue
            change = MetricChange(step + offset, name, _single(theirs[name]), _single(ours[other]))
            if not _finite(change.a) and not _finite(change.b):
                yield change, "not finite"
            else:
                within = _within(change, bounds.get(name) or bounds.get(other))
                yield change, "agrees" if within else "differs"


def _both(
    baseline: Mapping[int, Mapping[str, float]],
    metrics: Mapping[int, Mapping[str, float]],
    pairs: Sequence[tuple[str, str]],
    offset: int,
) -> tuple[tuple[list[int], list[int]], str]:
    """The steps at which each side has one of some metrics, as the baseline counts, and which ended early, in words."""
    ours = [step + offset for step in _logged(metrics, {b for _, b in pairs})]
    logged = _logged(baseline, {a for a, _ in pairs}), ours
    return logged, _ended(*logged)


def _logged(steps: Mapping[int, Mapping[str, float]], names: Set[str]) -> list[int]:
    """The steps that have one of some metrics."""
    return sorted(step for step, values in steps.items() if names & values.keys())


def _ended(a: Sequence[int], b: Sequence[int]) -> str:
    """Which of a baseline and a run ended before the other, by the steps that each has."""
    short, long = (b, a) if b[-1] < a[-1] else (a, b)
    # who logs every tenth step is behind who logs each of them, and has not ended before the next one is due
    due = short[-1] + min((after - before for before, after in itertools.pairwise(short)), default=1)
    if long[-1] < due:
        return ""
    who, other = ("the run", "the baseline") if short is b else ("the baseline", "the run")
    return f"{who} ended after step {short[-1]}, {other} after step {long[-1]}"


def _names(steps: Mapping[int, Mapping[str, float]]) -> list[str]:
    return list(dict.fromkeys(name for values in steps.values() for name in values))


def _single(value: float) -> float:
    """Rounded to the nearest float32, as whoever writes an event file does."""
    with np.errstate(over="ignore"):  # beyond float32 lies infinity, in the file as well
        return float(np.float32(value))


def _finite(value: float | None) -> bool:
    return value is not None and math.isfinite(value)


def _within(change: MetricChange, bound: Bound | None) -> bool:
    if change.same:
        return True
    if bound is None or change.a is None or change.b is None or not (_finite(change.a) and _finite(change.b)):
        return False
    return abs(change.b - change.a) <= bound.atol + bound.rtol * abs(change.a)
