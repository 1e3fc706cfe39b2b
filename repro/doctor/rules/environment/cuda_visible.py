"""CUDA_VISIBLE_DEVICES that hides what the run needs."""

from __future__ import annotations

from collections.abc import Iterable

from repro.doctor.artefacts.kinds import Launch, Machine
from repro.doctor.facts.launches import known_text, seen
from repro.doctor.rule import Found, Rule, Where

__all__ = ["RULE"]

_NAME = "CUDA_VISIBLE_DEVICES"


def _check(machine: Machine, launch: Launch | None) -> Iterable[Found]:
    variable = seen(launch, _NAME) if launch else None
    text = known_text(variable) if variable else (machine.variables or {}).get(_NAME)
    if text is None:
        return
    place = variable.where if variable else Where(machine.source)
    where = Where(place.path, place.line, _NAME, text)
    entries = [one.strip() for one in text.split(",")] if text.strip() else []
    if not entries or entries[0] == "-1":
        if machine.gpus:
            yield Found(f"{_NAME}={text!r} hides all {machine.gpus} GPUs", where)
        return
    # what is not a number is a UUID or a part of a GPU
    numbers = [int(one) for one in entries if one.isdecimal() and len(one) < 9]
    beyond = [number for number in numbers if machine.gpus is not None and number >= machine.gpus]
    if beyond and machine.gpus:
        seen_ones = entries.index(str(beyond[0])) if str(beyond[0]) in entries else 0
        yield Found(
            f"{_NAME} names GPU {beyond[0]}, and the machine has {machine.gpus}: CUDA shows the {seen_ones} before it",
            where,
        )
    twice = sorted({number for number in numbers if numbers.count(number) > 1})
    if twice:
        yield Found(f"{_NAME} names GPU {twice[0]} twice: CUDA then shows none", where)


RULE = Rule(
    id="cuda-visible",
    title="CUDA_VISIBLE_DEVICES hides GPUs, or names some that are not there",
    inputs=(Machine,),
    uses=(Launch,),
    severity="warning",
    certainty="certain",
    why="CUDA ignores everything from the first entry on that it does not know, so Ray waits for GPUs that never come",
    cure="name each GPU once, from 0 to one less than `nvidia-smi -L` lists, or unset it",
    sources=("CUDA programming guide: CUDA_VISIBLE_DEVICES", "Miles FAQ"),
    check=_check,
)
