"""The model that a launch describes against the one that was saved."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from repro.doctor.artefacts.kinds import Launch, MegatronCheckpoint
from repro.doctor.facts.checkpoints.launches import flag_of, flagged, is_whole
from repro.doctor.rule import Found, Rule, Where

__all__ = ["RULE"]

_LOADS = ("--load", "--ref-load")
_NUMBERS = (
    "--num-layers", "--hidden-size", "--ffn-hidden-size", "--num-attention-heads", "--num-query-groups",
    "--kv-channels", "--num-experts", "--moe-ffn-hidden-size", "--moe-router-topk",
    "--moe-shared-expert-intermediate-size", "--rotary-base", "--vocab-size",
)  # fmt: skip
_SWITCHES = ("--swiglu", "--qk-layernorm", "--add-qkv-bias", "--untie-embeddings-and-output-weights")
_SOFT = frozenset({"--moe-router-topk", "--rotary-base"})
"""These do not change a shape: loading succeeds, and the model is another one."""


def _check(launch: Launch, checkpoint: MegatronCheckpoint) -> Iterator[Found]:
    args = checkpoint.args
    if not args or not launch.words:
        return
    sure = flag_of(launch, checkpoint.path, _LOADS) is not None or not flagged(launch, _LOADS)
    for flag in _NUMBERS:
        asked = launch.number(flag) if launch.has(flag) else None
        held = args.get(flag[2:].replace("-", "_"))
        if asked is not None and _number(held) and asked != held:
            yield _found(launch, checkpoint, flag, f"{asked:g}", f"{held:g}", sure=sure)
    if not is_whole(launch) or not any(launch.value(flag) for flag in ("--num-layers", "--hidden-size")):
        return  # the model's flags come from elsewhere: a switch that is not seen here says nothing
    for flag in _SWITCHES:
        held = args.get(flag[2:].replace("-", "_"))
        if isinstance(held, bool) and held != launch.has(flag):
            yield _found(launch, checkpoint, flag, str(launch.has(flag)), str(held), sure=sure)


def _number(value: Any) -> bool:
    return type(value) in (int, float)


def _found(launch: Launch, checkpoint: MegatronCheckpoint, flag: str, asked: str, held: str, *, sure: bool) -> Found:
    what = "loads, and is another model" if flag in _SOFT else "does not load"
    said = f"saved with {flag[2:].replace('-', '_')} {held}, and the launch says {asked}: it {what}"
    place = launch.where(flag)
    return Found(
        said, Where(place.path, place.line, flag, asked), None if sure else "warning", None if sure else "possible",
        f"give {flag} {held}, or the checkpoint of this model; {checkpoint.path} is not it",
    )  # fmt: skip


RULE = Rule(
    "checkpoint-model-args", "Sizes of the model in the launch that are not those of the checkpoint",
    (Launch, MegatronCheckpoint), "error", "certain",
    "shapes do not fit and loading fails, or the same weights are run as another model and generate garbled text",
    "source the file of model arguments (scripts/models/) that belongs to the checkpoint",
    ("slime guide: Debugging", "slime guide: Troubleshooting"), _check,
)  # fmt: skip
