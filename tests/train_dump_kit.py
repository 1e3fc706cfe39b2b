"""Train dumps as slime, Miles and Relax make them, to try readers on.

Columns are the trainer's own: names as in ``rollout_data``, values lists with one entry a sample, or a `Tensor` over
all of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from repro_golden.base.errors import ReproError
from repro_golden.dumps.train import context_parallel
from repro_golden.dumps.train.files import FORMAT_VERSION, IDS, LAYOUT_FIELDS, WHOLE_FIELDS, length_of
from repro_golden.dumps.values import Tensor


class Shard(NamedTuple):
    """What one data-parallel rank gives to slime's file: its global rank, its data-parallel one, and its columns."""

    rank: int
    data_parallel_rank: int
    columns: Mapping[str, Any]


def slime_train_dump(rollout_id: int, shards: Sequence[Shard]) -> dict[str, Any]:
    """The content of slime's file since 681b3adca; responses are whole, samples in the order of the rollout dump."""
    samples: list[dict[str, Any]] = []
    layout: list[dict[str, Any]] = []
    whole: dict[str, Any] = {}
    for shard in shards:
        count = len(shard.columns["response_lengths"])
        shard_layout: dict[str, Any] = {"rank": shard.rank, "data_parallel_rank": shard.data_parallel_rank}
        for name in IDS:
            value = shard.columns.get(name)
            shard_layout[name] = None if value is None else list(value)
        per_sample: dict[str, Any] = {}
        for name, column in shard.columns.items():
            if name in WHOLE_FIELDS:
                whole.setdefault(name, column)
            elif name in LAYOUT_FIELDS or length_of(column) != count:
                shard_layout[name] = shard_layout.get(name, column)
            elif name not in IDS:
                per_sample[name] = column
        for i in range(count):
            sample: dict[str, Any] = {"data_parallel_rank": shard.data_parallel_rank}
            for name, single in IDS.items():
                if shard.columns.get(name) is not None:
                    sample[single] = shard.columns[name][i]
            samples.append(sample | {name: _entry(column, i) for name, column in per_sample.items()})
        layout.append(shard_layout)
    order = next(
        (key for key in ("rollout_position", "sample_index") if all(s.get(key) is not None for s in samples)), None
    )
    if samples and order:
        samples.sort(key=lambda sample: sample[order])
    head = {"format_version": FORMAT_VERSION, "rollout_id": rollout_id, "rank": shards[0].rank}
    return {**head, "samples": samples, "dp_shards": layout, **whole}


def rank_train_dump(rollout_id: int, rank: int, columns: Mapping[str, Any]) -> dict[str, Any]:
    """One rank's file of slime before 2026-08-12 and of Miles before 2026-08-17."""
    return {"rollout_id": rollout_id, "rank": rank, "rollout_data": dict(columns)}


def miles_train_dump(
    rollout_id: int,
    rank: int,
    columns: Mapping[str, Any],
    *,
    cp_rank: int = 0,
    cp_size: int = 1,
    qkv_format: str = "thd",
) -> dict[str, Any]:
    """One rank's file of Miles; per-token columns are the rank's own part (`cut`)."""
    layout = {"cp_rank": cp_rank, "cp_size": cp_size, "qkv_format": qkv_format}
    return rank_train_dump(rollout_id, rank, columns) | layout


def relax_train_dump(rollout_id: int, rank: int, columns: Mapping[str, Any]) -> dict[str, Any]:
    """One rank's file of Relax: tensors become lists, ``sample_index`` is the place in this rank's list.

    Columns that are neither list nor tuple are dropped, and a column that is too short goes on as None.
    """
    lists = {name: column for name, column in columns.items() if isinstance(column, (list, tuple))}
    samples = []
    for i in range(len(lists["tokens"])):
        sample: dict[str, Any] = {"sample_index": i}
        for name, column in lists.items():
            sample[name] = _listed(column[i]) if i < len(column) else None
        samples.append(sample | {"decoded_tokens": []})
    return {"rollout_id": rollout_id, "rank": rank, "samples": samples}


def _entry(column: Any, i: int) -> Any:
    return Tensor(column.dtype, np.asarray(column.array[i])) if isinstance(column, Tensor) else column[i]


def _listed(value: Any) -> Any:
    if isinstance(value, Tensor):
        return (value.floats() if value.dtype == "bfloat16" else value.array).tolist()
    return value.tolist() if isinstance(value, np.ndarray) else value


def cut(values: Any, total: int, response: int, rank: int, size: int, *, padded: int | None = None) -> Any:
    """The part of a response's values that a rank holds.

    Args:
        values: One for each token of the response along the first dimension: a list, an array or a `Tensor`.
        total: See `context_parallel.ranges`, as for all others.
        response: As above.
        rank: As above.
        size: As above.
        padded: As above.

    Raises:
        ReproError: not as many values as tokens, or see `context_parallel.ranges`.
    """
    rows = context_parallel._rows(values)
    if len(rows) != response:
        raise ReproError(f"{len(rows)} values for a response of {response} tokens")
    parts = [rows[start:stop] for start, stop in context_parallel.ranges(total, response, rank, size, padded)]
    return context_parallel._like(values, parts)
