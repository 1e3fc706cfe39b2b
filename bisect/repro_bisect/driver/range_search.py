"""The search of one range against one baseline: probes under way, verdicts as they come, moot ones cancelled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from repro_bisect.axes.axis import short
from repro_bisect.driver.circumstances import lost_of, refuse_disturbed
from repro_bisect.predicates.predicates import Bitwise
from repro_bisect.probe.answers import UNTESTABLE, UNTESTABLE_CODE, Answer, Code, Skip, is_told, judge
from repro_bisect.probe.one_step import Shortcut
from repro_bisect.probe.request import Request
from repro_bisect.probe.scheduler import PendingProbe, Scheduler
from repro_bisect.search.first_bad import Ambiguous, ContradictionError, FirstBad, Search, Verdict
from repro_golden.compare.renames import aligned
from repro_golden.compare.step_difference import alone, unlike
from repro_golden.compare.traces import Divergence
from repro_golden.trace import Row, Trace
from repro_golden.trace.columns_written import column_of
from repro_golden.trace.families import group

__all__ = ["RangeSearch", "Tested", "verdict_of_code"]


_TRIES = 3
"""Failures that leave suspects that are run once more, in a search."""


@dataclass(frozen=True)
class Tested:
    """What came of testing a commit.

    Attributes:
        answer: Its trace, exit code, or why it is skipped.
        baseline: The trace it is to be judged against; None for exit codes.
        bound: Steps that it must have made to be GOOD.
        one_step: Whether it is one step from a saved state.
    """

    answer: Answer
    baseline: Trace | None
    bound: int
    one_step: bool = False

    @property
    def diagnosis(self) -> str:
        """What is known of why it is skipped; '' where nothing is."""
        return self.answer.diagnosis if isinstance(self.answer, Skip) else ""


class RangeSearch:
    """One search.

    Attributes:
        tested: What came of every commit that was tested, or shares its code with one that was.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        search: Search[str],
        baseline: Trace | None,
        bound: int,
        shortcut: Shortcut | None,
        end: Divergence | None = None,
    ) -> None:
        self.scheduler, self.search = scheduler, search
        self.baseline, self.bound, self.shortcut = baseline, bound, shortcut
        self.tested: dict[str, Tested] = {}
        self._again, self._tries = set[str](), 0
        bitwise = isinstance(scheduler.predicate, Bitwise)
        self._sought = _sought(baseline, end) if bitwise and baseline and end else None

    def run(self) -> FirstBad[str] | Ambiguous[str]:
        """Search to the end."""
        self._take_what_is_known()
        self.scheduler.drive(self._plan, self._timed, lambda: self.search)
        while doubtful := self._doubtful():
            self._try_again(doubtful[0])
            self.scheduler.drive(self._plan, self._timed, lambda: self.search)
        assert self.search.answer is not None
        return self.search.answer

    def _plan(self, room: int) -> bool:
        """End what is moot, and start what tells most; False where the search has its answer."""
        if self.search.answer is not None:
            return False
        scheduler, pending = self.scheduler, self.scheduler.pending_probes.values()
        moot = self.search.moot(probe.commit for probe in pending)
        scheduler.cancel(probe for probe in pending if probe.commit in moot)
        for commit in self.search.next(room, under_way=[probe.commit for probe in pending]):
            if scheduler.history.tree(commit) not in {probe.tree for probe in pending}:  # twins share a probe
                scheduler.start(commit, self.test)
        return True

    def _doubtful(self) -> list[str]:
        """Commits whose failure leaves suspects and may have been chance, as none of its kind was tried again."""
        if not isinstance(self.search.answer, Ambiguous) or self._tries >= _TRIES:
            return []
        believes = self.scheduler.prober.believes
        reasons = {commit: self._failure(commit) for commit in self.search.deciding if commit not in self._again}
        return [commit for commit, why in reasons.items() if why and not is_told(why) and not believes(why)]

    def _failure(self, commit: str) -> str:
        """Why the run of a commit says nothing of it; '' where it ran, or cannot be run."""
        history, tested = self.scheduler.history, self.tested.get(commit)
        if tested is None or history.tree(commit) is None or history.skipped(commit):
            return ""
        if tested.answer == Code(UNTESTABLE_CODE):
            return UNTESTABLE
        return tested.answer.reason if isinstance(tested.answer, Skip) else ""

    def _try_again(self, commit: str) -> None:
        """Run once more, alone, what failed, this time or in an earlier search."""
        why, prober = self._failure(commit), self.scheduler.prober
        self._tries += 1
        self.scheduler.say(f"{short(commit)} decides ({why}): running it again")
        (answer,) = self.scheduler.ask(prober.doubt(Request(commit, self.bound, self.baseline)))
        self.take(commit, Tested(answer, self.baseline, self.bound))
        self._again.update(c for c, tested in self.tested.items() if tested is self.tested[commit])
        prober.tried_again(commit, why, self._failure(commit))

    def _timed(self, pending: PendingProbe, tested: Tested) -> None:
        self.scheduler.rounds.append(pending.seconds)
        self.take(pending.commit, tested)

    def _take_what_is_known(self) -> None:
        """What the journal knows is free, so it comes first."""
        state = self.shortcut.state if self.shortcut else None
        for commit in self.search.dag:
            if self.search.answer is None and commit not in self.search.verdicts:
                straight = self.scheduler.known(Request(commit, self.bound, self.baseline))
                known = Tested(straight, self.baseline, self.bound) if straight is not None else None
                if known is None and state and (answer := self.scheduler.known(Request(commit, 1, start=state))):
                    known = self._one_step(commit, answer)
                if known is not None:
                    self.scheduler.prober.reuse()
                    self.take(commit, known)

    def test(self, pending: PendingProbe) -> Tested:
        """Probe a commit: one step from the saved state where that serves, else from step 0."""
        commit = pending.commit
        if self.shortcut:
            from_state = pending.probe(Request(commit, 1, start=self.shortcut.state))
            if (tested := self._one_step(commit, from_state)) is not None:
                return tested
        answer = pending.probe(Request(commit, self.bound, self.baseline))
        return Tested(answer, self.baseline, self.bound)

    def _one_step(self, commit: str, answer: Answer) -> Tested | None:
        """What a one-step probe says; None where it says nothing of the commit."""
        assert self.shortcut is not None
        if isinstance(answer, Trace) and not self.shortcut.ready(answer):
            return None
        if lost_of(self.scheduler, commit, self.shortcut.baseline, answer):  # a resuming line is another line
            return None
        if isinstance(answer, Skip) and answer.unready:
            return None
        return Tested(answer, self.shortcut.baseline, 1, one_step=True)

    def divergence(self, tested: Tested) -> Divergence | Skip | None:
        """What makes a tested commit BAD, or why nothing can be said of it."""
        assert isinstance(tested.answer, Trace)
        assert tested.baseline is not None
        return judge(self.scheduler.predicate, tested.baseline, tested.answer, tested.bound)

    def take(self, commit: str, tested: Tested) -> None:
        """Judge a commit, and those with the same code."""
        verdict, detail = self.verdict(commit, tested)
        twins = self._twins(commit)
        for twin in twins:
            self.tested[twin] = tested
            try:
                self.search = self.search.with_verdict(twin, verdict, detail if verdict is Verdict.SKIP else "")
            except ContradictionError:
                self._refuse_disturbed(commit, tested)
                # the numbers moved and came back: there is a culprit below all the same
                self.scheduler.say(
                    f"{verdict.value} {short(twin)} contradicts what is known: the numbers moved more than once"
                )
            self.scheduler.record(twin, verdict, detail)
        self.scheduler.say(f"{verdict.value:<4} {short(commit)} {detail}", self.search)
        self.scheduler.know(twins, tested.diagnosis)

    def _refuse_disturbed(self, commit: str, tested: Tested) -> None:
        state = self.shortcut.state if tested.one_step and self.shortcut else None
        asked = Request(commit, 1, start=state) if state else Request(commit, tested.bound, tested.baseline)
        refuse_disturbed(self.scheduler, (asked, tested.answer))

    def verdict(self, commit: str, tested: Tested) -> tuple[Verdict, str]:
        """What a tested commit is, and why."""
        if lost := lost_of(self.scheduler, commit, tested.baseline, tested.answer):
            return Verdict.SKIP, lost
        if isinstance(tested.answer, Skip):
            return Verdict.SKIP, tested.answer.reason
        if isinstance(tested.answer, Code):
            return verdict_of_code(tested.answer.code)
        outcome = self.divergence(tested)
        if isinstance(outcome, Skip):
            return Verdict.SKIP, outcome.reason
        if outcome:
            return Verdict.BAD, str(outcome)
        if lacking := self._lacking(tested):
            return Verdict.SKIP, f"it has no {lacking.partition('/')[2] or lacking}, in which BAD differs"
        return Verdict.GOOD, "the step agrees" if tested.bound == 1 else f"{tested.bound} steps agree"

    def _lacking(self, tested: Tested) -> str:
        """The object in which the bad end differs, where a commit agrees for want of it; "" elsewhere."""
        predicate, baseline = self.scheduler.predicate, tested.baseline
        if self._sought is None or baseline is None or not isinstance(predicate, Bitwise):
            return ""
        assert isinstance(tested.answer, Trace)
        step, objects = self._sought
        alignment = aligned(baseline, tested.answer, strict=predicate.strict)
        if not alignment.alone.keys() & objects:
            return ""
        # in some other step it may have been there
        rows = _rows_of(baseline, step), _rows_of(alignment.trace, step)
        lacking = alone(*rows, unlike(baseline, alignment.trace))
        return min((name for name in objects if lacking.get(name) == "a"), default="")

    def _twins(self, commit: str) -> list[str]:
        """The commit and the suspects with the same code: they share one probe."""
        tree = self.scheduler.history.tree(commit)
        known, suspects = self.search.verdicts, self.search.suspects
        open_ = (c for c in self.search.dag if known.get(c, Verdict.SKIP) is Verdict.SKIP)
        others = (c for c in open_ if c != commit and c in suspects)
        return [commit, *(c for c in others if self.scheduler.history.tree(c) == tree)]


def _sought(baseline: Trace, end: Divergence) -> tuple[int, set[str]]:
    """The step in which the bad end differs, and the objects that its signal is of, which a commit may lack."""
    rows = [row for row in _rows_of(baseline, end.step) if (row.phase, row.name) == (end.phase, end.signal)]
    return end.step, {name for row in rows for name in (group(row.phase, row.name), column_of(row)) if name}


def _rows_of(trace: Trace, step: int) -> Sequence[Row]:
    """The rows of a step by its number; none where it has no such step."""
    return next((trace.rows(index) for index, record in enumerate(trace.steps) if record.step == step), [])


def verdict_of_code(code: int) -> tuple[Verdict, str]:
    """As `git bisect run` reads an exit code below 128."""
    if code == 0:
        return Verdict.GOOD, "exit 0"
    if code == UNTESTABLE_CODE:
        return Verdict.SKIP, UNTESTABLE
    return Verdict.BAD, f"exit {code}"
