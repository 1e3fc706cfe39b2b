"""What Megatron's optimizers hold: the model's parameters, and what the torch optimizers in them update instead.

These are fp32 copies of bf16 parameters, and with the distributed optimizer this rank's slices of flattened ones.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch

__all__ = ["Main", "groups", "is_megatron", "mains", "parameters"]


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
    found: list[list[torch.Tensor]] = []
    for one in _single(optimizer):
        if hasattr(one, "gbuf_ranges"):
            found += [[p for p in buffer.params if p.requires_grad] for buffer in one.buffers]
        else:
            copied = {id(main): p for p, main in _copies(one)}
            found += [[copied.get(id(p), p) for p in group["params"]] for group in one.optimizer.param_groups]
    return found


def mains(optimizer: Any) -> dict[int, Main]:
    """By a parameter's id, what is updated in its place, if that is not itself."""
    found: dict[int, Main] = {}
    for one in _single(optimizer):
        if hasattr(one, "gbuf_ranges"):
            found |= _shards(one)
        else:
            state = one.optimizer.state
            own = {id(p): Main(p, None, _of(state, p), False) for group in one.optimizer.param_groups
                   for p in group["params"]}  # fmt: skip
            copied = {id(p): own.pop(id(main)) for p, main in _copies(one) if id(main) in own}
            found |= own | copied
    return found


def groups(optimizer: Any) -> list[dict[str, Any]]:
    """Parameter groups whose settings differ: experts have their own groups only where they are spread over ranks."""
    found: dict[str, dict[str, Any]] = {}
    for one in _single(optimizer):
        for group in one.optimizer.param_groups:
            about = {key: value for key, value in group.items() if key not in _OF_THE_LAYOUT}
            found.setdefault(repr(sorted((key, repr(value)) for key, value in about.items())), group)
    return list(found.values())


_OF_THE_LAYOUT = ("params", "is_expert_parallel", "step", "lr")


def _single(optimizer: Any) -> Iterator[Any]:
    """The optimizers in a chain that hold parameters."""
    for chained in getattr(optimizer, "chained_optimizers", ()):
        yield from _single(chained)
    stub = getattr(optimizer, "is_stub_optimizer", False)
    if not hasattr(optimizer, "chained_optimizers") and not stub and optimizer.optimizer is not None:
        yield optimizer


def _copies(one: Any) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Parameters and their fp32 copies."""
    pairs = zip(getattr(one, "float16_groups", ()), getattr(one, "fp32_from_float16_groups", ()), strict=True)
    for models, copies in pairs:
        yield from zip(models, copies, strict=True)


def _shards(one: Any) -> dict[int, Main]:
    """Of a distributed optimizer."""
    late = bool(one.ddp_config.overlap_param_gather)
    found = {id(p): Main(None, (0, 0), {}, late) for buffer in one.buffers for p in buffer.params if p.requires_grad}
    for parameter, (group, order) in one.model_param_group_index_map.items():
        main = one.optimizer.param_groups[group]["params"][order]
        own = one._get_model_param_range_map(parameter)["param"]
        found[id(parameter)] = Main(main, (own.start, own.end), _of(one.optimizer.state, main), late)
    return found


def _of(state: Mapping[Any, Any], parameter: torch.Tensor) -> Mapping[Any, Any]:
    held: Mapping[Any, Any] = state.get(parameter, {})  # never by index: that would make an entry
    return held
