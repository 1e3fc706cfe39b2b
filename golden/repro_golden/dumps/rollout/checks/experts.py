"""Rules about routed experts, which the trainer routes by when it replays (R3)."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from repro_golden.base.checks import Found, rule
from repro_golden.dumps.rollout.arrays import length, numbers
from repro_golden.dumps.rollout.checks.inputs import EXPERTS, Batch, TrainBatch, noted

__all__ = ["RULES"]

_FIELD = "rollout_routed_experts"
_EXPANDED = ("mm_vision_num_patches", "mm_audio_num_tokens")


@rule(
    id="experts-missing",
    title="Samples without routed experts under --use-rollout-routing-replay",
    severity="error",
    certainty="certain",
    why="routing cannot be replayed",
    fix="start the engine with --enable-return-routed-experts",
    sources=("Miles guide: Debugging (R3)",),
)
def _missing(batch: TrainBatch) -> Iterator[Found]:
    if batch.layers is None and batch.topk is None:
        return
    for number, sample in enumerate(batch.samples):
        if sample[_FIELD] is None:
            yield noted(number, _FIELD, "there are no routed experts")


@rule(
    id="experts-shape",
    title="Routed experts of another shape than [tokens - 1, layers, top-k]",
    severity="error",
    certainty="certain",
    why="tokens are routed by another token's or layer's experts",
    fix="look at --num-layers and --moe-router-topk, and at tokens that were appended or stripped without theirs",
    sources=(EXPERTS,),
)
def _shape(batch: Batch) -> Iterator[Found]:
    whole = next((array.shape[1:] for array in batch.experts.values() if array is not None), (0, 0))
    layers, topk = batch.layers or whole[0], batch.topk or whole[1]
    for number, experts in batch.experts.items():
        sample = batch.samples[number]
        rows = max((length(sample["tokens"]) or 0) - 1, 0)
        if experts is None:
            yield noted(number, _FIELD, "they are no whole numbers [tokens - 1, layers, top-k]")
        elif experts.shape[1:] != (layers, topk) or experts.shape[0] not in (rows, rows + _expansion(sample)):
            yield noted(number, _FIELD, f"their shape is {list(experts.shape)}, not [{rows}, {layers}, {topk}]")


def _expansion(sample: dict[str, object]) -> int:
    """How many rows more Miles has, one for each patch of an image or sound."""
    inputs = sample["multimodal_train_inputs"]
    if not isinstance(inputs, dict):
        return 0
    arrays = [numbers(inputs[key]) for key in _EXPANDED if inputs.get(key) is not None]
    return sum(int(counts.sum()) - counts.size for counts in arrays if counts is not None and counts.dtype.kind in "iu")


@rule(
    id="experts-negative",
    title="Routed experts below 0",
    severity="error",
    certainty="certain",
    why="there is no such expert: a row was never filled",
    fix="capture the rollout again",
    sources=(EXPERTS,),
)
def _negative(batch: Batch) -> Iterator[Found]:
    for number, experts in batch.experts.items():
        if experts is not None and (experts < 0).any():
            row, layer, place = np.argwhere(experts < 0)[0]
            yield noted(number, _FIELD, f"expert {experts[row, layer, place]} at token {row}, layer {layer}")


def _zero_layers(batch: Batch) -> dict[int, list[int]]:
    """Of each sample the layers whose entries are all 0; where a token has one expert, that may be expert 0."""
    layers = {}
    for number, experts in batch.experts.items():
        if experts is not None and experts.shape[0] and experts.shape[2] > 1:
            layers[number] = [k for k in range(experts.shape[1]) if not experts[:, k].any()]
    return layers


def _zero_in_all(batch: Batch) -> set[int]:
    layers = list(_zero_layers(batch).values())
    return set(layers[0]).intersection(*layers[1:]) if layers else set()


@rule(
    id="experts-layer-lost",
    title="Layers whose routed experts are all 0 in some samples",
    severity="error",
    certainty="certain",
    why="every token of that layer is replayed on expert 0",
    fix="look at pipeline stages of the engine, whose captures were not put together",
    sources=(EXPERTS,),
)
def _layer_lost(batch: Batch) -> Iterator[Found]:
    everywhere = _zero_in_all(batch)
    for number, layers in _zero_layers(batch).items():
        if lost := [k for k in layers if k not in everywhere]:
            yield noted(number, _FIELD, f"layers {', '.join(map(str, lost))} are all 0 here and not in other samples")


@rule(
    id="experts-layer-zero",
    title="Layers whose routed experts are all 0 in every sample",
    severity="warning",
    certainty="possible",
    why="right for dense layers; else every token of that layer is replayed on expert 0",
    fix="compare with the model's dense layers (first_k_dense_replace, --moe-layer-freq)",
    sources=(EXPERTS,),
)
def _layer_zero(batch: Batch) -> Iterator[Found]:
    if layers := sorted(_zero_in_all(batch)):
        yield noted(None, _FIELD, f"layers {', '.join(map(str, layers))} are all 0 in every sample")


RULES = (_missing, _shape, _negative, _layer_lost, _layer_zero)
