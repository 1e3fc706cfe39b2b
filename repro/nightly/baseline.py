"""What a night's numbers are compared with: a golden run of this machine, or the last green commit replayed here."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from repro.nightly.checks import failure, line
from repro.nightly.lineage import Lineage, newest_green, recorded
from repro.nightly.records import EVENTS, Baseline, Check, NightlyRun, Status, Summary
from repro.nightly.trusted import trusted
from repro.pulls.cases import ROLLOUTS, CommittedCases, differences, in_words, of_checkout
from repro.pulls.pair import Compared, compare_traces
from repro_bisect.axes.axis import short
from repro_bisect.axes.commits import Commits
from repro_bisect.driver.session import Options, session
from repro_bisect.predicates.predicates import Bitwise
from repro_bisect.probe.answers import ABSENT, Answer
from repro_bisect.probe.progress import Event, Watch
from repro_bisect.probe.request import Request
from repro_golden.base.errors import MachineFailureError, NotVerifiableError, ReproError
from repro_golden.base.observed import tellings
from repro_golden.case.file import CASES, Bound, Case
from repro_golden.compare.coverage import Coverage
from repro_golden.compare.traces import identity_differences
from repro_golden.repository.checkout import Checkout
from repro_golden.repository.code_key import code_keys
from repro_golden.repository.working import has_code
from repro_golden.runs.verify import find_golden
from repro_golden.store.golden import GoldenRun, Store, describe
from repro_golden.subjects import who_is
from repro_golden.trace import Trace

__all__ = ["Judgement", "Tonight", "baseline_of"]

_UNRECORDED = "neither the code nor the machine changed: look at what the identity does not record"
_UNSAID = (
    "the golden run does not say which code it was recorded of (as where a submodule of it had changes of its own, or "
    "a filter rewrites a file of it)"
)


@dataclass(frozen=True)
class Tonight:
    """What is known of a night before it is judged.

    Attributes:
        checkout: The repository.
        case: The case.
        commit: Full id of the tested commit.
        tree: Hash of its code.
        paths: What holds that code.
        machine: Short name of the identity.
        rollouts: Their digest.
        trace: Its first replay.
        metrics: Of that.
        past: The commits before it.
        runs: Earlier nights of the case, of all machines, oldest first.
        version: Of repro.
        options: How to replay.
        watch: Called with every line of progress.
    """

    checkout: Checkout
    case: Case
    commit: str
    tree: str
    paths: Sequence[str]
    machine: str
    rollouts: str
    trace: Trace
    metrics: Mapping[str, Summary]
    past: Lineage
    runs: Sequence[NightlyRun]
    version: str
    options: Options
    watch: Watch

    def trusted(self, baseline: Baseline) -> list[NightlyRun]:
        """The nights that tonight's numbers may be judged by, oldest first."""
        since = self.past.order if baseline.kind == "golden" else self.past.since
        return trusted(self.runs, (self.machine, *self._asked), baseline, since)

    @property
    def _asked(self) -> tuple[str, str, int]:
        return self.case.digest, self.rollouts, len(self.trace.steps)

    @property
    def last_green(self) -> NightlyRun | None:
        """The green night since the newest approval that tonight may be compared with: this machine's, else any.

        Not one of another case, other rollouts or steps, nor one that was only within bounds: from night to night they
        add up. After a red night that stands, of another machine's only one of what that red night was compared with,
        or of what came before: this machine's numbers changed since, and that they did not elsewhere approves nothing.
        """
        exact = [n for n in self.runs if n.compared is None and self._asks_the_same(n) and self._since(n)]
        here, red = [n for n in exact if n.machine == self.machine], self._red()
        known = [self._known_before(run) for run in red]
        changed = {run.tree for run in red}
        others = [n for n in exact if n.tree not in changed and all(n.commit["commit"] in before for before in known)]
        return newest_green(here, self.past) or newest_green(others, self.past)

    def _since(self, run: NightlyRun) -> bool:
        return run.commit["commit"] in self.past.since

    def _asks_the_same(self, run: NightlyRun) -> bool:
        return (run.key, run.rollouts, run.steps) == self._asked

    def _red(self) -> list[NightlyRun]:
        """The nights of this machine, since the newest approval, that found a change and still stand.

        Whatever else befell such a night, and whatever the case was then. A later green one, of tonight's case, lifts
        those of its code and of the commits that its own holds. One that was flaky or failed has judged nothing. Other
        numbers than some event files have are no change of the code: the files are no commit's.
        """
        red: list[NightlyRun] = []
        for run in self.runs:
            if run.machine != self.machine or not self._since(run):
                continue
            if any(check.status == "changed" for check in run.checks if check.name != EVENTS):
                red.append(run)
            elif (
                red
                and self._asks_the_same(run)
                and any((check.name, check.status) == ("baseline", "green") for check in run.checks)
            ):
                held = self.past.held_by(run.commit["commit"])
                red = [r for r in red if r.tree != run.tree and r.commit["commit"] not in held]
        return red

    def _known_before(self, red: NightlyRun) -> frozenset[str]:
        """The commits before the change that a red night found: what it was compared with, and what that holds."""
        known = self.past.held_by(red.baseline.commit)
        return known if red.commit["commit"] not in known else frozenset()


