"""What a probe's trace, or its failure, may rest on beside the code: what its key holds is what is watched."""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from repro_bisect.probe.executors import Executor
from repro_golden.case.file import Case
from repro_golden.case.identity import Identity
from repro_golden.case.python_of import same_python
from repro_golden.recording.attach.code.identify import marked
from repro_golden.repository.checkout import Checkout
from repro_golden.store.rollouts import Rollouts, rollouts_of
from repro_golden.subjects import identity_of
from repro_golden.subjects.argv import interpreter
from repro_golden.subjects.environments.overlays import sources_of
from repro_golden.subjects.pythons import environments_named
from repro_golden.subjects.surroundings import found_outside
from repro_golden.subjects.watched import Snapshot, Stand, Watched, all_of

__all__ = ["Around", "Moment", "Pythons", "Surroundings", "watched_rollouts"]

Moment: TypeAlias = tuple[tuple[Stand, ...], Mapping[str, Stand]]
"""How all that a case's probes rest on stood at one time: what keys hold, and interpreters that probes ran in."""


@dataclass(frozen=True)
class Around:
    """All that the probes of one case may rest on beside the code.

    Attributes:
        case: The case, which nothing changes under a search.
        parts: All else, in the order in which keys hold it.
        pythons: Interpreters beside, which are known to be run.
    """

    case: Case
    parts: Sequence[Watched]
    pythons: Pythons

    @property
    def facts(self) -> tuple[str, ...]:
        """What keys hold of it: what it was at first."""
        check = self.case.subject.check_line  # it decides no numbers, but a skip
        return self.case.digest, check, *(fact for part in self.parts for fact in part.facts)

    @property
    def moment(self) -> Moment:
        """How it stood when somebody looked last, as at the end of the probe before: looking costs."""
        return tuple(part.last for part in self.parts), self.pythons.moment

    def lasted(self, began: Moment, ran_in: Sequence[str]) -> bool:
        """Whether it was what keys hold at a moment, and has been so since, as far as anybody has looked.

        So of the interpreters that a probe ran in: of one that was not known at that moment nobody can say.
        """
        parts, pythons = began
        stood = [*parts, *(pythons.get(python, _UNKNOWN) for python in ran_in)]
        now = [part.stand() for part in (*self.parts, *map(self.pythons.of, ran_in))]
        known = self.pythons.facts(ran_in).keys() >= {*ran_in}
        return known and now == stood and all(as_at_first for _, as_at_first in stood)

    def expects(self, ran_in: Sequence[str]) -> bool:
        """Whether the interpreters that a probe ran in are those that the key of a training state holds."""
        return self.pythons.expected.keys() >= {*ran_in}


_UNKNOWN: Stand = -1, False


class Pythons:
    """Interpreters that programs run in although no key holds them, as they were when each was looked at first."""

    def __init__(self, find: Callable[[str, bool], Snapshot], expected: Callable[[], Iterable[str]] = tuple) -> None:
        """Look at none before it is asked for.

        Args:
            find: Reads what one could import; told whether to pass over what is remembered of it.
            expected: Those that may be run, as far as that is known before a probe.
        """
        self._find, self._expected, self._lock = find, functools.cache(lambda: sorted({*expected()})), threading.Lock()
        self._read = dict[str, Watched]()

    def of(self, python: str) -> Watched:
        """What one could import."""
        with self._lock:
            if python not in self._read:
                self._read[python] = Watched(functools.partial(self._find, python))
            return self._read[python]

    @property
    def moment(self) -> Mapping[str, Stand]:
        """How each stood when somebody looked last; those that are expected are looked at now."""
        for python in self._expected():
            self.of(python)
        return {python: watched.last for python, watched in list(self._read.items())}

    def facts(self, pythons: Iterable[str]) -> dict[str, str]:
        """What stands for some of them, as far as that is known."""
        return {python: fact for python in pythons for fact in self.of(python).facts}

    def in_words(self, ran_in: Sequence[str]) -> Iterator[str]:
        """What a program runs in, as it is told."""
        known = self.facts(ran_in)
        yield from (f"{python}, which its command does not name" for python in known)
        if len(known) < len(ran_in):
            yield "a Python that is gone when it ends, or does not answer: no later search uses its probes"

    def are(self, facts: Mapping[str, str]) -> bool:
        """Whether interpreters are what they were for another search."""
        return all(self.of(python).facts == (fact,) for python, fact in facts.items())

    @property
    def expected(self) -> dict[str, str]:
        """What stands for those that may be run."""
        return self.facts(self._expected())

    @property
    def changed(self) -> set[str]:
        """See `Surroundings.changed`."""
        return set[str]().union(*(watched.changed for watched in self._read.values()))


