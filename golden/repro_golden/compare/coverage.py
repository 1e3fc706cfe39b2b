"""What a run was looked at by, in numbers: a verdict says no more than what was compared."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from repro_golden.base.canonical import mapping_of
from repro_golden.base.printed.machine_numbers import words_of
from repro_golden.compare.name_matching import content
from repro_golden.compare.told_metrics import BOTH, COUNTED, COUNTED_ONCE, Moved
from repro_golden.trace import Row, Trace
from repro_golden.trace.columns_written import COLUMN, column_named, column_of
from repro_golden.trace.families import UNREAD, family, file_of, group, plain, setting_of
from repro_golden.trace.model import DIGEST, METRIC

__all__ = ["RATES", "Coverage", "coverage_of", "earlier_of", "kind_of", "only_bounds", "read_of", "telling_rows"]

_SHOWN = 4
"""Objects of a kind that a sentence names, beside those that it never leaves out."""
_WEIGHTS = "the weights at the end"
_STEPS, _ROWS, _UNCOMMON = 16, 10_000, 8
"""Steps and rows of a trace's beginning that are looked at, and steps of other lengths."""
_NOTHING = "nothing"
_TEXT = "numbers in lines of text differ"
RATES = re.compile(r"(?:optimizer\.\d+/)?lr(?:/\d+)?(?:@\d+)?")
"""Metrics that the recorder reads of optimizers, in every program."""


