"""The pure part of a changelog: over random histories its rows are the commits that changed the numbers, no others."""

from __future__ import annotations

import dataclasses
import json
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from repro.report.history import headline, history_table, history_text, signed, write_report
from repro.report.pieces import cut
from repro.report.plots import history_plot
from repro_bisect.axes.axis import PointInfo
from repro_bisect.driver.drift import Drift, Gap, HistoryResult, Moved, Row
from repro_bisect.probe.progress import Cost
from repro_bisect.search.changelog import Changelog, Entry
from repro_golden.compare.traces import Divergence

GOOD = "c0"


@dataclass(frozen=True)
class World:
    """A range with what testing a commit would say.

    Attributes:
        parents: Newest first, GOOD itself is none of them.
        numbers: Those of each commit, GOOD and older ones too.
        keys: Hash of the code of each; by default no two are equal.
        skips: Why a commit cannot be tested.
    """

    parents: Mapping[str, Sequence[str]]
    numbers: Mapping[str, object]
    keys: Mapping[str, str] = dataclasses.field(default_factory=dict)
    skips: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def key(self, commit: str) -> str:
        """Its code."""
        return self.keys.get(commit, commit)

    @property
    def bad(self) -> str:
        """The bad end."""
        return next(iter(self.parents))


def run(world: World, *, every: bool = False, k: int = 1, seed: int = 0) -> tuple[list[Entry], list[str]]:
    """Rows, and the commits that were tested for them beside the ends; answers come in any order."""
    log = Changelog(world.parents, GOOD, world.bad, world.key, every=every)
    chance, under_way, tested = random.Random(seed), list[str](), list[str]()
    for end in (GOOD, world.bad):
        log.tell(end, world.numbers[end])
    while True:
        survey = log.survey()
        gone = log.moot(survey, [world.key(p) for p in under_way])
        under_way = [p for p in under_way if world.key(p) not in gone]
        started = log.next(survey, k - len(under_way), [world.key(p) for p in under_way])
        assert not {world.key(p) for p in started} & {world.key(p) for p in (*tested, *under_way)}, "tested twice"
        under_way += started
        if not under_way:
            break
        point = under_way.pop(chance.randrange(len(under_way)))
        tested.append(point)
        reason = world.skips.get(point)
        log.tell(point, None if reason is not None else world.numbers[point], reason or "")
    assert survey.done
    return survey.entries, tested


def line(numbers: Sequence[object], skips: Mapping[int, str] | None = None, keys: Sequence[str] = ()) -> World:
    """A linear history of as many commits as there are numbers, GOOD the first."""
    n = len(numbers)
    return World(
        {f"c{i}": [f"c{i - 1}"] for i in range(n - 1, 0, -1)},
        {f"c{i}": x for i, x in enumerate(numbers)},
        {f"c{i}": key for i, key in enumerate(keys)},
        {f"c{i}": why for i, why in (skips or {}).items()},
    )


def steps_of(world: World) -> list[str]:
    """The commits of a line whose numbers are not their parent's."""
    return [f"c{i}" for i in range(1, len(world.numbers)) if world.numbers[f"c{i}"] != world.numbers[f"c{i - 1}"]]


def changes(entries: Sequence[Entry]) -> list[str]:
    """The commits that are said to have changed the numbers."""
    assert all(e.points == (e.after,) and not e.untried for e in entries if e.kind != "group")
    return [e.after for e in entries if e.kind == "change"]


FRESH = st.lists(st.booleans(), min_size=1, max_size=40)
"""Whether each commit after GOOD brings numbers that were not there before."""
ANY = st.lists(st.integers(0, 3), min_size=2, max_size=30)
"""Numbers that may come back."""


def counted(moves: Sequence[bool]) -> list[int]:
    """Numbers that never come back."""
    numbers = [0]
    for moved in moves:
        numbers.append(numbers[-1] + moved)
    return numbers


