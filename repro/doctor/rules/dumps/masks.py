"""Loss masks of rollouts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from repro.doctor.artefacts.kinds import Rollout, Tokenizer
from repro.doctor.facts.sources import SLIME
from repro.doctor.facts.tool_spans import Span, spans_of, texts_of_tokens, tokens_inside
from repro.doctor.facts.train_columns import Floats, floats
from repro_golden.base.checks import Certainty, Found, Severity, Where, rule
from repro_golden.dumps.rollout.arrays import length


@rule(
    title="A rollout of which no token is trained on",
    severity="error",
    certainty="certain",
    why="the loss is 0 or 0/0 and no gradient comes of it: the rollout is sampled for nothing",
    cure="look at what sets loss_mask and remove_sample (generate function, filters): response tokens of the model are"
    " 1",
    sources=("slime guide: Troubleshooting (build_loss_mask)",),
)
def _loss_mask_all_zero(rollout: Rollout) -> Iterator[Found]:
    dump = rollout.dump
    responses = [sample for sample in dump.samples if sample["response_length"] > 0]
    if dump.evaluation or not responses:
        return
    removed = 0
    for sample in responses:
        if sample["remove_sample"]:
            removed += 1
            continue
        mask = floats(sample["loss_mask"])
        if mask is None or mask.any() or not len(mask):
            return
    suffix = f", {removed} of them by remove_sample" if removed else ""
    yield Found(
        f"all {len(responses)} samples are masked whole{suffix}: no token of the rollout is trained on",
        Where(str(rollout.path), item="remove_sample" if removed else "loss_mask", value="1" if removed else "0"),
        severity="warning" if removed else None,  # a filter may mean it
    )


@rule(
    title="Loss masks that cover the prompt",
    severity="warning",
    certainty="likely",
    why="the policy gradient pushes the prompt's tokens up and down, which no policy chose",
    cure="loss_mask has one entry for each of the last response_length tokens; response_length counts what was "
    "generated",
    sources=("slime guide: Troubleshooting (build_loss_mask)", f"{SLIME} slime/utils/types.py:418 (Sample)"),
)
def _loss_mask_whole_prompt(rollout: Rollout) -> Iterator[Found]:
    dump = rollout.dump
    violations = []
    for place, sample in enumerate(dump.samples):
        total, response = length(sample["tokens"]) or 0, sample["response_length"]
        if dump.evaluation or sample["remove_sample"] or not total or not sample["prompt"]:
            continue
        mask = floats(sample["loss_mask"])
        over = mask is not None and len(mask) == total > response
        if over and mask is not None and mask[: total - response].any():
            violations.append(
                (place, f"its mask has {total} entries for {response} response tokens and trains on the prompt")
            )
        elif response == total and (mask is None or mask.all()):
            violations.append((place, f"all {total} tokens are its response, though it has a prompt"))
    if violations:
        place, how = violations[0]
        count = f"{len(violations)} of {len(dump.samples)} samples train on their prompt: sample {place}: {how}"
        yield Found(count, Where(str(rollout.path), item=f"loss_mask of sample {place}"))


_RUN = 8
"""Tokens in a row with a log-prob of exactly 0 that no model samples."""
_SHARE = 0.2
"""Of a tool's tokens, what may be trained on by a mask that is off by a token or two at the ends."""


class _Seen(NamedTuple):
    sample: int
    text: str
    marker: str
    severity: Severity
    certainty: Certainty


def _sample(place: int, sample: Mapping[str, Any], tokenizer: Tokenizer | None) -> _Seen | None:
    response, text = sample["response_length"], sample["response"]
    if sample["remove_sample"] or response <= 0:
        return None
    mask = floats(sample["loss_mask"])
    if sample["loss_mask"] is None:
        mask = np.ones(response)
    if mask is None or len(mask) != response or not mask.any():
        return None
    log_probs = floats(sample["rollout_log_probs"])
    if log_probs is not None and len(log_probs) != response:
        log_probs = None
    texts = texts_of_tokens(sample, tokenizer)
    if texts is not None:
        return _aligned(place, sample, texts, mask, log_probs)
    spans = spans_of(text, sample["metadata"]) if isinstance(text, str) else []
    return _by_text(place, spans, text, mask, log_probs) if spans else None


