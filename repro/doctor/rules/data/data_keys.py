"""Keys that a launch reads and rows do not have."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence

from repro.doctor.artefacts.kinds import Launch, PromptData
from repro.doctor.artefacts.prompts import LABELS, PROMPT_KEYS
from repro.doctor.facts.launches import absent, open_ended
from repro.doctor.facts.prompt_survey import Keys, Survey, keys_of, survey
from repro.doctor.rule import Certainty, Found, Rule, Severity, Where

__all__ = ["RULE"]


def _check(data: PromptData, launch: Launch) -> Iterable[Found]:
    keys = keys_of(launch, data)
    if keys.prompt is None and keys.label is None:
        return
    seen = survey(data, keys.prompt, keys.label)
    if not seen.rows:
        return
    if keys.prompt is not None and seen.lacks:
        yield _lacking(launch, data, seen, "--input-key", keys.prompt, seen.lacks, seen.absent, PROMPT_KEYS, keys)
    if keys.label is not None and seen.lacks_label:
        yield _lacking(launch, data, seen, "--label-key", keys.label, seen.lacks_label, seen.unlabelled, LABELS, keys)
    yield from _shapes(data, launch, seen, keys)


def _lacking(
    launch: Launch,
    data: PromptData,
    seen: Survey,
    flag: str,
    key: str,
    count: int,
    lines: Sequence[int],
    common: Sequence[str],
    keys: Keys,
) -> Found:
    """Rows without a key that is read."""
    given = launch.has(flag)
    severity: Severity = "error"
    certainty: Certainty = "certain"
    if not keys.sure:
        severity, certainty = "warning", "possible"
    elif not given:
        severity, certainty = absent(launch, "error")
    near = _near(key, seen, common)
    said = f"{flag} is {key!r}" if given else f"{flag} is not given, so {key!r} is read"
    rows = "no row has it" if count == seen.rows else f"{count} of {seen.rows} rows lack it"
    others = ", ".join(map(repr, list(seen.keys)[:8]))
    where = Where(str(data.path), lines[0] if lines else None, key)
    cure = f"{flag} {near}" if near else ""
    return Found(f"{said}, and {rows} (rows have {others})", where, severity, certainty, cure)


def _near(key: str, seen: Survey, common: Sequence[str]) -> str:
    """The key that was likely meant: one that most rows have."""
    have = [name for name, count in seen.keys.items() if count * 2 > seen.rows]
    same = [name for name in have if name.lower() == key.lower()]
    close = difflib.get_close_matches(key, have, 1, 0.75)
    usual = [name for name in common if name in have]
    return next(iter([*same, *close, *usual]), "")


def _shapes(data: PromptData, launch: Launch, seen: Survey, keys: Keys) -> Iterable[Found]:
    """Prompts that are neither text nor messages, and messages that no template joins."""
    if seen.odd:
        line, kind = next(iter(seen.odd.items()))
        yield Found(
            f"a prompt is a {kind}: it must be text, or a list of messages with role and content",
            Where(str(data.path), line, keys.prompt or ""),
            "error" if keys.sure else "warning",
            cure="write prompts as text or as messages",
        )
    custom = launch.has("--custom-generate-function-path") or launch.has("--rollout-function-path")
    if keys.template is False and seen.kinds["messages"] and not custom and not open_ended(launch):
        yield Found(
            f"{seen.kinds['messages']} of {seen.prompts} prompts are lists of messages, and --apply-chat-template is "
            "not given",
            Where(str(data.path), seen.lines[0], keys.prompt or ""),
            "warning",
            "likely",
            "--apply-chat-template",
        )


RULE = Rule(
    id="data-keys",
    title="Rows of the prompt data lack a key that the launch reads",
    inputs=(PromptData, Launch),
    severity="error",
    certainty="certain",
    why="without the label's key the loader fails with a KeyError; without the prompt's, every prompt is None",
    cure="give --input-key and --label-key as the rows have them",
    sources=(
        "Miles guide: Debugging",
        "slime guide: Troubleshooting",
        "THUDM/slime@624b824a8 slime/utils/arguments.py:659 (default 'input')",
        "THUDM/slime@624b824a8 slime/utils/data.py (Dataset)",
    ),
    check=_check,
)
