"""Which signals of two runs are the same under other names: matched by their bits, one to one, step by step.

What is matched are parts of names, such as the parameter in ``exp_avg/fc.weight``: a pair of parts must have equal bits
in every signal of theirs, in every phase and step. A part that both runs have stands for itself, unless all of its
signals of the first step, gradients and updates too, stand under another name on either side (`exchanged`): then two
parameters have only changed names. A place in a list (``param_groups.0.1``) is no name, and is matched as if it were
gone; so is the place of an optimizer's group (``lr/1``). Parts with equal bits, such as biases that begin with zeros,
stay together until a step tells them apart. Metrics are known by their values in all steps first (`retold`), for one
value may be that of many.
"""

from __future__ import annotations

import itertools
import re
import struct
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from repro_golden.fingerprint.definition import Lanes
from repro_golden.trace.families import of_group, value_of
from repro_golden.trace.model import METRIC, PHASES, Row

__all__ = [
    "Matching",
    "Part",
    "by_head",
    "by_metric",
    "by_optimizer",
    "by_place",
    "by_tail",
    "content",
    "exchanged",
    "inner",
    "of_groups",
    "positional",
    "regrouped",
    "retold",
    "rule_of",
]

_POSITIONAL = re.compile(r"param_groups\.\d+\.\d+")
_RATE = re.compile(r"lr(?:/\d+)?")
_OPTIMIZER = re.compile(r"((?:start/)?)(optimizer\.\d+/)?(.*)", re.DOTALL)
_OPTIMIZER_LABEL = re.compile(r"optimizer\.\d+/")
_PLACE = re.compile(
    r"(saved/[^/]+/(?:part\.\d+/)?(?:\w+(?:#1)*\[)?)((?:optimizer_states|lr_schedulers)\.\d+)([.\]].*)", re.DOTALL
)
"""Of Lightning's checkpoints, which have optimizers and their schedules in the order of a list."""
_ROUND = "round"
"""Label of metrics whose value says nothing of which they are."""
_PAIRS = 250_000
"""Most pairs of names whose likeness is looked at; beyond that the order in which they were observed decides."""


class Part(NamedTuple):
    """A name, cut: ``before + part + after``; `label` tells the signals of one part from each other."""

    before: str
    part: str
    after: str
    label: str


Split = Callable[[Row], Part | None]
"""How a row's name is cut; None for one that is not concerned."""
Content = tuple[str, tuple[int, ...], Lanes, str | None]
Shown = Counter[tuple[str, Content]]
Bits = frozenset[tuple[tuple[str, Content], int]]
Signals = dict[str, list[Shown]]
"""By part, in each phase, its signals: label and content."""


def content(row: Row) -> Content:
    """Equal for equal bits of one dtype, shape and placement."""
    return row.dtype, row.shape, row.lanes, row.placement


def by_tail(row: Row) -> Part:
    """What stands behind the last ``/``: the parameter, module or column. A metric's name is one part.

    Of the rate of an optimizer's group it is which that is.
    """
    if (of := of_group(row.phase, row.name)) is not None and of_groups(of[1]):
        before, rate, rank = of
        return Part(before, rate, rank, before + rank)
    head, tail = _cut(row)
    return Part(head, tail, "", head)


def by_head(row: Row) -> Part:
    """What stands before it: the kind of a parameter's state."""
    if row.dtype == METRIC:
        return Part("", row.name, "", "")
    head, tail = _cut(row)
    return Part("", head, tail, tail)


def _cut(row: Row) -> tuple[str, str]:
    """A name up to its last slash and behind it; keys of numbers in a file may have some."""
    if row.dtype == METRIC:
        return "", row.name
    if of := value_of(row.phase, row.name):
        return of
    head, slash, tail = row.name.rpartition("/")
    return head + slash, tail


def by_metric(row: Row) -> Part | None:
    """A metric that has a name of its own."""
    return Part("", row.name, "", "") if row.dtype == METRIC and _is_named(row.name) else None


