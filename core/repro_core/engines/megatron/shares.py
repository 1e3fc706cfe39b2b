"""An update's micro-batches as one rank sees them.

Every micro-batch of an update is padded to one shape, which depends on the rollout and on `pad_to_multiple` alone: so
all layouts multiply matrices of the same shapes wherever they split none. Empty micro-batches fill up their number
until it divides among the data-parallel ranks; these take contiguous runs of them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from repro_core.data.task import PAD_ID
from repro_core.rl.batching import Update, offsets

__all__ = ["Share", "Slot", "held_positions", "packed", "shares"]


@dataclass(frozen=True)
class Slot:
    """Where a rank stands among those that split the samples and the sequences.

    Attributes:
        dp: data-parallel ranks.
        dp_rank: this one's number.
        cp: context-parallel ranks.
        cp_rank: this one's number.
        multiple_of: what the number of micro-batches of each rank must be a multiple of.
    """

    dp: int
    dp_rank: int
    cp: int
    cp_rank: int
    multiple_of: int = 1


@dataclass(frozen=True)
class Share:
    """One micro-batch, as far as it is this rank's.

    Attributes:
        tokens: int64 [rows, local seq].
        positions: int64 [rows, local seq], of each token in its row.
        rows: int64 [own tokens], the rows of ``logits.view(rows * local seq, vocab)`` that predict `targets`.
        targets: int64 [own tokens].
        mask: int64 [own tokens].
        columns: int64 [own tokens], their numbers in the update's packed columns.
        routing: int64 [rows, local seq, layers, top k], or None. A sample's last token, of which none are recorded,
            and padding have the first experts: no matter which, but each once, as in every token's choice.
        ends: where packed samples end in the only row, int32 [samples + 1] from 0 to local seq; None of padded ones.
    """

    tokens: Tensor
    positions: Tensor
    rows: Tensor
    targets: Tensor
    mask: Tensor
    columns: Tensor
    routing: Tensor | None
    ends: Tensor | None = None


def packed(t: Mapping[str, Tensor], update: Update, slot: Slot, multiple: int) -> list[Share]:
    """As `shares`, with the samples of a micro-batch one after the other in one row; what is over is one more sample.

    Sequences are not split over ranks.
    """
    totals, responses = t["total_lengths"].tolist(), t["response_lengths"].tolist()
    at_token, at_response = offsets(totals), offsets(responses)
    first, device = at_response[update.samples.start], t["tokens"].device
    longest = max((sum(totals[s] for s in run) for run in update.runs), default=1)
    seq = math.ceil(longest / multiple) * multiple
    (routed, spare), micro_batches = _experts(t), []
    for run in _own(t, update, slot):
        lengths = [totals[s] for s in run]
        a, b = (at_token[run.start], at_token[run.stop]) if run else (0, 0)
        over = [seq - (b - a)] if b - a < seq else []
        positions = torch.cat([torch.arange(n, device=device) for n in (*lengths, *over)])
        ends = offsets([*lengths, *over])
        at = [torch.arange(ends[k + 1] - responses[s], ends[k + 1]) for k, s in enumerate(run)]
        target = torch.cat(at).to(device) if at else torch.zeros(0, dtype=torch.int64, device=device)
        c, d = (at_response[run.start], at_response[run.stop]) if run else (first, first)
        tokens = _grid(t["tokens"][a:b], [b - a] if run else [], 1, seq, PAD_ID)
        micro_batches.append(
            Share(
                tokens=tokens,
                positions=positions[None],
                rows=target - 1,
                targets=tokens[0, target],
                mask=t["loss_mask"][c:d],
                columns=torch.arange(c - first, d - first, device=device),
                routing=None if routed is None else _grid(routed[a:b], [b - a] if run else [], 1, seq, spare),
                ends=torch.tensor(ends, dtype=torch.int32, device=device),
            )
        )
    return micro_batches


def shares(t: Mapping[str, Tensor], update: Update, slot: Slot, multiple: int) -> list[Share]:
    """This rank's micro-batches of an update, all of one shape.

    Args:
        t: tensors of a `repro_core.Rollout`.
        update: which part of it.
        slot: where this rank stands.
        multiple: what the length of a sequence must be a multiple of.

    Raises:
        ValueError: a response without a prompt token before it: nothing predicts its first token.
    """
    totals, responses = t["total_lengths"].tolist(), t["response_lengths"].tolist()
    at_token, at_response = offsets(totals), offsets(responses)
    first = at_response[update.samples.start]
    rows = max((len(run) for run in update.runs), default=1)
    longest = max((totals[s] for run in update.runs for s in run), default=1)
    seq = math.ceil(longest / multiple) * multiple
    where = held_positions(seq, slot.cp_rank, slot.cp)
    local_index = torch.full((seq,), -1)
    local_index[where] = torch.arange(len(where))
    routed, spare = _experts(t)
    micro_batches = []
    for run in _own(t, update, slot):
        lengths = [totals[s] for s in run]
        a, b = (at_token[run.start], at_token[run.stop]) if run else (0, 0)
        tokens = _grid(t["tokens"][a:b], lengths, rows, seq, PAD_ID)
        routing = None if routed is None else _grid(routed[a:b], lengths, rows, seq, spare)
        at, columns = [], []
        for row, s in enumerate(run):
            at.append(row * seq + torch.arange(totals[s] - responses[s], totals[s]))
            columns.append(torch.arange(at_response[s], at_response[s + 1]))
        target = torch.cat(at) if at else torch.zeros(0, dtype=torch.int64)
        column = torch.cat(columns) if columns else torch.zeros(0, dtype=torch.int64)
        predicts = target - 1
        local = local_index[predicts % seq]
        is_local = local >= 0
        micro_batches.append(
            Share(
                tokens=tokens[:, where],
                positions=where.to(tokens.device).expand(rows, -1).contiguous(),
                rows=((predicts // seq) * len(where) + local)[is_local].to(tokens.device),
                targets=tokens.reshape(-1)[target[is_local].to(tokens.device)],
                mask=t["loss_mask"][column[is_local].to(tokens.device)],
                columns=(column[is_local] - first).to(tokens.device),
                routing=None if routing is None else routing[:, where],
            )
        )
    return micro_batches


def held_positions(length: int, rank: int, size: int) -> Tensor:
    """Which positions of a sequence a process of a context-parallel group holds, in its own order: int64.

    Of 2 x size chunks process r holds number r from both ends, so that each has as much of the causal triangle as the
    others. Source: megatron/core/utils.py, ``get_batch_on_this_cp_rank``.

    Args:
        length: of the whole sequence; a multiple of 2 x size.
        rank: in the group.
        size: of the group.

    Raises:
        ValueError: the length does not split.
    """
    if size == 1:
        return torch.arange(length)
    if length % (2 * size):
        raise ValueError(f"a sequence of {length} tokens does not split into 2 x {size} equal chunks")
    chunk = length // (2 * size)
    starts = (rank * chunk, (2 * size - 1 - rank) * chunk)
    return torch.cat([torch.arange(start, start + chunk) for start in starts])


def _own(t: Mapping[str, Tensor], update: Update, slot: Slot) -> list[range]:
    """The micro-batches of this rank, with empty ones after them where others have more."""
    lengths = (t[name][update.samples].tolist() for name in ("total_lengths", "response_lengths"))
    for total, response in zip(*lengths, strict=True):
        if not 0 <= response < total:
            raise ValueError(f"a sample of {total} tokens cannot hold a response of {response} after a prompt")
    # at least one for each rank: the schedules, and those who wait in them, need something to run
    per_rank = math.ceil(max(1, math.ceil(len(update.runs) / slot.dp)) / slot.multiple_of) * slot.multiple_of
    mine = update.runs[slot.dp_rank * per_rank : (slot.dp_rank + 1) * per_rank]
    return [*mine, *[range(0)] * (per_rank - len(mine))]


def _grid(packed: Tensor, lengths: list[int], rows: int, seq: int, fill: int | Tensor) -> Tensor:
    """[rows, seq, ...] of packed samples; what is over is `fill`."""
    over = torch.as_tensor(fill, dtype=packed.dtype, device=packed.device)
    out = over.expand(rows, seq, *packed.shape[1:]).clone()
    for row, part in enumerate(torch.split(packed, lengths) if lengths else ()):
        out[row, : len(part)] = part
    return out


def _experts(t: Mapping[str, Tensor]) -> tuple[Tensor | None, Tensor]:
    """Recorded experts, int64 [tokens, layers, top k], or None; and those [top k] that serve where none are recorded.

    None are recorded of a sample's last token, and padding has none. Which ones serve there does not matter, but a
    router chooses no expert twice, and Megatron's dispatchers count on it.
    """
    if "routed_experts" not in t:
        return None, torch.zeros(0, dtype=torch.int64)
    routed = t["routed_experts"].long().clone()
    spare = torch.arange(routed.shape[-1], device=routed.device)
    routed[t["total_lengths"].cumsum(0).to(routed.device) - 1] = spare
    return routed, spare
