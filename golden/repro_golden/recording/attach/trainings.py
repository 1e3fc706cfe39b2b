"""Trainings beside each other, such as an actor's and a critic's: which is recorded, and what is said of several."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, TypeVar

from repro_golden.base.errors import ReproError

__all__ = ["largest", "one_at_a_time"]


class _Rank(Protocol):
    """The records of one rank, with what its process says of itself."""

    about: Any


R = TypeVar("R", bound=_Rank)


def _by_size(ranks: Sequence[R]) -> list[tuple[int, list[R]]]:
    """The trainings beside each other, each with the elements in what its optimizers hold: the largest first.

    A training is told by its process group.
    """
    groups: dict[str, list[R]] = {}
    for rank in ranks:
        groups.setdefault(str(rank.about.get("group", "")), []).append(rank)
    sized = [(sum(int(rank.about.get("size", 0)) for rank in group), group) for group in groups.values()]
    return sorted(sized, key=lambda training: training[0], reverse=True)


def largest(ranks: Sequence[R], others: int) -> list[R]:
    """The ranks of one of several trainings beside each other: the actor's, where a critic's are the others.

    The one that is recorded is the largest: which of them begins first is chance.

    Raises:
        ReproError: nothing tells which one it is, or the others are not as many.
    """
    (size, first), *rest = _by_size(ranks)
    if not rest or size == rest[0][0]:
        raise ReproError(
            f"resources.other_ranks = {others}, but nothing tells which training is the one to record: "
            + (f"two have {size} elements each; trace one by a command of its own" if rest else "there is one alone")
        )
    if (count := len(ranks) - len(first)) != others:
        raise ReproError(f"{count} processes trained beside the largest training: resources.other_ranks = {others}")
    return first


def one_at_a_time(ranks: Sequence[_Rank]) -> str:
    """How to go on where several processes trained as one rank."""
    (size, first), *rest = _by_size(ranks)
    if not rest or size == rest[0][0]:
        return "trace one training by a command of its own, or let one process make all"
    return (
        "trace one program at a time, or say in a case that another training runs beside it: "
        f"resources.other_ranks = {len(ranks) - len(first)}"
    )
