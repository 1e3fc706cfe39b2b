"""The chat template is applied at all."""

from __future__ import annotations

import re
from collections.abc import Iterator

from repro.doctor.artefacts.kinds import Launch, Rollout, Tokenizer
from repro.doctor.facts.templates import foreign, verdicts
from repro.doctor.rule import Found, Rule, Where
from repro_golden.dumps.archive.bounds import shown

__all__ = ["RULE"]

_MOST = 0.5
_INSTRUCT = re.compile(r"instruct|chat|(?:^|[-_/])it(?:[-_/]|$)|think", re.IGNORECASE)
_APPLY = "--apply-chat-template"


def _check(rollout: Rollout, tokenizer: Tokenizer, launch: Launch | None) -> Iterator[Found]:
    seen = verdicts(rollout, tokenizer)
    if seen is None:
        return
    marks, found = seen
    bare = [one for one in found if one[1] in ("missing", "other")]
    if not bare or len(bare) <= _MOST * len(found):
        return
    model = (launch.value("--hf-checkpoint") if launch else None) or ""
    instruct = bool(_INSTRUCT.search(model) or _INSTRUCT.search(tokenizer.path.name))
    place, how, text = bare[0]
    other = foreign(text, marks) if how == "other" else None
    what = f"have the marks of another template ({other})" if other else "have no chat template applied"
    yield Found(
        f"{len(bare)} of {len(found)} prompts {what}: {shown(marks.opening)} of {tokenizer.path} is not in them",
        Where(str(rollout.path), item=f"sample {place} prompt", value=shown(text)),
        "warning" if instruct or other else "note",
        "likely" if instruct or other else "possible",
        f"render the data with this model's template, or give messages and {_APPLY}" if other else "",
    )


_SOURCES = (
    "Miles guide: Debugging", "Miles FAQ", "slime guide: Debugging", "THUDM/slime@624b824a8 slime/utils/data.py:248",
)  # fmt: skip

RULE = Rule(
    id="chat-template-missing",
    title="Prompts without the chat template applied (with the tokenizer's folder)",
    inputs=(Rollout, Tokenizer),
    uses=(Launch,),
    severity="warning",
    certainty="likely",
    why="an instruct model goes on with a bare question as with any text: answers wander, and hardly end",
    cure=f"add {_APPLY}, with messages as data (a text becomes one message of the user); a base model is right to "
    "be without",
    sources=_SOURCES,
    check=_check,
)
