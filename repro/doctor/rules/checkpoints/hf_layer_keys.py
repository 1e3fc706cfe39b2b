"""Layers with fewer tensors than their peers, and experts with holes in their numbers."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

from repro.doctor.artefacts.kinds import HfCheckpoint
from repro.doctor.facts.checkpoints.layer_kinds import kind_of_layer
from repro.doctor.facts.checkpoints.names import Stack, expert_count, main_stack, ranges, stacks
from repro.doctor.rule import Found, Rule, Severity, Where

__all__ = ["RULE"]

_Keys = frozenset[str]


def _check(checkpoint: HfCheckpoint) -> Iterator[Found]:
    values = checkpoint.config.values if checkpoint.config else {}
    names = {*checkpoint.tensors, *(checkpoint.index or {})}
    main = main_stack(names)
    for stack in sorted(stacks(names).values(), key=lambda one: one.name):
        own = values if main is not None and stack.name == main.name else {}
        yield from _fewer(checkpoint, stack, own)
        yield from _holes(checkpoint, stack, own)


def _fewer(checkpoint: HfCheckpoint, stack: Stack, values: Mapping[str, Any]) -> Iterator[Found]:
    """Layers whose keys are a part of what the layers of their kind have."""
    kinds: dict[str, dict[int, _Keys]] = defaultdict(dict)
    for layer, rests in stack.layers.items():
        kinds[kind_of_layer(values, layer, rests)][layer] = frozenset(rests)
    for kind, layers in sorted(kinds.items()):
        sets = Counter(layers.values())
        for keys in sorted(sets, key=sorted):
            wider = [other for other in sets if keys < other]
            if not wider:
                continue
            full = max(wider, key=lambda other: (sets[other], len(other), sorted(other)))
            peers = sum(count for other, count in sets.items() if full <= other)
            those = sorted(layer for layer, own in layers.items() if own == keys)
            missing = sorted(full - keys)
            shown = ", ".join(missing[:4]) + (f" and {len(missing) - 4} more" if len(missing) > 4 else "")
            who = f"layers {ranges(those)} have" if len(those) > 1 else f"layer {those[0]} has"
            said = (
                f"{stack.name}: {who} {len(keys)} of the {len(full)} tensors of {peers} {kind} peers: without {shown}"
            )
            where = Where(str(checkpoint.path), item=f"{stack.name}.{those[0]}.{missing[0]}")
            yield Found(said, where, _severity(checkpoint, stack, missing, those, peers))


def _severity(
    checkpoint: HfCheckpoint, stack: Stack, missing: list[str], those: list[int], peers: int
) -> Severity | None:
    """An error where single layers lack matrices; models are made with layers that differ, but in whole groups."""
    matrices = any(
        len(info.shape) >= 2
        for layer in stack.layers
        for rest in missing
        if (info := checkpoint.tensors.get(f"{stack.name}.{layer}.{rest.replace('experts.*', 'experts.0')}"))
    )
    return None if matrices and len(those) <= 2 < peers else "warning"


def _holes(checkpoint: HfCheckpoint, stack: Stack, values: Mapping[str, Any]) -> Iterator[Found]:
    """Experts that are missing in the numbering of a layer."""
    said = expert_count(values)
    for layer, rests in sorted(stack.layers.items()):
        groups = [experts for rest, experts in rests.items() if "experts.*" in rest]
        if not groups:
            continue
        count = max(max((max(e) + 1 for e in groups if e), default=0), said or 0)
        if count > 100_000:
            continue
        missing = {n for experts in groups for n in set(range(count)) - experts} if count else set()
        if missing:
            rest = next(
                rest
                for rest, experts in sorted(rests.items())
                if "experts.*" in rest and missing & (set(range(count)) - experts)
            )
            where = Where(str(checkpoint.path), item=f"{stack.name}.{layer}.{rest}")
            whose = f"the config says {said}" if said else f"the highest is {count - 1}"
            yield Found(f"{stack.name}.{layer}: experts {ranges(missing)} lack tensors ({whose})", where)


RULE = Rule(
    "hf-layer-keys", "Layers with fewer tensors than their peers, and missing experts", (HfCheckpoint,), "error",
    "likely",
    "what is missing keeps what it was initialised with: the first MoE layer without its router is the known case",
    "convert the checkpoint again, and compare the layer with its peers in the index; check that every pipeline stage "
    "and every expert rank was written",
    ("slime guide: Debugging",), _check,
)  # fmt: skip
