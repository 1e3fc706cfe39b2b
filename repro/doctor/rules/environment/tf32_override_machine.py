"""Switches of a machine that make fp32 less than fp32, where the launch leaves them."""

from __future__ import annotations

from collections.abc import Iterable

from repro.doctor.artefacts.kinds import Launch, Machine
from repro.doctor.facts.asked import determinism
from repro.doctor.facts.launches import seen
from repro.doctor.rule import Found, Rule, Where
from repro.doctor.rules.environment.tf32_override import CURE, NAMES, SOURCES, WHY, tf32

__all__ = ["RULE"]


def _check(machine: Machine, launch: Launch | None) -> Iterable[Found]:
    for name in NAMES:
        set_there = launch is not None and seen(launch, name) is not None
        if not set_there and (machine.variables or {}).get(name) == "1":
            yield tf32(name, Where(machine.source, item=name, value="1"), determinism(launch))


RULE = Rule(
    id="tf32-override-machine",
    title="The machine turns fp32 into TF32",
    inputs=(Machine,),
    uses=(Launch,),
    severity="note",
    certainty="certain",
    why=WHY,
    cure=CURE,
    sources=SOURCES,
    check=_check,
)
