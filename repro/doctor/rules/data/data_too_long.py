"""Prompts longer than what the launch lets through."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from repro.doctor.artefacts.kinds import Launch, PromptData, Tokenizer
from repro.doctor.facts.prompt_survey import ROWS, Survey, keys_of, survey, text_of
from repro.doctor.rule import Found, Rule, Where

__all__ = ["RULE"]

_PER_TOKEN = 4.0
"""Characters of a token in English; Chinese has fewer and code has more, so only what is far beyond is told."""
_FAR = 1.5

_LEAST = 1 / 3
"""A character is three tokens at most, so shorter texts need no tokenizer."""
_COUNTED = 20_000
"""Prompts whose tokens are counted."""


class _Long(NamedTuple):
    """Prompts beyond the limit: how many, and the longest one's line, characters and tokens."""

    prompts: int
    line: int
    characters: int
    tokens: float
    exact: bool


def _check(data: PromptData, launch: Launch, tokenizer: Tokenizer | None) -> Iterable[Found]:
    keys = keys_of(launch, data)
    flag = "--eval-max-prompt-len" if keys.evaluation else "--rollout-max-prompt-len"
    filtered = launch.has(flag)
    if not filtered:
        flag = "--rollout-max-context-len"
    limit = launch.number(flag)
    if keys.prompt is None or not limit or limit <= 0:
        return
    seen = survey(data, keys.prompt, keys.label)
    count = _counter(tokenizer)
    long = _counted(data, seen, keys.prompt, limit, count) if count else _estimated(seen, limit)
    if long is None:
        return
    said = "are dropped before training" if filtered else "leave no room for a response"
    yield Found(
        f"{long.prompts} of {seen.prompts} prompts are {'' if long.exact else 'far '}beyond {flag} {limit:.0f}, the "
        f"longest of {'' if long.exact else 'about '}{long.tokens:.0f} tokens: they {said}",
        Where(str(data.path), long.line, keys.prompt, f"{long.characters} characters"),
        "warning" if long.prompts == len(seen.lines) or not filtered else None,
        "certain" if long.exact else None,
    )


def _estimated(seen: Survey, limit: float) -> _Long | None:
    long = [k for k, characters in enumerate(seen.characters) if characters > limit * _PER_TOKEN * _FAR]
    if not long:
        return None
    worst = max(long, key=lambda k: seen.characters[k])
    characters = seen.characters[worst]
    return _Long(len(long), seen.lines[worst], characters, characters / _PER_TOKEN, exact=False)


def _counted(data: PromptData, seen: Survey, key: str, limit: float, count: Callable[[str], int]) -> _Long | None:
    """By the tokenizer, without what the chat template adds."""
    candidates = {line for line, n in zip(seen.lines, seen.characters, strict=True) if n > limit * _LEAST}
    if not candidates or len(candidates) > _COUNTED:
        return _estimated(seen, limit)
    found: list[tuple[int, int, int]] = []
    for number, (line, row) in enumerate(data.rows()):
        if number >= ROWS:
            break
        if line in candidates and not isinstance(row, str):
            text = text_of(row.get(key))
            tokens = count(text)
            if tokens > limit:
                found.append((tokens, line, len(text)))
    if not found:
        return None
    tokens, line, characters = max(found)
    return _Long(len(found), line, characters, tokens, exact=True)


def _counter(tokenizer: Tokenizer | None) -> Callable[[str], int] | None:
    """Counts a text's tokens; None without a tokenizer that can be loaded."""
    if tokenizer is None:
        return None
    try:
        from tokenizers import Tokenizer as Fast
    except ImportError:
        return None
    try:
        fast = Fast.from_file(str(tokenizer.path / "tokenizer.json"))
    except Exception:  # noqa: BLE001 - it raises plain Exception for every kind of damage
        return None
    return lambda text: len(fast.encode(text, add_special_tokens=False).ids)


RULE = Rule(
    id="data-too-long",
    title="Prompts are longer than the launch lets through",
    inputs=(PromptData, Launch),
    uses=(Tokenizer,),
    severity="note",
    certainty="likely",
    why="the loader leaves them out, so another set is trained on than the file holds; without a limit the engine "
    "truncates or refuses them",
    cure="raise --rollout-max-prompt-len (and the context), or accept that they are left out",
    sources=("THUDM/slime@624b824a8 slime/utils/data.py (filter_long_prompt)",),
    check=_check,
)
