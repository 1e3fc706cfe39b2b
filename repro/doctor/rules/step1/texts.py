"""Templates and texts of the first rollout."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from repro.doctor.artefacts.kinds import Hit, Launch, Log, Rollout, Tokenizer
from repro.doctor.facts.curves import INSTRUCT
from repro.doctor.facts.samples.templates import foreign, verdicts
from repro.doctor.facts.samples.texts import (
    CLEAN,
    FRESH,
    SINGLE,
    began,
    garbled_where,
    judge,
    judged,
    response_tokens,
    single_character,
)
from repro.doctor.facts.sources import GUIDES, SLIME
from repro_golden.base.checks import Found, Severity, Where, rule
from repro_golden.base.errors import ReproError
from repro_golden.base.files import open_regular
from repro_golden.dumps.archive.bounds import shown
from repro_golden.dumps.rollout.files import RolloutDump

_MOST = 0.5
_APPLY = "--apply-chat-template"
_SOURCES = (
    "Miles guide: Debugging", "Miles FAQ", "slime guide: Debugging", "THUDM/slime@624b824a8 slime/utils/data.py:248",
)  # fmt: skip


@rule(
    title="Prompts without the chat template applied (with the tokenizer's folder)",
    severity="warning",
    certainty="likely",
    why="an instruct model goes on with a bare question as with any text: answers wander, and hardly end",
    fix=f"add {_APPLY}, with messages as data (a text becomes one message of the user); a base model is right to "
    "be without",
    sources=_SOURCES,
)
def _chat_template_missing(rollout: Rollout, tokenizer: Tokenizer, launch: Launch | None) -> Iterator[Found]:
    seen = verdicts(rollout, tokenizer)
    if seen is None:
        return
    marks, prompts = seen
    bare = [prompt for prompt in prompts if prompt[1] in ("missing", "other")]
    if not bare or len(bare) <= _MOST * len(prompts):
        return
    model = (launch.value("--hf-checkpoint") if launch else None) or ""
    instruct = bool(INSTRUCT.search(model) or INSTRUCT.search(tokenizer.path.name))
    place, how, text = bare[0]
    other = foreign(text, marks) if how == "other" else None
    what = f"have the marks of another template ({other})" if other else "have no chat template applied"
    yield Found(
        f"{len(bare)} of {len(prompts)} prompts {what}: {shown(marks.opening)} of {tokenizer.path} is not in them",
        Where(str(rollout.path), item=f"sample {place} prompt", value=shown(text)),
        "warning" if instruct or other else "note",
        "likely" if instruct or other else "possible",
        f"render the data with this model's template, or give messages and {_APPLY}" if other else "",
    )


@rule(
    title="A rendered prompt inside a message of a prompt (with the tokenizer's folder)",
    severity="error",
    certainty="certain",
    why="the model sees marks of turns where a question should stand, which it never saw in training: gradients grow,"
    " rewards fall",
    fix=f"give messages as data and {_APPLY}, or rendered text without it, not both",
    sources=_SOURCES,
)
def _chat_template_twice(rollout: Rollout, tokenizer: Tokenizer, launch: Launch | None) -> Iterator[Found]:
    seen = verdicts(rollout, tokenizer)
    prompts = seen[1] if seen else []
    nested = [prompt for prompt in prompts if prompt[1] == "twice"]
    if not nested:
        return
    severity: Severity = "error" if len(nested) > _MOST * len(prompts) else "warning"
    applied = launch is not None and launch.has(_APPLY)
    yield Found(
        f"the chat template is applied twice in {len(nested)} of {len(prompts)} prompts: a rendered prompt stands "
        "inside a user's message",
        Where(str(rollout.path), item=f"sample {nested[0][0]} prompt", value=shown(nested[0][2])),
        severity,
        fix=f"take {_APPLY} away, or give data whose prompts are messages" if applied else "",
    )


_LEAST = 4
_FIX = (
    "look for the line that says which checkpoint was loaded (fix --load, --ref-load); compare the engine's weights "
    "with the checkpoint's (--check-weight-update-equal), layer numbers at pipeline stages above all; then the chat "
    "template, buffers that SGLang releases, and the engine alone with --debug-rollout-only"
)
_WHY = (
    "weights were not loaded or are mapped to other layers, or the prompts are not in the model's form: rewards of "
    "noise train on noise"
)


@rule(
    title="Responses of the first rollout that are no text: stray characters, loops, scripts mixed, no word twice",
    severity="warning",
    certainty="likely",
    why=_WHY,
    fix=_FIX,
    sources=GUIDES,
)
def _garbled_first_rollout(rollout: Rollout) -> Iterator[Found]:
    if rollout.dump.evaluation or rollout.first is not None:
        return
    garble = judged(rollout.dump)
    by_itself = garble.judged >= _LEAST and garble.share > CLEAN
    by_chance = garble.fresh is not None and garble.fresh > FRESH and len(rollout.dump.samples) >= _LEAST
    if not by_itself and not by_chance:
        return
    number = rollout.dump.rollout_id
    later = f"; whether rollouts before {number} were in order is not known here" if number else ""
    if not by_itself:
        yield Found(
            f"{garble.fresh:.0%} of the tokens of all responses are distinct, as if drawn by chance{later}",
            Where(str(rollout.path), item="tokens"),
            certainty="possible",
        )
        return
    sure = garble.by_text > _MOST * garble.judged and number == 0
    severity: Severity = "error" if sure else "warning"
    count = f"{len(garble.garbled)} of {garble.judged} responses are garbled"
    message = f"{count}; of the first one, {garble.garbled[0][1]}{later}"
    yield Found(message, garbled_where(rollout, garble), severity)


_LINES = 8
_LONGEST = 1 << 16
_TAIL = 128
"""The last characters, which are the response's own: what stands before them is the prompt, however long."""
_PHRASES = ("First rollout sample", "Finish rollout")
_SAMPLE = re.compile(
    r"(?:First rollout sample|Finish rollout): (?:text_preview=(?P<preview>.*?)(?:, label=.*)?|\[(?P<quote>['\"])"
    r"(?P<text>.*?)(?:(?P=quote)\], label: .*)?)$"
)
_CUT = re.compile(r"\.\.\.<truncated chars=\d+>$")
_ESCAPE = re.compile(r"\\(?:x([0-9a-f]{2})|u([0-9a-f]{4})|(n|t|r|\\|'|\"))")
_ESCAPED = {"n": "\n", "t": "\t", "r": "\r"}


