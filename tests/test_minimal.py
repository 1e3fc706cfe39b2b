"""The smallest set of changes that moves the numbers, against brute force."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence

from hypothesis import example, given
from hypothesis import strategies as st

from repro_bisect.search.minimal import Asking, Minimal, Response, minimal

MOVES, SAME, SKIP = Response.MOVES, Response.SAME, Response.SKIP
Does = Callable[[frozenset[int]], Response]


class Asked:
    """Answers questions, and sees to it that they are fair: new ones, at most so many at once."""

    def __init__(self, does: Does, slots: int) -> None:
        self.does, self.slots = does, slots
        self.seen: list[frozenset[int]] = []

    def __call__(self, subsets: Sequence[frozenset[int]]) -> list[Response]:
        """What they do."""
        assert 1 <= len(subsets) <= self.slots
        assert len({*self.seen, *subsets}) == len(self.seen) + len(subsets), "asked twice"
        self.seen += subsets
        return [self.does(subset) for subset in subsets]


def answered(asking: Asking[Minimal], ask: Asked) -> Minimal:
    """What it finds when it is told what it asks for."""
    try:
        subsets = next(asking)
        while True:
            subsets = asking.send(ask(subsets))
    except StopIteration as end:
        minimal: Minimal = end.value
        return minimal


def found_by(count: int, does: Does, slots: int) -> Minimal:
    """The answer, which always moves the numbers."""
    ask = Asked(does, slots)
    smallest = answered(minimal(count, slots), ask)
    every = frozenset(range(count))
    assert smallest.asked == len(ask.seen)
    assert not {frozenset(), every} & set(ask.seen)
    assert frozenset(smallest.chosen) == every or does(frozenset(smallest.chosen)) is MOVES
    return smallest


def parts(whole: Sequence[int]) -> list[frozenset[int]]:
    """Every real subset."""
    return [frozenset(c) for n in range(len(whole)) for c in itertools.combinations(whole, n)]


@st.composite
def monotone(draw: st.DrawFn) -> tuple[int, list[frozenset[int]]]:
    """So many changes, and the sets of which any one is enough."""
    count = draw(st.integers(1, 9))
    some = st.frozensets(st.integers(0, count - 1), min_size=1)
    return count, draw(st.lists(some, min_size=1, max_size=3))


@given(monotone(), st.integers(1, 5))
@example((1, [frozenset({0})]), 1)
def test_a_monotone_answer_is_minimal(made: tuple[int, list[frozenset[int]]], slots: int) -> None:
    """Where more changes never do less, the answer is one of the smallest enough sets, and proved to be."""
    count, enough = made
    smallest = found_by(count, lambda s: MOVES if any(e <= s for e in enough) else SAME, slots)
    assert not smallest.hidden
    assert frozenset(smallest.chosen) in enough
    assert not any(e < frozenset(smallest.chosen) for e in enough)
    assert not any(e <= part for e in enough for part in parts(smallest.chosen))


@given(st.integers(1, 9), st.integers(1, 5), st.randoms(use_true_random=False))
def test_any_answer_lacks_nothing(count: int, slots: int, random: object) -> None:
    """Whatever subsets do, none of the answer's changes can be left out."""
    every = {s: random.choice([MOVES, SAME]) for s in parts(range(count))}  # type: ignore[attr-defined]
    every[frozenset()], every[frozenset(range(count))] = SAME, MOVES
    smallest = found_by(count, every.__getitem__, slots)
    assert not smallest.hidden
    assert all(every[frozenset(smallest.chosen) - {c}] is SAME for c in smallest.chosen)
    assert smallest.asked <= 2 * count * count + 3 * count


@given(st.integers(1, 9), st.integers(1, 5), st.randoms(use_true_random=False), st.integers(1, 3))
def test_what_cannot_be_tested_never_makes_a_wrong_set(count: int, slots: int, random: object, rate: int) -> None:
    """With subsets that cannot be tested the answer moves the numbers, and what is not proved is named."""
    kinds = [MOVES, SAME, *[SKIP] * rate]
    every = {s: random.choice(kinds) for s in parts(range(count))}  # type: ignore[attr-defined]
    every[frozenset()], every[frozenset(range(count))] = SAME, MOVES
    smallest = found_by(count, every.__getitem__, slots)
    one_less = {c: every[frozenset(smallest.chosen) - {c}] for c in smallest.chosen}
    assert MOVES not in one_less.values()
    assert list(smallest.hidden) == [c for c, does in one_less.items() if does is SKIP]
    assert bool(smallest.hidden) == (SKIP in one_less.values())
    assert smallest.asked <= 2 * count * count + 3 * count


@given(monotone(), st.integers(1, 3), st.data())
def test_changes_that_need_each_other(made: tuple[int, list[frozenset[int]]], slots: int, data: st.DataObject) -> None:
    """Where a change cannot be tested without another, no change of the answer can be left out alone."""
    count, enough = made
    needs = data.draw(st.dictionaries(st.integers(0, count - 1), st.integers(0, count - 1)))

    def does(subset: frozenset[int]) -> Response:
        if any(c in subset and other not in subset for c, other in needs.items()):
            return SKIP
        return MOVES if any(e <= subset for e in enough) else SAME

    smallest = found_by(count, does, slots)
    assert all(does(frozenset(smallest.chosen) - {c}) is not MOVES for c in smallest.chosen)


@given(st.integers(1, 300), st.data())
def test_questions_are_few(count: int, data: st.DataObject) -> None:
    """Of n changes, one cause takes about log2(n) questions and k causes k times as many; slots shorten the way."""
    cause = data.draw(st.frozensets(st.integers(0, count - 1), min_size=1, max_size=4))
    smallest = found_by(count, lambda s: MOVES if cause <= s else SAME, 1)
    assert frozenset(smallest.chosen) == cause
    halvings = math.ceil(math.log2(count + 1)) + 1
    assert smallest.asked <= len(cause) * (halvings + 1)
