"""Reading an engine's weights back: `sglang_inside.export` writes them into a folder that both sides see."""

from __future__ import annotations

import base64
import contextlib
import json
import pickle
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from repro_core.config import ModelConfig
from repro_core.rollout.engine import EngineError, HeldWeights
from repro_core.rollout.scratch import scratch_folder
from repro_core.rollout.sglang.weights import placements

__all__ = ["export_order", "no_memory", "packed_order", "read_held"]

_MEMORY = Path("/dev/shm")  # noqa: S108 - a fresh folder of our own in it
_SPARE = 1 << 30


def export_order(folder: Path) -> list[tuple[str, Tensor]]:
    """What `sglang_inside.export` is sent: where to write."""
    return [("export", torch.tensor(list(json.dumps({"folder": str(folder)}).encode()), dtype=torch.uint8))]


def packed_order(folder: Path) -> str:
    """`export_order` for ``/update_weights_from_tensor``, with the bytes themselves: it reaches any machine."""
    # SGLang's own way puts tensors into shared memory; plain pickle does not, and is read by the same reader there.
    return base64.b64encode(pickle.dumps(export_order(folder))).decode()


def no_memory(error: RuntimeError) -> str:
    """What is said where torch cannot put tensors into shared memory."""
    line = " ".join(str(error).split())[:200]
    return f'cannot put weights into shared memory ({line}): make room in /dev/shm, or set sglang.sync to "disk"'


def read_held(
    export: Callable[[Path], None], model: ModelConfig, where: str, *, folder: str | None = None, server: bool = False
) -> list[HeldWeights]:
    """What each process of an engine holds.

    Args:
        export: makes every process write into the folder that it is given.
        model: that the engine was started with.
        where: whose weights they are, for messages.
        folder: that this process and the engine both see; None is one of this machine.
        server: whether it may run as another user.

    Raises:
        EngineError: nothing readable was written.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    with _exchange(model, folder, server=server) as seen:
        export(seen)
        for failure in sorted(seen.glob("process-*.error")):
            raise EngineError(f"{where} cannot write its weights to {seen.parent}: {failure.read_text()[:300]}")
        files = sorted(seen.glob("rank-*.safetensors"))
        if not files:
            raise EngineError(
                f"{where} wrote no weights to {seen.parent}: set sglang.folder to a folder that this process and the "
                "engine both see, and the engine may write to"
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


@contextlib.contextmanager
def _exchange(model: ModelConfig, given: str | None, *, server: bool) -> Iterator[Path]:
    """A folder in the one given, else in memory where there is room for the model, else among temporary files."""
    parent = None if given is None else Path(given)
    if parent is None and _MEMORY.is_dir() and shutil.disk_usage(_MEMORY).free > 2 * _bytes(model) + _SPARE:
        parent = _MEMORY
    with contextlib.ExitStack() as stack:
        try:
            seen = stack.enter_context(scratch_folder("held", parent, shared=server))
        except OSError as error:
            raise EngineError(
                f"cannot make a folder for the engine's weights in {parent or 'the temporary one'} "
                f"({error.strerror or error}): set sglang.folder to another one"
            ) from error
        yield seen


def _bytes(model: ModelConfig) -> int:
    """About what a model's fp32 tensors take."""
    width, heads = model.hidden_size, model.num_attention_heads * model.head_dim
    dense = model.num_experts * model.moe_intermediate_size if model.has_experts else model.intermediate_size
    return 4 * (2 * model.vocab_size * width + model.num_hidden_layers * width * (3 * dense + 4 * heads))
