"""The nights at which the numbers of a case changed, and the commits behind them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from repro.nightly.records import NightlyRun

__all__ = ["Change", "changes", "together"]


@dataclass(frozen=True)
class Change:
    """A night whose numbers are not those of the night before.

    Attributes:
        run: It.
        before: The last night of that machine with numbers of its own that reproduce; None where there is none.
        kind: ``numbers``: they differ from the night before; ``judged``: they do not, but a check says that they
            changed; ``case``: what is run differs, so the numbers had to; ``repro``: another version of repro wrote
            them, which may observe other signals, and no check says that they changed.
        runs: How many nights of that machine kept the new numbers, this one included.
    """

    run: NightlyRun
    before: NightlyRun | None
    kind: str
    runs: int

    @property
    def culprits(self) -> Sequence[Mapping[str, Any]]:
        """The commits that did it, where a search named them."""
        return self.run.culprits

    @property
    def span(self) -> tuple[str, str] | None:
        """The last commit with the old numbers and the first with the new ones, where no search named any."""
        if self.culprits or self.before is None or self.kind == "repro":
            return None
        return str(self.before.commit["commit"]), str(self.run.commit["commit"])

    @property
    def same_code(self) -> bool:
        """Whether the numbers changed between nights of one commit, or of commits that have the same code."""
        if self.before is None or self.kind in ("case", "repro"):
            return False
        a, b = self.before, self.run
        return a.commit["commit"] == b.commit["commit"] or (a.tree == b.tree != "")

    @property
    def text(self) -> str:
        """What changed, in words."""
        if self.kind == "case":
            return "the case, its rollouts or its number of steps changed"
        if self.kind == "judged":
            return "a check failed"
        if self.kind == "repro" and self.before is not None:
            return f"repro was {self.before.version} before and is {self.run.version}: chains are not compared"
        if self.run.status == "changed":
            return "the numbers moved"
        return f"other bits, judged {self.run.status}"


def changes(runs: Sequence[NightlyRun]) -> list[Change]:
    """Every change, oldest first.

    Args:
        runs: Of one case, oldest first. Each machine is compared with itself. Flaky nights and those without a trace
            are passed over: their bits say nothing.
    """
    by_machine: dict[str, list[NightlyRun]] = {}
    for run in runs:
        by_machine.setdefault(run.machine, []).append(run)
    all_changes = [change for runs_of_machine in by_machine.values() for change in _of_machine(runs_of_machine)]
    return sorted(all_changes, key=lambda change: (change.run.at, change.run.machine))


def together(changes: Sequence[Change]) -> list[list[Change]]:
    """The same change on several machines as one, newest first."""
    groups: dict[tuple[object, ...], list[Change]] = {}
    by_machine = sorted(changes, key=lambda c: c.run.machine)
    for change in sorted(by_machine, key=lambda c: (c.run.at, c.run.case), reverse=True):
        run = change.run
        commits = tuple(str(culprit["commit"]["commit"]) for culprit in change.culprits) or change.span
        groups.setdefault((run.at[:10], run.case, change.kind, run.status, commits), []).append(change)
    return list(groups.values())


def _of_machine(runs: Sequence[NightlyRun]) -> list[Change]:
    begins = list(_begins(runs))
    at = {id(run): index for index, run in enumerate(runs)}
    bounds = [at[id(run)] for run, *_ in begins] + [len(runs)]
    return [
        Change(run, before, kind, last - first)
        for (run, before, kind), (first, last) in zip(begins, pairwise(bounds), strict=True)
    ]


def _begins(runs: Sequence[NightlyRun]) -> Iterator[tuple[NightlyRun, NightlyRun | None, str]]:
    before: NightlyRun | None = None
    judged = False
    for run in runs:
        changed = run.status == "changed"
        if not run.chain or run.status == "flaky":
            if changed and not judged:
                yield run, before, "judged"
            judged = judged or changed
            continue
        if before is not None and before.chain != run.chain:
            yield run, before, _kind(before, run)
        elif changed and not judged:
            yield run, before, "judged"
        before, judged = run, changed


def _kind(before: NightlyRun, run: NightlyRun) -> str:
    if (before.key, before.rollouts, before.steps) != (run.key, run.rollouts, run.steps):
        return "case"
    return "repro" if before.version != run.version and run.status != "changed" else "numbers"
