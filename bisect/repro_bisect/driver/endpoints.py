"""The two ends of a bisect: GOOD's baseline, that it reproduces itself, and where BAD leaves it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from repro_bisect.axes.axis import short
from repro_bisect.axes.commits import History
from repro_bisect.driver.circumstances import NOT_FOUND, not_installed, refuse_disturbed, refuse_explained, refuse_lost
from repro_bisect.driver.confirm import Interval
from repro_bisect.driver.noisy import HOPELESS
from repro_bisect.driver.range_search import verdict_of_code
from repro_bisect.predicates.predicates import Bitwise, Exceeds, first_violation, known_violation
from repro_bisect.probe.answers import Answer, Code, Skip, differ_twice, judge, trace_of, unlike_before, unusable
from repro_bisect.probe.one_step import chosen_steps, state_key
from repro_bisect.probe.request import Request
from repro_bisect.probe.scheduler import Scheduler
from repro_bisect.probe.states import States
from repro_bisect.search.first_bad import Verdict
from repro_golden.base.errors import ReproError
from repro_golden.base.machine.usage import spent_of
from repro_golden.compare.endings import ended_early, failed_since
from repro_golden.compare.renames import NOTHING, aligned
from repro_golden.compare.traces import Divergence, require_finite
from repro_golden.repository.linked import beside_commits, in_few_words
from repro_golden.store.golden import GoldenRun
from repro_golden.trace import Trace

__all__ = ["Endpoints"]


class Endpoints:
    """Finds out what a search has to go by.

    Attributes:
        baseline: GOOD's first trace.
        end: Where BAD first differs from it.
        noise: How two replays of GOOD differ, so that a single verdict is not to be trusted.
        renames: What BAD calls otherwise.
        ahead: What came of the points that were probed beside BAD.
        remarks: What is to be known of the ends beside their numbers.
    """

    def __init__(
        self, scheduler: Scheduler, golden: GoldenRun | None, states: Path, *, open_end: bool, quick: bool = False
    ) -> None:
        """Look at both ends of the scheduler's axis.

        Args:
            scheduler: Where probes run.
            golden: GOOD's golden run, if there is one.
            states: Folder of saved states.
            open_end: The case has as many steps as GOOD makes.
            quick: What is found will not be confirmed.
        """
        self.scheduler, self.golden, self._open_end = scheduler, golden, open_end
        self._quick = quick
        self._folder = states
        self._held: dict[str, States] = {}
        self.baseline: Trace | None = None
        self.last: Trace | None = None
        self.end: Divergence | None = None
        self.noise: str | None = None
        self.renames = NOTHING
        self.ahead: dict[str, Answer] = {}
        self.remarks: list[str] = []

    def by_exit_code(self, runs: int = 1) -> Interval | None:
        """GOOD must exit with 0 and BAD must not; None where `noise` says that one run proves nothing.

        An end that says otherwise is run again before it is refused: it may be the program that is flaky.

        Args:
            runs: How often GOOD is run at least.

        Raises:
            ReproError: an end does otherwise.
        """
        good, bad = self.scheduler.history.good, self.scheduler.history.bad
        self._tell_base()
        self.scheduler.say(f"GOOD {short(good)} and BAD {short(bad)}: running the command at both")
        asked = [(good, run) for run in range(runs)] + [(bad, 0)]
        verdicts = self._exit_verdicts(asked)
        for name, commit, wanted in (("GOOD", good, Verdict.GOOD), ("BAD", bad, Verdict.BAD)):
            seen = [v for (c, _), v in zip(asked, verdicts, strict=True) if c == commit]
            if wanted not in seen:
                self.scheduler.say(f"{name} {short(commit)} is {seen[0]} by its exit code: running it again")
            while wanted not in seen:
                if len(seen) == HOPELESS:
                    raise ReproError(
                        f"{name} {short(commit)} is {seen[0]} by its exit code, in each of {HOPELESS} runs: "
                        "choose another end"
                    )
                seen += self._exit_verdicts([(commit, len(seen))])
            self.scheduler.record(commit, wanted)
            if len(set(seen)) > 1:
                self.noise = f"runs of {name} {short(commit)} exit with other codes"
        return None if self.noise else Interval(good, bad, None, None)

    def _exit_verdicts(self, asked: Sequence[tuple[str, int]]) -> list[Verdict]:
        """What so many runs of ends say."""
        steps, verdicts = self.scheduler.case.steps, list[Verdict]()
        answers = self.scheduler.ask(*(Request(c, steps, stage="ends", run=run) for c, run in asked))
        for (commit, _), answer in zip(asked, answers, strict=True):
            if not isinstance(answer, Code) or verdict_of_code(answer.code)[0] is Verdict.SKIP:
                raise ReproError(unusable("GOOD" if commit == self.scheduler.history.good else "BAD", answer))
            verdicts.append(verdict_of_code(answer.code)[0])
        return verdicts

    def by_trace(self, ahead: Callable[[int], Sequence[str]] | None = None) -> Interval | None:
        """Replay both ends; None where they agree, or where `noise` says that one replay proves nothing.

        Args:
            ahead: What to probe beside BAD, by how many slots there are for it.

        Raises:
            NotVerifiableError: the ends agree in values that are not finite.
            ReproError: an end cannot be tested, or GOOD itself is BAD.
        """
        good, bad, named = self.scheduler.history.good, self.scheduler.history.bad, self.scheduler.history.named
        predicate = self.scheduler.predicate
        self._tell_base()
        steps = self.scheduler.case.steps
        baseline, again = self._good(good)
        self.baseline = baseline
        if refused := first_violation(predicate, baseline, baseline):
            raise ReproError(f"GOOD {short(good)} itself is BAD by {predicate.text} ({refused}): choose another end")
        if again and self._noise(baseline, again, steps):
            return None
        self.scheduler.say(f"BAD {short(bad)}: replaying it")
        steps, slots = self.scheduler.case.steps, self.scheduler.slots
        # with a slot to spare BAD goes on beside the others, and need not be replayed once more
        # one step more than all of GOOD's tells whether it goes on
        whole = slots > 1 or (not self._quick and self._starts_longer_than_it_trains(baseline))
        asked = Request(bad, steps + self._open_end, baseline, stage="ends", full=whole)
        if (known := self.scheduler.known(asked)) is None:
            shorter = replace(asked, full=False)
            if (known := self.scheduler.known(shorter)) is not None:
                asked = shorter
        waiting, spare = {"BAD": asked}, slots > 1 and known is None
        if spare and again is None:
            waiting["GOOD"] = Request(good, steps, baseline, stage="ends", run=1)
        if named != good and self.scheduler.history.tree(named) != self.scheduler.history.tree(good):
            waiting["named"] = Request(named, steps, baseline, stage="ends")
        started = {who: self.scheduler.submit(request) for who, request in waiting.items()}
        first = ahead(slots - len(waiting)) if spare and ahead else ()
        probes = {point: self.scheduler.submit(Request(point, steps, baseline)) for point in first}
        answers = dict(zip(started, self.scheduler.results(list(started.values())), strict=True))
        self.last = last = self._trace_of(answers["BAD"], "BAD")
        if again is None:
            if not spare:
                again, steps = self._again(good, baseline, last)
            else:
                again = trace_of(answers["GOOD"], "GOOD")
            if self._noise(baseline, again, steps):
                return None
        if "named" in answers:
            self._same_as_named(baseline, trace_of(answers["named"], f"GOOD {short(named)}"))
        self.scheduler.record(good, Verdict.GOOD)
        outcome = judge(predicate, baseline, last, self.scheduler.case.steps)
        if isinstance(outcome, Skip):
            raise ReproError(
                f"BAD {short(bad)} cannot be judged: {outcome.reason}; ask for fewer steps, or use --when exit"
            )
        self.end = outcome
        if isinstance(predicate, Bitwise):
            self.renames = aligned(baseline, last).renames
        if self.end is None:
            self._agree(last, asked)
            return None
        self.remarks += refuse_lost(self.scheduler, baseline, last, agree=False)
        self.scheduler.record(bad, Verdict.BAD)
        self.ahead = dict(zip(probes, self.scheduler.results(list(probes.values())), strict=True))
        return Interval(good, bad, baseline, last)

    def _starts_longer_than_it_trains(self, baseline: Trace) -> bool:
        """Whether all of a replay's steps take less than its start: then BAD's others are cheaper now than later."""
        bill, usage = self.scheduler.cost.ends, spent_of(baseline.end)
        if not (bill.probes and usage and usage.step_seconds is not None):
            return False
        return 2 * usage.step_seconds * len(baseline.steps) <= bill.seconds / bill.probes

    def _tell_end(self, baseline: Trace, last: Trace) -> None:
        """Tell what of BAD is another than GOOD although all that both trained is the same."""
        if isinstance(self.scheduler.predicate, (Bitwise, Exceeds)):  # others judge what they name, and nothing else
            require_finite(last)
        bad = f"BAD {short(self.scheduler.history.bad)}"
        if len(last.steps) >= len(baseline.steps) and ended_early(baseline, last):
            self.tell(f"{bad} goes on after the {len(baseline.steps)} steps of GOOD: no more are compared")
        if why := failed_since(baseline, last):
            self.tell(f"{bad}: {why}, and GOOD's did not: `--when exit` searches for that")

    def _tell_base(self) -> None:
        good, named = self.scheduler.history.good, self.scheduler.history.named
        if named != good:
            self.scheduler.say(
                f"GOOD {short(named)} is on a branch of its own: searching from its merge base with BAD, {short(good)}"
            )

    def _good(self, good: str) -> tuple[Trace, Trace | None]:
        """GOOD's golden run, or its first replay, which saves states on its way; and a second one made beside it."""
        if self.golden:
            self.scheduler.say(f"GOOD {short(good)}: its golden run is at hand; replaying it once")
            return self.golden.trace, None
        self.scheduler.say(f"GOOD {short(good)}: replaying it twice")
        case, beside = self.scheduler.case, self.scheduler.slots > 1
        keep = (chosen_steps(case), self.states(good).folder) if isinstance(self.scheduler.predicate, Bitwise) else None
        asked = [Request(good, case.steps, stage="ends", run=run) for run in range(2 if beside else 1)]
        asked[0] = replace(asked[0], keep=keep)
        baseline, *again = (self._trace_of(answer, "GOOD") for answer in self.scheduler.ask(*asked))
        if self._open_end and len(baseline.steps) < case.steps:
            self.scheduler.shorten(len(baseline.steps))
        self.remarks += self.scheduler.tell_length("GOOD", baseline)
        return baseline, again[0] if again else None

    def _same_as_named(self, baseline: Trace, other: Trace) -> None:
        """What was named as GOOD has the numbers of the merge base that stands for it.

        Raises:
            ReproError: it has not.
        """
        history, predicate = self.scheduler.history, self.scheduler.predicate
        outcome = judge(predicate, baseline, other, self.scheduler.case.steps)
        if outcome is not None:
            base, why = short(history.good), outcome.reason if isinstance(outcome, Skip) else str(outcome)
            if others := history.other_bases if isinstance(history, History) else ():
                ranges = " or ".join(f"`repro bisect {short(other)}..{short(history.bad)}`" for other in others)
                raise ReproError(
                    f"GOOD {short(history.named)} has other numbers than {base}, one of its merge bases with BAD "
                    f"({why}): their branches were merged into each other, so that both may have what moved them; "
                    f"{ranges} begins at another one, which is to have GOOD's numbers"
                )
            raise ReproError(
                f"GOOD {short(history.named)} has other numbers than {base}, its merge base with BAD ({why}), so that "
                f"its branch moved them: `repro bisect {base}..{short(history.named)}` finds where; "
                f"`{base}..{short(history.bad)}` is the way to BAD"
            )

    def _noise(self, baseline: Trace, again: Trace, asked: int) -> bool:
        """Whether two replays of GOOD differ: by a metric too, as what moves by itself may cross a bound.

        Raises:
            NotVerifiableError: one is of an earlier search, and GOOD has other numbers since.
        """
        if noise := differ_twice(baseline, again, "GOOD", asked):
            good = self.scheduler.history.good
            requests = Request(good, asked), Request(good, asked, run=1)
            refuse_explained(self.scheduler, (requests[0], baseline), (requests[1], again))
            self.noise = f"two replays of GOOD differ at {noise.of_itself}"
        return self.noise is not None

    def _agree(self, last: Trace, asked: Request) -> None:
        """Record that BAD agrees with GOOD, unless it does not reproduce itself: then it may have agreed by chance."""
        self.scheduler.cancel(self.scheduler.pending_probes.values())
        self.scheduler.clear()
        baseline, predicate = self.baseline, self.scheduler.predicate
        assert baseline is not None
        self.remarks += refuse_lost(self.scheduler, baseline, last, agree=True)
        self.scheduler.say("BAD agrees: replaying it once more")
        (answer,) = self.scheduler.ask(replace(asked, run=1))
        if isinstance(answer, Trace) and not isinstance(predicate, Bitwise):
            outcome = judge(predicate, baseline, answer, self.scheduler.case.steps)
            why = outcome.reason if isinstance(outcome, Skip) else f"is BAD by {predicate.text}: {outcome}"
            how = f"a second replay of BAD does not agree ({why})" if outcome else ""
        else:
            how = unlike_before(last, answer, asked.steps, "a second replay of BAD", "two replays of BAD differ")
        if how:
            refuse_disturbed(self.scheduler, (asked, last), (replace(asked, run=1), answer))
            self.noise = how
            return
        self.scheduler.record(asked.point, Verdict.GOOD)
        self._tell_end(baseline, last)
        self._tell_beside()
        self.tell(self.not_installed())

    def _trace_of(self, answer: Answer, name: str) -> Trace:
        """As `trace_of`; where a package is not found, files that pin packages and differ are told of first."""
        if isinstance(answer, Skip) and NOT_FOUND.search(answer.reason):
            self.tell(self.not_installed())
        return trace_of(answer, name)

    def not_installed(self) -> str:
        """See `pins.not_installed`."""
        history, scheduler = self.scheduler.history, self.scheduler
        commits = (history.commit(end) for end in (history.good, history.bad))
        return not_installed(scheduler.case, scheduler.prober.git, *commits)

    def tell(self, text: str) -> None:
        """Say what is to be known of the ends, if anything, and keep it for the result."""
        if text:
            self.scheduler.say(text)
            self.remarks.append(text)

    def _tell_beside(self) -> None:
        """Tell what the user's program may have read and no replay had, where no golden run says that it decides."""
        subject = self.scheduler.case.subject
        if self.golden or not subject.program:
            return
        # a folder of data is missed aloud
        names = [n for n in beside_commits(self.scheduler.prober.git, subject.link) if not n.endswith("/")]
        if names:
            beside = in_few_words(names)
            self.tell(f"no replay had {beside} of your checkout, which no commit holds: --link what decides")

    def _again(self, good: str, baseline: Trace, last: Trace) -> tuple[Trace, int]:
        """GOOD's second replay and its steps, no further than BAD's violation.

        It saves on its way the state that probes may start from.
        """
        case, keep = self.scheduler.case, None
        steps, violation = case.steps, known_violation(self.scheduler.predicate, baseline, last)
        if violation and isinstance(self.scheduler.predicate, Bitwise):
            steps = violation.step - baseline.header.first_step + 1
            keep = ([violation.step] if chosen_steps(case) and violation.step else [], self.states(good).folder)
        (answer,) = self.scheduler.ask(Request(good, steps, baseline, stage="ends", run=1, keep=keep))
        return trace_of(answer, "GOOD"), steps

    def states(self, commit: str) -> States:
        """The states of a commit, held until `close`.

        Raises:
            ReproError: it has no code.
        """
        tree = self.scheduler.history.tree(commit)
        if tree is None:
            raise ReproError(f"GOOD {short(commit)} has none of {', '.join(self.scheduler.history.paths)}")
        if tree not in self._held:
            self._held[tree] = States(self._folder, state_key(self.scheduler, commit))
        return self._held[tree]

    def golden_states(self) -> dict[int, Path]:
        """The states that GOOD's golden run keeps, by step."""
        return self.golden.states if self.golden else {}

    def close(self) -> None:
        """Let go of the states."""
        for states in self._held.values():
            states.close(self.scheduler.case.case.states_budget)
