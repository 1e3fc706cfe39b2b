"""A range without its detours, as data: no probe, no repository."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hypothesis import given
from hypothesis import strategies as st

from repro_bisect.search.detours import straightened


def way(parents: Mapping[str, Sequence[str]], codes: str) -> dict[str, tuple[str, ...]]:
    """What each commit of a range from ``g`` to the last follows; `codes` has a letter for ``g`` and for each."""
    code = dict(zip(["g", *parents], codes, strict=True))
    dag = straightened(parents, "g", [*parents][-1], code.__getitem__).dag
    return {commit: tuple(dag.parents[commit]) for commit in dag}


def test_what_was_taken_back_is_left_out() -> None:
    """Of a change, its revert and the revert of that, the last is what is searched, with a parent of its own."""
    line = {"1": ["g"], "2": ["1"], "3": ["2"], "4": ["3"]}
    assert way(line, "ABABC") == {"2": (), "3": ("2",), "4": ("3",)}
    assert way(line, "ABCDE").keys() == {"1", "2", "3", "4"}


def test_a_line_is_not_cut_short_by_another() -> None:
    """A branch that was squashed and is merged again keeps its commits, though the squash has the code of its tip."""
    squashed = {"a": ["g"], "b": ["a"], "s": ["g"], "t": ["s"], "c": ["b"], "m": ["t", "c"]}
    assert {"a", "b"} <= way(squashed, "ABCCDEF").keys()


def test_what_holds_good_follows_nothing_that_lacks_it() -> None:
    """A commit with the code of one from before GOOD may differ from it for what that lacks."""
    beside = {"b": [], "m": ["g", "b"], "n": ["m"]}
    assert way(beside, "ABCB")["n"] == ("m",)


@given(data=st.data())
def test_one_culprit_stays_the_only_one(data: st.DataObject) -> None:
    """Where one commit explains every verdict, and equal code has equal verdicts, so it does on the straight way."""
    size = data.draw(st.integers(1, 12))
    parents = {k: sorted(data.draw(st.sets(st.integers(0, k - 1), min_size=1, max_size=2))) for k in range(1, size + 1)}
    held = {0: {0}}
    for k, before in parents.items():
        held[k] = {k}.union(*(held[p] for p in before))
    culprit = data.draw(st.sampled_from(sorted(held[size] - {0})))
    codes = {k: (culprit in held[k], data.draw(st.integers(0, 2))) for k in held}
    straight = straightened(dict(reversed(parents.items())), 0, size, codes.__getitem__)
    dag = straight.dag
    assert culprit in dag and culprit not in straight.idle and size in dag
    assert all(codes[c][0] == bool(dag.ancestors[i] >> dag.index[culprit] & 1) for i, c in enumerate(dag))
