"""Routed experts of a rollout (R3): ids that are no expert of the model."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from repro.doctor.artefacts.kinds import HfConfig, Launch, Rollout
from repro.doctor.facts.train_columns import EXPERTS, expert_config, routed_experts
from repro.doctor.rule import Found, Rule, Where

__all__ = ["RULE"]


def _check(rollout: Rollout, launch: Launch | None, config: HfConfig | None) -> Iterator[Found]:
    _, _, count = expert_config(launch, config)
    if not count:
        return
    for place, array in routed_experts(rollout):
        if (highest := int(array.max())) >= count:
            token, layer, _ = np.argwhere(array >= count)[0]
            yield Found(
                f"sample {place} is routed to expert {highest}, and the model has {count} (the first at token {token}, "
                f"layer {layer})",
                Where(str(rollout.path), item=f"{EXPERTS} of sample {place}", value=str(highest)),
            )
            return


RULE = Rule(
    id="dump-experts-out-of-range",
    title="Routed experts that the model does not have",
    inputs=(Rollout,),
    uses=(Launch, HfConfig),
    severity="error",
    certainty="certain",
    why="the trainer replays routing on an expert that is not there: it fails in the dispatch, or reads past the end",
    cure="make sure that engine and trainer load one model (--hf-checkpoint, --num-experts); shared experts that "
    "the "
    "engine fuses into the routed ones must not be captured (--sglang-disable-shared-experts-fusion)",
    sources=("THUDM/slime@624b824a8 slime/observability/rollout_data_utils.py:58-95",),
    check=_check,
)
