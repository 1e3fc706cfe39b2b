"""Padding where variable-length samples are packed anyway."""

from __future__ import annotations

from collections.abc import Iterator

from repro.doctor.artefacts.kinds import Launch
from repro.doctor.facts.launches import fsdp, size, tempered, trains
from repro.doctor.rule import Found, Rule

__all__ = ["RULE"]

_MULTIPLIER = "--data-pad-size-multiplier"
_USUAL = 128
_WASTE = 8
"""Part of a micro-batch's tokens, as 1/N, that padding may take."""


@tempered("note")
def _check(launch: Launch) -> Iterator[Found]:
    if not trains(launch):
        return
    dynamic = launch.has("--use-dynamic-batch-size")
    if launch.value("--qkv-format") == "bshd":
        where = launch.where("--qkv-format")
        if dynamic:
            yield Found("--qkv-format bshd with --use-dynamic-batch-size: the trainer stops", where, "error")
        elif fsdp(launch):
            yield Found("--qkv-format bshd is for Megatron alone: the trainer stops", where, "error")
        else:
            yield Found("--qkv-format bshd pads each sample of a micro-batch to the longest one", where)
    if dynamic and launch.has("--micro-batch-size"):
        message = "--micro-batch-size is not looked at with --use-dynamic-batch-size"
        yield Found(message, launch.where("--micro-batch-size"), cure="remove --micro-batch-size")
    multiplier, tensor = size(launch, _MULTIPLIER, _USUAL), size(launch, "--tensor-model-parallel-size")
    cap = launch.number("--max-tokens-per-gpu")
    if dynamic and cap and multiplier and tensor and multiplier > _USUAL and multiplier * tensor * _WASTE > cap:
        step = multiplier * tensor
        message = (
            f"{_MULTIPLIER} {multiplier} x TP {tensor}: micro-batches of {cap:.0f} tokens get up to {step} of padding"
        )
        yield Found(message, launch.where(_MULTIPLIER), cure=f"remove it: {_USUAL} is the default")


RULE = Rule(
    id="padded-manually",
    title="Padding by hand where samples are packed",
    inputs=(Launch,),
    severity="note",
    certainty="certain",
    why="samples of any length are packed into micro-batches; padding costs compute and memory and corrects nothing",
    cure="--qkv-format thd (the default) with --use-dynamic-batch-size; bshd only for attention that cannot pack",
    sources=(
        "Miles FAQ",
        "radixark/miles@31f1ca961 miles/utils/arguments.py:270,3514; miles/backends/training_utils/data.py:83",
        "THUDM/slime@624b824a8 slime/utils/arguments.py:717,1423; slime/backends/megatron_utils/data.py:47",
    ),
    check=_check,
)
