"""Which part of which samples each rank's file holds, where files are one a rank."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from repro_golden.base.errors import ReproError
from repro_golden.dumps.archive.bounds import shown
from repro_golden.dumps.train import context_parallel
from repro_golden.dumps.train.context_parallel import Held
from repro_golden.dumps.train.files import TrainDump, first_missing, length_of
from repro_golden.dumps.values import Record, Tensor, key_of

__all__ = ["CP_FIELDS", "Group", "Placed", "bits_of", "labelled", "placed"]

CP_FIELDS = (
    "rollout_log_probs", "log_probs", "ref_log_probs", "old_log_probs", "teacher_log_probs", "entropy", "ref_entropy",
    "values", "advantages", "returns", "kl", "opd_reverse_kl",
)  # fmt: skip
"""Per-token columns of which a rank holds its own part under context parallelism."""


@dataclass
class Group:
    """The ranks that hold the same samples: one data-parallel shard.

    Attributes:
        dumps: Their files, by rank.
        cp_ranks: The context-parallel rank of each.
        cp_size: Ranks of the context-parallel group.
        paddings: For each sample the length to which its sequence was padded before it was cut; None where it was cut
            by its own.
    """

    dumps: list[TrainDump]
    cp_ranks: list[int] = field(default_factory=list)
    cp_size: int = 1
    paddings: list[int | None] | None = None

    def padded(self, sample: int) -> int | None:
        """The length to which a sample's sequence was padded before it was cut."""
        return None if self.paddings is None else self.paddings[sample]

    def sharded(self, name: str) -> bool:
        """Whether ranks hold their own part of a column."""
        if self.cp_size == 1:
            return False
        if name in CP_FIELDS:
            return True
        # a column of a newer version: it is cut if its lengths are those of the parts, and no other
        whole = parts = True
        for dump, cp_rank in zip(self.dumps, self.cp_ranks, strict=True):
            for i, sample in enumerate(dump.samples):
                length = length_of(sample.get(name))
                if length is None:
                    continue
                total, response = sample["total_lengths"], sample["response_lengths"]
                whole &= length == response
                parts &= length == context_parallel.held(total, response, cp_rank, self.cp_size, self.padded(i))
        return parts and not whole


@dataclass
class Placed:
    """All ranks of a rollout.

    Attributes:
        groups: By the lowest rank of each.
    """

    groups: list[Group]

    def find(self, rank: int) -> tuple[Group, int] | None:
        """The group that a rank belongs to, and its place in it; None for a rank that wrote no file."""
        for group in self.groups:
            for place, dump in enumerate(group.dumps):
                if dump.rank == rank:
                    return group, place
        return None


def bits_of(value: Any) -> bytes:
    """A value as bytes: equal ones have equal bytes, floats by their bits; dicts whatever their order."""
    if isinstance(value, Tensor):
        return f"T{value.dtype}{value.shape}".encode() + value.array.tobytes()
    if isinstance(value, np.ndarray):
        raw = bits_of(value.ravel().tolist()) if value.dtype == object else value.tobytes()
        return f"A{value.dtype}{value.shape}".encode() + raw
    if isinstance(value, float):
        return b"f" + struct.pack("<d", value)
    if isinstance(value, (list, tuple)):
        if value and all(type(item) is float for item in value):
            return b"F" + struct.pack(f"<{len(value)}d", *value)
        if all(type(item) is int and -_WIDE < item < _WIDE for item in value):
            return b"I" + repr(list(value)).encode()
        return b"L" + b"".join(struct.pack("<Q", len(part)) + part for part in map(bits_of, value))
    if isinstance(value, dict):
        return b"D" + b"".join(sorted(bits_of([_key(k), v]) for k, v in value.items()))
    if isinstance(value, Record):
        return b"R" + bits_of([value.name, value.made, value.state, value.args, value.kwargs, value.items])
    if isinstance(value, set | frozenset):
        return b"S" + b"".join(sorted(_key(item).encode() for item in value))
    text = hex(value) if type(value) is int else repr(value)  # Python writes no decimal of thousands of digits
    return f"{type(value).__name__}:{text}".encode()


_WIDE = 1 << 1024


