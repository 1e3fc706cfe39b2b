"""Bisects of simulated histories whose programs now and then say the wrong thing: the real driver, without a process.

`python tests/flaky_kit.py HISTORIES [FIRST]` prints what came of so many histories at each rate, from a seed on; it
writes nothing.
"""

from __future__ import annotations

import math
import random
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from bayes_kit import line, merges
from trace_kit import RAM

from repro_bisect.axes.axis import Axis, PointInfo
from repro_bisect.driver.commits import Bisection
from repro_bisect.driver.endpoints import Endpoints
from repro_bisect.driver.result import BisectResult
from repro_bisect.driver.session import Options
from repro_bisect.predicates.predicates import Exit, Predicate
from repro_bisect.probe.around import watched_rollouts
from repro_bisect.probe.executors import Outcome, Task
from repro_bisect.probe.prober import Prober
from repro_bisect.probe.scheduler import Scheduler
from repro_golden.base.errors import ReproError
from repro_golden.case.file import Case
from repro_golden.case.identity import Identity
from repro_golden.repository.checkout import Checkout
from repro_golden.store.rollouts import RolloutFiles
from repro_golden.subjects import identity_of
from repro_golden.subjects.watched import Snapshot

RATES = (0.0, 0.05, 0.1, 0.3)
KINDS = ("both", "GOOD fails", "BAD passes")


@dataclass
class Points(Axis):
    """A history as an axis; each of its commits has code of its own."""

    parents: dict[str, list[str]]
    good: str
    bad: str
    what: str = "commit"
    paths: Sequence[str] = ("train.py",)
    same: dict[str, str] = field(default_factory=dict)

    @property
    def named(self) -> str:
        """See `Axis`."""
        return self.good

    def tree(self, point: str) -> str:
        """See `Axis`."""
        return self.same.get(point, point)

    def descendants(self, point: str) -> set[str]:
        """See `Axis`."""
        reached: set[str] = {point}
        for child in reversed(self.parents):
            if reached & set(self.parents[child]):
                reached.add(child)
        return reached - {point}

    def subjects(self, points: Sequence[str]) -> dict[str, str]:
        """See `Axis`."""
        return dict.fromkeys(points, "subject")

    def info(self, point: str) -> PointInfo:
        """See `Axis`."""
        return PointInfo(point, "", "", "subject", tuple(self.parents.get(point, ())), "")

    def holds(self, path: str) -> str:
        """See `Axis`."""
        del path
        return self.good

    def git_tests(self, culprit: str, verdicts: Mapping[str, str]) -> int:
        """Of a line: halves of it."""
        del culprit, verdicts
        return math.ceil(math.log2(len(self.parents)))


@dataclass
class Told:
    """Runs a function in place of a program; the folder is for what it leaves."""

    run_of: Callable[[Task, Path], Outcome]
    slots: int = 1
    runs: Counter[str] = field(default_factory=Counter)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def run(self, task: Task, folder: Path, cancel: object, progress: object = None) -> Outcome:
        """See `Executor`."""
        del cancel, progress
        with self._lock:
            self.runs[task.commit] += 1
            return self.run_of(task, folder)

    def surroundings(self, case: Case, *, again: bool = False) -> Snapshot:
        """See `Executor`."""
        del case, again
        return Snapshot(("",), {}, dict)

    def packages(self, case: Case, python: str, *, again: bool = False) -> Snapshot:
        """See `Executor`."""
        del case, python, again
        return Snapshot(("",), {}, dict)

    def close(self) -> None:
        """See `Executor`."""


@cache
def experiment() -> tuple[Case, Identity]:
    case = Case.model_validate({"case": {"name": "c", "steps": 3, "rollouts": "r"}, "subject": {"kind": "core"}})
    return case, identity_of(case, Path("/"))


def bisect(
    axis: Axis, executor: Told, predicate: Predicate, folder: Path, messages: list[str] | None = None, **options: object
) -> BisectResult:
    """What the driver says of a history; `folder` is what it keeps."""
    case, identity = experiment()
    checkout = Checkout(folder, folder / "repro")
    rollouts = watched_rollouts(case, RolloutFiles(None))
    prober = Prober(checkout, case, axis, rollouts, identity, executor, predicate)  # type: ignore[arg-type]
    with ThreadPoolExecutor(executor.slots) as pool:
        scheduler = Scheduler(
            prober, axis, pool, lambda event: messages.append(event.text) if messages is not None else None
        )
        try:
            ends = Endpoints(scheduler, None, folder / "states", open_end=False)
            return Bisection(scheduler, ends, Options(**options)).run()  # type: ignore[arg-type]
        finally:
            prober.close()


@dataclass(frozen=True)
class Answer:
    """What was said of one history.

    Attributes:
        right: Whether the culprit is what, or among what, was named; None where nothing was.
        chance: The probability that was told with it; None without.
        tests: Runs of the program.
        git: Tests that git would have made, were nothing flaky; None where that is not known.
        text: Outcome, or why it was refused.
    """

    right: bool | None
    chance: float | None
    tests: int
    git: int | None
    text: str


