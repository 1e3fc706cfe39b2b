"""Rules about lengths and about what entries may be."""

from __future__ import annotations

from collections.abc import Iterator

from repro_golden.base.checks import Found, rule
from repro_golden.dumps.rollout.arrays import length, numbers
from repro_golden.dumps.rollout.checks.inputs import SAMPLE, Batch, noted
from repro_golden.dumps.rollout.fields import FIELDS

__all__ = ["RULES"]


@rule(
    id="no-samples",
    title="A rollout dump without a sample",
    severity="error",
    certainty="certain",
    why="there is nothing to train on",
    fix="record the rollout again",
    sources=(SAMPLE,),
)
def _empty(batch: Batch) -> Iterator[Found]:
    if not batch.samples:
        yield noted(None, "samples", "the dump has no samples")


@rule(
    id="response-length",
    title="A response_length that the tokens do not have",
    severity="error",
    certainty="certain",
    why="the response is the last response_length tokens, so log-probs and mask shift",
    fix="count the response's tokens anew where it is made (generate function, tool calls)",
    sources=(SAMPLE,),
)
def _response_length(batch: Batch) -> Iterator[Found]:
    for number, sample in enumerate(batch.samples):
        size, tokens = sample["response_length"], length(sample["tokens"])
        if size < 0:
            yield noted(number, "response_length", f"response_length is {size}")
        elif tokens is None or size > tokens:
            yield noted(number, "response_length", f"response_length is {size}, and there are {tokens} tokens")


@rule(
    id="column-length",
    title="Per-token columns of another length than the response",
    severity="error",
    certainty="certain",
    why="a per-token column of another length stops the trainer, or shifts against the tokens",
    fix="append to all per-token columns together: tokens, loss_mask, log-probs, top-p offsets",
    sources=(SAMPLE,),
)
def _per_token(batch: Batch) -> Iterator[Found]:
    wanted = {"response": 0, "response + 1": 1}
    for field in FIELDS[batch.dump.system]:
        if field.length not in wanted:
            continue
        for number, value in batch.column(field.name):
            response = batch.samples[number]["response_length"]
            size = length(value)
            if size != response + wanted[field.length]:
                rule = field.length.replace("response", "response_length")
                yield noted(
                    number, field.name, f"{field.name} has {size} entries, {rule} is {response + wanted[field.length]}"
                )


@rule(
    id="tokens",
    title="Token ids that are none",
    severity="error",
    certainty="certain",
    why="an id below 0, or no id, has no embedding",
    fix="look at the tokenizer and at padding",
    sources=(SAMPLE,),
)
def _tokens(batch: Batch) -> Iterator[Found]:
    for number, sample in enumerate(batch.samples):
        tokens = numbers(sample["tokens"])
        if tokens is None or tokens.ndim != 1 or tokens.dtype.kind not in "iu":
            if tokens is None or tokens.size:
                yield noted(number, "tokens", "tokens are no list of whole numbers")
        elif (tokens < 0).any():
            at = int((tokens < 0).argmax())
            yield noted(number, "tokens", f"token {at} is {tokens[at]}")


@rule(
    id="mask-values",
    title="A loss mask of other values than 0 and 1",
    severity="error",
    certainty="certain",
    why="the loss is weighted by the mask, and tokens are counted by its sum",
    fix="make loss_mask a list of the numbers 0 and 1",
    sources=(SAMPLE,),
)
def _mask_values(batch: Batch) -> Iterator[Found]:
    for number, value in batch.column("loss_mask"):
        mask = numbers(value)
        if mask is None:
            yield noted(number, "loss_mask", "loss_mask is no list of numbers")
        elif mask.size and (mask.dtype.kind == "b" or not ((mask == 0) | (mask == 1)).all()):
            odd = next(repr(x) for x in mask.ravel().tolist() if x not in (0, 1) or isinstance(x, bool))
            yield noted(number, "loss_mask", f"loss_mask holds {odd}")


@rule(
    id="top-p-offsets",
    title="Offsets of top-p nuclei that do not fit their ids",
    severity="error",
    certainty="certain",
    why="the ids of a token's nucleus are ids[offsets[i]:offsets[i + 1]]",
    fix="let the sample's own append_response_tokens merge them",
    sources=(SAMPLE,),
)
def _top_p(batch: Batch) -> Iterator[Found]:
    ids, bounds = "rollout_top_p_token_ids", "rollout_top_p_token_offsets"
    for number, sample in enumerate(batch.samples):
        if (sample.get(ids) is None) != (sample.get(bounds) is None):
            there, lacking = (ids, bounds) if sample.get(bounds) is None else (bounds, ids)
            yield noted(number, lacking, f"there is {there} without {lacking}")
        elif sample.get(bounds) is not None:
            offsets, count = numbers(sample[bounds]), length(sample[ids])
            if offsets is None or offsets.ndim != 1 or not offsets.size or offsets[0] != 0:
                yield noted(number, bounds, "offsets do not start with 0")
            elif (offsets[1:] < offsets[:-1]).any():
                at = int((offsets[1:] < offsets[:-1]).argmax()) + 1
                yield noted(number, bounds, f"offset {at} falls from {offsets[at - 1]} to {offsets[at]}")
            elif offsets[-1] != count:
                yield noted(number, bounds, f"the last offset is {offsets[-1]}, and there are {count} ids")


RULES = (_empty, _response_length, _per_token, _tokens, _mask_values, _top_p)
