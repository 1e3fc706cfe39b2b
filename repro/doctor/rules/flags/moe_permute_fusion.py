"""A mixture of experts without fused permutation."""

from __future__ import annotations

from collections.abc import Iterator

from repro.doctor.artefacts.kinds import Launch
from repro.doctor.facts.launches import absent, fsdp, moe, trains
from repro.doctor.rule import Found, Rule

__all__ = ["RULE"]

_EXCUSES = ("--megatron-deepgemm-moe-forward-layers", "--multi-lora-n-adapters")
"""What only works with the fusion off."""


def _check(launch: Launch) -> Iterator[Found]:
    if not moe(launch) or fsdp(launch) or not trains(launch) or launch.has("--moe-permute-fusion"):
        return
    if not any(launch.has(name) for name in _EXCUSES):
        message = f"--num-experts {launch.value('--num-experts')} is given without --moe-permute-fusion"
        yield Found(message, launch.where("--num-experts"), *absent(launch, "warning", "likely"))


RULE = Rule(
    id="moe-permute-fusion",
    title="A mixture of experts without --moe-permute-fusion",
    inputs=(Launch,),
    severity="warning",
    certainty="likely",
    why="some versions of Megatron and Transformer Engine have wrong gradients of experts without it",
    cure="add --moe-permute-fusion",
    sources=(
        "Miles guide: Debugging",
        "slime guide: Debugging",
        "Relax guide: Debugging",
        "THUDM/slime@624b824a8 slime/backends/megatron_utils/alignment/deepgemm_moe_forward.py:1664",
        "radixark/miles@31f1ca961 miles/backends/megatron_utils/bridge_lora_helpers.py:107",
    ),
    check=_check,
)
