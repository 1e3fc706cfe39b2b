"""KL of a step of two traces, from the log-probs that they keep."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from repro_golden.compare.name_matching import content
from repro_golden.trace import Row, Trace
from repro_golden.trace.tensor_difference import policy_kl
from repro_golden.trace.token_columns import column_parts, kept, part_of, side_by_side

__all__ = ["NoKl", "kl_between", "kl_of_step"]


def kl_of_step(a: Trace, b: Trace, index: int) -> tuple[float, float] | None:
    """KL(a || b) of one step as (k1, k3); None where nothing can be measured (`kl_between`)."""
    kl = kl_between(a, b, index)
    return None if isinstance(kl, NoKl) else kl


class NoKl(NamedTuple):
    """Why there is no KL of a step.

    Attributes:
        of: What lacks it: the baseline ``a``, the other side ``b``, or ``both``, which show other tokens.
        why: In words.
    """

    of: Literal["a", "b", "both"]
    why: str


_TOKENS = ("tokens", "input_ids", "responses")
"""Columns that say which tokens the log-probs are of."""


def kl_between(a: Trace, b: Trace, index: int) -> tuple[float, float] | NoKl:
    """KL(a || b) of one step as (k1, k3), over all parts of the column: micro-batches, and ranks.

    Tokens count that the masks of both sides keep (`kept`).
    """
    rows_a, rows_b = a.rows(index), b.rows(index)
    before, after = column_parts(rows_a, "log_probs"), column_parts(rows_b, "log_probs")
    masks, others = column_parts(rows_a, "loss_mask"), column_parts(rows_b, "loss_mask")
    if not before:
        return NoKl("a", "no log_probs")
    counted = {part: _counted(row, part_of(masks, part)) for part, row in before.items()}
    if unknown := next((why for why in counted.values() if isinstance(why, str)), None):
        return NoKl("a", unknown)
    if before.keys() != after.keys():
        return NoKl("b", "no log_probs of the baseline's parts: no KL")
    pieces: list[Any] = []
    for part, x in before.items():
        if x.shape != after[part].shape:
            return NoKl("b", "no log_probs of the baseline's shape: no KL")
        values, also = side_by_side(x, after[part]), kept(part_of(others, part), after[part])
        if values is None:
            return NoKl("b", f"log_probs of {after[part].dtype} that were not kept: no KL")
        keep = counted[part]
        pieces.append([*values, keep if also is None else keep & also])
    if other := _other_tokens(rows_a, rows_b):
        return NoKl("both", f"the two show other tokens ({other})")
    return policy_kl(*(np.concatenate(column) for column in zip(*pieces, strict=True)))


def _counted(column: Row, mask: Row | None) -> Any:
    """Which tokens of a column of log-probs count; why that cannot be said, in words."""
    if side_by_side(column, column) is None:
        return f"log_probs of {column.dtype} {list(column.shape)} whose values were not kept"
    counted = kept(mask, column)
    return f"a loss_mask that is not of log_probs {list(column.shape)}" if counted is None else counted


def _other_tokens(rows_a: Sequence[Row], rows_b: Sequence[Row]) -> str:
    """The column of tokens that both sides show and that differs; '' where none does."""
    masks = [column_parts(rows, "loss_mask") for rows in (rows_a, rows_b)]
    for name in _TOKENS:
        before, after = column_parts(rows_a, name), column_parts(rows_b, name)
        for part in before.keys() & after.keys():
            x, y = before[part], after[part]
            if content(x) == content(y):
                continue
            values = side_by_side(x, y)
            if values is None:  # of another dtype, without values, nothing is known
                if (x.dtype, x.shape) == (y.dtype, y.shape) or x.shape != y.shape:
                    return name
                continue
            apart = values[0] != values[1]
            for side in masks:  # what stands where nothing counts may be any padding
                mask = part_of(side, part)
                counted = None if mask is None or mask.shape != x.shape else kept(mask, x)
                apart = apart if counted is None else apart & counted
            if apart.any():
                return name
    return ""
