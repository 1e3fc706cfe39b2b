"""The router and the experts of a layer, with the arithmetic of Qwen3-MoE in transformers.

Megatron's own rounds the router's scores before it chooses, does not renormalise a softmax over all experts, and
weights an expert's inner activations rather than its output: other bits each time. Which tokens travel where stays
Megatron's dispatcher's work.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor

from repro_core.engines.megatron.linear import product
from repro_core.model.experts import route

__all__ = ["Experts", "Router"]


class Router(TopKRouter):  # type: ignore[misc]
    """`repro_core.model.experts.route`, between Megatron's gate and its dispatcher.

    Attributes:
        router_replay: Where routing is replayed, it says which experts instead of the top k: anything with the
            ``get_replay_topk`` of Megatron's ``RouterReplay``. None leaves the choice to the scores.
        norm_topk_prob: Scale a token's weights to the sum 1. Set by `repro_core.engines.megatron.model`.
    """

    norm_topk_prob = False

    def gating(self, input: Tensor) -> Tensor:  # noqa: A002 - Megatron's name
        """Logits [..., experts] of input [..., hidden], in its dtype."""
        return product(input, self.weight)

    def routing(self, logits: Tensor, **_unused: object) -> tuple[Tensor, Tensor]:
        """Each token's weight for each expert, 0 where it was not chosen, and which were chosen: [tokens, experts]."""
        flat, chosen = logits.reshape(-1, logits.shape[-1]), None
        if self.router_replay is not None:
            scores = torch.softmax(flat.detach(), dim=-1, dtype=torch.float32)
            chosen = self.router_replay.get_replay_topk(scores, self.topk, None, None, _top)[1]
        experts, best = route(flat, self.topk, normalize=self.norm_topk_prob, replay=chosen)
        weights = torch.zeros_like(flat).scatter(1, experts, best)
        return weights, torch.zeros_like(flat, dtype=torch.bool).scatter(1, experts, True)


def _top(scores: Tensor, k: int, *_groups: object, **_named: object) -> tuple[Tensor, Tensor]:
    best, experts = torch.topk(scores, k, dim=-1)
    return best, experts


class Experts(SequentialMLP):  # type: ignore[misc]
    """A process's experts, one after the other; each token's output is weighted after the last projection."""

    def forward(
        self, permuted_local_hidden_states: Tensor, tokens_per_expert: Any, permuted_probs: Tensor
    ) -> tuple[Tensor, None]:
        """Outputs of tokens that lie expert by expert.

        Args:
            permuted_local_hidden_states: [tokens, hidden].
            tokens_per_expert: how many of them belong to each expert here.
            permuted_probs: [tokens], their weights.

        Returns:
            [tokens, hidden], and no bias.
        """
        counts = [int(count) for count in tokens_per_expert]
        parts = permuted_local_hidden_states.split_with_sizes(counts)
        outputs = [expert(part)[0] for expert, part in zip(self.local_experts, parts, strict=True)]
        weighted = torch.cat(outputs) * permuted_probs[:, None].to(permuted_local_hidden_states.dtype)
        return weighted, None
