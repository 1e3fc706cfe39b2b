"""NaN in losses and gradients goes by unseen."""

from __future__ import annotations

from collections.abc import Iterator

from repro.doctor.artefacts.kinds import Launch
from repro.doctor.facts.launches import trains
from repro.doctor.rule import Found, Rule

__all__ = ["RULE"]

_NAME = "--no-check-for-nan-in-loss-and-grad"


def _check(launch: Launch) -> Iterator[Found]:
    if launch.has(_NAME) and trains(launch):
        yield Found(f"{_NAME} is given: steps with NaN are skipped, not reported", launch.where(_NAME))


RULE = Rule(
    id="nan-check-disabled",
    title="--no-check-for-nan-in-loss-and-grad is given",
    inputs=(Launch,),
    severity="note",
    certainty="certain",
    why="the flag is a help for the moment: what makes the NaN (data, template, overflow) stays and costs steps",
    cure="remove it once the cause is found: chat template, empty samples, FP8 overflow",
    sources=("Miles FAQ",),
    check=_check,
)
