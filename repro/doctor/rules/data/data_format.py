"""Lines of prompt data that are no JSON objects."""

from __future__ import annotations

from collections.abc import Iterable

from repro.doctor.artefacts.kinds import Launch, PromptData
from repro.doctor.facts.prompt_survey import keys_of, survey
from repro.doctor.rule import Found, Rule, Severity, Where

__all__ = ["RULE"]

_SHOWN = 5


def _check(data: PromptData, launch: Launch | None) -> Iterable[Found]:
    keys = keys_of(launch, data)
    seen = survey(data, keys.prompt, keys.label)
    for line, reason in list(seen.broken.items())[:_SHOWN]:
        fatal = reason.startswith(("byte ", "a "))
        severity: Severity = "error" if fatal else "warning"
        what = "the loader fails on it" if fatal else "the loader prints that and goes on without the row"
        yield Found(f"{reason}: {what}", Where(str(data.path), line, "row"), severity)
    if seen.bad > _SHOWN:
        where = Where(str(data.path), item="rows", value=str(seen.bad))
        yield Found(f"{seen.bad} lines of {seen.bad + seen.rows} are no JSON objects", where, "warning")
    if not seen.rows and seen.whole:
        yield Found("there is no row in it", Where(str(data.path)), "error")


RULE = Rule(
    id="data-format",
    title="A line of the prompt data is no JSON object, or no text",
    inputs=(PromptData,),
    uses=(Launch,),
    severity="warning",
    certainty="certain",
    why="slime and Miles drop a line that is no JSON, so the data is another than meant, and fail on other lines "
    "before the first rollout",
    cure="write one object a line in UTF-8 without a byte order mark: json.dumps(row) of every row",
    sources=(
        "slime guide: Troubleshooting",
        "THUDM/slime@624b824a8 slime/utils/data.py (read_file)",
        "radixark/miles@31f1ca961 miles/utils/data.py (read_file)",
    ),
    check=_check,
)
