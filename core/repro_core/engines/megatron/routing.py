"""Routing replay (R3): the experts that the rollout engine chose, in place of each router's own choice.

The weights of the chosen experts are still the router's, made from its present scores, so gradients reach it. Megatron
asks ``router.router_replay`` for the choice (megatron/core/transformer/moe/moe_utils.py); what is put there here also
knows layers that are run again in the backward pass, and several models in one process.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from repro_core.config import MegatronConfig

__all__ = ["Routers"]


class _Choice:
    """What Megatron asks for one layer's experts."""

    def __init__(self) -> None:
        self._now: Tensor | None = None
        self._again: deque[Tensor] = deque()

    def give(self, experts: Tensor | None, *, again: bool) -> None:
        """The next forward pass's experts, int64 [tokens, top k]; `again`: the backward pass will run it once more."""
        self._now = experts
        if again and experts is not None:
            self._again.append(experts)

    def get_replay_topk(
        self, scores: Tensor, topk: int, num_groups: int | None, group_topk: int | None, compute: Callable[..., Any]
    ) -> Any:
        """The scores of the chosen experts, and these; see `RouterReplay.get_replay_topk`."""
        experts = self._now
        if torch._C._current_graph_task_id() != -1 and self._again:  # recomputed, in the order of the forward passes
            experts = self._again.popleft()
        if experts is None:
            return compute(scores, topk, num_groups, group_topk)
        return scores.gather(1, experts), experts


class Routers:
    """The routers of a model's chunks on this rank.

    Args:
        chunks: GPTModels, wrapped or not.
        config: whether layers are run again in the backward pass, and sequences split over tensor-parallel ranks.
    """

    def __init__(self, chunks: Sequence[Any], config: MegatronConfig) -> None:
        # selective recompute runs attention alone again: no router asks a second time
        self._recompute, self._split = config.recompute_granularity == "full", config.sequence_parallel
        self._choices: dict[int, list[tuple[int, _Choice]]] = {}
        for chunk in chunks:
            choices = []
            for router in _routers(chunk):
                router.router_replay = _Choice()
                choices.append((router.layer_number - 1, router.router_replay))
            self._choices[id(chunk)] = choices

    def replay(self, chunk: Any, routing: Tensor | None, *, trained: bool) -> None:
        """Have a chunk's next forward pass use these experts.

        Args:
            chunk: one of the chunks.
            routing: int64 [rows, local seq, layers, top k], or None for each router's own choice.
            trained: whether a backward pass follows.
        """
        for layer, choice in self._choices[id(chunk)]:
            experts = None if routing is None else _sequence_first(routing[:, :, layer], split=self._split)
            choice.give(experts, again=self._recompute and trained)


def _routers(chunk: Any) -> Iterator[Any]:
    from megatron.core.transformer.moe.router import TopKRouter

    for module in chunk.modules():
        if isinstance(module, TopKRouter):
            yield module


def _sequence_first(experts: Tensor, *, split: bool) -> Tensor:
    """[rows, seq, k] as [tokens, k] in Megatron's order, and of these what a router sees under sequence parallelism."""
    from megatron.core import parallel_state

    out = experts.transpose(0, 1)
    if split:
        ranks, rank = (
            parallel_state.get_tensor_model_parallel_world_size(),
            parallel_state.get_tensor_model_parallel_rank(),
        )
        out = out.chunk(ranks)[rank]
    return out.flatten(0, 1).contiguous()