@dataclass(frozen=True)
class Coverage:
    """How many signals of each kind a run shows, counted once however many steps it has.

    Attributes:
        parameters: Tensors that an optimizer updates.
        gradients: Of these.
        state: Tensors and kinds of numbers of optimizers' states.
        buffers: Buffers of modules that are trained.
        frozen: Their parameters that no optimizer holds.
        resting: Tensors of optimizers that made steps before.
        columns: Tensors of the input, the forward pass and the loss.
        metrics: Numbers.
        generators: Random number generators.
        modules: By name, tensors of modules that no optimizer steps; likewise copies of parameters and lone leaves.
        files: Names of files that were saved.
        end: Whether the state that the program ended with is there too, but for what `unread` names of it.
        unread: By name, why something was seen and not read.
        alone: Objects that only one side of a comparison has, which were not compared.
        columns_alone: Likewise columns that a trainer writes of its own accord (`columns_written`).
        unsure: Metrics that both tell and one recorder put to another step, or under another name: not compared.
        settings: Settings of optimizers in files that differ, and count by what they do.
        counters: Metrics by which both count their steps, from different numbers on: not compared.
        counters_gone: Those by which the baseline alone does.
        shown: Metrics that were read from free text, which are not compared by bits.
        moved: Of these, in two that agree, those that differ by more than the digits that are shown.
        left_out: Metrics that nobody compares, since by their names or values they are the clock's or the machine's.
        earlier: Files that were read and last changed while other code ran, by path, with whose that was.
        logged: Whether there is any metric beside the optimizers' own learning rates.
        judged: What was judged, in words, where that is less than the bits of all these.
    """

    parameters: int = 0
    gradients: int = 0
    state: int = 0
    buffers: int = 0
    frozen: int = 0
    resting: int = 0
    columns: int = 0
    metrics: int = 0
    generators: int = 0
    modules: Mapping[str, int] = field(default_factory=dict)
    files: Sequence[str] = ()
    end: bool = False
    unread: Mapping[str, str] = field(default_factory=dict)
    alone: Sequence[str] = ()
    columns_alone: Sequence[str] = ()
    unsure: Sequence[str] = ()
    settings: Sequence[str] = ()
    counters: Sequence[str] = ()
    counters_gone: Sequence[str] = ()
    shown: Sequence[str] = ()
    moved: Sequence[Moved] = ()
    left_out: Sequence[str] = ()
    earlier: Mapping[str, str] = field(default_factory=dict)
    logged: bool = True
    judged: str = ""

    @property
    def but(self) -> str:
        """What goes behind the words of an agreement that does not hold for all that was seen; '' where it does."""
        reasons = list(filter(None, [_TEXT * bool(self.moved), read_of(self.earlier)]))
        return f", but {' and '.join(reasons)}" if reasons else ""

    @property
    def nothing(self) -> bool:
        """Whether nothing at all was looked at: who says that it agrees says nothing."""
        return not self.judged and not self.modules and self.counted == _NOTHING

    def to_mapping(self) -> dict[str, Any]:
        """JSON types, with the sentence as ``text``."""
        return mapping_of(self, moved=[number._asdict() for number in self.moved], text=str(self))

    @property
    def counted(self) -> str:
        """``40 parameters, 12 buffers, optimizer state, 3 metrics``."""
        counted = [
            _count(self.parameters, "parameter"),
            _count(self.gradients, "gradient"),
            _count(self.buffers, "buffer"),
            _count(self.frozen, "frozen parameter"),
            f"{_count(self.resting, 'tensor')} of optimizers that rest" if self.resting else "",
            "optimizer state" if self.state else "",
            _count(self.columns, "column"),
            _count(self.metrics, "metric" if self.logged else "learning rate"),
            _count(self.generators, "random generator"),
            _count(len(self.files), "file"),
            "the state at the end" + " without its weights" * (_WEIGHTS in self.unread) if self.end else "",
        ]
        return ", ".join(text for text in counted if text) or _NOTHING

    def __str__(self) -> str:
        """What was `counted` or judged; ``never stepped, and compared: ema (6 tensors)``; what was not looked at."""
        parts = [self.judged or self.counted]
        if self.modules:
            names = [f"{name} ({_count(size, 'tensor')})" for name, size in sorted(self.modules.items())]
            parts.append(f"never stepped, and compared: {_listed(names)}")
        if self.alone:
            parts.append(f"on one side only, and not compared: {_listed(self.alone)}")
        if number := len(self.columns_alone):
            verb = "is" if number == 1 else "are"
            parts.append(f"{_count(number, 'column')} {verb} written by one side only: {_listed(self.columns_alone)}")
        if self.unsure:
            parts.append(f"put to another step by an earlier recorder, and not compared: {_listed(self.unsure)}")
        if self.settings:
            parts.append(f"settings in files that differ, and not compared: {_each_once(self.settings)}")
        if self.counters:
            parts.append(f"counts steps from another number on: {_listed(self.counters)}")
        if self.counters_gone:
            parts.append(f"counts steps in the baseline alone: {_listed(self.counters_gone)}")
        if self.moved:
            judged = f"`repro bisect --when metric:{self.moved[0].metric!r}`, or a bound in [compare], judges the first"
            parts.append(f"{_TEXT}: {_listed(map(str, self.moved))}; {judged}")
        if self.earlier:
            files = [f"{file} ({whose})" for file, whose in self.earlier.items()]
            parts.append(
                f"read, and last changed while other code ran: {_listed(files)}; give each run its own by {{out}}, or "
                "`touch` what is the same for all (a search then takes --fresh)"
            )
        if self.shown:
            parts.append(f"read from lines of text, and not compared by bits: {_listed(self.shown)}")
        if self.left_out:
            parts.append(f"left out as the clock's or the machine's: {_listed(sorted(self.left_out, key=_doubted))}")
        if self.unread:
            names = sorted(self.unread, key=lambda name: (name not in _whole(self.unread), _file(name), name))
            reasons = [f"{name} ({self.unread[name]})" for name in names]
            parts.append(f"seen but not looked at: {_listed(reasons, len(_whole(self.unread)))}")
        return "; ".join(parts)


