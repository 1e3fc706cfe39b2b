"""The train dumps of one rollout as one: ranks joined on the samples, context-parallel parts put together.

Samples are joined on their index and, where one index has several (a conversation trained turn by turn), on the
content of what they were trained from, never on their position: which rank holds a sample, and where in its list, is
the layout's business. Samples that nothing tells apart are interchangeable: what came of them is put in the order of
its bits.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import numpy as np

from repro_golden.base.errors import ReproError
from repro_golden.dumps.train import context_parallel
from repro_golden.dumps.train.files import LAYOUT_FIELDS, TrainDump, first_missing, length_of
from repro_golden.dumps.train.layouts import CP_FIELDS, Group, Placed, bits_of, labelled, placed
from repro_golden.dumps.values import Tensor

__all__ = ["INPUTS", "Joined", "joined"]

INPUTS = (
    "tokens", "response_lengths", "loss_masks", "rollout_log_probs", "rewards", "truncated", "rollout_ids",
    "teacher_log_probs", "multimodal_train_inputs", "rollout_routed_experts", "rollout_indexer_topk",
)  # fmt: skip
"""What a sample is trained from."""

_NO_COLUMN = ("rollout_position", "data_parallel_rank")


@dataclass(frozen=True)
class Joined:
    """One rollout.

    Attributes:
        rollout_id: Its number.
        indices: The samples' indices, in order; None where neither the dumps nor the rollout dump say.
        columns: By the trainer's name, then by replica: the values in the order of the samples. All replicas that agree
            bit for bit are one, under None; others stand under the lowest rank of each.
        whole: Columns over the rollout that are no rank's (``raw_reward``), in the order of the samples where the dumps
            say which sample each entry is of, else as they were.
        updates: Optimizer updates that it was trained in, where the dumps say.
        layout: How ranks were told to work, by rank.
        placed: Which part of which samples each rank holds.
        problems: What is worth a warning.
        unread: Columns that are not looked at, with why.
    """

    rollout_id: int
    indices: list[int | None]
    columns: dict[str, dict[int | None, list[Any]]]
    whole: dict[str, list[Any]]
    updates: int | None
    layout: dict[int, dict[str, Any]]
    placed: Placed
    problems: list[str] = field(default_factory=list)
    unread: dict[str, str] = field(default_factory=dict)


def joined(
    dumps: Sequence[TrainDump],
    *,
    ranks: int | None = None,
    cp_size: int | None = None,
    rollout: Sequence[Mapping[str, Any]] | None = None,
) -> Joined:
    """Join the files of one rollout.

    Args:
        dumps: All of them, in any order.
        ranks: How many ranks the trainer has; by default as many as the highest rank says.
        cp_size: Ranks of a context-parallel group, where the files do not say; found by the lengths where None.
        rollout: The samples of the rollout dump, which say the indices of samples whose train dumps do not (Relax).

    Raises:
        ReproError: files of several rollouts, a rank missing or twice, parts that do not fit, or samples that cannot be
            told apart although they are not interchangeable.
    """
    files = sorted(dumps, key=lambda dump: dump.rank)
    where = _check_ranks(files, ranks)
    where_text = f"rollout {where}"
    if not any(dump.samples for dump in files):
        raise ReproError(f"the train dumps of {where_text} hold no samples: nothing was trained on")
    grouped = placed(files, cp_size, where_text)
    merged: dict[str, dict[int, list[Any]]] = {}
    names = dict.fromkeys(name for dump in files for sample in dump.samples for name in sample)
    for name in names:
        merged[name] = _column(name, grouped, where_text)
    one_each = {name: _agreed(column) for name, column in merged.items() if column}
    samples = _rows(one_each, sum(len(group.dumps[0].samples) for group in grouped.groups))
    problems: list[str] = []
    indices = _indices(samples, rollout, where_text, problems)
    order = sorted(range(len(samples)), key=lambda i: _key(samples[i], indices[i]))
    columns = {
        name: {replica: [values[i] for i in order] for replica, values in column.items()}
        for name, column in one_each.items()
        if name not in _NO_COLUMN
    }
    positions = _positions([samples[i] for i in order], [indices[i] for i in order], rollout)
    counts = {dump.updates for dump in files} - {None}
    if len(counts) > 1:
        raise ReproError(f"{where_text}: its ranks were trained in {sorted(c for c in counts if c)} updates")
    return Joined(
        where,
        [indices[i] for i in order],
        columns,
        _whole(files, grouped, positions, problems, where_text),
        counts.pop() if counts else None,
        {int(shard.get("rank") or 0): shard for dump in files for shard in dump.layout},
        grouped,
        problems,
        _unread(files, grouped),
    )


def _unread(files: Sequence[TrainDump], grouped: Placed) -> dict[str, str]:
    """Columns whose entries are of no known samples, with why."""
    unread = {}
    for name, value in ((name, value) for dump in files for shard in dump.layout for name, value in shard.items()):
        if name not in LAYOUT_FIELDS and length_of(value) is not None:
            unread[name] = "it has not one entry for each sample"
    if _of_parts(files, grouped):
        unread |= {name: "whose it is among several data-parallel groups is not known" for dump in files
                   for name in dump.whole}  # fmt: skip
    return unread


def _of_parts(files: Sequence[TrainDump], grouped: Placed) -> bool:
    """Whether columns over the rollout are cut to each rank's part, as Relax does to the length of its list."""
    return files[0].form == "lists" and len(grouped.groups) > 1


