"""One name for one tensor in every Megatron layout, and where a rank's part of it lies.

The canonical tensors are those of one process, under Megatron's own names: layers and experts are numbered over all
pipeline stages and expert-parallel ranks, QKV is interleaved by query group, the gated fc1 is [gate; up]. Everything is
read from the modules and from ``megatron.core.parallel_state`` when it is asked for; without either, nothing changes.
"""

from __future__ import annotations

import re
import sys
from typing import Any

import torch

from repro_golden.fingerprint.placement import Part, Placement, steps_of

__all__ = ["child_key", "is_copy", "parameter_path", "placement", "state"]

_GROUPED = re.compile(r"(weight|bias)(\d+)$")
"""What a grouped linear layer calls the parameters of its experts."""

_OUTPUT, _EMBEDDING = "output_layer.weight", "embedding.word_embeddings.weight"
_VOCABULARY = (_OUTPUT, "output_layer.bias", "word_embeddings.weight")
_FUSED = re.compile(r"\.(in_proj|conv1d)\.\w+$")
"""Of state-space and delta-net mixers: a rank has slices of five matrices, whose sizes they keep to themselves."""
_ALL_EXPERTS = re.compile(r"\.experts\.weight[12]$")
"""Of the legacy grouped MLP: the experts of a rank in one matrix."""


def state() -> Any:
    """``megatron.core.parallel_state`` where the program has initialized it, else None."""
    module = sys.modules.get("megatron.core.parallel_state")
    ready = getattr(module, "model_parallel_is_initialized", None)
    return module if ready is not None and ready() else None


def child_key(path: str, module: torch.nn.Module, key: str, child: torch.nn.Module) -> str:
    """What a module's child is called in every layout: layers and experts count over all ranks.

    Args:
        path: Of the module.
        module: Often a list of layers or of experts.
        key: The child's in it.
        child: A layer knows its own number.
    """
    if not key.isdigit():
        return key
    number = child.__dict__.get("layer_number")
    if isinstance(number, int) and _of_megatron(child):
        return str(number - 1)
    if path.rpartition(".")[2] == "local_experts":
        return str(int(key) + _first_expert(len(module._modules)))
    return key


def parameter_path(path: str, parameter: torch.Tensor, owner: torch.nn.Module) -> str:
    """What a parameter is called in every layout.

    A part whose place is not known keeps its rank in its name: ``NAME@tp1``, ``NAME@ep1``.
    """
    grouped = _GROUPED.search(path)
    count = owner.__dict__.get("num_gemms")
    if grouped and isinstance(count, int):
        return f"{path[: grouped.start()]}{grouped[1]}{int(grouped[2]) + _first_expert(count)}"
    if path.endswith(_OUTPUT) and getattr(parameter, "shared_embedding", False):
        return path.removesuffix(_OUTPUT) + _EMBEDDING  # the last stage's copy
    parallel = state()
    if parallel is None:
        return path
    if _ALL_EXPERTS.search(path) and parallel.get_expert_model_parallel_world_size() > 1:
        path = f"{path}@ep{parallel.get_expert_model_parallel_rank()}"
    if _unplaced(path) and _tensor_parallel(path)[1] > 1:
        path = f"{path}@tp{_tensor_parallel(path)[0]}"
    return path


def is_copy(parameter: torch.Tensor) -> bool:
    """Whether this is a later stage's copy of the embedding, whose gradients and updates are the first stage's."""
    parallel = state()
    copied = getattr(parameter, "shared_embedding", False) and parallel is not None
    return bool(copied and parallel.get_pipeline_model_parallel_rank() > 0)


def placement(path: str, parameter: torch.Tensor, config: Any) -> Placement | None:
    """Where a parameter lies in the tensor of one process; None where it is all of it.

    Along the dimension that Megatron splits, a tensor of stride s was cut into s times as many pieces as there are
    ranks, and rank r has each s-th from the r-th on: with s = 2 the r-th pieces of gate and of up.

    Rows that only pad the vocabulary are in no tensor where the true number of rows is known, for it depends on the
    layout how many there are: ``config.vocab_size`` (Megatron-Bridge) or the arguments of ``megatron.training``.

    Args:
        path: Its name, from `parameter_path`.
        parameter: With the attributes that Megatron gives it.
        config: The nearest ``TransformerConfig`` around it, or None.
    """
    local = tuple(parameter.shape)
    dim = int(getattr(parameter, "partition_dim", -1))
    rank, ranks = _tensor_parallel(path)
    if not (getattr(parameter, "tensor_model_parallel", False) and 0 <= dim < len(local)) or _unplaced(path):
        dim, rank, ranks = 0, 0, 1
    gated = ".linear_fc1." in path and bool(getattr(config, "gated_linear_unit", False))
    stride = 2 if gated else max(1, int(getattr(parameter, "partition_stride", 1)))
    rows = _true_rows(path, config) if local else None
    if rows is not None and (dim != 0 or rows >= local[0] * ranks):
        rows = None
    if rows is None and (ranks == 1 or local[dim] % stride):
        return None
    shape = list(local)
    shape[dim] = local[dim] * ranks if rows is None else rows
    size, step, to = list(local), steps_of(local), steps_of(shape)
    if rows is not None:
        size[0] = max(0, min(local[0], rows - rank * local[0]))
        at = rank * local[0] * to[0] if size[0] else 0
        return Placement(local, (Part("", tuple(shape), tuple(size), 0, step, at, to),))
    size[dim] //= stride
    parts = []
    for k in range(stride):
        at = (k * ranks + rank) * size[dim] * to[dim]
        parts.append(Part("", tuple(shape), tuple(size), k * size[dim] * step[dim], step, at, to))
    return Placement(local, tuple(parts))


def _unplaced(path: str) -> bool:
    path = path.partition("@")[0]
    return bool(_FUSED.search(path) or _ALL_EXPERTS.search(path))


def _of_megatron(module: torch.nn.Module) -> bool:
    return any(base.__module__.startswith("megatron.") for base in type(module).__mro__)


def _first_expert(count: int) -> int:
    """The number of this rank's first expert, of so many that each rank has."""
    parallel = state()
    return 0 if parallel is None else int(parallel.get_expert_model_parallel_rank()) * count


def _tensor_parallel(path: str) -> tuple[int, int]:
    """This rank's place among those that hold a parameter's parts, and their number."""
    parallel = state()
    if parallel is None:
        return 0, 1
    if ".experts." in path:
        return int(parallel.get_expert_tensor_parallel_rank()), int(parallel.get_expert_tensor_parallel_world_size())
    return int(parallel.get_tensor_model_parallel_rank()), int(parallel.get_tensor_model_parallel_world_size())


def _true_rows(path: str, config: Any) -> int | None:
    """The rows of a vocabulary's tensor without those that pad it, where that is known."""
    if not path.endswith(_VOCABULARY):
        return None
    training = sys.modules.get("megatron.training.global_vars")
    for holder in (config, getattr(training, "_GLOBAL_ARGS", None)):
        size = getattr(holder, "vocab_size", None)
        if isinstance(size, int) and not isinstance(size, bool) and size > 0:
            return size
    return None
