"""Two commits of one case, replayed side by side on this machine: do the numbers agree, and if not, by how much?"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any, Literal

from repro.report.plot_data import PlotData, plot_data_of
from repro.text import count
from repro_bisect.axes.axis import PointInfo, short
from repro_bisect.axes.commits import Commits, History, merge_bases, refuse_cut_off, resolve, typed
from repro_bisect.driver.circumstances import made_together, not_installed, refuse_changed_world, refuse_explained
from repro_bisect.driver.commits import bisect_range
from repro_bisect.driver.drift import Drift, drift
from repro_bisect.driver.result import BisectResult, Culprit
from repro_bisect.driver.session import Options, fetched_rollouts, session
from repro_bisect.predicates.predicates import Bitwise
from repro_bisect.probe.answers import Answer, unlike_before, unusable
from repro_bisect.probe.progress import Watch
from repro_bisect.probe.request import Request
from repro_bisect.probe.scheduler import Scheduler
from repro_golden.base.canonical import mapping_of
from repro_golden.base.errors import MachineFailureError, NotVerifiableError, ReproError
from repro_golden.base.machine.usage import Usage, spent_of
from repro_golden.case.file import Bound, Case, Compare
from repro_golden.compare.coverage import only_bounds, read_of
from repro_golden.compare.endings import failed_since
from repro_golden.compare.mismatch.bounds import breaches
from repro_golden.compare.mismatch.change import MismatchChange, mismatch_change
from repro_golden.compare.traces import (
    NO_AGREEMENT,
    Divergence,
    every_violation,
    first_difference,
    named_alike,
    on_purpose,
)
from repro_golden.repository.checkout import Checkout
from repro_golden.store.rollouts import sampled_by
from repro_golden.subjects import identity_of
from repro_golden.trace import NotFinite, Trace

__all__ = ["Compared", "PairResult", "PairVerdict", "compare_commits", "compare_traces", "now"]

PairVerdict = Literal["identical", "within", "moved", "flaky", "unverifiable"]

_REPLAY = 2
"""Number of the replays that dump tensors."""


def now() -> str:
    """The time in UTC, to the second, as ISO 8601."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


@dataclass(frozen=True)
class Compared:
    """How the numbers of `b` compare with those of `a`.

    Attributes:
        verdict: ``identical`` bits; ``within`` the case's bounds; ``moved``; or ``flaky`` (`b` does not reproduce
            itself).
        drift: Sizes over all common steps.
        violations: Where metrics left the case's bounds, in order; or else what of `b` alone is not finite first.
        plot_data: What plots show; None where all is equal.
        flaky: How two replays of `b` differ.
        mismatch: Between trainer and rollout engine on both sides; None where all is equal or the columns are not
            shown.
        nonfinite: Where the verdict is no other, what of both is NaN or infinite first.
    """

    verdict: Literal["identical", "within", "moved", "flaky"]
    drift: Drift
    violations: Sequence[Divergence] = ()
    plot_data: PlotData | None = None
    flaky: str = ""
    mismatch: MismatchChange | None = None
    nonfinite: NotFinite | None = None

    @property
    def first(self) -> Divergence | None:
        """The first violation where bounds count; else the first difference."""
        return self.violations[0] if self.violations else self.drift.divergence

    def to_mapping(self) -> dict[str, Any]:
        """JSON types."""
        return mapping_of(self, "plot_data", picture=self.plot_data)


def compare_traces(a: Trace, b: Trace, rule: Compare, *, dumped: tuple[Trace, Trace] | None = None) -> Compared:
    """How `b` compares with the baseline `a`.

    Args:
        a: The baseline.
        b: The other one.
        rule: What counts as equal.
        dumped: Further replays of both that hold the first signal that differs whole, for its exact size.

    Raises:
        ReproError: they cannot be compared, or agree, but the other one's program failed after that.
    """
    compared = _compared(a, b, rule, dumped)
    if compared.verdict == "moved":
        return compared
    if why := failed_since(a, b):
        raise ReproError(f"what was trained agrees, but {why}, and the baseline's did not")
    bad = b.first_nonfinite()
    if bad and a.first_nonfinite() is None:
        left = Divergence(bad.step, bad.phase or "loss", bad.name, "nonfinite", "finite in BASE, not in HEAD")
        return replace(compared, verdict="moved", violations=[left])
    return replace(compared, nonfinite=bad)


