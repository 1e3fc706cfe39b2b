"""What must hold at the very first update of a GRPO run, before anything has been learnt.

Policy and reference are the same weights and score the same tokens in the same micro-batches, so their log-probs agree
bit for bit and every KL estimate is exactly 0. This holds for the first update alone: from the second on (of the same
rollout or of the next) the policy has moved. With ``num_steps_per_rollout > 1`` give the first update's columns, not
the whole rollout's.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["GRAD_NORM_BOUND", "CheckResult", "first_step_checks"]

GRAD_NORM_BOUND = 100.0
"""A first gradient norm beyond this says that log-probs, masks or normalisers are wrong, not that there is much to
learn: normalised advantages are of size 1 and a mean over tokens keeps them there. The defaults give 0.7."""


@dataclass(frozen=True)
class CheckResult:
    """One check's answer.

    Attributes:
        name: what must hold.
        passed: whether it does; a NaN never passes.
        detail: the numbers behind the answer.
    """

    name: str
    passed: bool
    detail: str


def first_step_checks(
    columns: Mapping[str, Tensor], metrics: Mapping[str, float], grad_norm_bound: float = GRAD_NORM_BOUND
) -> list[CheckResult]:
    """Judge the first update.

    Args:
        columns: ``log_probs``, ``ref_log_probs`` and ``kl``, fp32 [response tokens], and ``loss_mask``. Masked tokens
            are not looked at.
        metrics: ``kl_loss`` and ``grad_norm`` (before clipping).
        grad_norm_bound: largest gradient norm that passes.
    """
    keep = columns["loss_mask"] != 0
    tokens = int(keep.sum())
    ours, theirs = columns["log_probs"][keep].float(), columns["ref_log_probs"][keep].float()
    # Bits, not ==: a NaN equal to itself must fail, and so must -0.0 against 0.0 (a log-prob of -0.0 is not the same
    # computation).
    differ = (ours.view(torch.int32) != theirs.view(torch.int32)) | ours.isnan()
    count = int(differ.sum())
    worst = float((ours - theirs).abs().max()) if tokens else 0.0
    none = " (no unmasked token: nothing was compared)" if not tokens else ""

    kl = columns["kl"][keep].float()
    # Two-sided, and written so that NaN counts as nonzero. -0.0 == 0 holds: it counts as 0.
    nonzero = int((~(kl == 0)).sum())
    kl_loss, grad_norm = metrics["kl_loss"], metrics["grad_norm"]
    return [
        CheckResult(
            "log_probs == ref_log_probs",
            tokens > 0 and count == 0,
            f"{count} of {tokens} tokens differ, largest difference {worst!r}{none}",
        ),
        CheckResult(
            "kl == 0",
            tokens > 0 and nonzero == 0 and kl_loss == 0.0,
            f"{nonzero} of {tokens} tokens are not 0, kl_loss {kl_loss!r}{none}",
        ),
        CheckResult(
            f"grad_norm <= {grad_norm_bound!r}",
            math.isfinite(grad_norm) and 0.0 <= grad_norm <= grad_norm_bound,
            f"grad_norm {grad_norm!r}",
        ),
    ]
