"""Records every operation of a step as it passes torch's dispatcher, and changes none.

It runs inside the trainer, so it needs torch and the standard library alone. What it reads of tensors is read with all
modes of the program disabled; no tensor is kept, no random number is drawn. Under a dispatch mode torch.compile leaves
functions as they are written, and that is what is recorded of them; the stream says so. That it changed no bit is not
taken on trust: who asked for the recording compares the step's signals with those of the same step without it.

Source of the way from a backward operation to its forward one: autograd numbers its nodes as they are made
(`torch.autograd.Node._sequence_nr`), a node is made just before its operation is dispatched, and the first operation
that sees number n + 1 as the next is therefore node n's.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from repro_golden.base.errors import ReproError
from repro_golden.fingerprint.in_flight import captures
from repro_golden.recording.operations.lines import LinesRun
from repro_golden.recording.operations.looks import (
    Facts,
    Memory,
    Modules,
    Signature,
    SmallResults,
    bytes_of,
    fills,
    innermost,
    local,
    look,
    memory_of,
    next_node,
    qualified,
    readable,
    signature_of,
    singles_of,
    sort,
    told,
    wraps,
)
from repro_golden.recording.operations.stream import FORMAT, OBSERVED, dump_path, kept_path

__all__ = ["OperationRecorder"]

_OURS = str(Path(__file__).parents[2])
_TORCH = str(Path(str(torch.__file__)).parent)
_PASSED_OVER = tuple(
    f"{_TORCH}/{part}"
    for part in ("_ops.py", "utils/_python_dispatch.py", "utils/_contextlib.py", "_dynamo/eval_frame.py", "_compile.py")
)
_NOWHERE = (1 << 64) - 1
"""The sequence number of nodes that no operation made: those that accumulate gradients."""
_NOT_COMPUTED = ("FakeTensor", "FunctionalTensor", "UninitializedParameter", "UninitializedBuffer")
"""Tensors that torch uses to find out shapes: what is done with them makes no number."""
_AT_ONCE = 512
"""Lines that are written together. No buffer of Python's: a fork would write it twice."""
_WRITERS = 64
"""How many writers of parts of one memory are remembered."""


