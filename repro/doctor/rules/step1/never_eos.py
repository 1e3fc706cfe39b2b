"""A rollout in which no response comes to an end."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from repro.doctor.artefacts.kinds import Launch, Rollout, Tokenizer
from repro.doctor.facts.rewards import began
from repro.doctor.facts.texts import judged, response_tokens
from repro.doctor.rule import Found, Rule, Where
from repro_golden.dumps.rollout.files import RolloutDump

__all__ = ["RULE"]

_LEAST = 8
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


def _check(rollout: Rollout, launch: Launch | None, tokenizer: Tokenizer | None) -> Iterator[Found]:
    ids = frozenset(tokenizer.eos_ids) if tokenizer else frozenset[int]()
    eos = tokenizer.eos if tokenizer else None

    def never(dump: RolloutDump) -> _Seen | None:
        found = _look(dump, ids, eos)
        enough = found.samples >= _LEAST and found.truncated >= _ALL * found.samples
        return found if enough and not found.ended and not _one_thing(dump) else None

    seen = None if rollout.dump.evaluation else began(rollout, never)
    if seen is None:
        return
    limit = launch.value("--rollout-max-response-len") if launch else None
    if seen.went_on:
        said = f"; {seen.went_on} of them went on after an end token (ids {', '.join(map(str, sorted(ids)))})"
    elif seen.ended is not None:
        said = ", and none holds an end token"
    else:
        said = ""
    cure = ""
    if ids:
        cure = f"--rollout-stop-token-ids {' '.join(map(str, sorted(ids)))}; then {RULE.cure}"
    yield Found(
        f"{seen.truncated} of {seen.samples} responses were cut at the limit{said}",
        Where(
            str(rollout.path),
            item=f"sample {seen.place} status",
            value=f"truncated at {seen.longest} tokens" + (f", --rollout-max-response-len {limit}" if limit else ""),
        ),
        cure=cure,
    )


def _one_thing(dump: RolloutDump) -> bool:
    """Whether most responses are one character or token again and again."""
    found = judged(dump)
    return found.single > _GARBLED * found.judged


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


RULE = Rule(
    id="never-eos",
    title="A rollout in which no response ends by itself",
    inputs=(Rollout,),
    uses=(Launch, Tokenizer),
    severity="warning",
    certainty="likely",
    why="every response runs to the limit: rollouts cost the most that they can, and rewards are of answers without an "
    "end",
    cure="set --rollout-stop or --rollout-stop-token-ids to the end of a turn in the model's chat template; if the "
    "responses are sound and merely long, raise --rollout-max-response-len",
    sources=("Miles FAQ",),
    check=_check,
)  # fmt: skip
