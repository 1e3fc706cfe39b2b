"""Where two versions of one step differ, and what only one of them could have shown."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from repro_golden.compare.groups import Difference, other_settings, regrouped_alike
from repro_golden.compare.name_matching import content
from repro_golden.compare.norms import own_norms
from repro_golden.compare.told_metrics import BOTH, COUNTED, COUNTED_ONCE, ToldMetrics, once_more
from repro_golden.trace import Trace
from repro_golden.trace.columns_written import COLUMN, column_of, columns_of, machine_numbers
from repro_golden.trace.families import (
    BESIDE,
    SINCE,
    VALUES_SINCE,
    family,
    file_of,
    group,
    optimizers,
    plain,
    setting_of,
    value_of,
)
from repro_golden.trace.model import METRIC, PHASES, Row

__all__ = [
    "ALIKE",
    "Difference",
    "Unlike",
    "alone",
    "as_both_made",
    "differing",
    "first_of_round",
    "in_order",
    "one_sided",
    "round_at",
    "round_of",
    "unlike",
]


@dataclass(frozen=True)
class Unlike:
    """What two traces could not have shown alike, whatever was computed.

    Attributes:
        blind: Which were made by a recorder that looks at no family (`families`): some of ``ab``.
        columns: Columns that a trainer writes of its own accord (`columns_written`) and that one side has in no step,
            with the side that has them.
        told: Which metrics they tell; None where one more, or in another step, is a difference.
        index: Of the step that is compared; None where no later one tells anything.
        earlier: Whether only one was made by a recorder that did not keep each number of a name, nor know of a scaler
            whose `step` is not called.
        values: Whether only one was made by a recorder that has the numbers and texts of a file by their keys.
        shown: Whether the baseline shows a signal in any step.
    """

    blind: str = ""
    earlier: bool = False
    columns: Mapping[str, str] = field(default_factory=dict)
    told: ToldMetrics | None = None
    values: bool = False
    shown: Callable[[str, str], bool] = lambda *_: True
    index: int | None = None

    def at(self, index: int) -> Unlike:
        """The same, of a step."""
        return replace(self, index=index)


Key = tuple[int, str]
ALIKE = Unlike()
_EACH_SINCE = 5


def round_of(trace: Trace, index: int) -> tuple[int, int]:
    """The first and the last of the steps that several optimizers made in turn, with the one at an index among them.

    They stand in the order of the optimizers' names, whatever that of the program was: which operations are whose, only
    all together tell. In a program of one optimizer each step is a round.
    """
    first = last = index
    made = optimizers(trace.rows(index))
    if not made:  # nothing of an optimizer is told
        return index, index
    while first > 0 and not _closes(trace.rows(first - 1)) and not made & (more := optimizers(trace.rows(first - 1))):
        first, made = first - 1, made | more
    while last + 1 < len(trace.steps) and not _closes(trace.rows(last)):
        last += 1
        if made & (more := optimizers(trace.rows(last))):
            return first, last - 1
        made |= more
    return first, last


def round_at(trace: Trace, step: int) -> tuple[int, int]:
    """The numbers of the first and the last step of the round that a step of a trace belongs to."""
    index = next(i for i, record in enumerate(trace.steps) if record.step == step)
    first, last = round_of(trace, index)
    return step - index + first, step - index + last


def as_both_made(a: Trace, b: Trace, index: int) -> list[int]:
    """The steps of an index's round that both have, from it on, in the order in which both programs made them.

    That of the index alone, where their orders differ.
    """
    count = min(len(a.steps), len(b.steps))
    made = [[k for k in trace.as_made(index) if index <= k < count] for trace in (a, b)]
    return made[0] if made[0] == made[1] else [index]


def in_order(a: Trace, b: Trace, count: int) -> Iterator[int]:
    """The first steps of two traces by index, those of each round in the order in which both programs made them."""
    index = 0
    while index < count:
        made = as_both_made(a, b, index)
        yield from (k for k in made if k < count)
        index = max(made) + 1


def _closes(rows: Sequence[Row]) -> bool:
    """Whether a step is the last of its round: what lives beside the optimizers stands there."""
    return any(family(row.phase, row.name) in BESIDE for row in rows)


def unlike(a: Trace, b: Trace) -> Unlike:
    """What only one of two traces could have shown, over the steps that both have."""
    blind = "".join(side for side, trace in (("a", a), ("b", b)) if trace.header.recorder < SINCE)
    count = min(len(a.steps), len(b.steps))
    columns = columns_of(a, count), columns_of(b, count)
    if columns[0] is not None and columns[1] is not None:
        names_a, names_b = columns[0], columns[1]
    else:  # a port that an earlier recorder took for a metric
        names_a, names_b = machine_numbers(a), machine_numbers(b)
    earlier = (a.header.recorder < _EACH_SINCE) != (b.header.recorder < _EACH_SINCE)
    one_sided = dict.fromkeys(names_a - names_b, "a") | dict.fromkeys(names_b - names_a, "b")
    values = (a.header.recorder < VALUES_SINCE) != (b.header.recorder < VALUES_SINCE)
    return Unlike(blind, earlier, one_sided, ToldMetrics(a, b), values, a.shows)


def differing(
    rows_a: Sequence[Row], rows_b: Sequence[Row], unlike: Unlike = ALIKE
) -> list[tuple[Difference, Row, Row | None]]:
    """Every signal in which two versions of a step differ: phase by phase, in the baseline's order, added ones last.

    What belongs to an object that only one side has is none, nor is a metric that the baseline never tells or that
    is compared in other steps, nor a file of a side's end (`alone`). A parameter is the same whoever holds it
    (`_held_otherwise`), whatever group it is in (`regrouped_alike`), a norm whoever tells it (`own_norms`). Settings of
    optimizers in files count by what they do.

    Args:
        rows_a: The baseline's.
        rows_b: The other version's.
        unlike: What only one of them could have shown.
    """
    rows_a, rows_b = ([row for row in rows if not setting_of(row.phase, row.name)] for rows in (rows_a, rows_b))
    norms = own_norms(rows_a, rows_b, unlike.told, unlike.index)
    rows_b = norms.as_read(rows_b)
    skipped = one_sided(rows_a, rows_b, unlike)
    partners = _partners(rows_a, rows_b, skipped)
    held = _held_otherwise(rows_a, rows_b)
    by_key = {held.get(row.key) or _under(row, partners).key: row for row in rows_b}
    differences: list[tuple[Difference, Row, Row | None]] = []
    for row in rows_a:
        other = by_key.pop(row.key, None)
        if other is None:
            differences.append(("missing", row, None))
        elif row.dtype != other.dtype:
            differences.append(("dtype", row, other))
        elif row.shape != other.shape:
            differences.append(("shape", row, other))
        elif (row.lanes, row.placement) != (other.lanes, other.placement):
            differences.append(("value", row, other))
    differences += [("added", row, None) for row in by_key.values()]
    skipped = _without(skipped, partners, held)
    differences = [
        entry for entry in differences
        if entry[0] not in ("missing", "added") or not {_object(entry[1]), column_of(entry[1])} & skipped.keys()
    ]  # fmt: skip
    differences = [entry for entry in differences if file_of(entry[1].phase, entry[1].name) not in skipped]
    told_elsewhere = _told_otherwise(rows_a, rows_b, unlike)
    differences = [entry for entry in differences if entry[1].key not in told_elsewhere]
    opposite: dict[str, Sequence[Row]] = {"missing": rows_b, "added": rows_a}
    differences = [entry for entry in differences if not norms.told_too(entry[1], opposite.get(entry[0], ()))]
    values = _new_values(rows_a, rows_b, unlike)
    differences = [entry for entry in differences if not (entry[0] in ("missing", "added") and entry[1].name in values)]
    ended = _ended(rows_a) != _ended(rows_b)
    differences = [entry for entry in differences if not _unknowable(*entry[:2], unlike, ended=ended)]
    if held:
        # where an optimizer holds a parameter its first value is told too: what became of it is compared
        begun = {f"start/{name}" for pair in held.items() for _, name in pair}
        differences = [entry for entry in differences if entry[1].phase != "input" or entry[1].name not in begun]
    differences = regrouped_alike(differences, rows_a, rows_b)
    # sorted() is stable: within a phase the baseline's order stands, and added signals come last
    return sorted(differences, key=lambda f: PHASES.index(f[1].phase))


def first_of_round(a: Trace, b: Trace, index: int) -> tuple[int, list[tuple[Difference, Row, Row | None]]]:
    """The step in which the programs of two traces differed first, by index, and all its differences, the first first.

    A trace has the steps of a round by the names of their optimizers: the first of them that differs may be the last
    that was made. What lives beside the optimizers stands as it was after the last.

    Args:
        a: The baseline.
        b: The other.
        index: Of the first step that differs, in the traces' order.
    """
    only_one, made = unlike(a, b), as_both_made(a, b, index)
    differences = {k: differing(a.rows(k), b.rows(k), only_one.at(k)) for k in made}

    def late(difference: tuple[int, tuple[Difference, Row, Row | None]]) -> bool:
        step, (_, row, _) = difference
        return step != made[-1] and family(row.phase, row.name) in BESIDE

    # sorted() is stable
    every = sorted(((k, difference) for k in made for difference in differences[k]), key=late)
    if not every:
        return index, []
    step, first = every[0]
    return step, [first, *(difference for difference in differences[step] if difference is not first)]


def alone(rows_a: Sequence[Row], rows_b: Sequence[Row], unlike: Unlike = ALIKE) -> dict[str, str]:
    """What is `one_sided`, but for two objects of one build, one on either side: these are one under two names.

    And the metrics that the baseline tells in no step, or one side in more of them or more often: logging more moves no
    number; and such numbers and texts of a file. One that is gone is a difference, for what it was is no longer known.
    A number that stands in another step because of who recorded it is on both sides: ``ab``. So is a setting of an
    optimizer in a file, of another value or on one side alone. Nor are those that count the steps
    (`ToldMetrics.counts`), from another number on, or told no more. A norm that is read of one side's clipping and
    told by the other's program is the one's.
    """
    norms = own_norms(rows_a, rows_b, unlike.told, unlike.index)
    rows_b = norms.as_read(rows_b)
    objects = one_sided(rows_a, rows_b, unlike)
    objects = _without(objects, _partners(rows_a, rows_b, objects), _held_otherwise(rows_a, rows_b))
    known, others = ({row.key: content(row) for row in rows} for rows in (rows_a, rows_b))
    unsure = {
        row.key: f"{COLUMN}{row.name if '#' in row.name else unlike.told.metric(row.name)}"
        for row in (*rows_a, *rows_b)
        if unlike.told and known.get(row.key) != others.get(row.key) and _unsure(row, unlike)
    }
    otherwise = _told_otherwise(rows_a, rows_b, unlike)
    columns = {f"{COLUMN}{metric}": side for key, (metric, side) in otherwise.items() if key not in unsure}
    columns |= {f"{COLUMN}{norm} read of clipping": "a" if side == "b" else "b" for norm, side in norms.tellers.items()}
    settings = other_settings(rows_a, rows_b)
    return _new_values(rows_a, rows_b, unlike) | objects | columns | dict.fromkeys([*unsure.values(), *settings], BOTH)


def _unsure(row: Row, unlike: Unlike) -> bool:
    return row.dtype == METRIC and row.phase in _TOLD and unlike.told is not None and unlike.told.unsure(row.name)


def one_sided(rows_a: Sequence[Row], rows_b: Sequence[Row], unlike: Unlike = ALIKE) -> dict[str, str]:
    """Objects that one side has by name and the other has not, and which side: ``a`` or ``b``.

    A module that one commit makes and the other does not, or that is gone earlier, was not there to be compared. Beside
    a recorder that looks at no family, every object of one is.

    A file that one side no longer writes is a difference. But where only one side has ended by itself in this step,
    the other was stopped or goes on: what the first wrote after its last step the other could not have written yet.

    Args:
        rows_a: The baseline's.
        rows_b: The other version's.
        unlike: What only one of them could have shown.
    """
    objects = [{name for row in rows if (name := _object(row))} for rows in (rows_a, rows_b)]
    optional = [{name for row in rows if (name := group(row.phase, row.name))} for rows in (rows_a, rows_b)]
    out: dict[str, str] = {}
    for side, index, other in (("a", 0, 1), ("b", 1, 0)):
        names = (objects[index] if "ab"[other] in unlike.blind else optional[index]) - objects[other]
        out |= dict.fromkeys(names, side)
        columns = {name for row in (rows_a, rows_b)[index] if (name := column_of(row)) in unlike.columns}
        out |= {name: side for name in columns if name}
    return out | _afterwards(rows_a, rows_b)


def _partners(rows_a: Sequence[Row], rows_b: Sequence[Row], one_sided: Mapping[str, str]) -> dict[str, str]:
    """From an object of b to the one of a that has its place: the only two with such tensors, by name and shape.

    Were they left out as two that have nothing to do with each other, an object that is renamed and changed in one
    commit would pass. Buffers and numbers are so many alike that as many of a build as both sides have are taken for
    each other, in their order.
    """
    builds: dict[tuple[object, ...], dict[str, list[str]]] = {}
    for rows, side in ((rows_a, "a"), (rows_b, "b")):
        tensors: dict[str, Counter[tuple[str, str, tuple[int, ...]]]] = {}
        for row in rows:
            name = _object(row) or ""
            if one_sided.get(name) == side and _word(name) in (*_BUILT, *_MANY):
                tensors.setdefault(name, Counter())[row.name[len(name) :], row.dtype, row.shape] += 1
        for name, build in tensors.items():
            kind = name.partition(f"{_word(name)}/")[0], _word(name), frozenset(build.items())
            builds.setdefault(kind, {"a": [], "b": []})[side].append(name)
    pairs = dict[str, str]()
    for names in builds.values():
        if _word(names["a"][0] if names["a"] else "") in _MANY or len(names["a"]) == len(names["b"]) == 1:
            pairs |= dict(zip(names["b"], names["a"], strict=False))
    return pairs


_BUILT = ("module", "copy", "leaf")
"""Families of objects that are known by their tensors."""
_MANY = ("unsaved", "number")


def _word(name: str) -> str:
    """The family of an object, as its name has it."""
    return plain(name.removeprefix("end/")).partition("/")[0]


def _held_otherwise(rows_a: Sequence[Row], rows_b: Sequence[Row]) -> dict[Key, Key]:
    """From the key that b has of a tensor to that of a, where the optimizer of only one of them holds its module.

    What one gave to its optimizer and never trained is ``frozen/fc.bias`` or ``module/net/fc.bias`` in the other; its
    ``buffer/net/bn.mean`` is ``module/net/bn.mean`` where no parameter of the module is held.
    """
    keys = [{row.key for row in rows} for rows in (rows_a, rows_b)]
    if keys[0] == keys[1]:
        return {}
    known: tuple[dict[object, list[Key]], ...] = ({}, {}, {}, {})  # what a holds, what it holds not; then of b
    for index, rows in enumerate((rows_a, rows_b)):
        for row in rows:
            if row.phase != "update" or row.dtype == METRIC or row.key in keys[1 - index]:
                continue
            name = row.name.removeprefix("end/")
            for beside, path in _paths(name):
                look = name != row.name, path, row.dtype, row.shape
                known[2 * index + beside].setdefault(look, []).append(row.key)
    out = dict[Key, Key]()
    for of_a, of_b in ((known[0], known[3]), (known[1], known[2])):
        for known_by, ours in of_a.items():
            if len(ours) == len(theirs := of_b.get(known_by, [])) == 1:
                out[theirs[0]] = ours[0]
    return out


def _paths(name: str) -> Iterator[tuple[bool, tuple[bool, str]]]:
    """Whether a tensor is beside what optimizers hold, and how it is known on the other side: is it a buffer, its path.

    Of a module that no optimizer holds nothing tells which of its tensors are buffers.
    """
    of, rest = family("update", name), plain(name).partition("/")[2]
    if of in ("frozen", "module"):
        yield True, (False, name.rpartition("/")[2])
    if of == "module":
        yield True, (True, rest)
    elif of in ("buffer", "unsaved"):
        yield False, (True, rest)
    elif not of and not rest:
        yield False, (False, plain(name).partition("#")[0])


def _without(
    one_sided: Mapping[str, str], partners: Mapping[str, str], held: Mapping[Key, Key] = MappingProxyType({})
) -> dict[str, str]:
    paired = {*partners, *partners.values()}
    paired |= {group("update", name) or "" for pair in held.items() for _, name in pair}
    return {name: side for name, side in one_sided.items() if name not in paired}


def _under(row: Row, partners: Mapping[str, str]) -> Row:
    """A row under the name of its object's partner, if it has one."""
    name = _object(row) or ""
    return replace(row, name=row.name.replace(name, partners[name], 1)) if name in partners else row


