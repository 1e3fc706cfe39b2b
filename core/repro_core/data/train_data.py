"""The train dump: what each update of a rollout consumed and computed, as one file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save

from repro_core.contract import Observe
from repro_core.data.rollout_file import replace_file

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["FORMAT", "Collector"]

FORMAT = 1
"""The file's format number."""

_CHECKED = ("loss_mask", "log_probs", "ref_log_probs", "kl")


class Collector:
    """An `Observe` that passes every signal on, then copies what the first-step checks and the train dump need.

    The copies are made after `observe` has returned, so they hold what the trainer goes on to use.

    Args:
        observe: the next observer.
        keep_all: keep the inputs and columns of every update for `write`; otherwise only the latest update's columns
            that `first_step` reads.
    """

    columns: dict[str, Tensor]
    """The latest update's inputs and per-token columns."""
    metrics: dict[str, float]
    """The latest update's metrics."""

    def __init__(self, observe: Observe, *, keep_all: bool) -> None:
        self._observe, self._keep_all = observe, keep_all
        self.columns, self.metrics = {}, {}
        self._updates: list[tuple[dict[str, Tensor], dict[str, float]]] = []

    def __call__(self, phase: str, name: str, value: Any, *placement: Any) -> None:
        """See `repro_core.Observe`."""
        self._observe(phase, name, value, *placement)
        for key, part in value.items() if isinstance(value, Mapping) else [("", value)]:
            self._take(phase, name + key, part)

    def _take(self, phase: str, name: str, value: Any) -> None:
        if phase == "input" and name == "tokens":  # a new update begins
            self.columns, self.metrics = {}, {}
            if self._keep_all:
                self._updates.append((self.columns, self.metrics))
        column = phase == "forward" or (phase == "input" and not name.startswith("start/"))
        if isinstance(value, float):
            self.metrics[name] = value
        elif column and (self._keep_all or name in _CHECKED):
            self.columns[name] = value.detach().clone()

    def write(self, path: Path, rollout_id: int) -> None:
        """Write all updates seen, one after the other, as safetensors; parents of `path` are made.

        The tensors are those of phase ``input`` and ``forward``, packed as in `repro_core.Rollout`. One metadata key,
        ``train_data``, holds canonical JSON: ``format``, ``rollout_id`` and ``metrics``, per update a mapping of names
        to ``repr`` of the float (JSON has no NaN).
        """
        names = self._updates[0][0] if self._updates else {}
        tensors = {name: torch.cat([columns[name] for columns, _ in self._updates]) for name in names}
        metrics = [{name: repr(value) for name, value in metrics.items()} for _, metrics in self._updates]
        meta = {"format": FORMAT, "rollout_id": rollout_id, "metrics": metrics}
        path.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps(meta, sort_keys=True, separators=(",", ":"))
        replace_file(path, save(tensors, metadata={"train_data": text}))
