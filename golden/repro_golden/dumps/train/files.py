"""Train dumps of slime, Miles and Relax: what one file of ``--save-debug-train-data`` holds, as samples.

Three forms are read. slime writes one file a rollout since 681b3adca (2026-08-12, ``format_version`` 2), with responses
whole. slime before that and Miles write one a rank, in which a response's tokens are those of the rank under context
parallelism; Miles says since 62a66297b (2026-08-17) which they are. Relax writes one a rank, with lists in place of
tensors.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from repro_golden.base.errors import ReproError
from repro_golden.base.systems import System
from repro_golden.dumps.archive.bounds import shown
from repro_golden.dumps.archive.reading import LIMIT, read_archive
from repro_golden.dumps.values import Tensor

__all__ = [
    "CP_SIZES",
    "FORMAT_VERSION",
    "IDS",
    "LAYOUT_FIELDS",
    "RANKS",
    "WHOLE_FIELDS",
    "TrainDump",
    "first_missing",
    "length_of",
    "read_train_dump",
]

FORMAT_VERSION = 2
"""The newest form of slime's that is read."""

LAYOUT_FIELDS = ("micro_batch_indices", "num_microbatches", "global_batch_sizes", "num_rollouts")
"""How a rank was told to work: no sample's."""

WHOLE_FIELDS = ("raw_reward",)
"""Columns over the whole rollout, whatever a rank's own samples are."""

RANKS = 1 << 20
"""A rank is below this: what a file says of itself must not become a loop over as many."""

CP_SIZES = 1 << 16
"""The largest context-parallel group."""

_ROLLOUTS = 10**18
_TOKENS = 1 << 40
_UPDATES = 1 << 16

IDS = {"sample_indices": "sample_index", "partition": "rollout_position"}
"""What of a per-rank file stands in slime's samples, and under which name."""

Form = Literal["format 2", "rank", "lists"]


@dataclass(frozen=True)
class TrainDump:
    """One file.

    Attributes:
        path: The file.
        system: Whose it is.
        form: ``format 2`` of slime, one ``rank``'s columns (slime before, Miles), or Relax's ``lists``.
        rollout_id: The rollout.
        rank: The trainer's global rank that wrote it.
        samples: Its columns by sample: ``sample_index`` and ``rollout_position`` where the file has them, then the
            trainer's own names (``tokens``, ``loss_masks``, ``log_probs``, ...).
        whole: `WHOLE_FIELDS`: lists over the whole rollout.
        layout: For each data-parallel shard what is no sample's (`LAYOUT_FIELDS` and single values).
        cp_rank: Context-parallel rank of the writer; None where the file does not say.
        cp_size: Ranks of its context-parallel group; None likewise, 1 where responses are whole.
        qkv_format: ``thd`` or ``bshd``; None where the file does not say.
    """

    path: Path
    system: System
    form: Form
    rollout_id: int
    rank: int
    samples: list[dict[str, Any]]
    whole: dict[str, Any] = field(default_factory=dict)
    layout: list[dict[str, Any]] = field(default_factory=list)
    cp_rank: int | None = None
    cp_size: int | None = None
    qkv_format: str | None = None

    @property
    def updates(self) -> int | None:
        """Optimizer updates that the rollout was trained in, where the file says."""
        counts = {
            len(shard[name])
            for shard in self.layout
            for name in ("num_microbatches", "global_batch_sizes", "num_rollouts")
            if isinstance(shard.get(name), (list, tuple))
        }
        return counts.pop() if len(counts) == 1 and max(counts) <= _UPDATES else None


def read_train_dump(
    path: Path, *, system: System | None = None, allow: Collection[str] = (), limit: int = LIMIT
) -> TrainDump:
    """Read one file. Nothing that it names is imported or run.

    Args:
        path: The file.
        system: Whose it is; recognised by its keys where None (slime's form before 2026-08-12 is Miles' before
            2026-08-17: then slime, unless a column is Miles' alone).
        allow: Names of classes whose objects are kept as plain fields.
        limit: Most bytes of memory that reading may take.

    Raises:
        ReproError: missing, damaged, beyond the limit, naming another class, a rollout dump, a newer form, or columns
            that contradict each other.
    """
    value = read_archive(path, allow=allow, limit=limit)
    if not isinstance(value, dict):
        raise ReproError(
            f"{path} is no train dump of slime, Miles or Relax: it holds a {type(value).__name__}, no dict"
        )
    if "format_version" in value:
        return _format_2(path, value)
    if isinstance(value.get("rollout_data"), dict):
        return _rank(path, value, system)
    samples = value.get("samples")
    if isinstance(samples, list) and all(isinstance(row, dict) for row in samples):
        if any("response_length" in row or "status" in row for row in samples) or ("rank" not in value and samples):
            raise ReproError(
                f"{path} is a rollout dump, no train dump: train dumps are what --save-debug-train-data writes "
                "(--dump-details puts them into train_data)"
            )
        return _lists(path, value, samples)
    raise ReproError(f"{path} is no train dump of slime, Miles or Relax: it has the keys {_keys(value)}")


