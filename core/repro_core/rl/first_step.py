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

from repro_core.model.layout_free import BITS

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
        columns: ``log_probs``, ``ref_log_probs`` and ``kl`` [response tokens], compared in their own dtype, and
            ``loss_mask``. Masked tokens are not looked at.
        metrics: ``kl_loss`` and ``grad_norm`` (before clipping), and ``ppo_kl`` where there is one: the policy against
            its own old log-probs, of which it has not moved away yet.
        grad_norm_bound: largest gradient norm that passes.
    """
    keep = columns["loss_mask"] != 0
    tokens = int(keep.sum())
    ours, theirs = columns["log_probs"][keep], columns["ref_log_probs"][keep]
    differ = _differing(ours, theirs)
    count = int(differ.sum())
    worst = float((ours.double() - theirs.double()).abs().max()) if tokens else 0.0
    none = " (no unmasked token: nothing was compared)" if not tokens else ""

    kl = columns["kl"][keep]  # in its own dtype: what is not 0 in fp64 may be in fp32
    # Two-sided, and written so that NaN counts as nonzero. -0.0 == 0 holds: it counts as 0.
    nonzero = int((~(kl == 0)).sum())
    kl_loss, grad_norm = metrics["kl_loss"], metrics["grad_norm"]
    ppo_kl = metrics.get("ppo_kl", 0.0)
    other = f", ppo_kl {ppo_kl!r}" if ppo_kl != 0.0 else ""
    return [
        CheckResult(
            "log_probs == ref_log_probs",
            tokens > 0 and count == 0,
            f"{count} of {tokens} tokens differ, largest difference {worst!r}{none}",
        ),
        CheckResult(
            "kl == 0",
            tokens > 0 and nonzero == 0 and kl_loss == 0.0 and ppo_kl == 0.0,
            f"{nonzero} of {tokens} tokens are not 0, kl_loss {kl_loss!r}{other}{none}",
        ),
        CheckResult(
            f"grad_norm <= {grad_norm_bound!r}",
            math.isfinite(grad_norm) and 0.0 <= grad_norm <= grad_norm_bound,
            f"grad_norm {grad_norm!r}",
        ),
    ]


def _differing(ours: Tensor, theirs: Tensor) -> Tensor:
    """Which elements are not the same finite number, bool [tokens].

    Bits, not ==: a NaN equal to itself must fail, and so must -0.0 against 0.0 (a log-prob of -0.0 is not the same
    computation) and a sampled token of no probability on both sides. Of other dtypes or shapes all differ: a cast or a
    broadcast would compare something else.
    """
    if (ours.dtype, ours.shape) != (theirs.dtype, theirs.shape):
        return torch.ones_like(ours, dtype=torch.bool)
    bits = BITS[ours.element_size()]
    return (ours.contiguous().view(bits) != theirs.contiguous().view(bits)) | ~ours.isfinite()
