"""GRPO returns, baselines and advantages as per-token columns.

Group relative policy optimisation: Shao et al., "DeepSeekMath" (2024), section 4.1. Without the division by the
group's standard deviation: Liu et al., "Understanding R1-Zero-Like Training" (2025), known as Dr. GRPO.

All arithmetic is fp32. A sum over a group is `torch.sum` over the group's counted samples in the order in which they
lie in the rollout; a sum over tokens is `torch.sum` over the unmasked tokens, packed in order. Masked tokens are taken
out before a sum, so neither their values nor their number can move a bit of it; in the columns they are exactly 0.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["STD_EPS", "Baseline", "advantages", "baseline", "whiten"]

STD_EPS = 1e-6
"""Added to a group's standard deviation before dividing, as slime, Miles and Relax do."""

WHITEN_EPS = 1e-8


class Baseline(NamedTuple):
    """What a rollout's rewards say about each of its tokens; fp32 [tokens] each, 0 at masked tokens.

    Attributes:
        returns: the sample's reward, less ``kl_coef`` times the sum of its KL, on every unmasked token.
        values: the mean of that over the counted samples of the group. It is GRPO's Monte-Carlo stand-in for a critic.
        scale: the group's standard deviation (Bessel-corrected) plus `STD_EPS`, or 1 without std normalisation.
    """

    returns: Tensor
    values: Tensor
    scale: Tensor


def baseline(
    rewards: Tensor,
    group_index: Tensor,
    loss_mask: Tensor,
    response_lengths: Tensor,
    *,
    kl: Tensor,
    kl_coef: float,
    std_normalization: bool,
) -> Baseline:
    """Returns, group baselines and scales of a rollout.

    A sample whose tokens are all masked does not count: not in its group's mean, nor in its standard deviation. A group
    with equal finite rewards, one counted sample included, gets the reward itself as mean, so that its advantages are
    exactly 0 and not the rounding error of a division. A NaN or infinite reward of a counted sample is passed on.

    Args:
        rewards: fp32 [samples].
        group_index: int64 [samples]; equal numbers belong to one group.
        loss_mask: int64 [tokens], the response tokens of all samples one after the other.
        response_lengths: int64 [samples]; they add up to tokens.
        kl: fp32 [tokens], the estimate that is taken off the reward; read only where `kl_coef` is not 0.
        kl_coef: weight of the sum of a sample's KL.
        std_normalization: True for GRPO, False for Dr. GRPO.
    """
    keep = loss_mask != 0
    sample_of_token = torch.repeat_interleave(torch.arange(len(rewards), device=keep.device), response_lengths)
    lengths = response_lengths.tolist()
    kept = torch.split(keep, lengths)
    penalised = rewards.float().clone()
    if kl_coef:
        for sample, part in enumerate(torch.split(kl.float(), lengths)):
            penalised[sample] -= kl_coef * part[kept[sample]].sum()
    counted = torch.tensor([bool(part.any()) for part in kept], dtype=torch.bool, device=keep.device)

    mean, scale = torch.zeros_like(penalised), torch.ones_like(penalised)
    for group in torch.unique(group_index):
        members = (group_index == group) & counted
        own = penalised[members]
        if len(own) == 0:
            continue
        low, high = own.min(), own.max()
        equal = bool(low == high) and bool(torch.isfinite(low))
        mean[members] = low if equal else own.sum() / len(own)
        if std_normalization:
            centred = own - mean[members]
            scale[members] = torch.sqrt(centred.square().sum() / max(len(own) - 1, 1)) + STD_EPS

    def spread(per_sample: Tensor) -> Tensor:
        return torch.where(keep, per_sample[sample_of_token], 0.0)

    return Baseline(spread(penalised), spread(mean), spread(scale))


def advantages(base: Baseline, loss_mask: Tensor) -> Tensor:
    """``(returns - values) / scale`` at unmasked tokens, exactly 0 at masked ones; fp32 [tokens]."""
    keep = loss_mask != 0
    return torch.where(keep, (base.returns - base.values) / torch.where(keep, base.scale, 1.0), 0.0)


def whiten(column: Tensor, loss_mask: Tensor) -> Tensor:
    """Shift and scale the unmasked tokens to mean 0 and standard deviation 1; masked tokens are exactly 0.

    Two passes (mean, then squares of what is centred), Bessel-corrected, times ``rsqrt(variance + 1e-8)``. One unmasked
    token gives 0; none gives all zeros.

    Args:
        column: fp32 [tokens].
        loss_mask: [tokens], nonzero where a token counts.
    """
    keep = loss_mask != 0
    own = column.float()[keep]
    out = torch.zeros_like(column, dtype=torch.float32)
    if len(own):
        centred = own - own.sum() / len(own)
        variance = centred.square().sum() / max(len(own) - 1, 1)
        out[keep] = centred * torch.rsqrt(variance + WHITEN_EPS)
    return out
