"""Whether a chat template was applied to a prompt once, twice or not at all: by the marks that it leaves.

The marks are found by rendering conversations of made-up words: what the template puts before a user's message, and
what follows it. A prompt without the first was never rendered. Where the message itself begins with what a rendered
prompt begins with, one rendering was put into another.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from repro.doctor.artefacts.checkpoints.tokenizer import vocabulary
from repro.doctor.artefacts.kinds import Rollout, Tokenizer
from repro.doctor.facts.samples.train_columns import evenly, token_ids
from repro_golden.base.errors import ReproError

__all__ = ["Applied", "Marks", "applied", "decoder_of", "foreign", "marks_of", "prompt_tokens", "verdicts"]

Applied = Literal["once", "twice", "missing", "other"]
"""``other``: not this template, but marks of another one are there."""

_WORDS = ("qzuserone", "qzassistantone", "qzusertwo", "qzsystem")
_PROMPT = 200_000
_SAMPLES = 64
"""Prompts of a rollout that are looked at."""

_KNOWN = {
    "ChatML": ("<|im_start|>",),
    "Llama 3": ("<|start_header_id|>",),
    "Mistral": ("[INST]",),
    "Gemma": ("<start_of_turn>",),
    "DeepSeek": ("<\uff5cUser\uff5c>",),
    "GLM": ("<|user|>",),
    "Harmony": ("<|start|>user",),
}
"""Marks of templates that are widespread, to say which one a prompt has."""

_SPECIAL = re.compile(r"<[|\uff5c][^<>\s]{1,40}[|\uff5c]>|<(?:s|bos|start_of_turn|begin_of_text)>|\[gMASK\]|\[INST\]")


_MOST = 64


class Marks(NamedTuple):
    """What a template leaves.

    Attributes:
        opening: What stands before a user's message, without blanks at its ends.
        begins: Texts with which a rendered prompt begins; no message begins with one by itself.
    """

    opening: str
    begins: tuple[str, ...]


_FOUND: dict[tuple[str, tuple[str, ...], str | None], Marks | None] = {}


def marks_of(tokenizer: Tokenizer) -> Marks | None:
    """The marks of a tokenizer's template; None without one, or where it leaves none. Rendering is slow: found once.

    Raises:
        ReproError: the template cannot be rendered.
    """
    if not tokenizer.template:
        return None
    key = tokenizer.template, tokenizer.special, tokenizer.eos
    if key not in _FOUND:
        if len(_FOUND) >= _MOST:
            _FOUND.clear()
        _FOUND[key] = _rendered_marks(tokenizer)
    return _FOUND[key]


def _rendered_marks(tokenizer: Tokenizer) -> Marks | None:
    first, answer, second, system = _WORDS
    user = {"role": "user", "content": first}
    single = tokenizer.render([user])
    head, separator, tail = single.partition(first)
    if not separator:
        return None
    befores = [head]
    turns = [user, {"role": "assistant", "content": answer}, {"role": "user", "content": second}]
    for messages, start, stop in (
        (turns, answer, second),
        ([{"role": "system", "content": system}, user], system, first),
    ):
        try:
            text = tokenizer.render(messages)
        except ReproError:
            continue  # some know one turn alone, others no system
        if start in text and stop in text.partition(start)[2]:
            befores.append(text.partition(start)[2].partition(stop)[0])
    specials = [text for text in dict.fromkeys((*tokenizer.special, *_SPECIAL.findall(head))) if text and text in head]
    opening = head[_start_of_common_end(befores, specials) :].strip() or _last_mark(head, specials)
    for closing in (text for text in specials if tail.lstrip().startswith(text)):
        opening = opening.removeprefix(closing).lstrip()  # the end of the turn before, which a first turn lacks
    if not opening:
        return None
    # what may follow a message at once, even an empty one, says nothing
    begins = [text for text in (opening, *specials) if not tail.lstrip().startswith(text)]
    return Marks(opening, tuple(begins))


def _start_of_common_end(texts: Sequence[str], marks: Sequence[str]) -> int:
    """Where in the first text that begins with which all of them end, no mark of it cut in two."""
    head, shortest = texts[0], min(map(len, texts))
    size = next((k for k in range(shortest) if len({text[-1 - k] for text in texts}) > 1), shortest)
    start = len(head) - size
    spans = ((match.start(), match.end()) for mark in marks for match in re.finditer(re.escape(mark), head))
    return max((end for begin, end in spans if begin < start < end), default=start)


def _last_mark(head: str, specials: Sequence[str]) -> str:
    """From the last special token on."""
    return head[max(map(head.rfind, specials)) :].strip() if specials else ""


def applied(prompt: str, marks: Marks) -> tuple[Applied, int]:
    """How often the template was applied to a prompt.

    Returns:
        That, and where in the prompt the evidence stands.
    """
    prompt = prompt[:_PROMPT]
    at = first = prompt.find(marks.opening)
    while at >= 0:
        inside = prompt[at + len(marks.opening) :].lstrip()
        if inside.startswith(marks.begins):
            return "twice", at
        at = prompt.find(marks.opening, at + len(marks.opening))
    if first >= 0:
        return "once", first
    other = foreign(prompt, marks)
    return ("other", prompt.find(_KNOWN[other][0])) if other else ("missing", 0)


def foreign(prompt: str, marks: Marks) -> str | None:
    """The name of another widespread template whose marks a prompt has; None for none."""
    joined = " ".join((marks.opening, *marks.begins))
    return next((name for name, (text,) in _KNOWN.items() if text in prompt and text not in joined), None)


def decoder_of(tokenizer: Tokenizer) -> Callable[[Sequence[int]], str] | None:
    """What turns tokens into text, special tokens included, by ``tokenizer.json``.

    Returns:
        None without that file, where it is damaged or too large, and where the package `tokenizers` is not installed.
    """
    backend = vocabulary(tokenizer.path)
    if backend is None:
        return None
    size = backend.get_vocab_size(with_added_tokens=True)

    def decode(tokens: Sequence[int]) -> str:
        # an id beyond the vocabulary has no text; what is before and after it has
        return str(backend.decode([token for token in tokens if 0 <= token < size], skip_special_tokens=False))

    return decode


def prompt_tokens(sample: Mapping[str, Any]) -> list[int] | None:
    """The ids of a sample's prompt; None where the sample does not say them."""
    ids, length = token_ids(sample.get("tokens")), sample.get("response_length")
    if ids is None or not isinstance(length, (int, np.integer)) or not 0 <= length < ids.size:
        return None
    prompt_ids: list[int] = ids[: ids.size - int(length)].tolist()
    return prompt_ids


