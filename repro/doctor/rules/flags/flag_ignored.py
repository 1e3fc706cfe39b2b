"""Flags that a process was given and that none of its parsers took."""

from __future__ import annotations

from collections.abc import Iterator

from repro.doctor.artefacts.kinds import ParserDump
from repro.doctor.facts.near_flags import near_miss
from repro.doctor.rule import Found, Rule, Where

__all__ = ["RULE"]


def _check(parsers: ParserDump) -> Iterator[Found]:
    for name in parsers.ignored:
        near = near_miss(name, sorted(parsers.options))
        where = Where(str(parsers.path), item=name)
        if near:
            yield Found(
                f"the trainer was given {name} and ignored it; it has {near}", where, "error", cure=f"write {near}"
            )
        else:
            yield Found(f"the trainer was given {name} and ignored it", where)


RULE = Rule(
    id="flag-ignored",
    title="Flags that a run was given and its parsers ignored",
    inputs=(ParserDump,),
    severity="warning",
    certainty="certain",
    why="the run went on as if the flag were not there, and said nothing",
    cure="correct or drop the flag",
    sources=("THUDM/slime@624b824a8 slime/backends/megatron_utils/arguments.py:195 (ignore_unknown_args=True)",),
    check=_check,
)