def history(rng: random.Random) -> tuple[Points, str, set[str]]:
    """A line or merges of up to 128 commits, its culprit, and what contains that."""
    size = rng.choice([3, 8, 20, 50, 128])
    dag = line(size) if rng.random() < 0.5 else merges(size, rng.randrange(1000))
    names = {i: f"c{i:03}" for i in dag.order}
    parents = {names[i]: [names[p] for p in dag.parents[i]] or ["good"] for i in reversed(dag.order)}
    culprit = rng.choice(dag.order)
    holds = {names[i] for i in dag.order if dag.ancestors[dag.index[i]] >> dag.index[culprit] & 1}
    return Points(parents, "good", names[dag.order[-1]]), names[culprit], holds


def tangled(rng: random.Random) -> tuple[Points, set[str]]:
    """A history that no one culprit explains, and what of it is BAD, as each commit's code decides.

    Code is kept, changed, taken back, picked from elsewhere and merged, also from a branch that began before GOOD.
    """
    code, bad = {"good": "good", "base": "base"}, {"good": False, "base": rng.random() < 0.5}
    parents: dict[str, list[str]] = {"c0": ["good"]}
    for i in range(rng.randrange(3, 14)):
        name, known = f"c{i}", [c for c in code if c != "base" or rng.random() < 0.2][-4:]
        before = parents[name] = rng.sample(known, min(len(known), rng.choice([1, 1, 1, 2]))) if i else ["good"]
        codes = [code[c] for c in before]
        code[name] = rng.choice([codes[0], name, name, name, code[rng.choice(list(code))], rng.choice(codes)])
        if code[name] == name:
            bad[name] = any(bad[c] for c in codes) != (rng.random() < 0.4)
    tips = [c for c in parents if not any(c in before for before in parents.values())]
    parents["last"], code["last"], bad["last"] = tips, "last", True
    reached = {"last"}
    for name in reversed(parents):
        if name in reached:
            reached.update(parents[name])
    holds = {name: before for name, before in reversed(parents.items()) if name in reached}
    return Points(holds, "good", "last", same=code), {name for name in code if bad[code[name]]}


def answer_of(seed: int, rate: float, folder: Path, kind: str = "", skips: float = 0.0) -> Answer:
    """A bisect by exit code of one random history whose program says the wrong thing at a rate."""
    rng = random.Random(f"{seed} {rate}")
    axis, culprit, holds = history(rng)
    kind = kind or rng.choice(KINDS)
    made = Counter[str]()
    untestable = {c for c in axis.parents if c != axis.bad and rng.random() < skips}

    def run(task: Task, folder: Path) -> Outcome:
        del folder
        if task.commit in untestable:
            return Outcome(code=125)
        bad = task.commit in holds
        made[task.commit] += 1  # what a run says does not depend on what runs beside it
        draw = random.Random(f"{seed} {rate} {task.commit} {made[task.commit]}").random()
        wrong = draw < rate and kind in ("both", "BAD passes" if bad else "GOOD fails")
        return Outcome(code=int(bad != wrong))

    executor = Told(run, slots=rng.choice([1, 1, 2]))
    with tempfile.TemporaryDirectory(dir=folder) as state:
        try:
            result = bisect(axis, executor, Exit(), Path(state))
        except ReproError as error:
            return Answer(None, None, executor.runs.total(), None, str(error))
    named = {c.commit.commit for c in result.culprits} or set(result.suspects)
    chance = sum(result.posterior.get(c, 0.0) for c in named) if result.posterior else None
    return Answer(culprit in named, chance, executor.runs.total(), result.git_probes, result.outcome)


@dataclass(frozen=True)
class Sheet:
    """Many answers at one rate."""

    rate: float
    answers: Sequence[Answer]

    @property
    def silently_wrong(self) -> int:
        """Wrong answers that were told without a probability."""
        return sum(a.right is False and a.chance is None for a in self.answers)

    @property
    def refused(self) -> list[str]:
        """Why nothing was told."""
        return [a.text for a in self.answers if a.right is None]

    def told(self, least: float) -> list[bool]:
        """Whether answers told with at least this probability, or with none, were right."""
        return [bool(a.right) for a in self.answers if a.right is not None and (a.chance or 1.0) >= least]

    def __str__(self) -> str:
        told, tests = self.told(0.95), [a.tests for a in self.answers]
        more = [a.tests - a.git for a in self.answers if a.git is not None]
        return (
            f"{100 * self.rate:3.0f} %: {len(self.answers)} histories, {len(self.refused)} refused, "
            f"{self.silently_wrong} silently wrong, told at 95 %: {sum(told)} of {len(told)} right "
            f"({100 * sum(told) / max(1, len(told)):.1f} %), tests {sum(tests) / len(tests):.1f} on average, "
            f"{max(tests)} at most" + (f", {max(more)} more than git's at most" if more else "")
        )


def sheet(rate: float, seeds: Sequence[int], kind: str = "", skips: float = 0.0) -> Sheet:
    """What comes of many histories at one rate."""
    with tempfile.TemporaryDirectory(dir=RAM) as folder:
        return Sheet(rate, [answer_of(seed, rate, Path(folder), kind, skips) for seed in seeds])


if __name__ == "__main__":
    count, first = [int(word) for word in (*sys.argv[1:], *("400", "0")[len(sys.argv) - 1 :])]
    many = range(first, first + count)
    for kind in ("", *KINDS):
        print(kind or "any kind")
        for rate in RATES:
            print(" ", sheet(rate, many, kind), flush=True)
    print("with every fourth commit untestable")
    for rate in RATES:
        print(" ", sheet(rate, many, skips=0.25), flush=True)
