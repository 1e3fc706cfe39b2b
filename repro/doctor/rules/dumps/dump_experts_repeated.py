"""Routed experts of a rollout (R3): one expert twice for a token."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from repro.doctor.artefacts.kinds import Rollout
from repro.doctor.facts.train_columns import EXPERTS, first_routed_experts
from repro.doctor.rule import Found, Rule, Where

__all__ = ["RULE"]


def _check(rollout: Rollout) -> Iterator[Found]:
    for place, array in first_routed_experts(rollout):
        ordered = np.sort(array, axis=2)
        twice = (ordered[:, :, 1:] == ordered[:, :, :-1]).any(axis=2) & array.any(axis=2)
        if twice.any():
            token, layer = np.argwhere(twice)[0]
            yield Found(
                f"sample {place}, token {token}, layer {layer}: one expert stands twice among "
                f"{array[token, layer].tolist()}"
                f" ({int(twice.sum())} of {twice.size} choices that were looked at)",
                Where(str(rollout.path), item=f"{EXPERTS} of sample {place}", value=str(array[token, layer].tolist())),
            )
            return


RULE = Rule(
    id="dump-experts-repeated",
    title="Tokens whose experts hold one expert twice",
    inputs=(Rollout,),
    severity="warning",
    certainty="likely",
    why="a router chooses different experts: rows were overwritten, padded or put together wrongly",
    cure="capture the rollout again with one engine; look at how captures of pipeline stages and turns are joined",
    sources=("THUDM/slime@624b824a8 slime/observability/rollout_data_utils.py:58-95",),
    check=_check,
)