def _compared(a: Trace, b: Trace, rule: Compare, dumped: tuple[Trace, Trace] | None) -> Compared:
    strict = rule.strict
    left: list[Divergence] = []
    if rule.mode == "bounds":  # a number that is only printed moves no bit
        left = [*every_violation(a, named_alike(a, b, strict=strict), rule.bounds)]
    drifted = drift(a, b, strict=strict, left=left)
    if drifted.divergence is None and not left:
        return Compared("moved" if drifted.ended else "identical", drifted)
    if dumped:
        drifted = replace(drifted, divergence=first_difference(*dumped, strict=strict))
    if rule.mode == "bounds":
        drifted = replace(drifted, looked=only_bounds(rule.bounds))
    fine = rule.mode == "bounds" and not left and not drifted.ended
    plot_data, mismatch = plot_data_of(a, b, dumped, strict=strict), mismatch_change(a, b)
    return Compared("within" if fine else "moved", drifted, left, plot_data, mismatch=mismatch)


@dataclass(frozen=True)
class PairResult:
    """What replaying two commits of a case found.

    Attributes:
        case: The case's name.
        base: The baseline's commit: where HEAD's branch left it.
        head: The other one.
        verdict: As in `Compared`, or ``unverifiable``.
        reason: Why it is not verifiable, or what spared the replays; else empty.
        compared: The sizes; None where nothing was replayed.
        bounds: The case's own, by metric.
        spent: What both replays took, ``base`` and ``head``; None where a trace does not say.
        commits: How many commits of the range may matter.
        culprits: The commits that moved the numbers, as far as they are known.
        bisect: The search that named them; None where there was none.
        unnamed: Why a search that was asked for named none.
        notes: What a reader should know beside that.
        machine: Where.
        at: When, in UTC.
        seconds: Wall time.
    """

    case: str
    base: PointInfo
    head: PointInfo
    verdict: PairVerdict
    reason: str
    compared: Compared | None
    bounds: Mapping[str, Bound]
    spent: Mapping[str, Usage | None]
    commits: int
    culprits: Sequence[Culprit]
    bisect: BisectResult | None
    unnamed: str
    notes: Sequence[str]
    machine: str
    at: str
    seconds: float

    @property
    def agrees(self) -> bool:
        """Whether the numbers are what the case allows."""
        return self.verdict in ("identical", "within")

    @property
    def other_length(self) -> str:
        """Which side makes more steps than the other, if one does; else ''."""
        if self.compared is None or not self.compared.drift.ended:
            return ""
        steps = count(self.compared.drift.steps, "step")
        if "baseline" in self.compared.drift.ended:
            return f"HEAD goes on after {steps}, where BASE ends"
        return f"HEAD ends after {steps}, before BASE does"

    @property
    def by_length_alone(self) -> bool:
        """Whether all that moved is how many steps are made: nothing else is beyond what the case allows."""
        compared = self.compared
        if compared is None or self.verdict != "moved" or compared.violations:
            return False
        return compared.drift.divergence is None or bool(self.bounds)

    def to_mapping(self) -> dict[str, Any]:
        """JSON types."""
        return mapping_of(self, bounds={name: bound.model_dump() for name, bound in self.bounds.items()})


def compare_commits(
    checkout: Checkout, case: Case, base: str, head: str, watch: Watch, options: Options, *, name: bool = False
) -> PairResult:
    """Replay a case on two commits and compare. A base that cannot be replayed makes the answer ``unverifiable``.

    Args:
        checkout: The repository; nothing in it changes.
        case: The case.
        base: Revision of the baseline; where it is no ancestor of `head`, the commit at which they parted serves.
        head: Revision of the other side.
        watch: Called with every line of progress.
        options: How to replay.
        name: Whether to search for every commit that moved the numbers, and to explain each.

    Raises:
        NotVerifiableError: the rollouts cannot be fetched here.
        ReproError: a revision or the rollouts cannot be used, or `head` cannot be replayed.
        MachineFailureError: the machine failed; the same command resumes.
    """
    pair = _Pair(checkout, case, base, head, watch, options)
    result = pair.result()
    return pair.named(result) if name and result.verdict == "moved" else result