class Surroundings:
    """What is around the cases of one search; of what several share there is one part."""

    def __init__(
        self,
        checkout: Checkout,
        case: Case,
        rollouts: Watched,
        identity: Identity,
        executor: Executor,
        ran_in: Callable[[], Iterable[str]] = tuple,
    ) -> None:
        """Nothing is read before it is asked for.

        Args:
            checkout: The repository.
            case: The case of the search.
            rollouts: See `watched_rollouts`.
            identity: The machine's, for that case.
            executor: Runs the probes.
            ran_in: Tells the interpreters that earlier probes of the case said they ran in.
        """
        self._checkout, self._case, self._identity, self._executor = checkout, case, identity, executor
        self._parts: dict[tuple[str, str], Watched] = {("rollouts", ""): rollouts}
        self._known: dict[int, Around] = {}  # a case is held, so that no other gets its id
        self._lock = threading.Lock()
        self.pythons = Pythons(
            lambda python, again: executor.packages(case, python, again=again),
            lambda: [*ran_in(), *_others(case, checkout.root)],
        )

    def of(self, case: Case) -> Around:
        """What is around a case: looked at once, for what is changed under a search must not part it into two keys."""
        with self._lock:
            if id(case) not in self._known:
                # what a point pins (`subject.packages`) is known from its case, and not installed for this
                pinned = {"packages": self._case.subject.packages}
                bare = case.model_copy(update={"subject": case.subject.model_copy(update=pinned)})
                self._known[id(case)] = Around(case, [
                    self._parts["rollouts", ""],
                    self._part("environment", bare, self._environment),
                    self._part("outside", case, lambda case, _: found_outside(case, self._checkout.root)),
                    self._part("sources", case, lambda case, _: _sources(case, self._checkout.root)),
                ], self.pythons)  # fmt: skip
            return self._known[id(case)]

    def _part(self, name: str, case: Case, find: Callable[[Case, bool], Snapshot]) -> Watched:
        if (name, case.digest) not in self._parts:
            self._parts[name, case.digest] = Watched(functools.partial(find, case))
        return self._parts[name, case.digest]

    def _environment(self, case: Case, again: bool) -> Snapshot:
        """Who runs a case's program, and what that sees: a layout has resources, a command and variables of its own."""
        seen = self._executor.surroundings(case, again=again)
        given = case.digest == self._case.digest and not again
        identity = self._identity if given else identity_of(case, self._checkout.root)
        return Snapshot((identity.digest, *seen.facts), seen.marks, seen.look)

    @property
    def changed(self) -> list[str]:
        """Places that were not the same all the time."""
        return sorted(self.pythons.changed.union(*(part.changed for part in self._parts.values())))


def _others(case: Case, root: Path) -> list[str]:
    """The interpreters that variables and words name by environments, beside the case's own."""
    case_python = interpreter(case.subject, root)
    return [python for python in environments_named(case, root) if not same_python(python, case_python)]


def _sources(case: Case, root: Path) -> Snapshot:
    return all_of("what tells where packages come from", lambda: tuple(sources_of(case, root)))


def watched_rollouts(case: Case, rollouts: Rollouts) -> Watched:
    """The digest of a case's rollouts, and whether it still is theirs."""
    folder = rollouts.directory

    def look() -> dict[str, str]:
        places = [os.path.join(place, name) for place, _, names in os.walk(folder) for name in names] if folder else []  # noqa: PTH118
        return marked(places)

    def find(again: bool) -> Snapshot:
        marks = look()
        read = rollouts_of(case, folder) if again and folder else rollouts
        return Snapshot((read.digest,), marks, look)

    return Watched(find)
