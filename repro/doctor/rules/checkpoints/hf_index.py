"""The index against what the shards' own headers hold."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from repro.doctor.artefacts.hf import INDEX
from repro.doctor.artefacts.kinds import HfCheckpoint
from repro.doctor.artefacts.safetensors_header import BITS
from repro.doctor.rule import Found, Rule, Severity, Where

__all__ = ["RULE"]


def _check(checkpoint: HfCheckpoint) -> Iterator[Found]:
    index = checkpoint.index
    if index is None:
        return
    path = str(checkpoint.path / INDEX)
    readable = set(checkpoint.shards) - set(checkpoint.unreadable)
    absent, moved = [], []
    for name in sorted(index):
        if index[name] not in readable:
            continue  # other rules speak of missing and corrupt shards
        held = checkpoint.tensors.get(name)
        if held is None:
            absent.append(name)
        elif held.file != index[name]:
            moved.append(name)
    if absent:
        yield Found(
            f"the index names {_shown(absent)}, and the shard it gives does not hold them",
            Where(path, item=absent[0], value=index[absent[0]]),
        )
    if moved:
        said = f"the index gives another shard than the one that holds {_shown(moved)}"
        where = Where(path, item=moved[0], value=index[moved[0]])
        yield Found(f"{said} ({checkpoint.tensors[moved[0]].file})", where)
    unnamed = sorted(n for n, info in checkpoint.tensors.items() if n not in index and info.file in set(index.values()))
    if unnamed:
        yield Found(
            f"shards hold {_shown(unnamed)}, which the index does not name", Where(path, item=unnamed[0]), "warning"
        )
    if not (absent or moved or unnamed) and readable >= set(index.values()):
        yield from _size(checkpoint, path)


def _size(checkpoint: HfCheckpoint, path: str) -> Iterator[Found]:
    if not checkpoint.total_size:
        return
    held = sum(math.prod(info.shape) * BITS.get(info.dtype, 8) // 8 for info in checkpoint.tensors.values())
    if held != checkpoint.total_size:
        said = f"the index says {checkpoint.total_size} bytes in all, and the shards hold {held}"
        cure = "nothing, if the index was kept from before a change of dtype; otherwise write the checkpoint again"
        severity: Severity = "warning" if held < 0.99 * checkpoint.total_size else "note"
        yield Found(said, Where(path, item="metadata.total_size"), severity, "possible", cure)


def _shown(names: Sequence[str]) -> str:
    shown = ", ".join(name[:120] for name in names[:3])
    return f"{len(names)} tensor{'s' if len(names) > 1 else ''} ({shown}{', ...' if len(names) > 3 else ''})"


RULE = Rule(
    "hf-index", "model.safetensors.index.json and shards that disagree", (HfCheckpoint,), "error", "certain",
    "a loader that goes by the index fails on the tensor, or leaves it as it was initialised",
    "write the index again from the shards' headers, or convert the checkpoint again",
    ("slime guide: Debugging",), _check,
)  # fmt: skip
