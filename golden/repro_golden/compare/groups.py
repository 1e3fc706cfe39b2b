"""How parameters are put into an optimizer's groups, which is no number: whose rate it is shows in what they become."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence, Set
from typing import Literal

from repro_golden.compare.name_matching import Content, Part, content
from repro_golden.trace.families import of_group, value_of
from repro_golden.trace.model import Row

__all__ = ["Difference", "by_state", "optimizer_of_state", "other_groups", "regrouped_alike"]

Difference = Literal["value", "dtype", "shape", "missing", "added"]

_EACH = re.compile(r"(\w+?)(?:#1)*\[(?:.*\.)?(?:param_groups\.\*\.(?:lr|step)|base_lrs|_last_lr)\]")
"""Numbers in a file of which each group has one."""

_IN_STATE = re.compile(r"(saved/[^/]+/(?:part\.\d+/)?)((?:.*\.)?state\.\d+)(\..+)", re.DOTALL)
"""Of an optimizer in a file, which has the state of its parameters by their places in its groups."""
_MEMBERS = re.compile(r"\w+(?:#1)*\[((?:.*\.)?)param_groups\.\*\.params\]")
"""Which parameters its groups have."""
_LISTED = re.compile(r"(?<![^.])\d+(?=\.)")
"""A place in a list, in what leads to something."""


def by_state(row: Row) -> Part | None:
    """The place of a parameter in an optimizer's groups, under which a file has its state."""
    match = _IN_STATE.fullmatch(row.name) if row.phase == "update" and row.name.startswith("saved/") else None
    return match and Part(match[1], match[2], match[3], match[1] + match[3])


def optimizer_of_state(part: str) -> str:
    """What leads to the optimizer in a file that a part of `by_state` is of, as `other_groups` has it."""
    return _LISTED.sub("*", part.rpartition("state.")[0])


def other_groups(rows_a: Iterable[Row], rows_b: Iterable[Row]) -> set[str]:
    """What leads to an optimizer in a file (``opt.``) whose groups have other parameters on either side of a step.

    Only then a place in them is another parameter's: with the same groups, states that changed places are a change.
    """
    sides: tuple[dict[str, Content], ...] = ({}, {})
    for rows, members in zip((rows_a, rows_b), sides, strict=True):
        for row in rows:
            if (of := value_of(row.phase, row.name)) and _MEMBERS.fullmatch(of[1]):
                members[row.name] = content(row)
    both = [name for name in sides[0].keys() & sides[1].keys() if sides[0][name] != sides[1][name]]
    return {match[1] for name in both if (match := _MEMBERS.search(name))}


def regrouped_alike(
    differences: Iterable[tuple[Difference, Row, Row | None]], rows_a: Sequence[Row], rows_b: Sequence[Row]
) -> list[tuple[Difference, Row, Row | None]]:
    """Those differences that are more than another number of groups, at rates that both sides have.

    Args:
        differences: Of two versions of a step.
        rows_a: The baseline's rows.
        rows_b: The other version's.
    """
    rates = _rates(rows_a), _rates(rows_b)
    return [entry for entry in differences if not _repeated(*entry[:2], *rates) and not _listed_alike(*entry)]


def _rates(rows: Iterable[Row]) -> set[tuple[object, ...]]:
    return {_rate(row) for row in rows} - {()}


def _rate(row: Row) -> tuple[object, ...]:
    """A number of an optimizer's group and its value, whichever group that is; empty for any other signal."""
    parts = of_group(row.phase, row.name)
    if parts is None:
        return ()
    before, name, rank = parts
    return before, name.partition("/")[0] if name.startswith("lr") else "step", rank, content(row)


def _repeated(kind: Difference, row: Row, rates_a: Set[object], rates_b: Set[object]) -> bool:
    """Whether one side alone has a group, with a rate that its optimizer has on the other side too."""
    return kind in ("missing", "added") and _rate(row) in (rates_b if kind == "missing" else rates_a)


def _listed_alike(kind: Difference, row: Row, other: Row | None) -> bool:
    """Whether a file has the same numbers for more groups on one side, or tells where these lie."""
    of = value_of(row.phase, row.name) if kind == "shape" else None
    match = of and _EACH.fullmatch(of[1])
    if not match or other is None:
        return False
    return match[1] == "places" or (bool(numbers := _numbers(row)) and numbers == _numbers(other))


def _numbers(row: Row) -> set[bytes]:
    """The bytes of each number, where a sketch has all of them; none elsewhere."""
    count = math.prod(row.shape)
    size = len(row.sketch) // count if count else 0
    whole = size and size * count == len(row.sketch) and row.dtype in ("float64", "int64") and size == 8
    return {row.sketch[at : at + size] for at in range(0, len(row.sketch), size)} if whole else set()
