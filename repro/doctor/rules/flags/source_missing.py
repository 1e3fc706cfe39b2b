"""A file that a launch script sources and that is not there."""

from __future__ import annotations

from collections.abc import Iterator

from repro.doctor.artefacts.kinds import Launch
from repro.doctor.rule import Found, Rule, Severity

__all__ = ["RULE"]


def _check(launch: Launch) -> Iterator[Found]:
    for where in launch.missing:
        # a model file holds flags; what else lies elsewhere on the machine that trains mostly sets up an environment
        severity: Severity | None = None if "/models/" in where.value or not where.value.startswith("/") else "note"
        yield Found(f"{where.value[-160:]} is sourced, and is not there", where, severity)


RULE = Rule(
    id="source-missing",
    title="Files that a launch script sources and that are not there",
    inputs=(Launch,),
    severity="warning",
    certainty="likely",
    why="without the file the model's flags are missing, or the script ends at that line",
    cure="correct the path; scripts/models of the checkout has the trainers' own",
    sources=("THUDM/slime@624b824a8 scripts/low_precision/run-qwen3-4b-fp8.sh",),
    check=_check,
)
