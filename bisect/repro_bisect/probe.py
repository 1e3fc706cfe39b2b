"""Probes: one commit replayed and kept, judged against a baseline."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from repro_bisect.commits import History, Worktrees
from repro_bisect.journal import Entry, Journal, probe_key
from repro_golden.case import Case, Compare
from repro_golden.checkout import Checkout
from repro_golden.compare import Divergence, compare
from repro_golden.errors import ReproError
from repro_golden.identity import Identity
from repro_golden.launch import ChildFailure, Run, launch
from repro_golden.rollouts import RolloutSet
from repro_golden.scratch import scratch_folder
from repro_golden.trace import Trace, seal

__all__ = ["Cost", "Prober", "Signal", "Skip", "judge"]

Signal = tuple[int, str, str]
"""Step, phase and name."""

_OUT_OF_TIME = "runs out of time"


@dataclass(frozen=True)
class Skip:
    """A commit that cannot be tested, and why."""

    reason: str


@dataclass
class Cost:
    """What the probes of one bisect cost; reused ones cost nothing."""

    probes: int = 0
    steps: int = 0
    seconds: float = 0.0
    reused: int = 0


class Prober:
    """Replays commits of one range on the rollouts of one case, remembering what is already known."""

    def __init__(
        self, checkout: Checkout, case: Case, history: History, rollouts: RolloutSet, identity: Identity
    ) -> None:
        self._checkout, self.case, self._history, self._rollouts = checkout, case, history, rollouts
        self._identity = identity
        self._worktrees = Worktrees(checkout)
        self._journal = Journal(checkout.state)
        self._lock = threading.Lock()
        self.cost = Cost()

    def probe(
        self,
        commit: str,
        steps: int,
        *,
        run: int = 0,
        baseline: Trace | None = None,
        dump: Sequence[Signal] = (),
        partial: bool = False,
        cancel: threading.Event | None = None,
    ) -> Trace | Skip:
        """The trace of a commit over its first `steps` steps, or to its first divergence from `baseline`.

        Args:
            commit: Full id.
            steps: Most steps to train.
            run: 0 shares what was found before; other numbers are replays of their own.
            baseline: Where the probe may end early.
            dump: Signals whose whole content is wanted; such a probe is never taken from the journal.
            partial: Take what a crashing commit left, if that is at least one step, instead of skipping it.
            cancel: Ends the probe without an answer when it is set.

        Raises:
            CancelledError: `cancel` was set.
            MachineFailureError: git, the disk or the machine failed: no verdict.
            ReproError: the instrument refused.
        """
        tree = self._history.tree(commit)
        if tree is None:
            return Skip(f"it has no folder {self.case.subject.path}/")
        key = probe_key(tree, self.case, self._rollouts.digest, self._identity)
        known = None if dump else self._known(key, run, steps, baseline)
        if known is not None:
            with self._lock:
                self.cost.reused += 1
            return known
        return self._replay(commit, tree, (key, run), steps, baseline, dump, partial, cancel)

    def known(self, commit: str, steps: int, baseline: Trace | None) -> Trace | Skip | None:
        """What earlier bisects found of a commit, if that answers the question; costs nothing."""
        tree = self._history.tree(commit)
        if tree is None:
            return None
        return self._known(probe_key(tree, self.case, self._rollouts.digest, self._identity), 0, steps, baseline)

    def _known(self, key: str, run: int, steps: int, baseline: Trace | None) -> Trace | Skip | None:
        """A journalled probe that answers the question: long enough, or already divergent."""
        entry = self._journal.find(key, run)
        if entry is None or entry.skip.startswith(_OUT_OF_TIME):  # a longer limit, or a quieter machine, may do
            return None
        if entry.skip:
            return Skip(entry.skip)
        try:
            trace = Trace(self._journal.trace_path(key, run))
            enough = len(trace.steps) >= steps or (
                baseline is not None and compare(baseline, trace).divergence is not None
            )
        except ReproError:  # damaged: replay it
            return None
        return trace if enough else None

    def _replay(
        self,
        commit: str,
        tree: str,
        key: tuple[str, int],
        steps: int,
        baseline: Trace | None,
        dump: Sequence[Signal],
        partial: bool,
        cancel: threading.Event | None,
    ) -> Trace | Skip:
        began = time.monotonic()
        with scratch_folder(self._checkout.scratch, "probe") as scratch, self._worktrees.at(commit, tree) as place:
            folder = scratch / "trace"
            job = Run(
                steps,
                str(self._rollouts.directory),
                trace=str(folder),
                baseline=str(baseline.directory) if baseline else None,
                dump=dump,
            )
            reason = ""
            try:
                launch(self.case, place, [job], scratch / "log", cancel=cancel)
            except ChildFailure as failure:
                reason = _reason(failure)
            trace = self._finished(folder)
            if trace and (partial or (baseline and compare(baseline, trace).divergence)):
                reason = ""  # if it crashed, then only after its numbers had moved
            made = len(trace.steps) if trace else 0
            seconds = round(time.monotonic() - began, 3)
            keep = None if reason else folder
            self._journal.add(Entry(*key, commit, reason, made, seconds), keep)
        with self._lock:
            self.cost.probes += 1
            self.cost.steps += made
            self.cost.seconds += seconds
        return Skip(reason) if reason else Trace(self._journal.trace_path(*key))

    @staticmethod
    def _finished(folder: Path) -> Trace | None:
        if not (folder / "steps.jsonl").exists():
            return None
        seal(folder)
        trace = Trace(folder)
        return trace if trace.steps else None

    @property
    def journalled(self) -> int:
        """Finished probes that earlier bisects left."""
        return len(self._journal)

    def close(self) -> None:
        """Remove the worktrees."""
        self._worktrees.close()


def _reason(failure: ChildFailure) -> str:
    """Why a commit is skipped. Equal causes give equal text: the search presumes by it."""
    what = {
        "import": "does not import",
        "contract": "offers another contract",
        "build": "does not build the trainer",
        "start": "crashes before its first update",
        "step": f"crashes at step {failure.step}",
        "timeout": _OUT_OF_TIME,
    }[failure.stage]
    return f"{what}: {failure.message}"


def judge(baseline: Trace, trace: Trace, rule: Compare, bound: int) -> Divergence | None:
    """The first difference of a probe within the first `bound` steps: its presence means BAD.

    Raises:
        ReproError: the probe has fewer steps than the bound and agrees as far as it goes, so it proves nothing.
    """
    found = compare(baseline, trace, rule)
    if found.divergence is not None:
        return found.divergence
    if found.steps < bound:
        raise ReproError(f"a probe ended after {found.steps} of {bound} steps without a difference: no verdict")
    return None
