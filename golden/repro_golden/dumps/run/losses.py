"""Miles' dumps of the policy loss (``policy_loss_debug/rank_R_call_N.pt``): the numbers that went into it and came out.

A file is one micro-batch of one rank. Its samples have no index; they are found among the rank's own by their lengths
and by the inputs that both files hold, and are then joined as the columns of the train dumps are.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from repro_golden.base.errors import ReproError
from repro_golden.dumps.archive.bounds import shown
from repro_golden.dumps.archive.reading import LIMIT, read_archive
from repro_golden.dumps.train.files import TrainDump, length_of
from repro_golden.dumps.train.layouts import bits_of
from repro_golden.dumps.values import Tensor

__all__ = ["LossCall", "calls_of", "loss_name", "read_loss_call", "with_losses"]

_NAME = re.compile(r"rank_([0-9]{1,9})_call_([0-9]{1,18})\.pt")
_FLAT = ("ppo_kl", "pg_loss")
_NO_COLUMN = ("index", "total_length", "response_length", "local_loss_mask", "rollout_log_probs", "advantages")


@dataclass(frozen=True)
class LossCall:
    """One micro-batch of one rank.

    Attributes:
        path: The file.
        rank: The trainer's global rank.
        call: How many came before it.
        samples: What each sample has; ``ppo_kl`` and ``pg_loss`` too, cut to it.
    """

    path: Path
    rank: int
    call: int
    samples: list[dict[str, Any]]


def loss_name(name: str) -> tuple[int, int] | None:
    """Rank and call in the name of such a file; None for another."""
    match = _NAME.fullmatch(name)
    return (int(match[1]), int(match[2])) if match else None


def read_loss_call(path: Path, limit: int = LIMIT) -> LossCall:
    """Read one file. Nothing that it names is imported or run.

    Raises:
        ReproError: it cannot be read, or is no such dump.
    """
    value = read_archive(path, limit=limit)
    samples = value.get("samples") if isinstance(value, dict) else None
    if not isinstance(samples, list) or not all(isinstance(sample, dict) for sample in samples):
        raise ReproError(f"{path} is no dump of the policy loss: it has no samples")
    if any(type(value.get(name)) is not int for name in ("rank", "call")):
        raise ReproError(f"{path} is no dump of the policy loss: rank and call must be counts")
    for name in dict.fromkeys(name for sample in samples for name in sample):
        if not isinstance(name, str) or not name.isprintable():
            raise ReproError(f"{path}: a column is called {shown(name)}, which is no name of one line: record it again")
    lengths = [length_of(sample.get("train_log_probs")) for sample in samples]
    if any(n is None for n in lengths):
        raise ReproError(f"{path}: a sample has no train_log_probs")
    copies = [dict(sample) for sample in samples]
    for name in _FLAT:
        column = value.get(name)
        if isinstance(column, Tensor) and column.array.shape == (sum(n or 0 for n in lengths),):
            ends = np.cumsum([0, *(n or 0 for n in lengths)])
            for k, sample in enumerate(copies):
                sample[name] = Tensor(column.dtype, column.array[ends[k] : ends[k + 1]])
    return LossCall(path, value["rank"], value["call"], copies)


def calls_of(counts: Sequence[tuple[int, int]], sizes: Mapping[int, int]) -> dict[int, list[int]]:
    """Which calls of a rank are of which rollout, by how many samples it trained on in each.

    Args:
        counts: Of each rollout, in order, its number and the rank's samples.
        sizes: Of each call its samples.

    Returns:
        By rollout its calls; rollouts whose calls are not all there, and those after them, are not in it.

    Raises:
        ReproError: a micro-batch that lies in two rollouts.
    """
    by_rollout: dict[int, list[int]] = {}
    call = 0
    for rollout, count in counts:
        rollout_calls: list[int] = []
        left = count
        while left > 0:
            if call not in sizes:
                return by_rollout
            if sizes[call] > left or sizes[call] == 0:
                raise ReproError(
                    f"call {call} of the policy loss has {sizes[call]} samples, and {left} of its update are left to "
                    "train on: are its dumps of this run, and is steps_per_rollout right?"
                )
            left -= sizes[call]
            rollout_calls.append(call)
            call += 1
        by_rollout[rollout] = rollout_calls
    return by_rollout


def with_losses(dump: TrainDump, calls: Sequence[Sequence[LossCall]]) -> bool:
    """Give the samples of a rank's train dump what its calls of the policy loss hold, as ``policy_loss/UPDATE/...``.

    Args:
        dump: The rank's.
        calls: Those of each update of the rollout.

    Returns:
        Whether every sample was found; if not, none was given anything.
    """
    waiting: dict[bytes, list[dict[str, Any]]] = {}
    for sample in dump.samples:
        waiting.setdefault(_key(sample, "total_lengths", "response_lengths"), []).append(sample)
    pairs = []
    for update, update_calls in enumerate(calls):
        for loss_sample in (sample for call in update_calls for sample in call.samples):
            left = waiting.get(_key(loss_sample, "total_length", "response_length"))
            if not left:
                return False
            pairs.append((left.pop(0), update, loss_sample))
    for sample, update, loss_sample in pairs:
        for name, value in loss_sample.items():
            if name not in _NO_COLUMN:
                sample[f"policy_loss/{update}/{name}"] = value
    return True


def _key(sample: Mapping[str, Any], total: str, response: str) -> bytes:
    values = [sample.get(name) for name in ("advantages", "rollout_log_probs")]
    plain = [v.floats().astype("<f4").tobytes() if isinstance(v, Tensor) else None for v in values]
    return bits_of([sample.get(total), sample.get(response), *(repr(v) for v in plain)])