@dataclass
class _Pair:
    """One question, as far as it is answered."""

    checkout: Checkout
    case: Case
    base: str
    head: str
    watch: Watch
    options: Options
    notes: list[str] = field(default_factory=list)
    history: Commits | None = None
    began: float = field(default_factory=time.monotonic)

    def result(self) -> PairResult:
        """The comparison, without names."""
        case, checkout = self.case, self.checkout
        self.head, good = resolve(checkout, self.head), resolve(checkout, self.base)
        bases = merge_bases(checkout, good, self.head)
        refuse_cut_off(checkout, good, self.head, *(f"^{base}" for base in bases))
        if not bases:
            raise ReproError(f"{self.base} and {short(self.head)} have no commit in common: give a base that they have")
        fork, *others = bases
        if fork not in (good, self.head):
            self.notes.append(f"compared with {short(fork)}, where the branch left {self.base} ({short(good)})")
        if others:
            also = ", ".join(map(short, others))
            self.notes.append(
                f"{self.base} and the branch were merged into each other: {also} is a newest commit of both too, and "
                f"what {short(fork)} lacks of it counts as the branch's; give a base that holds both"
            )
        self.base = fork
        paths = checkout.paths(case, self.options.paths)
        if not case.subject.path:
            raise ReproError(f"the subject of {case.name} is an installed module, which no commit changes")
        if fork == self.head:
            self.history = Commits(checkout, fork, {good: [fork]} if good != fork else {}, paths)
            self.history.require(self.options.paths or [case.subject.path])
            if self.history.tree(good) == self.history.tree(fork):
                return self._result("identical", "it adds no commit to its base")
            swapped = typed(checkout, fork, good)
            return self._result(
                "unverifiable", f"nothing was compared: it lies behind its base; {swapped} compares them"
            )
        history = self.history = History(checkout, f"{fork}..{self.head}", paths)
        history.require(self.options.paths or [case.subject.path])
        if by := sampled_by(fetched_rollouts(checkout, case)):
            self.notes.append(f"its rollouts are by {by}")
        if history.tree(fork) == history.tree(self.head):
            why = f"it changes nothing in {', '.join(paths)}, the code of {case.name}"
            return self._result("identical", why)
        predicate = Bitwise(strict=case.compare.strict)
        with session(checkout, case, history, predicate, self.watch, self.options, golden_first=True) as (scheduler, _):
            try:
                return self._replayed(scheduler)
            except NotVerifiableError as error:
                return self._result("unverifiable", str(error))

    def named(self, result: PairResult) -> PairResult:
        """The same with every commit that moved the numbers, searched for and explained."""
        assert self.history is not None
        if result.by_length_alone:
            why = "" if result.culprits else "a search compares the steps that both sides make, which agree"
            return replace(result, unnamed=why)
        options = replace(self.options, every=True, explain=True)
        try:
            bisected = bisect_range(self.checkout, self.case, self.history, self.watch, options)
        except MachineFailureError:
            raise
        except ReproError as error:  # the numbers moved all the same
            return replace(result, unnamed=str(error), seconds=time.monotonic() - self.began)
        seconds = time.monotonic() - self.began
        return replace(result, culprits=bisected.culprits, bisect=bisected, unnamed=bisected.unnamed, seconds=seconds)

    def _replayed(self, scheduler: Scheduler) -> PairResult:
        history, steps = scheduler.history, self.case.steps
        self.notes += scheduler.remarks
        scheduler.say(f"replaying {self.case.name} on {short(history.good)} and {short(history.bad)}")
        requests = [  # the first two side by side, as fair costs are
            Request(history.good, steps, stage="ends", full=True),
            # what HEAD made before it crashed may tell more than that it did; of BASE a part is no baseline
            Request(history.bad, steps, stage="ends", full=True, partial=True),
            Request(history.good, steps, stage="ends", full=True, run=1),
        ]
        first, other, again = scheduler.ask(*requests)
        for answer in (first, again):
            if not isinstance(answer, Trace):
                return self._result("unverifiable", unusable("BASE", answer).partition(";")[0])
        if not isinstance(other, Trace):
            raise ReproError(unusable("HEAD", other).partition(";")[0])
        assert isinstance(first, Trace)
        assert isinstance(again, Trace)
        if len(first.steps) != len(again.steps):
            lengths = f"{len(first.steps)} and {len(again.steps)} steps"
            return self._result("unverifiable", f"BASE does not reproduce itself: two replays make {lengths}")
        noise = first_difference(first, again)
        if (noise or self.case.compare.mode == "bounds") and (why := self._beyond(first, again)):
            refuse_explained(scheduler, (requests[0], first), (requests[2], again))
            noisy = (
                "BASE does not reproduce itself: two replays differ at" if noise else "BASE leaves its own bounds at"
            )
            return self._result("unverifiable", f"{noisy} {why}")
        compared = compare_traces(first, other, self.case.compare)
        if compared.verdict in ("identical", "within") and compared.nonfinite:
            bad = compared.nonfinite
            return self._result("unverifiable", f"{NO_AGREEMENT}: first {bad}{on_purpose(bad)}")
        self.notes += scheduler.tell_length("BASE", first)
        if compared.verdict in ("identical", "within"):
            compared = self._twice(scheduler, other, compared)
        if noise:
            self._bounds_alone(noise)
        elif compared.verdict != "identical":
            compared, unlike = self._whole(scheduler, first, other, compared)
            if unlike:
                return self._result("unverifiable", f"not reproducible here: {unlike}")
        if broken := breaches(self.case.mismatch, other):
            more = f" ({len(broken) - 1} more)" if len(broken) > 1 else ""
            self.notes.append(f"HEAD breaks the case's [mismatch] bounds at {broken[0]}{more}")
        rest = scheduler.earlier.items() - compared.drift.looked.earlier.items()
        self.notes += [text for text in [read_of(dict(sorted(rest)))] if text]
        return self._told(scheduler, first, other, compared)

    def _told(self, scheduler: Scheduler, first: Trace, other: Trace, compared: Compared) -> PairResult:
        """The comparison, with its price.

        Raises:
            NotVerifiableError: numbers moved which BASE does not have any more.
        """
        history = scheduler.history
        base, head = (
            [Request(point, self.case.steps, full=True, partial=True, run=run) for run in (0, 1, _REPLAY)]
            for point in (history.good, history.bad)
        )
        if compared.verdict == "moved":
            refuse_changed_world(scheduler, [("BASE", base, first), ("HEAD", head, other)])
        usage = {}
        if made_together(scheduler, base[:1], head[:1]):  # times of other days, beside other work, are no price
            usage = {"base": spent_of(first.end), "head": spent_of(other.end)}
        culprits = []
        if compared.verdict == "moved" and len(history.parents) == 1:
            culprits = [Culprit(history.info(history.bad), compared.first, None)]
        return self._result(compared.verdict, "", compared, usage, culprits)

    def _whole(self, scheduler: Scheduler, a: Trace, b: Trace, compared: Compared) -> tuple[Compared, str]:
        """Both once more up to the first signal that differs, which is kept whole; whether each is itself again.

        Returns:
            How they compare then, and how BASE's third replay is another than its first two, '' where it is not.
        """
        differs = compared.drift.divergence
        if differs is None:
            return compared, ""
        scheduler.say(f"they differ at {differs}; measuring it whole")
        steps = differs.step - a.header.first_step + 1
        whole = Request(
            scheduler.history.good, steps, stage="confirmation", run=_REPLAY, partial=True, dump=differs.signals
        )
        before, after = scheduler.ask(whole, replace(whole, point=scheduler.history.bad))
        third = "a third replay of BASE"
        if unlike := unlike_before(a, before, steps, third, f"{third} differs from the first two"):
            noise = first_difference(a, before) if isinstance(before, Trace) else None
            if noise is None or self._beyond(a, before):
                return compared, unlike
            self._bounds_alone(noise)
            return compared, ""
        assert isinstance(before, Trace)
        if flaky := unlike_before(b, after, steps, "a second replay of HEAD", "two replays of HEAD differ"):
            return (replace(compared, verdict="flaky", flaky=flaky) if compared.verdict == "moved" else compared), ""
        assert isinstance(after, Trace)
        return compare_traces(a, b, self.case.compare, dumped=(before, after)), ""

    def _twice(self, scheduler: Scheduler, first: Trace, compared: Compared) -> Compared:
        """What agrees, unless HEAD does not reproduce itself: then it may have agreed by chance."""
        (again,) = scheduler.ask(Request(scheduler.history.bad, self.case.steps, stage="ends", full=True, run=1))
        how = unlike_before(first, again, self.case.steps, "a second replay of HEAD", "two replays of HEAD differ")
        whole = isinstance(again, Trace) and len(again.steps) >= len(first.steps)
        commits = (scheduler.history.commit(end) for end in (scheduler.history.good, scheduler.history.bad))
        if not how and (pins := not_installed(self.case, scheduler.prober.git, *commits)):
            self.notes.append(pins)
        if not how or (whole and self.case.compare.mode == "bounds" and not self._beyond(first, again)):
            return compared
        return replace(compared, verdict="flaky", flaky=how)

    def _beyond(self, first: Trace, again: Answer) -> str:
        """What of two replays that differ the case does not allow; '' where its bounds hold all the same."""
        assert isinstance(again, Trace)
        if self.case.compare.mode == "bitwise":
            return str(first_difference(first, again))
        return next(map(str, every_violation(first, again, self.case.compare.bounds)), "")

    def _bounds_alone(self, noise: Divergence) -> None:
        self.notes.append(f"BASE does not reproduce itself (two replays differ at {noise}): bounds alone are judged")

    def _result(
        self,
        verdict: PairVerdict,
        reason: str,
        compared: Compared | None = None,
        usage: Mapping[str, Usage | None] | None = None,
        culprits: Sequence[Culprit] = (),
    ) -> PairResult:
        assert self.history is not None
        return PairResult(
            case=self.case.name,
            base=self.history.info(self.base),
            head=self.history.info(self.head),
            verdict=verdict,
            reason=reason,
            compared=compared,
            bounds=self.case.compare.bounds,
            spent=usage or {"base": None, "head": None},
            commits=len(self.history.parents),
            culprits=culprits,
            bisect=None,
            unnamed="",
            notes=list(self.notes),
            machine=identity_of(self.case, self.checkout.root).machine,
            at=now(),
            seconds=time.monotonic() - self.began,
        )
