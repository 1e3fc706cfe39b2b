"""What a night is compared with: the past of a commit, the last green commit, the golden run of the machine."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import history_kit as kit
from conftest import Repo
from nightly_kit import approve, nightly_run
from trace_kit import HEADER, kill

from repro.nightly.baseline import Judgement, Tonight, baseline_of
from repro.nightly.lineage import lineage, newest_green
from repro.nightly.records import Baseline, Check, NightlyRun, Status
from repro.nightly.trusted import summarise
from repro_bisect.driver.session import Options
from repro_golden.case.file import find_case
from repro_golden.repository.checkout import find_checkout
from repro_golden.trace import Trace, TraceWriter
from repro_golden.trace.writer import metric_row

OBSERVE = "\n[observe]\nmetrics = ['loss=(?P<loss>\\S+)']\n"
BOUNDS = OBSERVE + '\n[compare]\nmode = "bounds"\n\n[compare.bounds.loss]\natol = 0.5\n'


# -- what came before


def test_the_past_of_a_commit(tmp_path: Path) -> None:
    """The newest approval is the newest commit that brought or changed a pointer, of any machine; removals are none."""
    repo = kit.start(tmp_path)
    checkout = find_checkout(repo.root)
    first = repo.git("rev-parse", "HEAD")
    assert lineage(checkout, "toy", first).approved == ""
    approved = approve(repo, "m1")
    approve(repo, "m1", case="other")
    later = kit.note(repo, "later")
    past = lineage(checkout, "toy", later)
    assert past.approved == approved and past.since == frozenset(repo.git("rev-list", f"{first}..HEAD").split())
    assert list(past.order) == repo.git("rev-list", "HEAD").split()
    # a side that was approved before a merge; and a removal
    repo.git("checkout", "--quiet", "-b", "side", approved)
    side = approve(repo, "m2", text="outs: [2]\n")
    repo.git("checkout", "--quiet", "main")
    repo.git("merge", "--quiet", "--no-ff", "--message", "Merge", "side")
    merged = repo.git("rev-parse", "HEAD")
    assert lineage(checkout, "toy", merged).since == frozenset({side, merged})
    repo.git("checkout", "--quiet", "-b", "both", later)
    approve(repo, "m3")
    repo.git("merge", "--quiet", "--no-ff", "--message", "Merge what both approved", "side")
    both = repo.git("rev-parse", "HEAD")
    assert lineage(checkout, "toy", both).approved == both, "no side's own code has what both approved"
    repo.git("checkout", "--quiet", "main")
    (repo.root / "golden/runs/m1/toy.dvc").unlink()
    gone = repo.commit("Retire m1")
    past = lineage(checkout, "toy", gone)
    assert past.approved == side
    runs = [
        nightly_run(commit=first),
        nightly_run(commit=later, machine="m9"),
        nightly_run(commit=gone, status="changed"),
    ]
    last = newest_green(
        [*runs, nightly_run(commit=first, at="2027-01-01T00:00:00Z"), nightly_run(commit="f" * 40)], past
    )
    assert last is runs[1], "the newest commit counts, not the newest file, and no commit that is not in its past"
    assert newest_green(runs[2:], past) is None


def test_what_was_there_before_approves_nothing_again(tmp_path: Path) -> None:
    """A golden run that is brought back, moved or put back to what it was has the numbers of its first commit."""
    repo = kit.start(tmp_path)
    checkout, pointer = find_checkout(repo.root), repo.root / "golden/runs/m1/toy.dvc"
    approved = approve(repo, "m1")
    pointer.unlink()
    repo.commit("Retire it")
    assert lineage(checkout, "toy", kit.note(repo, "a regression")).approved == approved
    assert lineage(checkout, "toy", approve(repo, "m1")).approved == approved, "it is only back"
    pointer.parent.rename(repo.root / "golden/runs/m2")
    assert lineage(checkout, "toy", repo.commit("Another name")).approved == approved, "it only moved"
    other = approve(repo, "m2", text="outs: [other]\n")
    assert lineage(checkout, "toy", other).approved == other
    back = approve(repo, "m2", text="outs: [m1]\n")
    assert lineage(checkout, "toy", back).approved == approved, "the other numbers are approved no more"


def test_what_is_withdrawn_or_never_was_on_the_line_is_no_approval(tmp_path: Path) -> None:
    """Nights of numbers that were put back are no baseline; what a merge left behind on its side approves nothing."""
    repo = kit.start(tmp_path, case=kit.CASE + OBSERVE)
    checkout, trace = find_checkout(repo.root), made(tmp_path / "t", 1.0, 2.0)
    approved = approve(repo, "m1")
    kit.edit(repo, "lr=0.01", "lr=0.02", "Learn faster")
    moved = approve(repo, "m1", text="outs: [faster]\n")
    withdrawn = earlier(repo, trace, machine="m9")
    assert tonight(repo, trace, withdrawn).last_green == withdrawn
    repo.git("revert", "--no-edit", f"{approved}..{moved}")
    past = lineage(checkout, "toy", repo.git("rev-parse", "HEAD"))
    assert past.approved == approved and moved not in past.since
    assert tonight(repo, trace, withdrawn).last_green is None
    pointer = repo.root / "golden/runs/m1/toy.dvc"
    pointer.unlink()
    repo.commit("Retire it")
    repo.git("checkout", "--quiet", "-b", "old", f"{approved}^")
    kit.note(repo, "old", "docs/old")
    repo.git("checkout", "--quiet", "main")
    repo.git("merge", "--quiet", "--no-ff", "--message", "Merge an old branch", "old")
    past = lineage(checkout, "toy", repo.git("rev-parse", "HEAD"))
    assert past.approved == approved and f"{repo.git('rev-parse', 'old')}" not in past.since
    repo.git("checkout", "--quiet", "-b", "release", approved)
    approve(repo, "m3")
    repo.git("checkout", "--quiet", "main")
    repo.git("merge", "--quiet", "--strategy", "ours", "--message", "Merge release", "release")
    assert lineage(checkout, "toy", repo.git("rev-parse", "HEAD")).approved == approved


def test_a_shallow_clone_knows_of_no_approval_that_it_left_out(tmp_path: Path) -> None:
    """Its oldest commit seems to bring the golden run: that commit's numbers are approved by nobody."""
    repo = kit.start(tmp_path, case=kit.CASE + OBSERVE)
    approve(repo, "m1")
    for depth in (1, 2):
        kit.note(repo, f"work {depth}")
    for depth in (1, 2, 3, 4):  # one that holds the approving commit may lack an earlier one
        clone = tmp_path / f"depth {depth}"
        repo.git("clone", "--quiet", "--depth", str(depth), repo.root.as_uri(), str(clone))
        past = lineage(find_checkout(clone), "toy", repo.git("rev-parse", "HEAD"))
        assert (past.approved, past.cut_off, len(past.since)) == ("", True, min(depth, 3))
        trace = made(tmp_path / f"t{depth}", 1.0, 2.0)
        status, kind, text = said(baseline_of(replace(tonight(repo, trace, machine="m2"), past=past)))
        assert (status, kind) == ("not judged", "none") and "`git fetch --unshallow`" in text
    repo.git("clone", "--quiet", "--depth", "9", repo.root.as_uri(), str(tmp_path / "all"))
    assert lineage(find_checkout(tmp_path / "all"), "toy", repo.git("rev-parse", "HEAD")).approved


