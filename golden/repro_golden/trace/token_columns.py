"""Per-token columns of a step, as traces keep them: whole, by micro-batch and by rank, and which tokens count.

A program that shows a column once for each micro-batch leaves ``log_probs``, ``log_probs.1``, …; ranks that hold other
tokens leave ``log_probs@0``, ``log_probs@1``, …. Each such row is a part of the step's column.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from repro_golden.trace import Row, Trace
from repro_golden.trace.tensor_difference import decode, nonzero

__all__ = [
    "Floats",
    "Integers",
    "TokenPairs",
    "column_parts",
    "kept",
    "pairs_of",
    "part_of",
    "side_by_side",
    "trainers_of",
]

_PART = re.compile(r"(?:\.(\d+))?(?:@(\d+))?")
_TRAINER = ("old_log_probs", "log_probs")
"""The trainer's log-probs under the weights that sampled: the old ones; of the policy under training without them."""
_ROLLOUT = "rollout_log_probs"

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]


def column_parts(rows: Sequence[Row], name: str) -> dict[str, Row]:
    """The parts of a column by what stands behind its name, ``.MICRO-BATCH@RANK``; empty for a column that is whole.

    Only inputs and what the forward pass made are columns: the gradient of an activation may have the same name.

    Args:
        rows: Of one step.
        name: The column's.
    """
    parts: dict[str, Row] = {}
    for phase in ("forward", "input"):  # what is in both is an input
        for row in rows:
            part = row.name.removeprefix(name) if row.phase == phase and row.name.startswith(name) else None
            if part is not None and _PART.fullmatch(part) and row.dtype != "metric":
                parts[part] = row
    return parts


def kept(mask: Row | None, column: Row) -> npt.NDArray[np.bool_] | None:
    """Which tokens of a column count: all without a mask, or where the column is what its mask took of another.

    None where that is not known: the mask's values were not kept (it has two dimensions), or it is of other tokens.
    """
    count = math.prod(column.shape)
    if mask is None:
        return np.ones(count, bool)
    if mask.values is None:
        return None
    if mask.dtype in ("float16", "bfloat16", "float32", "float64"):  # whose -0.0 has a bit set and counts nothing
        counted: npt.NDArray[np.bool_] = decode(mask.dtype, mask.values) != 0
    else:
        counted = nonzero(mask.values, math.prod(mask.shape))
    if len(counted) == count:
        return counted
    return np.ones(count, bool) if int(counted.sum()) == count else None


def side_by_side(x: Row | None, y: Row | None) -> tuple[Floats, Floats] | None:
    """The values of two columns as fp64 [tokens]; None where a side was not kept, or their shapes are not one."""
    if x is None or y is None or x.values is None or y.values is None or x.shape != y.shape:
        return None
    try:
        return decode(x.dtype, x.values), decode(y.dtype, y.values)
    except ValueError:  # complex numbers: no log-probs
        return None


@dataclass(frozen=True)
class TokenPairs:
    """The unmasked response tokens of a step with the log-prob that each side gave them.

    Attributes:
        step: The optimizer update.
        column: Which column is the trainer's.
        trainer: Its log-probs in nats, fp64 [tokens].
        rollout: The rollout engine's, fp64 [tokens].
        sample: Number of the token's sample, from 0 in each part, int64 [tokens]; -1 where lengths were not shown.
        position: Place in the response from 0, masked tokens counted, int64 [tokens]; without lengths the place in the
            column.
        length: Tokens of the whole response, int64 [tokens]; -1 without lengths.
        part: Which of `parts` the token lies in, int64 [tokens].
        parts: Names of the parts; see `column_parts`.
    """

    step: int
    column: str
    trainer: Floats
    rollout: Floats
    sample: Integers
    position: Integers
    length: Integers
    part: Integers
    parts: Sequence[str]

    def __len__(self) -> int:
        return len(self.trainer)


def trainers_of(trace: Trace, index: int) -> list[str]:
    """The trainer's log-probs that a step shows, those first that are compared with the rollout engine's.

    Raises:
        ReproError: the step's rows are missing or damaged.
    """
    return [name for name in _TRAINER if column_parts(trace.rows(index), name)]


def _log_probs_of(rows: Sequence[Row], columns: Sequence[str]) -> tuple[str, dict[str, Row]]:
    """The trainer's column that is compared with the rollout engine's, by part; empty where none was observed."""
    for name in columns:
        if parts := column_parts(rows, name):
            return name, parts
    return _TRAINER[-1], {}


def pairs_of(trace: Trace, index: int, columns: Sequence[str] = _TRAINER) -> TokenPairs | None:
    """The tokens of the `index`-th step; None where it does not show both sides of all of them.

    Args:
        trace: The trace.
        index: Of its step.
        columns: Which of the trainer's log-probs may be meant: the first that the step shows.

    Raises:
        ReproError: the step's rows are missing or damaged.
    """
    rows = trace.rows(index)
    column, trainers = _log_probs_of(rows, columns)
    rollouts, masks, lengths = (column_parts(rows, n) for n in (_ROLLOUT, "loss_mask", "response_lengths"))
    parts = sorted(trainers, key=_order)
    if not parts or {_source(rollouts, part) for part in parts} != set(rollouts):
        return None  # a part that one side alone shows would be left out of every number unseen
    pieces = []
    for number, part in enumerate(parts):
        row = trainers[part]
        values = side_by_side(row, part_of(rollouts, part))
        if values is None:
            return None
        keep = kept(part_of(masks, part), row)
        if keep is None:
            return None
        places = _places(part_of(lengths, part), len(keep))
        pieces.append([*values, *places, np.full(len(keep), number, np.int64), keep])
    trainer, rollout, sample, position, length, of, keep = (np.concatenate(col) for col in zip(*pieces, strict=True))
    return TokenPairs(
        trace.steps[index].step, column, trainer[keep], rollout[keep], sample[keep], position[keep], length[keep],
        of[keep], parts,
    )  # fmt: skip


def _order(part: str) -> tuple[int, int]:
    """Parts by their micro-batch, then by their rank."""
    match = _PART.fullmatch(part)
    batch, rank = match.groups() if match else (None, None)
    return int(batch or 0), -1 if rank is None else int(rank)


def _source(parts: Mapping[str, Row], part: str) -> str | None:
    """Under which name a part of another column is there: its own, or that of what all ranks agree on."""
    return next((name for name in (part, part.partition("@")[0]) if name in parts), None)


def part_of(parts: Mapping[str, Row], part: str) -> Row | None:
    """The part of another column that goes with a part of this one; None where there is none."""
    name = _source(parts, part)
    return None if name is None else parts[name]


def _places(lengths: Row | None, count: int) -> tuple[Integers, Integers, Integers]:
    """Sample, position and length of each of `count` tokens."""
    known = np.zeros(0, np.int64)
    if lengths is not None and lengths.values is not None and lengths.dtype.startswith(("int", "uint")):
        known = decode(lengths.dtype, lengths.values).astype(np.int64)
    if (known < 0).any() or int(known.sum()) != count:
        nothing = np.full(count, -1, np.int64)
        return nothing, np.arange(count), nothing
    position = np.arange(count) - np.repeat(np.cumsum(known) - known, known)
    return np.repeat(np.arange(len(known)), known), position, np.repeat(known, known)
