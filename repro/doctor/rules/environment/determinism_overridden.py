"""A flag or variable of the determinism set that is set twice, to different ends."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

from repro.doctor.artefacts.kinds import Flag, Launch, Variable
from repro.doctor.facts.determinism import ENGINES, SET, TRAINER, TRUE_ON_POLICY, asked
from repro.doctor.rule import Found, Rule, Where

__all__ = ["RULE"]

_FLAGS = (
    TRAINER, ENGINES, TRUE_ON_POLICY, "--attention-backend", "--sglang-attention-backend", "--attention-dropout",
    "--hidden-dropout", "--seed", "--rollout-seed",
)  # fmt: skip
_VARIABLES = (*SET, "PYTHONHASHSEED")


def _twin(name: str) -> str:
    return f"--no-{name[2:]}"


def _place(where: Where) -> str:
    return f"line {where.line}" if where.line is not None else "before"


def _check(launch: Launch) -> Iterator[Found]:
    if asked(launch) is None and not any(flag.name in (TRAINER, ENGINES) for flag in launch.given):
        return
    for name in _FLAGS:
        yield from _flag([flag for flag in launch.given if flag.name in (name, _twin(name))])
    for name in _VARIABLES:
        yield from _variable(name, [variable for given, variable in launch.settings if given == name])


def _flag(given: Sequence[Flag]) -> Iterator[Found]:
    for before, after in pairwise(given):
        if (before.name, before.values) == (after.name, after.values):
            continue
        old, new = " ".join((before.name, *before.values)), " ".join((after.name, *after.values))
        yield Found(f"{new[:80]} overrides {old[:80]} ({_place(before.where)}): the last one counts", after.where)


def _variable(name: str, settings: Sequence[Variable]) -> Iterator[Found]:
    for before, after in pairwise(settings):
        if before.origin == "unset" or (before.value, before.origin) == (after.value, after.origin):
            continue
        if after.origin == "unset":
            yield Found(f"{name}={before.value[:40]} ({_place(before.where)}) is removed again", after.where)
        elif before.value != after.value:
            message = f"{name}={after.value[:40]} overrides {before.value[:40]} ({_place(before.where)})"
            yield Found(message, after.where)


RULE = Rule(
    id="determinism-overridden",
    title="A flag or variable of the determinism set is overridden later",
    inputs=(Launch,),
    severity="warning",
    certainty="likely",
    why="the line that was written for determinism has no effect, and nothing says so",
    cure="keep one setting; of a variable, the one in the job's runtime environment",
    sources=("Miles guide: Debugging", "THUDM/slime@624b824a8 docs/en/advanced/reproducibility.md"),
    check=_check,
)
