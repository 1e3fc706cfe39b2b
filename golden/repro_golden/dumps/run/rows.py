"""From a rollout's joined columns to the rows of a trace, under the built-in trainer's names and in its phases."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from repro_golden.base.errors import ReproError
from repro_golden.dumps.train.joining import Joined
from repro_golden.dumps.values import Tensor
from repro_golden.trace import Row
from repro_golden.trace.writer import metric_row

__all__ = [
    "LOSS",
    "NAMES",
    "NO_SIGNAL",
    "column_rows",
    "concatenated",
    "line",
    "masked",
    "metric_rows",
    "phase_of",
    "tensor_rows",
]

NAMES = {
    "tokens": ("input", "tokens"),
    "total_lengths": ("input", "total_lengths"),
    "response_lengths": ("input", "response_lengths"),
    "loss_masks": ("input", "loss_mask"),
    "rollout_log_probs": ("input", "rollout_log_probs"),
    "rewards": ("input", "rewards"),
    "raw_reward": ("input", "raw_reward"),
    "truncated": ("input", "truncated"),
    "sample_index": ("input", "sample_index"),
    "rollout_ids": ("input", "rollout_ids"),
    "rollout_mask_sums": ("input", "rollout_mask_sums"),
    "teacher_log_probs": ("input", "teacher_log_probs"),
    "multimodal_train_inputs": ("input", "multimodal_train_inputs"),
    "rollout_routed_experts": ("input", "rollout_routed_experts"),
    "rollout_indexer_topk": ("input", "rollout_indexer_topk"),
    "rollout_top_p_token_ids": ("input", "rollout_top_p_token_ids"),
    "rollout_top_p_token_offsets": ("input", "rollout_top_p_token_offsets"),
    "old_log_probs": ("forward", "old_log_probs"),
    "log_probs": ("forward", "log_probs"),
    "ref_log_probs": ("forward", "ref_log_probs"),
    "entropy": ("forward", "entropy"),
    "ref_entropy": ("forward", "ref_entropy"),
    "kl": ("forward", "kl"),
    "opd_reverse_kl": ("forward", "opd_reverse_kl"),
    "values": ("forward", "values"),
    "returns": ("forward", "returns"),
    "advantages": ("forward", "advantages"),
}
"""Phase and name of each of the trainers' columns, in the order of a trace."""

NO_SIGNAL = {
    "max_seq_lens", "witness_ids", "weight_versions", "metadata", "source_names", "seq_witness_ids", "prompt",
    "dynamic_global_batch_size", "adapter_slots", "step_slots", "rollout_position", "data_parallel_rank",
    "rollout_tokens", "decoded_tokens", "train_metadata", "session_id", "routing_key", "group_index", "label",
    "partition", "sample_indices",
}  # fmt: skip
"""Columns that say how the work was cut, or are no numbers that training reads."""

LOSS = "policy_loss/"
_LENGTHS = ".lengths"
"""Ends the name of a row that says which rows of a column are whose."""

_UNMASKED = {"tokens", "loss_masks", "rollout_routed_experts", "rollout_indexer_topk", "multimodal_train_inputs"}
_FLOATS = {"float16": (0x7C00, 0x7E00), "bfloat16": (0x7F80, 0x7FC0)}
"""Formats that are looked at as bits: those that are set in what is not finite, and a quiet NaN."""