def _key(value: Any) -> str:
    return ascii(value) if isinstance(value, str) else ascii(key_of(value))


def labelled(sample: Mapping[str, Any], place: int) -> str:
    """What a sample is called in messages: its index, or else its place in the file."""
    index = sample.get("sample_index")
    return str(place) if index is None else shown(index)


def placed(files: Sequence[TrainDump], cp_size: int | None, where: str) -> Placed:
    """Sort the files of a rollout into groups, and say which part each holds.

    Args:
        files: By rank.
        cp_size: Ranks of a context-parallel group, where the files do not say and the caller knows.
        where: The rollout, for messages.

    Raises:
        ReproError: no layout explains the lengths, or several do.
    """
    by_samples: dict[bytes, list[TrainDump]] = {}
    for dump in files:
        known = all(type(sample.get("sample_index")) is int for sample in dump.samples)
        names = ("sample_index", "rollout_position", "response_lengths", "total_lengths") + (
            () if known else ("tokens",)
        )
        key = bits_of([[sample.get(name) for name in names] for sample in dump.samples])
        by_samples.setdefault(key, []).append(dump)
    groups = [Group(dumps) for dumps in by_samples.values()]
    for group in groups:
        if all(dump.cp_rank is not None for dump in group.dumps):
            _told(group, where)
        else:
            _found(group, cp_size, where)
    return Placed(groups)


def _told(group: Group, where: str) -> None:
    """The layout that the files state, made sure of."""
    sizes = {dump.cp_size or 1 for dump in group.dumps}
    if len(sizes) > 1:
        raise ReproError(
            f"{where}: ranks that hold the same samples give their context-parallel size as {sorted(sizes)}"
        )
    group.cp_size = sizes.pop()
    group.cp_ranks = [dump.cp_rank or 0 for dump in group.dumps]
    if (missing := first_missing(group.cp_ranks, group.cp_size)) is not None:
        ranks = [dump.rank for dump in group.dumps]
        raise ReproError(
            f"{where}: the samples of ranks {ranks} lack the part of context-parallel rank {missing} of "
            f"{group.cp_size}: its train dump is missing"
        )
    if group.cp_size > 1:
        group.paddings = _paddings(group, where)
    _check(group, where)


def _paddings(group: Group, where: str) -> list[int | None] | None:
    """The padded length of each sample: what the file says, else what the lengths say."""
    first = group.dumps[0]
    if group.dumps[0].qkv_format == "thd":
        return None
    lengths = [sample.get("max_seq_lens") for sample in first.samples]
    if lengths and all(type(length) is int for length in lengths):
        return lengths
    if first.qkv_format is None:
        return None
    held = _held(group.dumps, group.cp_ranks)
    candidates = context_parallel.padded_lengths(held, group.cp_size)
    if len(candidates) != 1:
        reason = f"{len(candidates)} lengths explain the parts" if candidates else "no length explains the parts"
        raise ReproError(f"{where} was padded (qkv_format bshd) to a length that its dumps do not say: {reason}")
    return [candidates[0]] * len(first.samples)


def _held(dumps: Sequence[TrainDump], cp_ranks: Sequence[int]) -> list[Held]:
    parts = []
    for dump, cp_rank in zip(dumps, cp_ranks, strict=True):
        name = _probe(dump)
        for sample in dump.samples if name else ():
            length = length_of(sample.get(str(name)))
            if length is not None:
                parts.append(Held(sample["total_lengths"], sample["response_lengths"], cp_rank, length))
    return parts


def _probe(dump: TrainDump) -> str | None:
    """A column that shows how many tokens the rank holds."""
    return next((n for n in CP_FIELDS if any(sample.get(n) is not None for sample in dump.samples)), None)


def _check(group: Group, where: str) -> None:
    """Make sure that every per-token column has the length of its part.

    Raises:
        ReproError: naming rank, sample and column.
    """
    for dump, cp_rank in zip(group.dumps, group.cp_ranks, strict=True):
        for i, sample in enumerate(dump.samples):
            total, response = sample["total_lengths"], sample["response_lengths"]
            wanted = context_parallel.held(total, response, cp_rank, group.cp_size, group.padded(i))
            for name in CP_FIELDS:
                length = length_of(sample.get(name))
                if length not in (None, wanted):
                    label = labelled(sample, i)
                    raise ReproError(
                        f"{where}: rank {dump.rank} holds {length} tokens of {name} of sample {label}, and as "
                        f"context-parallel rank {cp_rank} of {group.cp_size} it has {wanted} of its {response}"
                    )


