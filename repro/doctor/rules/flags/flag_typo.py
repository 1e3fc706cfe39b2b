"""Flags that are nearly one that the trainers have, where no parser is at hand to ask."""

from __future__ import annotations

from collections.abc import Iterator

from repro.doctor.artefacts.kinds import Launch, ParserDump
from repro.doctor.facts.known_flags import ALSO, KNOWN
from repro.doctor.facts.near_flags import near_miss, twin
from repro.doctor.rule import Found, Rule

__all__ = ["RULE"]


def _check(launch: Launch, parsers: ParserDump | None) -> Iterator[Found]:
    if parsers is not None or not (launch.system or any(name in KNOWN for name in launch.flags)):
        return
    for name, flag in launch.flags.items():
        if name in KNOWN or name in ALSO or twin(name) in KNOWN:
            continue
        if near := near_miss(name, sorted(KNOWN)):
            yield Found(f"{name} is not known; {near} is", flag.where, cure=f"write {near}, if that is what is meant")


RULE = Rule(
    id="flag-typo",
    title="Flags that are nearly, but not quite, one of the trainers'",
    inputs=(Launch,),
    uses=(ParserDump,),
    severity="warning",
    certainty="likely",
    why="slime's parser ignores what it does not know: the run starts, without what the flag asks for",
    cure="correct it. `python train.py --help > help.txt`, given to the doctor too, makes this certain",
    sources=(
        "THUDM/slime@624b824a8 slime/utils/arguments.py",
        "radixark/miles@31f1ca961 miles/utils/arguments.py",
        "THUDM/slime@624b824a8 slime/backends/megatron_utils/arguments.py:195 (ignore_unknown_args=True)",
    ),
    check=_check,
)
