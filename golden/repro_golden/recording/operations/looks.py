"""What is told of an operation and of tensors without reading them: names, memory, views, what a call changes.

It runs inside the trainer, for every operation of a step.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import CodeType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

__all__ = [
    "Facts", "Memory", "Modules", "Signature", "SmallResults", "bytes_of", "fills", "innermost", "local", "look",
    "memory_of", "next_node", "qualified", "readable", "signature_of", "singles_of", "sort", "told", "wraps",
]  # fmt: skip

_COLLECTIVES = ("c10d.", "_c10d_functional.", "symm_mem.")
_UNWRITTEN = ("empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided", "resize_")
_LONGEST = 400
"""Characters of an argument that is no tensor."""
_KEPT, _KEPT_TOGETHER = 32 << 10, 32 << 20
"""Bytes of a result that is kept, and of all of them."""
_ROOM = 1 << 20
"""Bytes of memory on a device that kept results share."""

Memory = tuple[str, int]
Signature = tuple[Any, ...]


class Facts:
    """What is known of an operation before it is called.

    Attributes:
        view: Whether it only looks at what is there.
        unwritten: Whether its results are memory that nobody has written.
        unread: Whether its results mean nothing yet, for that reason or because it is still at work.
        draws: Whether it takes random numbers.
    """

    def __init__(self, func: Any) -> None:
        name, written = str(func), [a.alias_info is not None and a.alias_info.is_write for a in func._schema.arguments]
        collective = name.startswith(_COLLECTIVES)
        self.view = bool(func.is_view) and not collective
        self.unwritten = name.split(".")[1] in _UNWRITTEN
        self.unread = (collective and "wait" not in name) or self.unwritten
        self.draws = torch.Tag.nondeterministic_seeded in func.tags
        self._changed = [(k, a.name) for k, (a, w) in enumerate(zip(func._schema.arguments, written, strict=True)) if w]

    def changed(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
        """The tensors that a call changes in place."""
        tensors = list[torch.Tensor]()
        for place, name in self._changed:
            sort(args[place] if place < len(args) else kwargs.get(name), tensors, [])
        return tensors


def told(value: Any, tensors: list[torch.Tensor]) -> str:
    """An argument in words; tensors are taken out, in their order."""
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        return f"T{len(tensors) - 1}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(told(item, tensors) for item in value) + "]"
    if isinstance(value, torch.Generator):
        return "Generator"
    if isinstance(value, torch.UntypedStorage):  # whose text is what lies in it, which may be nothing yet
        return f"Storage of {value.nbytes()} bytes"
    if value is None or isinstance(value, (bool, int, float, str)):
        return repr(value)[:_LONGEST]
    text = str(value)
    return text[:_LONGEST] if " at 0x" not in text else type(value).__name__


def qualified(code: CodeType) -> str:
    """The function's name with its class, where Python tells it (from 3.11 on)."""
    return getattr(code, "co_qualname", code.co_name)


def sort(value: Any, tensors: list[torch.Tensor], numbers: list[Any]) -> None:
    """Add the tensors and the numbers of arguments, or of a result, to two lists."""
    if isinstance(value, torch.Tensor):
        tensors.append(value)
    elif isinstance(value, (list, tuple)):
        for item in value:
            sort(item, tensors, numbers)
    elif isinstance(value, dict):
        for item in value.values():
            sort(item, tensors, numbers)
    elif isinstance(value, (bool, int, float)):
        numbers.append(value)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """What this process holds of a tensor that several share."""
    shard: torch.Tensor = getattr(tensor, "_local_tensor", tensor)
    return shard


def look(tensor: torch.Tensor) -> tuple[str, list[int]]:
    """Dtype and shape."""
    return str(tensor.dtype).removeprefix("torch."), list(tensor.shape)


def memory_of(tensor: torch.Tensor) -> Memory:
    """Which memory a tensor lies in; all that have none share one."""
    if not _plain(tensor) or tensor.layout is not torch.strided or tensor.is_meta:
        return "none", id(tensor)
    return tensor.device.type + str(tensor.device.index or 0), tensor.untyped_storage().data_ptr()


def signature_of(tensor: torch.Tensor, memory: Memory) -> Signature:
    """Equal for tensors that look at one memory in one way."""
    if memory[0] == "none":
        return memory
    return memory, tensor.storage_offset(), tuple(tensor.shape), tensor.stride(), tensor.dtype


def wraps(kind: Any) -> bool:
    """Whether tensors of a class are wrappers of others: what is done with them is done with those in its turn."""
    ways = (torch.Tensor.__torch_dispatch__, torch._C._disabled_torch_dispatch_impl)
    return kind.__torch_dispatch__ not in ways


