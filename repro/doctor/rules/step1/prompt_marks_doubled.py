"""Prompts whose own text shows that a chat template was applied twice: no tokenizer is needed to see it."""

from __future__ import annotations

import re
from collections.abc import Iterator

from repro.doctor.artefacts.kinds import Rollout, Tokenizer
from repro.doctor.rule import Found, Rule, Severity, Where

__all__ = ["RULE"]

_OPENED = re.compile(
    r"(<\|im_start\|>)\s*(?:system|user|assistant)\s*\1"  # ChatML: Qwen and others
    r"|(<\|start_header_id\|>)\w+<\|end_header_id\|>\s*(?:<\|begin_of_text\|>)?\2"  # Llama 3
    r"|\[INST\]\s*\[INST\]"  # Mistral
    r"|<start_of_turn>\s*(?:user|model)\s*(?:<bos>)?<start_of_turn>"  # Gemma
    r"|(<\|(?:system|user|assistant)\|>)\s*\3"  # GLM
)
"""A turn that is opened inside the beginning of another, which no template writes."""


def _check(rollout: Rollout, tokenizer: Tokenizer | None) -> Iterator[Found]:
    if tokenizer is not None:
        return  # `chat-template-twice` compares with the template itself
    texts = [(n, one["prompt"]) for n, one in enumerate(rollout.dump.samples) if isinstance(one.get("prompt"), str)]
    twice = [(n, match[0]) for n, text in texts if (match := _OPENED.search(text[:100_000]))]
    if twice:
        at, seen = twice[0]
        where = Where(str(rollout.path), item=f"prompt of sample {at}", value=repr(seen[:60]))
        severity: Severity | None = None if len(twice) * 2 > len(texts) else "warning"
        yield Found(f"{len(twice)} of {len(texts)} prompts open a turn inside the opening of another", where, severity)


RULE = Rule(
    id="prompt-marks-doubled",
    title="Prompts to which a chat template was applied twice, by their text alone",
    inputs=(Rollout,),
    uses=(Tokenizer,),
    severity="error",
    certainty="likely",
    why="the model sees a conversation that it was never trained on: log-probs are high, and gradients explode",
    cure="leave --apply-chat-template out where the data is templated already, or store messages in the data",
    sources=("Miles FAQ (exploding gradients)", "Miles guide: Debugging (chat template)"),
    check=_check,
)
