"""Where the tokens of a response lie under context parallelism, and putting them back together.

With `size` ranks a sequence is cut into ``2 * size`` chunks of equal length, the last ones padded; rank k works on
chunks k and ``2 * size - 1 - k``, so that causal attention costs every rank the same ("zigzag"). Of a per-token column
a rank holds the tokens that its logits predict: position p of the sequence predicts token p + 1, so the response begins
with the logit at the prompt's last position.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

import numpy as np

from repro_golden.base.errors import ReproError
from repro_golden.dumps.values import Tensor

__all__ = ["Held", "held", "joined", "padded_lengths", "ranges"]

V = TypeVar("V")
Ranges = tuple[tuple[int, int], tuple[int, int]]

_PADDINGS = 4096
"""How many chunk lengths beyond the shortest possible are tried where a file does not say its padding."""


class Held(NamedTuple):
    """How many tokens of one response one rank holds, as a file shows it."""

    total: int
    response: int
    rank: int
    tokens: int


def ranges(total: int, response: int, rank: int, size: int, padded: int | None = None) -> Ranges:
    """The two half-open ranges of a response's tokens, counted from its first, that a rank holds; each may be empty.

    Args:
        total: Tokens of the sequence: prompt and response.
        response: Tokens of the response.
        rank: Of the context-parallel group, from 0.
        size: Ranks of the group.
        padded: Length to which the sequence was padded before it was cut (``qkv_format`` bshd); None for thd, where it
            is cut by its own.

    Raises:
        ReproError: lengths that no trainer can have cut.
    """
    if size == 1:
        return (0, response), (response, response)
    if not 0 <= rank < size:
        raise ReproError(f"context-parallel rank {rank} of {size} does not exist")
    if not 0 <= response <= total or (response and response == total):
        raise ReproError(
            f"a response of {response} tokens in a sequence of {total} cannot be cut for context parallelism: "
            "its first token needs a token before it"
        )
    if padded is not None and padded < total:
        raise ReproError(f"a sequence of {total} tokens does not fit the {padded} to which it is said to be padded")
    chunk = -(-(total if padded is None else padded) // (2 * size))
    first = total - response - 1  # the position whose logit predicts the response's first token
    spans = []
    for number in (rank, 2 * size - 1 - rank):
        start = min(max(number * chunk - first, 0), response)
        stop = min(max((number + 1) * chunk - first, start), response)
        spans.append((start, stop))
    return spans[0], spans[1]


def held(total: int, response: int, rank: int, size: int, padded: int | None = None) -> int:
    """How many tokens of a response a rank holds; for the arguments see `ranges`."""
    return sum(stop - start for start, stop in ranges(total, response, rank, size, padded))


def joined(
    parts: Sequence[V],
    total: int,
    response: int,
    *,
    padded: int | None = None,
    what: str = "values",
    ranks: Sequence[int] | None = None,
) -> V:
    """The values of all ranks of a group, put back together.

    Args:
        parts: What each rank holds, in the order of their context-parallel ranks.
        total: See `ranges`, as for the next two.
        response: As above.
        padded: As above.
        what: What they are, for messages: the rollout, the sample and the column.
        ranks: The trainer's global ranks that hold the parts, for messages; the context-parallel ones by default.

    Raises:
        ReproError: a rank holds another number of values than its part has tokens, or see `ranges`.
    """
    size = len(parts)
    pieces: list[tuple[int, Any]] = []
    for rank, part in enumerate(parts):
        spans, rows, at = ranges(total, response, rank, size, padded), _rows(part), 0
        wanted = sum(stop - start for start, stop in spans)
        if len(rows) != wanted:
            name = rank if ranks is None else ranks[rank]
            raise ReproError(
                f"{what}: rank {name} holds {len(rows)} values, and as context-parallel rank {rank} of {size} it has "
                f"{wanted} of the response's {response} tokens"
            )
        for start, stop in spans:
            pieces.append((start, rows[at : at + stop - start]))
            at += stop - start
    # empty pieces lie at an end of the response, where their order plays no part
    return _like(
        parts[0], [piece for _, piece in sorted(pieces, key=lambda p: p[0]) if len(piece)] or [_rows(parts[0])]
    )


def padded_lengths(columns: Iterable[Held], size: int) -> list[int]:
    """The lengths to which sequences of one micro-batch may have been padded, one for each way in which they were cut.

    Args:
        columns: What the ranks hold.
        size: Ranks of the group.

    Returns:
        One for every chunk length that explains all lengths, shortest first; those that cut alike count once.
    """
    parts = list(columns)
    longest = max((part.total for part in parts), default=0)
    start = max(1, -(-longest // (2 * size)))
    lengths, cuts = [], set[tuple[Ranges, ...]]()
    for chunk in range(start, start + _PADDINGS):
        padded = 2 * size * chunk
        if all(held(part.total, part.response, part.rank, size, padded) == part.tokens for part in parts):
            cut_ranges = tuple(ranges(part.total, part.response, part.rank, size, padded) for part in parts)
            if cut_ranges not in cuts:
                cuts.add(cut_ranges)
                lengths.append(padded)
        if chunk >= longest:  # every sequence lies in the first chunk: longer ones cut alike
            break
    return lengths


def _rows(values: Any) -> Any:
    return values.array if isinstance(values, Tensor) else values


def _like(values: V, parts: Sequence[Any]) -> V:
    """The concatenation of parts as the type that `values` has."""
    if isinstance(values, Tensor):
        return replace(values, array=np.concatenate(parts))
    if isinstance(values, np.ndarray):
        return np.concatenate(parts)  # type: ignore[return-value]  # V is an array here
    return type(values)(value for part in parts for value in part)  # type: ignore[call-arg]  # a list or a tuple
