"""How tensor-parallel ranks divide the tensors of `GPTModel`: one function for each way."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from repro_core.config import ModelConfig
from repro_core.model.layout_free import Ints, LayoutError, Local, box, padding, stack

__all__ = ["CUTS", "Fused", "How", "Where"]

How = Literal["whole", "rows", "columns", "groups", "vocabulary"]


@dataclass(frozen=True)
class Where:
    """What a chunk of the model on one rank is: `GPTModel`'s place in the layout.

    Attributes:
        tp: Tensor-parallel ranks.
        tp_rank: This one among them.
        ep: Expert-parallel ranks.
        ep_rank: This one among them.
        expert_tp: Tensor-parallel ranks of one expert; None for `tp` (with `tp_rank`), which is Megatron's default.
        expert_tp_rank: This one among them, where `expert_tp` is given.
        first_layer: How many layers lie before this chunk.
        layers: How many it has; None for all that follow.
        first: Whether it has the embedding (``pre_process``).
        last: Whether it has the final norm and the output layer (``post_process``).
        vocab: Rows of the padded vocabulary, over all ranks; None for no padding.
        critic: Whether the output layer is a value head.
        fused_norms: Whether norms are weights of the linear layer after them, as in Transformer Engine's spec.
        grouped_experts: Whether a layer's experts are one module with numbered weights (TEGroupedMLP).
    """

    tp: int = 1
    tp_rank: int = 0
    ep: int = 1
    ep_rank: int = 0
    expert_tp: int | None = None
    expert_tp_rank: int = 0
    first_layer: int = 0
    layers: int | None = None
    first: bool = True
    last: bool = True
    vocab: int | None = None
    critic: bool = False
    fused_norms: bool = False
    grouped_experts: bool = False

    def __str__(self) -> str:
        layers = f"{'all' if self.layers is None else self.layers} layers from {self.first_layer}"
        return f"the rank with tp {self.tp_rank}/{self.tp}, ep {self.ep_rank}/{self.ep}, {layers}"

    def layers_of(self, model: ModelConfig) -> range:
        """Numbers of its layers in the whole model.

        Raises:
            LayoutError: the model has no such layers.
        """
        count = model.num_hidden_layers
        stop = count if self.layers is None else self.first_layer + self.layers
        if not 0 <= self.first_layer <= stop <= count:
            raise LayoutError(f"decoder.layers: {self} is not inside a model of {count} layers")
        return range(self.first_layer, stop)

    def experts_of(self, model: ModelConfig) -> range:
        """Numbers of its experts in the whole model.

        Raises:
            LayoutError: they do not divide.
        """
        count, remainder = divmod(model.num_experts, self.ep)
        if remainder or not 0 <= self.ep_rank < self.ep:
            raise LayoutError(
                f"mlp.experts: {model.num_experts} experts do not divide over {self.ep} expert-parallel ranks"
            )
        return range(self.ep_rank * count, (self.ep_rank + 1) * count)

    @property
    def expert_shard(self) -> tuple[int, int]:
        """Rank and number of ranks that one expert's matrices are divided over."""
        return (self.tp_rank, self.tp) if self.expert_tp is None else (self.expert_tp_rank, self.expert_tp)


class Fused(NamedTuple):
    """A tensor of `GPTModel` to be divided.

    Attributes:
        name: Megatron's.
        parts: Names and shapes of the canonical tensors in it.
        rank: The rank whose part is wanted.
        ranks: How many divide it.
        model: The model's sizes.
        vocab: Rows of the padded vocabulary; None for no padding.
    """

    name: str
    parts: Sequence[tuple[str, Ints]]
    rank: int
    ranks: int
    model: ModelConfig
    vocab: int | None

    def width(self, rows: int) -> int:
        """How many of so many rows one rank has.

        Raises:
            LayoutError: they do not divide.
        """
        if not 0 <= self.rank < self.ranks:
            raise LayoutError(f"{self.name}: there is no rank {self.rank} among {self.ranks}")
        if rows % self.ranks:
            raise LayoutError(f"{self.name}: {rows} do not divide over {self.ranks} tensor-parallel ranks")
        return rows // self.ranks


def _whole(t: Fused) -> Local:
    """On every rank the same: norms, routers, biases added after the ranks' sum, value heads."""
    name, shape = t.parts[0]
    return box(name, shape, [0] * len(shape), shape)


def _rows(t: Fused) -> Local:
    """Each rank its rows of every part, one part after the other: gate, then up."""
    pieces = []
    for name, shape in t.parts:
        width = t.width(shape[0])
        pieces.append(box(name, shape, (t.rank * width, 0), (width, shape[1])))
    return stack(pieces)


def _columns(t: Fused) -> Local:
    """Each rank its columns: what a matrix reads of inputs that are divided by rows."""
    name, shape = t.parts[0]
    width = t.width(shape[1])
    return box(name, shape, (0, t.rank * width), (shape[0], width))


def _groups(t: Fused) -> Local:
    """Queries, key and value of each key-value head in turn, and each rank its rows of that.

    Where ranks are more than key-value heads, a head's rows end inside a rank's, as in megatron-core.
    """
    model, ranks = t.model, t.ranks
    heads, groups, wide = model.num_attention_heads, model.num_key_value_heads, model.head_dim
    if heads % ranks or (groups % ranks and ranks % groups):
        raise LayoutError(
            f"{t.name}: {heads} heads in {groups} key-value groups do not divide over {ranks} tensor-parallel ranks"
        )
    width = t.width((heads + 2 * groups) * wide)
    mine, pieces, row = range(t.rank * width, (t.rank + 1) * width), [], 0
    for group in range(groups):
        for (name, shape), count in zip(t.parts, (heads // groups, 1, 1), strict=True):
            rows = count * wide
            start, stop = max(row, mine.start), min(row + rows, mine.stop)
            if start < stop:
                at = (group * rows + start - row, *(0 for _ in shape[1:]))
                pieces.append(box(name, shape, at, (stop - start, *shape[1:])))
            row += rows
    return stack(pieces)


def _vocabulary(t: Fused) -> Local:
    """Each rank its rows of the padded vocabulary; what lies past the true one stands for nothing."""
    name, shape = t.parts[0]
    padded = shape[0] if t.vocab is None else t.vocab
    if padded < shape[0]:
        raise LayoutError(f"{t.name}: a padded vocabulary of {padded} rows does not hold the {shape[0]} of {name}")
    width = t.width(padded)
    first = min(t.rank * width, shape[0])
    true = min((t.rank + 1) * width, shape[0]) - first  # 0 on a rank of padding alone, whose box still names the tensor
    return stack([box(name, shape, (first, 0), (true, shape[1])), padding((width - true, shape[1]))])


CUTS: dict[How, Callable[[Fused], Local]] = {
    "whole": _whole,
    "rows": _rows,
    "columns": _columns,
    "groups": _groups,
    "vocabulary": _vocabulary,
}
