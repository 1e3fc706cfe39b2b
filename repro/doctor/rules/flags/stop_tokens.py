"""What ends a turn, by the chat template, against what ends generation."""

from __future__ import annotations

from collections.abc import Iterator

from repro.doctor.artefacts.kinds import Launch, Tokenizer
from repro.doctor.facts.launches import absent, samples, tempered
from repro.doctor.rule import Found, Rule, Where
from repro_golden.base.errors import ReproError

__all__ = ["RULE"]

_WORDS, _IDS = "--rollout-stop", "--rollout-stop-token-ids"
_ANSWER = "zq-answer-zq"


def _ending(tokenizer: Tokenizer) -> str | None:
    """What the template writes behind an answer; None where it cannot be rendered or writes nothing."""
    messages = [{"role": "user", "content": "zq-question-zq"}, {"role": "assistant", "content": _ANSWER}]
    try:
        text = tokenizer.render(messages) if tokenizer.template else ""
    except ReproError:
        return None
    return text.rpartition(_ANSWER)[2].strip() or None


@tempered("warning")
def _check(launch: Launch, tokenizer: Tokenizer | None) -> Iterator[Found]:
    if not samples(launch):
        return
    ids, words = launch.flags.get(_IDS), launch.flags.get(_WORDS)
    for value in ids.values if ids else ():
        if not value.isdecimal() and "$" not in value and "`" not in value:
            yield Found(f"{_IDS} {value[:40]} is no token id", launch.where(_IDS), "error", "certain")
    if words and any(not value for value in words.values):
        yield Found(f"{_WORDS} holds an empty text", launch.where(_WORDS), "warning", "certain")
    if ids or words or tokenizer is None or not launch.has("--apply-chat-template"):
        return
    where = Where(str(tokenizer.path), item="eos", value=tokenizer.eos or "")
    if tokenizer.eos is None and not tokenizer.eos_ids:
        yield Found(
            "the tokenizer names no end of a turn, and no stop tokens are given", where, *absent(launch, "warning")
        )
        return
    ending = _ending(tokenizer)
    # generation_config may list further ids, whose text is not known here
    if ending is not None and tokenizer.eos and tokenizer.eos not in ending and len(tokenizer.eos_ids) < 2:
        message = f"the chat template ends a turn with {ending[:40]!r}, generation ends at {tokenizer.eos!r}"
        cure = f"--rollout-stop {ending.split()[0][:40]!r}, or its id with {_IDS}"
        yield Found(message, where, *absent(launch, "warning", "likely"), cure=cure)


RULE = Rule(
    id="stop-tokens",
    title="What ends a turn in the chat template does not end generation",
    inputs=(Launch,),
    uses=(Tokenizer,),
    severity="warning",
    certainty="likely",
    why="the model goes on behind its answer until the length limit: truncated samples and wrong rewards",
    cure="name what ends a turn with --rollout-stop or --rollout-stop-token-ids",
    sources=("Miles FAQ", "THUDM/slime@624b824a8 slime/utils/arguments.py (--rollout-stop, --rollout-stop-token-ids)"),
    check=_check,
)