def coverage_of(
    trace: Trace, alone: Mapping[str, str] | None = None, *, hashes: bool = True, moved: Sequence[Moved] = ()
) -> Coverage:
    """What a trace shows, from the rows of the steps that tell (`telling_rows`).

    Args:
        trace: One that was compared.
        alone: Objects (`families.group`) that only one side of the comparison has, and which: ``a`` or ``b``; metrics
            and settings that differ and are not compared: ``ab``; that count their steps: ``counted``,
            and in the baseline alone ``counted once``.
        hashes: Whether what a trace keeps no numbers of counts, such as generators.
        moved: Numbers in lines of text that differ (`told_metrics.moved_text`), where all that was compared agrees.

    Raises:
        ReproError: see `telling_rows`.
    """
    alone = alone or {}
    objects = _sides(alone)
    columns = sorted(name.removeprefix(COLUMN) for name in alone if name.startswith(COLUMN))
    unsure, counters, counters_gone = (
        [name for name in columns if alone[f"{COLUMN}{name}"] == side] for side in (BOTH, COUNTED, COUNTED_ONCE)
    )
    columns_alone = [name for name in columns if name not in (*unsure, *counters, *counters_gone)]
    settings = sorted({setting for name in alone if (setting := setting_of("update", name))})
    metrics = {name for step in trace.steps for name in step.compared if column_named(name) not in alone}
    shown = sorted({name for step in trace.steps for name in step.shown} - metrics)
    logged = any(not RATES.fullmatch(name) for name in (*metrics, *shown))
    end, left_out = (trace.end or {}).get("unread", {}), (trace.end or {}).get("machine", ())
    earlier = earlier_of(trace)
    steps = telling_rows(trace)
    kinds: Counter[str] = Counter()
    files = set[str]()
    modules: Counter[str] = Counter()
    every = (row for rows in steps for row in rows)
    again = _again(steps)
    for phase, name, kind, column in sorted(
        {(row.phase, row.name, kind_of(row), column_of(row) or "") for row in every if hashes or row.dtype != DIGEST}
    ):
        if (phase, name) in again:
            continue
        if {group(phase, name) or family(phase, name), file_of(phase, name), column, name} & alone.keys():
            continue
        kinds[kind] += plain(name) != UNREAD
        if kind == "rate":
            metrics.add(name)
        if kind == "saved":
            files.add(plain(name).split("/")[1])
        elif kind in ("module", "copy", "leaf"):
            modules[(group(phase, name) or name).partition("/")[2]] += 1
    return Coverage(
        parameters=kinds["parameter"],
        gradients=kinds["gradient"],
        state=kinds["state"] + kinds["number"] + kinds["own"] + kinds["scaler"],
        buffers=kinds["buffer"],
        frozen=kinds["frozen"],
        resting=kinds["resting"],
        columns=kinds["column"],
        metrics=len(metrics),
        generators=kinds["rng"],
        modules=dict(modules),
        files=sorted(files),
        end=bool(kinds["end"]),
        unread=end,
        alone=objects,
        columns_alone=columns_alone,
        unsure=unsure,
        settings=settings,
        counters=counters,
        counters_gone=counters_gone,
        shown=shown,
        moved=moved,
        left_out=left_out,
        earlier=earlier,
        logged=logged,
    )


def read_of(earlier: Mapping[str, str]) -> str:
    """`Coverage.earlier` in words; '' for none."""
    first = next(iter(earlier), "")
    if len(earlier) > 1:
        return f"{len(earlier)} files that it reads, such as {first}, were last changed while other code ran"
    return f"{first}, which it reads, was last changed while {earlier[first]} ran" if first else ""


def earlier_of(*traces: Trace) -> dict[str, str]:
    """What runs read that was last changed while other code ran, by path, with whose that was."""
    return {file: whose for trace in traces for file, whose in (trace.end or {}).get("earlier", {}).items()}


