"""Per-token estimators of KL(policy || reference) from the log-probs of sampled tokens.

Schulman, "Approximating KL divergence" (2020). With ``log_ratio = log_probs - ref_log_probs`` of a token drawn from
the policy:

=========  ================================  ========  ==========================================
name       value                             unbiased  range
=========  ================================  ========  ==========================================
k1         log_ratio                         yes       any sign
k2         log_ratio ** 2 / 2                no        >= 0
k3         exp(-log_ratio) - 1 + log_ratio   yes       >= 0 up to rounding
low_var    k3, clamped to [-10, 10]          no        the name that slime, Miles and Relax use
=========  ================================  ========  ==========================================
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import torch

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["LOG_RATIO_BOUND", "kl_per_token"]

LOG_RATIO_BOUND = 20.0
"""Log-ratios are clamped to [-20, 20] before `exp`: e^20 = 4.9e8 is far outside any clip range, and neither `exp` nor
its gradient (0 * inf) can turn one hopeless token into inf or NaN. A NaN log-ratio stays NaN."""

LOW_VAR_BOUND = 10.0


def kl_per_token(
    log_probs: Tensor,
    ref_log_probs: Tensor,
    loss_mask: Tensor,
    estimator: Literal["k1", "k2", "k3", "low_var"],
) -> Tensor:
    """The estimate for each token; exactly 0 (value and gradient) at masked tokens, whatever lies there.

    Elementwise in fp32: no reduction, so no order to speak of. Equal log-probs give exactly 0 (k1 gives x - x = +0).

    Args:
        log_probs: fp32 [tokens], of the policy that sampled (or is being trained).
        ref_log_probs: fp32 [tokens], of the frozen reference.
        loss_mask: [tokens], nonzero where a token counts.
        estimator: k1, k2, k3 or low_var; see the module.

    Returns:
        fp32 [tokens].

    Raises:
        ValueError: an unknown estimator.
    """
    keep = loss_mask != 0
    zero = torch.zeros((), dtype=torch.float32, device=log_probs.device)
    # Masked on the way in, not on the way out: where() after exp() would still multiply a NaN into the gradient.
    log_ratio = torch.where(keep, log_probs.float(), zero) - torch.where(keep, ref_log_probs.float(), zero)
    if estimator == "k1":
        return log_ratio
    if estimator == "k2":
        return log_ratio.square() / 2
    if estimator in ("k3", "low_var"):
        # Clamped in both terms: with the exponential alone a token that the policy rules out (-inf) had a negative KL.
        bounded = log_ratio.clamp(min=-LOG_RATIO_BOUND)
        # expm1, not exp - 1: at a log-ratio of 1e-4 the value is 5e-9, and exp - 1 alone is off by up to 6e-8.
        k3 = torch.expm1(-bounded) + bounded
        return k3.clamp(-LOW_VAR_BOUND, LOW_VAR_BOUND) if estimator == "low_var" else k3
    raise ValueError(f"unknown KL estimator {estimator!r}; known: k1, k2, k3, low_var")