def _line(log: Log, hit: Hit) -> str:
    """A line as long as it is, up to 64 KiB; what the log's reader kept of it where it cannot be read again."""
    try:
        with open_regular(log.path) as file:
            file.seek(hit.offset)
            line = file.readline(_LONGEST).decode("utf-8", "replace").rstrip("\r\n")
    except (OSError, ReproError):
        return hit.text
    return (
        line if any(phrase in line for phrase in _PHRASES) else hit.text
    )  # of a packed log, offsets are unpacked ones


def _text(line: str) -> str:
    """Prompt and response that a line shows; '' for a line in another form."""
    match = _SAMPLE.search(line)
    if match is None:
        return ""
    if match["preview"] is not None:
        return _CUT.sub("", match["preview"]).replace("\\n", "\n")
    return _ESCAPE.sub(
        lambda m: chr(int(m[1] or m[2], 16)) if m[1] or m[2] else _ESCAPED.get(m[3], m[3]), match["text"]
    )


@rule(
    title="Samples in a log that are no text",
    severity="warning",
    certainty="likely",
    why=_WHY,
    fix=_FIX,
    sources=(*GUIDES, "THUDM/slime@624b824a8 slime/rollout/sglang_rollout.py:421"),
    phrases=_PHRASES,
)
def _garbled_log(log: Log) -> Iterator[Found]:
    lines = sorted({hit for phrase in _PHRASES for hit in log.hits.get(phrase, ())})[:_LINES]
    for number, hit in enumerate(lines, 1):
        text = _text(_line(log, hit))
        verdict = judge(text, None)
        reason = verdict.reason if verdict is not None else ""
        if not reason and len(tail := text[-_TAIL:]) == _TAIL:
            character, share = single_character(tail)
            reason = f"{share:.0%} of its last {_TAIL} characters are {character!r}" if share > SINGLE else ""
        if reason:
            which = (
                "the first rollout sample in the log" if number == 1 else f"rollout sample number {number} of the log"
            )
            yield Found(f"{which} is garbled: {reason}", log.where(hit))
            return


