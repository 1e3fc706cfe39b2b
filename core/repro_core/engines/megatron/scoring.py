"""Columns of a micro-batch from what the last pipeline stage gives: logits whose vocabulary is split, or values."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp, all_reduce

from repro_core.rl.loss import token_log_probs

__all__ = ["split_log_probs", "token_scores"]


def token_scores(
    logits: Tensor, targets: Tensor, loss_mask: Tensor, temperature: float, first_row: int, group: ProcessGroup | None
) -> tuple[Tensor, Tensor]:
    """`loss.token_log_probs` of logits whose columns are split over the tensor-parallel ranks.

    On one rank it is `loss.token_log_probs` itself; over several the sums over the vocabulary are made per rank first.

    Args:
        logits: [tokens, columns of this rank] of any floating dtype, without padding.
        targets: int64 [tokens].
        loss_mask: [tokens], nonzero where a token counts.
        temperature: the sampling temperature, > 0.
        first_row: the token of the first column here.
        group: the tensor-parallel ranks, or None for one rank.

    Returns:
        ``log_probs`` and ``entropy`` (nats), fp32 [tokens], exactly 0 at masked tokens; the same on every rank.
    """
    if group is None or group.size() == 1:
        return token_log_probs(logits, targets, loss_mask, temperature)
    keep = loss_mask != 0
    rows = torch.where(keep[:, None], logits, torch.zeros((), dtype=logits.dtype, device=logits.device))
    chosen, entropy = split_log_probs(rows.float() / temperature, torch.where(keep, targets, 0) - first_row, group)
    return torch.where(keep, chosen, 0.0), torch.where(keep, entropy, 0.0)


def split_log_probs(logits: Tensor, targets: Tensor, group: ProcessGroup) -> tuple[Tensor, Tensor]:
    """Log-probs of given tokens and entropies, of fp32 logits [tokens, own columns] that are split over `group`.

    ``targets`` count from the first own column: outside of them another rank has the token.
    """
    chosen, entropy = _SplitLogProbs.apply(logits, targets, group)  # type: ignore[no-untyped-call]
    return chosen, entropy


class _SplitLogProbs(torch.autograd.Function):
    """log_softmax with three sums over ranks: the largest logit, the normaliser, and what is chosen and expected.

    With p = softmax(z), l = log p and H = -sum(p l): dl_c/dz = 1_c - p and dH/dz = -p (l + H), so the backward pass
    needs no communication.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, group: ProcessGroup) -> tuple[Tensor, Tensor]:
        top = logits.amax(-1)
        all_reduce(top, ReduceOp.MAX, group)
        shifted = logits - top[:, None]
        total = shifted.exp().sum(-1)
        all_reduce(total, ReduceOp.SUM, group)
        log_p = shifted - total.log()[:, None]
        here = (targets >= 0) & (targets < logits.shape[-1])
        chosen = torch.where(here, log_p.gather(1, torch.where(here, targets, 0)[:, None])[:, 0], 0.0)
        p = log_p.exp()
        # what has no probability adds nothing: 0 * -inf would be NaN
        both = torch.stack([chosen, -torch.where(p == 0, 0.0, p * log_p).sum(-1)])
        all_reduce(both, ReduceOp.SUM, group)
        ctx.save_for_backward(log_p, targets, here, both[1])
        return both[0], both[1]

    @staticmethod
    def backward(ctx: Any, chosen_grad: Tensor, entropy_grad: Tensor) -> tuple[Tensor, None, None]:
        log_p, targets, here, entropy = ctx.saved_tensors
        p = log_p.exp()
        moved = torch.where(p == 0, 0.0, p * (log_p + entropy[:, None]))
        grad = -p * chosen_grad[:, None] - moved * entropy_grad[:, None]
        at = torch.nonzero(here)[:, 0]
        grad[at, targets[at]] += chosen_grad[at]
        return grad, None, None
