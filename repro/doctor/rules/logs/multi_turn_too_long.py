"""Requests that exceed the engine's context."""

from __future__ import annotations

import re
from collections.abc import Iterator

from repro.doctor.artefacts.kinds import Launch, Log
from repro.doctor.artefacts.log_lines import argument, said, times
from repro.doctor.rule import Found, Rule

__all__ = ["RULE"]

_SEEN = (
    "is longer than the model's context length",
    "exceeds the model's context length",
    "exceeds the model's maximum context length",
    "Request length is longer than the KV cache pool size or the max context length",
    "This model's maximum context length is",
)
_INPUT = re.compile(r"input \((\d{1,9}) tokens\)|total of (\d{1,9}) tokens|requested (\d{1,9}) tokens")
_LIMIT = re.compile(r"context length (?:of |is )?\(?(\d{1,9}) tokens")


def _check(log: Log, launch: Launch | None) -> Iterator[Found]:
    hits = said(log, *_SEEN)
    if not hits:
        return
    lengths = [int(next(filter(None, m.groups()))) for hit in hits if (m := _INPUT.search(hit.text))]
    limit = next((int(m[1]) for hit in hits if (m := _LIMIT.search(hit.text))), None)
    longest = f", up to {max(lengths)} tokens" if lengths else ""
    of = f" of {limit}" if limit else ""
    given = argument("sglang_context_length", launch, log)
    now = f" (now {given})" if given else ""
    cure = ""
    if lengths:
        cure = (
            f"--sglang-context-length {1 << (max(lengths) - 1).bit_length()}{now}, if the model "
            "was trained for that; or keep only the last turns of a conversation (the last 10)"
        )
    yield Found(f"requests exceed the engine's context{of}{longest}{times(log, *_SEEN)}", log.where(hits[0]), cure=cure)


RULE = Rule(
    id="multi-turn-too-long",
    title="Requests that exceed the engine's context",
    inputs=(Log,),
    uses=(Launch,),
    severity="warning",
    certainty="certain",
    why="those samples are cut or fail, and long conversations are what is missing from training",
    cure="--sglang-context-length 16384, if the model was trained for it; or keep only the last 10 turns",
    sources=("slime guide: Troubleshooting", "sgl-project/sglang python/sglang/srt/managers/tokenizer_manager.py"),
    check=_check,
    phrases=_SEEN,
)
