"""Rewards of single tokens, what is summed up from them, and the loss of a critic.

Generalised advantage estimation: Schulman et al., "High-Dimensional Continuous Control Using Generalized Advantage
Estimation" (2015). The clipped value loss is that of PPO's authors' code (Schulman et al., 2017).

All arithmetic is fp32. The unmasked tokens of a sample are its sequence: a masked token is skipped as if it had never
been sampled, so neither its place nor its content can move a bit. A recursion runs from a sample's last unmasked token
to its first, one token at a time, all samples side by side and none reading another: no reduction, hence no order to
choose. Settings (gamma, lambda, coefficients) are rounded to fp32 where they meet a column.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from repro_core.rl.batching import pack, pad

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Gae", "discounted_sums", "gae", "token_rewards", "value_loss"]


class Gae(NamedTuple):
    """Advantages of a critic's values and what the values should have been; fp32 [tokens], 0 at masked tokens."""

    returns: Tensor
    advantages: Tensor


def token_rewards(
    rewards: Tensor, loss_mask: Tensor, response_lengths: Tensor, *, kl: Tensor, kl_coef: float
) -> Tensor:
    """The reward of each token: ``-kl_coef * kl``, and at a sample's last unmasked token the sample's reward added.

    Args:
        rewards: fp32 [samples]; that of a sample without an unmasked token is not read.
        loss_mask: [tokens], nonzero where a token counts.
        response_lengths: int64 [samples]; they add up to tokens.
        kl: fp32 [tokens]; read only where `kl_coef` is not 0.
        kl_coef: weight of the KL.

    Returns:
        fp32 [tokens], exactly 0 at masked tokens.
    """
    keep = loss_mask != 0
    out = torch.zeros(len(keep), dtype=torch.float32, device=keep.device)
    if kl_coef:
        out = torch.where(keep, -kl_coef * kl.float(), 0.0)
    index = torch.nonzero(keep)[:, 0]
    end, last, samples = 0, [], []
    for sample, count in enumerate(_counts(keep, response_lengths)):
        end += count
        if count:
            last.append(end - 1)
            samples.append(sample)
    at = index[last]
    out[at] = out[at] + rewards.float()[samples]
    return out


def discounted_sums(column: Tensor, loss_mask: Tensor, response_lengths: Tensor, decay: float) -> Tensor:
    """``s_t = column_t + decay * s_(t+1)`` over each sample's unmasked tokens, with 0 after the last.

    Two roundings per token: the product, then the sum.

    Args:
        column: fp32 [tokens].
        loss_mask: [tokens], nonzero where a token counts.
        response_lengths: int64 [samples]; they add up to tokens.
        decay: in [0, 1].

    Returns:
        fp32 [tokens], exactly 0 at masked tokens.
    """
    keep = loss_mask != 0
    counts = _counts(keep, response_lengths)
    return _spread(_sums(_rows(column, keep, counts), decay), keep, counts)


def gae(
    rewards: Tensor, values: Tensor, loss_mask: Tensor, response_lengths: Tensor, *, gamma: float, lambd: float
) -> Gae:
    """Generalised advantage estimates and the critic's targets.

    With ``delta_t = (reward_t + gamma * value_(t+1)) - value_t`` and value 0 after a sample's last unmasked token,
    advantages are `discounted_sums` of delta with decay ``gamma * lambd`` (one product in double precision), and
    ``returns = advantages + values``.

    Args:
        rewards: fp32 [tokens], see `token_rewards`.
        values: [tokens], the critic's, of the state in which each token was chosen. No gradient flows back to them.
        loss_mask: [tokens], nonzero where a token counts.
        response_lengths: int64 [samples]; they add up to tokens.
        gamma: discount of what follows a token.
        lambd: 0 is one-step temporal difference, 1 is the discounted return less the value.
    """
    keep = loss_mask != 0
    counts = _counts(keep, response_lengths)
    reward, value = _rows(rewards, keep, counts), _rows(values.detach(), keep, counts)
    following = torch.cat([value[:, 1:], torch.zeros_like(value[:, :1])], dim=1)
    delta = reward + gamma * following - value
    advantage = _sums(delta, gamma * lambd)
    return Gae(returns=_spread(advantage + value, keep, counts), advantages=_spread(advantage, keep, counts))


def value_loss(
    values: Tensor,
    old_values: Tensor,
    returns: Tensor,
    loss_mask: Tensor,
    weights: Tensor,
    value_clip: float,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The share of a critic's loss that lies in some tokens of an update. Shares of disjoint parts add up.

    Per token ``0.5 * max((v - R)^2, (clip(v, old - value_clip, old + value_clip) - R)^2)``: a value that has moved
    further than `value_clip` towards its target gets no gradient. Masked tokens are taken out before anything is
    computed; the sum is `torch.sum` over the unmasked tokens in packed order.

    Args:
        values: fp32 [tokens], of the critic being trained; gradient flows to them alone.
        old_values: fp32 [tokens], of the critic as it was when the rollout's training began.
        returns: fp32 [tokens], the targets.
        loss_mask: [tokens], nonzero where a token counts.
        weights: fp32 [tokens], from `loss.token_weights` of the whole update, cut like the columns.
        value_clip: > 0.

    Returns:
        The loss, an fp32 scalar with gradient, and fp32 scalars without one, to be added over parts: ``value_loss``,
        and ``value_clipfrac``, the share of tokens whose clipped error is the larger one.
    """
    index = torch.nonzero(loss_mask)[:, 0]

    def own(column: Tensor) -> Tensor:
        return column.float().index_select(0, index)

    w, value = own(weights), own(values)
    old, target = own(old_values.detach()), own(returns.detach())
    plain = (value - target).square()
    # Bounds, not old + clip(value - old): inside them a value must stay itself to the bit.
    clipped = (torch.clamp(value, old - value_clip, old + value_clip) - target).square()
    loss = (0.5 * torch.maximum(plain, clipped) * w).sum()
    clipfrac = ((clipped > plain).float() * w).sum()
    return loss, {"value_loss": loss.detach(), "value_clipfrac": clipfrac}


def _counts(keep: Tensor, response_lengths: Tensor) -> list[int]:
    """Unmasked tokens of each sample."""
    return [int(part.sum()) for part in torch.split(keep, response_lengths.tolist())] if len(response_lengths) else []


def _rows(column: Tensor, keep: Tensor, counts: Sequence[int]) -> Tensor:
    """The unmasked tokens, fp32 [samples, most]; 0 to the right of a shorter sample, as after every last token."""
    return pad(column.float()[keep], counts, 0.0)


def _sums(rows: Tensor, decay: float) -> Tensor:
    out, following = torch.empty_like(rows), torch.zeros(len(rows), dtype=rows.dtype, device=rows.device)
    for at in reversed(range(rows.shape[1])):
        following = rows[:, at] + decay * following
        out[:, at] = following
    return out


def _spread(rows: Tensor, keep: Tensor, counts: Sequence[int]) -> Tensor:
    """The inverse of `_rows`, exactly 0 at masked tokens."""
    out = torch.zeros(len(keep), dtype=torch.float32, device=keep.device)
    out[keep] = pack(rows, counts)
    return out