def _found(group: Group, cp_size: int | None, where: str) -> None:
    """The layout that lengths show, where the files state none.

    Raises:
        ReproError: none fits, or several do.
    """
    count = len(group.dumps)
    partial = [(dump, part) for dump in group.dumps if (part := _partial(dump)) is not None]
    if cp_size is None and not partial:
        group.cp_size, group.cp_ranks = 1, [0] * count
        return
    sizes = [cp_size] if cp_size else [n for n in range(2, count + 1) if count % n == 0]
    fitting: list[tuple[int, list[int]]] = []
    for size in sizes:
        # Megatron numbers ranks tensor-parallel first, then context-parallel, pipeline stages last
        for tensor in range(1, count // size + 1) if count % size == 0 else ():
            cp_ranks = [(k // tensor) % size for k in range(count)]
            if (count // size) % tensor == 0 and _fits(group, cp_ranks, size):
                fitting.append((size, cp_ranks))
    if len(fitting) > 1:
        fitting = [layout for layout in fitting if _replicas_agree(group, layout[1])] or fitting
    ranks = [dump.rank for dump in group.dumps]
    if not fitting:
        if not partial:
            raise ReproError(f"{where}: ranks {ranks} hold whole responses, which are no parts of {cp_size}")
        dump, (label, length, response) = partial[0]
        raise ReproError(
            f"{where}: rank {dump.rank} holds {length} of the {response} tokens of sample {label}, and no layout of "
            f"ranks {ranks} makes a whole of it: the train dump of another context-parallel rank is missing"
        )
    if len({tuple(cp_ranks) for _, cp_ranks in fitting}) > 1 and not all(
        _same_parts(group, fitting[0][1], layout[1]) for layout in fitting[1:]
    ):
        raise ReproError(
            f"{where}: the lengths of ranks {ranks} fit several layouts; the dumps do not say which: give cp_size"
        )
    group.cp_size, group.cp_ranks = fitting[0]
    group.paddings = _paddings(group, where)


def _partial(dump: TrainDump) -> tuple[str, int, int] | None:
    """A sample of which a file holds a part alone: its label, and how many of how many tokens."""
    for i, sample in enumerate(dump.samples):
        for name in CP_FIELDS:
            length = length_of(sample.get(name))
            if length is not None and length != sample["response_lengths"]:
                return labelled(sample, i), length, sample["response_lengths"]
    return None


def _fits(group: Group, cp_ranks: Sequence[int], size: int) -> bool:
    trial = Group(group.dumps, list(cp_ranks), size)
    try:
        trial.paddings = _paddings(trial, "")
        _check(trial, "")
    except ReproError:
        return False
    return first_missing(cp_ranks, size) is None


def _replicas_agree(group: Group, cp_ranks: Sequence[int]) -> bool:
    seen: dict[tuple[int, str], bytes] = {}
    for dump, cp_rank in zip(group.dumps, cp_ranks, strict=True):
        for name in CP_FIELDS:
            values = [sample.get(name) for sample in dump.samples]
            if any(value is not None for value in values):
                bits = bits_of(values)
                if seen.setdefault((cp_rank, name), bits) != bits:
                    return False
    return True


def _same_parts(group: Group, first: Sequence[int], other: Sequence[int]) -> bool:
    """Whether two layouts give each part the same values, so that it does not matter which is true."""

    def parts(cp_ranks: Sequence[int]) -> dict[tuple[int, str], bytes]:
        bits: dict[tuple[int, str], bytes] = {}
        for dump, cp_rank in zip(group.dumps, cp_ranks, strict=True):
            for name in CP_FIELDS:
                values = [sample.get(name) for sample in dump.samples]
                if any(value is not None for value in values):
                    bits.setdefault((cp_rank, name), bits_of(values))
        return bits

    return parts(first) == parts(other)
