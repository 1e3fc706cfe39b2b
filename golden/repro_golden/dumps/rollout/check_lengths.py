"""Rules about lengths and about what entries may be."""

from __future__ import annotations

from collections.abc import Iterator

from repro_golden.dumps.rollout.arrays import length, numbers
from repro_golden.dumps.rollout.check_rules import Batch, Found, Rule
from repro_golden.dumps.rollout.fields import FIELDS

__all__ = ["RULES"]


def _empty(batch: Batch) -> Iterator[Found]:
    if not batch.samples:
        yield Found(None, "samples", "the dump has no samples")


def _response_length(batch: Batch) -> Iterator[Found]:
    for number, sample in enumerate(batch.samples):
        size, tokens = sample["response_length"], length(sample["tokens"])
        if size < 0:
            yield Found(number, "response_length", f"response_length is {size}")
        elif tokens is None or size > tokens:
            yield Found(number, "response_length", f"response_length is {size}, and there are {tokens} tokens")


def _per_token(batch: Batch) -> Iterator[Found]:
    wanted = {"response": 0, "response + 1": 1}
    for field in FIELDS[batch.dump.system]:
        if field.length not in wanted:
            continue
        for number, value in batch.column(field.name):
            response = batch.samples[number]["response_length"]
            found = length(value)
            if found != response + wanted[field.length]:
                rule = field.length.replace("response", "response_length")
                yield Found(
                    number, field.name, f"{field.name} has {found} entries, {rule} is {response + wanted[field.length]}"
                )


def _tokens(batch: Batch) -> Iterator[Found]:
    for number, sample in enumerate(batch.samples):
        found = numbers(sample["tokens"])
        if found is None or found.ndim != 1 or found.dtype.kind not in "iu":
            if found is None or found.size:
                yield Found(number, "tokens", "tokens are no list of whole numbers")
        elif (found < 0).any():
            at = int((found < 0).argmax())
            yield Found(number, "tokens", f"token {at} is {found[at]}")


def _mask_values(batch: Batch) -> Iterator[Found]:
    for number, value in batch.column("loss_mask"):
        found = numbers(value)
        if found is None:
            yield Found(number, "loss_mask", "loss_mask is no list of numbers")
        elif found.size and (found.dtype.kind == "b" or not ((found == 0) | (found == 1)).all()):
            odd = next(repr(x) for x in found.ravel().tolist() if x not in (0, 1) or isinstance(x, bool))
            yield Found(number, "loss_mask", f"loss_mask holds {odd}")


def _top_p(batch: Batch) -> Iterator[Found]:
    ids, ends = "rollout_top_p_token_ids", "rollout_top_p_token_offsets"
    for number, sample in enumerate(batch.samples):
        if (sample.get(ids) is None) != (sample.get(ends) is None):
            there, lacking = (ids, ends) if sample.get(ends) is None else (ends, ids)
            yield Found(number, lacking, f"there is {there} without {lacking}")
        elif sample.get(ends) is not None:
            offsets, count = numbers(sample[ends]), length(sample[ids])
            if offsets is None or offsets.ndim != 1 or not offsets.size or offsets[0] != 0:
                yield Found(number, ends, "offsets do not start with 0")
            elif (offsets[1:] < offsets[:-1]).any():
                at = int((offsets[1:] < offsets[:-1]).argmax()) + 1
                yield Found(number, ends, f"offset {at} falls from {offsets[at - 1]} to {offsets[at]}")
            elif offsets[-1] != count:
                yield Found(number, ends, f"the last offset is {offsets[-1]}, and there are {count} ids")


RULES = (
    Rule("no-samples", "error", "there is nothing to train on", "record the rollout again", _empty),
    Rule(
        "response-length",
        "error",
        "the response is the last response_length tokens, so log-probs and mask shift",
        "count the response's tokens anew where it is made (generate function, tool calls)",
        _response_length,
    ),
    Rule(
        "column-length",
        "error",
        "a per-token column of another length stops the trainer, or shifts against the tokens",
        "append to all per-token columns together: tokens, loss_mask, log-probs, top-p offsets",
        _per_token,
    ),
    Rule(
        "tokens", "error", "an id below 0, or no id, has no embedding", "look at the tokenizer and at padding", _tokens
    ),
    Rule(
        "mask-values",
        "error",
        "the loss is weighted by the mask, and tokens are counted by its sum",
        "make loss_mask a list of the numbers 0 and 1",
        _mask_values,
    ),
    Rule(
        "top-p-offsets",
        "error",
        "the ids of a token's nucleus are ids[offsets[i]:offsets[i + 1]]",
        "let the sample's own append_response_tokens merge them",
        _top_p,
    ),
)