def _check_ranks(files: Sequence[TrainDump], ranks: int | None) -> int:
    """The rollout of all files.

    Raises:
        ReproError: there is none, or there are several; a rank is missing, or wrote two files.
    """
    if not files:
        raise ReproError("there is no train dump to join")
    rollouts = {dump.rollout_id for dump in files}
    if len(rollouts) > 1:
        raise ReproError(f"train dumps of rollouts {sorted(rollouts)} are joined one rollout at a time")
    (rollout,) = rollouts
    forms = {dump.form for dump in files}
    if len(forms) > 1:
        raise ReproError(f"rollout {rollout} has train dumps in two forms ({' and '.join(sorted(forms))}): of one run?")
    if files[0].form == "format 2":
        if len(files) > 1:
            names = ", ".join(dump.path.name for dump in files[:3])
            raise ReproError(f"rollout {rollout} has {len(files)} train dumps, and slime writes one ({names})")
        return rollout
    counts = Counter(dump.rank for dump in files)
    if twice := [rank for rank, count in counts.items() if count > 1]:
        raise ReproError(f"rollout {rollout} has two train dumps of rank {twice[0]}: of two runs?")
    want = ranks or max(counts) + 1
    if (first := first_missing(counts, want)) is not None:
        missing = list(islice((rank for rank in range(first, want) if rank not in counts), 9))
        listed = ", ".join(map(str, missing[:8])) + (", ..." if len(missing) > 8 else "")
        raise ReproError(f"rollout {rollout} lacks the train dump of rank {listed} (of {want} ranks)")
    if extra := sorted(rank for rank in counts if rank >= want):
        raise ReproError(f"rollout {rollout} has a train dump of rank {extra[0]}, but there are {want} ranks")
    return rollout


