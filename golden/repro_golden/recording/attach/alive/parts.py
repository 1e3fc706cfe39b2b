"""Tensors that have no bytes of their own, as those that have: quantized ones, and wrappers around others."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import operator
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

import torch

from repro_golden.fingerprint.kinds import PLAIN_TENSORS
from repro_golden.recording.attach.alive.opened import leaves
from repro_golden.recording.attach.alive.reached import is_tensor
from repro_golden.recording.attach.alive.readings import Tensors
from repro_golden.recording.attach.base.by_identity import id_of

__all__ = ["any_quantized", "any_to_open", "local_part", "of_parts"]


def any_quantized(values: Iterable[Any]) -> bool:
    """Whether one of them is a quantized tensor."""
    with contextlib.suppress(AttributeError):  # what is no tensor is a number, or is refused where it is taken
        return any(map(_IS_QUANTIZED, values))
    return False


_IS_QUANTIZED = operator.attrgetter("is_quantized")


def any_to_open(values: Collection[Any]) -> bool:
    """Whether one of them may have more than its bytes: it is around others, or has attributes."""
    return any(map(_may_hold, set(map(type, values))))


@functools.cache
def _may_hold(kind: type) -> bool:
    return issubclass(kind, torch.Tensor) and kind not in PLAIN_TENSORS


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


def _opened(name: str, tensor: torch.Tensor, unread: dict[str, str], seen: set[int]) -> Iterator[tuple[str, Any]]:
    """A tensor as plain ones, to any depth: itself, what it is around as it says itself, and what it has beside.

    Args:
        name: Its own.
        tensor: Of any kind.
        unread: Takes why something is left out.
        seen: Ids of those that it belongs to, for each may know the other.
    """
    if not _may_hold(type(tensor)) or id_of(tensor) in seen:
        yield name, tensor
        return
    seen = seen | {id_of(tensor)}
    if hasattr(tensor, "wait"):  # of a collective, which may be under way
        tensor = local_part(tensor)
    if _is_partial(tensor):  # each rank's part of the sum stands for itself
        tensor = local_part(tensor)
    local = local_part(tensor)
    if _wraps(tensor) and hasattr(tensor, "__tensor_flatten__") and not hasattr(tensor, "to_local"):
        parts, context = tensor.__tensor_flatten__()
        for part in parts:
            yield from _opened(f"{name}.{part}", getattr(tensor, part), unread, seen)
        if _plain(context):
            yield f"{name}.context", _digest(type(tensor).__qualname__, str(tensor.dtype), context)
        else:
            unread[f"{name}.context"] = f"it is a {type(tensor).__name__}"
        return
    if _wraps(tensor):
        unread[name] = f"it is a {type(local).__name__}"
    elif local is tensor and type(tensor) not in PLAIN_TENSORS and not _is_uninitialized(tensor):
        with torch._C.DisableTorchFunctionSubclass():
            yield name, tensor.detach().as_subclass(torch.Tensor)
    else:
        yield name, tensor
    yield from _attributes(name, local, unread, seen)


def _attributes(name: str, tensor: torch.Tensor, unread: dict[str, str], seen: set[int]) -> Iterator[tuple[str, Any]]:
    """The tensors that one of a class of its own has beside its bytes, as the scales of a quantized one."""
    held = getattr(tensor, "__dict__", None)
    if not held or not _may_hold(type(tensor)) or not is_tensor(tensor):
        return
    for path, item in leaves(dict(held), name, unread=unread):
        if isinstance(item, torch.Tensor) and id_of(item) not in seen:  # numbers there are ids and clocks, too
            yield from _opened(path, item, unread, seen)


def _is_uninitialized(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, (torch.nn.UninitializedParameter, torch.nn.UninitializedBuffer))


def _digest(*about: Any) -> torch.Tensor:
    """What stands for values that are no tensors."""
    return torch.frombuffer(bytearray(hashlib.sha256(repr(about).encode()).digest()), dtype=torch.uint8)


def _plain(value: Any) -> bool:
    """Whether what a wrapper says beside its tensors is the same text in every process."""
    if isinstance(value, (tuple, list)):
        return all(map(_plain, value))
    if isinstance(value, dict):
        return all(isinstance(key, str) and _plain(item) for key, item in list(value.items()))
    return value is None or isinstance(value, (bool, int, float, str, torch.dtype, torch.device))


def of_parts(tensors: Mapping[str, torch.Tensor], prefix: str = "", unread: dict[str, str] | None = None) -> Tensors:
    """Tensors with bytes of their own.

    The codes of a quantized one have its name, scale and zero point are beside; what a wrapper is around, and what a
    tensor of a class of its own has as attributes, has its part's name behind.

    Args:
        tensors: By name.
        prefix: Of the names in `unread`.
        unread: Takes why one is left out.
    """
    to_open = any_to_open(tensors.values())
    if not to_open and not any_quantized(tensors.values()):
        return tensors if type(tensors) is Tensors else Tensors(tensors)
    out = Tensors()
    if to_open:
        closed = dict[str, str]()
        tensors = Tensors(part for pair in tensors.items() for part in _opened(*pair, closed, set()))
        if unread is not None:
            unread |= {prefix + name: why for name, why in closed.items()}
    for name, tensor in tensors.items():
        if not tensor.is_quantized or not _has_codes(tensor):
            out[name] = tensor
            continue
        out[name] = tensor.int_repr()
        if tensor.qscheme() in (torch.per_tensor_affine, torch.per_tensor_symmetric):
            out[f"{name}.scale"] = torch.tensor(tensor.q_scale(), dtype=torch.float64, device="cpu")
            out[f"{name}.zero_point"] = torch.tensor(tensor.q_zero_point(), device="cpu")
        else:
            out[f"{name}.scale"] = tensor.q_per_channel_scales()
            out[f"{name}.zero_point"] = tensor.q_per_channel_zero_points()
            out[f"{name}.axis"] = torch.tensor(tensor.q_per_channel_axis(), device="cpu")
    return out


def _has_codes(tensor: torch.Tensor) -> bool:
    return tensor.device.type != "meta" and (not tensor.numel() or bool(tensor.untyped_storage().nbytes()))
