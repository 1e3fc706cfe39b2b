"""The chat template is applied once: no rendered prompt stands inside a message."""

from __future__ import annotations

from collections.abc import Iterator

from repro.doctor.artefacts.kinds import Launch, Rollout, Tokenizer
from repro.doctor.facts.templates import verdicts
from repro.doctor.rule import Found, Rule, Severity, Where
from repro_golden.dumps.archive.bounds import shown

__all__ = ["RULE"]

_MOST = 0.5
_APPLY = "--apply-chat-template"


def _check(rollout: Rollout, tokenizer: Tokenizer, launch: Launch | None) -> Iterator[Found]:
    seen = verdicts(rollout, tokenizer)
    found = seen[1] if seen else []
    nested = [one for one in found if one[1] == "twice"]
    if not nested:
        return
    severity: Severity = "error" if len(nested) > _MOST * len(found) else "warning"
    given = launch is not None and launch.has(_APPLY)
    yield Found(
        f"the chat template is applied twice in {len(nested)} of {len(found)} prompts: a rendered prompt stands inside "
        "a user's message",
        Where(str(rollout.path), item=f"sample {nested[0][0]} prompt", value=shown(nested[0][2])),
        severity,
        cure=f"take {_APPLY} away, or give data whose prompts are messages" if given else "",
    )


_SOURCES = (
    "Miles guide: Debugging", "Miles FAQ", "slime guide: Debugging", "THUDM/slime@624b824a8 slime/utils/data.py:248",
)  # fmt: skip

RULE = Rule(
    id="chat-template-twice",
    title="A rendered prompt inside a message of a prompt (with the tokenizer's folder)",
    inputs=(Rollout, Tokenizer),
    uses=(Launch,),
    severity="error",
    certainty="certain",
    why="the model sees marks of turns where a question should stand, which it never saw in training: gradients "
    "grow, rewards fall",
    cure=f"give messages as data and {_APPLY}, or rendered text without it, not both",
    sources=_SOURCES,
    check=_check,
)