def _aligned(
    place: int, sample: Mapping[str, Any], texts: Sequence[str], mask: Floats, log_probs: Floats | None
) -> _Seen | None:
    """With the text of each token: which tokens of each tool's answer are trained on."""
    spans = spans_of("".join(texts), sample["metadata"])
    for span, inside in zip(spans, tokens_inside(texts, spans), strict=True):
        trained = inside & (mask != 0)
        count, size = int(trained.sum()), int(inside.sum())
        if count < 2 or count <= _SHARE * size:
            continue
        first = int(trained.argmax())
        share = f"{count} of {size} tokens of a tool's answer ({span.marker})"
        what = f"{share} are trained on, from response token {first} on"
        return _judged(place, what, span, log_probs, None if log_probs is None else log_probs[trained])
    return None


def _by_text(place: int, spans: Sequence[Span], text: str, mask: Floats, log_probs: Floats | None) -> _Seen | None:
    """With the text alone: a mask without a 0 leaves no tool's answer out, nor one with fewer gaps than answers."""
    span = max(spans, key=lambda s: s.end - s.start)
    share = sum(s.end - s.start for s in spans) / max(len(text), 1)
    if mask.all():
        what = f"{len(spans)} answers of tools ({span.marker}) are in its response, and its mask has no 0"
        zeros = None
        if log_probs is not None:
            run = _longest_zero(log_probs)
            zeros = np.zeros(run) if run >= _RUN else np.full(1, -1.0)
        return _judged(place, what, span, log_probs, zeros)
    gaps = int((np.diff(np.concatenate([[1.0], mask])) < 0).sum())
    masked = float((mask == 0).mean())
    if gaps < len(spans) and masked < share / 2:
        what = (
            f"{len(spans)} answers of tools ({span.marker}), {share:.0%} of the text, are in its response, and its "
            f"mask leaves out {gaps} stretches, {masked:.0%} of the tokens"
        )
        return _Seen(place, what, span.marker, "warning", "possible")
    return None


def _judged(place: int, what: str, span: Span, log_probs: Floats | None, inside: Floats | None) -> _Seen:
    """How sure it is: by the log-probs of what a tool is taken to have said."""
    called = span.marker.startswith("a tool message")
    if log_probs is None or inside is None:
        return _Seen(place, what, span.marker, "warning", "certain" if called else "likely")
    if not inside.any():
        return _Seen(
            place, f"{what}; their log-probs are exactly 0: no model sampled them", span.marker, "error", "certain"
        )
    if called:
        return _Seen(place, what, span.marker, "warning", "likely")
    # a model that was never given a tool may write a whole tool call with its answer
    return _Seen(
        place, f"{what}; their log-probs look sampled: the model may have made it up", span.marker, "note", "possible"
    )


def _longest_zero(values: Floats) -> int:
    edges = np.flatnonzero(np.diff(np.concatenate([[0], (values == 0).astype(np.int8), [0]])))
    return int((edges[1::2] - edges[::2]).max(initial=0))


@rule(
    title="Answers of tools that the loss mask trains on",
    severity="warning",
    certainty="likely",
    why="the model learns to write the tools' answers itself, verbatim, instead of calling them",
    cure="give response tokens of tools a 0 in loss_mask: append_response_tokens(..., trainable=False) does, or build "
    "the mask in the generate function turn by turn",
    sources=(
        "slime guide: Troubleshooting (tool responses included in loss)",
        f"{SLIME} slime/utils/types.py:253 (append_response_tokens)",
    ),
)
def _tool_response_in_loss(rollout: Rollout, tokenizer: Tokenizer | None) -> Iterator[Found]:
    if rollout.dump.evaluation:
        return
    hits = [hit for place, sample in enumerate(rollout.dump.samples) if (hit := _sample(place, sample, tokenizer))]
    if not hits:
        return
    order: tuple[Severity, ...] = ("error", "warning", "note")
    worst = min(hits, key=lambda hit: order.index(hit.severity))
    count = f"; {len(hits)} of {len(rollout.dump.samples)} samples are like it" if len(hits) > 1 else ""
    yield Found(
        f"sample {worst.sample}: {worst.text}{count}",
        Where(str(rollout.path), item=f"loss_mask of sample {worst.sample}", value=worst.marker),
        severity=worst.severity,
        certainty=worst.certainty,
    )
