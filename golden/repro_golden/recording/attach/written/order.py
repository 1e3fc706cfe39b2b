"""Between the order of a trace's steps and a program's own (`step_log.Order`): what is asked for has its name there."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from urllib.parse import quote

from repro_golden.trace.families import BESIDE, family, plain
from repro_golden.trace.model import dump_path
from repro_golden.trace.step_log import Order, Rounds

__all__ = ["IN_ORDER", "At", "as_met", "as_planted", "dump_name", "may_be", "take_dumps", "told_apart"]

At = tuple[int, str, str]
"""Step, phase and name of a signal."""
IN_ORDER = [[0, 0]]
"""A round of one step, of the first optimizer."""


def told_apart(phase: str, name: str, number: int) -> str:
    """The name in a trace of what the recorder reads in a step of the optimizer of a number."""
    begin = "start/" if name.startswith("start/") else ""
    if not number or not (begin or phase in ("grad", "update")):
        return name
    return f"{begin}optimizer.{number}/{name.removeprefix(begin)}"


def _read_as(phase: str, name: str, number: int) -> str:
    """The inverse of `told_apart`."""
    begin = "start/" if name.startswith("start/") else ""
    if not number or not (begin or phase in ("grad", "update")):
        return name
    return begin + name.removeprefix(begin).removeprefix(f"optimizer.{number}/")


def as_met(rounds: Rounds, first: int, at: At) -> At:
    """A signal of a trace as the recorder meets it in the program: the step in its own order, and the plain name.

    Args:
        rounds: Of the rank; of none, all steps are in the trace's order.
        first: The trace's first step.
        at: The signal in the trace.
    """
    step, phase, name = at
    if family(phase, name) in BESIDE:  # as it was after the step of a round that was made last
        return at
    whole_round = Order.read(rounds).around(step - first)
    if whole_round is None:
        return at
    begin, order = whole_round
    offset, number = order[step - first - begin]
    return first + begin + offset, phase, _read_as(phase, name, number)


def as_planted(orders: Sequence[Rounds], first: int, at: At) -> list[At]:
    """Where a change is planted so that it shows there: once for all ranks, or by rank where their orders differ.

    Args:
        orders: What the closing line says of the trace that the change is judged against: the rounds of each rank, or
            of all.
        first: The trace's first step.
        at: The signal in the trace.
    """
    if len(orders) < 2 or "@" in at[2]:
        return [as_met(orders[0] if orders else (), first, at)]
    met = [as_met(rounds, first, at) for rounds in orders]
    return [(step, phase, f"{name}@{rank}") for rank, (step, phase, name) in enumerate(met)]


def may_be(asked: At, met: At, optimizers: int) -> bool:
    """Whether a signal that the recorder meets may be one of a trace, whose order is known once a round has ended.

    Args:
        asked: The signal in the trace.
        met: As it is met.
        optimizers: How many there are: a round has at most one step of each.
    """
    if asked[1] != met[1] or abs(asked[0] - met[0]) >= optimizers:
        return False
    name = asked[2]
    begin = "start/" if name.startswith("start/") else ""
    return met[2] in (name, begin + plain(name.removeprefix(begin)))


def dump_name(at: At) -> str:
    """The name of the file of a signal's content, as it is met."""
    return f"{at[0]}-{at[1]}-{quote(at[2], safe='')}.bin"


def take_dumps(folders: Iterable[tuple[Path, Rounds]], out: Path, first: int, asked: Collection[At]) -> None:
    """Move what ranks wrote whole into a trace: of each signal the lowest rank's, so that two runs show one shard.

    Args:
        folders: Of each rank, with its rounds.
        out: The trace.
        first: Its first step.
        asked: The signals, as the trace names them.
    """
    for folder, rounds in folders if asked else ():
        for at in asked:
            path, target = folder / dump_name(as_met(rounds, first, at)), dump_path(out, *at)
            if path.is_file() and not target.exists():
                target.parent.mkdir(exist_ok=True)
                path.rename(target)