@dataclass(frozen=True)
class Judgement:
    """What the comparison with a baseline found.

    Attributes:
        check: In one line.
        baseline: What tonight was compared with: whose numbers count, in this history or not.
        compared: How; None where bits are equal or nothing was compared.
        good: The commit of this history from which a search for the change may begin: it has the baseline's numbers, or
            the text says that it moved them itself. Else empty.
        looked: What was judged; None where no trace of the baseline was at hand.
    """

    check: Check
    baseline: Baseline = Baseline("none")  # noqa: RUF009 - it is frozen
    compared: Compared | None = None
    good: str = ""
    looked: Coverage | None = None


def _judgement(
    status: Status, text: str, baseline: Baseline, compared: Compared | None = None, good: str = ""
) -> Judgement:
    moved = compared if compared and compared.verdict != "identical" else None
    looked = compared.drift.looked if compared else None
    return Judgement(Check("baseline", status, line(text)), baseline, moved, good, looked)


def baseline_of(tonight: Tonight) -> Judgement:
    """Compare tonight with the golden run of this machine; without one with the last green or approved commit.

    Raises:
        MachineFailureError: the machine failed.
    """
    try:
        return _golden(tonight) if _has_golden(tonight) else _last_green(tonight)
    except MachineFailureError:
        raise
    except NotVerifiableError as error:
        return _judgement("not judged", str(error), Baseline("none"))
    except ReproError as error:
        return _judgement("error", str(error), Baseline("none"))


# -- a golden run


def _has_golden(tonight: Tonight) -> bool:
    """Whether there is a golden run that tonight may be compared with, here or to be fetched."""
    case, root = tonight.case, tonight.checkout.root
    who = who_is(case, root)
    try:
        Store(root).find(case, who.identity, who.versions)
    except NotVerifiableError:
        return False
    except MachineFailureError:  # it cannot be fetched, which `_golden` says
        return True
    return True


def _golden(tonight: Tonight) -> Judgement:
    case = tonight.case
    store = Store(tonight.checkout.root)
    try:
        golden = find_golden(store, case, who_is(case, tonight.checkout.root))
    except MachineFailureError as error:
        raise NotVerifiableError(f"the golden run of {case.name} is not here: {error}") from None
    if golden.record["rollouts"] != tonight.rollouts:
        raise ReproError(
            f"the rollouts are others than the golden run of {case.name} was trained on: "
            f"`git checkout {case.case.rollouts}.dvc` and `dvc checkout {case.case.rollouts}.dvc` bring them back"
        )
    baseline = Baseline("golden", golden.record.get("commit") or "", golden.record["chain"])
    compared = compare_traces(golden.trace, tonight.trace, case.compare)
    store.refuse_unknown(golden.directory)  # what is whole in itself may be of an older pointer
    if compared.verdict == "identical":
        return _judgement("green", f"the bits of the golden run{_renamed(compared)}", baseline, compared)
    if compared.verdict == "within":
        return _judgement(
            "green", f"within the case's bounds of the golden run: {_where(compared)}", baseline, compared
        )
    other = identity_differences(golden.trace, tonight.trace)
    beside = f"; beside the code {describe(other)}" if other else ""
    text = f"differs from the golden run at {_where(compared)}{beside}"
    if golden.record.get("tree") == tonight.tree and not other:
        return _judgement("changed", f"{text}; {_UNRECORDED}", baseline, compared)
    good, why = _good_of(tonight, golden, baseline)
    return _judgement("changed", text + why, baseline, compared, good)


