"""Labels without content."""

from __future__ import annotations

from collections.abc import Iterable

from repro.doctor.artefacts.kinds import Launch, PromptData
from repro.doctor.facts.prompt_survey import keys_of, survey
from repro.doctor.rule import Found, Rule, Where

__all__ = ["RULE"]


def _check(data: PromptData, launch: Launch | None) -> Iterable[Found]:
    keys = keys_of(launch, data)
    if launch is not None and keys.label is None:
        return  # no label is read
    seen = survey(data, keys.prompt, keys.label)
    labelled = seen.rows - seen.lacks_label
    if seen.blanks and labelled:
        read = keys.label is not None and keys.sure
        yield Found(
            f"{seen.blanks} of {labelled} labels are empty ({seen.blanks / labelled:.1%})",
            Where(str(data.path), seen.blank[0], seen.label or ""),
            "warning" if read else "note",
        )


RULE = Rule(
    id="data-empty-label",
    title="A label is empty",
    inputs=(PromptData,),
    uses=(Launch,),
    severity="warning",
    certainty="certain",
    why="a rule-based reward compares with nothing: every response to that prompt gets the same, mostly 0, and teaches "
    "nothing",
    cure="drop those rows, or fill the label",
    sources=("slime guide: Troubleshooting", "Miles guide: Debugging"),
    check=_check,
)
