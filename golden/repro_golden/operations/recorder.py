"""Records every operation of a step as it passes torch's dispatcher, and changes none.

It runs inside the trainer, so it needs torch and the standard library alone. What it reads of tensors is read with all
modes of the program disabled; no tensor is kept, no random number is drawn. That it changed no bit is not taken on
trust: who asked for the recording compares the step's signals with those of the same step without it.

Source of the way from a backward operation to its forward one: autograd numbers its nodes as they are made
(`torch.autograd.Node._sequence_nr`), a node is made just before its operation is dispatched, and the first operation
that sees number n + 1 as the next is therefore node n's.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from repro_golden.operations.modules import Modules
from repro_golden.operations.stream import FORMAT, OBSERVED, dump_of

__all__ = ["OperationRecorder"]

_OURS = str(Path(__file__).parents[1])
_TORCH = str(Path(str(torch.__file__)).parent)
_PASSED_OVER = tuple(f"{_TORCH}/{part}" for part in ("_ops.py", "utils/_python_dispatch.py", "utils/_contextlib.py"))
_NOWHERE = (1 << 64) - 1
"""The sequence number of nodes that no operation made: those that accumulate gradients."""
_COLLECTIVES = ("c10d.", "_c10d_functional.", "symm_mem.")
_UNWRITTEN = ("empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided", "resize_")
_Memory = tuple[str, int]
_Signature = tuple[Any, ...]
_AT_ONCE = 512
"""Lines that are written together. No buffer of Python's: a fork would write it twice."""
_LONGEST = 400
"""Characters of an argument that is no tensor."""


class _Facts:
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
        found = list[torch.Tensor]()
        for place, name in self._changed:
            _sort(args[place] if place < len(args) else kwargs.get(name), found, [])
        return found