_NEVER_EOS_LEAST = 8
_ALL = 0.98
_GARBLED = 0.5
"""Of more responses that are one character or token, no stop token is the cure: `garbled-first-rollout`."""


class _Seen(NamedTuple):
    truncated: int
    ended: int | None
    went_on: int
    place: int
    longest: int
    samples: int


def _one_thing(dump: RolloutDump) -> bool:
    """Whether most responses are one character or token again and again."""
    garble = judged(dump)
    return garble.single > _GARBLED * garble.judged


def _look(dump: RolloutDump, ids: frozenset[int], eos: str | None) -> _Seen:
    """How the responses end. `ended` is None where neither ids nor text of an end are known."""
    truncated = ended = went_on = place = longest = 0
    for number, sample in enumerate(dump.samples):
        cut = sample.get("status") == "truncated"
        truncated += cut
        tokens = response_tokens(sample)
        if cut and tokens is not None and tokens.size > longest:
            place, longest = number, int(tokens.size)
        if tokens is not None and tokens.size and ids:
            ended += int(tokens[-1]) in ids
            went_on += bool(set(tokens[:-1].tolist()) & ids) and _single_turn(sample)
        text = sample.get("response")
        if eos and isinstance(text, str):
            ended += text.rstrip().endswith(eos)
    known = bool(ids) or bool(eos)
    return _Seen(truncated, ended if known else None, went_on, place, longest, len(dump.samples))


def _single_turn(sample: object) -> bool:
    """Whether all of a response was sampled: a turn's end in the middle is right in a conversation."""
    mask = sample.get("loss_mask") if isinstance(sample, dict) else None
    return mask is None or (isinstance(mask, list) and all(mask))


@rule(
    title="A rollout in which no response ends by itself",
    severity="warning",
    certainty="likely",
    why="every response runs to the limit: rollouts cost the most that they can, and rewards are of answers without "
    "an end",
    fix="set --rollout-stop or --rollout-stop-token-ids to the end of a turn in the model's chat template; if the "
    "responses are sound and merely long, raise --rollout-max-response-len",
    sources=("Miles FAQ",),
)
def _never_eos(rollout: Rollout, launch: Launch | None, tokenizer: Tokenizer | None) -> Iterator[Found]:
    ids = frozenset(tokenizer.eos_ids) if tokenizer else frozenset[int]()
    eos = tokenizer.eos if tokenizer else None

    def never(dump: RolloutDump) -> _Seen | None:
        tally = _look(dump, ids, eos)
        enough = tally.samples >= _NEVER_EOS_LEAST and tally.truncated >= _ALL * tally.samples
        return tally if enough and not tally.ended and not _one_thing(dump) else None

    seen = None if rollout.dump.evaluation else began(rollout, never)
    if seen is None:
        return
    limit = launch.value("--rollout-max-response-len") if launch else None
    if seen.went_on:
        detail = f"; {seen.went_on} of them went on after an end token (ids {', '.join(map(str, sorted(ids)))})"
    elif seen.ended is not None:
        detail = ", and none holds an end token"
    else:
        detail = ""
    fix = ""
    if ids:
        fix = f"--rollout-stop-token-ids {' '.join(map(str, sorted(ids)))}; then {_never_eos.fix}"
    yield Found(
        f"{seen.truncated} of {seen.samples} responses were cut at the limit{detail}",
        Where(
            str(rollout.path),
            item=f"sample {seen.place} status",
            value=f"truncated at {seen.longest} tokens" + (f", --rollout-max-response-len {limit}" if limit else ""),
        ),
        fix=fix,
    )


