"""What runs inside SGLang's own processes: a weight loader that loads nothing and writes down what is there."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor, nn

__all__ = ["export"]


def export(model: nn.Module, named_tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Write this process's live parameters and buffers to ``rank-NNNN.safetensors``, beside ``rank-NNNN.json``.

    SGLang calls it as a custom weight loader (``load_format``), on every rank.

    Args:
        model: the engine's.
        named_tensors: one uint8 tensor that holds the JSON ``{"folder": PATH}``; the folder must be seen by both sides.

    Raises:
        OSError: the folder cannot be written.
    """
    from safetensors.torch import save_file

    ((_, told),) = named_tensors
    folder = Path(json.loads(bytes(told.cpu().tolist()))["folder"])
    rank, size = _place()
    tensors = _live(model)
    written = folder / f"rank-{rank:04d}"
    save_file(tensors, written.with_suffix(".safetensors"))
    place = {"tp_rank": rank, "tp_size": size, "dtype": _dtype(model)}
    written.with_suffix(".json").write_text(json.dumps(place, sort_keys=True))


def _live(model: nn.Module) -> dict[str, Tensor]:
    """Every parameter and buffer as contiguous CPU tensors; what is one tensor under two names has the first."""
    found = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    # A clone each: safetensors refuses tensors that share memory.
    return {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in sorted(found.items())}


def _dtype(model: nn.Module) -> str:
    first = next((parameter for parameter in model.parameters() if parameter.is_floating_point()), None)
    return str(torch.float32 if first is None else first.dtype).removeprefix("torch.")


def _place() -> tuple[int, int]:
    """This process's tensor-parallel rank, and their number."""
    from sglang.srt.runtime_context import get_parallel

    parallel = get_parallel()
    return parallel.tp_rank, parallel.tp_size
