"""Two layers of one checkpoint with the same matrices."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator

from repro.doctor.artefacts.kinds import HfCheckpoint
from repro.doctor.facts.checkpoints.names import place, ranges
from repro.doctor.rule import Found, Rule, Where

__all__ = ["RULE"]

_SMALLEST = 64


def _check(checkpoint: HfCheckpoint) -> Iterator[Found]:
    held: dict[tuple[str, str, str], list[int]] = defaultdict(list)
    names: dict[tuple[str, int], str] = {}
    totals: dict[tuple[str, int], int] = defaultdict(int)
    for name, info in sorted(checkpoint.tensors.items()):
        where = place(name)
        if where is None or len(info.shape) < 2 or math.prod(info.shape) < _SMALLEST:
            continue
        stats = checkpoint.scan(name)
        if stats.constant is None:
            held[where.stack, f"{where.rest}/{where.expert}", stats.digest].append(where.layer)
            names.setdefault((where.stack, where.layer), name)
            totals[where.stack, where.layer] += 1
    pairs: dict[tuple[str, int, int], int] = defaultdict(int)
    for (stack, _, _), layers in held.items():
        for later in layers[1:]:
            pairs[stack, layers[0], later] += 1
    shifts: dict[tuple[str, int], list[tuple[int, int, int]]] = defaultdict(list)
    for (stack, first, later), count in sorted(pairs.items()):
        shifts[stack, later - first].append((first, later, count))
    for (stack, shift), found in sorted(shifts.items()):
        copies = [layer for _, layer, _ in found]
        whole = all(count == totals[stack, layer] for _, layer, count in found)
        how = "all" if whole else "some"
        sources = ranges(first for first, _, _ in found)
        said = f"{stack}: layers {ranges(copies)} have {how} matrices of layers {sources} ({shift} before)"
        name = names[stack, copies[0]]
        where_ = Where(str(checkpoint.path / checkpoint.tensors[name].file), item=name)
        yield Found(said, where_, None if whole else "warning")


RULE = Rule(
    "layers-equal", "Two layers of one checkpoint with the same matrices", (HfCheckpoint,), "error", "likely",
    "a pipeline stage was written under the numbers of another: layers run twice, others not at all, and the text is "
    "garbled",
    "convert again with the layer offset of each pipeline stage; if the model was grown by repeating layers on "
    "purpose, leave this rule out with --ignore layers-equal",
    ("Miles guide: Debugging", "slime guide: Debugging"), _check,
)  # fmt: skip