# -- the baseline, without training


def made(folder: Path, *values: float) -> Trace:
    """A trace with one metric."""
    writer = TraceWriter(folder, HEADER)
    for step, value in enumerate(values):
        writer.add(metric_row("loss", "loss", value))
        writer.end_step(step)
    kill(writer)
    return Trace(folder)


def tonight(repo: Repo, trace: Trace, *runs: NightlyRun, machine: str = "m1") -> Tonight:
    """A night of HEAD that has been replayed."""
    checkout = find_checkout(repo.root)
    case, commit = find_case(repo.root, None), repo.git("rev-parse", "HEAD")
    return Tonight(
        checkout=checkout, case=case, commit=commit, tree=_tree(repo), paths=case.paths(), machine=machine,
        rollouts="rollouts", trace=trace, metrics=summarise(s.metrics for s in trace.steps),
        past=lineage(checkout, "toy", commit), runs=runs, version="1", options=Options(jobs=1),
        watch=lambda _: None,
    )  # fmt: skip


def _tree(repo: Repo, commit: str = "HEAD") -> str:
    return repo.git("rev-parse", f"{commit}:train.py")


def earlier(repo: Repo, trace: Trace, **given: Any) -> NightlyRun:
    """A green night of HEAD's code, with a trace's chain."""
    case = find_case(repo.root, None)
    fields = {"case": "toy", "commit": repo.git("rev-parse", "HEAD"), "tree": _tree(repo), "key": case.digest}
    metrics = summarise(s.metrics for s in trace.steps)
    return nightly_run(**fields | {"steps": len(trace.steps), "chain": trace.chain, "metrics": metrics} | given)