class OperationRecorder(TorchDispatchMode):
    """Records what happens between `begin` and `end` in the thread that called `begin`, and in autograd's threads.

    Args:
        folder: Where the stream and the dumps go.
        root: The checkout; files below it are named by their path in it.
        step: The number of the step.
        rank: Of this process; part of the file's name.
        dump: Operations, by number, whose inputs and outputs are written whole.

    Attributes:
        preparing: Whether the trainer is still being made.
    """

    def __init__(self, folder: Path, root: str, step: int, rank: int = 0, dump: Sequence[int] = ()) -> None:
        super().__init__()
        self.step, self.preparing = step, False
        self._folder, self._rank, self._dump = folder, rank, frozenset(dump)
        self._root = root.rstrip("/") + "/"
        self._modules = Modules()
        self._optimizing, self._shown, self._back = False, "", False
        self._problem = ""
        self._count = 0
        self._file, self._part = -1, Path()
        self._lines: list[str] = []
        self._collector: Any = None
        self._read = 0
        self._stacks: dict[tuple[Any, ...], int] = {}
        self._kept: dict[CodeType, bool] = {}
        self._of_node: dict[int, int] = {}
        self._seen = -1
        self._made: dict[_Signature, int] = {}
        self._wrote: dict[_Memory, int] = {}
        self._since: dict[_Memory, int] = {}
        self._numbers: dict[str, int] = {}
        self._values_of: dict[_Signature, tuple[int | str, tuple[int, int]]] = {}
        self._readings: list[tuple[Any, int]] = []
        self._singles: dict[torch.device, Any] = {}
        self._small: Callable[[torch.Tensor], tuple[int, int] | None] = _nothing
        self._known: dict[Any, _Facts] = {}
        self._empty: set[_Memory] = set()

    # -- what is under way

    def open(self) -> None:
        """Make ready: the stream's file, and what reads tensors, which may have to be compiled first."""
        from repro_golden.signals import collector

        self._folder.mkdir(parents=True, exist_ok=True)
        self._part = self._folder / f"{os.getpid()}.part"
        self._file = os.open(self._part, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o666)
        register_optimizer_step_pre_hook(self._stepping)
        register_optimizer_step_post_hook(self._stepped)
        self._line({"format": FORMAT, "step": self.step, "rank": self._rank, "pid": os.getpid()})
        with _unseen():
            first = collector()
            first.add([torch.zeros(2)], [None])
            first.finish().result()
        self._collector = collector()
        with contextlib.suppress(ImportError):  # without NumPy, the collector alone reads
            from repro_golden.fingerprint.tensors import lanes_of_small

            lanes_of_small(torch.zeros(2))
            self._small = lanes_of_small

    def begin(self) -> None:
        """Record from here on, until `pause`."""
        self._seen = _next_node() - 1
        self._modules.follow()
        self.__enter__()

    def pause(self) -> None:
        """Record nothing more, until `begin`."""
        if _innermost() is self:
            self.__exit__(None, None, None)
        else:  # the program has entered a mode since and not left it, and leaving is by turns
            self._problem = self._problem or "the program left a dispatch mode of its own under way at the step's end"
        self._modules.let_go()

    def abandon(self) -> None:
        """In the child of a fork: record nothing, and leave the file to the parent."""
        self._problem = "forked"
        self._lines.clear()

    def close(self) -> None:
        """Write the stream's end; only now it goes by its own name."""
        with _unseen():
            found: dict[Any, list[str]] = {
                None: [_hex(s[0].lanes.a, s[0].lanes.b) for s in self._collector.finish().result()]
            }
            found |= {
                one: [_hex(*lanes) for lanes in one.result()] for one in self._singles.values() if one is not None
            }
            contents = [found[source][number] for source, number in self._readings]
        self._line({"contents": contents})
        self._line({"end": self._problem})
        self._flush()
        os.close(self._file)
        self._part.replace(self._folder / f"rank-{self._rank:05d}.jsonl")

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """A block in which nothing is recorded: the instrument is at work."""
        with _unseen():
            yield

    def observed(self, phase: str, name: str, value: object) -> None:
        """Note that the trainer shows a signal: a tensor, a number, or a mapping of names to tensors."""
        group = value if isinstance(value, Mapping) else {"": value}
        self._shown, self._back = phase, self._back and phase in ("grad", "update")
        with self._guarded(), _unseen():
            entry = self._entry(OBSERVED, f"{phase} {name}", self._phase())
            tensors = [(name + key, found) for key, found in group.items() if isinstance(found, torch.Tensor)]
            entry["in"] = self._values([found for _, found in tensors], [key for key, _ in tensors])
            if isinstance(value, (int, float)):
                makers = [self._numbers[repr(float(value))]] if repr(float(value)) in self._numbers else []
                entry["in"] = [["float", [], repr(float(value)), makers, name]]
            self._keep(entry)

    def _phase(self) -> str:
        """Of what is done outside of autograd's backward pass: by what the trainer has shown, and torch's hooks.

        What follows a backward pass belongs to the optimizer until a module runs again: accumulating, clipping.
        """
        if self.preparing:
            return "input"
        if self._modules.path and not self._optimizing:
            self._back = False
        return "optimizer" if self._optimizing or self._back or self._shown in ("grad", "update") else "forward"

    def _stepping(self, *_: object) -> None:
        self._optimizing = True

    def _stepped(self, *_: object) -> None:
        self._optimizing = False

    # -- one operation

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call the operation, and note it."""
        kwargs = kwargs or {}
        if any(
            kind not in (torch.Tensor, torch.nn.Parameter) for kind in types
        ):  # a wrapper around plain tensors: what it does with those comes here in its turn
            return NotImplemented
        entry = None
        if not self._problem:
            with self._guarded(), _unseen():
                entry = self._before(func, args, kwargs)
        out = func(*args, **kwargs)
        if entry is not None:
            with self._guarded(), _unseen():
                self._after(entry, func, args, kwargs, out)
        return out

    @contextlib.contextmanager
    def _guarded(self) -> Iterator[None]:
        """What goes wrong here ends the recording, never the program."""
        if self._problem:
            yield
            return
        try:
            yield
        except Exception as error:  # noqa: BLE001 - told where the stream is read
            self._problem = " ".join(f"{type(error).__name__}: {error}".split())[:300]

    def _before(self, func: Any, args: Any, kwargs: Any) -> dict[str, Any]:
        name = str(func)
        tensors: list[torch.Tensor] = []
        arguments = ", ".join(
            [*(_told(a, tensors) for a in args), *(f"{k}={_told(v, tensors)}" for k, v in kwargs.items())]
        )
        entry = self._entry(name, arguments, "")
        node: Any = torch._C._current_autograd_node()
        if node is not None:
            entry["phase"], entry["node"], self._back = "backward", node.name(), True
            number = node._sequence_nr()
            if number != _NOWHERE and number in self._of_node:
                entry["forward"] = self._of_node[number]
        else:
            entry["phase"] = self._phase()
        facts = self._facts(func)
        if facts.draws:
            entry["draws"] = True
        if facts.view:
            entry["view"] = True
        overwritten = {id(t) for t in facts.changed(args, kwargs)} if self._empty else set[int]()
        entry["in"] = [
            [*value[:2], "", *value[3:]]
            if id(tensor) in overwritten and _memory(tensor) in self._empty  # what lies there is nobody's
            else value
            for tensor, value in zip(tensors, self._values(tensors), strict=True)
        ]
        self._dumped("in", tensors)
        entry["stack"] = self._stack()
        return entry

    def _after(self, entry: dict[str, Any], func: Any, args: Any, kwargs: Any, out: Any) -> None:
        index = self._count
        number = _next_node() - 1
        if number != self._seen:
            self._seen = number
            self._of_node.setdefault(number, index)
        facts, tensors, numbers = self._facts(func), list[torch.Tensor](), list[Any]()
        _sort(out, tensors, numbers)
        given = list[torch.Tensor]()
        _sort([args, kwargs], given, [])
        every = [*tensors, *(t for t in facts.changed(args, kwargs) if all(t is not one for one in tensors))]
        for number in numbers:
            entry["out"].append([type(number).__name__, [], repr(number), [], ""])
            self._numbers[repr(number)] = index
        self._dumped("out", every)
        known = {_memory(tensor) for tensor in given}
        for tensor in every:
            memory = _memory(tensor)
            if memory not in known:  # new, and nothing of what was there before
                self._since[memory] = index
            if not facts.view:
                self._wrote[memory] = index
                (self._empty.add if facts.unwritten else self._empty.discard)(memory)
            self._made[_signature(tensor, memory)] = index
        if facts.unread or facts.view:
            entry["out"] = [[*_look(tensor), "", [], ""] for tensor in every] + entry["out"]
        else:
            entry["out"] = self._values(every, made=True) + entry["out"]
        self._keep(entry)

    def _entry(self, name: str, arguments: str, phase: str) -> dict[str, Any]:
        entry: dict[str, Any] = {"name": name, "phase": phase, "arguments": arguments, "in": [], "out": []}
        if self._modules.path:
            entry["module"] = self._modules.path
        return entry

    def _keep(self, entry: dict[str, Any]) -> None:
        """Write an entry: as text it is out of the garbage collector's way."""
        self._line(entry)
        self._count += 1

    # -- values

    def _values(
        self, tensors: Sequence[torch.Tensor], names: Sequence[str] = (), *, made: bool = False
    ) -> list[list[Any]]:
        """Notes on tensors; their contents are filled in when the stream is written."""
        found = []
        for place, tensor in enumerate(tensors):
            memory = _memory(tensor)
            signature = _signature(tensor, memory)
            number = self._number(tensor, memory, signature)
            makers = [] if made else self._makers(memory, signature)
            found.append([*_look(tensor), number, makers, names[place] if names else ""])
        return found

    def _number(self, tensor: torch.Tensor, memory: _Memory, signature: _Signature) -> int | str:
        """What a tensor holds, or the number of its reading; the last one serves as long as nobody says he wrote."""
        state = (self._wrote.get(memory, -1), tensor._version)
        known = self._values_of.get(signature)
        if known is not None and known[1] == state:
            return known[0]
        number: int | str = ""
        if not _readable(tensor):
            pass
        elif (lanes := self._small(tensor)) is not None:
            number = _hex(*lanes)
        else:
            number = len(self._readings)
            self._readings.append(self._singly(tensor) or self._collected(tensor))
        self._values_of[signature] = (number, state)
        return number

    def _singly(self, tensor: torch.Tensor) -> tuple[Any, int] | None:
        """A reading of its own on the device; None where that does not go."""
        if not tensor.is_cuda or tensor.is_conj() or tensor.is_neg():
            return None
        if tensor.device not in self._singles:
            self._singles[tensor.device] = _singles(tensor.device)
        singles = self._singles[tensor.device]
        slot = None if singles is None else singles.add(tensor)
        return None if slot is None else (singles, slot)

    def _collected(self, tensor: torch.Tensor) -> tuple[Any, int]:
        self._collector.add([tensor], [None])  # with a placement no recipe is kept: each is read but once
        self._read += 1
        return None, self._read - 1

    def _makers(self, memory: _Memory, signature: _Signature) -> list[int]:
        since, found = self._since.get(memory, -1), []
        maker = self._made.get(signature, -1)
        if maker >= max(since, 0):
            found.append(maker)
        writer = self._wrote.get(memory, -1)
        if writer >= 0 and writer not in found:
            found.append(writer)
        return found

    def _facts(self, func: Any) -> _Facts:
        facts = self._known.get(func)
        if facts is None:
            facts = self._known[func] = _Facts(func)
        return facts

    def _dumped(self, kind: str, tensors: Sequence[torch.Tensor]) -> None:
        index = self._count
        if index not in self._dump:
            return
        for place, tensor in enumerate(tensors):
            if _readable(tensor):
                dump_of(self._folder, index, kind, place).write_bytes(_bytes(tensor))

    # -- where it was asked for

    def _stack(self) -> int:
        frame: FrameType | None = sys._getframe(2)
        found: list[tuple[CodeType, int]] = []
        while frame is not None:
            code = frame.f_code
            kept = self._kept.get(code)
            if kept is None:
                file = code.co_filename
                kept = self._kept[code] = not file.startswith((_OURS, *_PASSED_OVER))
            if kept:
                found.append((code, frame.f_lineno))
            frame = frame.f_back
        key = tuple(found)
        number = self._stacks.get(key)
        if number is None:
            number = self._stacks[key] = len(self._stacks)
            files = [code.co_filename.removeprefix(self._root) for code, _ in found]
            names = [_qualified(code) for code, _ in found]
            self._line({"frames": list(zip(files, (line for _, line in found), names, strict=True))})
        return number

    # -- the file

    def _line(self, value: Mapping[str, Any]) -> None:
        self._lines.append(json.dumps(value, separators=(",", ":")))
        if len(self._lines) >= _AT_ONCE:
            self._flush()

    def _flush(self) -> None:
        view = memoryview("".join(f"{line}\n" for line in self._lines).encode())
        self._lines.clear()
        while view:
            view = view[os.write(self._file, view) :]


