"""What of a program's tensors and modules can be read, and why the rest cannot."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Sequence

import torch

from repro_golden.fingerprint.kinds import PLAIN_TENSORS
from repro_golden.recording.attach.alive.parts import local_part, of_parts
from repro_golden.recording.attach.alive.readings import Reading

__all__ = ["GIVEN_BACK", "all_readable", "is_packed", "readable", "unreadable"]


def is_packed(module: torch.nn.Module) -> bool:
    """Whether its weights are no tensors of Python's: quantized, or constants of a frozen graph."""
    if any(type(value) is torch.ScriptObject for value in list(vars(module).values())):
        return True
    frozen = isinstance(module, torch.jit.ScriptModule)
    return frozen and next(itertools.chain(module.parameters(), module.buffers()), None) is None


GIVEN_BACK = "its memory was given back"
_DEVICES = {"cpu", "cuda"}
_device, _layout, _is_nested = map(operator.attrgetter, ("device", "layout", "is_nested"))


def unreadable(tensor: torch.Tensor) -> str:
    """Why a tensor has no bytes that can be read; '' where it has."""
    if type(tensor) not in PLAIN_TENSORS:
        if isinstance(tensor, (torch.nn.UninitializedParameter, torch.nn.UninitializedBuffer)):
            return "its shape is not known yet"
        tensor = local_part(tensor)
        if type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
            return f"it is a {type(tensor).__name__}"
    if tensor.device.type not in _DEVICES:
        return f"it is on {tensor.device.type}"
    if tensor.is_nested:
        return "it is nested"
    if tensor.layout != torch.strided:
        return f"its layout is {str(tensor.layout).removeprefix('torch.')}"
    try:
        if tensor._is_zerotensor():
            return "it is zeros without memory"
        gone = tensor.numel() and not tensor.untyped_storage().nbytes()
    except RuntimeError:  # what stands for a tensor in a transform
        return "it stands for one while torch traces a function"
    return GIVEN_BACK if gone else ""


def all_readable(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether `unreadable` has nothing against any, seen at once; where it is False, each must be asked."""
    try:
        return (
            set(map(type, tensors)).issubset(PLAIN_TENSORS)
            and not any(map(_is_nested, tensors))
            and set(map(_layout, tensors)) <= {torch.strided}
            and {device.type for device in set(map(_device, tensors))} <= _DEVICES
            and not any(map(torch._C.TensorBase._is_zerotensor, tensors))
            and all(map(torch.UntypedStorage.nbytes, map(torch.Tensor.untyped_storage, tensors)))
        )
    except RuntimeError:  # what stands for a tensor in `vmap` shows no memory, also where it has no elements
        return False


def readable(prefix: str, reading: Reading, unread: dict[str, str]) -> Reading:
    """What of a reading has bytes: what holds other tensors is opened first, and then each part is asked.

    Why the rest has none is added to `unread`, by whole names.
    """
    tensors = of_parts(reading.tensors, prefix, unread)
    if all_readable(list(tensors.values())):
        return reading if tensors is reading.tensors else Reading(tensors, reading.places)
    why = {name: reason for name, tensor in tensors.items() if (reason := unreadable(tensor))}
    unread |= {f"{prefix}{name}": reason for name, reason in why.items()}
    return Reading(tensors, reading.places).but(why.__contains__)
