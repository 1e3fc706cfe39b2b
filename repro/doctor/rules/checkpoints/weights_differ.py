"""Two checkpoints that should be one: what is missing, and what differs by how much."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from repro.doctor.artefacts.kinds import HfCheckpoint, HfConfig
from repro.doctor.facts.checkpoints.names import layer_count, number, text_values
from repro.doctor.rule import Found, Rule, Where
from repro.text import count

__all__ = ["RULE"]

_MOST = 10
_LARGEST = 1 << 28
"""Elements of a tensor whose difference is computed; of larger ones it is only said that they differ."""


def _check(one: HfCheckpoint, other: HfCheckpoint) -> Iterator[Found]:
    if str(one.path) >= str(other.path):
        return  # the pair comes in both orders
    if _unlike(one.config, other.config):
        return
    twins = _quantization(one) != _quantization(other)  # one was made from the other, to hold less
    shared = sorted(set(one.tensors) & set(other.tensors))
    if len(shared) < (0.0 if twins else 0.5) * min(len(one.tensors), len(other.tensors)) or not shared:
        return  # two models, not one twice
    if twins:
        shared = [name for name in shared if one.tensors[name].dtype == other.tensors[name].dtype]
    for here, there in () if twins else ((one, other), (other, one)):
        gone = sorted(set(here.tensors) - set(there.tensors))
        if gone:
            shown = ", ".join(gone[:3]) + (", ..." if len(gone) > 3 else "")
            where = Where(str(there.path), item=gone[0])
            yield Found(f"{there.path} lacks {count(len(gone), 'tensor')} that {here.path} has: {shown}", where)
    unlike = [n for n in shared if one.tensors[n].shape != other.tensors[n].shape]
    for name in unlike[:_MOST]:
        shapes = [list(checkpoint.tensors[name].shape) for checkpoint in (one, other)]
        said = f"{name} is {shapes[0]} in {one.path} and {shapes[1]} in {other.path}"
        yield Found(said, Where(str(other.path / other.tensors[name].file), item=name))
    alike = [name for name in shared if name not in set(unlike)]
    differing = [name for name in alike if one.scan(name).digest != other.scan(name).digest]
    trained = len(differing) > 0.9 * len(alike)  # a step of training moves nearly all; a bad mapping moves some
    found = [(name, _difference(one, other, name)) for name in differing[:_MOST]]
    for name, (most, said) in found:
        if most != 0:
            where = Where(str(other.path / other.tensors[name].file), item=name, value=said)
            yield Found(f"{name} differs: {said}", where, "note" if trained else None)
    if len(differing) > _MOST:
        said = f"{len(differing)} of {len(alike)} tensors differ" + (", as after training" if trained else "")
        yield Found(said, Where(str(other.path)), "note" if trained else None)


def _unlike(one: HfConfig | None, other: HfConfig | None) -> bool:
    """Whether two configs are of two models: another width, depth or vocabulary."""
    if one is None or other is None:
        return False
    sizes = [
        (layer_count(c.values), *(number(text_values(c.values).get(key)) for key in ("hidden_size", "vocab_size")))
        for c in (one, other)
    ]
    return any(None not in pair and pair[0] != pair[1] for pair in zip(*sizes, strict=True))


def _quantization(checkpoint: HfCheckpoint) -> object:
    """How a checkpoint says that it is quantised; None where it is not."""
    values = text_values(checkpoint.config.values) if checkpoint.config else {}
    return values.get("quantization_config") or None


def _difference(one: HfCheckpoint, other: HfCheckpoint, name: str) -> tuple[float, str]:
    """The largest difference, and how to say it."""
    info, dtypes = one.tensors[name], f"{one.tensors[name].dtype} against {other.tensors[name].dtype}"
    cast = "" if one.tensors[name].dtype == other.tensors[name].dtype else f" ({dtypes})"
    size = math.prod(info.shape)
    if size > _LARGEST or any(c.tensors[name].dtype.startswith(("F4", "F6", "C")) for c in (one, other)):
        return math.nan, f"not the same bytes{cast}"
    with np.errstate(invalid="ignore", over="ignore"):
        a, b = one.read(name).astype(np.float64), other.read(name).astype(np.float64)
        gap = np.abs(a - b)
        gap[(a == b) | (np.isnan(a) & np.isnan(b))] = 0.0
    if np.isnan(gap).any():
        return math.inf, f"NaN on one side{cast}"
    most = float(gap.max(initial=0.0))
    return most, f"by {most:.6g} at most, {int((gap > 0).sum())} of {size} elements{cast}"


RULE = Rule(
    "weights-differ", "Two checkpoints of one model: tensors that are missing or differ, and by how much",
    (HfCheckpoint, HfCheckpoint), "warning", "certain",
    "parameters that were converted or mapped wrongly generate garbled text from the first rollout",
    "look at the conversion of the named tensors; if one of the two was trained further, this is as it should be",
    ("Miles guide: Debugging", "slime guide: Debugging", "Relax guide: Debugging"), _check,
)  # fmt: skip
