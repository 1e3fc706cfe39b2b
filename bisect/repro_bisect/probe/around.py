"""What a probe's trace, or its failure, may rest on beside the code: what its key holds is what is watched."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeAlias

from repro_bisect.probe.executors import Executor
from repro_golden.case.file import Case
from repro_golden.case.identity import Identity
from repro_golden.recording.attach.identify import marked
from repro_golden.repository.checkout import Checkout
from repro_golden.store.rollouts import Rollouts, rollouts_of
from repro_golden.subjects import identity_of
from repro_golden.subjects.environments.overlays import sources_of
from repro_golden.subjects.surroundings import found_outside
from repro_golden.subjects.watched import Found, Stand, Watched, all_of

__all__ = ["Around", "Moment", "Surroundings", "watched_rollouts"]

Moment: TypeAlias = tuple[Stand, ...]
"""How all that a case's probes rest on stood at one time."""


@dataclass(frozen=True)
class Around:
    """All that the probes of one case may rest on beside the code.

    Attributes:
        case: The case, which nothing changes under a search.
        parts: All else, in the order in which keys hold it.
    """

    case: Case
    parts: Sequence[Watched]

    @property
    def facts(self) -> tuple[str, ...]:
        """What keys hold of it: what it was at first."""
        check = self.case.subject.check_line  # it decides no numbers, but a skip
        return self.case.digest, check, *(fact for part in self.parts for fact in part.facts)

    @property
    def moment(self) -> Moment:
        """How it stood when somebody looked last, as at the end of the probe before: looking costs."""
        return tuple(part.last for part in self.parts)

    def lasted(self, began: Moment) -> bool:
        """Whether it was what keys hold at a moment, and has been so since, as far as anybody has looked."""
        now = tuple(part.stand() for part in self.parts)
        return now == began and all(as_at_first for _, as_at_first in began)


class Surroundings:
    """What is around the cases of one search; of what several share there is one part."""

    def __init__(
        self, checkout: Checkout, case: Case, rollouts: Watched, identity: Identity, executor: Executor
    ) -> None:
        """Nothing is read before it is asked for.

        Args:
            checkout: The repository.
            case: The case of the search.
            rollouts: See `watched_rollouts`.
            identity: The machine's, for that case.
            executor: Runs the probes.
        """
        self._checkout, self._case, self._identity, self._executor = checkout, case, identity, executor
        self._parts: dict[tuple[str, str], Watched] = {("rollouts", ""): rollouts}
        self._known: dict[int, Around] = {}  # a case is held, so that no other gets its id
        self._lock = threading.Lock()

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
                ])  # fmt: skip
            return self._known[id(case)]

    def _part(self, name: str, case: Case, find: Callable[[Case, bool], Found]) -> Watched:
        if (name, case.digest) not in self._parts:
            self._parts[name, case.digest] = Watched(partial(find, case))
        return self._parts[name, case.digest]

    def _environment(self, case: Case, again: bool) -> Found:
        """Who runs a case's program, and what that sees: a layout has resources, a command and variables of its own."""
        seen = self._executor.surroundings(case, again=again)
        given = case.digest == self._case.digest and not again
        identity = self._identity if given else identity_of(case, self._checkout.root)
        return Found((identity.digest, *seen.facts), seen.marks, seen.look)

    @property
    def changed(self) -> list[str]:
        """Places that were not the same all the time."""
        return sorted(set().union(*(part.changed for part in self._parts.values())))


def _sources(case: Case, root: Path) -> Found:
    return all_of("what tells where packages come from", lambda: tuple(sources_of(case, root)))


def watched_rollouts(case: Case, rollouts: Rollouts) -> Watched:
    """The digest of a case's rollouts, and whether it still is theirs."""
    folder = rollouts.directory

    def look() -> dict[str, str]:
        places = [os.path.join(place, name) for place, _, names in os.walk(folder) for name in names] if folder else []  # noqa: PTH118
        return marked(places)

    def find(again: bool) -> Found:
        marks = look()
        read = rollouts_of(case, folder) if again and folder else rollouts
        return Found((read.digest,), marks, look)

    return Watched(find)
