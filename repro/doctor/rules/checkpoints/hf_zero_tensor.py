"""Weights that are all zeros, or all one value."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterator

from repro.doctor.artefacts.kinds import HfCheckpoint, TensorInfo
from repro.doctor.facts.checkpoints.names import is_router, kind_of
from repro.doctor.rule import Found, Rule, Where

__all__ = ["RULE"]

_STARTS_AT_ZERO = re.compile(r"lora_|score\.|value_head|v_head|classifier|gating|adapter", re.IGNORECASE)
"""Heads and adapters that are made of zeros on purpose before they are trained."""

_CENTRED = ("gemma", "qwen3_next", "qwen3_5", "olmo_hybrid")
"""Models whose norms add one to their weight, so that zeros are its start."""


def _check(checkpoint: HfCheckpoint) -> Iterator[Found]:
    model = str(checkpoint.config.values.get("model_type", "")) if checkpoint.config else ""
    zeros: dict[str, list[str]] = defaultdict(list)
    others: dict[str, list[str]] = defaultdict(list)
    for name in sorted(checkpoint.tensors):
        info = checkpoint.tensors[name]
        if not _looked_at(name, info, model):
            continue
        constant = checkpoint.scan(name).constant
        if constant == 0:
            zeros[kind_of(name)].append(name)
        elif constant is not None and len(info.shape) >= 2:
            others[kind_of(name)].append(name)
    for kind, names in zeros.items():
        yield _zero(checkpoint, kind, names)
    for kind, names in others.items():
        value = checkpoint.scan(names[0]).constant
        where = Where(str(checkpoint.path / checkpoint.tensors[names[0]].file), item=names[0], value=f"{value:.6g}")
        said = f"{_count(kind, names)}: every element of {_shape(checkpoint, names[0])} is {value:.6g}"
        yield Found(said, where, "warning", "likely")


def _looked_at(name: str, info: TensorInfo, model: str) -> bool:
    """Matrices of more than one element, and norms, whose zeros switch a layer off."""
    if math.prod(info.shape) < 2 or info.dtype == "BOOL" or name.endswith("weight_shape"):
        return False
    if len(info.shape) >= 2:
        return name.endswith(("weight", "weight_packed", "weight_scale", "weight_scale_inv", "_proj")) and not (
            _STARTS_AT_ZERO.search(name)
        )
    return "norm" in name and name.endswith("weight") and not model.startswith(_CENTRED)


def _zero(checkpoint: HfCheckpoint, kind: str, names: list[str]) -> Found:
    info = checkpoint.tensors[names[0]]
    where = Where(str(checkpoint.path / info.file), item=names[0], value="0")
    said = f"{_count(kind, names)}: {_shape(checkpoint, names[0])} of zeros"
    if len(info.shape) < 2:
        said += ", which a norm that multiplies by its weight turns into a layer of zeros"
        return Found(said, where, "warning", "likely")
    if is_router(names[0], info.shape):
        said += ": a router that was quantised by mistake, or that no conversion wrote, looks like this"
    cure = ""
    if kind != names[0]:
        cure = "compare with peers in other layers and convert again; then run with --check-weight-update-equal"
    return Found(said, where, cure=cure)


def _count(kind: str, names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{kind} ({len(names)} tensors, the first is {names[0]})"


def _shape(checkpoint: HfCheckpoint, name: str) -> str:
    return " x ".join(map(str, checkpoint.tensors[name].shape))


RULE = Rule(
    "hf-zero-tensor", "Weights that are all zeros, or all one value", (HfCheckpoint,), "error", "likely",
    "a matrix of zeros passes nothing on: a router of zeros sends every token to the same experts",
    "convert the checkpoint again; for INT4 put routers and other weights that are no Linear into quantization_config."
    "ignore; then run with --check-weight-update-equal",
    ("slime guide: Debugging",), _check,
)  # fmt: skip