_OPENED = re.compile(
    r"(<\|im_start\|>)\s*(?:system|user|assistant)\s*\1"  # ChatML: Qwen and others
    r"|(<\|start_header_id\|>)\w+<\|end_header_id\|>\s*(?:<\|begin_of_text\|>)?\2"  # Llama 3
    r"|\[INST\]\s*\[INST\]"  # Mistral
    r"|<start_of_turn>\s*(?:user|model)\s*(?:<bos>)?<start_of_turn>"  # Gemma
    r"|(<\|(?:system|user|assistant)\|>)\s*\3"  # GLM
)
"""A turn that is opened inside the beginning of another, which no template writes."""


@rule(
    title="Prompts to which a chat template was applied twice, by their text alone",
    severity="error",
    certainty="likely",
    why="the model sees a conversation that it was never trained on: log-probs are high, and gradients explode",
    fix="leave --apply-chat-template out where the data is templated already, or store messages in the data",
    sources=("Miles FAQ (exploding gradients)", "Miles guide: Debugging (chat template)"),
)
def _prompt_marks_doubled(rollout: Rollout, tokenizer: Tokenizer | None) -> Iterator[Found]:
    if tokenizer is not None:
        return  # `chat-template-twice` compares with the template itself
    texts = [
        (n, sample["prompt"]) for n, sample in enumerate(rollout.dump.samples) if isinstance(sample.get("prompt"), str)
    ]
    twice = [(n, match[0]) for n, text in texts if (match := _OPENED.search(text[:100_000]))]
    if twice:
        at, seen = twice[0]
        where = Where(str(rollout.path), item=f"prompt of sample {at}", value=repr(seen[:60]))
        severity: Severity | None = None if len(twice) * 2 > len(texts) else "warning"
        yield Found(f"{len(twice)} of {len(texts)} prompts open a turn inside the opening of another", where, severity)


_TRUNCATED_RATIO_LEAST = 8


def _cut(dump: RolloutDump) -> tuple[int, int] | None:
    """How many of how many are truncated, where that is most of them."""
    cut, count = sum(sample.get("status") == "truncated" for sample in dump.samples), len(dump.samples)
    return (cut, count) if count >= _TRUNCATED_RATIO_LEAST and cut > _MOST * count else None


@rule(
    title="More than half of a rollout's responses are cut at the limit",
    severity="warning",
    certainty="certain",
    why="an answer that is cut has no reward for what it would have said: long answers are punished for their length",
    fix="raise --rollout-max-response-len, or look whether responses loop (`garbled-first-rollout`) or go on after "
    "their end (`never-eos`)",
    sources=("Miles FAQ", f"{SLIME} slime/observability/rollout_metrics.py:151"),
)
def _truncated_ratio(rollout: Rollout, launch: Launch | None) -> Iterator[Found]:
    counts = None if rollout.dump.evaluation else began(rollout, _cut)
    if counts is None or counts[0] >= _ALL * counts[1]:
        return
    limit = launch.value("--rollout-max-response-len") if launch else None
    yield Found(
        f"{counts[0]} of {counts[1]} responses ({counts[0] / counts[1]:.0%}) were cut at the limit"
        + (f" of {limit} tokens" if limit else ""),
        Where(str(rollout.path), item="status truncated", value=f"{counts[0]}/{counts[1]}"),
    )
