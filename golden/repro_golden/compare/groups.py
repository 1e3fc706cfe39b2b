"""How parameters are put into an optimizer's groups, which is no number: whose rate it is shows in what they become."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence, Set
from typing import Literal

from repro_golden.compare.name_matching import content
from repro_golden.trace.families import file_of, of_group, setting_of, value_of
from repro_golden.trace.model import Row

__all__ = ["Difference", "other_settings", "regrouped_alike"]

Difference = Literal["value", "dtype", "shape", "missing", "added"]

_EACH = re.compile(r"(\w+?)(?:#1)*\[(?:.*\.)?(?:param_groups\.\*\.(?:lr|step)|base_lrs|_last_lr)\]")
"""Numbers in a file of which each group has one."""


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


def other_settings(rows_a: Sequence[Row], rows_b: Sequence[Row]) -> set[str]:
    """The signals of settings in a file of both sides that have another value, however many groups repeat a number.

    Where values lie is another number of groups too: it is named for those whose values are the same.
    """
    files = set[str | None].intersection(*({file_of(row.phase, row.name) for row in rows} for rows in (rows_a, rows_b)))
    settings = [
        {row.name: row for row in rows if setting_of(row.phase, row.name) and file_of(row.phase, row.name) in files}
        for rows in (rows_a, rows_b)
    ]
    one_sided = settings[0].keys() ^ settings[1].keys()
    changed = {
        name
        for name in settings[0].keys() & settings[1].keys()
        if content(settings[0][name]) != content(settings[1][name])
    }
    repeated = {name for name in changed if _one_repeated(settings[0][name], settings[1][name])}
    others = {setting_of("update", name) for name in changed if not _places(name)}
    moved = {name for name in changed if _places(name) and setting_of("update", name) in others}
    return one_sided | (changed - repeated - moved)


def _one_repeated(row: Row, other: Row) -> bool:
    """Whether two lists of numbers are one, repeated more often on either side; of texts a trace has a digest alone."""
    whole = bool(_numbers(row)) and bool(_numbers(other)) and row.dtype == other.dtype
    return whole and row.sketch + other.sketch == other.sketch + row.sketch


def _places(name: str) -> bool:
    of = value_of("update", name)
    return of is not None and of[1].startswith("places")


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