def by_optimizer(row: Row) -> Part | None:
    """``optimizer.K/``, and nothing for the first: the number of an optimizer among several."""
    match = _OPTIMIZER.fullmatch(row.name)
    assert match is not None, "the pattern fits every text"
    start, optimizer, rest = match[1], match[2] or "", match[3]
    if not optimizer and not start and not _of_an_optimizer(row):
        return None
    label = rest if row.dtype == METRIC else rest.rpartition("/")[0]
    return Part("", start + optimizer, rest, label)


def by_place(row: Row) -> Part | None:
    """The place of an optimizer, or of a schedule, in a checkpoint's list of them."""
    match = _PLACE.fullmatch(row.name) if row.phase == "update" and row.name.startswith("saved/") else None
    return match and Part(match[1], match[2], match[3], match[1] + match[3])


def _of_an_optimizer(row: Row) -> bool:
    if row.phase == "update":
        return row.name != "skipped"
    return row.phase == "grad" and row.dtype != METRIC and ".output" not in row.name


def positional(part: str) -> bool:
    """Whether a part is a place in a list and no name."""
    return _POSITIONAL.match(part) is not None


def of_groups(part: str) -> bool:
    """Whether a part is the rate of an optimizer's group, whose place is no name either, in no step."""
    return _RATE.fullmatch(part) is not None


def regrouped(rows_a: Iterable[Row], rows_b: Iterable[Row]) -> bool:
    """Whether optimizers have the same rates on both sides of a step, and not for the same groups."""
    counts = []
    for rows in (rows_a, rows_b):
        numbers = [(of, content(row)) for row in rows if (of := of_group(row.phase, row.name))]
        rates = [(before, name, rank, bits) for (before, name, rank), bits in numbers if of_groups(name)]
        counts.append((Counter(rates), Counter((before, rank, bits) for before, _, rank, bits in rates)))
    return counts[0][0] != counts[1][0] and counts[0][1] == counts[1][1]


def exchanged(rows_a: Iterable[Row], rows_b: Iterable[Row]) -> set[str]:
    """Parts that both sides of a step have, whose signals are on either side all those of another part.

    Weights that were swapped and are used as before get other gradients, so they are not among them. What has no
    gradient of its own (a buffer, a saved copy) may have changed places by mistake: it is among them only where
    parameters of its module are.
    """
    a, b = (_by_tail(rows) for rows in (rows_a, rows_b))
    moved = {part for part in a.keys() & b.keys() if a[part] != b[part]}
    now: dict[object, list[str]] = {}
    for part in moved:
        now.setdefault(b[part], []).append(part)
    before = {a[part] for part in moved}
    pairs = {(part, other) for part in moved if b[part] in before for other in now.get(a[part], ())}
    rules = {rule_of(*pair) for pair in pairs if _trained(a[pair[0]])}
    return {part for part, other in pairs if _follows(rule_of(part, other), rules, saved=_saved(a[part]))}


def _trained(signals: frozenset[tuple[str, str, Content]]) -> bool:
    """Whether a part has a gradient and is updated."""
    phases = {phase for phase, label, _ in signals if not _OPTIMIZER_LABEL.sub("", label)}
    return {"grad", "update"} <= phases


def _saved(signals: frozenset[tuple[str, str, Content]]) -> bool:
    """Whether a part is of files alone, where modules may have a longer path: ``model.fc``."""
    return all(label.removeprefix("end/").startswith("saved/") for _, label, _ in signals)


def _follows(rule: tuple[str, str], rules: Collection[tuple[str, str]], *, saved: bool) -> bool:
    """Whether a part changed its module as parameters did."""
    if rule in rules or not saved:
        return rule in rules
    old, new = rule
    return any(
        old.endswith(f".{x}") and new.endswith(f".{y}") and old.removesuffix(x) == new.removesuffix(y) for x, y in rules
    )


def _by_tail(rows: Iterable[Row]) -> dict[str, frozenset[tuple[str, str, Content]]]:
    signals: dict[str, set[tuple[str, str, Content]]] = {}
    for row in rows:
        if row.dtype != METRIC:
            part = by_tail(row)
            signals.setdefault(part.part, set()).add((row.phase, part.label, content(row)))
    return {part: frozenset(contents) for part, contents in signals.items()}


