"""Flags that are nearly another one: a typing mistake."""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["near_miss", "twin"]


def near_miss(flag: str, known: Iterable[str]) -> str:
    """The flag that was probably meant.

    Args:
        flag: One that is not known, with its dashes.
        known: Those that there are.

    Returns:
        The known flag that differs by underscores for dashes, a letter or two, or the order of its words; '' where
        none is that near.
    """
    plain = flag.lower().replace("_", "-")
    words = sorted(plain.split("-"))
    best, least = "", 3 if len(plain) >= 14 else 2
    for one in known:
        if one == plain or (sorted(one.split("-")) == words and len(words) > 3):
            return one
        if abs(len(one) - len(plain)) < least and (distance := _distance(plain, one, least)) < least:
            best, least = one, distance
    return best


def _distance(a: str, b: str, limit: int) -> int:
    """Letters to insert, drop, change or swap; `limit` where it is that or more."""
    if not set(a) - set(b) and not set(b) - set(a) and a == b:
        return 0
    before: list[int] = []
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        earlier, before = before, row
        row = [i]
        for j, y in enumerate(b, 1):
            cost = min(before[j] + 1, row[j - 1] + 1, before[j - 1] + (x != y))
            if i > 1 and j > 1 and x == b[j - 2] and a[i - 2] == y:
                cost = min(cost, earlier[j - 2] + 1)
            row.append(cost)
        if min(row) >= limit:
            return limit
    return min(row[-1], limit)


def twin(flag: str) -> str:
    """``--x`` for ``--no-x`` and the other way round: parsers of Python have both."""
    return f"--{flag[5:]}" if flag.startswith("--no-") else f"--no-{flag[2:]}"