@contextlib.contextmanager
def _unseen() -> Iterator[None]:
    """A block whose own operations are nobody's business: no mode of the program, no gradient, no subclass."""
    before = torch.is_grad_enabled()
    torch._C._set_grad_enabled(False)
    try:
        if torch._C._len_torch_dispatch_stack():
            with _disable_current_modes(), torch._C.DisableTorchFunction():
                yield
        else:
            with torch._C.DisableTorchFunction():
                yield
    finally:
        torch._C._set_grad_enabled(before)


def _hex(a: int, b: int) -> str:
    return f"{a:016x}{b:016x}"


def _singles(device: torch.device) -> Any:
    """What reads tensors of a device one by one; None where the collector must, which says why."""
    try:
        from repro_golden.fingerprint.backends import _gpu_ready
        from repro_golden.fingerprint.singles import Singles
    except ImportError:
        return None
    return Singles(device) if _gpu_ready(device) else None


def _nothing(_: torch.Tensor) -> None:
    return None


def _innermost() -> Any:
    """The dispatch mode that was entered last."""
    depth = torch._C._len_torch_dispatch_stack()
    return torch._C._get_dispatch_stack_at(depth - 1) if depth else None


def _next_node() -> int:
    """The number that autograd's next node of this thread gets."""
    number: int = torch.autograd._get_sequence_nr()  # type: ignore[attr-defined]
    return number