def rule_of(old: str, new: str, between: str = ".") -> tuple[str, str]:
    """What of two module paths differs, without the end that they have in common: ``fc``, ``proj``; '' for nothing."""
    a, b = old.split(between), new.split(between)
    while a and b and a[-1] == b[-1]:
        a.pop()
        b.pop()
    return between.join(a), between.join(b)


def retold(
    a: Sequence[Mapping[str, float]], b: Sequence[Mapping[str, float]], *, so_far: bool = False
) -> dict[str, str]:
    """From metrics that `b` alone tells to those that `a` alone does: equal in every step that both have.

    One value that few metrics would have says which metric it is, and so do two that differ. Any other, such as one
    that is always 0, goes with what is called alike: ``rewards/len/std`` with ``rewards/len/mean``.

    Args:
        a: The baseline's metrics, step by step.
        b: The other run's.
        so_far: Whether more steps will come, so that what nothing tells yet may still be told.
    """
    names = [{name for step in side for name in step} for side in (a, b)]
    alike: dict[tuple[object, ...], _Class] = {}
    for steps, others, mine in ((a[: len(b)], names[1], 0), (b[: len(a)], names[0], 1)):
        for name in dict.fromkeys(name for step in steps for name in step if name not in others and _is_named(name)):
            values = tuple(struct.pack("<d", step[name]) if name in step else b"" for step in steps)
            rank = name.partition("@")[2]  # that of all ranks is not that of one
            known = alike.setdefault((rank, values), _Class([], [], seen=_tell(values)))
            (known.olds, known.news)[mine].append(name)
    pairs = {k.news[0]: k.olds[0] for k in alike.values() if k.seen and len(k.olds) == len(k.news) == 1}
    rules = sorted({rule_of(old, new, "/") for new, old in pairs.items()}, key=lambda rule: (-len(rule[0]), rule))
    for known in alike.values():
        by_rule = _by_rules(_without(known, pairs), rules, "/")
        remaining = _without(_without(known, pairs), by_rule)
        by_order = zip(remaining.news, remaining.olds, strict=False) if known.seen or so_far else ()
        pairs |= by_rule | dict(by_order)
    return pairs


def inner(
    a: Sequence[Mapping[str, float]], b: Sequence[Mapping[str, float]], names: tuple[Collection[str], Collection[str]]
) -> dict[str, str]:
    """From metrics in lines of text that are those of an inner dict (``train/loss``) to the baseline's ``loss``.

    A dict in a dict is printed as a line for people is. It is the same where the baseline's is told no more and all
    that both have of it is equal, in every step, and no constant that many metrics have, such as 0. Then so are others
    in that dict, constants too, and such as have moved.

    Args:
        a: The baseline's metrics, step by step.
        b: The other run's in lines of text.
        names: All that either tells.
    """
    count = min(len(a), len(b))
    gone, new = (
        {
            name: [struct.pack("<d", step[name]) if name in step else b"" for step in steps[:count]]
            for name in dict.fromkeys(name for step in steps[:count] for name in step if name not in others)
        }
        for steps, others in ((a, names[1]), (b, names[0]))
    )
    pairs: dict[str, str] = {}
    # of a norm that the recorder reads too, what is logged may stand there
    tails = {old: old.replace("#logged", "") for old in gone if f"{old}#logged" not in names[0]}
    for old, values in ((old, gone[old]) for old in tails if _tell(gone[old])):
        alike = (name for name in new if name.endswith(f"/{tails[old]}") and new[name] == values)
        if other := next((name for name in alike if name not in pairs), ""):
            pairs[other] = old
    dicts = {other.removesuffix(tails[old]) for other, old in pairs.items()}
    for old in tails.keys() - {*pairs.values()}:
        if len(dicts) == 1 and (other := f"{min(dicts)}{tails[old]}") in new and other not in pairs:
            pairs[other] = old
    return pairs


def _is_named(metric: str) -> bool:
    """Whether a metric's name says which it is: what is of an optimizer or of a group has a place."""
    match = _OPTIMIZER.fullmatch(metric)
    return not (match and match[2]) and of_group("update", metric) is None


def _tell(values: Iterable[bytes]) -> bool:
    """Whether values say which metric it is that has them all."""
    different = set(values) - {b""}
    return len(different) > 1 or not all(map(_is_round, different))


