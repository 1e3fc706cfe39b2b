"""Token log-probs and the clipped policy-gradient loss, over packed columns.

PPO clipping: Schulman et al. (2017), with separate lower and upper ranges (clip-higher: Yu et al., "DAPO", 2025).
Dual clip: Ye et al. (2020). Truncated importance sampling (TIS) between rollout engine and trainer: Yao et al.,
"Your efficient RL framework secretly brings you off-policy RL training" (2025).
Sequence-level ratios: Zheng et al., "Group Sequence Policy Optimization" (2025), in its token form (GSPO-token).
Clipped importance weights: MiniMax, "MiniMax-M1" (2025), CISPO.

All arithmetic is fp32. Masked tokens are taken out of every column before anything is computed, so that whatever lies
there (NaN and inf included) reaches neither a value nor a gradient: ``NaN * 0`` is NaN, an index is not. Sums are
`torch.sum` over the unmasked tokens in packed order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch

from repro_core.rl.kl import LOG_RATIO_BOUND

if TYPE_CHECKING:
    from torch import Tensor

    from repro_core.config import TrainConfig

__all__ = ["Columns", "LossTerms", "policy_loss", "token_log_probs", "token_weights"]


@dataclass(frozen=True)
class Columns:
    """What the loss reads; fp32 [response tokens] each but the last two. Gradients flow to the first three.

    Attributes:
        log_probs: of the policy being trained.
        entropy: of its next-token distribution.
        kl: the per-token estimate against the reference, made from `log_probs`; see `kl.kl_per_token`.
        old_log_probs: of the policy as it was when the rollout's training began.
        rollout_log_probs: as the rollout engine reported them.
        advantages: see `advantages`.
        loss_mask: int64 [response tokens], nonzero where a token counts.
        response_lengths: int64 [samples]; under gspo they must add up to the tokens, otherwise nothing reads them.
    """

    log_probs: Tensor
    entropy: Tensor
    kl: Tensor
    old_log_probs: Tensor
    rollout_log_probs: Tensor
    advantages: Tensor
    loss_mask: Tensor
    response_lengths: Tensor


@dataclass(frozen=True)
class LossTerms:
    """A part's share of the update's loss and metrics. Shares of disjoint parts of an update add up.

    Attributes:
        loss: fp32 scalar with gradient: ``pg_loss - entropy_coef * entropy_loss + kl_loss_coef * kl_loss``.
        sums: fp32 scalars without gradient, to be added over parts: ``pg_loss``, ``pg_clipfrac``, ``ppo_kl``,
            ``kl_loss``, ``entropy_loss``, ``train_rollout_logprob_abs_diff`` and, under TIS, ``ois``, ``tis``,
            ``tis_clipfrac``, ``tis_abs``.
        abs_diff_max: fp32 scalar, to be maximised over parts: the largest ``|old_log_probs - rollout_log_probs|``; 0
            without a token, NaN if one is NaN.
    """

    loss: Tensor
    sums: dict[str, Tensor]
    abs_diff_max: Tensor


def token_log_probs(logits: Tensor, targets: Tensor, loss_mask: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Log-probs of given tokens and the entropy of the distributions they came from.

    ``log_softmax(logits.float() / temperature)`` over the vocabulary, each row on its own. Masked rows are replaced by
    zeros on the way in, so that their logits and targets matter neither forward nor backward.

    Args:
        logits: [tokens, vocab] of any floating dtype, the rows that predict `targets`.
        targets: int64 [tokens].
        loss_mask: [tokens], nonzero where a token counts.
        temperature: the sampling temperature, > 0.

    Returns:
        ``log_probs`` and ``entropy`` (nats), fp32 [tokens], exactly 0 at masked tokens.
    """
    keep = loss_mask != 0
    rows = torch.where(keep[:, None], logits, torch.zeros((), dtype=logits.dtype, device=logits.device))
    log_p = torch.log_softmax(rows.float() / temperature, dim=-1)
    chosen = log_p.gather(1, torch.where(keep, targets, 0)[:, None])[:, 0]
    # what has no probability adds nothing: 0 * -inf would be NaN
    entropy = -(log_p.exp() * log_p.masked_fill(log_p == -torch.inf, 0.0)).sum(dim=-1)
    return torch.where(keep, chosen, 0.0), torch.where(keep, entropy, 0.0)


def token_weights(loss_mask: Tensor, response_lengths: Tensor, aggregation: Literal["token", "sample"]) -> Tensor:
    """Each token's weight in the mean over one update. The weights of an update add up to 1 (0 without a token).

    They are made once for the whole update and cut for its micro-batches, so accumulating gradients over micro-batches
    divides by the same number as one big batch would.

    Args:
        loss_mask: [tokens] of the whole update, nonzero where a token counts.
        response_lengths: int64 [samples] of the whole update.
        aggregation: "token": 1 / unmasked tokens of the update. "sample": 1 / (samples x unmasked tokens of the own
            sample). Samples without an unmasked token do not count as samples.

    Returns:
        fp32 [tokens], exactly 0 at masked tokens. Each weight is one correctly rounded division of integers below 2^24.

    Raises:
        ValueError: an unknown aggregation.
    """
    keep = loss_mask != 0
    if aggregation == "token":
        divisor = keep.sum().expand(len(keep))
    elif aggregation == "sample":
        parts = [part.sum() for part in torch.split(keep, response_lengths.tolist())]
        counts = torch.stack(parts) if parts else torch.zeros(0, dtype=torch.int64, device=keep.device)
        divisor = torch.repeat_interleave(counts * (counts > 0).sum(), response_lengths)
    else:
        raise ValueError(f"unknown loss aggregation {aggregation!r}; known: token, sample")
    return torch.where(keep, 1.0 / divisor.clamp(min=1).float(), 0.0)


