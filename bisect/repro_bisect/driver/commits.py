"""Bisecting a range: both ends, the search, and the confirmation of what it found."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from repro_bisect.axes.axis import Axis, short
from repro_bisect.driver.confirm import Confirmed, Interval, confirm, explains_end
from repro_bisect.driver.endpoints import Endpoints
from repro_bisect.driver.noisy import SURE, NoisyAnswer, NoisySearch
from repro_bisect.driver.range_search import RangeSearch
from repro_bisect.driver.result import BisectResult, Culprit, Outcome
from repro_bisect.driver.searching import Searching
from repro_bisect.driver.session import Options, session, undisturbed
from repro_bisect.predicates.predicates import Bitwise, Exit, first_violation, predicate_of
from repro_bisect.probe.answers import UNTESTABLE, Skip, judge, trace_of, unusable
from repro_bisect.probe.progress import Watch
from repro_bisect.probe.request import Request
from repro_bisect.probe.scheduler import Scheduler
from repro_bisect.search.detours import Straight, straightened
from repro_bisect.search.first_bad import Ambiguous, FirstBad, Search, Verdict
from repro_golden.base.errors import MachineFailureError, NotVerifiableError, ReproError
from repro_golden.case.file import Case
from repro_golden.compare.coverage import kind_of
from repro_golden.compare.renames import aligned
from repro_golden.compare.traces import Divergence
from repro_golden.compare.untouched import Reach, reach
from repro_golden.repository.checkout import Checkout
from repro_golden.trace import Trace

__all__ = ["Bisection", "bisect_range"]

_NAMED = 5
"""Commits that a line names."""
_PASSED = 4
"""Commits that a search goes past because what they changed is none of the training: each is a search of its own."""


def bisect_range(checkout: Checkout, case: Case, axis: Axis, watch: Watch, options: Options) -> BisectResult:
    """Find the point of an axis that moved the numbers of a case.

    Args:
        checkout: The repository; nothing in it changes.
        case: The case.
        axis: What to search; `commits_of` and `repro_bisect.axes.sets` make one.
        watch: Called with every line of progress, and about once a second.
        options: How to search.

    Raises:
        NotVerifiableError: GOOD does not reproduce itself, and cannot be told from BAD by repetition.
        ReproError: the range, the rollouts or an end cannot be used.
        MachineFailureError: the machine failed; the same command resumes.
    """
    predicate = predicate_of(options.when, case.compare, checkout.root)

    def search(options: Options) -> BisectResult:
        with session(checkout, case, axis, predicate, watch, options, golden_first=True) as (scheduler, golden):
            endpoints = Endpoints(
                scheduler, golden, checkout.state / "states", open_end=options.open_end, quick=options.quick
            )
            return Bisection(scheduler, endpoints, options).explained(checkout, explain=options.explain)

    return undisturbed(search, watch, options)


@dataclass(frozen=True)
class Suspects:
    """Commits that no test tells apart.

    Attributes:
        of: They.
        tested: The one of them that was tested and is BAD; empty where it is the range's end, or runs by exit codes.
        apart: Where its numbers leave the baseline's.
    """

    of: Ambiguous[str]
    tested: str = ""
    apart: Divergence | None = None

    @classmethod
    def of_search(cls, answer: Ambiguous[str], search: RangeSearch) -> Suspects:
        """What a search left."""
        for commit in sorted(answer.commits & search.tested.keys()):  # of several with one code always the same
            tested = search.tested[commit]
            if isinstance(tested.answer, Trace) and isinstance(apart := search.divergence(tested), Divergence):
                return cls(answer, commit, apart)
        return cls(answer)


class Left(NamedTuple):
    """What is left to search: what is next, and what comes after all that waits."""

    before: list[Interval]
    others: list[Interval]


class Bisection(Searching[BisectResult]):
    """One search of a range, from its ends to the confirmation."""

    result_type = BisectResult

    def __init__(self, scheduler: Scheduler, endpoints: Endpoints, options: Options) -> None:
        """Search the scheduler's axis."""
        super().__init__(scheduler, endpoints)
        self.options = options
        self.accepted: dict[str, str] = {}
        self._suspects: Suspects | None = None
        self._passed: list[Culprit] = []
        self._inside = False
        self._ways: dict[tuple[str, str, bool], Straight[str]] = {}

    def search(self) -> BisectResult:
        """Endpoints, search and confirmation."""
        interval = (
            self.endpoints.by_exit_code() if isinstance(self.predicate, Exit) else self.endpoints.by_trace(self._ahead)
        )
        if interval is None and not self.endpoints.noise:
            return self._result("agree", [])
        self._tell_detours()
        if self.endpoints.noise:
            return self._noisy(self.endpoints.noise)
        assert interval is not None
        return self._search_all(interval)

    def _tell_detours(self) -> None:
        """Tell which changes are not searched, because later commits have the code from before them again."""
        history, way = self.history, self._way(self.history.good, self.history.bad)
        left = [
            c for c, parents in history.parents.items()
            if c not in way.dag and all(history.tree(c) != history.tree(p) for p in parents)
        ][::-1]  # fmt: skip
        if left:
            names = ", ".join([*map(short, left[:_NAMED]), *["..."] * (len(left) > _NAMED)])
            self.endpoints.tell(f"not searched, for a later commit has the code from before again: {names}")

    def _ahead(self, slots: int) -> Sequence[str]:
        """Where the search will begin, unless its probes start from a state, which only both ends together give."""
        if isinstance(self.predicate, Bitwise) and self.scheduler.case.subject.saves_state:
            return []
        dag = self._way(self.history.good, self.history.bad).dag
        known = {self.history.tree(end) for end in (self.history.good, self.history.bad)}
        chosen = Search(dag, self.history.bad, [self.history.good]).next(slots)
        return [point for point in chosen if self.history.tree(point) not in known]

    def _noisy(self, noise: str, untried: frozenset[str] = frozenset()) -> BisectResult:
        """A search by what verdicts are worth that are noisy, or of which nothing but exit codes says they are not."""
        sure = 0.0
        if noise:
            self.scheduler.say(f"one replay proves nothing, for {noise}: weighing repeated replays")
        if isinstance(self.predicate, Exit):
            sure = SURE
        steps, confidence = self.scheduler.case.steps, self.options.confidence
        bad, alike = self.history.bad, isinstance(self.predicate, Exit)
        while True:
            way = self._way(self.history.good, bad, inside=self._inside)
            noisy = NoisySearch(
                self.scheduler, way, bad, self.endpoints.baseline, steps, noise, confidence, sure=sure, presumed=untried
            ).run()
            alike = alike and noisy.alike
            if isinstance(noisy, NoisyAnswer):
                break
            if noisy.beside:
                self._only_inside(f"{short(noisy.beside)}, from before GOOD, is not GOOD")
            else:
                self.scheduler.say(f"no one culprit explains that {short(noisy.earlier)} is BAD: searching up to it")
            bad, sure = noisy.earlier or self.history.bad, sure if noisy.beside else 0.0
        if bad == self.history.bad:
            self.endpoints.end = noisy.end
        known = noisy.rates if noisy.contradicted or not sure else None
        details: dict[str, Any] = {"posterior": noisy.posterior, "rates": known, "alike": alike and known is not None}
        details["tallies"] = noisy.tallies if known else None
        if isinstance(noisy.answer, Ambiguous):
            left = Ambiguous(noisy.answer.commits, untried & noisy.answer.commits)
            return self._result("ambiguous", [], ambiguous=left, **details)
        culprit = Culprit(self.history.info(noisy.answer.commit), noisy.divergence, None)
        if noise and not isinstance(self.predicate, Exit) and noisy.answer.commit != self.history.bad:
            self._untold(noisy.answer.commit, "verdicts are noisy; search from it on")
        return self._result("found", [culprit], **details)

    def _search_all(self, first: Interval) -> BisectResult:
        """One interval, and what is left when the baseline moves to a culprit: with ``--all``, or past one."""
        culprits: list[Culprit] = []
        waiting: deque[Interval] = deque([first])
        explains: bool | None = None
        while waiting:
            interval = waiting.popleft()
            try:
                answer, confirmed = self._search_one(interval)
            except ReproError as error:
                if not self._passed or isinstance(error, MachineFailureError):
                    raise
                return self._last_passed(str(error))
            if (ended := self._ended(answer, confirmed, culprits)) is not None:
                return ended
            if isinstance(answer, Suspects):
                behind = self._behind(interval, answer)
                if behind is None:
                    return self._ambiguous(culprits, answer)
                waiting += behind
                continue
            assert confirmed is not None
            if interval.bad == self.history.bad:
                explains = confirmed.explains
            self.endpoints.remarks += confirmed.remarks
            left = self._left(interval, confirmed, culprits) if self.options.every else self._past(interval, confirmed)
            if isinstance(left, Suspects):
                return self._ambiguous(culprits, left)
            if left is None:
                if confirmed.untold:
                    self._untold(confirmed.culprit.commit.commit, confirmed.untold)
                explains = confirmed.explains if interval.bad == self.history.bad else None
                return self._result("found", [confirmed.culprit], explains_bad=explains, earlier=confirmed.earlier)
            waiting.extendleft(left.before)
            waiting += left.others
        if not self.options.every:
            return self._last_passed("")
        newest_first = list(self.history.parents)
        culprits.sort(key=lambda c: newest_first.index(c.commit.commit), reverse=True)
        if self._suspects is not None:
            return self._ambiguous(culprits, self._suspects)
        return self._result("found", culprits, explains_bad=explains)

    def _ended(
        self, answer: FirstBad[str] | Suspects, confirmed: Confirmed | None, culprits: Sequence[Culprit]
    ) -> BisectResult | None:
        """The result where a search of an interval ends all: nothing more is asked, or one run proves nothing."""
        if self.options.quick and confirmed:
            return self._result("found", [confirmed.culprit], confirmed=False)
        if isinstance(self.predicate, Exit):
            return self._noisy(
                f"a second run of {short(confirmed.culprit.commit.commit)} or its parent says otherwise"
                if confirmed and confirmed.flaky
                else "",
                answer.of.presumed if isinstance(answer, Suspects) else frozenset(),
            )
        if confirmed is None or not confirmed.flaky:
            return None
        culprit = confirmed.culprit
        if not isinstance(self.predicate, Bitwise):
            return self._noisy(f"two replays of {short(culprit.commit.commit)} differ at {culprit.divergence}")
        return self._result("flaky", culprits, flaky=culprit)

    def _past(self, interval: Interval, confirmed: Confirmed) -> Left | Suspects | None:
        """What is left to search past a culprit; None where it is the answer.

        Behind one that was passed the baseline is no more GOOD: what a merge brought in is searched on its own side.
        """
        commit = confirmed.culprit.commit.commit
        if self._passes(interval, confirmed):
            if confirmed.earlier:
                before = short(confirmed.culprit.before)
                self.endpoints.tell(f"{before}, before {short(commit)}, differs from GOOD at {confirmed.earlier}")
            self._passed.append(confirmed.culprit)
            return Left([], self._after(interval, confirmed))
        brought = self._brought_in(interval, commit) if self._passed else None
        if brought is None:
            return None
        if isinstance(brought, Ambiguous):
            return Suspects(brought)
        self._tell_merge(commit, brought)
        return Left([], brought or self._after(interval, confirmed))

    def _last_passed(self, why: str) -> BisectResult:
        """The answer where nothing was found behind what was passed: the last of these."""
        last, self.accepted = self._passed.pop(), {}  # what follows was judged beside it, and not beside GOOD
        if why:
            self.endpoints.tell(f"what moved the training after {short(last.commit.commit)} is not known: {why}")
        return self._result("found", [last], explains_bad=False)

    def _passes(self, interval: Interval, confirmed: Confirmed) -> bool:
        """Whether BAD's numbers differ nearer to the training than a culprit's do: the search goes on past that."""
        before, after, last = confirmed.before, confirmed.after, confirmed.last
        if not isinstance(self.predicate, Bitwise) or confirmed.explains is not False or len(self._passed) == _PASSED:
            return False
        if before is None or after is None or last is None or interval.baseline is None:
            return False
        if len(before.steps) != len(after.steps) or all(kind_of(row) != "parameter" for row in before.rows(0)):
            return False
        far = reach(before, aligned(before, after).trace)
        if far >= reach(interval.baseline, aligned(interval.baseline, last).trace):
            return False
        kinds = "trained parameter, gradient or metric" if far is Reach.BESIDE else "trained parameter or gradient"
        self.scheduler.say(f"{short(confirmed.culprit.commit.commit)} moved no {kinds}, and BAD did: searching on")
        return True

    def _left(self, interval: Interval, confirmed: Confirmed, culprits: list[Culprit]) -> Left | Suspects:
        """Keep a culprit; what is left to search: in the merge that it is, before it, and after it."""
        left, commit = Left([], []), confirmed.culprit.commit.commit
        brought = self._brought_in(interval, commit)
        if isinstance(brought, Ambiguous):
            return Suspects(brought)
        if brought is not None:
            self._tell_merge(commit, brought)
            left.others.extend(brought)
        elif commit not in {c.commit.commit for c in culprits}:
            culprits.append(confirmed.culprit)
        if confirmed.earlier:
            parent = confirmed.culprit.before
            self.scheduler.say(f"{short(parent)} before it differs from GOOD at {confirmed.earlier}: searching it too")
            left.before.append(Interval(interval.good, parent, interval.baseline, confirmed.before))
        left.others.extend(self._after(interval, confirmed))
        return left

    def _tell_merge(self, commit: str, brought: Sequence[Interval]) -> None:
        what = "searching what it brought in" if brought else "it brought in what GOOD has"
        self.scheduler.say(f"{short(commit)} is a merge: {what}")

    def _ambiguous(self, culprits: Sequence[Culprit], suspects: Suspects) -> BisectResult:
        """Suspects that no test tells apart, and the culprits beside them; of two such groups the second is told."""
        first = self._suspects or suspects
        if first is not suspects:
            names = ", ".join(map(short, self._ordered(suspects.of.commits)))
            self.endpoints.remarks.append(f"one of {names} moved the numbers too, and no test tells which")
        searched = self.options.every and first is suspects
        behind = "" if searched or suspects.tested == self.history.bad else suspects.tested
        return self._result("ambiguous", culprits, ambiguous=first.of, behind=behind, apart=first.apart)

    def _behind(self, interval: Interval, suspects: Suspects) -> list[Interval] | None:
        """What is left to search after suspects of which the last was tested: from that on. None where that ends it."""
        if not self.options.every or self._suspects is not None:
            return None
        self._suspects, commit = suspects, suspects.tested
        if not commit or commit == interval.bad or interval.last is None:
            return []
        steps = self.scheduler.case.steps
        asked = [Request(c, steps, stage="confirmation", partial=True, full=True) for c in (commit, interval.bad)]
        answers = self.scheduler.ask(*asked)
        after, last = (trace_of(answer, name) for answer, name in zip(answers, (short(commit), "BAD"), strict=True))
        explains, why = explains_end(self.predicate, after, last)
        if explains is False:
            self.scheduler.say(f"the baseline moves to {short(commit)}, the last of those")
            return [Interval(commit, interval.bad, after, last)]
        if explains is None:
            self._untold(commit, why)
        return []

    def _after(self, interval: Interval, confirmed: Confirmed) -> list[Interval]:
        """What is left to search after a culprit; it is told where that is not known."""
        commit = confirmed.culprit.commit.commit
        if interval.bad == commit or confirmed.explains:
            return []
        if confirmed.explains is False:
            self.scheduler.say(f"the baseline moves to {short(commit)}")
            return [Interval(commit, interval.bad, confirmed.after, confirmed.last)]
        self._untold(commit, confirmed.untold)
        return []

    def _untold(self, commit: str, why: str) -> None:
        """Tell that nothing is known of what comes after a commit."""
        why = why or "its replay and BAD's cannot be compared to the last step"
        self.endpoints.tell(f"whether commits after {short(commit)} move the numbers is not known: {why}")

    def _search_one(self, interval: Interval) -> tuple[FirstBad[str] | Suspects, Confirmed | None]:
        end: Divergence | None = None
        if interval.baseline and interval.last:
            end = first_violation(self.predicate, interval.baseline, interval.last)
            assert end is not None, "an interval is searched because its ends differ"
            self.scheduler.say(f"GOOD and BAD differ at {end}")
        shortcut, inside = self.shortcut(interval, end), interval.good != self.history.good
        while True:  # after a culprit, only what contains it can be compared with it
            range_search = self.range_search(interval, self._start(interval, inside=inside), end, shortcut)
            answer = range_search.run()
            begins = {self.history.good, *(c.commit.commit for c in self._passed)}
            if interval.good in begins and interval.bad == self.history.bad:
                verdicts = {c: str(verdict) for c, verdict in range_search.search.verdicts.items()}
                self.accepted = {self.history.good: str(Verdict.GOOD)} | verdicts
            self.has_answer()
            if isinstance(answer, Ambiguous):
                return Suspects.of_search(answer, range_search), None
            if self.options.quick:
                tested = range_search.tested.get(answer.commit)
                seen = range_search.divergence(tested) if tested and isinstance(tested.answer, Trace) else end
                where = seen if isinstance(seen, Divergence) else end
                return answer, Confirmed(Culprit(self.history.info(answer.commit), where, None), None, None, None)
            one_answer = self.options.explain and not self.options.every
            confirmed = confirm(self.scheduler, range_search, answer.commit, interval, end, explain=one_answer)
            if confirmed is not None:
                if one_answer and end and not confirmed.flaky:  # who stops what follows has the answer
                    self.scheduler.say(f"confirmed: {short(answer.commit)} {self.history.info(answer.commit).subject}")
                if confirmed.recorded:
                    self.recorded[answer.commit] = confirmed.recorded
                return answer, confirmed
            commit = short(answer.commit)
            if shortcut:
                self.scheduler.say(f"full replays do not bear {commit} out: searching again with probes from step 0")
                shortcut = None
            elif not inside:
                self._only_inside(f"full replays do not bear {commit} out")
                inside = True
            else:
                raise NotVerifiableError(
                    f"{commit} and its parent are both BAD: the numbers moved and came back within the range; "
                    "search a shorter one"
                )

    def _only_inside(self, why: str) -> None:
        """Search only what contains GOOD: a branch from before GOOD cannot be compared with it."""
        self.scheduler.say(f"{why}: searching only what contains GOOD")
        self.endpoints.remarks.append("of commits that lack what GOOD has, none was searched")
        self._inside = True

    def _start(self, interval: Interval, *, inside: bool) -> Search[str]:
        """The search of an interval."""
        dag = self._way(interval.good, interval.bad, inside=inside).dag
        return Search(dag, interval.bad, [interval.good], presume=not self.options.try_skips)

    def _way(self, good: str, bad: str, *, inside: bool = False) -> Straight[str]:
        """What every search from `good` to `bad` goes along: all commits between, or only those that contain `good`."""
        if (good, bad, inside) not in self._ways:
            parents = self.history.parents
            if inside:
                after = self.history.descendants(good)
                parents = {c: [p for p in ps if p in after or p == good] for c, ps in parents.items() if c in after}
            self._ways[good, bad, inside] = straightened(parents, good, bad, self.history.tree)
        return self._ways[good, bad, inside]

    def _brought_in(self, interval: Interval, commit: str) -> list[Interval] | Ambiguous[str] | None:
        """What a merge brought to a baseline that is not GOOD: the sides to search, for the change is theirs.

        Returns:
            None where it brought nothing that moves the numbers, so that the change is its own. No side at all where
            what it brought is GOOD's own, which the baseline lacks. Suspects where a side cannot be judged by its tip.
        """
        history, baseline = self.history, self.endpoints.baseline
        if interval.good == history.good:
            return None
        inside, after_good = history.descendants(interval.good), history.descendants(history.good)
        lacks_good, brought, goods_own = interval.good not in after_good, list[Interval](), False
        untold = set[str]()
        for parent in history.parents.get(commit, ()):
            if parent in inside or parent == interval.good:
                continue
            goods_own = goods_own or (lacks_good and (parent not in history.parents or parent in after_good))
            if parent not in history.parents:
                continue
            (answer,) = self.scheduler.ask(Request(parent, self.scheduler.case.steps, full=True, run=2))
            assert baseline is not None, "exit codes are not searched for all"
            outcome: Divergence | Skip | None = Skip(unusable("it", answer).partition(";")[0])
            if isinstance(answer, Trace):
                outcome = judge(self.predicate, baseline, answer, self.scheduler.case.steps)
                brought += [Interval(history.good, parent, baseline, answer)] * isinstance(outcome, Divergence)
            if isinstance(outcome, Skip):
                self.scheduler.say(f"SKIP {short(parent)}, which {short(commit)} brought in: {outcome.reason}")
                side = {point for point in history.parents if parent in (point, *history.descendants(point))}
                untold |= side - inside
        if untold and not brought:
            return Ambiguous(frozenset({*untold, commit}))
        return brought if brought or goods_own else None

    def _result(
        self, outcome: Outcome, culprits: Sequence[Culprit], *, ambiguous: Ambiguous[str] | None = None, **more: Any
    ) -> BisectResult:
        history, tests = self.history, None
        if len(culprits) == 1 and outcome == "found" and not self._passed:  # git names what is passed
            commit = culprits[0].commit.commit
            if self._git_would_agree(commit):
                tests = history.git_tests(commit, self.scheduler.verdicts)
        return self.result(
            outcome,
            culprits,
            history.parents,
            self.accepted,
            suspects=self._ordered(ambiguous.commits) if ambiguous else [],
            untried=self._ordered(ambiguous.presumed) if ambiguous else [],
            git_probes=tests,
            git_seconds=self._git_seconds(tests),
            passed=self._passed,
            **more,
        )

    def _git_would_agree(self, culprit: str) -> bool:
        """Whether git, which leaves nothing out, would have met no verdict that the one culprit does not explain."""
        history, skips = self.history, self.scheduler.skips.values()
        if isinstance(self.predicate, Exit) and any(reason != UNTESTABLE for reason in skips):
            return False  # git takes the code of what could not be started for BAD
        dag, after = self._way(history.good, history.bad, inside=self._inside).dag, history.descendants(culprit)
        if culprit not in dag:
            return False
        index = dag.index[culprit]
        codes = {history.tree(c): bool(dag.ancestors[i] >> index & 1) for i, c in enumerate(dag)}
        codes[history.tree(history.good)] = False
        return all(codes.get(history.tree(c)) == (c == culprit or c in after) for c in history.parents)

    def _git_seconds(self, tests: int | None) -> float | None:
        """What so many full tests would take, by what the ends took."""
        bill, steps = self.scheduler.cost.ends, self.scheduler.case.steps
        if tests is None or not bill.probes:
            return None
        if isinstance(self.predicate, Exit):
            return tests * bill.seconds / bill.probes
        return tests * steps * bill.seconds / bill.steps if bill.steps else None

    def _ordered(self, commits: frozenset[str]) -> list[str]:
        return [c for c in self.history.parents if c in commits]
