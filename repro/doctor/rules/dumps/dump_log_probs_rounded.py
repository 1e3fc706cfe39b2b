"""Log-probs of a rollout that went through bf16 or fp16."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from repro.doctor.artefacts.kinds import Rollout
from repro.doctor.facts.rounding import narrow_dtype
from repro.doctor.facts.train_columns import floats
from repro.doctor.rule import Found, Rule, Where

__all__ = ["RULE"]

_ENOUGH = 64
"""Different values, of which some would need the bits that are all zero."""


def _check(rollout: Rollout) -> Iterator[Found]:
    each = [floats(sample.get("rollout_log_probs")) for sample in rollout.dump.samples]
    known = [one for one in each if one is not None]
    if not known:
        return
    values = np.unique(np.concatenate(known))
    values = values[np.isfinite(values) & (values != 0)]
    if len(values) >= _ENOUGH and (dtype := narrow_dtype(values)):
        yield Found(
            f"all {len(values)} different rollout_log_probs are values of {dtype}",
            Where(str(rollout.path), item="rollout_log_probs", value=f"{values[0]!r}"),
        )


RULE = Rule(
    id="dump-log-probs-rounded",
    title="Rollout log-probs that were rounded to bf16 or fp16",
    inputs=(Rollout,),
    severity="warning",
    certainty="likely",
    why="the rounding is a hundred times the mismatch of train and rollout that is to be measured, and enters every "
    "importance ratio of --use-tis",
    cure="keep log-probs in fp32 from the engine's softmax to the dump: no cast of the logits' log_softmax, none in "
    "the "
    "generate function",
    sources=("THUDM/slime#245 (rollout_log_probs cast to bf16, fixed in 9a291fca7)",),
    check=_check,
)