def _good_of(tonight: Tonight, golden: GoldenRun, baseline: Baseline) -> tuple[str, str]:
    """The newest commit that is known to have had the golden run's numbers, or why there is none."""
    last = newest_green(tonight.trusted(baseline), tonight.past)
    if last:
        return str(last.commit["commit"]), ""
    commit = golden.record.get("commit") or ""
    if commit in tonight.past.order:
        return commit, ""
    if held := _holding(tonight, golden.record.get("tree") or ""):
        return held, ""
    of = f"its commit {short(commit)} is none that the tested one holds" if commit else ""
    changes = "the golden run was recorded from changes that are in no commit"
    return _begin(tonight, golden.trace, of or (changes if golden.record.get("tree") else _UNSAID))


def _holding(tonight: Tonight, tree: str) -> str:
    """The newest commit of this past that has the code of a key; empty where none has."""
    if not tree:
        return ""
    keys = code_keys(tonight.checkout.git, tonight.past.order, tonight.paths)
    return next((commit for commit in tonight.past.order if keys.of(commit) == tree), "")


def _begin(tonight: Tonight, base: Trace, of: str) -> tuple[str, str]:
    """Where in this history the search for what moved a baseline's numbers begins, and what is to be said of that.

    No commit of it has the baseline's code. The one that approved its numbers may have them all the same, as one that
    a branch was squashed into: it is replayed. Where it has others it moved them itself, and the search for what came
    later begins there.

    Args:
        tonight: The night.
        base: The baseline's trace.
        of: Why the baseline's own commit does not serve.
    """
    approved = tonight.past.approved
    if not approved:
        return "", f"; not bisected: {of}"
    if approved == tonight.commit:
        return "", f"; not bisected: {of}, and the tested one is that which approved these numbers"
    answer, _ = _replayed(tonight, approved, fresh=False, run=0)
    if not isinstance(answer, Trace):
        return "", f"; not bisected: {of}, and {short(approved)}, which approved them, fails: {failure(answer)}"
    first = compare_traces(base, answer, tonight.case.compare)
    if first.verdict != "moved":
        return approved, ""
    moved = compare_traces(answer, tonight.trace, tonight.case.compare).verdict == "moved"
    has = f"{short(approved)}, which approved its numbers, itself has {'others' if moved else 'those of tonight'}"
    return approved if moved else "", f"; {of}, and {has}, from {_where(first)}"


# -- the last green commit


def _last_green(tonight: Tonight) -> Judgement:
    case, past = tonight.case, tonight.past
    green = tonight.last_green
    last = str(green.commit["commit"]) if green else ""
    known = [commit for commit in (last, past.approved) if commit]
    if past.cut_off and not last:
        return _judgement(
            "not judged",
            "nothing to compare with: the commit that approved these numbers is not here, since the clone is shallow: "
            "`git fetch --unshallow` brings it (fetch-depth: 0)",
            Baseline("none"),
        )
    void = f"the pointer of {short(past.void)} approves nothing: it names other content than it was written for"
    if not known and past.void:
        raise NotVerifiableError(f"{void}; approve what is here with `repro golden approve {case.name} --reason ...`")
    if not known:
        return _judgement(
            "not judged",
            f"nothing to compare with: no golden run of this machine ({tonight.machine}), no green night of this "
            f"case and no golden run of another machine in git: `repro golden record {case.name}` makes a first one",
            Baseline("none"),
        )
    if past.approved:
        _refuse_changed(tonight, past.approved)
    good = min(known, key=lambda commit: past.order[commit])
    of, unsaid = (good, "") if good == last else _approved_code(tonight, good)
    baseline = Baseline("last green" if good == last else "approved", of)
    name = f"{'the last green commit' if baseline.kind == 'last green' else 'the approved commit'} {short(of)}"
    name += f" ({void})" if past.void else ""
    judgement = _against(tonight, baseline, name)
    if not unsaid:
        return judgement
    return replace(judgement, check=replace(judgement.check, text=line(f"{judgement.check.text}; {unsaid}")))