@given(FRESH, st.integers(1, 4), st.integers(0, 5))
def test_a_line_of_changes_is_listed_exactly(moves: list[bool], k: int, seed: int) -> None:
    """Where numbers never come back every change is a row, in order, whatever runs at once and ends first."""
    world = line(counted(moves))
    entries, _ = run(world, k=k, seed=seed)
    assert changes(entries) == steps_of(world) and all(e.kind == "change" for e in entries)
    assert [e.before for e in entries] == [f"c{int(e.after[1:]) - 1}" for e in entries]


@given(FRESH)
def test_the_probes_of_a_line_are_few(moves: list[bool]) -> None:
    """One after the other, k changes among n commits need at most k * (ceil(log2(n / k)) + 2) tests beside the ends."""
    world = line(counted(moves))
    _, tested = run(world)
    n, k = len(moves), sum(moves)
    assert len(tested) <= (k * (math.ceil(math.log2(n / k)) + 2) if k else 0)
    assert len(tested) <= n - 1


@given(ANY, st.integers(1, 4), st.integers(0, 5))
def test_what_changed_and_changed_back_is_found_when_all_are_tested(numbers: list[int], k: int, seed: int) -> None:
    """With `every` any line is listed exactly; without, what is listed is true, and equal ends hide what is between."""
    world = line(numbers)
    entries, tested = run(world, every=True, k=k, seed=seed)
    assert changes(entries) == steps_of(world) and len(entries) == len(steps_of(world))
    assert sorted(tested) == sorted(set(world.parents) - {world.bad})
    entries, tested = run(world, k=k, seed=seed)
    assert set(changes(entries)) <= set(steps_of(world))
    if numbers[0] == numbers[-1]:
        assert entries == [] and tested == []


@given(ANY, st.data(), st.booleans())
def test_equal_code_is_tested_once(numbers: list[int], data: st.DataObject, every: bool) -> None:
    """Points with one key share a test, wherever they lie, and one with its neighbour's code is never a row."""
    same = data.draw(st.lists(st.booleans(), min_size=len(numbers), max_size=len(numbers)))
    numbers = [x if i == 0 or not same[i] else -1 for i, x in enumerate(numbers)]
    for i, x in enumerate(numbers):
        numbers[i] = numbers[i - 1] if x == -1 else x
    keys = [f"code {x}" if data.draw(st.booleans()) else f"code {x} at {i}" for i, x in enumerate(numbers)]
    for i in range(1, len(numbers)):
        keys[i] = keys[i - 1] if same[i] else keys[i]
    world = line(numbers, keys=keys)
    entries, tested = run(world, every=every)
    assert len({world.key(p) for p in tested}) == len(tested)
    assert set(changes(entries)) <= set(steps_of(world))
    if every:
        assert changes(entries) == steps_of(world)


@given(FRESH, st.data(), st.integers(1, 3), st.booleans())
def test_skips_hide_changes_in_groups_alone(moves: list[bool], data: st.DataObject, k: int, every: bool) -> None:
    """Every change is a row or inside a group; a group holds at least one; what it calls tried was tried."""
    inner = list(range(1, len(moves)))
    skips = {i: data.draw(st.sampled_from("ab")) for i in inner if data.draw(st.integers(0, 2)) == 0}
    world = line(counted(moves), skips)
    entries, tested = run(world, every=every, k=k)
    truth = set(steps_of(world))
    groups = [e for e in entries if e.kind == "group"]
    hidden = {p for e in groups for p in e.points}
    assert set(changes(entries)) <= truth
    assert truth - set(changes(entries)) <= hidden
    assert all(truth & set(e.points) for e in groups)
    for entry in groups:
        inside = entry.points[:-1]
        assert all(p in world.skips or p in entry.untried for p in inside)
        assert entry.untried == {p for p in inside if p not in tested}
        assert not every or not entry.untried