def length_of(value: Any) -> int | None:
    """How many entries a column or a per-token value has; None for what has no first dimension, or nothing along it."""
    if isinstance(value, (list, tuple)):
        return len(value)
    array = value.array if isinstance(value, Tensor) else value
    if not isinstance(array, np.ndarray) or not array.ndim or (array.shape[0] and not array.size):
        return None  # of shape [10**12, 0] there is no byte in the file
    return int(array.shape[0])


def _format_2(path: Path, value: dict[str, Any]) -> TrainDump:
    version = value["format_version"]
    if type(version) is not int or version != FORMAT_VERSION:
        known = type(version) is int and version > FORMAT_VERSION
        raise ReproError(
            f"{path} has train dump format {shown(version)}, this repro reads {FORMAT_VERSION}: "
            + ("upgrade repro-harness" if known else "record it again")
        )
    samples: Any = value.get("samples")
    shards: Any = value.get("dp_shards", [])
    if not _dicts(samples) or not _dicts(shards):
        raise ReproError(f"{path}: samples and dp_shards must be lists of dicts: record it again")
    layout = [dict(shard) for shard in shards]
    for shard in layout:
        for name in ("rank", "data_parallel_rank"):
            if shard.get(name) is not None:
                shard[name] = _whole_number(path, shard, name, RANKS)
    dump = TrainDump(
        path,
        "slime",
        "format 2",
        _whole_number(path, value, "rollout_id", _ROLLOUTS),
        _whole_number(path, value, "rank", RANKS),
        [dict(sample) for sample in samples],
        _whole(path, value),
        layout,
        0,
        1,
        "thd",
    )
    return _checked(dump)


def _rank(path: Path, value: dict[str, Any], system: System | None) -> TrainDump:
    columns: dict[str, Any] = value["rollout_data"]
    if not all(isinstance(name, str) for name in columns):
        raise ReproError(f"{path}: the names of its columns must be text: record it again")
    count = length_of(columns.get("response_lengths", columns.get("tokens")))
    if count is None:
        raise ReproError(f"{path} has neither response_lengths nor tokens: it is no train dump that can be joined")
    named = {name: value[name] for name in ("cp_rank", "cp_size", "qkv_format") if name in value}
    if "qkv_format" in named and not isinstance(named["qkv_format"], str | None):
        raise ReproError(f"{path}: qkv_format is a {type(named['qkv_format']).__name__}, neither thd nor bshd")
    if named and system not in (None, "miles"):
        raise ReproError(f"{path} is a train dump of Miles ({', '.join(named)} are in it), not of {system}")
    rank = _whole_number(path, value, "rank", RANKS)
    layout: dict[str, Any] = {"rank": rank}
    per_sample: dict[str, Any] = {}
    for name, column in columns.items():
        if name in WHOLE_FIELDS:
            continue
        if name == "rank":
            continue
        if name in LAYOUT_FIELDS or length_of(column) != count:
            if name in _PER_SAMPLE and column is not None:
                raise ReproError(f"{path}: column {shown(name)} has {length_of(column)} entries for {count} samples")
            layout[name] = column
        else:
            per_sample[IDS.get(name, name)] = column
    split = {name: _entries(column) for name, column in per_sample.items()}
    dump = TrainDump(
        path,
        "miles" if named or system == "miles" or (system is None and _MILES & set(columns)) else "slime",
        "rank",
        _whole_number(path, value, "rollout_id", _ROLLOUTS),
        rank,
        [{name: column[i] for name, column in split.items()} for i in range(count)],
        _whole(path, columns),
        [layout],
        _whole_number(path, value, "cp_rank", CP_SIZES) if "cp_rank" in named else None,
        _whole_number(path, value, "cp_size", CP_SIZES + 1, least=1) if "cp_size" in named else None,
        named.get("qkv_format"),
    )
    if dump.cp_rank is not None and not 0 <= dump.cp_rank < (dump.cp_size or 1):
        raise ReproError(f"{path}: context-parallel rank {dump.cp_rank} of {dump.cp_size} does not exist")
    if dump.qkv_format not in (None, "thd", "bshd"):
        raise ReproError(f"{path}: qkv_format {shown(dump.qkv_format)} is neither thd nor bshd")
    return _checked(dump)


def _lists(path: Path, value: dict[str, Any], rows: list[dict[str, Any]]) -> TrainDump:
    _check_names(path, rows)
    present = [
        n for n in dict.fromkeys(name for row in rows for name in row) if any(row.get(n) is not None for row in rows)
    ]
    # their sample_index is the place in this rank's list; a sample's own index is only in the column sample_indices
    dropped = {"sample_index", "decoded_tokens", *WHOLE_FIELDS, *LAYOUT_FIELDS}
    samples = [{IDS.get(n, n): row.get(n) for n in present if n not in dropped} for row in rows]
    whole = {n: [row.get(n) for row in rows] for n in WHOLE_FIELDS if n in present}
    rollout_id, rank = _whole_number(path, value, "rollout_id", _ROLLOUTS), _whole_number(path, value, "rank", RANKS)
    return _checked(TrainDump(path, "relax", "lists", rollout_id, rank, samples, whole, [{"rank": rank}]))


