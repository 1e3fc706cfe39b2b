"""Micro-batches, and the way between packed columns and padded batches.

A rollout's tensors are packed: samples lie one after the other without padding. The model takes right-padded
``[batch, seq]`` tokens. Everything here is index arithmetic on integers and copies of values: no rounding anywhere.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["MicroBatch", "Update", "make_micro_batch", "micro_batches", "offsets", "pack", "pad", "plan_updates"]


@dataclass(frozen=True)
class MicroBatch:
    """Some samples of one update, padded for the model, and where their responses are.

    Attributes:
        tokens: int64 [batch, seq], right-padded.
        targets: int64 [response tokens], the token that each prediction is scored on, in sample order.
        predictions: int64 [response tokens], the row of ``logits.view(batch * seq, vocab)`` that predicts each target:
            the position before it.
    """

    tokens: Tensor
    targets: Tensor
    predictions: Tensor


@dataclass(frozen=True)
class Update:
    """Where one optimizer update's samples lie in a rollout's packed tensors, and how they are cut.

    Attributes:
        samples: of per-sample tensors.
        tokens: of ``tokens``.
        responses: of ``loss_mask`` and all per-token columns.
        runs: the micro-batches, as sample numbers of the rollout.
    """

    samples: slice
    tokens: slice
    responses: slice
    runs: list[range]

    def of(self, name: str) -> slice:
        """The update's share of a rollout tensor of that name (see `repro_core.Rollout`)."""
        if name in ("tokens", "routed_experts"):
            return self.tokens
        return self.responses if name in ("loss_mask", "rollout_log_probs") else self.samples


def plan_updates(tensors: Mapping[str, Tensor], global_batch_size: int, max_tokens: int) -> list[Update]:
    """Cut a rollout into contiguous updates of `global_batch_size` samples, and those into micro-batches.

    Args:
        tensors: ``total_lengths`` and ``response_lengths`` of a `repro_core.Rollout`.
        global_batch_size: samples of one update; the last one takes what is left.
        max_tokens: see `micro_batches`.
    """
    totals, responses = tensors["total_lengths"].tolist(), tensors["response_lengths"].tolist()
    at_token, at_response = offsets(totals), offsets(responses)
    plan = []
    for a in range(0, len(totals), global_batch_size):
        b = min(a + global_batch_size, len(totals))
        runs = [range(a + run.start, a + run.stop) for run in micro_batches(totals[a:b], max_tokens)]
        tokens, response_tokens = slice(at_token[a], at_token[b]), slice(at_response[a], at_response[b])
        plan.append(Update(slice(a, b), tokens, response_tokens, runs))
    return plan


def micro_batches(total_lengths: Sequence[int], max_tokens: int) -> list[range]:
    """Split samples into contiguous runs within a budget; the order of the samples is kept.

    Greedy from the left: a sample joins the run as long as ``samples x longest`` (padding included) fits. A sample that
    is longer than the budget gets a run of its own: the budget bounds memory, and no split of one sample would lower
    it, whereas refusing would end a long training run over one long response.

    Args:
        total_lengths: prompt plus response tokens of each sample.
        max_tokens: the budget in padded tokens.

    Returns:
        Index ranges that cover ``range(len(total_lengths))`` in order; empty for no samples.
    """
    runs: list[range] = []
    start, longest = 0, 0
    for index, length in enumerate(total_lengths):
        longest = max(longest, length)
        if index > start and (index - start + 1) * longest > max_tokens:
            runs.append(range(start, index))
            start, longest = index, length
    if total_lengths:
        runs.append(range(start, len(total_lengths)))
    return runs


def offsets(lengths: Sequence[int]) -> list[int]:
    """Where each sample starts in a packed column, and one past the last; ``len(lengths) + 1`` numbers."""
    out = [0]
    for length in lengths:
        out.append(out[-1] + length)
    return out


def pad(packed: Tensor, lengths: Sequence[int], fill: float) -> Tensor:
    """A packed column [sum(lengths), ...] as right-padded [samples, max(lengths), ...]; dtype is kept.

    Raises:
        ValueError: the lengths do not add up to the column.
    """
    if sum(lengths) != len(packed):
        raise ValueError(f"lengths add up to {sum(lengths)}, but the column holds {len(packed)} tokens")
    shape = (len(lengths), max(lengths, default=0), *packed.shape[1:])
    out = torch.full(shape, fill, dtype=packed.dtype, device=packed.device)
    for row, part in enumerate(torch.split(packed, list(lengths))):
        out[row, : len(part)] = part
    return out


def pack(padded: Tensor, lengths: Sequence[int]) -> Tensor:
    """The inverse of `pad`: [samples, seq, ...] to [sum(lengths), ...]; what lies in the padding is dropped."""
    if not lengths:
        return padded.reshape(0, *padded.shape[2:])
    return torch.cat([padded[row, :length] for row, length in enumerate(lengths)])


def make_micro_batch(
    tokens: Tensor, total_lengths: Sequence[int], response_lengths: Sequence[int], pad_id: int
) -> MicroBatch:
    """Pad some samples and find the rows of logits that predict their response tokens.

    Args:
        tokens: int64 [sum(total_lengths)], packed.
        total_lengths: prompt plus response tokens of each sample.
        response_lengths: the response's share, at the end of each sample.
        pad_id: the token that fills up rows; the model must not let earlier positions see it.

    Raises:
        ValueError: a response without a prompt token before it: nothing predicts its first token.
    """
    padded = pad(tokens, total_lengths, pad_id)
    seq = padded.shape[1] if len(total_lengths) else 0
    positions = []
    for row, (total, response) in enumerate(zip(total_lengths, response_lengths, strict=True)):
        if not 0 <= response < total:
            raise ValueError(f"a sample of {total} tokens cannot hold a response of {response} after a prompt")
        positions.append(torch.arange(row * seq + total - response, row * seq + total, device=tokens.device))
    at = torch.cat(positions) if positions else torch.zeros(0, dtype=torch.int64, device=tokens.device)
    return MicroBatch(tokens=padded, targets=padded.reshape(-1)[at], predictions=at - 1)