def test_a_window_of_skips_costs_few_probes() -> None:
    """What lies between two skips of one reason is presumed, and said to be untried."""
    world = line([0] * 100 + [1] * 101, dict.fromkeys(range(20, 180), "does not import"))
    entries, tested = run(world)
    (group,) = entries
    assert (group.kind, group.before, group.after) == ("group", "c19", "c180")
    assert len(group.points) == 161 and len(group.untried) > 120 and len(tested) < 40


# histories with merges: a commit's numbers are the set of changes among its ancestors


@st.composite
def merged(draw: st.DrawFn) -> World:
    """A random history: branches of a few lines that are merged into each other; changes on commits that are no merges.

    Some branches are begun before GOOD. The first parent of a merge is the line that it is made on.
    """
    n = draw(st.integers(2, 22))
    parents: dict[str, list[str]] = {"old": [], GOOD: ["old"]}
    effects: dict[str, frozenset[str]] = {
        "old": frozenset(),
        GOOD: frozenset([GOOD]) & draw(st.sampled_from([{GOOD}, set()])),
    }
    heads = [GOOD]
    for i in range(1, n):
        name = f"c{i}"
        on = draw(st.integers(0, len(heads) - 1))
        what = draw(st.sampled_from(["commit", "commit", "commit", "branch", "merge", "ancient"]))
        other = draw(st.integers(0, len(heads) - 1))
        if what == "merge" and other != on and heads[other] != heads[on]:
            parents[name] = [heads[on], heads[other]]
            effects[name] = effects[heads[on]] | effects[heads[other]]
            heads[on] = name
            continue
        start = "old" if what == "ancient" else heads[on]
        parents[name] = [start]
        effects[name] = effects[start] | ({name} if draw(st.booleans()) else set())
        if what in ("branch", "ancient"):
            heads.append(name)
        else:
            heads[on] = name
    last = heads[0]  # GOOD's own line takes all others in
    for i, head in enumerate(heads[1:]):
        name = f"m{i}"
        parents[name] = [last, head]
        effects[name] = effects[last] | effects[head]
        last = name
    inside = reached(parents, last) - reached(parents, GOOD)
    if not inside:
        parents["c99"], effects["c99"], inside = [last], effects[last], {"c99"}
    return World({c: parents[c] for c in reversed(list(parents)) if c in inside}, effects)


def reached(parents: Mapping[str, Sequence[str]], tip: str) -> set[str]:
    """A commit and its ancestors."""
    reached, stack = set[str](), [tip]
    while stack:
        commit = stack.pop()
        if commit not in reached:
            reached.add(commit)
            stack += parents.get(commit, ())
    return reached


def planted(world: World) -> set[str]:
    """The commits that are no merges and whose numbers are not their parent's."""
    return {c for c, ps in world.parents.items() if len(ps) == 1 and world.numbers[c] != world.numbers[ps[0]]}


@given(merged(), st.integers(1, 3), st.booleans())
def test_what_merges_brought_in_is_listed_by_its_own_name(world: World, k: int, every: bool) -> None:
    """Over random graphs the changes are exactly the planted commits, each before the merge that brought it."""
    entries, _ = run(world, k=k, every=every)
    assert sorted(changes(entries)) == sorted(planted(world))
    order = [e.after for e in entries]
    assert len(set(order)) == len(order)
    for n, entry in enumerate(entries):
        assert not reached(world.parents, entry.after) & set(order[n + 1 :])
    for entry in entries:
        if entry.kind == "merge":
            first, second = (world.numbers[p] for p in world.parents[entry.after])
            assert world.numbers[entry.after] not in (first, second), "a merge that combines has numbers of its own"


@given(merged(), st.data())
def test_a_merge_that_changes_numbers_itself_is_a_row(world: World, data: st.DataObject) -> None:
    """A merge with numbers that no side accounts for is listed, as a change unless both sides had changed them."""
    merges = [c for c, ps in world.parents.items() if len(ps) == 2 and c != world.bad]
    if not merges:
        return
    guilty = data.draw(st.sampled_from(sorted(merges)))
    numbers = {c: (x, guilty in reached(world.parents, c)) for c, x in world.numbers.items()}
    changed = dataclasses.replace(world, numbers=numbers)
    entries, _ = run(changed, every=True)
    assert guilty in {e.after for e in entries}
    assert set(changes(entries)) - {guilty} == planted(world)


