"""The train/rollout mismatch of two sides, as the rows of a table: for terminals, Markdown and pages alike."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

from repro.report.pieces import clean
from repro.text import both, count, table, value
from repro_golden.base.canonical import decode_float, same_float

__all__ = ["HEAD", "LABELS", "mismatch_rows", "mismatch_text", "mismatch_title"]

LABELS = {
    "tokens": "tokens",
    "nonfinite": "tokens not finite",
    "mean": "gap mean, nats",
    "max": "gap max, nats",
    "p50": "gap p50, nats",
    "p90": "gap p90, nats",
    "p99": "gap p99, nats",
    "p999": "gap p99.9, nats",
    "k1": "KL(rollout ‖ trainer) k1, nats",
    "k3": "KL(rollout ‖ trainer) k3, nats",
    "ratio_max": "importance ratio, max",
    "ratio_min": "importance ratio, min",
    "above_2": "share of ratios above 2",
    "below_half": "share of ratios below 1/2",
    "ess": "effective sample size, share",
}
"""What each number of a mismatch is called."""
HEAD = ("train/rollout mismatch", "before", "after", "ratio")
"""The columns of `mismatch_rows`."""


def mismatch_rows(mismatch: Mapping[str, Any], *, every: bool = False) -> list[list[str]]:
    """A row for each number that moved: what it is, both sides, and after / before.

    Args:
        mismatch: `repro_golden.compare.mismatch.change.MismatchChange` as JSON.
        every: Also those that did not move.
    """
    rows = []
    for number in mismatch["numbers"]:
        name, before, after = number["metric"], _decoded(number["before"]), _decoded(number["after"])
        if every or not same_float(before, after):
            shown = both(before, after, partial(value, absent="none"))
            rows.append([LABELS.get(name) or clean(name), *shown, _ratio(_decoded(number["ratio"]), before)])
    return rows


def mismatch_title(mismatch: Mapping[str, Any]) -> str:
    """What the numbers are of."""
    before = mismatch["before"]
    tokens = count(int(before["tokens"]) + int(before["nonfinite"]), "token")
    return f"|{clean(before['column'])} - rollout_log_probs| over {tokens} of {count(len(before['steps']), 'step')}"


def mismatch_text(mismatch: Mapping[str, Any] | None, *, every: bool = False) -> str:
    """The table for a terminal; empty where nothing is to be shown.

    Args:
        mismatch: As for `mismatch_rows`; None where a side does not show the columns.
        every: Whether to show it also where nothing moved.
    """
    if mismatch is None:
        return "train/rollout mismatch: the traces do not show both sides' log-probs" if every else ""
    rows = mismatch_rows(mismatch, every=every)
    return f"{mismatch_title(mismatch)}\n{table(HEAD, rows)}" if rows else ""


def _decoded(value: float | str | None) -> float | None:
    return None if value is None else decode_float(value)


def _ratio(ratio: float | None, before: float | None) -> str:
    if ratio is None:
        return "no ratio"
    return "from 0" if math.isinf(ratio) and before == 0 else f"x{ratio:.3g}"