def said(judgement: Judgement) -> tuple[Status, str, str]:
    return judgement.check.status, judgement.baseline.kind, judgement.check.text


def test_a_first_night_is_never_a_pass(tmp_path: Path) -> None:
    """Nothing to compare with: the case is not judged, and the text names the cure. Red nights are no baseline."""
    repo, trace = kit.start(tmp_path, case=kit.CASE + OBSERVE), made(tmp_path / "t", 1.0, 2.0)
    baseline = baseline_of(
        tonight(repo, trace, earlier(repo, trace, status="changed"), earlier(repo, trace, status="flaky"))
    )
    assert said(baseline)[:2] == ("not judged", "none") and "`repro golden record toy`" in baseline.check.text


def test_the_code_of_the_last_green_commit(tmp_path: Path) -> None:
    """It is not replayed: the chain of this machine's own green night decides, and without one run-to-run says all."""
    repo = kit.start(tmp_path, case=kit.CASE + OBSERVE)
    same, other = made(tmp_path / "a", 1.0, 2.0), made(tmp_path / "b", 1.0, 2.5)
    then = earlier(repo, same)
    head = kit.note(repo, "words", "docs/words")
    assert _tree(repo, "HEAD~") == _tree(repo)

    def ask(*runs: NightlyRun) -> Judgement:
        return baseline_of(tonight(repo, same, *runs))

    answer = ask(then)
    assert said(answer)[:2] == ("green", "last green") and "whose code is the same" in answer.check.text
    assert (answer.baseline.commit, answer.baseline.chain) == (then.commit["commit"], same.chain)
    answer = ask(replace(then, chain=other.chain))
    assert said(answer)[:2] == ("changed", "last green") and answer.good == ""
    assert "neither the code nor the machine changed: look at what the identity does not record" in answer.check.text
    for alone in (replace(then, machine="m2", chain="x"), replace(then, identity={"host": {"cpu": "x"}}, chain="x")):
        assert said(ask(alone)) == (
            "green", "last green",
            f"the code is that of the last green commit {then.commit['commit'][:10]}: run-to-run says all",
        )  # fmt: skip
    answer = ask(replace(then, chain="x", version="0"))
    assert answer.check.status == "green" and "repro was 0" in answer.check.text
    approved = approve(repo, "m2")
    answer = ask(replace(then, chain="x"))
    assert said(answer)[:2] == ("green", "approved") and answer.baseline.commit == approved, "it begins anew"
    assert head in lineage(find_checkout(repo.root), "toy", approved).order


def test_what_is_green_elsewhere_approves_nothing_here(tmp_path: Path) -> None:
    """A commit that was red on this machine does not become its baseline by another machine's green night of it."""
    repo = kit.start(tmp_path, case=kit.CASE + OBSERVE)
    trace = made(tmp_path / "a", 1.0, 2.0)
    first = earlier(repo, trace, machine="m1", at="2026-01-01T00:00:00Z")
    kit.edit(repo, "lr=0.01", "lr=0.02", "Learn faster")
    moved = [Check("run-to-run", "green", "two replays agree"), Check("baseline", "changed", "other bits")]
    red = earlier(repo, trace, machine="m1", at="2026-01-02T00:00:00Z", status="changed", chain="x", checks=moved)
    there = earlier(repo, trace, machine="m2", at="2026-01-03T00:00:00Z")
    assert tonight(repo, trace, first, red, there).last_green == first
    assert tonight(repo, trace, first, red, there, machine="m3").last_green == there, "where it was never red it may"
    failed = replace(red, status="error", checks=[*moved, Check("threads=2", "error", "it could not be replayed")])
    assert tonight(repo, trace, first, failed, there).last_green == first, "whatever else befell that night"
    noise = replace(red, status="flaky", checks=[Check("run-to-run", "flaky", "two replays differ")])
    assert tonight(repo, trace, first, red, noise, there).last_green == first, "noise after it has judged nothing"
    again = earlier(repo, trace, machine="m1", at="2026-01-04T00:00:00Z")
    assert tonight(repo, trace, first, red, there, again).last_green == again, "what was red by mistake may turn green"
    assert tonight(repo, trace, first, there).last_green == first, "the commit may have moved this machine's alone"
    approve(repo, "m2")
    assert tonight(repo, trace, first, red, there).last_green is None, "an approval begins anew"


