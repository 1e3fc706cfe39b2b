"""Tensors that have no bytes of their own, as those that have: quantized ones, and wrappers around others."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import operator
from collections.abc import Collection, Iterable, Iterator
from typing import Any

import torch

__all__ = ["any_quantized", "any_wrappers", "local_part", "of_parts"]

Tensors = dict[str, torch.Tensor]


def any_quantized(values: Iterable[Any]) -> bool:
    """Whether one of them is a quantized tensor."""
    with contextlib.suppress(AttributeError):  # what is no tensor is a number, or is refused where it is taken
        return any(map(_IS_QUANTIZED, values))
    return False


_IS_QUANTIZED = operator.attrgetter("is_quantized")


def any_wrappers(values: Collection[Any]) -> bool:
    """Whether one of them is a tensor around others, or a DTensor whose part here is."""
    kinds = set(map(type, values))
    return any(map(_dispatches, kinds)) and any(map(_wraps, values))


@functools.cache
def _dispatches(kind: type) -> bool:
    """Whether tensors of a class may have no bytes of their own."""
    return issubclass(kind, torch.Tensor) and kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__


def local_part(tensor: Any) -> Any:
    """What a DTensor holds in this process, once it is there; any other tensor itself."""
    local = getattr(tensor, "_local_tensor", tensor)
    return local.wait() if hasattr(local, "wait") else local


def _wraps(tensor: Any) -> bool:
    """Whether a tensor, or what a DTensor holds here, has no bytes of its own, or is to be added up over ranks."""
    kinds: tuple[type, type] = type(tensor), type(local_part(tensor))
    return all(map(_dispatches, kinds)) or _is_partial(tensor)


def _is_partial(tensor: Any) -> bool:
    return hasattr(tensor, "device_mesh") and any(placement.is_partial() for placement in tensor.placements)


def _unwrapped(name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """What a tensor is around, to any depth, as it says itself; itself where it is plain, or does not say."""
    if hasattr(tensor, "wait"):  # of a collective, which may be under way
        tensor = local_part(tensor)
    if _is_partial(tensor):  # each rank's part of the sum stands for itself
        tensor = local_part(tensor)
    if not _wraps(tensor) or not hasattr(tensor, "__tensor_flatten__") or hasattr(tensor, "to_local"):
        yield name, tensor
        return
    parts, context = tensor.__tensor_flatten__()
    for part in parts:
        yield from _unwrapped(f"{name}.{part}", getattr(tensor, part))
    if _plain(context):
        about = repr((type(tensor).__qualname__, str(tensor.dtype), context)).encode()
        yield f"{name}.context", torch.frombuffer(bytearray(hashlib.sha256(about).digest()), dtype=torch.uint8)
    else:
        yield f"{name}.context", tensor  # which cannot be read, and is named


def _plain(value: Any) -> bool:
    """Whether what a wrapper says beside its tensors is the same text in every process."""
    if isinstance(value, (tuple, list)):
        return all(map(_plain, value))
    if isinstance(value, dict):
        return all(isinstance(key, str) and _plain(item) for key, item in value.items())
    return value is None or isinstance(value, (bool, int, float, str, torch.dtype, torch.device))


def of_parts(tensors: Tensors, prefix: str = "", unread: dict[str, str] | None = None) -> Tensors:
    """Tensors with bytes of their own.

    The codes of a quantized one have its name, scale and zero point are beside; what a wrapper is around has its part's
    name behind.

    Args:
        tensors: By name.
        prefix: Of the names in `unread`.
        unread: Takes why one is left out.
    """
    wrapped = any_wrappers(tensors.values())
    if not wrapped and not any_quantized(tensors.values()):
        return tensors
    out = Tensors()
    if wrapped:
        tensors = dict(part for pair in tensors.items() for part in _unwrapped(*pair))
    for name, tensor in tensors.items():
        if _wraps(tensor):
            if unread is not None:
                unread[prefix + name] = f"it is a {type(local_part(tensor)).__name__}"
            continue
        out[name] = tensor.int_repr() if tensor.is_quantized else tensor
        if not tensor.is_quantized:
            continue
        if tensor.qscheme() in (torch.per_tensor_affine, torch.per_tensor_symmetric):
            out[f"{name}.scale"] = torch.tensor(tensor.q_scale(), dtype=torch.float64, device="cpu")
            out[f"{name}.zero_point"] = torch.tensor(tensor.q_zero_point(), device="cpu")
        else:
            out[f"{name}.scale"] = tensor.q_per_channel_scales()
            out[f"{name}.zero_point"] = tensor.q_per_channel_zero_points()
            out[f"{name}.axis"] = torch.tensor(tensor.q_per_channel_axis(), device="cpu")
    return out
