"""One recorded rollout as a file: its parts, its digest, and what must hold of it.

Equality is always over content (tensors by fingerprint, metadata as canonical JSON), never over file bytes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from repro_golden.base.canonical import canonical_json, check_format, digest, parse_json, write_atomic
from repro_golden.base.errors import ReproError

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["FORMAT", "RolloutData", "check", "read_rollout", "write_rollout"]

FORMAT = 1
_TENSORS = {
    "tokens": "int64",
    "total_lengths": "int64",
    "response_lengths": "int64",
    "loss_mask": "int64",
    "rollout_log_probs": "float32",
    "rewards": "float32",
    "group_index": "int64",
}
_ROUTED = "routed_experts"
"""Optional: which experts each token went through, uint8 or int16 [tokens, layers, top-k]."""


@dataclass(frozen=True)
class RolloutData:
    """One rollout as plain data: what crosses the trainer interface. `repro_core.Rollout` documents the parts."""

    meta: Mapping[str, Any]
    tensors: Mapping[str, Tensor]

    @property
    def digest(self) -> str:
        """32 hex digits over the content; equal for equal content, whatever file it lies in."""
        from repro_golden.fingerprint import fingerprint  # torch, which an index alone does not need

        parts = [f"{name}={fingerprint(tensor)}" for name, tensor in sorted(self.tensors.items())]
        return digest("rollout", canonical_json(dict(self.meta)), *parts)


def write_rollout(path: Path, rollout: RolloutData) -> None:
    """Write one rollout; equal content gives equal bytes.

    Raises:
        ReproError: the rollout does not hold together (see `check`).
    """
    from safetensors.torch import save

    check(rollout, path.name)
    # safetensors writes metadata keys in random order, hence one key that holds canonical JSON
    meta = {"rollout": canonical_json({"format": FORMAT, **rollout.meta})}
    tensors = {name: tensor.detach().to("cpu").contiguous().clone() for name, tensor in rollout.tensors.items()}
    write_atomic(path, save(tensors, metadata=meta))


def read_rollout(path: Path) -> RolloutData:
    """Read one rollout.

    Raises:
        ReproError: missing, unreadable, a newer format, or lengths that do not add up.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            raw = parse_json((file.metadata() or {}).get("rollout", "null"))
            # clones: BLAS may order its sums by alignment, and mapped memory lies where the file's header ends
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118 - not a mapping
    except FileNotFoundError:
        raise ReproError(f"no rollout {path}: pull it (`repro golden pull`) or record the case again") from None
    except (OSError, SafetensorError, ValueError) as error:
        raise ReproError(f"{path} is not a readable rollout ({error}): pull or record it again") from None
    if not isinstance(raw, dict):
        raise ReproError(f"{path} is a safetensors file without 'rollout' metadata, so no rollout: record it again")
    check_format(raw.pop("format", None), FORMAT, f"the rollout {path}")
    rollout = RolloutData(raw, tensors)
    check(rollout, path.name)
    return rollout


def check(rollout: RolloutData, name: str) -> None:
    """Refuse a rollout whose parts do not fit together.

    Raises:
        ReproError: a missing tensor, a wrong dtype, or lengths that do not add up.
    """
    t = rollout.tensors
    try:
        plain = json.loads(canonical_json(dict(rollout.meta))) == rollout.meta
    except (TypeError, ValueError, RecursionError):
        plain = False
    if not plain or "format" in rollout.meta:
        raise ReproError(f"rollout {name}: its metadata must be plain JSON without a key 'format': correct the trainer")
    if "rollout_id" not in rollout.meta:
        raise ReproError(f"rollout {name} has no rollout_id: it was not written by a recorder")
    for key, dtype in _TENSORS.items():
        if key not in t:
            raise ReproError(f"rollout {name} has no {key}: record it again")
        if str(t[key].dtype) != f"torch.{dtype}" or t[key].ndim != 1:
            raise ReproError(f"rollout {name}: {key} is {t[key].dtype}, not one-dimensional {dtype}: record it again")
    routed = t.get(_ROUTED)
    if routed is not None:
        right = str(routed.dtype) in ("torch.uint8", "torch.int16") and routed.ndim == 3 and 0 not in routed.shape[1:]
        if not right or bool((routed < 0).any()):
            raise ReproError(
                f"rollout {name}: {_ROUTED} is {routed.dtype} {list(routed.shape)}, not uint8 or int16 "
                "[tokens, layers, top-k] of experts' numbers: record it again"
            )
    samples, response = len(t["total_lengths"]), int(t["response_lengths"].sum())
    sizes = {
        "tokens": int(t["total_lengths"].sum()),
        "response_lengths": samples,
        "rewards": samples,
        "group_index": samples,
        "loss_mask": response,
        "rollout_log_probs": response,
    }
    if routed is not None:
        sizes[_ROUTED] = sizes["tokens"]
    for key, size in sizes.items():
        if len(t[key]) != size:
            raise ReproError(
                f"rollout {name}: {key} has {len(t[key])} entries, the lengths ask for {size}: record it again"
            )
    inside = (t["response_lengths"] >= 0) & (t["response_lengths"] <= t["total_lengths"])
    if samples == 0 or not bool(inside.all()):
        raise ReproError(f"rollout {name}: no samples, or a response longer than its sample: record it again")