def test_a_red_night_is_lifted_by_no_other_machine(tmp_path: Path) -> None:
    """A commit on top of the red one may be green elsewhere: the change is in it, and nobody approved it here."""
    repo = kit.start(tmp_path, case=kit.CASE + OBSERVE)
    trace = made(tmp_path / "a", 1.0, 2.0)
    approved = approve(repo, "m0")
    commits = [kit.note(repo, f"work {k}") for k in range(3)]
    moved = [Check("run-to-run", "green", "two replays agree"), Check("baseline", "changed", "other bits")]

    def at(commit: str, day: int, machine: str = "m1", **given: Any) -> NightlyRun:
        time = f"2026-01-{day:02}T00:00:00Z"
        return earlier(repo, trace, commit=commit, tree=_tree(repo, commit), machine=machine, at=time, **given)

    def last(*runs: NightlyRun) -> NightlyRun | None:
        return tonight(repo, trace, *runs).last_green

    red = at(commits[1], 1, status="changed", checks=moved, baseline=Baseline("approved", approved))
    between, after = at(commits[0], 2, "m2"), at(commits[2], 2, "m2")
    assert last(between, after) == after
    assert last(red, after) is None and last(red, between) is None, "the change may be in either"
    for other in (replace(red, key="other"), replace(red, rollouts="others"), replace(red, steps=9)):
        assert last(other, after) is None, "another case does not take the change away"
    judgement = baseline_of(replace(tonight(repo, trace, red, after), commit=approved, tree=_tree(repo, approved)))
    assert said(judgement)[:2] == ("green", "approved") and judgement.baseline.commit == approved
    known = replace(red, baseline=Baseline("last green", commits[0]))
    assert last(known, between, after) == between, "its own baseline stays one"
    late = replace(red, baseline=Baseline("golden", commits[2]))
    assert last(late, after) is None and last(late, between) is None, "a golden run of later code bounds no change"
    green, failed = at(commits[2], 3), at(commits[2], 3, status="error", checks=[Check("run-to-run", "error", "")])
    assert last(red, after, green) == green and last(red, after, failed) is None
    beside = replace(red, checks=[moved[0], Check("baseline", "green", "same bits"), Check("events", "changed", "")])
    assert last(beside, after) == after, "event files are no commit's"
    within = replace(green, compared={"verdict": "within"})
    assert last(red, after, within) == after, "lifted"
    assert last(red, after, at(commits[0], 3, compared={"verdict": "within"})) is None, "not by what came before it"
    assert last(red, after, replace(within, key="other")) is None, "nor by what was asked otherwise"


def test_numbers_are_approved_of_a_case_and_its_rollouts(tmp_path: Path) -> None:
    """What changes how a case is run changes what is approved, also where the machine has no golden run of its own."""
    text = kit.CASE + OBSERVE
    repo = kit.start(tmp_path, case=None)
    approve(repo, "m0")
    path, trace = repo.root / "golden/cases/toy.toml", made(tmp_path / "a", 1.0, 2.0)
    path.parent.mkdir(parents=True)

    def ask(case: str, *runs: NightlyRun) -> tuple[Status, str, str]:
        path.write_text(case)
        return said(baseline_of(tonight(repo, trace, *runs)))

    status, kind, why = ask(text)
    assert (status, kind) == ("not judged", "none") and "has no golden/cases/toy.toml" in why
    repo.commit("Add the case")
    approved = approve(repo, "m1")
    assert ask(text)[:2] == ask(f"# words\n{text}\n[nightly]\nleast = 2\n")[:2] == ("green", "approved")
    green = earlier(repo, trace)
    assert ask(text, green)[:2] == ("green", "last green")
    for old, new, told in (
        ("--steps 6", "--lr 9", "subject.command"), ("'loss=", "'total=", "observe.metrics"),
        ("steps = 6", "steps = 2", "case.steps 6 -> 2"),
    ):  # fmt: skip
        other = text.replace(old, new)
        status, kind, why = ask(other, green)
        assert (status, kind) == ("error", "none") and told in why and f"approved commit {approved[:10]}" in why
        assert "`repro golden approve toy --reason ...`" in why and "\n" not in why
        poisoned = replace(green, key=find_case(repo.root, None).digest)
        assert ask(other, poisoned)[0] == "error", "a green night approves no case"
    repo.commit("Other steps")
    assert approve(repo, "m2") and ask(path.read_text())[:2] == ("green", "approved"), "until a newer approval"


