"""Lengths of prompts, responses and the engine's context that do not fit each other."""

from __future__ import annotations

from collections.abc import Iterator

from repro.doctor.artefacts.kinds import HfConfig, Launch
from repro.doctor.facts.launches import samples, tempered
from repro.doctor.rule import Found, Rule, Where

__all__ = ["RULE"]

_ENGINE, _CONTEXT = "--sglang-context-length", "--rollout-max-context-len"
_PROMPT, _RESPONSE = "--rollout-max-prompt-len", "--rollout-max-response-len"
_OWN_LENGTHS = ("--custom-generate-function-path", "--rollout-function-path", "--sglang-allow-auto-truncate")
"""With these a request may ask for less than the flags say."""


def _positions(config: HfConfig | None) -> int | None:
    if config is None:
        return None
    inner = config.values.get("text_config")
    value = (inner if isinstance(inner, dict) else config.values).get("max_position_embeddings")
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


def _asked(launch: Launch) -> tuple[int, str, str] | None:
    """Tokens that one request may need, by which flags, and the flag to show."""
    context, prompt, response = (launch.number(name) for name in (_CONTEXT, _PROMPT, _RESPONSE))
    if context:
        return int(context), _CONTEXT, _CONTEXT
    if response:
        flags = f"{_PROMPT} + {_RESPONSE}" if prompt else _RESPONSE
        return int(response + (prompt or 0)), flags, _RESPONSE
    return None


@tempered("warning")
def _check(launch: Launch, config: HfConfig | None) -> Iterator[Found]:
    context, prompt, response = (launch.number(name) for name in (_CONTEXT, _PROMPT, _RESPONSE))
    if context and prompt and prompt > context - 1:
        message = f"{_PROMPT} {prompt:.0f} leaves no token of {_CONTEXT} {context:.0f} to generate: the trainer stops"
        yield Found(message, launch.where(_PROMPT), "error", cure=f"{_PROMPT} {context - 1:.0f} or less")
    if not samples(launch):
        return
    engine, asked, positions = launch.number(_ENGINE), _asked(launch), _positions(config)
    own = any(launch.has(name) for name in _OWN_LENGTHS)
    every = not context and not own and engine is not None and response is not None and response >= engine
    if engine and asked and (every or asked[0] > engine):
        tokens, flags, shown = asked
        message = f"{flags} {tokens} is more than {_ENGINE} {engine:.0f} holds"
        if every:
            message += " beside a prompt: SGLang refuses each request"
        cure = f"{_ENGINE} {tokens} and what the longest prompt takes, or shorter responses"
        yield Found(message, launch.where(shown), "error" if every else "warning", "likely", cure)
    limit, name = (engine, _ENGINE) if engine else (asked[0], asked[1]) if asked else (None, "")
    override = launch.env.get("SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN")
    if config is not None and positions and limit and limit > positions and override is None:
        message = f"{name} = {limit:.0f} is more than the model's max_position_embeddings {positions}"
        where = Where(str(config.path), item="max_position_embeddings", value=str(positions))
        yield Found(message, where, "warning", "likely", "shorten it, or set up rope scaling in the checkpoint")


RULE = Rule(
    id="context-length",
    title="Prompt, response and context lengths that do not fit the engine or the model",
    inputs=(Launch,),
    uses=(HfConfig,),
    severity="warning",
    certainty="certain",
    why="engines refuse or cut requests that are too long, so samples fail or end before their answer",
    cure="make --sglang-context-length at least the longest prompt plus the longest response",
    sources=(
        "slime guide: Troubleshooting",
        "THUDM/slime@624b824a8 slime/utils/arguments.py:2034",
        "radixark/miles@31f1ca961 miles/utils/arguments.py:3499",
        "sgl-project/sglang python/sglang/srt/managers/tokenizer_manager.py (_validate_one_request)",
    ),
    check=_check,
)
