"""Probes that train one step: from GOOD's state just before BAD's first divergent step.

Such a probe is trusted only after two equalities were seen: GOOD restarted from the state makes its own step again, and
BAD started from it makes the step that BAD's straight run made. A trainer that keeps state outside its checkpoint fails
one of them, and is served by straight probes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from repro_bisect.probe.answers import Skip
from repro_bisect.probe.executors import State
from repro_bisect.probe.request import Request
from repro_bisect.probe.scheduler import Scheduler
from repro_bisect.probe.states import States
from repro_golden.base.canonical import digest
from repro_golden.case.file import Case
from repro_golden.compare.step_difference import differing
from repro_golden.compare.traces import first_difference
from repro_golden.trace import Trace

__all__ = ["Shortcut", "chosen_steps", "prepare", "same_step", "state_key"]

_START = "start/"
"""Begins the names of what a trainer shows at its first step alone: the weights that it starts from."""

_STATES = 8
"""How many states GOOD's own straight run keeps, evenly spaced, within the case's budget."""


@dataclass(frozen=True)
class Shortcut:
    """A state that was shown to serve.

    Attributes:
        state: GOOD's, just before BAD's first divergent step.
        baseline: The one step of GOOD, restarted from it.
    """

    state: State
    baseline: Trace

    def ready(self, trace: Trace) -> bool:
        """Whether a probe started from the same weights, so that what it made of them is its verdict."""
        divergence = first_difference(self.baseline, trace)
        return divergence is None or not (divergence.phase == "input" and divergence.signal.startswith(_START))

    def same(self, trace: Trace, straight: Trace) -> bool:
        """Whether a probe's one step is that of the same commit's straight run."""
        return same_step(trace, straight, self.state.step)


def same_step(replayed: Trace, straight: Trace, step: int) -> bool:
    """Whether two traces show the same signals in a step, apart from the weights that a run starts from."""
    rows = []
    for trace in (replayed, straight):
        index = next((i for i, record in enumerate(trace.steps) if record.step == step), None)
        if index is None:
            return False
        rows.append([row for row in trace.rows(index) if not (row.phase == "input" and row.name.startswith(_START))])
    return not differing(rows[0], rows[1])


def state_key(scheduler: Scheduler, point: str) -> str:
    """What decides a saved state of a point beside its step: the run that makes it, and how it is saved."""
    prober = scheduler.prober
    others = [fact for python in sorted(prober.expected.items()) for fact in python]
    return digest("state", prober.key(point), *scheduler.case.subject.state_lines, *others)


def chosen_steps(case: Case) -> list[int]:
    """The steps before which GOOD's own straight run saves its state: evenly spaced, or none where it cannot."""
    if not case.subject.saves_between or not case.case.states_budget:
        return []
    return sorted({case.steps * k // _STATES for k in range(1, _STATES)} - {0})


def prepare(
    scheduler: Scheduler,
    states: States,
    golden: Mapping[int, Path],
    endpoints: tuple[str, str],
    step: int,
    traces: tuple[Trace, Trace],
) -> Shortcut | None:
    """Make the good end's state before `step`, or find it, and show that it serves; None where it does not.

    Args:
        scheduler: Where the probes run.
        states: Of the good end.
        golden: States that its golden run keeps, by step.
        endpoints: The good and the bad end.
        step: The bad end's first divergent step.
        traces: Straight runs of both.
    """
    if step == 0 or not scheduler.case.subject.saves_state:
        return None
    state = _state(scheduler, endpoints[0], states, golden, step, state_key(scheduler, endpoints[0]))
    if state is None:
        return None
    answers = scheduler.ask(*(Request(commit, 1, start=state) for commit in endpoints))
    for answer, straight, who in zip(answers, traces, ("GOOD", "BAD"), strict=True):
        if not isinstance(answer, Trace):
            why = answer.reason if isinstance(answer, Skip) else "it left no trace"
            scheduler.say(f"{who} does not start from the state before step {step} ({why}): probes train from step 0")
            return None
        if not same_step(answer, straight, step):
            scheduler.say(
                f"{who} started from the state before step {step} makes another step: probes train from step 0"
            )
            return None
    good, bad = answers
    assert isinstance(good, Trace)
    assert isinstance(bad, Trace)
    shortcut = Shortcut(state, good)
    if not shortcut.ready(bad):
        scheduler.say(f"GOOD and BAD load the state before step {step} differently: probes train from step 0")
        return None
    scheduler.say(f"each probe trains one step, from GOOD's state before step {step}")
    return shortcut


def _state(
    scheduler: Scheduler, good: str, states: States, golden: Mapping[int, Path], step: int, key: str
) -> State | None:
    """The state before `step`: kept, or made from the nearest one before it."""
    at = dict(golden) | {n: states.at(n) for n in states.steps()}
    nearest = max((n for n in at if n <= step), default=0)
    if nearest != step:
        between = nearest and scheduler.case.subject.saves_between
        start = State(nearest, at[nearest], digest(key, str(nearest))) if between else None
        scheduler.say(f"making GOOD's state before step {step}, from step {start.step if start else 0}")
        scheduler.results([scheduler.start(good, lambda pending: pending.make_state(step, states.folder, start))])
        if not states.at(step).exists():
            why = (
                "is not kept, for something was changed meanwhile" if scheduler.prober.changed else "is not saved by it"
            )
            scheduler.say(f"GOOD's state before step {step} {why}: probes train from step 0")
            return None
        at[step] = states.at(step)
    return State(step, at[step], digest(key, str(step)))
