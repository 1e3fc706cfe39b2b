"""Between trainers' dumps and our rollouts, there and back without loss.

The columns of `repro_golden.store.rollouts` hold what is trained on. What they do not say of a dump, bit for bit, lies
beside them: as typed JSON under ``dump`` in the metadata, its long parts in the tensor ``dump``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from repro_golden.base.canonical import check_format
from repro_golden.base.errors import ReproError
from repro_golden.base.systems import SYSTEMS, System
from repro_golden.dumps.rollout.arrays import Array, numbers
from repro_golden.dumps.rollout.columns import Columns, Loss, as_kind, columns_of, kind_of, samples_of, translate
from repro_golden.dumps.rollout.fields import defaults
from repro_golden.dumps.rollout.files import RolloutDump
from repro_golden.dumps.rollout.typed_json import FORMAT, Decoder, Encoder
from repro_golden.dumps.values import same
from repro_golden.store.rollout_file import RolloutData

__all__ = ["Loss", "from_rollout", "to_rollout"]

_DUMP = "dump"
_EXPERTS = "rollout_routed_experts"
_TEXTS = ("prompt", "label")
_HELD = {"rollout_id", "prompts", "labels", "statuses", "weight_version", _DUMP}
"""Metadata that samples have a place for."""


def to_rollout(dump: RolloutDump, *, reward_key: str | None = None) -> RolloutData:
    """A dump as one of our rollouts.

    Args:
        dump: Of any system.
        reward_key: Which reward is trained on, where rewards are dicts.

    Returns:
        A rollout from which `from_rollout` makes the same dump.

    Raises:
        ReproError: lengths that do not add up, several rewards and no key, or values that cannot be kept.
    """
    import torch

    columns = columns_of(dump, reward_key)
    encoder = Encoder()
    meta = {**columns.meta, _DUMP: _beside(dump, columns, reward_key, encoder)}
    tensors = {name: torch.from_numpy(array) for name, array in columns.arrays.items()}
    if encoder.block:
        tensors[_DUMP] = torch.frombuffer(encoder.block, dtype=torch.uint8)
    return RolloutData(meta, tensors)


def from_rollout(rollout: RolloutData, system: System) -> tuple[RolloutDump, list[Loss]]:
    """One of our rollouts as a dump.

    Args:
        rollout: Made by `to_rollout`, or captured.
        system: Whose form.

    Returns:
        The dump, and what its form has no place for. A rollout that was made of a dump of this system loses nothing.

    Raises:
        ReproError: what lies beside the columns is damaged, in a newer format, or does not belong to them.
    """
    arrays = {name: tensor.detach().cpu().contiguous().numpy() for name, tensor in rollout.tensors.items()}
    columns = Columns(dict(rollout.meta), arrays)
    if _DUMP in rollout.meta:
        return translate(_restored(columns), system)
    number = int(rollout.meta["rollout_id"])
    dump = RolloutDump(system, number, False, {}, [{**defaults(system), **s} for s in samples_of(columns, system)])
    return dump, _unheld(columns, dump)


def _beside(dump: RolloutDump, columns: Columns, reward_key: str | None, encoder: Encoder) -> dict[str, Any]:
    """What the columns do not say of a dump, as JSON."""
    rows = samples_of(columns, dump.system)
    keys: list[list[str]] = []
    layout, differing, held = [], [], []
    for sample, derived in zip(dump.stored(), rows, strict=True):
        names = list(sample)
        if names not in keys:
            keys.append(names)
        layout.append(keys.index(names))
        expected = {**defaults(dump.system), **derived}
        kind = _held(sample.get(_EXPERTS), expected.get(_EXPERTS))
        held.append(kind)
        differing.append(
            {
                name: encoder.encode(value)
                for name, value in sample.items()
                if not _is(value, expected, name) and not (name == _EXPERTS and kind)
            }
        )
    beside = {
        "format": FORMAT,
        "system": dump.system,
        "evaluation": dump.evaluation,
        "metadata": encoder.encode(dump.metadata),
        "extra": encoder.encode(dump.extra),
        "lacks": sorted(dump.lacks),
        "keys": [[encoder.encode(name) for name in names] for names in keys],
        "layout": layout,
        "samples": [{"items": [[encoder.encode(k), v] for k, v in fields.items()]} for fields in differing],
        "reward_key": reward_key,
    }
    return beside | ({"experts": held} if any(held) else {})


def _is(value: Any, expected: Mapping[str, Any], name: str) -> bool:
    """Whether a field is what the columns and defaults say."""
    if name not in expected or not same(value, expected[name]):
        return False
    # metadata is JSON with sorted keys, and chats are dicts whose order some templates show
    return name not in _TEXTS or json.dumps(value) == json.dumps(value, sort_keys=True)


def _held(value: Any, expected: Any) -> str | None:
    """How routed experts are held, where that is all that the column does not say of them."""
    kind, column = kind_of(value), numbers(expected)
    if kind is None or column is None or same(value, expected):
        return None
    try:
        return kind if same(as_kind(column, kind), value) else None
    except ReproError:
        return None


def _restored(columns: Columns) -> RolloutDump:
    """The dump that a rollout was made of.

    Raises:
        ReproError: damaged, of a newer format, or of other columns.
    """
    beside, number = columns.meta[_DUMP], columns.meta["rollout_id"]
    if not isinstance(beside, Mapping):
        raise ReproError(f"rollout {number}: what lies beside its columns is damaged: convert the dump again")
    check_format(beside.get("format"), FORMAT, f"the dump in rollout {number}")
    decoder = Decoder(columns.arrays[_DUMP].tobytes() if _DUMP in columns.arrays else b"")
    try:
        system: System = beside["system"]
        if system not in SYSTEMS:
            raise ReproError(
                f"rollout {number} is of {system!r}, and known are {', '.join(SYSTEMS)}: upgrade repro-harness"
            )
        rows = samples_of(columns, system)
        held = beside.get("experts") or [None] * len(rows)
        keys = [[decoder.decode(name) for name in names] for names in beside["keys"]]
        samples = []
        for derived, layout, differing, kind in zip(rows, beside["layout"], beside["samples"], held, strict=True):
            if kind is not None:
                derived[_EXPERTS] = as_kind(_numbers(derived[_EXPERTS]), kind)
            whole = {**defaults(system), **derived, **decoder.decode(differing)}
            samples.append({name: whole[name] for name in keys[layout]})
        metadata, extra = decoder.decode(beside["metadata"]), decoder.decode(beside["extra"])
        lacks, key = frozenset(beside["lacks"]), beside["reward_key"]
        dump = RolloutDump(system, number, bool(beside["evaluation"]), metadata, samples, lacks, extra)
        again = columns_of(dump, key)
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise ReproError(
            f"rollout {number}: what lies beside its columns is damaged ({error}): convert the dump again"
        ) from None
    for name, array in again.arrays.items():
        if name not in columns.arrays or not same(array, columns.arrays[name]):
            raise ReproError(
                f"rollout {number}: its column {name} was changed since it was made of a dump: take 'dump' out of its "
                "metadata to write what the columns say, or convert the dump again"
            )
    return dump


def _numbers(value: Any) -> Array:
    array = numbers(value)
    assert array is not None  # `samples_of` made it
    return array


def _unheld(columns: Columns, dump: RolloutDump) -> list[Loss]:
    """What of a captured rollout its dump has no place for."""
    meta, arrays = columns.meta, columns.arrays
    unheld = meta.keys() - _HELD
    groups = len(set(arrays["group_index"].tolist()))
    unheld |= {name for name in ("prompts", "labels") if len(meta.get(name, ())) != groups}  # whose they are is open
    losses = [Loss(f"{name} of the rollout", 0) for name in sorted(unheld) if meta.get(name) not in ({}, [], None)]
    again = columns_of(dump).arrays
    for name in sorted(arrays):
        if name not in again:
            losses.append(Loss(f"the column {name}", 0))
        elif not same(again[name], arrays[name]):
            losses.append(Loss(f"bits of the column {name}, which is read back as {again[name].dtype}", 0))
    return losses
