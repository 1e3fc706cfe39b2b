"""The losses of policy and critic on one rank's microbatch, with their gradients worked out by hand."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import numpy as np
from foreign_trainer_advantages import approximate_kl, local_masks
from foreign_trainer_arguments import SYSTEM
from foreign_trainer_model import Model, Packed, get_log_probs, get_responses, split
from foreign_trainer_parallel import Array

Columns = dict[str, list[Any]]
Reducer = Callable[[Array], np.float32]


def weights_of(args: argparse.Namespace, columns: Columns, cp_rank: int) -> Array:
    """What each token counts: 1 in a loss per token, else its share of its sample's mean; masked ones nothing."""
    parts = []
    for mask, count in zip(local_masks(args, columns, cp_rank), columns["rollout_mask_sums"], strict=True):
        share = np.float32(1) if args.calculate_per_token_loss else np.float32(1) / count
        parts.append(mask.astype(np.float32) * share)
    return np.concatenate(parts)


def token_count(columns: Columns) -> int:
    """Tokens of a microbatch that are trained."""
    return sum(max(int(mask.sum()), 1) for mask in columns["loss_masks"])


def policy_loss(
    args: argparse.Namespace, model: Model, columns: Columns, batch: Packed, cp_rank: int, scale: np.float32
) -> tuple[dict[str, np.float32], dict[str, Any]]:
    """Add the policy's gradients to the model.

    Args:
        args: the options.
        model: the policy.
        columns: the microbatch.
        batch: the same, packed.
        cp_rank: the context parallel rank.
        scale: what the loss is multiplied by before its gradients are taken.

    Returns:
        Sums of metrics, and the per-token arrays that a debug dump shows.
    """
    log_probs, distribution, at = get_log_probs(args, model, batch)
    weights = weights_of(args, columns, cp_rank)
    active = weights != 0
    old_log_probs = np.concatenate(columns["log_probs"])
    advantages = np.concatenate(columns["advantages"])
    ppo_kl = old_log_probs - log_probs
    abs_diff = np.abs(old_log_probs - np.concatenate(columns["rollout_log_probs"]))
    flows = np.ones_like(weights)
    if SYSTEM == "miles":  # a value that is not finite must not spoil the batch; no gradient goes through it
        flows = np.isfinite(ppo_kl).astype(np.float32)
        ppo_kl, advantages, abs_diff = (_finite(values, active) for values in (ppo_kl, advantages, abs_diff))
    ratio = np.exp(-ppo_kl)
    pg_loss, pg_grad, clipped = clipped_loss(
        ratio, advantages, args.eps_clip, args.eps_clip_high, eps_clip_c=args.eps_clip_c
    )
    entropy = -np.sum(np.exp(distribution) * distribution, axis=-1)

    def total(values: Array) -> np.float32:
        return np.float32(np.sum(values * weights))

    sums = {"pg_loss": total(pg_loss), "entropy_loss": total(entropy), "pg_clipfrac": total(clipped)}
    sums["loss"] = sums["pg_loss"]
    grad = pg_grad * weights * flows
    entropy_grad = weights if args.entropy_coef != 0 else None
    if args.entropy_coef != 0:
        sums["loss"] = sums["loss"] - np.float32(args.entropy_coef) * sums["entropy_loss"]
    sums["ppo_kl"] = total(ppo_kl)
    if SYSTEM == "miles":
        sums["ess_ratio"] = total(np.ones_like(ratio)) * _ess(ratio, weights)
    sums["train_rollout_logprob_abs_diff"] = total(abs_diff)
    if SYSTEM == "miles":
        rollout_kl = approximate_kl(np.concatenate(columns["rollout_log_probs"]), old_log_probs)
        sums["train_rollout_kl"] = total(_finite(rollout_kl, active))
    if args.use_kl_loss:
        reference = np.concatenate(columns["ref_log_probs"])
        kl = approximate_kl(log_probs, reference)
        sums["kl_loss"] = total(kl)
        sums["loss"] = sums["loss"] + np.float32(args.kl_loss_coef) * sums["kl_loss"]
        grad = grad + np.float32(args.kl_loss_coef) * (np.float32(1) - np.exp(reference - log_probs)) * weights
    _backward(args, model, batch, (distribution, at), grad * scale, _scaled(args, entropy_grad, scale))
    shown = {
        "train_log_probs": split(log_probs, batch),
        "ppo_kl": ppo_kl,
        "pg_loss": pg_loss,
        "masks": local_masks(args, columns, cp_rank),
    }
    return {"loss": sums.pop("loss"), **sums}, shown