@given(merged(), st.data())
def test_skips_among_merges_hide_changes_in_groups_alone(world: World, data: st.DataObject) -> None:
    """With untestable commits anywhere every planted change is a row or in a group, and every change listed is one."""
    inner = sorted(set(world.parents) - {world.bad})
    skips = {c: data.draw(st.sampled_from("ab")) for c in inner if data.draw(st.integers(0, 3)) == 0}
    entries, _ = run(dataclasses.replace(world, skips=skips))
    hidden = {p for e in entries if e.kind == "group" for p in e.points}
    assert planted(world) <= set(changes(entries)) | hidden
    assert set(changes(entries)) <= planted(world)


def graph(**parents: str) -> dict[str, list[str]]:
    """A history from ``name="parent parent"``, newest first."""
    return {name: ps.split() for name, ps in reversed(parents.items())}


@pytest.mark.parametrize(
    ("numbers", "expected"),
    [
        ({"s": 1, "x": 0, "m": 1}, [("change", "s")]),
        ({"s": 0, "x": 1, "m": 1}, [("change", "x")]),
        ({"s": 1, "x": 2, "m": 3}, [("change", "s"), ("change", "x"), ("merge", "m")]),
        ({"s": 1, "x": 0, "m": 2}, [("change", "s"), ("change", "m")]),
        ({"s": 0, "x": 0, "m": 1}, [("change", "m")]),
        ({"s": 0, "x": 1, "m": 2}, [("change", "x"), ("change", "m")]),
        ({"s": 0, "x": 1, "m": 0}, [("change", "x"), ("change", "m")]),
        ({"s": 1, "x": 2, "m": 1}, [("change", "s"), ("change", "x")]),
    ],
)
def test_who_answers_for_a_merge(numbers: dict[str, int], expected: list[tuple[str, str]]) -> None:
    """A side that moved answers for a merge with its numbers; else the merge itself, where one line moved or none."""
    world = World(graph(s=GOOD, x=GOOD, m="x s", end="m"), {GOOD: 0} | numbers | {"end": 9})
    entries, _ = run(world, every=True)
    assert [(e.kind, e.after) for e in entries] == [*expected, ("change", "end")]


def test_a_side_whose_tip_cannot_be_tested_leaves_a_group_with_the_merge() -> None:
    """The change may be on the untestable side or in the merge: both are named."""
    parents = graph(s1=GOOD, s2="s1", s3="s2", x=GOOD, m="x s3", end="m")
    numbers = {GOOD: 0, "s1": 0, "s2": 1, "s3": 1, "x": 0, "m": 1, "end": 1}
    entries, _ = run(World(parents, numbers, skips={"s2": "crash", "s3": "crash"}))
    assert [(e.kind, e.points) for e in entries] == [("group", ("s2", "s3", "m"))]


def test_a_side_that_changed_and_changed_back_is_found_when_all_are_tested() -> None:
    """What a side took back before it was merged leaves no trace on the line; with `every` both commits are rows."""
    world = World(
        graph(s1=GOOD, s2="s1", x=GOOD, m="x s2", end="m"), {GOOD: 0, "s1": 1, "s2": 0, "x": 0, "m": 0, "end": 2}
    )
    assert changes(run(world)[0]) == ["end"]
    assert changes(run(world, every=True)[0]) == ["s1", "s2", "end"]


def test_a_commit_with_its_parents_code_is_in_no_group() -> None:
    """What cannot have changed the numbers is no suspect, also where its neighbours cannot be tested."""
    world = line([0, 0, 0, 1, 1], {1: "crash", 2: "crash"}, keys=["a", "b", "b", "c", "d"])
    (group,) = run(world)[0]
    assert group.points == ("c1", "c3")


