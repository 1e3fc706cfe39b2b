"""KL to the reference, returns and advantages of each data and context parallel rank's part of a rollout."""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np
from foreign_trainer_parallel import Array, gathered, sliced

Columns = dict[str, list[Any]]


def approximate_kl(log_probs: Array, ref_log_probs: Array) -> Array:
    """Schulman's k3, which is never negative."""
    ratio = ref_log_probs - log_probs
    return np.asarray(np.clip(np.exp(ratio) - ratio - np.float32(1), np.float32(-10), np.float32(10)))


def local_masks(args: argparse.Namespace, columns: Columns, cp_rank: int) -> list[Array]:
    """Each sample's loss mask where this rank holds its tokens."""
    lengths = zip(columns["loss_masks"], columns["total_lengths"], columns["response_lengths"], strict=True)
    return [sliced(mask, total, response, args.context_parallel_size, cp_rank) for mask, total, response in lengths]


def compute_advantages_and_returns(args: argparse.Namespace, ranks: dict[tuple[int, int], Columns]) -> None:
    """Add kl, returns and advantages to the columns.

    Args:
        args: the options.
        ranks: columns by data and context parallel rank.
    """
    for columns in ranks.values():
        if args.kl_coef == 0:
            columns["kl"] = [np.zeros_like(values) for values in columns["log_probs"]]
        else:
            both = zip(columns["log_probs"], columns["ref_log_probs"], strict=True)
            columns["kl"] = [approximate_kl(values, reference) for values, reference in both]
    if args.advantage_estimator == "grpo":
        for columns in ranks.values():
            both = zip(columns["rewards"], columns["kl"], strict=True)
            columns["returns"] = [np.full_like(kl, reward) for reward, kl in both]
            columns["advantages"] = list(columns["returns"])
    else:
        for dp in sorted({dp for dp, _ in ranks}):
            _estimated(args, [columns for (at, _), columns in sorted(ranks.items()) if at == dp])
    if args.normalize_advantages:
        _whiten(args, ranks)


def _estimated(args: argparse.Namespace, shards: list[Columns]) -> None:
    """Returns and advantages that run along the sequence, which context parallel ranks put together for it."""
    for columns in shards:
        columns["returns"], columns["advantages"] = [], []
    for at, (total, response) in enumerate(zip(shards[0]["total_lengths"], shards[0]["response_lengths"], strict=True)):
        mask = shards[0]["loss_masks"][at]
        kl = gathered([columns["kl"][at] for columns in shards], total, response)
        rewards = _token_rewards(args, kl, mask, np.float32(shards[0]["rewards"][at]))
        if args.advantage_estimator == "ppo":
            values = gathered([columns["values"][at] for columns in shards], total, response)
            returns, advantages = _gae(args, values, rewards, mask)
        else:
            returns = advantages = _discounted(args, rewards * mask)
        for cp_rank, columns in enumerate(shards):
            columns["returns"].append(sliced(returns, total, response, len(shards), cp_rank))
            columns["advantages"].append(sliced(advantages, total, response, len(shards), cp_rank))


def _token_rewards(args: argparse.Namespace, kl: Array, mask: Array, reward: np.float32) -> Array:
    """What each token's distance from the reference costs, and the sample's reward at the last token it trained."""
    rewards = kl * np.float32(-args.kl_coef)
    rewards[np.flatnonzero(mask)[-1]] += reward
    return rewards


def _gae(args: argparse.Namespace, values: Array, rewards: Array, mask: Array) -> tuple[Array, Array]:
    """Returns and advantages over the tokens that are trained; the others are no steps and get zeros."""
    returns, advantages = np.zeros_like(values), np.zeros_like(values)
    steps = np.flatnonzero(mask)
    carry = following = np.float32(0)
    for at in reversed(steps):
        delta = rewards[at] + np.float32(args.gamma) * following - values[at]
        carry = delta + np.float32(args.gamma * args.lambd) * carry
        advantages[at], returns[at] = carry, carry + values[at]
        following = values[at]
    return returns, advantages


def _discounted(args: argparse.Namespace, rewards: Array) -> Array:
    """Discounted sums of what follows."""
    returns = np.zeros_like(rewards)
    following = np.float32(0)
    for at in reversed(range(len(rewards))):
        following = rewards[at] + np.float32(args.gamma) * following
        returns[at] = following
    return returns


def _whiten(args: argparse.Namespace, ranks: dict[tuple[int, int], Columns]) -> None:
    """Advantages with mean 0 and variance 1 over all tokens that are trained, wherever they lie."""
    masks = {rank: local_masks(args, columns, rank[1]) for rank, columns in ranks.items()}
    whitened = {}
    for rank in ranks:
        group = [other for other in ranks if group_of(other) == group_of(rank)]
        mean, variance = _statistics(
            [ranks[member]["advantages"] for member in group], [masks[member] for member in group]
        )
        whitened[rank] = [(part - mean) / np.sqrt(variance + np.float32(1e-8)) for part in ranks[rank]["advantages"]]
    for rank, advantages in whitened.items():
        ranks[rank]["advantages"] = advantages


def group_of(rank: tuple[int, int], *, with_context_parallel: bool = True) -> int:
    """The data parallel group of a rank: with context parallelism there is one for all."""
    return 0 if with_context_parallel else rank[1]


def _statistics(advantages: list[list[Array]], masks: list[list[Array]]) -> tuple[np.float32, np.float32]:
    values = np.concatenate([part for parts in advantages for part in parts])
    weights = np.concatenate([part for parts in masks for part in parts]).astype(np.float32)
    count = np.maximum(weights.sum(), np.float32(1))
    mean = np.float32((values * weights).sum() / count)
    spread = (values - mean) * weights
    return mean, np.float32((spread * spread).sum() / count)