def _again(steps: Sequence[Sequence[Row]]) -> set[tuple[str, str]]:
    """Phase and name of what two optimizers show that step in one call: a wrapper's are those of what it wraps."""
    again, other = set[tuple[str, str]](), set[tuple[str, str]]()
    for rows in steps:
        shown = {row.key: content(row) for row in rows if row.phase in ("grad", "update")}
        for row in rows:
            bare = replace(row, name=plain(row.name)) if row.key in shown else row
            if bare.name != row.name and kind_of(row) in ("gradient", "parameter"):
                (again if shown.get(bare.key) == content(row) else other).add((row.phase, row.name))
    return again - other


def telling_rows(trace: Trace) -> list[list[Row]]:
    """The rows of the steps that tell what a trace shows: the first and last ones, and those of uncommon lengths.

    Optimizers may step in turn, and a file is saved now and then: a step with another number of signals has others.

    Raises:
        ReproError: the rows are missing or damaged.
    """
    counts = [step.signals for step in trace.steps]
    few, rows = 0, 0
    while few < min(len(counts), _STEPS) and rows < _ROWS:
        rows += counts[few]
        few += 1
    uncommon = {count: index for index, count in reversed([*enumerate(counts)])}
    telling = {*range(few), *[*uncommon.values()][:_UNCOMMON], *([len(counts) - 1] if counts else [])}
    return [trace.rows(index) for index in sorted(telling)]


def only_bounds(names: Iterable[str]) -> Coverage:
    """What is judged where metrics of these names have bounds, and nothing else counts."""
    every = sorted(names)
    whose = "its bound" if len(every) == 1 else "their bounds"
    return Coverage(
        metrics=len(every),
        judged=f"{_count(len(every), 'metric')} by {whose} ({_listed(every)}); bits were not judged",
    )


def _sides(alone: Mapping[str, str]) -> list[str]:
    """Those objects in words; the state at the end as one, whatever is in it."""
    owners = {"a": "the baseline's", "b": "the run's"}
    out = []
    for name, side in sorted(alone.items()):
        kind, _, rest = plain(name).partition("/")
        if name.startswith(COLUMN) or side == BOTH:
            continue
        if kind != "end":
            out.append(f"{rest or f'all of {kind}'} ({owners[side]})")
        elif not rest:
            out.append(f"the state at the end ({owners[side]})")
    return out


def kind_of(row: Row) -> str:
    """What a signal is of: a parameter, gradient, metric, column, or one of `FAMILIES`."""
    if row.dtype == METRIC:
        return "metric"
    if row.phase in ("input", "forward", "loss"):
        return "start" if row.name.startswith("start/") else "column"
    if row.phase == "grad":
        return "gradient"
    if RATES.fullmatch(row.name) and row.shape in ((), (1,)):  # a learning rate that is a tensor
        return "rate"
    if plain(row.name).startswith("model_hash/"):  # a trainer's own hash of a layer's weights
        return "parameter"
    return family(row.phase, row.name) or ("state" if "/" in plain(row.name) else "parameter")


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'s' if number != 1 else ''}" if number else ""


def _each_once(settings: Sequence[str]) -> str:
    """The first setting of each name, whichever optimizer has it, so that none hides behind others of another name."""
    first = {setting.rpartition(".")[2]: setting for setting in reversed(settings)}
    more = len(settings) - len(first)
    return ", ".join(sorted(first.values())) + (f" and {more} more" if more else "")


def _listed(names: Iterable[str], beside: int = 0) -> str:
    every, most = list(names), beside + _SHOWN
    more = f" and {len(every) - most} more" if len(every) > most else ""
    return ", ".join(every[:most]) + more


def _file(name: str) -> bool:
    return name.startswith(("file ", "saved/"))


def _whole(unread: Iterable[str]) -> list[str]:
    """What stands for more than one tensor or file, such as the weights at the end: there are few, and all are named.

    A tensor's name has a slash.
    """
    return [name for name in unread if "/" not in name and not _file(name)]


def _doubted(metric: str) -> tuple[bool, str]:
    """Sorts first what may be the training's own, by a word of its name."""
    return not {"loss", "losses", "reward", "rewards", "kl", "acc", "accuracy"}.intersection(words_of(metric)), metric