def policy_loss(columns: Columns, weights: Tensor, config: TrainConfig) -> LossTerms:
    """The share of an update's loss that lies in some of its tokens.

    All estimators but two share PPO's clipped surrogate. Under gspo its ratio is that of the whole sample, ``exp`` of
    the mean log-ratio of its unmasked tokens (summed by `torch.sum` in order, then divided), so a sample is clipped
    whole; each token's gradient is that of its own log-prob times this ratio. Under cispo the surrogate is
    ``-weight * advantages * log_probs`` with the ratio, clamped to the clip range and without gradient, as weight:
    every token keeps a gradient, and eps_clip_c is not read.

    The log-ratio is clamped to +-`kl.LOG_RATIO_BOUND` before `exp`, so that one hopeless token cannot make inf * 0 in
    the gradient. ``pg_clipfrac`` counts tokens where the clipped surrogate is the larger one, under cispo those whose
    weight was clamped; ``ppo_kl`` is the k1 estimate ``old_log_probs - log_probs``, under gspo its mean over the
    sample, as ``ois`` is the sample's ratio.

    Args:
        columns: the tokens, all of an update or any part of it; under gspo any of its samples, each whole.
        weights: fp32 [tokens], from `token_weights` of the whole update, cut like the columns.
        config: advantage_estimator, eps_clip, eps_clip_high, eps_clip_c, entropy_coef, kl_loss_coef, use_tis,
            tis_clip, tis_clip_low.
    """
    index = torch.nonzero(columns.loss_mask)[:, 0]

    def own(column: Tensor) -> Tensor:
        return column.index_select(0, index)

    w, advantages = own(weights), own(columns.advantages)
    log_probs, old_log_probs = own(columns.log_probs), own(columns.old_log_probs)

    log_ratio = log_probs - old_log_probs
    if config.advantage_estimator == "gspo":
        log_ratio = _sample_log_ratio(log_ratio, columns)
    ratio = torch.exp(log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND))
    if config.advantage_estimator == "cispo":
        pg, stopped = _weighted_log_probs(ratio.detach(), log_probs, advantages, config)
    else:
        pg, stopped = _clipped_surrogate(ratio, advantages, config)

    gap = (old_log_probs - own(columns.rollout_log_probs)).detach()
    tis_sums: dict[str, Tensor] = {}
    if config.use_tis:
        importance = torch.exp(gap)  # inf is meant to be clamped; NaN stays NaN
        truncated = importance.clamp(config.tis_clip_low, config.tis_clip)
        pg = pg * truncated
        tis_sums = {
            "ois": (torch.exp(log_ratio.detach()) * w).sum(),
            "tis": (importance * w).sum(),
            "tis_clipfrac": ((truncated != importance).float() * w).sum(),
            "tis_abs": ((importance - 1.0).abs() * w).sum(),
        }

    pg_loss = (pg * w).sum()
    kl_loss = (own(columns.kl) * w).sum()
    entropy_loss = (own(columns.entropy) * w).sum()
    loss = pg_loss
    # A term without weight is left out: 0 * inf would be NaN, and its gradient would cost a backward for nothing.
    if config.entropy_coef:
        loss = loss - config.entropy_coef * entropy_loss
    if config.kl_loss_coef:
        loss = loss + config.kl_loss_coef * kl_loss

    sums = {
        "pg_loss": pg_loss.detach(),
        "pg_clipfrac": (stopped.float() * w).sum(),
        "ppo_kl": (-log_ratio.detach() * w).sum(),
        "kl_loss": kl_loss.detach(),
        "entropy_loss": entropy_loss.detach(),
        "train_rollout_logprob_abs_diff": (gap.abs() * w).sum(),
        **tis_sums,
    }
    abs_diff_max = gap.abs().max() if len(index) else torch.zeros((), dtype=torch.float32, device=w.device)
    return LossTerms(loss=loss, sums=sums, abs_diff_max=abs_diff_max)


def _sample_log_ratio(log_ratio: Tensor, columns: Columns) -> Tensor:
    """GSPO: each unmasked token's sample mean as value, its own log-ratio as gradient; both [unmasked tokens]."""
    samples = torch.split(columns.loss_mask != 0, columns.response_lengths.tolist())
    parts = torch.split(log_ratio.detach(), [int(keep.sum()) for keep in samples])
    means = [(part.sum() / max(len(part), 1)).expand(len(part)) for part in parts]
    # Added in log space, where what is clamped before exp has no gradient either: x - x is +0.
    return (torch.cat(means) if means else log_ratio.detach()) + (log_ratio - log_ratio.detach())


def _clipped_surrogate(ratio: Tensor, advantages: Tensor, config: TrainConfig) -> tuple[Tensor, Tensor]:
    """PPO's surrogate, and the tokens where its clipped side is the larger one."""
    plain = -advantages * ratio
    clipped = -advantages * ratio.clamp(1.0 - config.eps_clip, 1.0 + config.eps_clip_high)
    pg = torch.maximum(plain, clipped)
    if config.eps_clip_c is not None:
        # A negative advantage leaves the loss unbounded in the ratio; the dual clip bounds it at c times |advantage|.
        pg = torch.where(advantages < 0, torch.minimum(pg, -advantages * config.eps_clip_c), pg)
    return pg, clipped > plain


def _weighted_log_probs(
    ratio: Tensor, log_probs: Tensor, advantages: Tensor, config: TrainConfig
) -> tuple[Tensor, Tensor]:
    """CISPO's surrogate, and the tokens whose weight was clamped. `ratio` carries no gradient."""
    weight = ratio.clamp(1.0 - config.eps_clip, 1.0 + config.eps_clip_high)
    return -advantages * weight * log_probs, weight != ratio
