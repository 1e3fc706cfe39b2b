"""Gradients that are not clipped."""

from __future__ import annotations

from collections.abc import Iterator

from repro.doctor.artefacts.kinds import Launch
from repro.doctor.facts.launches import trains
from repro.doctor.rule import Found, Rule

__all__ = ["RULE"]


def _check(launch: Launch) -> Iterator[Found]:
    clip = launch.number("--clip-grad", 1.0)
    if clip is not None and clip <= 0 and trains(launch):
        yield Found(f"--clip-grad {launch.value('--clip-grad')} switches clipping off", launch.where("--clip-grad"))


RULE = Rule(
    id="clip-grad-off",
    title="--clip-grad is 0",
    inputs=(Launch,),
    severity="warning",
    certainty="certain",
    why="one bad batch moves the weights as far as its gradient says, and the loss explodes",
    cure="--clip-grad 1.0 (the default of the trainers)",
    sources=("slime guide: Troubleshooting", "THUDM/slime@624b824a8 slime/utils/arguments.py:878"),
    check=_check,
)
