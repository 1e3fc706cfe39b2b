"""A program's own order of a trace's steps, where several optimizers step in turn and a trace has them by their names.

Rounds are what a closing line says of a rank's order: ``[[times, [[offset, number], ...]], ...]``. So many rounds in a
row had, for each of the trace's steps, the place of the program's own in the round, and the number of its optimizer.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["Rounds", "round_around"]

Rounds = Sequence[tuple[int, Sequence[Sequence[int]]]]


def round_around(rounds: Rounds, index: int) -> tuple[int, Sequence[Sequence[int]]] | None:
    """The index of the first step of the round that a step is of, and its order; None where nothing tells.

    Args:
        rounds: Of a rank.
        index: Of the step.
    """
    first = 0
    for times, order in rounds:
        turn = (index - first) // len(order)
        if turn < times:
            return first + turn * len(order), order
        first += times * len(order)
    return None
