"""Prompt data and reward functions."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from repro.doctor.artefacts.checkpoints.tokenizer import vocabulary
from repro.doctor.artefacts.kinds import Launch, PromptData, RewardFunction, Rollout, Tokenizer
from repro.doctor.artefacts.prompts import LABELS, PROMPT_KEYS
from repro.doctor.facts.launches import absent, open_ended
from repro.doctor.facts.samples.prompt_survey import ROWS, Keys, Survey, Tally, keys_of, survey, text_of
from repro.doctor.facts.sources import MILES, SLIME, SLIME_ARGS
from repro_golden.base.checks import Certainty, Found, Severity, Where, rule
from repro_golden.base.errors import NotVerifiableError, ReproError


@rule(
    title="Prompts hold a chat template's markers, and the template would be applied again",
    severity="error",
    certainty="likely",
    why="the model sees turns inside a turn, which it was never trained on: most reports of exploding gradients come "
    "from this",
    fix="remove --apply-chat-template, or store plain messages in the data",
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
            fix = "leave --apply-chat-template away with this file"
            yield Found(f"{message}: they are templated already", where, "note", "likely", fix)
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
    fix="keep one row of each prompt, unless the weights are meant",
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
    fix="drop those rows, or fill the label",
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
    fix="drop those rows",
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
    fix="write one object a line in UTF-8 without a byte order mark: json.dumps(row) of every row",
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
    fix = f"{flag} {near}" if near else ""
    return Found(f"{message}, and {rows} (rows have {others})", where, severity, certainty, fix)


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
            fix="write prompts as text or as messages",
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
    fix="give --input-key and --label-key as the rows have them",
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
    fix="lower --rollout-batch-size, or give more prompts",
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
    fix="raise --rollout-max-prompt-len (and the context), or accept that they are left out",
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


_MOST = 32
_ENOUGH = 8
"""Different responses from which on one and the same reward is told."""
_CLOSE = 1e-6
"""Relative: rewards that a dump holds as fp32 differ by less."""


def _values(
    function: RewardFunction,
    rollout: Rollout,
    samples: Sequence[Mapping[str, Any]],
    rewards: Sequence[Any],
    key: str | None,
    launch: Launch | None,
) -> Iterator[Found]:
    """Rewards that no trainer can use: each kind once."""
    reported: set[str] = set()
    for sample, reward in zip(samples, rewards, strict=True):
        value = reward.get(key) if isinstance(reward, Mapping) and key else reward
        if isinstance(reward, Mapping) and key and key not in reward:
            what = f"returns no {key!r}, which --reward-key names: its keys are {', '.join(map(repr, reward))}"
        elif isinstance(value, Mapping):
            what = "returns a dict, and --reward-key is not given" if _needs_key(launch) else ""
        elif not isinstance(value, (int, float)):
            what = f"returns {'None' if value is None else 'a ' + str(getattr(value, 'kind', type(value).__name__))}"
        else:
            what = "" if math.isfinite(value) else f"returns {value}"
        if what and what not in reported:
            reported.add(what)
            yield Found(f"{function.name} {what}", _where(rollout, sample, value))


def _needs_key(launch: Launch | None) -> bool:
    """Whether a dict is of no use: no flag says which of its numbers counts, or makes one of it."""
    flags = ("--reward-key", "--custom-reward-post-process-path")
    return launch is not None and not open_ended(launch) and not launch.has(*flags)


def _repeats(
    function: RewardFunction,
    rollout: Rollout,
    samples: Sequence[Mapping[str, Any]],
    once: Sequence[Any],
    again: Sequence[Any],
) -> Iterator[Found]:
    differ = [k for k in range(len(samples)) if not _same(once[k], again[k])]
    if differ:
        k = differ[0]
        yield Found(
            f"{function.name} gives {_shown(once[k])}, then {_shown(again[k])} for the same response "
            f"({len(differ)} of {len(samples)} samples)",
            _where(rollout, samples[k], once[k]), "warning", "certain",
            "seed what it draws, sort what it reads from sets, or ask its judge at temperature 0",
        )  # fmt: skip


def _meaning(
    function: RewardFunction,
    rollout: Rollout,
    samples: Sequence[Mapping[str, Any]],
    numbers: Sequence[float | None],
    again: Sequence[Any],
    once: Sequence[Any],
    key: str | None,
) -> Iterator[Found]:
    """Rewards that teach nothing, and rewards other than those that the run recorded."""
    responses = {sample["response"] for sample in samples}
    if len(responses) >= _ENOUGH and len(set(numbers)) == 1 and numbers[0] is not None:
        yield Found(
            f"{function.name} gives {numbers[0]:g} to all of {len(responses)} different responses",
            _where(rollout, samples[0], numbers[0]), "warning", "possible",
            "check that it reads the right label (--label-key), and what it parses of a response",
        )  # fmt: skip
    stable = [k for k in range(len(samples)) if _same(once[k], again[k])]
    recorded = {k: _number(samples[k].get("reward"), key) for k in stable}
    moved = [k for k, was in recorded.items() if _differ(was, numbers[k])]
    if moved:
        k = moved[0]
        yield Found(
            f"{function.name} gives {numbers[k]:g}, and the dump recorded {recorded[k]:g} "
            f"({len(moved)} of {len(stable)} samples)",
            _where(rollout, samples[k], numbers[k]), "warning", "likely",
            "it has changed since, reads arguments of the trainer, or is not the one that the run used",
        )  # fmt: skip


def _differ(was: float | None, now: float | None) -> bool:
    return was is not None and now is not None and not math.isclose(was, now, rel_tol=_CLOSE, abs_tol=_CLOSE)


def _number(value: Any, key: str | None) -> float | None:
    if isinstance(value, Mapping):
        value = value.get(key) if key else value.get("score")
    return float(value) if isinstance(value, (int, float)) and math.isfinite(value) else None


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return a.keys() == b.keys() and all(_same(a[key], b[key]) for key in a)
    both_nan = isinstance(a, float) and isinstance(b, float) and math.isnan(a) and math.isnan(b)
    return both_nan or bool(a == b)


def _shown(value: Any) -> str:
    return f"{value:g}" if isinstance(value, (int, float)) else repr(value)[:80]


def _where(rollout: Rollout, sample: Mapping[str, Any], value: Any) -> Where:
    return Where(str(rollout.path), item=f"reward of sample {sample.get('index')}", value=_shown(value))


@rule(
    title="The reward function, called on recorded responses, fails or says nothing",
    severity="error",
    certainty="certain",
    why="the reward is all that the policy learns from: what is constant, random or not finite teaches nothing",
    fix="correct the function, and try it again: repro doctor DUMP --reward MODULE:FUNCTION",
    sources=(
        "slime guide: Troubleshooting",
        f"{SLIME} slime/rollout/rm_hub/__init__.py (async_rm)",
        f"{MILES} miles/rollout/rm_hub/__init__.py",
    ),
)
def _reward_function(function: RewardFunction, rollout: Rollout, launch: Launch | None) -> Iterable[Found]:
    samples = [sample for sample in rollout.dump.samples if isinstance(sample.get("response"), str)]
    samples = samples[:: max(1, -(-len(samples) // _MOST))]
    if not samples:
        return
    try:
        once = function.score(samples)
        again = function.score(samples)
    except NotVerifiableError as error:
        yield Found(f"not judged: {error}", Where(item=function.name), "note", fix="test it where it has its arguments")
        return
    except ReproError as error:
        yield Found(str(error), Where(item=function.name))
        return
    key = launch.value("--reward-key") if launch else None
    wrong = list(_values(function, rollout, samples, once, key, launch))
    yield from wrong
    yield from _repeats(function, rollout, samples, once, again)
    if not wrong:
        yield from _meaning(function, rollout, samples, [_number(reward, key) for reward in once], again, once, key)