def test_first_parents_alone_let_a_merge_stand_for_all_it_brought() -> None:
    """Where the range lists first parents only, a merge is a commit like any other."""
    parents = {c: ps[:1] for c, ps in graph(x=GOOD, m="x s", end="m").items()}
    entries, _ = run(World(parents, {GOOD: 0, "x": 0, "m": 1, "end": 1}))
    assert [(e.kind, e.after) for e in entries] == [("change", "m")]


def test_moot_probes_are_given_up() -> None:
    """A test under way between two points that turn out equal is called moot; one that was asked for never is."""
    world = line([0] * 10 + [1] * 10)
    log = Changelog(world.parents, GOOD, world.bad, world.key)
    log.tell(GOOD, 0)
    log.tell(world.bad, 1)
    assert log.moot(log.survey(), ["c3", "c12"]) == set()
    log.tell("c9", 0)
    assert log.moot(log.survey(), ["c3", "c12"]) == {"c3"}
    log.tell("c10", 1)
    assert log.moot(log.survey(), ["c3", "c12"]) == {"c3", "c12"}


# sizes, and how they are shown

FLOATS = st.one_of(st.none(), st.floats())


@given(st.lists(st.tuples(FLOATS, FLOATS), min_size=1, max_size=6))
def test_nan_and_what_is_missing_are_the_worst(pairs: list[tuple[float | None, float | None]]) -> None:
    """A gap weighs nothing where bits are equal; NaN on a side, or a side that is gone, outweighs any number."""
    gaps = [Gap(n, a, b) for n, (a, b) in enumerate(pairs)]
    for gap in gaps:
        assert gap.weight >= 0
        if gap.same:
            assert gap.weight == 0 and gap.absolute in (0, None) and gap.relative in (0, None)
        elif gap.a is None or gap.b is None or math.isnan(gap.a) or math.isnan(gap.b):
            assert gap.weight == math.inf
        elif gap.a != gap.b:
            assert gap.weight > 0 and gap.absolute is not None and gap.absolute > 0
    assert all(isinstance(gap.to_mapping()["step"], int) for gap in gaps)


@pytest.mark.parametrize(
    ("gap", "relative", "absolute"),
    [
        (Gap(0, 2.0, 3.0), "+5.0e-01", "+1.0e+00"),
        (Gap(0, -2.0, -3.0), "-5.0e-01", "-1.0e+00"),
        (Gap(0, 0.0, 1e-4), "Δ+1.0e-04", "+1.0e-04"),
        (Gap(0, 1.0, math.nan), "NaN", "NaN"),
        (Gap(0, math.nan, 1.0), "NaN", "NaN"),
        (Gap(0, 1.0, math.inf), "+inf", "+inf"),
        (Gap(0, math.inf, math.inf), "0", "0"),
        (Gap(0, 0.0, -0.0), "sign of 0", "sign of 0"),
        (Gap(0, 1.0, None), "gone", "gone"),
        (Gap(0, None, 1.0), "new", "new"),
    ],
)
def test_a_metric_is_shown_as_it_is(gap: Gap, relative: str, absolute: str) -> None:
    """Relative with its sign; absolute and marked from 0; what has no size is said by name."""
    moved = Moved(gap, gap, gap)
    assert (signed(moved), signed(moved, relative=False)) == (relative, absolute)


def result_of(*gaps: tuple[float, float]) -> HistoryResult:
    """A result of one row for each gap, with long names in it."""
    rows = []
    for n, (a, b) in enumerate(gaps):
        gap = Gap(0, a, b)
        moved = Moved(None if gap.same else gap, gap, gap)
        where = Divergence(12, "forward", "model.layers.11.self_attn.query_key_value.weight", "value", "")
        kl = {name: {"worst": (0, b - a), "last": (0, b - a)} for name in ("k1", "k3")}
        metrics = {"train/grad_norm": moved, "loss": moved, "train_rollout_logprob_abs_diff": moved}
        drift = Drift(1, None if gap.same else where, metrics, kl)
        info = PointInfo(f"{n:040x}", "A", "2026-01-02T03:04:05Z", "A | subject that goes on and on " * 3, (), "")
        rows.append(Row("change", info, "x", [info.commit], (), drift, dataclasses.replace(drift, steps=2)))
    return HistoryResult(
        "a" * 40, "b" * 40, "toy", "commit", rows, {}, {}, 9, False, False, "", 3, Cost(), 1.0, "machine", None
    )