def _unknowable(kind: Difference, row: Row, unlike: Unlike, *, ended: bool) -> bool:
    """Whether one of the two could not have shown a signal as the other does.

    Args:
        kind: How they differ.
        row: One of them.
        unlike: What only one of them could have shown.
        ended: Whether only one of them ended by itself in this step.
    """
    one_sided = kind in ("missing", "added")
    if row.dtype == METRIC and unlike.told and unlike.told.otherwise:
        metric = unlike.told.metric(row.name)
        if (one_sided and unlike.told.elsewhere(metric, unlike.index)) or _unsure(row, unlike):
            return True
    if row.dtype == METRIC and "#" in row.name:
        return unlike.earlier or (one_sided and ended and "#after" in row.name)
    return unlike.earlier and one_sided and family(row.phase, row.name) == "scaler"


def _ended(rows: Sequence[Row]) -> bool:
    return any(family(row.phase, row.name) == "end" for row in rows)


def _afterwards(rows_a: Sequence[Row], rows_b: Sequence[Row]) -> dict[str, str]:
    """Files of the only side that has ended which the other has not, or not yet with that content."""
    ended = [_ended(rows) for rows in (rows_a, rows_b)]
    if ended[0] == ended[1]:
        return {}
    side, ended_rows, other = ("a", rows_a, rows_b) if ended[0] else ("b", rows_b, rows_a)
    known = _files(other)
    return {name: side for name, content in _files(ended_rows).items() if known.get(name) != content}


