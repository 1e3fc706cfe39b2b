"""Megatron-core's optimizers as step calls, and its own gradient clipping.

Megatron's step does more than the torch optimizers in it: it brings gradients to the main parameters before, and these
to the model's after. It leaves the optimizers out where a gradient is not finite. So one of its steps is one step of
the whole, whose parts are read as `mains` finds them.
"""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch

from repro_golden.fingerprint.placement import Part, Placement, steps_of
from repro_golden.recording.attach.base.by_identity import id_of
from repro_golden.recording.attach.base.steps import Steps

__all__ = [
    "Main",
    "child_key",
    "groups",
    "hook",
    "is_copy",
    "is_megatron",
    "mains",
    "parameter_path",
    "parameters",
    "placement",
    "state",
]

_OPTIMIZERS = {
    "megatron.core.optimizer.optimizer": ("MixedPrecisionOptimizer", "FP32Optimizer", "ChainedOptimizer"),
    "megatron.core.optimizer.layer_wise_optimizer": ("LayerWiseDistributedOptimizer",),
}
"""The classes that define ``step``; it returns (success, norm, zeros)."""


def hook(when: Callable[[str, Callable[[Any], None]], object], steps: Steps, session: Any) -> None:
    """Hook Megatron's modules once the program has imported them."""

    def left_out(out: Any, *_: Any, **__: Any) -> bool:
        done, norm = out[:2]
        if norm:  # 0.0 says that it was not asked for
            session.metric("grad_norm", norm, by_recorder=True)
        return done is False

    def optimizers(module: Any) -> None:
        for name in _OPTIMIZERS[module.__name__]:
            owner = getattr(module, name, None)
            if owner is not None and "step" in vars(owner):
                owner.step = steps.outer(owner.step, lambda optimizer, *_, **__: optimizer, left_out, whole=True)

    def clipping(module: Any) -> None:
        clip = module.clip_grad_by_total_norm_fp32

        @functools.wraps(clip)
        def call(parameters: Any, max_norm: Any, total_norm: Any, *args: Any, **kwargs: Any) -> Any:
            session.metric("grad_norm", total_norm, by_recorder=True)
            return clip(parameters, max_norm, total_norm, *args, **kwargs)

        module.clip_grad_by_total_norm_fp32 = call

    # before its other modules take the function from it
    when("megatron.core.optimizer.clip_grads", clipping)
    for name in _OPTIMIZERS:
        when(name, optimizers)


# -- what Megatron's optimizers hold: the model's parameters, and what the torch optimizers in them update instead
# These are fp32 copies of bf16 parameters, and with the distributed optimizer this rank's slices of flattened ones.


class Main(NamedTuple):
    """What is updated in place of a parameter.

    Attributes:
        tensor: None where this rank updates nothing of it.
        flat: It is this slice ``[start, stop)`` of the flattened parameter; None where it is all of it.
        state: The optimizer's state of `tensor`.
        late: Whether the parameter has only that slice of the update until the next forward pass gathers it.
    """

    tensor: torch.Tensor | None
    flat: tuple[int, int] | None
    state: Mapping[Any, Any]
    late: bool


def is_megatron(optimizer: Any) -> bool:
    """Whether it is one of Megatron's, which wrap torch's."""
    module = sys.modules.get("megatron.core.optimizer.optimizer")
    kind = getattr(module, "MegatronOptimizer", None)
    return kind is not None and isinstance(optimizer, kind)


def parameters(optimizer: Any) -> list[list[torch.Tensor]] | None:
    """The model's parameters that one of Megatron's optimizers updates, by group; None for other optimizers.

    With the distributed optimizer that is all of them, also those of which this rank updates nothing.
    """
    if not is_megatron(optimizer):
        return None
    by_group: list[list[torch.Tensor]] = []
    for member in _single(optimizer):
        if hasattr(member, "gbuf_ranges"):
            by_group += [[p for p in buffer.params if p.requires_grad] for buffer in member.buffers]
        else:
            copied = {id_of(main): p for p, main in _copies(member)}
            by_group += [[copied.get(id_of(p), p) for p in group["params"]] for group in member.optimizer.param_groups]
    return by_group


def mains(optimizer: Any) -> dict[int, Main]:
    """By a parameter's id, what is updated in its place, if that is not itself."""
    by_parameter: dict[int, Main] = {}
    for member in _single(optimizer):
        if hasattr(member, "gbuf_ranges"):
            by_parameter |= _shards(member)
        else:
            state = member.optimizer.state
            updated = {id_of(p): Main(p, None, _of(state, p), False) for group in member.optimizer.param_groups
                       for p in group["params"]}  # fmt: skip
            copied = {id_of(p): updated.pop(id_of(main)) for p, main in _copies(member) if id_of(main) in updated}
            by_parameter |= updated | copied
    return by_parameter


def groups(optimizer: Any) -> list[dict[str, Any]]:
    """Parameter groups whose settings differ: experts have their own groups only where they are spread over ranks."""
    distinct: dict[str, dict[str, Any]] = {}
    for member in _single(optimizer):
        for group in member.optimizer.param_groups:
            about = {key: value for key, value in group.items() if key not in _OF_THE_LAYOUT}
            distinct.setdefault(repr(sorted((key, repr(value)) for key, value in about.items())), group)
    return list(distinct.values())


_OF_THE_LAYOUT = ("params", "is_expert_parallel", "step", "lr")


def _single(optimizer: Any) -> Iterator[Any]:
    """The optimizers in a chain that hold parameters."""
    for chained in getattr(optimizer, "chained_optimizers", ()):
        yield from _single(chained)
    stub = getattr(optimizer, "is_stub_optimizer", False)
    if not hasattr(optimizer, "chained_optimizers") and not stub and optimizer.optimizer is not None:
        yield optimizer


def _copies(member: Any) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Parameters and their fp32 copies."""
    pairs = zip(getattr(member, "float16_groups", ()), getattr(member, "fp32_from_float16_groups", ()), strict=True)
    for models, copies in pairs:
        yield from zip(models, copies, strict=True)


def _shards(member: Any) -> dict[int, Main]:
    """Of a distributed optimizer."""
    late = bool(member.ddp_config.overlap_param_gather)
    shards = {
        id_of(p): Main(None, (0, 0), {}, late) for buffer in member.buffers for p in buffer.params if p.requires_grad
    }
    for parameter, (group, order) in member.model_param_group_index_map.items():
        main = member.optimizer.param_groups[group]["params"][order]
        span = member._get_model_param_range_map(parameter)["param"]
        shards[id_of(parameter)] = Main(main, (span.start, span.end), _of(member.optimizer.state, main), late)
    return shards


def _of(state: Mapping[Any, Any], parameter: torch.Tensor) -> Mapping[Any, Any]:
    held: Mapping[Any, Any] = state.get(parameter, {})  # never by index: that would make an entry
    return held


# -- one name for one tensor in every Megatron layout, and where a rank's part of it lies
# The canonical tensors are those of one process, under Megatron's own names: layers and experts are numbered over all
# pipeline stages and expert-parallel ranks, QKV is interleaved by query group, the gated fc1 is [gate; up].
# Everything is
# read from the modules and from ``megatron.core.parallel_state`` when it is asked for; without either, nothing changes.

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
