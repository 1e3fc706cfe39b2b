"""Variables that guides name and that no code reads."""

from __future__ import annotations

from collections.abc import Iterator

from repro.doctor.artefacts.kinds import Launch
from repro.doctor.rule import Found, Rule

__all__ = ["RULE"]

_GHOSTS = {"SLIME_DEBUG": "--debug-rollout-only or --debug-train-only with --save-debug-rollout-data show more"}


def _check(launch: Launch) -> Iterator[Found]:
    for name, instead in _GHOSTS.items():
        if (variable := launch.env.get(name)) is not None and variable.origin != "unset":
            yield Found(f"{name} is set, and no code reads it", variable.where, cure=f"drop it: {instead}")


RULE = Rule(
    id="ghost-variable",
    title="Variables that guides name and nothing reads",
    inputs=(Launch,),
    severity="note",
    certainty="certain",
    why="it changes nothing: what it was meant to show will not be in the log",
    cure="drop it",
    sources=("slime guide: Troubleshooting", "THUDM/slime@624b824a8 (no use of SLIME_DEBUG)"),
    check=_check,
)
