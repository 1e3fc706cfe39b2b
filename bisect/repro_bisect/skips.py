"""What skipped commits say about the untried ones near them.

Commits that cannot be tested come in runs: a broken build stays broken until somebody mends it. Two consequences, kept
apart because only the first one changes an answer:

- *presumed*: what lies between two commits that were skipped for the same reason is taken for skipped too;
- *risk*: what lies near skipped commits is a worse probe than its balance says. This only orders probes.
"""

from __future__ import annotations

from collections.abc import Sequence

from repro_bisect.dag import Commit, Dag, bits

__all__ = ["Risk", "presumed", "risks"]

Risk = tuple[int, int]
"""Chance that a commit can be tested, as an exact fraction (numerator, denominator)."""


def presumed(dag: Dag[Commit], skips: Sequence[tuple[int, str]], tested: int) -> int:
    """Commits between two skips of the same non-empty reason with nothing tested between them.

    Between means: on some path from the one to the other. A single GOOD or BAD verdict on any such path takes the
    presumption back for that pair.

    Args:
        dag: the range.
        skips: index and reason of each skipped commit, ascending.
        tested: bitset of the commits with a GOOD or BAD verdict.

    Returns:
        A bitset without the skipped commits themselves.
    """
    groups: dict[str, list[int]] = {}
    for i, reason in skips:
        if reason:
            groups.setdefault(reason, []).append(i)
    found = 0
    for group in groups.values():
        found |= _between(dag, group, tested)
    for i, _ in skips:
        found &= ~(1 << i)
    return found


def risks(dag: Dag[Commit], skips: Sequence[tuple[int, str]], tested: int, size: int) -> dict[int, Risk]:
    """The chance that each commit can be tested, given where skips were met.

    If the width of a run of untestable commits is equally likely to be of any order of magnitude, a run seen to be
    L wide ends within d more commits with probability d / (L + d). So probes leave a run in growing strides, and a
    run of w costs O(log w) of them. An eighth of the suspects is added to L: the first stride is then not a timid
    one. (Of 0 to 1 times the suspects, 0.1 to 0.2 gave the fewest probes on lines of 136 and 300 with runs of 1 to
    100.) Reasons do not matter here: commits inside a mixed run stay possible probes, but poor ones.

    Args:
        dag: the range.
        skips: index and reason of each skipped commit, ascending.
        tested: bitset of the commits with a GOOD or BAD verdict.
        size: the number of suspects.

    Returns:
        A fraction for each commit that is connected to a skip; the others have none against them.
    """
    skipped = [i for i, _ in skips]
    run = _between(dag, skipped, tested)
    for i in skipped:
        run |= 1 << i
    width, queue = _widths(dag, bits(run))
    # d / (L + size / 8 + d) in whole numbers; inside a run d is taken as 1/2.
    chance = {i: (4, 8 * width[i] + size + 4) for i in queue}
    distance = dict.fromkeys(queue, 0)
    for i in queue:  # breadth first: the queue grows while it is read
        for near in dag.neighbours[i]:
            if near not in distance:
                d = distance[near] = distance[i] + 1
                width[near] = width[i]
                chance[near] = (8 * d, 8 * width[i] + size + 8 * d)
                queue.append(near)
    return chance


def _between(dag: Dag[Commit], skipped: Sequence[int], tested: int) -> int:
    """Union of the intervals [a, b] of skipped commits that hold no tested commit, ends included."""
    found = 0
    for b in reversed(skipped):
        covered = 0
        for a in skipped:
            if a >= b:
                break
            # Inside an interval that was taken already, every smaller one adds nothing.
            if not covered >> a & 1:
                span = dag.ancestors[b] & dag.descendants[a]
                if not span & tested:
                    covered |= span
        found |= covered
    return found


def _widths(dag: Dag[Commit], members: list[int]) -> tuple[dict[int, int], list[int]]:
    """The size of each member's connected run, and the members."""
    inside, width = set(members), dict[int, int]()
    for start in members:
        if start in width:
            continue
        run, width[start] = [start], 0
        for i in run:
            for near in dag.neighbours[i]:
                if near in inside and near not in width:
                    width[near] = 0
                    run.append(near)
        width.update(dict.fromkeys(run, len(run)))
    return width, members
