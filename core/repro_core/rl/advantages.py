"""Returns, baselines and advantages as per-token columns.

Group relative policy optimisation: Shao et al., "DeepSeekMath" (2024), section 4.1. Without the division by the
group's standard deviation: Liu et al., "Understanding R1-Zero-Like Training" (2025), known as Dr. GRPO. The other
estimators (see `estimate`): Hu, "REINFORCE++" (2025), and GAE, see `values`.

All arithmetic is fp32. A sum over a group is `torch.sum` over the group's counted samples in the order in which they
lie in the rollout; a sum over tokens is `torch.sum` over the unmasked tokens, packed in order. Masked tokens are taken
out before a sum, so neither their values nor their number can move a bit of it; in the columns they are exactly 0.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import torch

from repro_core.rl.values import discounted_sums, gae, token_rewards

if TYPE_CHECKING:
    from torch import Tensor

    from repro_core.config import TrainConfig

__all__ = ["STD_EPS", "Baseline", "Estimate", "advantages", "baseline", "estimate", "whiten"]

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


class Estimate(NamedTuple):
    """What an estimator makes of a rollout; fp32 [tokens] each, 0 at masked tokens, without gradient.

    Attributes:
        returns: what a token earned: the sample's reward less KL, or the (discounted) sum of what followed.
        values: what was expected: the group's mean, the critic's values, or 0.
        advantages: what the policy's loss weighs tokens with.
    """

    returns: Tensor
    values: Tensor
    advantages: Tensor


@torch.no_grad()
def estimate(
    config: TrainConfig,
    *,
    rewards: Tensor,
    group_index: Tensor,
    loss_mask: Tensor,
    response_lengths: Tensor,
    kl: Tensor,
    values: Tensor | None,
    show: Callable[[str, Tensor], None] = lambda *_: None,
) -> Estimate:
    """Returns, values and advantages of a whole rollout, as ``config.advantage_estimator`` says.

    - grpo, gspo, cispo: returns are the reward less ``kl_coef`` times the sum of the sample's KL, values the group's
      mean of that, advantages ``(returns - values) / scale``; see `baseline`. The last two differ in the loss alone.
    - reinforce_plus_plus: returns are the discounted sums (gamma) of `values.token_rewards`, values 0, advantages the
      whitened returns.
    - reinforce_plus_plus_baseline: returns are ``reward - kl_coef * KL`` with each token's own KL, values the group's
      mean reward, advantages ``(reward - values) - kl_coef * KL``, whitened.
    - ppo: `values.gae` over `values.token_rewards` and the critic's values.

    With ``config.whiten_advantages`` those of grpo, gspo, cispo and ppo are whitened too, over all unmasked tokens of
    the rollout. Masked tokens and samples without an unmasked token count nowhere and are not read; a masked token
    inside a response is skipped as if it were not there.

    Args:
        config: advantage_estimator, gamma, lambd, kl_coef, grpo_std_normalization, whiten_advantages.
        rewards: fp32 [samples].
        group_index: int64 [samples]; equal numbers belong to one group.
        loss_mask: int64 [tokens], the response tokens of all samples one after the other.
        response_lengths: int64 [samples]; they add up to tokens.
        kl: fp32 [tokens], of the old policy against the reference; read only where ``config.kl_coef`` is not 0.
        values: fp32 [tokens], the critic's, when the rollout's training began; read only under ppo.
        show: called with each column and its name before anything is made from it.

    Raises:
        ValueError: ppo without values, or an unknown estimator.
    """
    name, coef = config.advantage_estimator, config.kl_coef
    whitened = config.whiten_advantages
    if name in ("grpo", "gspo", "cispo"):
        base = baseline(
            rewards,
            group_index,
            loss_mask,
            response_lengths,
            kl=kl,
            kl_coef=coef,
            std_normalization=config.grpo_std_normalization,
        )
        returns, values = base.returns, base.values
        show("returns", returns)
        show("values", values)
        column = advantages(base, loss_mask)
    elif name == "reinforce_plus_plus":
        earned = token_rewards(rewards, loss_mask, response_lengths, kl=kl, kl_coef=coef)
        returns = discounted_sums(earned, loss_mask, response_lengths, config.gamma)
        values, whitened = torch.zeros_like(returns), True
        show("returns", returns)
        show("values", values)
        column = returns
    elif name == "reinforce_plus_plus_baseline":
        returns, values, column = _less_group_mean(rewards, group_index, loss_mask, response_lengths, kl, coef)
        whitened = True
        show("returns", returns)
        show("values", values)
    elif name == "ppo":
        if values is None:
            raise ValueError("advantage_estimator ppo needs the critic's values")
        values = torch.where(loss_mask != 0, values.float(), 0.0)
        show("values", values)
        earned = token_rewards(rewards, loss_mask, response_lengths, kl=kl, kl_coef=coef)
        returns, column = gae(earned, values, loss_mask, response_lengths, gamma=config.gamma, lambd=config.lambd)
        show("returns", returns)
    else:
        raise ValueError(f"unknown advantage estimator {name!r}")
    column = whiten(column, loss_mask) if whitened else column
    show("advantages", column)
    return Estimate(returns, values, column)


def _less_group_mean(
    rewards: Tensor, group_index: Tensor, loss_mask: Tensor, response_lengths: Tensor, kl: Tensor, kl_coef: float
) -> Estimate:
    """REINFORCE++ with a group's mean reward as baseline; the KL is each token's own and in no mean."""
    base = baseline(rewards, group_index, loss_mask, response_lengths, kl=kl, kl_coef=0.0, std_normalization=False)
    penalty = torch.where(loss_mask != 0, kl_coef * kl.float(), 0.0) if kl_coef else torch.zeros_like(base.returns)
    return Estimate(base.returns - penalty, base.values, advantages(base, loss_mask) - penalty)


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
    masks = torch.split(keep, lengths)
    penalised = rewards.float().clone()
    if kl_coef:
        for sample, part in enumerate(torch.split(kl.float(), lengths)):
            penalised[sample] -= kl_coef * part[masks[sample]].sum()
    counted = torch.tensor([bool(part.any()) for part in masks], dtype=torch.bool, device=keep.device)

    mean, scale = torch.zeros_like(penalised), torch.ones_like(penalised)
    for group in torch.unique(group_index):
        members = (group_index == group) & counted
        group_rewards = penalised[members]
        if len(group_rewards) == 0:
            continue
        low, high = group_rewards.min(), group_rewards.max()
        equal = bool(low == high) and bool(torch.isfinite(low))
        mean[members] = low if equal else group_rewards.sum() / len(group_rewards)
        if std_normalization:
            centred = group_rewards - mean[members]
            scale[members] = torch.sqrt(centred.square().sum() / max(len(group_rewards) - 1, 1)) + STD_EPS

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
    values = column.float()[keep]
    out = torch.zeros_like(column, dtype=torch.float32)
    if len(values):
        centred = values - values.sum() / len(values)
        variance = centred.square().sum() / max(len(values) - 1, 1)
        out[keep] = centred * torch.rsqrt(variance + WHITEN_EPS)
    return out