def _against(tonight: Tonight, baseline: Baseline, name: str) -> Judgement:
    """What a comparison with a commit finds, which the text calls by a name."""
    case, good = tonight.case, baseline.commit
    parents = {tonight.commit: [good]} if good != tonight.commit else {}
    tree = Commits(tonight.checkout, good, parents, tonight.paths).tree(good)
    if tree == tonight.tree:
        return _same_code(tonight, baseline, name)
    base, cached = _replayed(tonight, good, fresh=False, run=0)
    if not isinstance(base, Trace):
        why = failure(base)
        status: Status = "not judged" if why.startswith(ABSENT) else "error"
        return _judgement(status, f"{name} cannot be replayed: {why}", baseline)
    baseline = replace(baseline, chain=base.chain)
    compared = compare_traces(base, tonight.trace, case.compare)
    if compared.verdict == "identical":
        then = _before(tonight, baseline, tree, base)
        if then and then.version == tonight.version and then.chain != base.chain and case.compare.mode == "bitwise":
            text = f"the bits of {name}, but on the green night of {then.at} it had others here; {_UNRECORDED}"
            return _judgement("changed", text, baseline)
        return _judgement("green", f"the bits of {name}{_renamed(compared)}", baseline, compared)
    if compared.verdict == "within":
        return _judgement("green", f"within the case's bounds of {name}: {_where(compared)}", baseline, compared)
    return _moved(tonight, baseline, name, base, compared, cached=cached)


def _approved_code(tonight: Tonight, approved: str) -> tuple[str, str]:
    """The commit whose code has the approved numbers: the approving one, or else one that its golden run was of.

    With it goes what is to be said where the approving one counts though no golden run of it says what it was of.

    Raises:
        NotVerifiableError: the golden run was recorded of other code, which is not here or was in no commit.
    """
    git, brought = tonight.checkout.git, recorded(tonight.checkout, tonight.case.name, approved)
    notes = [note for note in brought if note.tree or note.commit]
    for note in notes:
        if note.tree and has_code(git, approved, tonight.paths, note.tree, note.untracked):
            continue
        origin = note.commit if note.commit and git.tells("cat-file", "-e", f"{note.commit}^{{commit}}") else ""
        keys = code_keys(git, [approved, *([origin] if origin else [])], tonight.paths)
        if origin and keys.of(origin) == keys.of(approved):  # the case had other paths then
            continue
        if holder := _holding(tonight, note.tree) or origin:
            return holder, ""
        if note.commit:
            what = f"other code, that of {short(note.commit)}, which is not here: fetch it, or"
        else:
            what = "changes that neither it nor another commit here holds as they were (a hook may rewrite them):"
        raise NotVerifiableError(
            f"the commit {short(approved)} brought a golden run that was recorded of {what} approve what is here with "
            f"`repro golden approve {tonight.case.name} --reason ...`"
        )
    return approved, _UNSAID if brought and not notes else ""


def _refuse_changed(tonight: Tonight, approved: str) -> None:
    """Refuse to go on where the numbers were approved of another case, or on other rollouts, than tonight's.

    Raises:
        NotVerifiableError: the commit does not say of what.
        ReproError: they were.
    """
    case, git = tonight.case, tonight.checkout.git
    cases = CommittedCases(git, approved)
    then = cases.read(case.name)
    fix = f"`repro golden approve {case.name} --reason ...`, then commit golden"
    if then is None:
        raise NotVerifiableError(f"the approved commit {short(approved)} has no {CASES / case.name}.toml: {fix}")
    asked = cases.asked(then)
    if changed := differences(asked, of_checkout(git, case)):
        what = f"the case {case.name} was changed since the approved commit {short(approved)}"
        raise ReproError(f"{what} ({in_words(changed)}): {fix}")
    store = Store(tonight.checkout.root)
    rollouts = store.rollouts_path(case)
    if rollouts is None:
        return
    if not asked["case"][ROLLOUTS]:
        raise NotVerifiableError(f"git has no {case.case.rollouts} and no pointer to it: {fix}")
    store.refuse_unknown(rollouts)


