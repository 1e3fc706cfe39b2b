"""Prompts without text."""

from __future__ import annotations

from collections.abc import Iterable

from repro.doctor.artefacts.kinds import Launch, PromptData
from repro.doctor.facts.prompt_survey import keys_of, survey
from repro.doctor.rule import Found, Rule, Where

__all__ = ["RULE"]


def _check(data: PromptData, launch: Launch | None) -> Iterable[Found]:
    keys = keys_of(launch, data)
    seen = survey(data, keys.prompt, keys.label)
    if seen.empties:
        yield Found(
            f"{seen.empties} of {seen.prompts} prompts are empty ({seen.empties / seen.prompts:.1%})",
            Where(str(data.path), seen.empty[0], seen.prompt or "", "''"),
        )


RULE = Rule(
    id="data-empty-prompt",
    title="A prompt is empty",
    inputs=(PromptData,),
    uses=(Launch,),
    severity="warning",
    certainty="certain",
    why="the model continues from nothing, its rewards are noise, and a group of them still takes part in the loss",
    cure="drop those rows",
    sources=("slime guide: Troubleshooting",),
    check=_check,
)
