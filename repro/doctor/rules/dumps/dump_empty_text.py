"""No prompt and no response is empty."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from repro.doctor.artefacts.kinds import Rollout
from repro.doctor.rule import Found, Rule, Severity, Where

__all__ = ["RULE"]


def _check(rollout: Rollout) -> Iterator[Found]:
    dump = rollout.dump
    for field in ("prompt", "response"):
        held = [i for i, missing in enumerate(dump.missing) if field not in missing]
        empty = [
            i for i in held
            if _blank(dump.samples[i].get(field)) and (field == "prompt" or dump.samples[i]["response_length"] > 0)
        ]  # fmt: skip
        if not empty:
            continue
        # a program that never sets the text is another thing than a row of the data that is empty
        never = len(empty) == len(held) > 1
        severity: Severity | None = "note" if never else None
        what = "no sample has" if never else f"{len(empty)} of {len(held)} samples have no"
        detail = "" if field == "prompt" else ", though they have response tokens"
        yield Found(
            f"{what} text in {field}{detail}",
            Where(
                str(rollout.path), item=f"{field} of sample {empty[0]}", value=repr(dump.samples[empty[0]][field])[:80]
            ),
            severity=severity,
        )


def _blank(value: Any) -> bool:
    """Whether there is nothing in a prompt or response: no text, or a chat none of whose messages has any."""
    if isinstance(value, str):
        return not value.strip()
    if isinstance(value, list) and all(isinstance(one, dict) for one in value):
        return not any(one.get("content") or one.get("tool_calls") for one in value)
    return False


RULE = Rule(
    id="dump-empty-text",
    title="Samples with an empty prompt, or with response tokens and no text",
    inputs=(Rollout,),
    severity="warning",
    certainty="certain",
    why="rewards are computed from the text: an empty one is scored as a wrong answer, and an empty prompt teaches "
    "noise",
    cure="look at the rows of the prompt data (--input-key), and at the generate function, which must set "
    "sample.response",
    sources=("slime guide: Troubleshooting (verify no empty prompts or responses)",),
    check=_check,
)