def _files(rows: Sequence[Row]) -> dict[str, set[tuple[object, ...]]]:
    """The content of each file."""
    contents: dict[str, set[tuple[object, ...]]] = {}
    for row in rows:
        if name := file_of(row.phase, row.name):
            contents.setdefault(name, set()).add((row.key, row.fingerprint))
    return contents


_TOLD = ("loss", "grad")
"""Phases of numbers that a program tells, or has clipping tell."""


def _told_otherwise(rows_a: Sequence[Row], rows_b: Sequence[Row], unlike: Unlike) -> dict[Key, tuple[str, str]]:
    """Metrics that one side tells more often, by key: what that is, in words, and the side."""
    if unlike.told is None:
        return {}
    metrics: tuple[dict[str, list[Row]], dict[str, list[Row]]] = ({}, {})
    for rows, by_metric in zip((rows_a, rows_b), metrics, strict=True):
        for row in rows:
            if row.dtype == METRIC and row.phase in _TOLD:
                by_metric.setdefault(unlike.told.metric(row.name), []).append(row)
    out: dict[Key, tuple[str, str]] = {}
    for metric in metrics[0].keys() | metrics[1].keys():
        before, after = (by_metric.get(metric, []) for by_metric in metrics)
        if not before and unlike.told.new(metric):
            what = metric, "b"
        elif not after and unlike.told.counted_once(metric):
            what = metric, COUNTED_ONCE
        elif not (before and after) and (why := unlike.told.elsewhere(metric, unlike.index)):
            what = f"{metric}{why}", "a" if before else "b"
        elif before and once_more(*([(row.name, content(row)) for row in rows] for rows in (before, after))):
            what = f"{metric} once more", "b"
        elif {*map(content, before)} != {*map(content, after)} and unlike.told.counts(metric):
            what = metric, COUNTED
        else:
            continue
        out |= {row.key: what for row in (*before, *after) if column_of(row)}  # the recorder's own must be there
    return out


