"""Samples are packed by the trainer: padding in a dump was put there by hand."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from repro.doctor.artefacts.kinds import HfConfig, Rollout
from repro.doctor.facts.train_columns import config_number, floats
from repro.doctor.rule import Certainty, Found, Rule, Where
from repro_golden.dumps.rollout.arrays import Array, numbers

__all__ = ["RULE"]

_RUN = 4
"""So many equal ids in a row, at least, at an end of a sample."""


def _check(rollout: Rollout, config: HfConfig | None) -> Iterator[Found]:
    samples = rollout.dump.samples
    tokens = [_ids(sample["tokens"]) for sample in samples]
    known = [one for one in tokens if one is not None and len(one)]
    if not known:
        return
    pad, eos = config_number(config, "pad_token_id"), config_number(config, "eos_token_id")
    equal_lengths = len(known) > 2 and len({len(one) for one in known}) == 1
    for side, which in (("end", slice(None, None, -1)), ("beginning", slice(None))):
        runs = [
            (i, int(one[which][0]), _run(one[which])) for i, one in enumerate(tokens) if one is not None and len(one)
        ]
        long = [(i, token, run) for i, token, run in runs if run >= _RUN]
        found = [
            (i, token, run, how) for i, token, run in long if (how := _how(samples[i], token, run, side, pad, eos))
        ]
        # a batch whose samples all have one length, and runs of one id of several lengths: it was made a rectangle
        if not found and equal_lengths and _rectangle(long, len(known)):
            found = [(i, token, run, "all samples have one length") for i, token, run in long]
        if found:
            i, token, run, how = found[0]
            certainty: Certainty = "certain" if how.startswith("pad_token_id") else "likely"
            yield Found(
                f"{len(found)} of {len(known)} samples have padding at their {side}: sample {i} has {run} tokens "
                f"{token} "
                f"there ({how})",
                Where(str(rollout.path), item=f"tokens of sample {i}", value=f"{token} x {run}"),
                certainty=certainty,
            )


def _rectangle(long: Sequence[tuple[int, int, int]], count: int) -> bool:
    """Whether half of the samples or more end in runs of one id, of several lengths."""
    return 2 * len(long) >= count and len({t for _, t, _ in long}) == 1 and len({run for *_, run in long}) > 1


def _how(sample: Mapping[str, Any], token: int, run: int, side: str, pad: int | None, eos: int | None) -> str:
    """What shows that a run of one id is padding; '' where nothing does."""
    if pad is not None and token == pad != eos:
        return "pad_token_id of the model's config.json"
    response = sample["response_length"]
    # one that hit the limit of length may be a loop of one token, of which the model is sure
    if side != "end" or run > response or sample["status"] != "completed":
        return ""
    log_probs, mask = floats(sample["rollout_log_probs"]), floats(sample["loss_mask"])
    # the sampled end of sequence may be the same id as the padding behind it
    if log_probs is not None and len(log_probs) == response and not log_probs[response - run + 1 :].any():
        return "with rollout_log_probs of exactly 0"
    if mask is not None and len(mask) == response and not mask[response - run + 1 :].any() and mask.any():
        return "masked"
    return ""


def _ids(value: Any) -> Array | None:
    found = numbers(value)
    return found if found is not None and found.ndim == 1 and found.dtype.kind in "iu" else None


def _run(ids: Array) -> int:
    """How many ids at the beginning are equal."""
    other = np.flatnonzero(ids != ids[0])
    return int(other[0]) if len(other) else len(ids)


RULE = Rule(
    id="dump-padded",
    title="Samples that are padded",
    inputs=(Rollout,),
    uses=(HfConfig,),
    severity="warning",
    certainty="likely",
    why="the trainer packs samples of any length itself: padding is computed on, counted as tokens, and trained on "
    "where "
    "the mask does not say otherwise",
    cure="leave tokens as long as they are; --use-dynamic-batch-size with --max-tokens-per-gpu balances them",
    sources=("Miles FAQ (you never need to pad manually)",),
    check=_check,
)