@dataclass(frozen=True)
class _Class:
    """Parts that nothing has told apart so far.

    Attributes:
        olds: The baseline's.
        news: The other run's.
        seen: Whether both have shown equal bits.
    """

    olds: list[str]
    news: list[str]
    seen: bool


class Matching:
    """Learns which parts of names are the same, one step after the other.

    Args:
        split: How a name is cut.
        unnamed: Whether a part is no name, so that it is matched although both runs have it.
    """

    def __init__(self, split: Split, unnamed: Callable[[str], bool]) -> None:
        self._split, self._unnamed = split, unnamed
        self._pairs: dict[str, str] = {}
        self._classes: list[_Class] = []
        self._met: tuple[set[str], set[str]] = (set(), set())

    def take(self, rows_a: Iterable[Row], rows_b: Iterable[Row]) -> None:
        """Learn from a step of the baseline and the same step of the other run."""
        a, b = self._signals(rows_a), self._signals(rows_b)
        met_a, met_b = self._met
        olds = [part for part in a if part not in met_a and (part not in b or self._unnamed(part))]
        news = [part for part in b if part not in met_b and (part not in a or self._unnamed(part))]
        met_a.update(a)
        met_b.update(b)
        # what ranks do not agree on any more stands by rank: that is a difference, and none of names
        whole = set(olds), set(news)
        olds = [part for part in olds if part.partition("@")[0] not in whole[1] or "@" not in part]
        news = [part for part in news if part.partition("@")[0] not in whole[0] or "@" not in part]
        if olds and news:
            self._classes.append(_Class(olds, news, seen=False))
        torn = [unmatched for phase in range(len(PHASES)) for unmatched in self._refine(a, b, phase)]
        for known in self._classes:
            if known.seen and len(known.olds) == len(known.news) == 1:
                self._pairs[known.news[0]] = known.olds[0]
        self._classes = [c for c in self._classes if c.seen and not len(c.olds) == len(c.news) == 1]
        for unmatched in torn:
            self._pairs |= self._settled(unmatched, a, b)

    def names(self) -> dict[str, str]:
        """From the other run's parts to the baseline's; of those that nothing tells apart the likeliest."""
        pairs = dict(self._pairs)
        for known in self._classes:
            pairs |= self._alike(known)
        return pairs

    def rename(self, rows: Iterable[Row], names: Mapping[str, str]) -> list[Row]:
        """Rows of the other run under the baseline's names; each row's own where it has no counterpart."""
        taken = set(names.values())
        renamed = []
        for row in rows:
            cut = self._split(row)
            if cut is None:
                renamed.append(row)
                continue
            before, part, after, _ = cut
            # a name that another signal was given is not to be had twice
            other = names.get(part, f"{part}#new" if part in taken else part)
            renamed.append(row if other == part else replace(row, name=before + other + after))
        return renamed

    def _signals(self, rows: Iterable[Row]) -> Signals:
        signals: Signals = {}
        for row in rows:
            cut = self._split(row)
            if cut is None:
                continue
            phases = signals.get(cut.part)
            if phases is None:
                phases = signals[cut.part] = [Counter() for _ in PHASES]
            label = _ROUND if _round(row) and not of_groups(cut.part) else cut.label
            phases[PHASES.index(row.phase)][label, content(row)] += 1
        return signals

    def _refine(self, a: Signals, b: Signals, phase: int) -> list[_Class]:
        """Tell apart what differs in a phase; what has no counterpart any more."""
        classes, torn = list[_Class](), list[_Class]()
        for known in self._classes:
            olds, news = _grouped(known.olds, a, phase), _grouped(known.news, b, phase)
            for bits in olds.keys() & news.keys():
                classes.append(_Class(olds[bits], news[bits], known.seen or _telling(bits)))
            old = [part for bits, parts in olds.items() if bits not in news for part in parts]
            new = [part for bits, parts in news.items() if bits not in olds for part in parts]
            if old or new:
                torn.append(_Class(old, new, known.seen))
        self._classes = classes
        return torn

    def _settled(self, torn: _Class, a: Signals, b: Signals) -> dict[str, str]:
        """Pairs of parts whose bits differ now: where they were equal before, or others of their module are matched."""
        if torn.seen:
            return self._alike(torn)
        pairs = {part: part for part in torn.news if part in torn.olds}
        by_rule = self._by_rule(_without(torn, pairs))
        return pairs | {new: old for new, old in by_rule.items() if _fits(a.get(old), b.get(new))}

    def _alike(self, known: _Class) -> dict[str, str]:
        """Parts paired by their names: the same, else as others of their module, else the most alike in their order."""
        matched = {part: part for part in known.news if part in known.olds}
        matched |= self._by_rule(_without(known, matched))
        remaining = _without(known, matched)
        if len(remaining.olds) * len(remaining.news) > _PAIRS:
            return matched | dict(zip(remaining.news, remaining.olds, strict=False))
        cuts = {part: part.split(".") for part in (*remaining.olds, *remaining.news)}
        pairs = itertools.product(enumerate(remaining.olds), enumerate(remaining.news))
        likeness = [(-_likeness(cuts[old], cuts[new]), i, j) for (i, old), (j, new) in pairs]
        taken: tuple[set[int], set[int]] = (set(), set())
        for _, i, j in sorted(likeness):
            if i not in taken[0] and j not in taken[1]:
                taken[0].add(i)
                taken[1].add(j)
                matched[remaining.news[j]] = remaining.olds[i]
        return matched

    def _by_rule(self, known: _Class) -> dict[str, str]:
        """Parts paired as what is matched for certain was renamed: ``fc.bias`` like ``fc.weight``."""
        named = {(old, new) for new, old in self._pairs.items() if old != new and not self._unnamed(old)}
        rules = sorted({rule_of(old, new) for old, new in named}, key=lambda rule: (-len(rule[0]), rule))
        return _by_rules(known, rules, ".")