def _told(value: Any, tensors: list[torch.Tensor]) -> str:
    """An argument in words; tensors are taken out, in their order."""
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        return f"T{len(tensors) - 1}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(_told(item, tensors) for item in value) + "]"
    if isinstance(value, torch.Generator):
        return "Generator"
    if value is None or isinstance(value, (bool, int, float, str)):
        return repr(value)[:_LONGEST]
    text = str(value)
    return text[:_LONGEST] if " at 0x" not in text else type(value).__name__


def _qualified(code: CodeType) -> str:
    """The function's name with its class, where Python tells it (from 3.11 on)."""
    return getattr(code, "co_qualname", code.co_name)


def _sort(value: Any, tensors: list[torch.Tensor], numbers: list[Any]) -> None:
    if isinstance(value, torch.Tensor):
        tensors.append(value)
    elif isinstance(value, (list, tuple)):
        for item in value:
            _sort(item, tensors, numbers)
    elif isinstance(value, dict):
        for item in value.values():
            _sort(item, tensors, numbers)
    elif isinstance(value, (bool, int, float)):
        numbers.append(value)


def _look(tensor: torch.Tensor) -> tuple[str, list[int]]:
    return str(tensor.dtype).removeprefix("torch."), list(tensor.shape)


def _memory(tensor: torch.Tensor) -> _Memory:
    """Which memory a tensor lies in; all that have none share one."""
    if tensor.layout is not torch.strided or tensor.is_meta:
        return "none", id(tensor)
    return tensor.device.type + str(tensor.device.index or 0), tensor.untyped_storage().data_ptr()


def _signature(tensor: torch.Tensor, memory: _Memory) -> _Signature:
    if memory[0] == "none":
        return memory
    return memory, tensor.storage_offset(), tuple(tensor.shape), tensor.stride(), tensor.dtype


def _readable(tensor: torch.Tensor) -> bool:
    """Whether a tensor has a content of its own that is there."""
    plain = type(tensor).__torch_dispatch__ in (torch.Tensor.__torch_dispatch__, torch._C._disabled_torch_dispatch_impl)
    if not plain or tensor.layout is not torch.strided or tensor.is_meta or tensor.is_quantized or tensor.is_nested:
        return False
    reach = 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return (
        not tensor.numel() or tensor.untyped_storage().nbytes() >= (tensor.storage_offset() + reach) * tensor.itemsize
    )


def _bytes(tensor: torch.Tensor) -> bytes:
    from repro_golden.signals import collector

    reading = collector()
    reading.add([tensor], keep=True)
    return reading.finish().result()[0][0].values or b""
