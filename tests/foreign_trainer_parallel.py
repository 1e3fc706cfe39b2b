"""Data, context and tensor parallel ranks of one process, and the zigzag layout of context parallelism."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Rank:
    """One GPU: tensor parallel ranks are neighbours, then context parallel ones, as Megatron orders them."""

    rank: int
    dp: int
    cp: int
    tp: int


def ranks(args: argparse.Namespace) -> Iterator[Rank]:
    """Every rank in order."""
    tp_size, cp_size = args.tensor_model_parallel_size, args.context_parallel_size
    for rank in range(args.actor_num_gpus_per_node):
        yield Rank(rank, rank // (tp_size * cp_size), rank // tp_size % cp_size, rank % tp_size)


def data_ranks(args: argparse.Namespace) -> list[tuple[int, int]]:
    """Data and context parallel rank of those with tensor parallel rank 0."""
    return [(rank.dp, rank.cp) for rank in ranks(args) if rank.tp == 0]


def chunks(total: int, cp_size: int, cp_rank: int) -> tuple[int, tuple[int, int]]:
    """The chunk's length and where the two chunks of a context parallel rank begin."""
    size = -(-total // (2 * cp_size))
    return size, (size * cp_rank, size * (2 * cp_size - 1 - cp_rank))


def positions(total: int, response: int, cp_size: int, cp_rank: int) -> Array:
    """Positions of the logits that score this rank's part of the response, in the order the rank holds them."""
    first = total - response - 1
    if cp_size == 1:
        return np.arange(first, total - 1)
    size, starts = chunks(total, cp_size, cp_rank)
    return np.concatenate([np.arange(max(at, first), max(first, at, min(at + size, total - 1))) for at in starts])


def sliced(values: Array, total: int, response: int, cp_size: int, cp_rank: int) -> Array:
    """This rank's part of a per-token column."""
    return np.asarray(values[positions(total, response, cp_size, cp_rank) - (total - response - 1)])


def gathered(parts: list[Array], total: int, response: int) -> Array:
    """The whole column of its parts on all context parallel ranks; where there is one rank, its own array."""
    if len(parts) == 1:
        return parts[0]
    whole = np.zeros(response, parts[0].dtype)
    for cp_rank, part in enumerate(parts):
        whole[positions(total, response, len(parts), cp_rank) - (total - response - 1)] = part
    return whole


def local_tokens(tokens: Array, cp_size: int, cp_rank: int) -> Array:
    """What this rank computes of a sequence: its two chunks, padded with token 0."""
    if cp_size == 1:
        return tokens
    size, starts = chunks(len(tokens), cp_size, cp_rank)
    padded = np.zeros(2 * cp_size * size, tokens.dtype)
    padded[: len(tokens)] = tokens
    return np.concatenate([padded[at : at + size] for at in starts])


def local_index(at: Array, total: int, cp_size: int, cp_rank: int) -> Array:
    """Where positions of the sequence lie in `local_tokens`."""
    if cp_size == 1:
        return at
    size, (first, second) = chunks(total, cp_size, cp_rank)
    return np.where(at < first + size, at - first, at - second + size)
