"""What runs inside SGLang's own processes: a weight loader that loads nothing and writes down what is there."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable
from pathlib import Path

from torch import Tensor, nn

__all__ = ["export"]


def export(model: nn.Module, named_tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Write this process's live parameters and buffers to ``rank-NNNN.safetensors``, beside ``rank-NNNN.json``.

    SGLang calls it as a custom weight loader (``load_format``), on every rank. It raises nothing, since an error in
    here would end the server: what fails is written to ``process-N.error``, and nothing where that fails too.

    Args:
        model: the engine's.
        named_tensors: one uint8 tensor that holds the JSON ``{"folder": PATH}``; the folder must be seen by both sides.
    """
    with contextlib.suppress(Exception):
        ((_, encoded),) = named_tensors
        folder = Path(json.loads(bytes(encoded.cpu().tolist()))["folder"])
        try:
            _write(model, folder)
        except Exception as error:  # noqa: BLE001 - whatever it is, it must not end the server
            line = " ".join(f"{type(error).__name__}: {error}".split())
            _readable(folder / f"process-{os.getpid()}.error", line)


def _write(model: nn.Module, folder: Path) -> None:
    from safetensors.torch import save_file

    rank, size = _place()
    written = folder / f"rank-{rank:04d}"
    file = written.with_suffix(".safetensors")
    save_file(_live(model), file)
    file.chmod(0o644)
    _readable(written.with_suffix(".json"), json.dumps({"tp_rank": rank, "tp_size": size}, sort_keys=True))


def _readable(path: Path, text: str) -> None:
    """Write a file that the trainer's user can read."""
    path.write_text(text)
    path.chmod(0o644)


def _live(model: nn.Module) -> dict[str, Tensor]:
    """Every parameter and buffer as contiguous CPU tensors; what is one tensor under two names has the first."""
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    # A clone each: safetensors refuses tensors that share memory.
    return {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in sorted(tensors.items())}


def _place() -> tuple[int, int]:
    """This process's tensor-parallel rank, and their number."""
    from sglang.srt.runtime_context import get_parallel

    parallel = get_parallel()
    return parallel.tp_rank, parallel.tp_size
