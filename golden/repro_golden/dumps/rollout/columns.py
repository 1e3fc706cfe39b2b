"""A dump's samples as the columns of a rollout in canonical form, columns as samples, and samples in another's form."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from repro_golden.base.canonical import canonical_json
from repro_golden.base.errors import ReproError
from repro_golden.base.systems import System
from repro_golden.dumps.archive.bounds import shown
from repro_golden.dumps.rollout.arrays import Array, length, numbers
from repro_golden.dumps.rollout.fields import NAMES, defaults
from repro_golden.dumps.rollout.files import RolloutDump
from repro_golden.dumps.values import TORCH_DTYPES, Tensor, same

__all__ = ["NATIVE", "Columns", "Loss", "as_kind", "columns_of", "kind_of", "samples_of", "translate"]

_EXPERTS = "rollout_routed_experts"

_BELOW, _BEYOND = -(1 << 63), 1 << 62
"""Group numbers that have a place in the column, with room for others behind them."""

NATIVE: Mapping[System, str] = {"slime": "tensor int32", "miles": "array <i4", "relax": "list"}
"""How each system holds routed experts."""

_INTEGERS = frozenset({"|i1", "|u1", *(f"<{sign}{size}" for sign in "iu" for size in (2, 4, 8))})


@dataclass(frozen=True)
class Columns:
    """A rollout in canonical form, as numpy arrays; `repro_golden.store.rollouts` documents the parts.

    Attributes:
        meta: ``rollout_id``, ``prompts`` and ``labels`` (one for each group), ``statuses``, ``sampling`` and, where all
            samples have the same one, ``weight_version``.
        arrays: ``tokens`` .. ``group_index``, and ``routed_experts`` where every sample has them.
    """

    meta: dict[str, Any]
    arrays: dict[str, Array]


def columns_of(dump: RolloutDump, reward_key: str | None = None) -> Columns:
    """The canonical columns of a dump.

    A sample without a mask is trained on whole, one with `remove_sample` not at all. A reward or a log-prob that is not
    there is NaN. A sample without a group is a group of its own.

    Args:
        dump: Of any system.
        reward_key: Which reward is trained on, where rewards are dicts.

    Raises:
        ReproError: lengths that do not add up, or values that no column holds.
    """
    per_sample = [_sample(number, sample, dump, reward_key) for number, sample in enumerate(dump.samples)]
    if not per_sample:
        raise ReproError(f"rollout {dump.rollout_id} has no samples: record it again")
    groups = _groups(dump.samples)
    arrays = {
        name: np.concatenate([np.atleast_1d(parts[name]) for parts in per_sample]) for name in per_sample[0]
    } | {"group_index": np.array(groups, dtype=np.int64), **_experts(dump, per_sample)}  # fmt: skip
    first = {group: number for number, group in reversed(list(enumerate(groups)))}
    leads = [dump.samples[number] for number in sorted(first.values())]
    meta: dict[str, Any] = {
        "rollout_id": dump.rollout_id,
        "prompts": [_plain(sample["prompt"]) for sample in leads],
        "labels": [_plain(sample["label"]) for sample in leads],
        "statuses": [sample["status"] for sample in dump.samples],
        "sampling": {},
    }
    versions = dump.samples[0]["weight_versions"]
    single = len(versions) == 1 and isinstance(versions[0], str) and _plain(versions[0]) == versions[0]
    if single and all(same(sample["weight_versions"], versions) for sample in dump.samples):
        meta["weight_version"] = versions[0]
    return Columns(meta, arrays)


def samples_of(columns: Columns, system: System) -> list[dict[str, Any]]:
    """What the columns say of each sample, in the fields of a system: no more than they hold.

    Args:
        columns: Lengths that add up.
        system: Whose fields.
    """
    meta, t = columns.meta, columns.arrays
    count, rollout_id = len(t["total_lengths"]), int(meta["rollout_id"])
    groups = t["group_index"].tolist()
    order = {group: place for place, group in enumerate(dict.fromkeys(groups))}
    texts = {name: meta.get(f"{name}s", ()) for name in ("prompt", "label")}
    version = meta.get("weight_version")
    whole = _cut(t["tokens"], t["total_lengths"])
    masks, log_probs = (_cut(t[name], t["response_lengths"]) for name in ("loss_mask", "rollout_log_probs"))
    routed = _cut(t["routed_experts"], t["total_lengths"]) if "routed_experts" in t else None
    samples = []
    for i in range(count):
        sample = {
            "group_index": groups[i],
            "index": rollout_id * count + i,
            "tokens": whole[i].tolist(),
            "response_length": int(t["response_lengths"][i]),
            "reward": float(t["rewards"][i]),
            "loss_mask": masks[i].tolist(),
            "weight_versions": [] if version is None else [version],
            "rollout_log_probs": log_probs[i].tolist(),
            "status": meta["statuses"][i] if i < len(meta.get("statuses", ())) else "completed",
        }
        sample |= {name: values[order[groups[i]]] for name, values in texts.items() if len(values) == len(order)}
        if routed is not None:
            sample[_EXPERTS] = as_kind(routed[i][: max(len(whole[i]) - 1, 0)], NATIVE[system])
        samples.append(sample)
    return samples


def kind_of(value: Any) -> str | None:
    """How an array of whole numbers is held: ``list``, ``array DTYPE`` or ``tensor DTYPE``; None for anything else."""
    if isinstance(value, Tensor):
        return f"tensor {value.dtype}"
    if isinstance(value, np.ndarray):
        return f"array {value.dtype.str}"
    return "list" if isinstance(value, list) else None


def as_kind(array: Array, kind: str) -> Any:
    """An array held in the way of `kind_of`.

    Raises:
        ReproError: a kind that is not known.
    """
    form, _, dtype = kind.partition(" ")
    if form == "list":
        return array.tolist()
    if form == "array" and dtype in _INTEGERS:
        return array.astype(np.dtype(dtype))
    if form == "tensor" and TORCH_DTYPES.get(dtype) in _INTEGERS and "int" in dtype:
        return Tensor(dtype, array.astype(np.dtype(TORCH_DTYPES[dtype])))
    raise ReproError(f"no whole numbers are held as {kind[:40]!r}: convert the dump again")


def _cut(array: Array, lengths: Array) -> list[Array]:
    return np.split(array, np.cumsum(lengths)[:-1])


def _sample(number: int, sample: Mapping[str, Any], dump: RolloutDump, reward_key: str | None) -> dict[str, Array]:
    where = f"rollout {dump.rollout_id}, sample {number}"
    tokens = _whole(sample["tokens"], f"{where}: tokens")
    response = int(sample["response_length"])
    if not 0 <= response <= len(tokens):
        raise ReproError(f"{where}: response_length is {response}, and there are {len(tokens)} tokens: record it again")
    for name in ("loss_mask", "rollout_log_probs"):
        if sample[name] is not None and length(sample[name]) != response:
            raise ReproError(
                f"{where}: {name} has {length(sample[name])} entries, response_length is {response}: record it again"
            )
    mask, log_probs = np.ones(response, dtype=np.int64), np.full(response, np.nan, dtype=np.float32)
    if sample["loss_mask"] is not None:
        mask = _whole(sample["loss_mask"], f"{where}: loss_mask")
    if sample["rollout_log_probs"] is not None:
        log_probs = _floats(sample["rollout_log_probs"], f"{where}: rollout_log_probs")
    return {
        "tokens": tokens,
        "total_lengths": np.array(len(tokens), dtype=np.int64),
        "response_lengths": np.array(response, dtype=np.int64),
        "loss_mask": mask * 0 if sample["remove_sample"] else mask,
        "rollout_log_probs": log_probs,
        "rewards": _floats([_reward(sample["reward"], reward_key, where)], f"{where}: reward")[0],
    }


def _whole(value: Any, what: str) -> Array:
    array = numbers(value)
    if array is not None and array.ndim == 1 and not array.size:
        return array.astype(np.int64)
    if array is not None and array.dtype.kind == "f" and np.isin(array, (0.0, 1.0)).all():
        array = array.astype(np.int64)  # a mask
    if array is None or array.ndim != 1 or array.dtype.kind not in "ib":
        raise ReproError(f"{what} are no list of whole numbers of 64 bits: record it again")
    return array.astype(np.int64)


def _floats(value: Any, what: str) -> Array:
    array = numbers(value)
    if array is None and isinstance(value, list) and all(type(x) in (int, float) for x in value):
        array = _mixed(value)
    if array is None or array.ndim != 1:
        raise ReproError(f"{what} is no list of numbers: record it again")
    with np.errstate(over="ignore", invalid="ignore"):  # beyond fp32 is infinity there too
        return array.astype(np.float32)


def _mixed(value: Sequence[float]) -> Array | None:
    """Ints and floats together, as float64; None where one is too large for it."""
    try:
        return np.array(value, dtype=np.float64)
    except OverflowError:
        return None


def _reward(value: Any, key: str | None, where: str) -> float:
    if isinstance(value, dict):
        if key is None:
            names = ", ".join(sorted(map(shown, value))) or "none"
            raise ReproError(f"{where} has several rewards ({names}): --reward-key KEY says which is trained on")
        if key not in value:
            raise ReproError(f"{where} has no reward {key!r}, it has {', '.join(sorted(map(shown, value)))}")
        value = value[key]
    if value is None:
        return float("nan")
    if isinstance(value, np.ndarray) and value.size == 1:
        value = value.reshape(-1)[0]
    if isinstance(value, int | float | np.number | np.bool_) and not isinstance(value, np.complexfloating):
        try:
            return float(value)
        except (OverflowError, TypeError):
            pass
    if isinstance(value, Tensor) and value.numel == 1:
        return float(value.floats().ravel()[0])
    raise ReproError(f"{where}: its reward is a {type(value).__name__}, no number: record it again")


def _groups(samples: Sequence[Mapping[str, Any]]) -> list[int]:
    """Group numbers; samples without one get numbers of their own, beyond all others.

    So does each group whose number has no place in 64 bits; the number itself is kept beside the columns.
    """
    groups = [None if s["group_index"] is None else int(s["group_index"]) for s in samples]
    known = [group for group in groups if group is not None and _BELOW <= group < _BEYOND]
    beyond = max(known, default=-1) + 1
    huge: dict[int, int] = {}
    group_numbers = []
    for number, group in enumerate(groups):
        if group is None:
            group_numbers.append(beyond + number)
        elif _BELOW <= group < _BEYOND:
            group_numbers.append(group)
        else:
            group_numbers.append(beyond + huge.setdefault(group, number))
    return group_numbers


def _plain(value: Any) -> Any:
    """A text or chat as JSON has it; '' where JSON has no such value."""
    try:
        text = canonical_json(value)
        text.encode()
        return value if same(json.loads(text), value) else ""
    except (TypeError, ValueError, RecursionError):
        return ""


def _experts(dump: RolloutDump, per_sample: Sequence[Mapping[str, Array]]) -> dict[str, Array]:
    """Routed experts of all tokens, 0 for a sample's last; nothing where one sample lacks them."""
    blocks: list[Array | int] = []
    inner: tuple[int, ...] = ()
    for sample, parts in zip(dump.samples, per_sample, strict=True):
        size, value = len(parts["tokens"]), sample[_EXPERTS]
        array = None if value is None else numbers(value, wide=False)
        if value is None and size <= 1:  # there is no token whose experts could be known
            blocks.append(size)
            continue
        if array is None or array.ndim != 3 or array.dtype.kind not in "iu" or 0 in array.shape[1:]:
            return {}
        inner = inner or array.shape[1:]
        fits = array.shape == (max(size - 1, 0), *inner)
        if not fits or (array.size and not 0 <= array.min() <= array.max() <= np.iinfo(np.int16).max):
            return {}
        blocks.append(np.concatenate([array.astype(np.int16), np.zeros((min(size, 1), *inner), dtype=np.int16)]))
    if not inner:
        return {}
    column = np.concatenate([np.zeros((a, *inner), dtype=np.int16) if isinstance(a, int) else a for a in blocks])
    # the dtype that `repro_core` gives them by the number of experts, as far as the numbers tell
    return {"routed_experts": column.astype(np.uint8) if column.max(initial=0) < 256 else column}


