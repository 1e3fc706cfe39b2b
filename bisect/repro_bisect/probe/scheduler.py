"""What all searches of one bisect share: the threads, the probes under way, what is known, and who watches."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from repro_bisect.axes.axis import Axis
from repro_bisect.predicates.predicates import Predicate, looked_between
from repro_bisect.probe.answers import Answer, Recording, Skip
from repro_bisect.probe.attempts import Control
from repro_bisect.probe.executors import State
from repro_bisect.probe.prober import Prober
from repro_bisect.probe.progress import Cost, Event, Running, Watch
from repro_bisect.probe.request import Request
from repro_bisect.search.first_bad import Search, Verdict
from repro_golden.case.command_line import OPEN_END
from repro_golden.case.file import Case
from repro_golden.compare.coverage import Coverage, earlier_of
from repro_golden.replay.children import CancelledError
from repro_golden.trace import Trace

__all__ = ["PULSE", "PendingProbe", "Scheduler"]

T = TypeVar("T")

PULSE = 1.0
"""Seconds between two looks at the clock, for whoever watches."""


@dataclass
class PendingProbe:
    """A probe under way, and what makes it: its work asks here, so that it can be ended and tells how far it is.

    Attributes:
        prober: Makes it.
        commit: Of what.
        tree: Hash of its code: twins share a probe.
        cancel: Ends it when set.
        began: When; None while it waits for its turn.
        steps: How many it has made.
        of: How many it will make at most, once that is known; None for as many as its program makes.
        job: What whoever started it calls it.
    """

    prober: Prober
    commit: str
    tree: str | None
    cancel: threading.Event = field(default_factory=threading.Event)
    began: float | None = None
    steps: int = 0
    of: int | None = None
    job: Any = None

    @property
    def seconds(self) -> float:
        """Since it began; 0 while it waits."""
        return 0.0 if self.began is None else time.monotonic() - self.began

    def probe(self, request: Request) -> Answer:
        """See `Prober.probe`."""
        return self.prober.probe(request, self._control)

    def operations(
        self, request: Request, steps: tuple[int, int], values: Sequence[int] = (), *, against: str
    ) -> Recording | Skip:
        """See `Prober.operations`."""
        return self.prober.operations(request, steps, values, self._control, against=against)

    def make_state(self, step: int, target: Path, start: State | None) -> None:
        """See `Prober.make_state`."""
        self.prober.make_state(self.commit, step, target, start, self._control)

    @property
    def _control(self) -> Control:
        return Control(self.cancel, self._made)

    def _made(self, steps: int, of: int) -> None:
        self.steps, self.of = steps, None if of >= OPEN_END else of


class Scheduler:
    """What all searches of one bisect share: the threads, what is under way, and what is known.

    Attributes:
        case: What is run, with as many steps as are asked for.
        differs_alone: Whether a point differs from itself where no other probe runs.
        remarks: What every verdict of the search is to be read with.
        earlier: Files that runs which answered had read and that were last changed while other code ran, with whose
            that was.
    """

    def __init__(
        self, prober: Prober, history: Axis, pool: ThreadPoolExecutor, watch: Watch, remarks: Sequence[str] = ()
    ) -> None:
        self.began = prober.cost.began
        self.prober, self.history, self.pool, self.watch = prober, history, pool, watch
        self.case: Case = prober.case
        self.pending_probes: dict[Future[Any], PendingProbe] = {}
        self.verdicts: dict[str, str] = {}
        self.skips: dict[str, str] = {}
        self.diagnoses: dict[str, str] = {}
        self.rounds: list[float] = []
        self.differs_alone = False
        self._told = set[str]()
        self.earlier = dict[str, str]()
        self.remarks = remarks

    @property
    def predicate(self) -> Predicate:
        """What makes a point BAD."""
        return self.prober.predicate

    @property
    def slots(self) -> int:
        """How many probes run side by side."""
        return self.prober.executor.slots

    @property
    def cost(self) -> Cost:
        """What was spent."""
        return self.prober.cost

    @property
    def machine(self) -> str:
        """Short name of the machine that answers hold for."""
        return self.prober.machine

    def looked(self, baseline: Trace | None, other: Trace | None) -> Coverage:
        """See `looked_between`; with what any run that answered has read and other code may have written."""
        earlier = self.earlier | earlier_of(*filter(None, (baseline, other)))
        return replace(looked_between(self.predicate, baseline, other), earlier=earlier)

    def begin(self) -> None:
        """Say what the journal knows already."""
        if self.prober.journalled:
            self.say(f"resuming: {self.prober.journalled} finished probes are in the journal")

    def shorten(self, steps: int) -> None:
        """From now on so many steps are asked for: the case had no end of its own, and GOOD's replay made no more."""
        self.case = self.case.model_copy(update={"case": self.case.case.model_copy(update={"steps": steps})})

    def known(self, request: Request) -> Answer | None:
        """What was found before, if that answers; costs nothing."""
        return self._seen(self.prober.known(request))

    def submit(self, request: Request, job: Any = None) -> Future[Answer]:
        """Start a probe that can be cancelled."""
        return self.start(request.point, lambda pending: pending.probe(request), job)

    def ask(self, *requests: Request) -> list[Answer]:
        """Probe side by side, and wait for all of the answers."""
        return self.results([self.submit(request) for request in requests])

    def drive(
        self,
        plan: Callable[[int], bool],
        take: Callable[[PendingProbe, Any], None],
        search: Callable[[], Search[str] | None] = lambda: None,
    ) -> None:
        """Run what is planned until nothing more is to be known, and end what then still runs.

        Args:
            plan: Told how many slots are free, starts what is to be known next; False where nothing is.
            take: Given what came of a probe, as it ends.
            search: What whoever watches is told of, as time goes by.
        """
        while plan(self.slots - len(self.pending_probes)):
            for pending, outcome in self._finished(search()):
                take(pending, outcome)
        self.clear()

    def start(self, commit: str, work: Callable[[PendingProbe], T], job: Any = None) -> Future[T]:
        """Start work on a commit."""
        pending = PendingProbe(self.prober, commit, self.history.tree(commit), job=job)

        def begin() -> T:
            pending.began = time.monotonic()
            return work(pending)

        future = self.pool.submit(begin)
        self.pending_probes[future] = pending
        return future

    def results(self, futures: Sequence[Future[T]]) -> list[T]:
        """Wait for probes, telling whoever watches that time goes by."""
        while not all(future.done() for future in futures):
            wait(futures, timeout=PULSE)
            self.say("")
        for future in futures:
            self.pending_probes.pop(future, None)
        self._tell_pythons()
        return [self._seen(future.result()) for future in futures]

    def _finished(self, search: Search[str] | None) -> Iterator[tuple[PendingProbe, Any]]:
        """What has ended, as soon as something has or a pulse went by; cancelled probes are passed over."""
        done, _ = wait(self.pending_probes, timeout=PULSE, return_when=FIRST_COMPLETED)
        for future in done:
            pending = self.pending_probes.pop(future)
            self._tell_pythons()
            with contextlib.suppress(CancelledError):
                yield pending, self._seen(future.result())
        if not done:
            self.say("", search)

    def _seen(self, outcome: T) -> T:
        """Note what a run has read and other code may have written."""
        trace = outcome.trace if isinstance(outcome, Recording) else outcome
        if isinstance(trace, Trace):
            self.earlier |= earlier_of(trace)
        return outcome

    def _tell_pythons(self) -> None:
        """Tell which Pythons the program was seen to run in that no word of it tells."""
        for where in sorted(self.prober.ran_in - self._told):
            self._told.add(where)
            self.say(f"the program runs in {where}")

    def clear(self) -> None:
        """End everything under way, and wait until it has ended."""
        self.cancel(self.pending_probes.values())
        wait(self.pending_probes)
        self.pending_probes.clear()

    def cancel(self, pending_probes: Iterable[PendingProbe]) -> None:
        """End what is under way."""
        for pending in pending_probes:
            pending.cancel.set()

    def record(self, commit: str, verdict: Verdict | str, reason: str = "") -> None:
        """Note a verdict."""
        self.verdicts[commit] = str(verdict)
        self.skips.pop(commit, None)
        if verdict == Verdict.SKIP:
            self.skips[commit] = reason

    def know(self, commits: Iterable[str], diagnosis: str) -> None:
        """Note and tell what is known of why commits cannot be tested, if anything is."""
        if diagnosis:
            self.diagnoses.update(dict.fromkeys(commits, diagnosis))
            self.say(f"  {diagnosis}")

    def tell_length(self, name: str, trace: Trace) -> list[str]:
        """Tell where a run that ended by itself made fewer steps than the case asks for: no more are compared.

        Returns:
            What was told, if anything.
        """
        made, asked = len(trace.steps), self.case.steps
        if not made < asked < OPEN_END:
            return []
        text = f"{name} ends by itself after {made} of the {asked} steps of the case: no more are compared"
        self.say(text)
        return [text]

    def say(self, text: str, search: Search[str] | None = None, posterior: Mapping[str, float] | None = None) -> None:
        """Tell whoever watches."""
        suspects = len(search.suspects) if search else 0
        rounds = search.bound(self.slots) if search and text else 0
        took = sorted(self.rounds)[len(self.rounds) // 2] if self.rounds else None
        self.watch(
            Event(
                text,
                list(self.history.parents),
                dict(self.verdicts),
                {
                    probe.commit: Running(probe.steps, probe.of, probe.seconds)
                    for future, probe in list(self.pending_probes.items())
                    if probe.began is not None and not future.done()
                },
                suspects,
                rounds,
                took * rounds if took is not None and rounds else None,
                posterior or {},
            )
        )
