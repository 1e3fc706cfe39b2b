"""A flag given twice with different values."""

from __future__ import annotations

from collections.abc import Iterator

from repro.doctor.artefacts.kinds import Flag, Launch
from repro.doctor.rule import Found, Rule

__all__ = ["RULE"]


def _check(launch: Launch) -> Iterator[Found]:
    given: dict[str, list[Flag]] = {}
    for flag in launch.given:
        given.setdefault(flag.name, []).append(flag)
    for name, flags in given.items():
        values = list(dict.fromkeys(" ".join(flag.values) for flag in flags))
        if len(values) > 1:
            places = ", ".join(str(flag.where.line) for flag in flags if flag.where.line is not None)
            shown = " and then ".join(value[:60] or "nothing" for value in values[:4])
            message = f"{name} is given as {shown}: the last one holds" + (f" (lines {places})" if places else "")
            # a model's file with defaults, and launchers of Python, are made to be overridden
            meant = len({flag.where.path for flag in flags}) > 1 or launch.path.suffix == ".py"
            yield Found(message, flags[-1].where, "note" if meant else None)


RULE = Rule(
    id="flag-repeated",
    title="A flag that is given twice with different values",
    inputs=(Launch,),
    severity="warning",
    certainty="certain",
    why="the parser takes the last one: whoever reads or edits the first is misled",
    cure="keep one of them",
    sources=("Python: argparse, the action `store`",),
    check=_check,
)