def clipped_loss(
    ratio: Array, advantages: Array, eps_clip: float, eps_clip_high: float, *, eps_clip_c: float | None = None
) -> tuple[Array, Array, Array]:
    """PPO's loss of each token, its gradient by the token's log-prob, and whether it was clipped."""
    low, high = np.float32(1 - eps_clip), np.float32(1 + eps_clip_high)
    free, held = -ratio * advantages, -np.clip(ratio, low, high) * advantages
    clipped = held > free
    loss = np.maximum(free, held)
    moves = (~clipped) | ((ratio > low) & (ratio < high))
    if eps_clip_c is not None:  # dual clip: a bound on what one bad token may cost
        bound = -np.float32(eps_clip_c) * advantages
        bounded = (advantages < 0) & (bound < loss)
        loss = np.where(bounded, bound, loss)
        moves &= ~bounded
    return loss, np.where(moves, free, np.float32(0)), clipped.astype(np.float32)


def value_loss(
    args: argparse.Namespace, model: Model, columns: Columns, batch: Packed, cp_rank: int, scale: np.float32
) -> dict[str, np.float32]:
    """Add the critic's gradients to the model; sums of its metrics."""
    outputs, at = get_responses(args, model, batch, apply_temperature=False)
    values, old = outputs[:, 0], np.concatenate(columns["values"])
    returns, weights = np.concatenate(columns["returns"]), weights_of(args, columns, cp_rank)
    clip = np.float32(args.value_clip)
    held = old + np.clip(values - old, -clip, clip)
    free_loss, held_loss = (values - returns) ** 2, (held - returns) ** 2
    clipped = held_loss > free_loss
    grad = np.where(clipped, np.float32(0), np.float32(2) * (values - returns)) * weights * scale
    model.backward(batch.tokens[at], batch.hidden[at], grad[:, None])
    loss = np.float32(np.sum(np.maximum(free_loss, held_loss) * weights))
    return {"value_loss": loss, "value_clipfrac": np.float32(np.sum(clipped * weights))}


def _backward(
    args: argparse.Namespace,
    model: Model,
    batch: Packed,
    scored: tuple[Array, Array],
    log_prob_grad: Array,
    entropy_grad: Array | None,
) -> None:
    """From the gradients of log-probs and entropy to those of the parameters."""
    distribution, at = scored
    chosen = np.exp(distribution)
    targets = np.concatenate(batch.targets)
    grad = -chosen * log_prob_grad[:, None]
    grad[np.arange(len(targets)), targets] += log_prob_grad
    if entropy_grad is not None:
        entropy = -np.sum(chosen * distribution, axis=-1, keepdims=True)
        grad -= chosen * (distribution + entropy) * entropy_grad[:, None]
    if args.rollout_temperature != 1.0:
        grad = grad / np.float32(args.rollout_temperature)
    model.backward(batch.tokens[at], batch.hidden[at], grad)


def _scaled(args: argparse.Namespace, grad: Array | None, scale: np.float32) -> Array | None:
    return None if grad is None else -np.float32(args.entropy_coef) * grad * scale


def _finite(values: Array, active: Array) -> Array:
    return np.where(active, np.nan_to_num(values, nan=0.0, posinf=0.0, neginf=0.0), np.float32(0))


def _ess(ratio: Array, weights: Array) -> np.float32:
    """How much of the batch counts after importance weighting: 1 on-policy."""
    used = ratio[weights != 0]
    if not len(used):
        return np.float32(1)
    return np.float32(used.sum() ** 2 / (len(used) * (used * used).sum()))
