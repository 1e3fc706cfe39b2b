"""Ray shows a line that several ranks print only once."""

from __future__ import annotations

from collections.abc import Iterator

from repro.doctor.artefacts.kinds import Launch
from repro.doctor.facts.launches import ranks, seen
from repro.doctor.rule import Found, Rule, Where

__all__ = ["RULE"]

_NAME = "RAY_DEDUP_LOGS"


def _check(launch: Launch) -> Iterator[Found]:
    variable, world = seen(launch, _NAME), ranks(launch)
    if not launch.submitted or world == 1 or (variable is not None and variable.value == "0"):
        return
    where = variable.where if variable else Where(str(launch.path), item=_NAME)
    count = f" of {world} ranks" if world else ""
    yield Found(f"{_NAME} is not 0: lines{count} that look alike are shown once", where)


RULE = Rule(
    id="ray-dedup",
    title="RAY_DEDUP_LOGS is not 0",
    inputs=(Launch,),
    severity="note",
    certainty="certain",
    why="The rank whose line differs, or stops coming, is not seen in the job's output.",
    cure="RAY_DEDUP_LOGS=0 in the runtime environment while looking for a fault.",
    sources=("Miles guide: Debugging",),
    check=_check,
)
