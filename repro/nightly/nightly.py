"""A night of one case: its checks on one commit of this machine, and the commits that changed what changed."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from repro.nightly.baseline import Judgement, Tonight, baseline_of
from repro.nightly.checks import events_check, layout_checks, line, mismatch_check, rollout_checks, run_to_run
from repro.nightly.lineage import lineage
from repro.nightly.records import Baseline, Check, NightlyRun, Status, Summary, worst
from repro.nightly.trusted import metrics_check, nonfinite, summarise
from repro.pulls.pair import now
from repro_bisect.axes.axis import short
from repro_bisect.axes.commits import Commits
from repro_bisect.driver.commits import bisect_range
from repro_bisect.driver.result import BisectResult
from repro_bisect.driver.session import Options, commits_of, fetched_rollouts, session
from repro_bisect.predicates.predicates import Bitwise, of_case
from repro_bisect.probe.progress import Event, Watch
from repro_golden.base.canonical import jsonable, mapping_of
from repro_golden.base.errors import MachineFailureError, NotVerifiableError, ReproError
from repro_golden.base.machine.usage import spent_of
from repro_golden.base.observed import tellings
from repro_golden.case.file import Case
from repro_golden.repository.checkout import Checkout
from repro_golden.store.rollouts import sampled_by
from repro_golden.subjects import identity_of
from repro_golden.trace import Trace

__all__ = ["Asked", "exit_code", "nightly_run_of", "nightly_run_without_case", "overall"]


@dataclass(frozen=True)
class Asked:
    """How a night is made.

    Attributes:
        reproduce: The command that does it again.
        version: Of repro.
        jobs: Replays at once; None for what the machine serves.
        bisect: Whether what changed is searched for the commits that did it.
        last: How many trusted nights metrics are judged by; None for what the case says.
        events: A baseline's metrics by step and name, which tonight's are compared with; None without one.
        offset: The number that it gives to step 0, where that is known.
    """

    reproduce: str
    version: str
    jobs: int | None = None
    bisect: bool = True
    last: int | None = None
    events: Mapping[int, Mapping[str, float]] | None = None
    offset: int | None = None


def overall(checks: Sequence[Check]) -> Status:
    """The worst of the checks; metrics that cannot be judged yet taint nothing beside a baseline that was.

    Without a baseline check, or with one that is not judged, a night is not judged unless something is worse.
    """
    unjudged: Status = "not judged"
    baseline = next((check.status for check in checks if check.name == "baseline"), unjudged)
    counted = [check.status for check in checks if (check.name, check.status) != ("metrics", "not judged")]
    return worst([*counted, baseline])


def exit_code(runs: Sequence[NightlyRun]) -> Literal[0, 1, 2, 3]:
    """1 where anything changed or a metric is not finite; else 2 for any other error; else 3 for what is no pass."""
    checks = [check for run in runs for check in run.checks]
    if any(c.status == "changed" or (c.name == "metrics" and c.status == "error") for c in checks):
        return 1
    if any(c.status == "error" for c in checks):
        return 2
    return 0 if all(run.status == "green" for run in runs) and runs else 3


def nightly_run_of(
    checkout: Checkout, case: Case, commit: str, runs: Sequence[NightlyRun], watch: Watch, asked: Asked
) -> NightlyRun:
    """Judge a case on one commit. What fails is said in the night, which there is always one of.

    Args:
        checkout: The repository; nothing in it changes.
        case: The case.
        commit: Full id.
        runs: Earlier nights of the case, of all machines, oldest first.
        watch: Called with every line of progress.
        asked: How.

    Raises:
        MachineFailureError: the machine failed.
    """
    run = _NightlyRun(checkout, case, commit, runs, watch, asked)
    try:
        run.judge()
    except MachineFailureError:
        raise
    except ReproError as error:
        run.checks.append(_failed("baseline" if run.trace else "run-to-run", error))
    return run.run()


def _failed(check: str, error: ReproError) -> Check:
    return Check(check, "not judged" if isinstance(error, NotVerifiableError) else "error", line(error))


def nightly_run_without_case(checkout: Checkout, name: str, why: ReproError, commit: str, asked: Asked) -> NightlyRun:
    """The night of a case that is guarded and whose file is gone or cannot be used: nothing can judge it."""
    check = _failed("baseline", why)
    return NightlyRun(
        case=name, machine="unknown", at=now(), commit=_info(checkout, commit), tree="", key="", rollouts="",
        identity={}, status=overall([check]), steps=0, chain="", checks=[check], baseline=Baseline("none"), metrics={},
        kl={}, reproduce=asked.reproduce, version=asked.version,
    )  # fmt: skip


@dataclass
class _NightlyRun:
    """One night, as far as it is made."""

    checkout: Checkout
    case: Case
    commit: str
    runs: Sequence[NightlyRun]
    watch: Watch
    asked: Asked
    at: str = field(default_factory=now)
    began: float = field(default_factory=time.monotonic)
    machine: str = "unknown"
    identity: Mapping[str, Any] = field(default_factory=dict)
    tree: str = ""
    rollouts: str = ""
    trace: Trace | None = None
    metrics: Mapping[str, Summary] = field(default_factory=dict)
    checks: list[Check] = field(default_factory=list)
    judgement: Judgement | None = None
    culprits: Sequence[Mapping[str, Any]] = ()
    bisected: Mapping[str, Any] | None = None

    def judge(self) -> None:
        """Every check, and the search where the baseline's says that something changed."""
        case, checkout = self.case, self.checkout
        options = Options(jobs=self.asked.jobs, fresh=True)
        identity = identity_of(case, checkout.root)
        self.machine, self.identity = identity.machine, identity.to_mapping()
        rollouts = fetched_rollouts(checkout, case)
        self.rollouts = rollouts.digest
        if not case.subject.path:
            raise ReproError(f"the subject of {case.name} is an installed module, which no commit changes")
        paths = checkout.paths(case)
        history = Commits(checkout, self.commit, {}, paths)
        history.require([case.subject.path])
        self.tree = history.tree(self.commit) or ""
        with session(checkout, case, history, Bitwise(), self.watch, options) as (scheduler, _):
            check, trace = run_to_run(scheduler, case, self.commit)
        self.checks.append(check)
        if trace is None:
            return
        self.trace, self.metrics = trace, summarise(self._judged(trace, i) for i in range(len(trace.steps)))
        self.identity = dict(trace.header.identity)
        tonight = Tonight(
            checkout=checkout, case=case, commit=self.commit, tree=self.tree, paths=paths, machine=self.machine,
            rollouts=self.rollouts, trace=trace, metrics=self.metrics, past=lineage(checkout, case.name, self.commit),
            runs=self.runs, version=self.asked.version, options=replace(options, fresh=False), watch=self.watch,
        )  # fmt: skip
        spared = "the case does not reproduce itself tonight" if check.status == "flaky" else ""
        judgement = Judgement(Check("baseline", "not judged", spared)) if spared else baseline_of(tonight)
        self.judgement = judgement
        self.checks += [judgement.check, self._metrics(tonight, judgement.baseline, spared)]
        self.checks += mismatch_check(case, trace, sampled_by(rollouts))
        self.checks += layout_checks(checkout, case, self.commit, self.watch, options, spared=spared)
        self.checks += rollout_checks(checkout, case, self.commit, self.tree, self.watch)
        if self.asked.events is not None:
            ours = {record.step: record.compared for record in trace.steps}
            self.checks.append(events_check(ours, self.asked.events, case.compare.bounds, self.asked.offset))
        if judgement.check.status == "changed" and self.asked.bisect and judgement.good:
            self._bisect(judgement.good)

    def _judged(self, trace: Trace, index: int) -> dict[str, float]:
        """The metrics that a night keeps: those that rows have, and what was read from text where a bound is on it.

        Without what is not finite on purpose (`Trace.nonfinite`).
        """
        record = trace.steps[index]
        bounded = [name for metric in self.case.compare.bounds for name in tellings(metric, record.metrics)]
        metrics = record.compared | {name: record.metrics[name] for name in bounded}
        bad = set(trace.nonfinite_numbers(index)) if record.nonfinite else set()
        return {name: value for name, value in metrics.items() if math.isfinite(value) or name in bad}

    def _metrics(self, tonight: Tonight, baseline: Baseline, spared: str) -> Check:
        table = self.case.nightly
        table = table.model_copy(update={"history": self.asked.last}) if self.asked.last else table
        history = [] if spared else [run.metrics for run in tonight.trusted(baseline)]
        where: dict[str, int] = {}
        for index, record in reversed([*enumerate(tonight.trace.steps)]):
            where |= dict.fromkeys(tonight.trace.nonfinite_numbers(index), record.step)
        bad = tonight.trace.first_nonfinite()
        if bad and not nonfinite(self.metrics):  # in a tensor, or in a number that is only shown
            return Check("metrics", "error", line(f"not finite: {bad}"))
        check = metrics_check(self.metrics, history, table, self.case.compare.bounds, where)
        return replace(check, text=spared) if spared and check.status == "not judged" else check

    def _bisect(self, good: str) -> None:
        """Name the commits that changed the numbers, or say why they cannot be named."""
        between = f"{short(good)}..{short(self.commit)}"
        outcome, why, remarks = "none", "", list[str]()
        if good == self.commit:
            why = "the last green commit is the tested one: its code did not change"
        else:
            self.watch(Event(f"the numbers of {self.case.name} changed: bisecting {between}"))
            try:
                result = self._search(f"{good}..{self.commit}")
                outcome, why = result.outcome, result.unnamed
                self.culprits = jsonable(result.culprits)
                remarks = [f"it may be {', '.join(map(short, result.suspects))}"] if result.suspects else []
                remarks += [line(remark) for remark in result.remarks]
            except MachineFailureError:
                raise
            except NotVerifiableError as error:
                outcome, why = "not verifiable", line(error)
            except ReproError as error:
                outcome, why = "error", line(error)
        again = f"repro bisect {between} --case {self.case.name} --all"
        self.bisected = {"range": between, "outcome": outcome, "why": why, "remarks": remarks, "reproduce": again}

    def _search(self, between: str) -> BisectResult:
        options = Options(jobs=self.asked.jobs, every=True, explain=True)
        history = commits_of(self.checkout, self.case, between, options)
        return bisect_range(self.checkout, self.case, history, self.watch, options)

    def run(self) -> NightlyRun:
        """All of it."""
        judgement = self.judgement
        compared = judgement.compared if judgement else None
        usage = spent_of(self.trace.end) if self.trace else None
        return NightlyRun(
            case=self.case.name,
            machine=self.machine,
            at=self.at,
            commit=_info(self.checkout, self.commit),
            tree=self.tree,
            key=self.case.digest,
            rollouts=self.rollouts,
            identity=self.identity,
            status=overall(self.checks),
            steps=len(self.trace.steps) if self.trace else 0,
            chain=self.trace.chain if self.trace else "",
            checks=self.checks,
            baseline=judgement.baseline if judgement else Baseline("none"),
            metrics=self.metrics,
            kl=self._kl(),
            compared=jsonable(compared),
            culprits=self.culprits,
            bisect=self.bisected,
            spent=jsonable(usage),
            seconds=time.monotonic() - self.began,
            reproduce=self.asked.reproduce,
            version=self.asked.version,
            looked_at=self._looked(),
        )

    def _looked(self) -> dict[str, Any] | None:
        """What the comparison with the baseline judged; without one, what two replays were compared by."""
        if self.trace is None:
            return None
        known = self.judgement.looked if self.judgement else None
        return (known or of_case(self.case.compare).looked(self.trace)).to_mapping()

    def _kl(self) -> dict[str, float]:
        """KL(baseline || tonight) where it is farthest from 0; of equal bits 0, where there are log-probs."""
        judgement, trace = self.judgement, self.trace
        if judgement is None or trace is None:
            return {}
        if judgement.compared:
            return {name: places["worst"][1] for name, places in judgement.compared.drift.kl.items()}
        equal = judgement.baseline.chain == trace.chain
        return {"k1": 0.0, "k3": 0.0} if equal and trace.row(0, "forward", "log_probs") else {}


def _info(checkout: Checkout, commit: str) -> dict[str, Any]:
    return mapping_of(Commits(checkout, commit, {}, ["."]).info(commit))