_PER_SAMPLE = {
    "tokens", "loss_masks", "total_lengths", "sample_indices", "rollout_log_probs", "log_probs", "ref_log_probs",
    "advantages", "returns", "values", "rewards",
}  # fmt: skip
"""Columns that are nothing if not one entry a sample."""

_MILES = {"weight_versions", "witness_ids", "dynamic_global_batch_size", "rollout_indexer_topk", "max_seq_lens"}
"""Columns that slime's form of one file a rank never had."""


def _checked(dump: TrainDump) -> TrainDump:
    """The dump with its lengths made sure of, and ``total_lengths`` where older files lack it.

    Raises:
        ReproError: a sample whose lengths contradict each other.
    """
    _check_names(dump.path, dump.samples)
    for number, sample in enumerate(dump.samples):
        tokens = length_of(sample.get("tokens"))
        total = _length(sample.get("total_lengths", tokens))
        response = _length(sample.get("response_lengths"))
        if response is None:
            response = length_of(sample.get("loss_masks"))
        if total is None or response is None or not 0 <= response <= total or tokens not in (None, total):
            raise ReproError(
                f"{dump.path}: sample {number} has {tokens} tokens, total_lengths {total} and response_lengths "
                f"{response}, which contradict each other: record it again"
            )
        masked = length_of(sample.get("loss_masks"))
        if masked not in (None, response):
            raise ReproError(f"{dump.path}: sample {number} has a loss mask of {masked} tokens for {response}")
        sample["total_lengths"], sample["response_lengths"] = total, response
    return dump


def _check_names(path: Path, samples: Sequence[Mapping[Any, Any]]) -> None:
    """Refuse columns whose names cannot stand in a line of text.

    Raises:
        ReproError: naming the first one.
    """
    for name in dict.fromkeys(name for sample in samples for name in sample):
        if not isinstance(name, str) or not name.isprintable() or len(name) > _NAME:
            raise ReproError(f"{path}: a column is called {shown(name)}, which is no name of one line: record it again")


_NAME = 1000
"""Characters of the longest name of a column."""


def _whole(path: Path, value: Mapping[str, Any]) -> dict[str, Any]:
    """The columns over the whole rollout.

    Raises:
        ReproError: one is no list.
    """
    columns = {name: value[name] for name in WHOLE_FIELDS if value.get(name) is not None}
    for name, column in columns.items():
        if length_of(column) is None:
            raise ReproError(f"{path}: {name} is a {type(column).__name__}, no list of numbers: record it again")
    return columns


def first_missing(numbers: Collection[int], below: int) -> int | None:
    """The smallest number from 0 on that is not among them; None where all below a bound are.

    Args:
        numbers: Any.
        below: The bound; it may be far beyond them, since nothing is counted up to it.
    """
    wanted = 0
    for number in sorted(set(numbers)):
        if number > wanted:
            break
        wanted += number == wanted
    return wanted if wanted < below else None


def _length(value: Any) -> int | None:
    """A number of tokens as an int; None for what is none, or beyond all that there can be."""
    number = _integer(value)
    return number if number is not None and abs(number) < _TOKENS else None


def _integer(value: Any) -> int | None:
    if isinstance(value, Tensor) and value.numel == 1 and value.dtype.startswith(("int", "uint")):
        return int(value.array.reshape(-1)[0])
    if isinstance(value, (np.integer, np.ndarray)) and value.size == 1 and value.dtype.kind in "iu":
        return int(np.asarray(value).reshape(-1)[0])
    return value if type(value) is int else None


def _entries(column: Any) -> Sequence[Any]:
    """A column's values by sample; those of a tensor as tensors."""
    if isinstance(column, Tensor):
        return [Tensor(column.dtype, np.asarray(row)) for row in column.array]
    return [np.asarray(row) for row in column] if isinstance(column, np.ndarray) else list(column)


def _whole_number(path: Path, value: Mapping[str, Any], name: str, below: int, *, least: int = 0) -> int:
    number = _integer(value.get(name))
    if number is None or not least <= number < below:
        raise ReproError(
            f"{path}: {name} is {shown(value.get(name))}, no whole number from {least} to {below - 1}: record it again"
        )
    return number


def _dicts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(entry, dict) for entry in value)


def _keys(value: Mapping[Any, Any]) -> str:
    names = [shown(name)[:40] for name in list(value)[:6]]
    return ", ".join(names) + (", ..." if len(value) > 6 else "") or "(none)"