def column_rows(joined: Joined, update: int = 0, *, skipped: set[str] | None = None) -> list[Row]:
    """The rows of a rollout's columns: each one tensor over all samples, per-token ones masked as the trainers mask.

    Where replicas differ, each stands for itself as ``NAME@RANK``.

    Args:
        joined: The rollout.
        update: Which of its updates: what went into the policy loss is of one (``policy_loss/UPDATE/...``), and all
            other columns are of the first.
        skipped: Gets the names of columns that are no numbers.

    Raises:
        ReproError: a column that some samples have and others lack, or none of whose values are numbers.
    """
    where = f"rollout {joined.rollout_id}"
    columns: dict[str, Mapping[int | None, Sequence[Any]]] = dict(joined.columns)
    columns.update({name: {None: values} for name, values in joined.whole.items()})
    if all(index is not None for index in joined.indices):
        columns["sample_index"] = {None: joined.indices}
    lengths = next(iter(joined.columns["response_lengths"].values()))
    masks = joined.columns.get("loss_masks")
    keep = _Mask(next(iter(masks.values())) if masks else None, lengths, where)
    known = [name for name in NAMES if name in columns]
    others = sorted(name for name in set(columns) - set(known) - NO_SIGNAL if not name.startswith(LOSS))
    tensors = [] if update else _found([*known, *others], columns, lengths, keep, where, skipped)
    for name in sorted(name for name in columns if name.startswith(f"{LOSS}{update}/")):
        for replica, values in columns[name].items():
            present = [i for i, value in enumerate(values) if value is not None]  # other samples are of other updates
            tensor = concatenated([values[i] for i in present], f"{where}, {name}")
            if tensor is None:
                continue
            if _per_token([values[i] for i in present], [lengths[i] for i in present]):
                tensor = masked(tensor, keep.of(present))
            row = LOSS + name.removeprefix(f"{LOSS}{update}/")
            tensors.append(("loss", row + ("" if replica is None else f"@{replica}"), tensor))
    return tensor_rows(tensors)


def _found(
    names: Sequence[str],
    columns: Mapping[str, Mapping[int | None, Sequence[Any]]],
    lengths: Sequence[int],
    keep: _Mask,
    where: str,
    skipped: set[str] | None,
) -> list[tuple[str, str, Tensor]]:
    entries: list[tuple[str, str, Tensor]] = []
    for name in names:
        for replica, values in columns[name].items():
            tensors = _tensors(name, values, where)
            if not tensors and skipped is not None:
                skipped.add(name)
            if name in NAMES or _per_token(values, lengths):  # how long each is, other columns say
                tensors.pop(_LENGTHS, None)
            for part, tensor in tensors.items():
                phase, row = NAMES.get(name, ("forward" if "float" in tensor.dtype else "input", name))
                if name == "loss_masks" and tensor.array.dtype.kind in "biu":
                    tensor = Tensor("int64", tensor.array.astype("<i8"))
                if name not in _UNMASKED and _per_token(values, lengths):
                    tensor = masked(tensor, keep.of(range(len(lengths))))
                entries.append((phase, row + part + ("" if replica is None else f"@{replica}"), tensor))
    return entries


def tensor_rows(tensors: Iterable[tuple[str, str, Tensor]]) -> list[Row]:
    """Rows of tensors, as a recorder would have made them; each is phase, name and content."""
    from repro_golden.trace.signals import Signals

    signals = Signals()
    for phase, name, tensor in tensors:
        signals.take(phase, line(name), tensor.torch())
    signals.finish()
    return signals.rows()


def metric_rows(metrics: Mapping[str, float]) -> list[Row]:
    """Rows of metrics by name, in the phases that they tell of."""
    return [metric_row(phase_of(name), line(name), float(value)) for name, value in metrics.items()]


def line(name: str) -> str:
    """A name out of a file as text of one line, which UTF-8 can hold."""
    return name if name.isprintable() else ascii(name)[1:-1]


def phase_of(metric: str) -> str:
    """The phase that a metric tells of: ``grad`` for a gradient's norm, ``update`` for learning rates.

    Means over a column of the forward pass (``rollout/...``) are of that phase, and everything else is of the loss.
    Means over inputs are, too: they are the trainer's own arithmetic, whose order depends on the layout.
    """
    if metric.startswith(("rollout/", "multi_turn/", "passrate/")):
        phase = NAMES.get(metric.partition("/")[2], ("input", ""))[0]
        return "loss" if phase == "input" else phase
    name = metric.removeprefix("critic-")
    if name == "grad_norm":
        return "grad"
    return "update" if name.startswith("lr-") else "loss"


