"""One process's recording: what is read at the end of each step, and the files it goes to.

A failure here ends the recording, in one line on stderr, and never the program.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import hashlib
import io
import json
import multiprocessing.util
import os
import sys
import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote

import torch
from torch.utils._python_dispatch import _disable_current_modes

import repro_golden
from repro_golden.attach.metrics import Metrics, number_of
from repro_golden.attach.names import Names
from repro_golden.attach.readings import Held, Reading, learning_rates
from repro_golden.attach.settings import Settings
from repro_golden.spent import measure

__all__ = ["Session"]

_PATIENCE = 60.0
"""Seconds that a rank which is to end waits for the others, which may still talk to it."""

_OURS = (
    "<",  # generated code
    *(str(Path(str(module.__file__)).resolve().parent) + os.sep for module in (repro_golden, torch, os)),
)
"""Where code that is at work here lies, beside installed packages: ours, torch's and the standard library's."""

F = TypeVar("F", bound=Callable[..., Any])


def _harmless(method: F) -> F:
    """Let nothing that goes wrong in a method reach the program, and record no gradient of what it does."""

    @functools.wraps(method)
    def call(self: Session, *args: Any, **kwargs: Any) -> Any:
        if self.dead:
            return None
        before = torch.is_grad_enabled()
        try:
            torch._C._set_grad_enabled(False)
            # modes of the program must not see what is done here
            with self.lock, _disable_current_modes(), torch._C.DisableTorchFunction():
                return method(self, *args, **kwargs)
        except Exception as error:
            if _of_the_program(error):
                self.dead = True
                raise
            self.fail(error)
        except BaseException:  # ctrl-C, in the middle of a step
            self.dead = True
            raise
        finally:
            # one call of C, which no signal handler can interrupt; leaving `torch.no_grad()` is many
            torch._C._set_grad_enabled(before)

    return call  # type: ignore[return-value]


def _without_collection(method: F) -> F:
    """Keep the garbage collector from running in a method that makes many objects and drops them again."""

    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not gc.isenabled():
            return method(*args, **kwargs)
        gc.disable()
        try:
            return method(*args, **kwargs)
        finally:
            gc.enable()

    return call  # type: ignore[return-value]


def _of_the_program(error: Exception) -> bool:
    """Whether a signal handler of the program raised it while we were at work."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    file = trace.tb_frame.f_code.co_filename if trace is not None else ""
    return not file.startswith(_OURS) and not {"site-packages", "dist-packages"} & set(Path(file).parts)