class OperationRecorder(TorchDispatchMode):
    """Records what happens between `begin` and `end` in the thread that called `begin`, and in autograd's threads.

    Args:
        folder: Where the stream and the dumps go.
        root: The checkout; files below it are named by their path in it.
        step: The number of the step.
        rank: Of this process; part of the file's name.
        dump: Operations, by number, whose inputs and outputs are written whole.
        changed: Files of the checkout whose lines are noted when they run.

    Attributes:
        rank: As given; one that is known later is set before `open`.
        preparing: Whether the trainer is still being made; it no longer is once a module, a backward pass or an
            optimizer has run.
    """

    def __init__(
        self, folder: Path, root: str, step: int, rank: int = 0, dump: Sequence[int] = (), changed: Sequence[str] = ()
    ) -> None:
        super().__init__()
        self.step, self.preparing = step, False
        self._folder, self.rank, self._dump = folder, rank, frozenset(dump)
        self._root = root.rstrip("/") + "/"
        self._modules = Modules()
        self._optimizing, self._shown, self._back, self._thread, self._in_backward = False, "", False, 0, False
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
        self._made: dict[Signature, int] = {}
        self._wrote: dict[Memory, list[int]] = {}
        self._since: dict[Memory, int] = {}
        self._holders: dict[Memory, StorageWeakRef] = {}
        self._numbers: dict[str, int] = {}
        self._values_of: dict[Signature, tuple[int | str, tuple[int, int, int]]] = {}
        self._readings: list[tuple[Any, int]] = []
        self._singles: dict[torch.device, Any] = {}
        self._small: Callable[[torch.Tensor], tuple[int, int] | None] = _nothing
        self._known: dict[Any, Facts] = {}
        self._empty: set[Memory] = set()
        self._results = SmallResults()
        self._ran = LinesRun(root, changed)

    # -- what is under way

    def open(self) -> None:
        """Make ready: the stream's file, and what reads tensors, which may have to be compiled first."""
        from repro_golden.trace.signals import collector

        self._folder.mkdir(parents=True, exist_ok=True)
        self._part = self._folder / f"{os.getpid()}.part"
        self._file = os.open(self._part, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o666)
        register_optimizer_step_pre_hook(self._stepping)
        register_optimizer_step_post_hook(self._stepped)
        self._line({"format": FORMAT, "step": self.step, "rank": self.rank, "pid": os.getpid()})
        with _unseen():
            first, zeros = collector(), torch.zeros(2, dtype=torch.float32, device="cpu")
            first.add([zeros], [None])
            first.finish().result()
        self._collector = collector()
        with contextlib.suppress(ImportError):  # without NumPy, the collector alone reads
            from repro_golden.fingerprint.tensors import lanes_of_small

            lanes_of_small(zeros)
            self._small = lanes_of_small

    def begin(self) -> None:
        """Record from here on, until `pause`."""
        self._seen = next_node() - 1
        self._thread = threading.get_ident()
        self._in_backward = torch._C._current_graph_task_id() != -1
        self._modules.follow()
        self.__enter__()

    def pause(self) -> None:
        """Record nothing more, until `begin`."""
        why = "the program left a dispatch mode of its own under way at the step's end"  # and leaving is by turns
        if innermost() is self:
            self.__exit__(None, None, None)
            why = ""
        elif threading.get_ident() != self._thread:  # torch knows a mode in one thread alone
            why = "the step began in one thread and ended in another"
        elif self._in_backward:  # after which autograd sets back what was entered in it
            why = "the step began in a backward pass: an optimizer steps in a gradient's hook"
        self._problem = self._problem or why
        self._modules.let_go()

    def abandon(self) -> None:
        """In the child of a fork: record nothing, and leave the file to the parent."""
        self._problem = "forked"
        self._ran.end()
        self._lines.clear()
        self._results = SmallResults()

    def close(self) -> None:
        """Write the stream's end; only now it goes by its own name."""
        with _unseen():
            scans = self._collector.finish().result()
            by_source: dict[Any, list[str]] = {None: [_hex(s[0].lanes.a, s[0].lanes.b) for s in scans]}
            for single in filter(None, self._singles.values()):
                by_source[single] = [_hex(*lanes) for lanes in single.result()]
            contents = [by_source[source][number] for source, number in self._readings]
            ranges = self._results.write(kept_path(self._folder, self.rank), contents)
        self._line({"contents": contents})
        self._line({"kept": ranges})
        self._line({"end": self._problem, "compiled": _compiles(), "ran": self._ran.end()})
        self._flush()
        os.close(self._file)
        self._part.replace(self._folder / f"rank-{self.rank:05d}.jsonl")

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
            tensors = [(name + key, local(tensor)) for key, tensor in group.items() if isinstance(tensor, torch.Tensor)]
            entry["in"] = self._values([tensor for _, tensor in tensors], [key for key, _ in tensors])
            if isinstance(value, (int, float)):
                makers = [self._numbers[repr(float(value))]] if repr(float(value)) in self._numbers else []
                entry["in"] = [["float", [], repr(float(value)), makers, name]]
            self._keep(entry)

    def _phase(self) -> str:
        """Of what is done outside of autograd's backward pass: by what the trainer has shown, and torch's hooks.

        What follows a backward pass belongs to the optimizer until a module runs again: accumulating, clipping.
        """
        if self._modules.path or self._optimizing or self._back:
            self.preparing = False
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
        if any(kind.__name__ in _NOT_COMPUTED for kind in types):
            return func(*args, **kwargs)
        if any(wraps(kind) for kind in types):
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
        if captures():
            raise ReproError("a CUDA graph was captured, and its work is done in replays")
        name = str(func)
        tensors: list[torch.Tensor] = []
        arguments = ", ".join(
            [*(told(a, tensors) for a in args), *(f"{k}={told(v, tensors)}" for k, v in kwargs.items())]
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
            if id(tensor) in overwritten and memory_of(tensor) in self._empty  # what lies there is nobody's
            else value
            for tensor, value in zip(tensors, self._values(tensors), strict=True)
        ]
        self._dumped("in", tensors)
        entry["stack"] = self._stack()
        return entry

    def _after(self, entry: dict[str, Any], func: Any, args: Any, kwargs: Any, out: Any) -> None:
        index = self._count
        number = next_node() - 1
        if number != self._seen:
            self._seen = number
            self._of_node.setdefault(number, index)
        facts, tensors, numbers = self._facts(func), list[torch.Tensor](), list[Any]()
        sort(out, tensors, numbers)
        inputs = list[torch.Tensor]()
        sort([args, kwargs], inputs, [])
        every = [*tensors, *(t for t in facts.changed(args, kwargs) if all(t is not other for other in tensors))]
        for number in numbers:
            entry["out"].append([type(number).__name__, [], repr(number), [], ""])
            self._numbers[repr(number)] = index
        self._dumped("out", every)
        known = {memory_of(tensor) for tensor in inputs}
        for tensor in every:
            memory = memory_of(tensor)
            self._forget_freed(memory, tensor)
            if memory not in known:  # new, and nothing of what was there before
                self._since[memory] = index
            if not facts.view:
                whole = memory not in known or memory[0] == "none" or fills(tensor)
                self._wrote[memory] = [index] if whole else [*self._wrote.get(memory, ())[-_WRITERS:], index]
                (self._empty.add if facts.unwritten else self._empty.discard)(memory)
            self._made[signature_of(tensor, memory)] = index
        if facts.unread or facts.view:
            entry["out"] = [[*look(tensor), "", [], ""] for tensor in every] + entry["out"]
        else:
            values = self._values(every, made=True)
            entry["out"] = values + entry["out"]
            if every:
                self._results.keep(values[0][2], every[0])
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
        notes = []
        for place, tensor in enumerate(tensors):
            memory = memory_of(tensor)
            self._forget_freed(memory, tensor)
            signature = signature_of(tensor, memory)
            number = self._number(tensor, memory, signature)
            makers = [] if made else self._makers(memory, signature)
            notes.append([*look(tensor), number, makers, names[place] if names else ""])
        return notes

    def _forget_freed(self, memory: Memory, tensor: torch.Tensor) -> None:
        """Forget what is known of an address where what lay there was freed.

        `torch.tensor`, NumPy and data loaders make tensors unseen, in memory that operations wrote before.
        """
        if memory[0] == "none":
            return
        storage, holder = tensor.untyped_storage(), self._holders.get(memory)
        if holder is not None and (holder.cdata == storage._cdata or not holder.expired()):
            return  # the same, or another way to what is still there
        self._holders[memory] = StorageWeakRef(storage)
        if holder is not None:
            self._since[memory] = self._count
            self._wrote.pop(memory, None)
            self._empty.discard(memory)

    def _number(self, tensor: torch.Tensor, memory: Memory, signature: Signature) -> int | str:
        """What a tensor holds, or the number of its reading; the last one serves as long as nobody says he wrote."""
        counted = not tensor.is_inference()  # those of inference mode have no counter of versions: each is read anew
        version = tensor._version if counted else -1
        state = (self._wrote.get(memory, [-1])[-1], version, self._since.get(memory, -1))
        known = self._values_of.get(signature)
        if counted and known is not None and known[1] == state:
            return known[0]
        number: int | str = ""
        if not readable(tensor):
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
            self._singles[tensor.device] = singles_of(tensor.device)
        singles = self._singles[tensor.device]
        slot = None if singles is None else singles.add(tensor)
        return None if slot is None else (singles, slot)

    def _collected(self, tensor: torch.Tensor) -> tuple[Any, int]:
        self._collector.add([tensor], [None])  # with a placement no recipe is kept: each is read but once
        self._read += 1
        return None, self._read - 1

    def _makers(self, memory: Memory, signature: Signature) -> list[int]:
        since, makers = self._since.get(memory, -1), []
        maker = self._made.get(signature, -1)
        if maker >= max(since, 0):
            makers.append(maker)
        return makers + [writer for writer in self._wrote.get(memory, ()) if writer not in makers]

    def _facts(self, func: Any) -> Facts:
        facts = self._known.get(func)
        if facts is None:
            facts = self._known[func] = Facts(func)
        return facts

    def _dumped(self, kind: str, tensors: Sequence[torch.Tensor]) -> None:
        index = self._count
        if index not in self._dump:
            return
        for place, tensor in enumerate(tensors):
            if readable(tensor):
                dump_path(self._folder, self.rank, index, kind, place).write_bytes(bytes_of(tensor))

    # -- where it was asked for

    def _stack(self) -> int:
        frame: FrameType | None = sys._getframe(2)
        frames: list[tuple[CodeType, int]] = []
        while frame is not None:
            code = frame.f_code
            relevant = self._kept.get(code)
            if relevant is None:
                file = code.co_filename
                relevant = self._kept[code] = not file.startswith((_OURS, *_PASSED_OVER))
            if relevant:
                frames.append((code, frame.f_lineno))
            frame = frame.f_back
        key = tuple(frames)
        number = self._stacks.get(key)
        if number is None:
            number = self._stacks[key] = len(self._stacks)
            files = [code.co_filename.removeprefix(self._root) for code, _ in frames]
            names = [qualified(code) for code, _ in frames]
            self._line({"frames": list(zip(files, (line for _, line in frames), names, strict=True))})
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


def _nothing(_: torch.Tensor) -> None:
    return None


def _compiles() -> bool:
    """Whether torch.compile has looked at code that was called: it does so before it leaves it as it is written.

    It looks where TORCH_COMPILE_DISABLE switched it off, too, and would have left the code so without a recorder.
    """
    if getattr(sys.modules.get("torch._dynamo.config"), "disable", False):
        return False
    seen = getattr(sys.modules.get("torch._dynamo.convert_frame"), "input_codes", None)
    return bool(getattr(seen, "seen", ()))
