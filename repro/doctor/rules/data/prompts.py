"""Prompt data: the file, its keys, its texts and lengths."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from repro.doctor.artefacts.checkpoints.tokenizer import vocabulary
from repro.doctor.artefacts.kinds import Launch, PromptData, Tokenizer
from repro.doctor.artefacts.prompts import LABELS, PROMPT_KEYS
from repro.doctor.facts.launches import absent, open_ended
from repro.doctor.facts.prompt_survey import ROWS, Keys, Survey, Tally, keys_of, survey, text_of
from repro.doctor.facts.sources import MILES, SLIME, SLIME_ARGS
from repro_golden.base.checks import Certainty, Found, Severity, Where, rule


@rule(
    title="Prompts hold a chat template's markers, and the template would be applied again",
    severity="error",
    certainty="likely",
    why="the model sees turns inside a turn, which it was never trained on: most reports of exploding gradients come "
    "from this",
    cure="remove --apply-chat-template, or store plain messages in the data",
    sources=("Miles FAQ", "Miles guide: Debugging"),
)
def _data_already_templated(data: PromptData, launch: Launch | None) -> Iterable[Found]:
    keys = keys_of(launch, data)
    seen = survey(data, keys.prompt, keys.label)
    if not seen.marked.count or keys.template is False:
        return
    line, marker = seen.marked.first[0]
    where = Where(str(data.path), line, seen.prompt or "", marker)
    share = seen.marked.count / seen.prompts
    message = f"{seen.marked.count} of {seen.prompts} prompts hold {marker} or its like"
    if not keys.template:
        if share > 0.5:
            cure = "leave --apply-chat-template away with this file"
            yield Found(f"{message}: they are templated already", where, "note", "likely", cure)
        return
    severity: Severity = "error" if share > 0.5 and keys.sure else "warning"
    yield Found(f"{message}, and --apply-chat-template is given: the template is applied twice", where, severity)


_SHARE = 0.01
"""Fewer than that are let pass: large collections hold a few."""


@rule(
    title="Prompts stand in the data more than once",
    severity="note",
    certainty="certain",
    why="they weigh more than others, and --n-samples-per-prompt already samples each several times",
    cure="keep one row of each prompt, unless the weights are meant",
    sources=("slime guide: Troubleshooting",),
)
def _data_duplicate_prompts(data: PromptData, launch: Launch | None) -> Iterable[Found]:
    keys = keys_of(launch, data)
    seen = survey(data, keys.prompt, keys.label)
    repeats = seen.again.count
    if not repeats or repeats < _SHARE * seen.prompts:
        return
    line, first = seen.again.first[0]
    yield Found(
        f"{repeats} of {seen.prompts} prompts stand in the file before ({repeats / seen.prompts:.1%})",
        Where(str(data.path), line, seen.prompt or "", f"as line {first}"),
        "warning" if repeats * 2 > seen.prompts else None,
    )


@rule(
    title="A label is empty",
    severity="warning",
    certainty="certain",
    why="a rule-based reward compares with nothing: every response to that prompt gets the same, mostly 0, and "
    "teaches nothing",
    cure="drop those rows, or fill the label",
    sources=("slime guide: Troubleshooting", "Miles guide: Debugging"),
)
def _data_empty_label(data: PromptData, launch: Launch | None) -> Iterable[Found]:
    keys = keys_of(launch, data)
    if launch is not None and keys.label is None:
        return  # no label is read
    seen = survey(data, keys.prompt, keys.label)
    labelled, blanks = seen.rows - seen.unlabelled.count, seen.blank.count
    if blanks and labelled:
        read = keys.label is not None and keys.sure
        yield Found(
            f"{blanks} of {labelled} labels are empty ({blanks / labelled:.1%})",
            Where(str(data.path), seen.blank.first[0], seen.label or ""),
            "warning" if read else "note",
        )


@rule(
    title="A prompt is empty",
    severity="warning",
    certainty="certain",
    why="the model continues from nothing, its rewards are noise, and a group of them still takes part in the loss",
    cure="drop those rows",
    sources=("slime guide: Troubleshooting",),
)
def _data_empty_prompt(data: PromptData, launch: Launch | None) -> Iterable[Found]:
    keys = keys_of(launch, data)
    seen = survey(data, keys.prompt, keys.label)
    if empties := seen.empty.count:
        yield Found(
            f"{empties} of {seen.prompts} prompts are empty ({empties / seen.prompts:.1%})",
            Where(str(data.path), seen.empty.first[0], seen.prompt or "", "''"),
        )


_SHOWN = 5


@rule(
    title="A line of the prompt data is no JSON object, or no text",
    severity="warning",
    certainty="certain",
    why="slime and Miles drop a line that is no JSON, so the data is another than meant, and fail on other lines "
    "before the first rollout",
    cure="write one object a line in UTF-8 without a byte order mark: json.dumps(row) of every row",
    sources=(
        "slime guide: Troubleshooting",
        f"{SLIME} slime/utils/data.py (read_file)",
        f"{MILES} miles/utils/data.py (read_file)",
    ),
)
def _data_format(data: PromptData, launch: Launch | None) -> Iterable[Found]:
    keys = keys_of(launch, data)
    seen = survey(data, keys.prompt, keys.label)
    for line, reason in seen.broken.first[:_SHOWN]:
        fatal = reason.startswith(("byte ", "a "))
        severity: Severity = "error" if fatal else "warning"
        what = "the loader fails on it" if fatal else "the loader prints that and goes on without the row"
        yield Found(f"{reason}: {what}", Where(str(data.path), line, "row"), severity)
    if (bad := seen.broken.count) > _SHOWN:
        where = Where(str(data.path), item="rows", value=str(bad))
        yield Found(f"{bad} lines of {bad + seen.rows} are no JSON objects", where, "warning")
    if not seen.rows and seen.whole:
        yield Found("there is no row in it", Where(str(data.path)), "error")


def _lacking(
    launch: Launch,
    data: PromptData,
    seen: Survey,
    keys: Keys,
    flag: str,
    key: str,
    lines: Tally[int],
    common: Sequence[str],
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
    message = f"{flag} is {key!r}" if given else f"{flag} is not given, so {key!r} is read"
    rows = "no row has it" if lines.count == seen.rows else f"{lines.count} of {seen.rows} rows lack it"
    others = ", ".join(map(repr, list(seen.keys)[:8]))
    where = Where(str(data.path), lines.first[0], key)
    cure = f"{flag} {near}" if near else ""
    return Found(f"{message}, and {rows} (rows have {others})", where, severity, certainty, cure)


def _near(key: str, seen: Survey, common: Sequence[str]) -> str:
    """The key that was likely meant: one that most rows have."""
    have = [name for name, count in seen.keys.items() if count * 2 > seen.rows]
    same = [name for name in have if name.lower() == key.lower()]
    close = difflib.get_close_matches(key, have, 1, 0.75)
    usual = [name for name in common if name in have]
    return next(iter([*same, *close, *usual]), "")


def _shapes(data: PromptData, launch: Launch, seen: Survey, keys: Keys) -> Iterable[Found]:
    """Prompts that are neither text nor messages, and messages that no template joins."""
    if seen.odd.count:
        line, kind = seen.odd.first[0]
        yield Found(
            f"a prompt is a {kind}: it must be text, or a list of messages with role and content",
            Where(str(data.path), line, keys.prompt or ""),
            "error" if keys.sure else "warning",
            cure="write prompts as text or as messages",
        )
    custom = launch.has("--custom-generate-function-path", "--rollout-function-path")
    if keys.template is False and seen.kinds["messages"] and not custom and not open_ended(launch):
        yield Found(
            f"{seen.kinds['messages']} of {seen.prompts} prompts are lists of messages, and --apply-chat-template is "
            "not given",
            Where(str(data.path), seen.lines[0], keys.prompt or ""),
            "warning",
            "likely",
            "--apply-chat-template",
        )


@rule(
    title="Rows of the prompt data lack a key that the launch reads",
    severity="error",
    certainty="certain",
    why="without the label's key the loader fails with a KeyError; without the prompt's, every prompt is None",
    cure="give --input-key and --label-key as the rows have them",
    sources=(
        "Miles guide: Debugging",
        "slime guide: Troubleshooting",
        f"{SLIME_ARGS}:659 (default 'input')",
        f"{SLIME} slime/utils/data.py (Dataset)",
    ),
)
def _data_keys(data: PromptData, launch: Launch) -> Iterable[Found]:
    keys = keys_of(launch, data)
    if keys.prompt is None and keys.label is None:
        return
    seen = survey(data, keys.prompt, keys.label)
    if not seen.rows:
        return
    if keys.prompt is not None and seen.absent.count:
        yield _lacking(launch, data, seen, keys, "--input-key", keys.prompt, seen.absent, PROMPT_KEYS)
    if keys.label is not None and seen.unlabelled.count:
        yield _lacking(launch, data, seen, keys, "--label-key", keys.label, seen.unlabelled, LABELS)
    yield from _shapes(data, launch, seen, keys)


@rule(
    title="The data has fewer prompts than one rollout takes",
    severity="warning",
    certainty="certain",
    why="the data source goes round once at most: groups repeat within a rollout, or the batch is smaller than the "
    "steps expect",
    cure="lower --rollout-batch-size, or give more prompts",
    sources=(f"{SLIME} slime/rollout/data_source.py (get_samples)",),
)
def _data_too_few(data: PromptData, launch: Launch) -> Iterable[Found]:
    keys = keys_of(launch, data)
    batch = launch.number("--rollout-batch-size")
    if not keys.sure or keys.evaluation or not batch or batch <= 0:
        return
    seen = survey(data, keys.prompt, keys.label)
    if not seen.rows or not seen.whole or seen.rows >= batch:
        return
    short = seen.rows * 2 < batch
    what = "a rollout comes out short of it" if short else "a rollout holds some prompts twice"
    where = Where(str(data.path), item="rows", value=str(seen.rows))
    yield Found(f"{seen.rows} prompts, and --rollout-batch-size is {batch:.0f}: {what}", where)


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
    too_long: list[tuple[int, int, int]] = []
    for number, (line, row) in enumerate(data.rows()):
        if number >= ROWS:
            break
        if line in candidates and not isinstance(row, str):
            text = text_of(row.get(key))
            tokens = count(text)
            if tokens > limit:
                too_long.append((tokens, line, len(text)))
    if not too_long:
        return None
    tokens, line, characters = max(too_long)
    return _Long(len(too_long), line, characters, tokens, exact=True)


def _counter(tokenizer: Tokenizer | None) -> Callable[[str], int] | None:
    """Counts a text's tokens; None without a tokenizer that can be loaded."""
    fast = vocabulary(tokenizer.path, limit=math.inf) if tokenizer else None
    return None if fast is None else lambda text: len(fast.encode(text, add_special_tokens=False).ids)


@rule(
    title="Prompts are longer than the launch lets through",
    severity="note",
    certainty="likely",
    why="the loader leaves them out, so another set is trained on than the file holds; without a limit the engine "
    "truncates or refuses them",
    cure="raise --rollout-max-prompt-len (and the context), or accept that they are left out",
    sources=(f"{SLIME} slime/utils/data.py (filter_long_prompt)",),
)
def _data_too_long(data: PromptData, launch: Launch, tokenizer: Tokenizer | None) -> Iterable[Found]:
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
    consequence = "are dropped before training" if filtered else "leave no room for a response"
    yield Found(
        f"{long.prompts} of {seen.prompts} prompts are {'' if long.exact else 'far '}beyond {flag} {limit:.0f}, the "
        f"longest of {'' if long.exact else 'about '}{long.tokens:.0f} tokens: they {consequence}",
        Where(str(data.path), long.line, keys.prompt, f"{long.characters} characters"),
        "warning" if long.prompts == len(seen.lines) or not filtered else None,
        "certain" if long.exact else None,
    )