def verdicts(rollout: Rollout, tokenizer: Tokenizer) -> tuple[Marks, list[tuple[int, Applied, str]]] | None:
    """Of up to 64 samples: its place, how often the template was applied, and the prompt from the evidence on."""
    # within one run every rollout's prompts are made alike
    marks = marks_of(tokenizer) if rollout.first is None and rollout.dump.samples else None
    if marks is None:
        return None
    decode = decoder_of(tokenizer)
    evidence: list[tuple[int, Applied, str]] = []
    for place in evenly(len(rollout.dump.samples), _SAMPLES):
        texts = _texts(rollout.dump.samples[place], decode)
        if texts:
            how, at, text = min(
                ((*applied(text, marks), text) for text in texts), key=lambda verdict: _ORDER.index(verdict[0])
            )
            evidence.append((place, how, text[at : at + 120]))
    return marks, evidence


_ORDER: tuple[Applied, ...] = ("twice", "once", "other", "missing")
"""What the dump's text and the tokens' text show between them: a tokenizer of another model decodes to nonsense, so
that a mark which one of them has counts."""


def _texts(sample: Mapping[str, Any], decode: Callable[[Sequence[int]], str] | None) -> list[str]:
    """What the model was given: the prompt's text, and the text of its tokens. Messages alone say nothing of it."""
    written = sample.get("prompt")
    ids = prompt_tokens(sample) if decode else None
    seen = decode(ids) if decode and ids else ""
    return [text for text in (written, seen) if isinstance(text, str) and text]
