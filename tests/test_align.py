"""Which entries of two sequences are the same: pairs that ascend, reach from end to end and use each entry once."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

from hypothesis import example, given
from hypothesis import strategies as st

from repro_bisect.explain.cause import aligned, matched

FEW = st.lists(st.integers(0, 4), max_size=24)
"""So few values that most occur more than once."""


@given(a=FEW, b=FEW)
@example(a=[0, 0], b=[0])
@example(a=[], b=[1])
def test_pairs_ascend_and_are_equal(a: list[int], b: list[int]) -> None:
    """Both sides of the pairs ascend strictly, and each pair holds two equal entries."""
    pairs = aligned(a, b)
    assert all(a[i] == b[j] for i, j in pairs)
    assert all(i < k and j < m for (i, j), (k, m) in pairwise(pairs))


@given(a=FEW, b=FEW, both=FEW, last=FEW)
def test_ends_in_common_are_paired(a: list[int], b: list[int], both: list[int], last: list[int]) -> None:
    """A common beginning is paired place by place, and so is a common end, as far as the shorter one reaches."""
    a, b = both + a + last, both + b + last
    pairs = set(aligned(a, b))
    assert {(k, k) for k in range(len(both))} <= pairs
    first = 0
    while first < min(len(a), len(b)) and a[first] == b[first]:
        first += 1
    left = min(len(last), min(len(a), len(b)) - first)
    assert {(len(a) - k, len(b) - k) for k in range(1, left + 1)} <= pairs


@given(a=FEW, b=FEW)
def test_no_pair_can_be_added_between_two(a: list[int], b: list[int]) -> None:
    """Between two neighbouring pairs the sequences have nothing in common that is left over."""
    pairs = [(-1, -1), *aligned(a, b), (len(a), len(b))]
    for (i, j), (k, m) in pairwise(pairs):
        assert not set(a[i + 1 : k]) & set(b[j + 1 : m])


@given(a=st.lists(st.integers(), max_size=50))
def test_equal_sequences_pair_fully(a: list[int]) -> None:
    """A sequence and itself pair entry by entry, whatever repeats in it."""
    assert aligned(a, list(a)) == [(k, k) for k in range(len(a))]


@given(a=FEW, b=FEW)
def test_matched_uses_each_once_and_as_many_as_there_are(a: list[int], b: list[int]) -> None:
    """What moved is matched too: ordered pairs stay, no entry serves twice, and none that has an equal is left."""
    ordered = dict(aligned(a, b))
    pairs = matched(a, b, ordered)
    assert pairs.items() >= ordered.items()
    assert all(a[i] == b[j] for i, j in pairs.items())
    assert len(set(pairs.values())) == len(pairs) == (Counter(a) & Counter(b)).total()


@given(a=FEW, order=st.randoms(use_true_random=False))
def test_another_order_matches_fully(a: list[int], order: object) -> None:
    """A sequence in any other order has a partner for each entry."""
    b = list(a)
    order.shuffle(b)  # type: ignore[attr-defined]
    assert sorted(matched(a, b, dict(aligned(a, b)))) == list(range(len(a)))


def test_long_ends_in_common_take_linear_time() -> None:
    """Many equal entries on either side of one that differs: quadratic time would not end.

    All of the beginning are the same entry, which costs sequence matching as much as it can.
    """
    many = 200_000
    a, b = [[0] * many + [middle] + list(range(2, many)) for middle in (-1, -2)]
    pairs = aligned(a, b)
    assert len(pairs) == len(a) - 1 and (many, many) not in pairs
    assert aligned([0] * many, [0] * (many + 1)) == [(k, k) for k in range(many)]
    assert matched([0] * many, [0] * many, {}) == {k: k for k in range(many)}