def _new_values(rows_a: Sequence[Row], rows_b: Sequence[Row], unlike: Unlike) -> dict[str, str]:
    """Numbers and texts of a file of both that one side alone has, and which side.

    Those that the baseline shows in no step; beside a recorder that has them otherwise, all of either side.
    """
    keys = [{row.key for row in rows} for rows in (rows_a, rows_b)]
    if keys[0] == keys[1]:
        return {}
    files = set[str | None].intersection(*({file_of(row.phase, row.name) for row in rows} for rows in (rows_a, rows_b)))
    out = dict[str, str]()
    for side, rows, known in (("a", rows_a, keys[1]), ("b", rows_b, keys[0])):
        for row in rows if unlike.values or side == "b" else ():
            if row.key in known or (file := file_of(row.phase, row.name)) is None or file not in files:
                continue
            of_a_key = value_of(row.phase, row.name) is not None
            if (unlike.values and (of_a_key or _is_kind(row))) or (of_a_key and not unlike.shown(row.phase, row.name)):
                out[row.name] = side
    return out


def _is_kind(row: Row) -> bool:
    """Whether a signal is all numbers of a kind, or all texts, of a file, as earlier recorders have them."""
    return _KIND.fullmatch(row.name) is not None and row.phase == "update"


_KIND = re.compile(r"saved/[^/]+/(?:part\.\d+/)?(?:integers|floats|texts|lengths|places)(?:#1)*(?:@\d+)?")


def _object(row: Row) -> str | None:
    """What a signal belongs to: one of the optional objects, or its whole family; None where it has none."""
    return group(row.phase, row.name) or family(row.phase, row.name)
