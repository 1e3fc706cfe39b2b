"""A chat template is asked for, and the model has none, or is a base model."""

from __future__ import annotations

import re
from collections.abc import Iterator

from repro.doctor.artefacts.kinds import Launch, Tokenizer
from repro.doctor.rule import Found, Rule, Where

__all__ = ["RULE"]

_BASE = re.compile(r"(?:^|[-_.])(?:base|pt|pretrain(?:ed)?)(?=$|[-_.])", re.IGNORECASE)
_OVERRIDES = ("--chat-template-path", "--sglang-chat-template")


def _check(launch: Launch, tokenizer: Tokenizer | None) -> Iterator[Found]:
    if not launch.has("--apply-chat-template") or any(launch.has(flag) for flag in _OVERRIDES):
        return
    where = launch.where("--apply-chat-template")
    if tokenizer is not None and tokenizer.template is None:
        said = f"--apply-chat-template, and the tokenizer of {tokenizer.path} has no chat template: transformers raises"
        yield Found(said, Where(where.path, where.line, str(tokenizer.path), "no template"), "error", "certain")
        return
    model = launch.value("--hf-checkpoint") or ""
    name = model.rstrip("/").rpartition("/")[2]
    if _BASE.search(name):
        said = f"--apply-chat-template with {name}, by its name a base model that was not trained on a template"
        place = launch.where("--hf-checkpoint")
        yield Found(said, Where(place.path, place.line, "--hf-checkpoint", model))


RULE = Rule(
    "template-without-instruct", "--apply-chat-template with a base model, or a tokenizer without a template",
    (Launch,), "note", "possible",
    "a base model that never saw the template's tokens answers it with garbled text or without an end",
    "take the instruct version of the model, or drop --apply-chat-template and give prompts as plain text",
    ("Miles guide: Debugging", "Relax guide: Debugging", "slime guide: Debugging"), _check, uses=(Tokenizer,),
)  # fmt: skip