class Loss(NamedTuple):
    """Something that a format has no place for.

    Attributes:
        what: The field, and what becomes of it.
        samples: How many samples have it; 0 for something of the whole rollout.
    """

    what: str
    samples: int

    def __str__(self) -> str:
        return f"{self.what}: {self.samples} samples" if self.samples else self.what


_ROUTING = {"slime": "session_id", "miles": "routing_key", "relax": "session_id"}
"""What the router hashes by has two names."""


def translate(dump: RolloutDump, system: System) -> tuple[RolloutDump, list[Loss]]:
    """A dump in the form of another system.

    Fields that both have are kept, whatever they hold; so are fields that no system has. Fields that the other has no
    place for are lost where they are set.

    Args:
        dump: It.
        system: Whose form.

    Returns:
        The dump, and what it lost; the dump itself, and nothing, where it has that form.
    """
    if dump.system == system:
        return dump, []
    lost: Counter[str] = Counter()
    unset, theirs = defaults(dump.system), NAMES[dump.system]
    samples = []
    for sample in dump.samples:
        made = defaults(system)
        for name, value in sample.items():
            place = _ROUTING[system] if name == _ROUTING[dump.system] else name
            if name == _ROUTING[system] != _ROUTING[dump.system]:  # a field that no system has, where ours is to go
                lost[f"{name}, whose place is that of {_ROUTING[dump.system]}"] += 1
            elif place == "rollout_routed_experts":
                made[place] = _experts_in(value, system, lost)
            elif place in NAMES[system] or name not in theirs:
                made[place] = value
            elif not same(value, unset[name]):
                lost[f"{name} of {dump.system}"] += 1
        samples.append(made)
    head = sorted([*map(str, dump.extra), *(["metadata"] if dump.metadata else [])])
    whole = [Loss(f"{shown(name)} of the file", 0) for name in head]
    losses = [Loss(what, count) for what, count in lost.items()]
    return RolloutDump(system, dump.rollout_id, dump.evaluation, {}, samples), [*losses, *whole]


def _experts_in(value: Any, system: System, lost: Counter[str]) -> Any:
    """Routed experts in the system's own way; as they are where they are no whole numbers of 32 bits."""
    array, wanted = numbers(value), NATIVE[system]
    if value is None or array is None or array.dtype.kind != "i" or kind_of(value) == wanted:
        return value
    if array.size and not np.iinfo(np.int32).min <= array.min() <= array.max() <= np.iinfo(np.int32).max:
        return value
    lost[f"rollout_routed_experts as {kind_of(value)}: now {wanted}"] += 1
    return as_kind(array, wanted)
