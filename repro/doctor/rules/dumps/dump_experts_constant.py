"""Routed experts of a rollout (R3): one choice for all tokens."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from repro.doctor.artefacts.kinds import Rollout
from repro.doctor.facts.train_columns import EXPERTS, first_routed_experts
from repro.doctor.rule import Found, Rule, Where

__all__ = ["RULE"]

_ENOUGH = 128
"""Tokens among which a router that works chooses more than one set of experts."""


def _check(rollout: Rollout) -> Iterator[Found]:
    chosen = [np.sort(array, axis=2) for _, array in first_routed_experts(rollout)]
    if not chosen or len({array.shape[1:] for array in chosen}) > 1:
        return
    every = np.concatenate(chosen)
    if len(every) < _ENOUGH:
        return
    same = (every == every[:1]).all(axis=(0, 2)) & every.any(axis=(0, 2))
    if same.any():
        layers = np.flatnonzero(same)
        listed = ", ".join(map(str, layers[:8].tolist())) + (", ..." if len(layers) > 8 else "")
        yield Found(
            f"in layers {listed} all {len(every)} tokens that were looked at go to the same experts "
            f"({every[0, layers[0]].tolist()})",
            Where(str(rollout.path), item=EXPERTS, value=str(every[0, layers[0]].tolist())),
        )


RULE = Rule(
    id="dump-experts-constant",
    title="Layers in which every token goes to the same experts",
    inputs=(Rollout,),
    severity="warning",
    certainty="likely",
    why="the router has collapsed, its weights are lost (all zero after quantisation), or one row was written to all",
    cure="look at the router's weights on the engine's side (int4-router, hf-zero-tensor), and capture again",
    sources=(
        "THUDM/slime@624b824a8 slime/observability/rollout_data_utils.py:58-95",
        "slime guide: Debugging (MoE router weights become all zeros)",
    ),
    check=_check,
)
