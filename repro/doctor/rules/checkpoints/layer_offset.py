"""Layers that hold what the other checkpoint has in another layer."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator

from repro.doctor.artefacts.kinds import HfCheckpoint
from repro.doctor.facts.checkpoints.names import place, ranges
from repro.doctor.rule import Found, Rule, Where

__all__ = ["RULE"]

_SMALLEST = 64
"""Elements of a matrix that no two layers share by chance."""


def _check(one: HfCheckpoint, other: HfCheckpoint) -> Iterator[Found]:
    if str(one.path) >= str(other.path):
        return  # the pair comes in both orders
    shifts: dict[int, dict[int, list[str]]] = defaultdict(lambda: defaultdict(list))
    known: dict[tuple[str, str, str], int] = {}
    for name in _matrices(one):
        where = place(name)
        assert where is not None
        known.setdefault((where.stack, f"{where.rest}/{where.expert}", one.scan(name).digest), where.layer)
    for name in _matrices(other):
        where = place(name)
        assert where is not None
        digest = other.scan(name).digest
        if name in one.tensors and one.scan(name).digest == digest:
            continue
        source = known.get((where.stack, f"{where.rest}/{where.expert}", digest))
        if source is not None and source != where.layer:
            shifts[where.layer - source][where.layer].append(name)
    for shift, layers in sorted(shifts.items()):
        first = min(layers)
        sources = ranges(layer - shift for layer in layers)
        said = (
            f"layers {ranges(layers)} of {other.path} hold what {one.path} has in layers {sources}: "
            f"shifted by {abs(shift)} {'up' if shift > 0 else 'down'}"
        )
        yield Found(said, Where(str(other.path / other.tensors[layers[first][0]].file), item=layers[first][0]))


def _matrices(checkpoint: HfCheckpoint) -> list[str]:
    return [
        name
        for name, info in sorted(checkpoint.tensors.items())
        if len(info.shape) >= 2
        and math.prod(info.shape) >= _SMALLEST
        and place(name)
        and checkpoint.scan(name).constant is None
    ]


RULE = Rule(
    "layer-offset", "Layers whose weights are another layer's of the other checkpoint", (HfCheckpoint, HfCheckpoint),
    "error", "certain",
    "with pp_size > 1 the layers of the second stage were written under wrong numbers: the model runs its layers in "
    "another order and generates garbled text",
    "look at how the conversion adds the layer offset of a pipeline stage (layers of the stages before it, with "
    "--decoder-first-pipeline-num-layers and uneven stages), then convert again",
    ("Miles guide: Debugging", "slime guide: Debugging", "Relax guide: Debugging"), _check,
)  # fmt: skip
