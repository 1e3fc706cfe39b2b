"""Whole tensors from all ranks, one layer after the other."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch.distributed as dist
from torch import Tensor

from repro_core.config import ModelConfig
from repro_core.engines.megatron.weights import Where, layout, names
from repro_core.model.layout_free import Joining, LayoutError, Local

__all__ = ["whole_tensors"]


def whole_tensors(
    model: ModelConfig, held: Sequence[tuple[Where, Mapping[str, Tensor]]], *, lead: bool
) -> Iterator[tuple[str, Tensor]]:
    """The canonical tensors, on the CPU of the lead; no more than a layer is gathered at once.

    Every rank must exhaust the iterator, and only the lead's (rank 0's) yields any.

    Args:
        model: its sizes.
        held: this rank's chunks and their tensors, by Megatron's names.
        lead: whether this is rank 0.

    Raises:
        LayoutError: on the lead: an element is missing, or replicas differ. It is raised after every layer was
            gathered, so that no rank is left alone in a collective operation.
    """
    failure: LayoutError | None = None
    for layer in (None, *range(model.num_hidden_layers)):
        mine = [
            (local, tensors[name].cpu())
            for where, tensors in held
            for name, local in layout(model, where).items()
            if _layer(local.boxes[0].name) == layer
        ]
        every: list[list[tuple[Local, Tensor]]] | None = [[]] * dist.get_world_size() if lead else None
        dist.gather_object(mine, every)
        if every is None or failure is not None:
            continue
        joining = Joining({name: shape for name, shape in names(model).items() if _layer(name) == layer})
        try:
            for local, tensor in (part for rank in every for part in rank):
                joining.add(local, tensor)
            whole = joining.finish()
        except LayoutError as error:
            failure = error
        else:
            yield from whole.items()
    if failure is not None:
        raise failure


def _layer(name: str) -> int | None:
    """The number of the layer that a canonical tensor is of; None for the embedding and what follows the layers."""
    parts = name.split(".")
    return int(parts[2]) if parts[:2] == ["model", "layers"] else None
