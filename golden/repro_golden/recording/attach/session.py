"""One process's recording: what is read at the end of each step, and the files it goes to.

A failure here ends the recording, in one line on stderr, and never the program.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import multiprocessing.util
import sys
import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

import repro_golden
from repro_golden.base.clean import one_line
from repro_golden.base.errors import ReproError
from repro_golden.base.machine.usage import measure
from repro_golden.recording.attach.alive.beside import Beside
from repro_golden.recording.attach.alive.generators import states
from repro_golden.recording.attach.alive.names import Names
from repro_golden.recording.attach.alive.parts import any_quantized, any_to_open, of_parts
from repro_golden.recording.attach.alive.readable import readable
from repro_golden.recording.attach.alive.readings import CLOSED, TIMES, Held, Reading, Tensors, learning_rates
from repro_golden.recording.attach.base.by_identity import id_of
from repro_golden.recording.attach.base.guard import at_rest, harmless
from repro_golden.recording.attach.base.settings import Settings
from repro_golden.recording.attach.base.steps import Labels, Made, Turns
from repro_golden.recording.attach.code.identify import loaded, main_tree, passed_over, places
from repro_golden.recording.attach.stepping import uneven
from repro_golden.recording.attach.stepping.by_hand import ByHand
from repro_golden.recording.attach.stepping.passes import Passes
from repro_golden.recording.attach.stepping.resting import left, resting
from repro_golden.recording.attach.written.files import Files
from repro_golden.recording.attach.written.metrics import Metrics, writable
from repro_golden.recording.attach.written.places import place_of
from repro_golden.recording.attach.written.raw import FOUND, RECORDER_FAILED, SHOWN, as_metric
from repro_golden.recording.attach.written.records import Records
from repro_golden.trace.families import UNREAD

__all__ = ["Session"]


class Session:
    """Opened at the first step of a process, because ranks are not known before.

    A step is held back until the next one begins: what the program logs in between belongs to it.

    Attributes:
        dead: Whether recording has ended.
        lock: Held while a signal or a step is taken.
        operations: Told of every signal, where a step's operations are recorded.
        around: What is alive beside the optimizers.
        has_optimizer: Whether an optimizer of torch's was ever made.
        ends: Each takes the last line of a stream, which may have no end.
        metrics, passes: Numbers that are told; backward passes since the last step, in a program with optimizers.
    """

    def __init__(self, settings: Settings) -> None:
        """Record as the instrument asks."""
        self.settings = settings
        self.hear: Callable[[], None] = lambda: None
        self.operations: Any = None
        self.around = Beside()
        self.has_optimizer = False
        self.ends: list[Callable[[], None]] = []
        self._reset()
        self._files = Files(settings.out, lambda noted: self._records.note(noted), settings.ignores)
        repro_golden._sink, repro_golden._settle = self.observe, self.settle
        atexit.register(self._close)

    def _reset(self) -> None:
        self.lock = threading.RLock()
        self.dead = False
        self.names = Names()
        self._records = Records(self.settings)
        self._main = main_tree()
        self._step = 0
        self._seconds: deque[float] = deque(maxlen=4096)
        self._began: float | None = None
        self.metrics = Metrics(self.settings.ignore, lambda: (self._hand and self._hand.begun) or self.passes.begun)
        self._met: dict[int, tuple[Callable[[], Any], str]] = {}  # optimizers and their labels
        self._kept: list[Any] = []
        self._final: Mapping[str, str] = {}
        self._gone: dict[str, str] = {}
        self._labels = Labels()
        self._signals: Any = None
        self._seen = Counter[tuple[str, str]]()
        self._held: tuple[Any, frozenset[str]] | None = None
        self._logged: list[tuple[int, str, str]] = []
        self._first: dict[str, str] = {}
        self._turns = Turns()
        self._hand: ByHand | None = None
        self._after: Any = None
        self.passes = Passes(self.names, self._met)

    def forked(self) -> None:
        """In the child of a fork: a recording of its own, from its next step on."""
        self._files.forget(trained=self._records.opened)
        self._records.let_go()
        self.around.forget()
        self._reset()

    # -- what the program shows

    @harmless
    def metric(self, name: str, value: Any, **how: bool) -> None:
        """Keep a number for its step (`Metrics.take`). The tensor it may be is not waited for."""
        self.metrics.take(writable(name), value, **how)

    @harmless
    def observe(self, phase: str, name: str, value: Any) -> None:
        """Take a signal of the step under way; the k-th one more of the same name is ``name.k``."""
        if not self.settings.record:
            return
        if phase not in ("input", "forward", "loss", "grad", "update"):
            raise ValueError(f"unknown phase {phase!r} of {name!r}: use input, forward, loss, grad or update")
        name = first = writable(name)
        while self._seen[phase, name]:
            self._seen[phase, first] += 1
            name = f"{first}.{self._seen[phase, first] - 1}"
        self._seen[phase, name] += 1
        self._take(phase, name, value)

    def _read(self, phase: str, name: str, reading: Reading, *, whole: bool = True) -> bool:
        """Take what there is; where it need not be whole, without what has no bytes, of which it is told."""
        if not reading.tensors:
            return False
        try:
            self._take(phase, name, reading.tensors, reading.places)
        except (ReproError, RuntimeError):
            why = dict[str, str]()
            left = reading if whole else readable(name, reading, why)
            if not why:
                raise
            self._gone |= why
            self._read(phase, name, left)
        return True

    def _beside(self, *, end: bool = False) -> Iterator[tuple[str, Reading]]:
        """What is read beside the optimizers, by the prefix of its names."""
        held = self.passes.of_optimizers()
        there = self.around.readings(self._step, held, end=end)
        rng = "rng/", Reading(Tensors(states(seeded=True)), {})
        for prefix, reading in itertools.chain(self.passes.beside(there, held, self._gone, end=end), [rng]):
            yield prefix, reading.but(self.settings.ignores, prefix) if self.settings.ignore else reading

    @harmless
    @at_rest
    def saved(self, file: Any, at: int | None, value: Any) -> None:
        """The program has saved a value, there in a file: it belongs to the step that has ended, or to the first."""
        if self.settings.record:
            self._files.take(place_of(file, at), value, recording=self._records.opened)

    @harmless
    def joined(self, thread: threading.Thread) -> None:
        """The program has waited for the end of a thread."""
        self._files.joined(thread)

    def _late(self) -> Any:
        """Takes what belongs to the step that is held back."""
        from repro_golden.trace.signals import Signals

        if self._after is None:
            self._after = Signals()
        return self._after

    def seen(self, phase: str, name: str) -> bool:
        """Whether the step under way has such a signal."""
        return (phase, name) in self._seen

    def _take(self, phase: str, name: str, value: Any, places: Mapping[str, Any] | None = None) -> None:
        from repro_golden.trace.signals import Signals

        self._signals = self._signals or Signals()
        group = value if isinstance(value, Mapping) else {"": value}
        if any_quantized(group.values()) or any_to_open(group.values()):
            value = of_parts(group, name, self._gone)
        if self.operations is not None:
            self.operations.observed(phase, name, value)
        self._records.tap((self._step, phase, name), value, places or (), self._labels.count)
        self._signals.take(phase, name, value, places or None)

    # -- steps

    @property
    def made(self) -> int:
        """How many steps were made."""
        return self._step

    def begin(self, optimizer: Any, outermost: bool) -> None:
        """A step is about to be made."""
        if not self.has_optimizer:  # it was made unseen
            self.drop_by_hand()
            self.optimizer_made(optimizer)
        if self._begin(optimizer, outermost):
            self.stop()

    @harmless
    @at_rest
    def _begin(self, optimizer: Any, outermost: bool) -> bool:
        """Whether it is one too many."""
        if outermost:
            self.hear()
            self._flush()
        if self.settings.terminal and not self._met:
            from repro_golden.recording.attach.process import generators

            self._first = generators()
        known = self._met.get(id_of(optimizer))
        if new := known is None or known[0]() is not optimizer:
            self._label(optimizer)
        enough = outermost and self.settings.steps is not None and self._step >= self.settings.steps
        if enough and self._labels.again(self._met[id_of(optimizer)][1], optimizer, self._step):
            return True  # not before: which step of a round is the first is known when all were made
        if new:
            self._start(optimizer)
        return False

    @harmless
    def drop_by_hand(self, optimizer: Any = None) -> None:
        """What was taken for the first step by hand was a check, or the way to the first of an optimizer.

        Of one that was just made, this is known by what it holds.
        """
        if self._hand is None or not self._hand.begun:
            return
        if optimizer is None or (not self._step and self._hand.moved_nothing(optimizer)):
            self._records.take_back(self._step)
            self._hand, self._signals, self._labels = None, None, Labels()
            for collection in (self._met, self._kept, self._seen):
                collection.clear()

    def knows(self, optimizer: Any) -> bool:
        """Whether the program is known to have made an optimizer."""
        return self._labels.knows(optimizer)

    def optimizer_made(self, optimizer: Any, *, copied: bool = False) -> None:
        """The program has made an optimizer of torch's, or a copy of one."""
        self.has_optimizer = True
        self._labels.made(optimizer, self._step, copied=copied)
        self.passes.optimizer_made(optimizer)

    def _label(self, optimizer: Any) -> None:
        if self.settings.terminal:
            self._kept.append(optimizer)  # the terminal state is theirs
        held = self.names.held(optimizer)
        self._met.pop(id_of(optimizer), None)  # the last comes last
        self._met[id_of(optimizer)] = (weakref.ref(optimizer), self._labels.of(optimizer, held.parameters, self._step))

    def _start(self, optimizer: Any) -> None:
        """Read what an optimizer begins with."""
        held = self.names.held(optimizer)
        if self.settings.record:
            again = self._seen["input", "start/"]
            self._seen["input", "start/"] += 1
            prefix = f"start/optimizer.{again}/" if again else "start/"
            self._read("input", prefix, held.weights())
            self._read("input", f"{prefix}main/", held.mains())

    @harmless
    @at_rest
    def step(self, made: Made, *, end: bool = False) -> None:
        """Read what the step left behind, at the program's end what was held then."""
        if not self._records.opened:
            self._open()
        if self._hand is not None and self._hand.begun:  # an optimizer that is made closes it
            self._hand.follow(self.around.led_to(end=end))
        now = time.perf_counter()
        if self._began is not None:
            self._seconds.append(now - self._began)
        self._began = now
        self._flush()  # another thread's, which ended while this one was made
        # a wrapper may not say before what it makes step
        for optimizer in (o for o in made.optimizers if id_of(o) not in self._met):
            self._label(optimizer)
            self._start(optimizer)
        # in the order of their names, which is the same in every rank and run
        labelled = sorted(((self._met[id_of(o)][1], o) for o in made.optimizers), key=lambda pair: pair[0])
        written = self._labels.stepped(labelled, self._step)
        prefixed = [(f"optimizer.{k}/" if k else "", o) for k, (_, o) in enumerate(labelled)]
        logged = self.metrics.end(prefix + name for prefix, o in prefixed for name in learning_rates(o))
        if not self.settings.record:
            self._held = ({name: float(value) for name, value in logged.items()}, frozenset())
            self.passes.stepped()
            self._step += 1
            return
        named = [(prefix, o, self.names.held(o)) for prefix, o in prefixed]
        if mixed := self._turns.take(tuple(label for label, _ in labelled)):
            self._records.refuse(mixed)
            self.dead = True
            return
        self._read_step(named, logged, made, end=end)
        signals, self._signals = self._signals, None
        self._seen.clear()
        signals.finish()
        self._held = ((signals, written), frozenset(logged))
        self.passes.stepped()
        self._step += 1

    def _read_step(
        self, named: Sequence[tuple[str, Any, Held]], logged: Mapping[str, Any], made: Made, *, end: bool
    ) -> None:
        for prefix, optimizer, held in named:
            by_hand = optimizer is self._hand  # its gradients were read when they were there
            if made.replayed:
                self._gone["gradients"] = "a CUDA graph was replayed, which may have changed them behind its step"
            elif not by_hand and not self._read("grad", prefix, held.gradients(made.gradients)) and made.closure:
                self._gone["gradients"] = "freed by the step, which made them itself"
        for name, value in logged.items():
            number = value if isinstance(value, torch.Tensor) else float(value)
            self._take("grad" if self.metrics.is_own(name) else "loss", name, number)
        for prefix, optimizer, held in named:
            for kind, reading in held.kinds(state=self.settings.state_after(self._step)):
                self._read("update", prefix + kind, reading, whole=not kind)
            for name, rate in learning_rates(optimizer).items():
                self._take("update", prefix + name, rate)
            if (skipped := made.skipped.get(id_of(optimizer))) is not None:
                self._take("update", prefix + (FOUND if isinstance(skipped, torch.Tensor) else "skipped"), skipped)
        met, last, late = self._met.values(), self._labels.last, self.passes.unusual
        for prefix, reading in resting(met, last, self._step, self.names.held, self.settings, late=late):
            self._read("update", prefix, reading, whole=False)
        for prefix, reading in self._beside(end=end):
            self._read("update", prefix, reading, whole=False)

    def begin_by_hand(self, given: Mapping[int, tuple[torch.Tensor, torch.Tensor]] | None = None) -> None:
        """A backward pass has ended in a program without an optimizer: what it does next is a step.

        Args:
            given: Parameters and their gradients, by id, where the program got these and they are not in ``grad``.
        """
        if self._begin_by_hand(given or {}):
            self.stop()
        if self.operations is not None and self._hand is not None and self._hand.begun:
            self.operations.before(self._step + 1)  # what follows the update is the next step's forward pass

    @harmless
    @at_rest
    def _begin_by_hand(self, given: Mapping[int, tuple[torch.Tensor, torch.Tensor]]) -> bool:
        known = self._hand.param_groups[0]["params"] if self._hand else []
        trained = self.around.trained_by_hand(self._step, known)
        parameters = {id_of(p): p for p in [*trained, *(p for p, _ in given.values())]}
        if not parameters:
            return False
        self._hand = self._hand or ByHand([], self._gone)
        self._hand.begin(list(parameters.values()), self.around.led_to())
        if self._begin(self._hand, outermost=True):
            return True
        if self.settings.record:
            self._read("grad", "", self._hand.gradients(self.names.held(self._hand), given))
        self._hand.hold(first=not self._step)
        return False

    def end_by_hand(self, *, end: bool = False) -> None:
        """The next backward pass begins, or an optimizer is there; or the program has ended."""
        if self._hand is not None and self._hand.begun:
            self.step(Made([self._hand]), end=end)
            if self.operations is not None:
                self.operations.at(self._step)

    # -- files

    def _open(self) -> None:
        from repro_golden.recording.attach.process import facts

        about = facts() | {"size": sum(p.numel() for p in self.passes.of_optimizers())}
        self._records.open(about)
        if self.settings.steps is not None and about["world"] > 1:
            uneven.watch(self, lambda: self._records.some_stopped)
        self._files.begin()
        if multiprocessing.parent_process() is not None:  # a forked child of it ends without `atexit`
            multiprocessing.util.Finalize(None, self._close, exitpriority=0)

    def _flush(self) -> None:
        """Write the step that is held back."""
        if self._held is None:
            return
        (held, early), self._held = self._held, None
        last = self._step == self.settings.steps
        if not self.settings.record:
            numbers = held | self.metrics.late(held, last=last)
        else:
            from repro_golden.trace.step import Step
            from repro_golden.trace.writer import metric_row

            signals, label = held
            step = Step(packs=True)
            signals.into(step, lambda row: as_metric(row, early))
            numbers = {name: value for name, value in step.metrics.items() if name in early}
            late = self.metrics.late(numbers, last=last)
            for name, value in late.items():
                step.add(metric_row("loss", name, value))
            numbers |= late
            for row in self._files.rows(self._turns.own):
                if not self.settings.ignores(row.name):
                    step.add(row)
            if self._after is not None:
                self._after.into(step)
                self._after = None
            self._records.log.append(step.end(self._step - 1, label))
        if self.settings.terminal:
            logged = {name: value for name, value in numbers.items() if not name.startswith(SHOWN)}
            self._logged += [(self._step - 1, name, value.hex()) for name, value in sorted(logged.items())]

    def stop(self) -> None:
        """End this process: the steps that were asked for are made. The other ranks may still talk to it."""
        from repro_golden.recording.attach.process import end

        self._close(stopped=True)
        end(lambda: not self._records.all_ended)

    def _close(self, *, stopped: bool = False) -> None:
        if not stopped:
            for end in self.ends:
                end()
            self.end_by_hand(end=True)
        if self._records.opened:
            self._finish(stopped)
        else:
            self._records.idle(self.passes.idle())

    @harmless
    def _finish(self, stopped: bool) -> None:
        self._take_final()
        self._kept.clear()  # what is alive now is so in a run that is not asked for its final state
        if not stopped:
            self.metrics.left()
            self._files.end()
            if self._held is not None and self.settings.record:
                self._read_end()
        self._put_end(stopped)
        self.dead = True

    def _read_end(self) -> None:
        """What is still alive, as it is now: it may have been changed after the last step.

        A program has taken down its process groups by now, so what asks for them then is not read.
        """
        try:
            for prefix, reading in list(self._ending()):
                if tensors := readable(prefix, reading, self._gone).tensors:
                    at = self._step - 1, "update", f"end/{prefix}"
                    self._records.tap(at, tensors, reading.places or (), self._labels.count)
                    self._late().take("update", f"end/{prefix}", tensors, reading.places or None)
        except (AssertionError, RuntimeError, ValueError) as error:
            self.around.unread["the state at the end"] = one_line(f"{type(error).__name__}: {error}")[:100]
            # without a sign of it this run would pass for one that was stopped, whose last files prove nothing
            self._late().take("update", UNREAD, {"": torch.zeros(1, dtype=torch.float32, device="cpu")}, None)

    def _ending(self) -> Iterator[tuple[str, Reading]]:
        yield from left(self._met.values(), self.names.held, self._gone)
        yield from self._beside(end=True)

    @harmless
    def settle(self) -> None:
        """Write the step that is held back and say that it may be the last: Ray ends its workers without `atexit`."""
        if self._held is not None:
            self._take_final()
            self._put_end(stopped=False, over=False)

    @at_rest
    def _take_final(self) -> None:
        from repro_golden.recording.attach.process import final_state

        if self.settings.terminal:
            self._final = final_state([optimizer() for optimizer, _ in self._met.values()], self.names)

    def _put_end(self, stopped: bool, *, over: bool = True) -> None:
        from repro_golden.recording.attach.process import terminal

        self._flush()
        if self.settings.terminal:
            self._records.log.put(".terminal", terminal(self._final, self._first, self._logged))
        unread = CLOSED | self.around.unread | self._files.unread | self._gone | passed_over(self.settings.place)
        unread |= {} if stopped else self.passes.unread()
        end = {"steps": self._step, "stopped": stopped, "unread": dict(sorted(unread.items()))}
        numbers = {"ignored": self.metrics.ignored, "machine": self.metrics.machine}
        end |= {name: sorted({*names, *TIMES}) for name, names in numbers.items()} | {"over": over}
        end |= {"modules": loaded(), "places": places(self.settings.place, self._main)}
        self._records.close(end | {"spent": measure(self._seconds)})

    def fail(self, error: Exception) -> None:
        """End the recording; the program goes on."""
        self.dead = True
        with contextlib.suppress(Exception), torch.no_grad():
            self._flush()  # the step before is whole
        self._held = None
        self._records.blame(error)
        text = one_line(f"{type(error).__name__}: {error}")[:300]
        if self._records.opened or self.has_optimizer:
            self._records.failed(f"{RECORDER_FAILED} {self._step}: {text}")
        with contextlib.suppress(Exception):  # the program's stderr may be closed, or full
            print(f"repro: recording stopped at step {self._step} ({text}); the program goes on", file=sys.stderr)