def _plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor is no wrapper of others, and so has memory of its own."""
    return not wraps(type(tensor))


def readable(tensor: torch.Tensor) -> bool:
    """Whether a tensor has a content of its own that is there."""
    if (
        not _plain(tensor)
        or tensor.layout is not torch.strided
        or tensor.is_meta
        or tensor.is_quantized
        or tensor.is_nested
    ):
        return False
    reach = 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return (
        not tensor.numel() or tensor.untyped_storage().nbytes() >= (tensor.storage_offset() + reach) * tensor.itemsize
    )


def fills(tensor: torch.Tensor) -> bool:
    """Whether a tensor is all of its memory."""
    return tensor.numel() * tensor.itemsize >= tensor.untyped_storage().nbytes()


_Named = tuple[int | str, torch.dtype, int]
"""A small result's content, or its reading's number, with dtype and elements: more zeros may have the same content."""


class SmallResults:
    """The bytes of small results: who measures a difference of such needs no second recording.

    Those of a GPU are copied on it, on the stream that made them, and wait there in memory that the program's allocator
    does not see: nothing waits for the device before the step has ended.
    """

    def __init__(self) -> None:
        self._bytes, self._where = bytearray(), dict[_Named, tuple[int, int]]()
        self._on_device: dict[_Named, tuple[torch.Tensor, int, int]] = {}
        self._left = _KEPT_TOGETHER

    def keep(self, content: int | str, tensor: torch.Tensor) -> None:
        """Keep a result, named by its content where that was read at once, by its reading's number else; '' is none."""
        size = tensor.numel() * tensor.element_size()
        name = (content, tensor.dtype, tensor.numel())
        if content == "" or name in self._where or name in self._on_device or not 0 < size <= _KEPT:
            return
        if size > self._left or tensor.is_conj() or tensor.is_neg():
            return
        held = tensor.contiguous()
        if tensor.is_cpu:
            self._where[name] = (len(self._bytes), size)
            self._bytes += ctypes.string_at(held.data_ptr(), size)
        elif tensor.is_cuda and not torch.cuda.is_current_stream_capturing():
            room, start = self._room(tensor.device, size)
            with torch.cuda.device(tensor.device):
                room[start : start + size].copy_(held.as_strided((held.numel(),), (1,)).view(torch.uint8))
            self._on_device[name] = (room, start, size)
        else:
            return
        self._left -= size

    def _room(self, device: torch.device, size: int) -> tuple[torch.Tensor, int]:
        """Where the next bytes of a device go: the room, and the first byte."""
        last = next((entry for entry in reversed(self._on_device.values()) if entry[0].device == device), None)
        if last is not None and last[1] + last[2] + size <= _ROOM:
            return last[0], last[1] + last[2]
        from repro_golden.fingerprint.backends.gpu import own_memory

        # a room that was made in inference mode could not be written to outside of it
        with own_memory(device), torch.inference_mode(mode=False):
            return torch.empty(_ROOM, dtype=torch.uint8, device=device), 0

    def write(self, path: Path, contents: Sequence[str]) -> list[tuple[str, str, int, int, int]]:
        """Write them, one after the other; of each content, dtype, elements, first byte and number of bytes.

        Args:
            path: The file.
            contents: Of all readings, by number.
        """
        home = dict[int, torch.Tensor]()
        for name, (room, start, size) in self._on_device.items():
            if id(room) not in home:
                torch.cuda.synchronize(room.device)  # copies came on any stream
                home[id(room)] = room.cpu()
            self._where[name] = (len(self._bytes), size)
            self._bytes += ctypes.string_at(home[id(room)].data_ptr() + start, size)
        if self._where:
            path.write_bytes(self._bytes)
        return [
            (contents[c] if isinstance(c, int) else c, str(dtype).removeprefix("torch."), elements, *where)
            for (c, dtype, elements), where in self._where.items()
        ]


# -- which module's forward pass is under way


class Modules:
    """Follows forward passes by torch's global module hooks, which only look.

    A path starts with the class of the outermost module: ``Policy.model.layers.0.mlp``.
    """

    def __init__(self) -> None:
        self._under_way: list[str] = []
        self._names: WeakKeyDictionary[nn.Module, dict[int, str]] = WeakKeyDictionary()
        self._outermost: nn.Module | None = None
        self._hooks: list[Any] = []

    @property
    def path(self) -> str:
        """Of the innermost module under way; "" between passes."""
        return self._under_way[-1] if self._under_way else ""

    def follow(self) -> None:
        """Begin."""
        self._hooks = [
            register_module_forward_pre_hook(self._enter),
            register_module_forward_hook(self._leave, always_call=True),
        ]

    def let_go(self) -> None:
        """End."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self._under_way.clear()

    def _enter(self, module: nn.Module, _: object) -> None:
        if not self._under_way or self._outermost is None:
            self._outermost = module
        self._under_way.append(self._name(self._outermost, module))

    def _leave(self, *_: object) -> None:
        if self._under_way:
            self._under_way.pop()

    def _name(self, outermost: nn.Module, module: nn.Module) -> str:
        names = self._names.get(outermost)
        if names is None:
            names = {id(inner): name for name, inner in outermost.named_modules()}
            self._names[outermost] = names
        path = names.get(id(module))
        if path is None:  # made, or attached, during the pass
            path = type(module).__name__
        return f"{type(outermost).__name__}.{path}" if path else type(outermost).__name__


def singles_of(device: torch.device) -> Any:
    """What reads tensors of a device one by one; None where the collector must, which says why."""
    try:
        from repro_golden.fingerprint.collector import gpu_ready
        from repro_golden.fingerprint.tensors import Singles
    except ImportError:
        return None
    return Singles(device) if gpu_ready(device) else None


def bytes_of(tensor: torch.Tensor) -> bytes:
    """Its content, row by row."""
    from repro_golden.trace.signals import collector

    reading = collector()
    reading.add([tensor], keep=True)
    return reading.finish().result()[0][0].values or b""


def innermost() -> Any:
    """The dispatch mode that was entered last."""
    depth = torch._C._len_torch_dispatch_stack()
    return torch._C._get_dispatch_stack_at(depth - 1) if depth else None


def next_node() -> int:
    """The number that autograd's next node of this thread gets."""
    number: int = torch.autograd._get_sequence_nr()  # type: ignore[attr-defined]
    return number