def test_the_table_fits_and_the_plot_leaves_nothing_out(tmp_path: Path) -> None:
    """Long names are cut to 120 columns; 0 and NaN are drawn with shapes of their own, and each row has its place."""
    result = result_of((1.0, 1.001), (1.0, 1.0), (1.0, math.nan), (0.0, 2.0))
    table = history_table(result)
    assert max(map(len, table.splitlines())) <= 120 and "NaN" in table and "…" in table
    plot = history_plot(result)
    for text in ("no size", "measured", "drawn at 1e", *(row.commit.commit[:10] for row in result.rows)):
        assert text in plot
    assert history_plot(result_of()) == "" and history_table(result_of()) == ""
    report = next(write_report(result, tmp_path, "x")).read_text()
    assert report.count("&#124;") == 3 * len(result.rows), "bars in subjects are no columns"


def test_the_headline_counts_what_is_known() -> None:
    """Of a group one or more moved the numbers, and between equal ends nothing was run: at least so many did."""
    result = result_of((1.0, 2.0), (1.0, 2.0))
    rows = [dataclasses.replace(result.rows[0], kind="group"), result.rows[1]]
    unrun = "; none was run between equal numbers"
    for changes, message in (
        ({}, f"at least 2 of 9 commits of {'a' * 10}..{'b' * 10} changed the numbers of toy{unrun}"),
        ({"every": True}, f"2 of 9 commits of {'a' * 10}..{'b' * 10} changed the numbers of toy"),
        ({"points": 2}, f"2 of 2 commits of {'a' * 10}..{'b' * 10} changed the numbers of toy"),
        ({"rows": rows, "every": True}, "at least 2 of 9 commits "),
        ({"skips": {"c": "crashes"}, "every": True}, "at least 2 of 9 commits "),
        ({"rows": [], "agree": True}, "none of 9 commits "),
        ({"rows": [], "agree": True}, f" is known to have changed the numbers of toy{unrun}"),
        ({"rows": [], "agree": True, "every": True}, " changed the numbers of toy"),
    ):
        text = headline(dataclasses.replace(result, **changes))
        assert text.startswith(message) or text.endswith(message), text
    assert "is known" not in text and "at least" not in text


def test_a_row_says_what_it_left_as_it_was() -> None:
    """Of a change beside the training alone it is said below the table."""
    result = result_of((1.0, 2.0))
    drift = dataclasses.replace(result.rows[0].against_previous, untouched="parameters have the same bits")
    told = dataclasses.replace(result, rows=[dataclasses.replace(result.rows[0], against_previous=drift)])
    assert f"{'0' * 10}: parameters have the same bits." in history_text(told)


def test_a_remark_is_in_what_is_told_and_written(tmp_path: Path) -> None:
    """What is to be known of the search stands in the text, the report and the JSON."""
    result = dataclasses.replace(result_of((1.0, 2.0)), remarks=["probes disturbed each other"])
    report = next(write_report(result, tmp_path, "x")).read_text()
    told = history_text(result), report, json.dumps(result.to_mapping()["remarks"])
    assert all("probes disturbed each other" in text for text in told)


def test_long_names_keep_their_ends() -> None:
    """A cut name has the width it was given."""
    for width in range(3, 12):
        assert len(cut("model.layers.weight", width)) == width
    assert cut("loss", 4) == "loss" and cut("abcdefgh", 5) == "ab…gh"
