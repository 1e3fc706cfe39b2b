"""Flags of a launch against those that the trainer's own parsers have."""

from __future__ import annotations

import difflib
from collections.abc import Iterator

from repro.doctor.artefacts.kinds import Launch, ParserDump
from repro.doctor.artefacts.parsers import ENGINE
from repro.doctor.facts.known_flags import ALSO, KNOWN
from repro.doctor.facts.near_flags import near_miss, twin
from repro.doctor.rule import Found, Rule

__all__ = ["RULE"]


def _check(launch: Launch, parsers: ParserDump) -> Iterator[Found]:
    for name, flag in launch.flags.items():
        if name in parsers.options or (not parsers.complete and twin(name) in parsers.options):
            continue
        if parsers.abbreviates and sum(option.startswith(name) for option in parsers.options) == 1:
            continue
        near = near_miss(name, sorted(parsers.options))
        cure = f"write {near}" if near else ""
        if not parsers.complete:
            # the rest of its flags, Megatron's and SGLang's, is registered elsewhere
            if near and name not in KNOWN | ALSO:
                message = f"{name} is not in {parsers.source}, which has {near}"
                yield Found(message, flag.where, "warning", "possible", cure)
            continue
        if name.startswith(ENGINE) and not any(option.startswith(ENGINE) for option in parsers.options):
            continue  # the engine's flags were not read at all there
        if near:
            yield Found(f"no parser of the trainer has {name}; it has {near}", flag.where, cure=cure)
            continue
        like = difflib.get_close_matches(name, sorted(parsers.options), 1, 0.7)
        message = f"no parser of the trainer has {name}" + (f"; the nearest is {like[0]}" if like else "")
        yield Found(message, flag.where, "warning")


RULE = Rule(
    id="flag-unknown",
    title="Flags that the trainer's own parsers do not have",
    inputs=(Launch, ParserDump),
    severity="error",
    certainty="certain",
    why="slime's parser ignores what it does not know: the run starts, without what the flag asks for",
    cure="correct or drop the flag; `python train.py --help` lists those that there are",
    sources=(
        "THUDM/slime@624b824a8 slime/backends/megatron_utils/arguments.py:195 (ignore_unknown_args=True)",
        "THUDM/slime@624b824a8 slime/utils/arguments.py:1607",
    ),
    check=_check,
)
