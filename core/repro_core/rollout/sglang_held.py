"""Reading an engine's weights back: `sglang_inside.export` writes them into a folder that both sides see."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from repro_core.config import ModelConfig
from repro_core.rollout.engine import EngineError, HeldWeights
from repro_core.rollout.sglang_weights import placements

__all__ = ["export_order", "read_held"]

_MEMORY = Path("/dev/shm")  # noqa: S108 - a fresh folder of our own in it
_SPARE = 1 << 30


def export_order(folder: Path) -> list[tuple[str, Tensor]]:
    """What `sglang_inside.export` is sent: where to write."""
    return [("export", torch.tensor(list(json.dumps({"folder": str(folder)}).encode()), dtype=torch.uint8))]


def read_held(export: Callable[[Path], None], model: ModelConfig, where: str) -> list[HeldWeights]:
    """What each process of an engine holds.

    Args:
        export: makes every process write into the folder that it is given.
        model: that the engine was started with.
        where: whose weights they are, for messages.

    Raises:
        EngineError: nothing readable was written.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    with _shared_folder(model) as folder:
        export(folder)
        files = sorted(folder.glob("rank-*.safetensors"))
        if not files:
            raise EngineError(
                f"{where} wrote its weights where this process cannot read them: run both on one machine, "
                f"or where {folder.parent} is shared"
            )
        held = []
        for file in files:
            try:
                place = json.loads(file.with_suffix(".json").read_text())
                tensors = load_file(file)
            except (OSError, ValueError, SafetensorError) as error:
                raise EngineError(f"{where}: its written weights cannot be read ({error})") from error
            shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
            held.append(HeldWeights(tensors, placements(model, place["tp_rank"], place["tp_size"], shapes)))
        if len(held) != place["tp_size"]:
            raise EngineError(f"{where} has {place['tp_size']} processes, of which {len(held)} wrote their weights")
        return held


@contextmanager
def _shared_folder(model: ModelConfig) -> Iterator[Path]:
    """A folder in memory where there is room for the model, else among temporary files; gone afterwards."""
    parent = _MEMORY if _MEMORY.is_dir() and shutil.disk_usage(_MEMORY).free > 2 * _bytes(model) + _SPARE else None
    folder = Path(tempfile.mkdtemp(prefix=f"repro-held-{os.getpid()}-", dir=parent))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _bytes(model: ModelConfig) -> int:
    """About what a model's fp32 tensors take."""
    width, heads = model.hidden_size, model.num_attention_heads * model.head_dim
    dense = model.num_experts * model.moe_intermediate_size if model.has_experts else model.intermediate_size
    return 4 * (2 * model.vocab_size * width + model.num_hidden_layers * width * (3 * dense + 4 * heads))
