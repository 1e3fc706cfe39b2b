"""Where probes of one axis are made: who runs them, what is known already, and the threads that wait for them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from repro_bisect.axes.axis import Axis
from repro_bisect.axes.commits import History
from repro_bisect.driver.drift import HistoryResult
from repro_bisect.driver.result import BisectResult
from repro_bisect.predicates.predicates import Exit, Predicate
from repro_bisect.probe.around import watched_rollouts
from repro_bisect.probe.attempts import DisturbedError
from repro_bisect.probe.executors import Executor
from repro_bisect.probe.executors.local import Local, default_jobs
from repro_bisect.probe.prober import Prober
from repro_bisect.probe.progress import Cost, Event, Watch
from repro_bisect.probe.scheduler import Scheduler
from repro_golden.base.errors import MachineFailureError, NotVerifiableError, ReproError
from repro_golden.case.file import Case
from repro_golden.repository.checkout import Checkout
from repro_golden.repository.git import rewritten
from repro_golden.repository.linked import refuse_tracked
from repro_golden.repository.submodules import never_fetched
from repro_golden.runs.verify import changed_since
from repro_golden.store.golden import GoldenRun, Store
from repro_golden.store.pulled import pointer_of
from repro_golden.store.rollouts import Rollouts, place_of
from repro_golden.subjects import identity_of, kind_of
from repro_golden.subjects.argv import interpreter
from repro_golden.subjects.environments.cache import forget
from repro_golden.subjects.pythons import is_one_of

__all__ = ["Options", "check_rollouts", "commits_of", "fetched_rollouts", "session", "undisturbed"]

R = TypeVar("R", bound=BisectResult | HistoryResult)


@dataclass(frozen=True)
class Options:
    """How to search.

    Attributes:
        jobs: Probes at once; None for what the machine, or the cluster, serves.
        ray: Address of a Ray cluster, or ``auto``; None runs probes here.
        when: The predicate as text; None for what the case says.
        paths: Folders and files that hold all that matters; empty for the subject's own.
        first_parent: Follow only the first parent of merges.
        every: Move the baseline from culprit to culprit until the ends agree.
        fresh: Use nothing that earlier bisects found, and build environments anew.
        confidence: Where verdicts are noisy, the probability at which a commit is the answer; None for the default.
        open_end: The case has as many steps as GOOD makes.
        explain: Say of each culprit why its numbers moved.
        examine: Takes the log of a probe that fails, and what is said of that anyway; says in one line what else is
            known of it, or ''.
        try_skips: Presume of no commit that it fails like those around it: try it.
        quick: End with the culprit's name: neither confirm nor explain it.
        cost: What the same search has cost before, and where what it costs is added; None for nothing.
    """

    jobs: int | None = None
    ray: str | None = None
    when: str | None = None
    paths: Sequence[str] = ()
    first_parent: bool = False
    every: bool = False
    fresh: bool = False
    confidence: float | None = None
    open_end: bool = False
    explain: bool = False
    examine: Callable[[Path, str], str] | None = None
    try_skips: bool = False
    quick: bool = False
    cost: Cost | None = None


def commits_of(checkout: Checkout, case: Case, spec: str, options: Options, *, from_base: bool = False) -> History:
    """The commits of ``GOOD..BAD``, as far as they may matter to a case; `from_base` as in `History`.

    Raises:
        NotVerifiableError: no commit of the range changes the subject's code.
        ReproError: there are no rollouts, the range cannot be used, or commits do not hold the subject.
    """
    paths = checkout.paths(case, options.paths)
    if case.subject.installed:
        raise ReproError(
            f"the subject of {case.name} is the installed {case.subject.installed}, which no commit changes: "
            "set subject.path to its folder in this repository"
        )
    history = History(checkout, spec, paths, first_parent=options.first_parent, from_base=from_base)
    history.require(options.paths or [case.subject.path])
    check_rollouts(checkout, case)
    if len({history.tree(c) for c in (history.good, *history.parents)}) == 1:
        changes = f"no commit of {spec} changes"
        if "." in paths:
            raise NotVerifiableError(f"{changes} a file beside cases and recordings, so nothing is to be replayed")
        raise NotVerifiableError(
            f"{changes} {', '.join(paths)}/, the code of {case.name}, so nothing is to be replayed: "
            "widen subject.path (or --path) if what it reads lies elsewhere"
        )
    return history


@contextlib.contextmanager
def session(
    checkout: Checkout,
    case: Case,
    axis: Axis,
    predicate: Predicate,
    watch: Watch,
    options: Options,
    *,
    golden_first: bool = False,
) -> Iterator[tuple[Scheduler, GoldenRun | None]]:
    """What probes need, given back on every exit; and the golden run of the good end, if there is one.

    With `golden_first` that run is the good end's first replay, unless exit codes are what is judged.

    Raises:
        ReproError: the case's rollouts are not there, its command would run the checkout's code in place of a
            commit's, or the cluster cannot be used.
    """
    cost = options.cost or Cost()
    refuse_tracked(checkout.git, case)
    remarks = [remark] if (remark := rewritten(checkout.git, axis.paths)) else []
    if axis.commit(axis.good) != axis.commit(axis.bad):
        remarks += never_fetched(checkout, axis.parents, axis.paths)
    for remark in remarks:
        watch(Event(remark))
    if options.fresh:
        forget(checkout.state)
    store, rollouts = Store(checkout.root), check_rollouts(checkout, case)
    store.refuse_other_data(case)
    watched = watched_rollouts(case, rollouts)
    (digest,) = watched.facts
    identity = identity_of(case, checkout.root)
    executor: Executor
    if options.ray:
        from repro_bisect.probe.executors.cluster import Cluster

        executor = Cluster(options.ray, checkout, case, axis, place_of(rollouts), options.jobs)
    else:
        executor = Local(checkout, case, place_of(rollouts), options.jobs or default_jobs(case))
    with contextlib.ExitStack() as exits:
        exits.callback(executor.close)
        try:
            golden = _golden_of(store, case, axis, identity.machine, digest, checkout, away=bool(options.ray))
        except ReproError as error:  # it spares a replay, and is no more needed than that
            watch(Event(f"the golden run of GOOD is not used: {error}"))
            golden = None
        first = golden if golden_first and not isinstance(predicate, Exit) else None
        prober = Prober(
            checkout, case, axis, watched, identity, executor, predicate, options.examine,
            fresh=options.fresh, first=first, cost=cost,
        )  # fmt: skip
        exits.callback(prober.close)
        with ThreadPoolExecutor(max_workers=executor.slots) as pool:
            scheduler = Scheduler(prober, axis, pool, watch, remarks)
            try:
                yield scheduler, golden
            except BaseException as error:  # what is under way never outlives it
                scheduler.clear()
                if isinstance(error, DisturbedError):
                    prober.disown()
                raise


def undisturbed(search: Callable[[Options], R], watch: Watch, options: Options) -> R:
    """What a search finds; where its probes disturb each other, what it finds one by one, with what both tries cost."""
    options = replace(options, cost=Cost())
    try:
        return search(options)
    except DisturbedError as error:
        why = str(error)
    watch(Event(f"{why}: from the beginning, with -j 1"))
    result = search(replace(options, jobs=1))
    return replace(result, remarks=[f"{why}: it was done", *result.remarks])


def check_rollouts(checkout: Checkout, case: Case) -> Rollouts:
    """What the case is replayed on.

    Raises:
        ReproError: it is not there.
    """
    rollouts = Store(checkout.root).rollouts(case)
    if case.case.rollouts is not None and len(rollouts) == 0:
        raise ReproError(f"{rollouts.directory} holds no rollouts: `repro golden record {case.name}` records them")
    return rollouts


def fetched_rollouts(checkout: Checkout, case: Case) -> Rollouts:
    """`check_rollouts`, where not being able to fetch them is no failure of the machine: a fork's job has no secrets.

    Raises:
        NotVerifiableError: their content is not here, and the remote does not give it.
        ReproError: there are none.
    """
    try:
        return check_rollouts(checkout, case)
    except MachineFailureError as error:
        raise NotVerifiableError(f"the rollouts of {case.name} are not here: {error}") from None


def _golden_of(
    store: Store, case: Case, axis: Axis, machine: str, rollouts: str, checkout: Checkout, *, away: bool
) -> GoldenRun | None:
    """The golden run of the good end's own code on this machine, if there is one and probes do not run `away` from it.

    Raises:
        ReproError: it was recorded under other circumstances, or cannot be read.
    """
    path = store.run_path(machine, case.name)
    if list(axis.paths) != checkout.paths(case) or kind_of(case).other_pythons(
        checkout.root
    ):  # it does not say what those held
        return None
    if not (path.exists() or pointer_of(path).exists()):
        return None
    golden = store.read(machine, case.name)
    tree = axis.tree(axis.good)
    same = tree is not None and golden.record.get("tree") == tree
    same = same and golden.trace.header.subject.get("tree") == tree  # no other file lay beside what git tracked
    current = golden.record["case"] == case.canonical() and golden.record["rollouts"] == rollouts
    if same and current and away:
        raise ReproError("it was recorded here, and nodes have variables and packages of their own")
    if same and current and (change := changed_since(golden, case, checkout)):
        raise ReproError(f"it was recorded with other {change}")
    if same and current and (python := _other_python(golden, case, checkout)):
        raise ReproError(f"it was recorded in {python}, and does not say what that held")
    return golden if same and current and not golden.noisy else None


def _other_python(golden: GoldenRun, case: Case, checkout: Checkout) -> str:
    """The interpreter that a golden run was recorded in, where it is not the case's own; '' of older ones."""
    about = golden.trace.header.subject
    python = str(about.get("python", ""))
    if not python or "environment" in about or not case.subject.program:  # one from lock files is part of the code
        return ""
    return "" if is_one_of(python, [interpreter(case.subject, checkout.root)]) else python