def _by_rules(known: _Class, rules: Iterable[tuple[str, str]], between: str) -> dict[str, str]:
    pairs: dict[str, str] = {}
    left = set(known.news)
    for old in known.olds:
        for before, after in rules:
            new = _replaced(old, before, after, between)
            if new in left:
                left.discard(new)
                pairs[new] = old
                break
    return pairs


def _round(row: Row) -> bool:
    """Whether a metric is a number that many metrics may be: one with at most 12 significant bits, NaN or infinite."""
    return row.dtype == METRIC and row.values is not None and _is_round(row.values)


def _is_round(value: bytes) -> bool:
    return not any(value[:5])


def _telling(bits: Bits) -> bool:
    """Whether equal bits are a reason to take two parts for the same."""
    return any(label != _ROUND for (label, _), _ in bits)


def _grouped(parts: Iterable[str], signals: Signals, phase: int) -> dict[Bits, list[str]]:
    groups: dict[Bits, list[str]] = {}
    for part in parts:
        phases = signals.get(part)
        groups.setdefault(frozenset(phases[phase].items()) if phases else frozenset(), []).append(part)
    return groups


def _without(known: _Class, pairs: Mapping[str, str]) -> _Class:
    olds = set(pairs.values())
    return replace(known, olds=[p for p in known.olds if p not in olds], news=[p for p in known.news if p not in pairs])


def _fits(old: list[Shown] | None, new: list[Shown] | None) -> bool:
    """Whether two parts have a signal in common, and none with another dtype or shape."""
    if old is None or new is None:
        return False
    looks = [
        {(phase, label): bits[:2] for phase, counter in enumerate(side) for label, bits in counter}
        for side in (old, new)
    ]
    both = looks[0].keys() & looks[1].keys()
    return bool(both) and all(looks[0][key] == looks[1][key] for key in both)


def _replaced(name: str, before: str, after: str, between: str) -> str | None:
    """A module path whose beginning `before` becomes `after`; None where it has another."""
    if before and name != before and not name.startswith(f"{before}{between}"):
        return None
    tail = name[len(before) :].removeprefix(between)
    return between.join(filter(None, (after, tail)))


def _likeness(a: Sequence[str], b: Sequence[str]) -> int:
    """How many elements two paths begin and end with alike."""
    first, last = 0, 0
    while first < min(len(a), len(b)) and a[first] == b[first]:
        first += 1
    while last < min(len(a), len(b)) - first and a[-1 - last] == b[-1 - last]:
        last += 1
    return first + last