def _moved(
    tonight: Tonight, baseline: Baseline, name: str, base: Trace, compared: Compared, *, cached: bool
) -> Judgement:
    """Whether it is the code that moved the numbers: the baseline, which may be an old replay, is made once more."""
    same = f"; {compared.drift.untouched}" if compared.drift.untouched else ""
    text = f"differs from {name} at {_where(compared)}{same}"
    tonight.watch(Event(f"{text}: replaying {short(baseline.commit)} once more"))
    again, _ = _replayed(tonight, baseline.commit, fresh=True, run=1)
    if not isinstance(again, Trace):
        return _judgement("flaky", f"{text}; but a second replay of that fails: {failure(again)}", baseline, compared)
    rule = tonight.case.compare
    itself, now = compare_traces(base, again, rule), compare_traces(again, tonight.trace, rule)
    if itself.verdict != "moved" and now.verdict == "moved":
        outside = baseline.commit not in tonight.past.order
        of = f"{short(baseline.commit)} is none that the tested one holds"
        good, why = _begin(tonight, again, of) if outside else (baseline.commit, "")
        return _judgement("changed", text + why, baseline, compared, good)
    if now.verdict == "moved" or not cached or rule.mode == "bounds":
        return _judgement(
            "flaky", f"{name} does not reproduce itself: two replays differ at {_where(itself)}", baseline
        )
    old = f"{name} had other numbers when it was replayed here before, and tonight has these: "
    return _judgement("changed", old + _UNRECORDED, baseline, compared)


def _replayed(tonight: Tonight, commit: str, *, fresh: bool, run: int) -> tuple[Answer, bool]:
    """One replay, and whether it was found in the journal."""
    case = tonight.case
    axis = Commits(tonight.checkout, commit, {}, tonight.paths)
    options = replace(tonight.options, fresh=fresh)
    with session(tonight.checkout, case, axis, Bitwise(), tonight.watch, options) as (scheduler, _):
        scheduler.say(f"replaying {case.name} at {short(commit)}")
        (answer,) = scheduler.ask(Request(commit, case.steps, stage="ends", run=run, full=True))
        return answer, scheduler.cost.reused > 0


def _same_code(tonight: Tonight, baseline: Baseline, name: str) -> Judgement:
    """The code is that of the baseline, so it is the machine that may have changed: by what an earlier night had."""
    then = _before(tonight, baseline, tonight.tree, tonight.trace)
    alone = f"the code is that of {name}: run-to-run says all"
    if then is None:
        return _judgement("green", alone, baseline)
    baseline = replace(baseline, chain=then.chain)
    if then.chain == tonight.trace.chain:
        return _judgement("green", f"the bits of the green night of {then.at}, whose code is the same", baseline)
    if then.version != tonight.version:  # which may observe other signals
        was = f"repro was {then.version} on the last green night and is {tonight.version}"
        return _judgement("green", f"{alone}; {was}: chains are not compared", baseline)
    if tonight.case.compare.mode == "bounds":
        left = _left(then.metrics, tonight.metrics, tonight.case.compare.bounds)
        if not left:
            return _judgement("green", f"within the case's bounds of the green night of {then.at}", baseline)
        return _judgement("changed", f"{left} since the green night of {then.at}; {_UNRECORDED}", baseline)
    return _judgement("changed", f"other bits than on the green night of {then.at}; {_UNRECORDED}", baseline)


def _before(tonight: Tonight, baseline: Baseline, tree: str | None, trace: Trace) -> NightlyRun | None:
    """The last trusted night of some code under the identity that a trace of it has.

    In bounds mode the first of this version of repro: what each night may move adds up.
    """
    identity = dict(trace.header.identity)
    runs = [n for n in tonight.trusted(baseline) if n.tree == tree and dict(n.identity) == identity]
    alike = [n for n in runs if n.version == tonight.version] if tonight.case.compare.mode == "bounds" else []
    return alike[0] if alike else runs[-1] if runs else None


def _left(then: Mapping[str, Summary], now: Mapping[str, Summary], bounds: Mapping[str, Bound]) -> str:
    """The first bounded metric that is not what it was, by what a night keeps of it; empty where none is."""
    places: tuple[Literal["first", "last", "low", "high"], ...] = ("first", "last", "low", "high")
    for metric, bound in bounds.items():
        for name in tellings(metric, then, now) or [metric]:
            if name not in then or name not in now:
                return f"{name} is {'gone' if name not in now else 'new'}"
            for place in places:
                a, b = getattr(then[name], place), getattr(now[name], place)
                if not (math.isfinite(b) and abs(b - a) <= bound.atol + bound.rtol * abs(a)):
                    return f"{name} ({place}) {a!r} became {b!r}"
    return ""


def _where(compared: Compared) -> str:
    first: Any = compared.first
    return str(first) if first else f"its length: {compared.drift.ended}"


def _renamed(compared: Compared) -> str:
    return f"; {compared.drift.renames}" if compared.drift.renames else ""
