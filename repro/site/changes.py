"""The nights at which the numbers of a case changed, and the commits behind them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from repro.nightly.records import Night

__all__ = ["Change", "changes", "together"]


@dataclass(frozen=True)
class Change:
    """A night whose numbers are not those of the night before.

    Attributes:
        night: It.
        before: The last night of that machine with numbers of its own that reproduce; None where there is none.
        kind: ``numbers``: they differ from the night before; ``judged``: they do not, but a check says that they
            changed; ``case``: what is run differs, so the numbers had to; ``repro``: another version of repro wrote
            them, which may observe other signals, and no check says that they changed.
        nights: How many nights of that machine kept the new numbers, this one included.
    """

    night: Night
    before: Night | None
    kind: str
    nights: int

    @property
    def culprits(self) -> Sequence[Mapping[str, Any]]:
        """The commits that did it, where a search named them."""
        return self.night.culprits

    @property
    def span(self) -> tuple[str, str] | None:
        """The last commit with the old numbers and the first with the new ones, where no search named any."""
        if self.culprits or self.before is None or self.kind == "repro":
            return None
        return str(self.before.commit["commit"]), str(self.night.commit["commit"])

    @property
    def same_code(self) -> bool:
        """Whether the numbers changed between nights of one commit, or of commits that have the same code."""
        if self.before is None or self.kind in ("case", "repro"):
            return False
        a, b = self.before, self.night
        return a.commit["commit"] == b.commit["commit"] or (a.tree == b.tree != "")

    @property
    def text(self) -> str:
        """What changed, in words."""
        if self.kind == "case":
            return "the case, its rollouts or its number of steps changed"
        if self.kind == "judged":
            return "a check failed"
        if self.kind == "repro" and self.before is not None:
            return f"repro was {self.before.version} before and is {self.night.version}: chains are not compared"
        if self.night.status == "changed":
            return "the numbers moved"
        return f"other bits, judged {self.night.status}"


def changes(nights: Sequence[Night]) -> list[Change]:
    """Every change, oldest first.

    Args:
        nights: Of one case, oldest first. Each machine is compared with itself. Flaky nights and those without a trace
            are passed over: their bits say nothing.
    """
    by_machine: dict[str, list[Night]] = {}
    for night in nights:
        by_machine.setdefault(night.machine, []).append(night)
    all_changes = [change for machine_nights in by_machine.values() for change in _of_machine(machine_nights)]
    return sorted(all_changes, key=lambda change: (change.night.at, change.night.machine))


def together(changes: Sequence[Change]) -> list[list[Change]]:
    """The same change on several machines as one, newest first."""
    groups: dict[tuple[object, ...], list[Change]] = {}
    by_machine = sorted(changes, key=lambda c: c.night.machine)
    for change in sorted(by_machine, key=lambda c: (c.night.at, c.night.case), reverse=True):
        night = change.night
        commits = tuple(str(culprit["commit"]["commit"]) for culprit in change.culprits) or change.span
        groups.setdefault((night.at[:10], night.case, change.kind, night.status, commits), []).append(change)
    return list(groups.values())


def _of_machine(nights: Sequence[Night]) -> list[Change]:
    begins = list(_begins(nights))
    at = {id(night): index for index, night in enumerate(nights)}
    ends = [at[id(night)] for night, *_ in begins] + [len(nights)]
    return [
        Change(night, before, kind, last - first)
        for (night, before, kind), (first, last) in zip(begins, pairwise(ends), strict=True)
    ]


def _begins(nights: Sequence[Night]) -> Iterator[tuple[Night, Night | None, str]]:
    before: Night | None = None
    judged = False
    for night in nights:
        changed = night.status == "changed"
        if not night.chain or night.status == "flaky":
            if changed and not judged:
                yield night, before, "judged"
            judged = judged or changed
            continue
        if before is not None and before.chain != night.chain:
            yield night, before, _kind(before, night)
        elif changed and not judged:
            yield night, before, "judged"
        before, judged = night, changed


def _kind(before: Night, night: Night) -> str:
    if (before.key, before.rollouts, before.steps) != (night.key, night.rollouts, night.steps):
        return "case"
    return "repro" if before.version != night.version and night.status != "changed" else "numbers"
