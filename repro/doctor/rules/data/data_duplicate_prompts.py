"""Prompts that come more than once."""

from __future__ import annotations

from collections.abc import Iterable

from repro.doctor.artefacts.kinds import Launch, PromptData
from repro.doctor.facts.prompt_survey import keys_of, survey
from repro.doctor.rule import Found, Rule, Where

__all__ = ["RULE"]

_SHARE = 0.01
"""Fewer than that are let pass: large collections hold a few."""


def _check(data: PromptData, launch: Launch | None) -> Iterable[Found]:
    keys = keys_of(launch, data)
    seen = survey(data, keys.prompt, keys.label)
    if not seen.again or seen.repeats < _SHARE * seen.prompts:
        return
    line, first = seen.again[0]
    yield Found(
        f"{seen.repeats} of {seen.prompts} prompts stand in the file before ({seen.repeats / seen.prompts:.1%})",
        Where(str(data.path), line, seen.prompt or "", f"as line {first}"),
        "warning" if seen.repeats * 2 > seen.prompts else None,
    )


RULE = Rule(
    id="data-duplicate-prompts",
    title="Prompts stand in the data more than once",
    inputs=(PromptData,),
    uses=(Launch,),
    severity="note",
    certainty="certain",
    why="they weigh more than others, and --n-samples-per-prompt already samples each several times",
    cure="keep one row of each prompt, unless the weights are meant",
    sources=("slime guide: Troubleshooting",),
    check=_check,
)