def test_a_green_night_of_another_case_is_no_baseline(tmp_path: Path) -> None:
    """Nor one of other rollouts, or of other steps, which the key of a case does not tell."""
    repo, trace = kit.start(tmp_path, case=kit.CASE + OBSERVE), made(tmp_path / "a", 1.0, 2.0)
    green = earlier(repo, trace)
    assert tonight(repo, trace, green).last_green == green
    for machine in ("m1", "m2"):
        others = [replace(green, machine=machine, **{key: "x"}) for key in ("key", "rollouts")]
        assert tonight(repo, trace, *others, replace(green, machine=machine, steps=1)).last_green is None


def test_rollouts_that_nobody_approved(tmp_path: Path) -> None:
    """Another pointer, committed or not, is another question; rollouts that git does not know are none at all."""
    repo = kit.start(tmp_path, case=kit.CASE.replace("steps = 6", 'steps = 6\nrollouts = "data/x"') + OBSERVE)
    trace, folder = made(tmp_path / "a", 1.0, 2.0), repo.root / "data/x"
    folder.mkdir(parents=True)
    (folder / "0.txt").write_text("1")
    (repo.root / ".gitignore").write_text("/data/\n")
    approve(repo, "m1")

    def ask() -> tuple[Status, str, str]:
        return said(baseline_of(tonight(repo, trace)))

    status, _, why = ask()
    assert status == "not judged" and "git has no data/x and no pointer to it" in why
    (repo.root / ".gitignore").unlink()
    approve(repo, "m2")
    assert ask()[:2] == ("green", "approved")
    (folder / "1.txt").write_text("one more, which git does not know")
    assert ask()[0] == "error"
    repo.git("add", "--all")
    assert "case.content of rollouts" in ask()[2]
    repo.commit("Other rollouts")
    status, _, why = ask()
    assert status == "error" and "case.content of rollouts" in why
    approve(repo, "m3")
    assert ask()[:2] == ("green", "approved")


def test_bounds_where_the_code_is_the_same(tmp_path: Path) -> None:
    """In bounds mode other bits are no change; metrics of the earlier night that left their bounds are."""
    repo = kit.start(tmp_path, case=kit.CASE + BOUNDS)
    trace = made(tmp_path / "a", 1.0, 2.0)
    for value, status in ((2.4, "green"), (2.6, "changed")):
        then = earlier(repo, made(tmp_path / f"{value}", 1.0, value))
        baseline = baseline_of(tonight(repo, trace, then))
        assert baseline.check.status == status, baseline.check.text
    assert "loss (last) 2.6 became 2.0" in baseline.check.text
    runs = [
        earlier(repo, made(tmp_path / f"n{k}", 1.0, 2.7 - 0.35 * k), at=f"2026-11-2{k}T03:00:00Z") for k in range(2)
    ]
    assert said(baseline_of(tonight(repo, trace, *runs)))[0] == "changed", "many small moves are a large one"


def test_a_night_that_was_only_within_bounds_is_no_baseline(tmp_path: Path) -> None:
    """Otherwise each night could drift as far from the one before as the bounds allow, and all of them be green."""
    repo = kit.start(tmp_path, case=kit.CASE + BOUNDS)
    trace = made(tmp_path / "a", 1.0, 2.0)
    exact = earlier(repo, trace)
    kit.edit(repo, "lr=0.01", "lr=0.02", "Learn faster")
    within = earlier(repo, trace, at="2026-11-23T03:00:00Z", compared={"verdict": "within"})
    assert tonight(repo, trace, exact, within).last_green == exact
