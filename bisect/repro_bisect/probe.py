"""Probes: one commit replayed and kept, judged against a baseline."""

from __future__ import annotations

import contextlib
import threading
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from repro_bisect.commits import History, Worktrees
from repro_bisect.journal import Entry, Journal, probe_key
from repro_golden.canonical import digest
from repro_golden.case import Case, Compare
from repro_golden.checkout import Checkout
from repro_golden.children import ChildFailure, Run
from repro_golden.compare import Divergence, compare
from repro_golden.errors import ReproError
from repro_golden.identity import Identity
from repro_golden.rollouts import Rollouts, place_of
from repro_golden.scratch import scratch_folder
from repro_golden.subjects import launch, packages_of
from repro_golden.trace import Trace, seal

__all__ = ["Cost", "Prober", "Signal", "Skip", "judge"]

Signal = tuple[int, str, str]
"""Step, phase and name."""

_OUT_OF_TIME = "runs out of time"
_CRASHES = "crashes at step"


@dataclass(frozen=True)
class Skip:
    """A commit that cannot be tested, and why."""

    reason: str


@dataclass(frozen=True)
class _Question:
    key: str
    run: int
    steps: int
    full: bool
    dump: Sequence[Signal]
    partial: bool


@dataclass
class Cost:
    """What the probes of one bisect cost; reused ones cost nothing."""

    probes: int = 0
    steps: int = 0
    seconds: float = 0.0
    reused: int = 0


class Prober:
    """Replays commits of one range on the rollouts of one case, remembering what is already known.

    Attributes:
        baseline: What probes are judged against, once it is known.
        cost: What was spent.
    """

    def __init__(
        self, checkout: Checkout, case: Case, history: History, rollouts: Rollouts, identity: Identity
    ) -> None:
        self._checkout, self.case, self._history, self._rollouts = checkout, case, history, rollouts
        self._identity = identity
        self._exit = contextlib.ExitStack()
        self._scratch = self._exit.enter_context(scratch_folder(checkout.scratch, "bisect"))
        self._worktrees = Worktrees(checkout)
        self._exit.callback(self._worktrees.close)
        self._journal = Journal(checkout.state)
        self._lock = threading.Lock()
        self._packages = digest(*packages_of(case, checkout.root))
        self.baseline: Trace | None = None
        self.cost = Cost()

    def probe(
        self,
        commit: str,
        steps: int,
        *,
        run: int = 0,
        full: bool = False,
        dump: Sequence[Signal] = (),
        partial: bool = False,
        cancel: threading.Event | None = None,
    ) -> Trace | Skip:
        """The trace of a commit over its first `steps` steps; under `bitwise`, to its first divergence.

        Args:
            commit: Full id.
            steps: Most steps to train.
            run: 0 shares what was found before; other numbers are replays of their own.
            full: Make every step, also past the first divergence.
            dump: Signals whose whole content is wanted; such a probe is full, is never taken from the journal, and its
                trace goes when the prober closes.
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
        known = None if dump else self._known(key, run, steps, full)
        if known is not None:
            with self._lock:
                self.cost.reused += 1
            return known
        return self._replay(commit, tree, _Question(key, run, steps, full or bool(dump), dump, partial), cancel)

    def known(self, commit: str, steps: int) -> Trace | Skip | None:
        """What earlier bisects found of a commit, if that answers the question; costs nothing."""
        tree = self._history.tree(commit)
        if tree is None:
            return None
        return self._known(probe_key(tree, self.case, self._rollouts.digest, self._identity), 0, steps, False)

    def _known(self, key: str, run: int, steps: int, full: bool) -> Trace | Skip | None:
        """A journalled probe that answers the question: long enough, or already divergent."""
        entry = self._journal.find(key, run)
        if entry is None:
            return None
        if entry.skip:  # time, and a crash at a later step, depend on the question; an import depends on the packages
            again = entry.skip.startswith((_OUT_OF_TIME, _CRASHES)) or entry.lock != self._packages
            return None if again else Skip(entry.skip)
        try:
            trace = Trace(self._journal.trace_path(entry))
            enough = len(trace.steps) >= steps or (not full and self._differs(trace))
        except ReproError:  # damaged: replay it
            return None
        return trace if enough else None

    def _differs(self, trace: Trace) -> bool:
        return self.baseline is not None and compare(self.baseline, trace, self.case.compare).divergence is not None

    def _replay(self, commit: str, tree: str, ask: _Question, cancel: threading.Event | None) -> Trace | Skip:
        began = time.monotonic()
        early = self.case.compare.mode == "bitwise" and not ask.full
        with scratch_folder(self._scratch, "probe") as scratch, self._worktrees.at(commit, tree) as place:
            folder = scratch / "trace"
            baseline = str(self.baseline.directory) if self.baseline and early else None
            job = Run(ask.steps, place_of(self._rollouts), trace=str(folder), baseline=baseline, dump=ask.dump)
            reason = ""
            try:
                launch(self.case, place, [job], scratch / "log", cancel=cancel)
            except ChildFailure as failure:
                reason = _reason(failure)
            trace = self._finished(folder)
            if reason and trace and (ask.partial or self._differs(trace)):
                reason = ""  # it crashed only after its numbers had moved
            made = len(trace.steps) if trace else 0
            seconds = round(time.monotonic() - began, 3)
            kept = self._keep(ask, commit, reason, made, seconds, folder)
        with self._lock:
            self.cost.probes += 1
            self.cost.steps += made
            self.cost.seconds += seconds
        return Skip(reason) if reason else Trace(kept)

    def _keep(self, ask: _Question, commit: str, reason: str, made: int, seconds: float, folder: Path) -> Path:
        """Journal a finished probe and return where its trace lies from now on."""
        name = "" if reason else f"{ask.key}-{ask.run}-{uuid.uuid4().hex[:8]}"
        entry = Entry(ask.key, ask.run, commit, reason, made, seconds, self._packages, name)
        if ask.dump:  # whole tensors: for this bisect only
            return folder.rename(self._scratch / f"dumped-{name}") if name else folder
        with self._lock:
            self._journal.add(entry, None if reason else folder)
        return self._journal.trace_path(entry)

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
        """Remove the worktrees and what is not journalled."""
        self._exit.close()


def _reason(failure: ChildFailure) -> str:
    """Why a commit is skipped. Equal causes give equal text: the search presumes by it."""
    what = {
        "import": "does not import",
        "contract": "offers another contract",
        "build": "does not build the trainer",
        "start": "crashes before its first update",
        "step": f"{_CRASHES} {failure.step}",
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