def _column(name: str, grouped: Placed, where: str) -> dict[int, list[Any]]:
    """One column, sample by sample in the order of the groups, once for each replica; empty where no rank has it."""
    parts: list[list[tuple[int, list[Any]]]] = []
    for group in grouped.groups:
        holders: dict[int, list[TrainDump]] = {}
        for dump, cp_rank in zip(group.dumps, group.cp_ranks, strict=True):
            if any(sample.get(name) is not None for sample in dump.samples):
                holders.setdefault(cp_rank, []).append(dump)
        if not holders:
            parts.append([(group.dumps[0].rank, [None] * len(group.dumps[0].samples))])
            continue
        if not group.sharded(name):
            every = [dump for replicas in holders.values() for dump in replicas]
            parts.append([(dump.rank, [sample.get(name) for sample in dump.samples]) for dump in every])
            continue
        if (missing := first_missing(holders, group.cp_size)) is not None:
            raise ReproError(
                f"{where}: {name} of the samples of rank {group.dumps[0].rank} lacks the part of context-parallel rank "
                f"{missing} of {group.cp_size}: a rank's train dump is missing, or lacks the column"
            )
        most = max(map(len, holders.values()))
        parts.append([_together(name, group, [holders[k][min(r, len(holders[k]) - 1)] for k in range(group.cp_size)],
                                where) for r in range(most)])  # fmt: skip
    if all(value is None for part in parts for _, values in part for value in values):
        return {}
    if name in CP_FIELDS and (
        lacking := [part[0][0] for part in parts if all(v is None for v in part[0][1]) and part[0][1]]
    ):
        raise ReproError(f"{where}: the samples of rank {lacking[0]} have no {name}, and those of others have")
    fullest = max(parts, key=len)
    by_rank: dict[int, list[Any]] = {}
    for r, (rank, _) in enumerate(fullest):
        chosen = [part[min(r, len(part) - 1)][1] for part in parts]  # a group with fewer replicas stands in each
        by_rank[rank] = [value for values in chosen for value in values]
    return by_rank


def _together(name: str, group: Group, dumps: Sequence[TrainDump], where: str) -> tuple[int, list[Any]]:
    """A column's parts of all context-parallel ranks, put together, and the lowest of the ranks."""
    values: list[Any] = []
    ranks = [dump.rank for dump in dumps]
    for i, sample in enumerate(dumps[0].samples):
        parts = [dump.samples[i].get(name) for dump in dumps]
        what = f"{where}, {name} of sample {labelled(sample, i)}"
        if any(part is None for part in parts):
            if all(part is None for part in parts):
                values.append(None)
                continue
            raise ReproError(f"{what}: rank {ranks[next(k for k, p in enumerate(parts) if p is None)]} has none of it")
        if len({(type(part), getattr(part, "dtype", None)) for part in parts}) > 1:
            raise ReproError(f"{what}: ranks {ranks} hold it in several dtypes")
        if any(length_of(part) is None for part in parts):
            raise ReproError(f"{what}: it is a {type(parts[0]).__name__}, which has no entries to put together")
        total, response = sample["total_lengths"], sample["response_lengths"]
        padded = group.padded(i)
        try:
            values.append(context_parallel.joined(parts, total, response, padded=padded, what=what, ranks=ranks))
        except ValueError:  # numpy's
            raise ReproError(f"{what}: the parts of ranks {ranks} have other shapes") from None
    return min(ranks), values


def _agreed(column: Mapping[int, list[Any]]) -> dict[int | None, list[Any]]:
    """Replicas that all agree as one."""
    if len({_print(values) for values in column.values()}) == 1:
        return {None: next(iter(column.values()))}
    return {rank: values for rank, values in column.items()}  # noqa: C416 - a dict of another type


def _rows(columns: Mapping[str, Mapping[int | None, list[Any]]], count: int) -> list[dict[str, Any]]:
    """The samples, of the first replica of each column."""
    first = {name: next(iter(column.values())) for name, column in columns.items()}
    return [{name: values[i] for name, values in first.items()} for i in range(count)]


def _indices(
    samples: Sequence[Mapping[str, Any]], rollout: Sequence[Mapping[str, Any]] | None, where: str, problems: list[str]
) -> list[int | None]:
    indices = [sample.get("sample_index") for sample in samples]
    known = [index for index in indices if type(index) is int]
    if len(known) == len(indices):
        return list(known)
    if known:
        raise ReproError(f"{where}: {len(indices) - len(known)} of {len(indices)} samples have no index")
    if rollout is None or not samples:
        return [None] * len(samples)
    return _by_content(samples, rollout, where, problems)