def masked(tensor: Tensor, keep: npt.NDArray[np.bool_]) -> Tensor:
    """A per-token column times its mask: +0.0 at masked tokens, but NaN where a value there is not finite.

    So what lies at masked places is no difference, as it is none in the trainers' sums, and a NaN there is one, as it
    is there. The sign of a masked zero is not kept.

    Args:
        tensor: [tokens, ...].
        keep: Which tokens count, [tokens].

    Raises:
        ReproError: not as many tokens as the mask has.
    """
    if len(tensor.array) != len(keep):
        raise ReproError(f"a column of {len(tensor.array)} tokens has a mask of {len(keep)}")
    if keep.all() or not tensor.dtype.startswith(("float", "bfloat")):
        return tensor
    out, away = tensor.array.copy(), ~keep
    if tensor.dtype in _FLOATS:
        infinite, nan = _FLOATS[tensor.dtype]
        bits = out.view("<u2")
        bits[away] = np.where((bits[away] & infinite) == infinite, nan, 0)
    elif tensor.dtype in ("float32", "float64"):
        out[away] = np.where(np.isfinite(out[away]), 0.0, np.nan)
    else:  # one byte wide: no two ways of not being finite, and no infinity in most
        finite = np.isfinite(tensor.floats()[away])
        out[away] = np.where(finite, 0, out[away])
    return Tensor(tensor.dtype, out)


def concatenated(values: Sequence[Any], what: str) -> Tensor | None:
    """Values of samples as one tensor: 0-dimensional ones stacked, others joined along the first dimension.

    Python's integers and bools become int64; floats float32, as the trainers hold them, unless one of them needs
    float64. Samples of several dtypes become float64, or int64 where all are integers. Tensors whose other dimensions
    differ are flattened.

    Returns:
        None where a value is no number.

    Raises:
        ReproError: some values are there and others None.
    """
    present = [value for value in values if value is not None]
    if not present:
        return None
    parts = [_numbers(value) for value in present]
    if any(part is None for part in parts):
        return None
    if len(present) < len(values):
        raise ReproError(f"{what}: {len(values) - len(present)} of {len(values)} samples have none of it")
    tensors = [part for part in parts if part is not None]
    if all(kind for _, kind in tensors):  # of Python's own: the dtype is that of all together
        return _listed(_end_to_end([array for array, _ in tensors]))
    typed = [part if isinstance(part, Tensor) else _listed(np.asarray(part)) for part, _ in tensors]
    dtypes = {tensor.dtype for tensor in typed}
    if len(dtypes) > 1:
        floats = any("float" in dtype for dtype in dtypes)
        typed = [
            Tensor("float64", tensor.floats()) if floats else Tensor("int64", tensor.array.astype("<i8"))
            for tensor in typed
        ]
    return Tensor(typed[0].dtype, _end_to_end([tensor.array for tensor in typed]))


def _end_to_end(arrays: Sequence[npt.NDArray[Any]]) -> npt.NDArray[Any]:
    rows = [np.atleast_1d(array) for array in arrays]
    if len({array.shape[1:] for array in rows}) > 1:
        rows = [array.reshape(-1) for array in rows]
    return np.concatenate(rows)


def _tensors(name: str, values: Sequence[Any], where: str) -> dict[str, Tensor]:
    """A column's tensors by what follows its name; several for a column of dicts, none for one of no numbers."""
    dicts = [value for value in values if isinstance(value, dict)]
    if dicts and all(value is None or isinstance(value, dict) for value in values):
        keys = sorted({key for entry in dicts for key in entry if isinstance(key, str)})
        columns = {key: [entry.get(key) if isinstance(entry, dict) else None for entry in values] for key in keys}
        parts = {key: concatenated([v for v in column if v is not None], where) for key, column in columns.items()}
        tensors = {f"/{key}": part for key, part in parts.items() if part is not None}
        return tensors | {f"{part}{_LENGTHS}": cut for part in tensors if (cut := _cut(columns[part[1:]])) is not None}
    tensor, cut = concatenated(values, f"{where}, {name}"), _cut(values)
    return {} if tensor is None else {"": tensor} if cut is None else {"": tensor, _LENGTHS: cut}


