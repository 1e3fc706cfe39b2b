"""Prompts that already went through a chat template."""

from __future__ import annotations

from collections.abc import Iterable

from repro.doctor.artefacts.kinds import Launch, PromptData
from repro.doctor.facts.prompt_survey import keys_of, survey
from repro.doctor.rule import Found, Rule, Severity, Where

__all__ = ["RULE"]


def _check(data: PromptData, launch: Launch | None) -> Iterable[Found]:
    keys = keys_of(launch, data)
    seen = survey(data, keys.prompt, keys.label)
    if not seen.marked or keys.template is False:
        return
    line, marker = next(iter(seen.marked.items()))
    where = Where(str(data.path), line, seen.prompt or "", marker)
    share = seen.marks / seen.prompts
    said = f"{seen.marks} of {seen.prompts} prompts hold {marker} or its like"
    if not keys.template:
        if share > 0.5:
            cure = "leave --apply-chat-template away with this file"
            yield Found(f"{said}: they are templated already", where, "note", "likely", cure)
        return
    severity: Severity = "error" if share > 0.5 and keys.sure else "warning"
    yield Found(f"{said}, and --apply-chat-template is given: the template is applied twice", where, severity)


RULE = Rule(
    id="data-already-templated",
    title="Prompts hold a chat template's markers, and the template would be applied again",
    inputs=(PromptData,),
    uses=(Launch,),
    severity="error",
    certainty="likely",
    why="the model sees turns inside a turn, which it was never trained on: most reports of exploding gradients come "
    "from this",
    cure="remove --apply-chat-template, or store plain messages in the data",
    sources=("Miles FAQ", "Miles guide: Debugging"),
    check=_check,
)
