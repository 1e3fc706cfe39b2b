"""Which two verdicts do not go together, in one line."""

from __future__ import annotations

from repro_bisect.search.dag import Commit, Dag, bits

__all__ = ["explain"]

_CURE = "the fault is not monotonic here: judge both again, or search for one change at a time"


def explain(dag: Dag[Commit], good: int, bad: int, newest: int) -> str:
    """Name the newest verdict and one that it contradicts.

    Args:
        dag: the range.
        good: bitset of the GOOD commits.
        bad: bitset of the BAD commits. No commit is an ancestor of all of these and of none of `good`.
        newest: index of the commit whose verdict, in one of the sets, left no suspect.
    """
    name = dag.order
    if good & bad & 1 << newest:
        return f"{name[newest]} was judged both GOOD and BAD; {_CURE}"
    is_good = bool(good >> newest & 1)
    # GOOD commits contain no BAD one: the nearest commit that breaks this is named.
    if is_good and (below := bad & dag.ancestors[newest]):
        return f"{name[newest]} is GOOD but contains {name[bits(below)[-1]]}, which is BAD; {_CURE}"
    if not is_good and (above := good & dag.descendants(newest)):
        return f"{name[bits(above)[0]]} is GOOD but contains {name[newest]}, which is BAD; {_CURE}"
    # Otherwise the BAD commits share no suspect that the GOOD ones leave: name the BAD one that shares least.
    excluded = 0
    for i in bits(good):
        excluded |= dag.ancestors[i]
    common = dag.ancestors[newest] & ~(0 if is_good else excluded)
    shared = {i: (dag.ancestors[i] & common).bit_count() for i in bits(bad & ~(1 << newest))}
    other = name[min(shared, key=lambda i: (shared[i], i))]
    verdict = "GOOD" if is_good else "BAD"
    return f"{name[newest]} is {verdict} and {other} is BAD: with the other verdicts no commit explains both; {_CURE}"