def _cut(values: Sequence[Any]) -> Tensor | None:
    """How many rows of a column are each sample's, -1 for one that lacks it; None where all have as many."""
    counts = []
    for value in values:
        numbers = None if value is None else _numbers(value)
        array = numbers[0] if numbers else None
        rows = np.atleast_1d(array.array if isinstance(array, Tensor) else array) if array is not None else None
        counts.append(-1 if rows is None else len(rows))
    return Tensor("int64", np.asarray(counts, "<i8")) if len(set(counts)) > 1 else None


def _numbers(value: Any) -> tuple[Any, bool] | None:
    """A value's numbers: a `Tensor`, or an array of Python's (then True); None for anything else."""
    if isinstance(value, Tensor):
        return None if value.dtype.startswith("complex") else (value, False)
    if isinstance(value, (np.ndarray, np.generic)):
        array = np.asarray(value)
        name = {"f2": "float16", "f4": "float32", "f8": "float64", "b1": "bool"}.get(array.dtype.str[1:])
        if name is None and array.dtype.kind in "iu":
            name = array.dtype.name
        return None if name is None else (Tensor(name, array.astype(array.dtype.newbyteorder("<"))), False)
    if isinstance(value, (bool, int, float, list, tuple)):
        if isinstance(value, (list, tuple)) and not _flat(value):
            return None
        try:
            array = np.asarray(value)
        except (ValueError, OverflowError):  # lists of several lengths
            return None
        if array.size == 0:
            return np.zeros(array.shape or (0,), np.int64), True
        return (array, True) if array.dtype.kind in "biuf" else None
    return None


def _flat(value: Any) -> bool:
    """Whether all that a list holds is numbers; of bools and numbers together NumPy would make text of neither."""
    if isinstance(value, (list, tuple)):
        return all(map(_flat, value))
    return isinstance(value, (bool, int, float))


def _listed(array: npt.NDArray[Any]) -> Tensor:
    if array.dtype.kind != "f":
        return Tensor("int64", array.astype("<i8"))
    wide = array.astype("<f8")
    with np.errstate(over="ignore", invalid="ignore"):
        narrow = wide.astype("<f4")
        exact = bool(((narrow.astype("<f8") == wide) | np.isnan(wide)).all())
    return Tensor("float32", narrow) if exact else Tensor("float64", wide)


def _per_token(values: Sequence[Any], lengths: Sequence[int]) -> bool:
    """Whether each sample has one entry for each token of its response."""
    from repro_golden.dumps.train.files import length_of

    return any(lengths) and all(length_of(v) == n for v, n in zip(values, lengths, strict=False))


class _Mask:
    """Which response tokens of each sample count; all of a sample without a mask.

    Made when a column is there to be masked: a file may state any length for which it has no values.
    """

    def __init__(self, masks: Sequence[Any] | None, lengths: Sequence[int], where: str) -> None:
        self._masks, self._lengths, self._where = masks, lengths, where
        self._known: dict[tuple[int, ...], npt.NDArray[np.bool_]] = {}

    def of(self, samples: Sequence[int]) -> npt.NDArray[np.bool_]:
        """The masks of some samples, one after the other.

        Raises:
            ReproError: a mask that has several numbers for a token.
        """
        key = tuple(samples)
        if key not in self._known:
            parts = [self._one(i) for i in samples]
            self._known = {key: np.concatenate(parts) if parts else np.zeros(0, bool)}
        return self._known[key]

    def _one(self, sample: int) -> npt.NDArray[np.bool_]:
        mask = None if self._masks is None else self._masks[sample]
        numbers = None if mask is None else _numbers(mask)
        if numbers is None:
            return np.ones(self._lengths[sample], bool)
        array = numbers[0].floats() if isinstance(numbers[0], Tensor) else np.asarray(numbers[0], np.float64)
        if array.size != self._lengths[sample]:
            raise ReproError(
                f"{self._where}: a loss mask has {array.size} numbers for {self._lengths[sample]} tokens: "
                "record it again"
            )
        return np.asarray(array.reshape(-1) != 0)