def _by_content(
    samples: Sequence[Mapping[str, Any]], rollout: Sequence[Mapping[str, Any]], where: str, problems: list[str]
) -> list[int | None]:
    """The indices of samples that the rollout dump holds with the same content."""
    held: dict[bytes, list[int]] = {}
    for entry in rollout:
        if type(entry.get("index")) is int:
            key = _content(entry.get("tokens"), entry.get("response_length"), entry.get("rollout_log_probs"))
            held.setdefault(key, []).append(entry["index"])
    wanted: dict[bytes, list[int]] = {}
    for i, sample in enumerate(samples):
        key = _content(sample.get("tokens"), sample.get("response_lengths"), sample.get("rollout_log_probs"))
        wanted.setdefault(key, []).append(i)
    if any(len(places) > len(held.get(key, ())) for key, places in wanted.items()):
        problems.append(f"{where}: the train dumps hold samples that the rollout dump lacks: their indices are unknown")
        return [None] * len(samples)
    indices: list[int | None] = [None] * len(samples)
    for key, places in wanted.items():
        inputs = {_inputs_of(samples[i]) for i in places}
        if len(held[key]) > 1 and len(inputs) > 1:
            raise ReproError(
                f"{where}: samples {sorted(held[key])} have the same tokens and log-probs in the rollout dump and were "
                "trained from other data: which is which cannot be told without sample_indices in the train dump"
            )
        # what nothing tells apart may stand under any of its indices, so long as each layout chooses the same
        ordered = sorted(places, key=lambda i: _outputs_of(samples[i]))
        for i, index in zip(ordered, sorted(held[key]), strict=False):
            indices[i] = index
    return indices


def _content(tokens: Any, response: Any, log_probs: Any) -> bytes:
    listed = _plain(tokens)
    try:
        known = None if log_probs is None else np.asarray(_plain(log_probs), np.float64).astype(np.float32).tobytes()
    except (TypeError, ValueError, OverflowError):  # no numbers
        known = bits_of(log_probs)
    return bits_of([listed, response, repr(known)])


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        value = value.floats() if "float" in value.dtype else value.array
    if not isinstance(value, np.ndarray):
        return value
    return value.tolist() if value.size else []


def _key(sample: Mapping[str, Any], index: int | None) -> tuple[bool, int, bytes, bytes]:
    return index is None, index or 0, _inputs_of(sample), _outputs_of(sample)


def _inputs_of(sample: Mapping[str, Any]) -> bytes:
    return _print([sample.get(name) for name in INPUTS])


def _outputs_of(sample: Mapping[str, Any]) -> bytes:
    return _print({name: value for name, value in sample.items() if name not in INPUTS and name not in _NO_COLUMN})


def _print(value: Any) -> bytes:
    return hashlib.sha256(bits_of(value)).digest()


def _positions(
    samples: Sequence[Mapping[str, Any]], indices: Sequence[int | None], rollout: Sequence[Mapping[str, Any]] | None
) -> list[Any]:
    """Where in the rollout dump each sample stands; None where neither dump says."""
    positions = [sample.get("rollout_position") for sample in samples]
    if rollout is None or any(position is not None for position in positions):
        return positions
    places = {entry["index"]: place for place, entry in enumerate(rollout) if type(entry.get("index")) is int}
    if len(places) < len(rollout):
        return positions
    return [None if index is None else places.get(index) for index in indices]


def _whole(
    files: Sequence[TrainDump],
    grouped: Placed,
    positions: Sequence[Any],
    problems: list[str],
    where: str,
) -> dict[str, list[Any]]:
    columns: dict[str, list[Any]] = {}
    for name in dict.fromkeys(name for dump in files for name in dump.whole):
        seen = [list(_plain(dump.whole[name])) for dump in files if name in dump.whole]
        if _of_parts(files, grouped):
            continue
        if len({bits_of(version) for version in seen}) > 1:
            problems.append(f"{where}: ranks hold several versions of {name}")
        values = seen[0]
        if sorted(p for p in positions if type(p) is int) == list(range(len(values))):
            values = [values[p] for p in positions]
        columns[name] = values
    return columns