class Session:
    """Opened at the first step of a process, because ranks are not known before.

    A step is held back until the next one begins: what the program logs in between belongs to it.

    Attributes:
        dead: Whether recording has ended.
        lock: Held while a signal or a step is taken.
        operations: Told of every signal, where a step's operations are recorded.
    """

    def __init__(self, settings: Settings) -> None:
        """Record as the instrument asks."""
        self.settings = settings
        self.hear: Callable[[], None] = lambda: None
        self.operations: Any = None
        self._reset()
        repro_golden._sink, repro_golden._settle = self.observe, self.settle
        atexit.register(self._close)

    def _reset(self) -> None:
        self.lock = threading.RLock()
        self.dead = False
        self.names = Names()
        self._stem: Path | None = None
        self._file = -1
        self._world = 1
        self._step = 0
        self._seconds: deque[float] = deque(maxlen=4096)
        self._began: float | None = None
        self._metrics = Metrics(self.settings.ignore)
        self._met: dict[int, tuple[Callable[[], Any], str]] = {}  # optimizers and their labels
        self._held_by: weakref.WeakKeyDictionary[Any, Held] = weakref.WeakKeyDictionary()
        self._alike: Counter[str] = Counter()
        self._signals: Any = None
        self._seen: Counter[tuple[str, str]] = Counter()
        self._held: tuple[Any, frozenset[str]] | None = None
        self._logged: list[tuple[int, str, str]] = []
        self._first: dict[str, str] = {}

    def forked(self) -> None:
        """In the child of a fork: a recording of its own, from its next step on."""
        if self._file >= 0:
            os.close(self._file)
        self._reset()

    # -- what the program shows

    @_harmless
    def metric(self, name: str, value: Any, *, early: bool = False) -> None:
        """Keep a number for its step. The tensor it may be is not waited for."""
        self._metrics.take(_text(name), value, early=early)

    @_harmless
    def observe(self, phase: str, name: str, value: Any) -> None:
        """Take a signal of the step under way; the k-th one more of the same name is ``name.k``."""
        if not self.settings.record:
            return
        if phase not in ("input", "forward", "loss", "grad", "update"):
            raise ValueError(f"unknown phase {phase!r} of {name!r}: use input, forward, loss, grad or update")
        name = first = _text(name)
        while self._seen[phase, name]:
            self._seen[phase, first] += 1
            name = f"{first}.{self._seen[phase, first] - 1}"
        self._seen[phase, name] += 1
        self._take(phase, name, value)

    def _read(self, phase: str, name: str, reading: Reading) -> None:
        if reading.tensors:
            self._take(phase, name, reading.tensors, reading.places)

    def seen(self, phase: str, name: str) -> bool:
        """Whether the step under way has such a signal."""
        return (phase, name) in self._seen

    def _take(self, phase: str, name: str, value: Any, places: Mapping[str, Any] | None = None) -> None:
        from repro_golden.signals import Signals

        if self._signals is None:
            self._signals = Signals()
        if self.operations is not None:
            self.operations.observed(phase, name, value)
        if self.settings.plant or self.settings.dump:
            for key, tensor in (value if isinstance(value, Mapping) else {"": value}).items():
                if isinstance(tensor, torch.Tensor):
                    self._aim(phase, name + key, tensor, whole=key not in (places or ()))
        self._signals.take(phase, name, value, places or None)

    def _aim(self, phase: str, name: str, tensor: torch.Tensor, *, whole: bool) -> None:
        """Plant or dump, where this is the signal that is meant. What no rank has whole is not dumped."""
        at, rank = [self._step, phase, name], int(os.environ.get("RANK", "0"))
        local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        if self.settings.plant and at == list(self.settings.plant) and local.numel():
            from repro_golden.plant import plant_one_ulp

            plant_one_ulp(local)
        own = [self._step, phase, f"{name}@{rank}"]
        for wanted in self.settings.dump:
            if whole and local is tensor and list(wanted) in (own, at):
                from repro_golden.signals import collector

                reading = collector()
                reading.add([tensor], keep=True)
                folder = Path(self.settings.out) / "dumps"
                folder.mkdir(exist_ok=True)
                path = folder / f"{self._step}-{phase}-{quote(str(wanted[2]), safe='')}.bin"
                part = path.with_suffix(f".{rank}.part")
                part.write_bytes(reading.finish().result()[0][0].values or b"")
                if rank == 0:  # its own stands, where it has any: a later pipeline stage has signals of its own
                    part.replace(path)
                else:
                    with contextlib.suppress(FileExistsError):
                        path.hardlink_to(part)
                    part.unlink()

    # -- steps

    @property
    def made(self) -> int:
        """How many steps were made."""
        return self._step

    def begin(self, optimizer: Any, outermost: bool) -> None:
        """A step is about to be made."""
        if self._begin(optimizer, outermost):
            self._stop()

    @_harmless
    @_without_collection
    def _begin(self, optimizer: Any, outermost: bool) -> bool:
        """Whether it is one too many."""
        if outermost:
            self.hear()
            self._flush()
            if self.settings.steps is not None and self._step >= self.settings.steps:
                return True
        if self.settings.terminal and not self._met:
            from repro_golden.attach.process import generators

            self._first = generators()
        known = self._met.get(id(optimizer))
        if known is None or known[0]() is not optimizer:
            self._meet(optimizer)
        return False

    def _meet(self, optimizer: Any) -> None:
        """Label an optimizer by what tells it from others in every rank and run: its class, and what it updates."""
        held = self._held_of(optimizer)
        parameters = held.parameters
        looks = [(name, tuple(p.shape), str(p.dtype)) for name, p in parameters.items()]
        about = repr((looks, type(optimizer).__qualname__))
        label = f"{next(iter(parameters), '')} {hashlib.sha256(about.encode()).hexdigest()[:8]}"
        alike = self._alike[label]
        self._alike[label] += 1
        # the terminal state is theirs, so for that they are kept alive
        kept = (lambda: optimizer) if self.settings.terminal else weakref.ref(optimizer)
        self._met[id(optimizer)] = (kept, f"{label} {alike:04d}")
        if self.settings.record:
            again = self._seen["input", "start/"]
            self._seen["input", "start/"] += 1
            prefix = f"start/optimizer.{again}/" if again else "start/"
            self._read("input", prefix, held.weights())
            self._read("input", f"{prefix}main/", held.mains())

    def _held_of(self, optimizer: Any) -> Held:
        parameters = self.names.of(optimizer)
        known = self._held_by.get(optimizer)
        if known is None or known.parameters is not parameters:
            known = self._held_by[optimizer] = Held(optimizer, parameters, self.names.places(parameters))
        return known

    @_harmless
    @_without_collection
    def step(self, optimizers: list[Any], skipped: bool) -> None:
        """Read what the step left behind."""
        if self._stem is None:
            self._open()
        now = time.perf_counter()
        if self._began is not None:
            self._seconds.append(now - self._began)
        self._began = now
        self._flush()  # another thread's, which ended while this one was made
        logged = self._metrics.end()
        if not self.settings.record:
            self._held = ({name: _number(value) for name, value in logged.items()}, frozenset())
            self._step += 1
            return
        # in the order of their names, which is the same in every rank and run
        for optimizer in optimizers:
            if id(optimizer) not in self._met:  # a wrapper that does not say before what it makes step
                self._meet(optimizer)
        labelled = sorted(((self._met[id(o)][1], o) for o in optimizers), key=lambda pair: pair[0])
        named = [(f"optimizer.{k}/" if k else "", o, self._held_of(o)) for k, (_, o) in enumerate(labelled)]
        for prefix, _, held in named:
            self._read("grad", prefix, held.gradients())
        for name, value in logged.items():
            number = value if isinstance(value, torch.Tensor) else float(value)
            self._take("grad" if name.partition("?")[0] == "grad_norm" else "loss", name, number)
        for prefix, optimizer, held in named:
            self._read("update", prefix, held.weights())
            for kind, reading in held.state().items():
                self._read("update", f"{prefix}{kind}/", reading)
            for name, rate in learning_rates(optimizer).items():
                self._take("update", prefix + name, rate)
        if skipped:
            self._take("update", "skipped", 1.0)
        signals, self._signals = self._signals, None
        self._seen.clear()
        signals.finish()
        self._held = ((signals, "+".join(label for label, _ in labelled)), frozenset(logged))
        self._step += 1

    # -- files

    def _open(self) -> None:
        from repro_golden.attach.process import facts

        about = facts(self.settings)
        self._world = about["world"]
        out = Path(self.settings.out)
        for stem in (f"rank-{about['rank']:05d}", f"rank-{about['rank']:05d}-{os.getpid()}"):
            try:
                self._file = os.open(out / f"{stem}.log", os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_APPEND, 0o666)
            except FileExistsError:  # another process of this rank: the instrument says what to do
                continue
            self._stem = out / stem
            self._put(".json", about)
            if multiprocessing.parent_process() is not None:  # a forked child of it ends without `atexit`
                multiprocessing.util.Finalize(None, self._close, exitpriority=0)
            return

    def _put(self, suffix: str, value: Any) -> None:
        """A small file, whole or not there."""
        assert self._stem is not None
        path = self._stem.with_suffix(suffix)
        part = path.with_suffix(f"{suffix}.part")
        part.write_text(json.dumps(value), encoding="utf-8")
        part.replace(path)

    def _flush(self) -> None:
        """Write the step that is held back."""
        if self._held is None:
            return
        (held, early), self._held = self._held, None
        late = self._metrics.late()
        if not self.settings.record:
            numbers = held | late
        else:
            from repro_golden.trace.writer import metric_row

            signals, label = held
            more = [metric_row("loss", name, value) for name, value in late.items()]
            view = memoryview(signals.pack(self._step - 1, label, lambda row: _as_metric(row, early), more))
            numbers = {row.name: number_of(row) for row in signals.loose if row.name in early and row.dtype == "metric"}
            numbers |= late
            while view:
                view = view[os.write(self._file, view) :]
        if self.settings.terminal:
            self._logged += [(self._step - 1, name, value.hex()) for name, value in sorted(numbers.items())]

    def _stop(self) -> None:
        """End this process, with its files flushed and no more: the steps that were asked for are made."""
        self._close(stopped=True)
        with contextlib.suppress(Exception):
            for child in multiprocessing.active_children():
                child.terminate()
        deadline = time.monotonic() + _PATIENCE
        with contextlib.suppress(Exception):
            while time.monotonic() < deadline and self._stopped() < self._world:
                time.sleep(0.01)
        for stream in [o for o in gc.get_objects() if issubclass(type(o), io.IOBase)]:
            with contextlib.suppress(Exception):  # closed, or not for writing
                stream.flush()
        os._exit(0)

    def _stopped(self) -> int:
        """How many ranks have made the steps that were asked for."""
        ends = [path.read_text(encoding="utf-8") for path in Path(self.settings.out).glob("rank-*.end")]
        return sum(bool(json.loads(end)["stopped"]) for end in ends)

    def _close(self, *, stopped: bool = False) -> None:
        if self._stem is not None:
            self._finish(stopped)

    @_harmless
    def _finish(self, stopped: bool) -> None:
        if not stopped:
            self._metrics.left()
        self._put_end(stopped)
        self.dead = True

    @_harmless
    def settle(self) -> None:
        """Write the step that is held back and say that it may be the last: Ray ends its workers without `atexit`."""
        if self._held is not None:
            self._put_end(stopped=False)

    def _put_end(self, stopped: bool) -> None:
        from repro_golden.attach.process import terminal

        self._flush()
        if self.settings.terminal:
            met = [optimizer() for optimizer, _ in self._met.values()]
            self._put(".terminal", terminal(met, self.names, self._first, self._logged))
        end = {"steps": self._step, "stopped": stopped, "ignored": self._metrics.ignored}
        self._put(".end", end | {"spent": measure(self._seconds)})

    def fail(self, error: Exception) -> None:
        """End the recording; the program goes on."""
        self.dead = True
        with contextlib.suppress(Exception), torch.no_grad():
            self._flush()  # the step before is whole
        self._held = None
        text = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        with contextlib.suppress(Exception):  # the program's stderr may be closed, or full
            print(f"repro: recording stopped at step {self._step} ({text}); the program goes on", file=sys.stderr)


def _text(name: object) -> str:
    """A name that can be written: as it is, but for lone surrogates."""
    return str(name).encode("utf-8", "replace").decode("utf-8")


def _number(value: Any) -> float:
    return float(value.item() if isinstance(value, torch.Tensor) else value)


def _as_metric(row: Any, names: frozenset[str]) -> Any:
    """The row of a tensor of one number as that of a metric, where that is what was logged."""
    from repro_golden.trace.model import METRIC
    from repro_golden.trace.writer import metric_row

    if row.name not in names or row.shape not in ((), (1,)) or row.dtype == METRIC:
        return row
    return metric_row(row.phase, row.name, number_of(row))
