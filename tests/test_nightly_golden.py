"""A golden run as what a night is compared with, and where a search begins for what it is found to have changed."""

from __future__ import annotations

import json
import re
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import history_kit as kit
import pytest
from conftest import Repo
from nightly_kit import IDENTITY, approve
from test_nightly_baseline import BOUNDS, OBSERVE, _tree, earlier, made, said, tonight

from repro.nightly import baseline as judge
from repro.nightly.baseline import Judgement, _approved_code, baseline_of
from repro.nightly.checks import run_to_run
from repro.nightly.nightly import Asked, nightly_run_of
from repro.nightly.records import Baseline, NightlyRun
from repro_bisect.axes.commits import Commits
from repro_bisect.driver.session import Options, session
from repro_bisect.predicates.predicates import Bitwise
from repro_bisect.probe.answers import Skip
from repro_golden.case.file import find_case
from repro_golden.repository.checkout import find_checkout
from repro_golden.store.golden import write_record
from repro_golden.subjects import identity_of
from repro_golden.trace import Trace


def golden(repo: Repo, trace_of: Path, machine: str, **given: Any) -> Trace:
    """A golden run of this machine in the working tree, without its proofs."""
    case, folder = find_case(repo.root, None), repo.root / "golden" / "runs" / machine / "toy"
    folder.mkdir(parents=True, exist_ok=True)
    subprocess.run(["cp", "-r", trace_of, folder / "trace"], check=True)
    trace = Trace(folder / "trace")
    facts = {
        "case": case.canonical(), "chain": trace.chain, "identity": IDENTITY, "recorded": {}, "proofs": [],
        "rollouts": "rollouts", "commit": repo.git("rev-parse", "HEAD"), "tree": _tree(repo),
    }  # fmt: skip
    write_record(folder, facts | given)
    repo.git("add", "--", str(folder))
    return trace


def test_the_golden_run_of_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is what numbers are compared with; a change is searched from the newest commit that had its numbers."""
    repo = kit.start(tmp_path, case=kit.CASE + OBSERVE)
    first, case = repo.git("rev-parse", "HEAD"), find_case(repo.root, None)
    machine = identity_of(case, repo.root).machine
    was, now = made(tmp_path / "a", 1.0, 2.0), made(tmp_path / "b", 1.0, 2.5)
    kept = golden(repo, tmp_path / "a", machine)

    def ask(trace: Trace, *nightly_runs: NightlyRun) -> Judgement:
        return baseline_of(tonight(repo, trace, *nightly_runs, machine=machine))

    answer = ask(was)
    assert said(answer) == ("green", "golden", "the bits of the golden run") and answer.compared is None
    assert (answer.baseline.chain, answer.baseline.commit) == (kept.chain, first)
    answer = ask(now)
    assert answer.check.status == "changed" and answer.good == "", "its own code: nothing to search"
    assert (
        "step 1, loss, loss" in answer.check.text and "look at what the identity does not record" in answer.check.text
    )
    kit.note(repo, "words")
    assert ask(now).good == first, "no green night yet: from the golden run's own commit"
    green = earlier(repo, was, machine=machine, baseline=Baseline("golden", first, kept.chain))
    second = kit.note(repo, "more words")
    assert ask(now, green).good == green.commit["commit"] != second
    assert ask(now, replace(green, baseline=Baseline("golden", first, "x"))).good == first, "of another golden run"
    monkeypatch.setattr(judge, "_replayed", lambda *_, **__: (Skip("it fails"), False))
    golden(repo, tmp_path / "a", machine, commit=None, tree=None)
    answer = ask(now)
    assert answer.good == "" and "does not say which code it was recorded of (" in answer.check.text
    golden(repo, tmp_path / "a", machine, commit=None, tree="d" * 40)
    assert "recorded from changes that are in no commit" in ask(now).check.text
    golden(repo, tmp_path / "a", machine, commit="f" * 40, tree=None)
    assert ask(now).good == "" and "none that the tested one holds" in ask(now).check.text


def test_a_golden_run_that_does_not_serve(tmp_path: Path) -> None:
    """Of another case or other rollouts it is an error; a noisy one judges no bits, but bounds."""
    repo = kit.start(tmp_path, case=kit.CASE + OBSERVE)
    case = find_case(repo.root, None)
    machine = identity_of(case, repo.root).machine
    was, now = made(tmp_path / "a", 1.0, 2.0), made(tmp_path / "b", 1.0, 2.25)
    golden(repo, tmp_path / "a", machine, case=case.canonical() | {"steps": 7})
    baseline = baseline_of(tonight(repo, was, machine=machine))
    assert baseline.check.status == "error" and "was changed since its golden run (steps)" in baseline.check.text
    golden(repo, tmp_path / "a", machine, rollouts="others")
    baseline = baseline_of(tonight(repo, was, machine=machine))
    assert baseline.check.status == "error" and "rollouts are others" in baseline.check.text
    golden(repo, tmp_path / "a", machine, noise={"runs": 3, "spread": {}})
    baseline = baseline_of(tonight(repo, was, machine=machine))
    assert baseline.check.status == "not judged" and "bits are not verifiable here" in baseline.check.text
    (repo.root / "golden/cases/toy.toml").write_text(kit.CASE + BOUNDS)
    baseline = baseline_of(tonight(repo, now, machine=machine))
    assert baseline.check.status == "green" and baseline.check.text.startswith(
        "within the case's bounds of the golden run"
    )
    assert baseline.compared is not None and baseline.compared.verdict == "within"


# -- what a golden run spares


@pytest.mark.whole
def test_a_golden_run_is_a_first_replay_only_where_that_is_asked_for(tmp_path: Path) -> None:
    """A night makes both of its replays, though there is a golden run of its commit; a search takes that for one."""
    repo = kit.start(tmp_path, case=kit.CASE + OBSERVE)
    for words in (("init", "--remote", str(tmp_path / "remote")), ("golden", "record", "toy")):
        done = repo.repro(*words)
        assert done.returncode == 0, done.stdout + done.stderr
    commit, checkout = repo.commit("Record"), find_checkout(repo.root)
    case = find_case(checkout.root, "toy")
    made = []
    for first in (False, True):
        axis = Commits(checkout, commit, {}, case.paths())
        watch: list[object] = []
        with session(checkout, case, axis, Bitwise(), watch.append, Options(fresh=True), golden_first=first) as (
            scheduler,
            golden,
        ):
            check, trace = run_to_run(scheduler, case, commit)
            assert golden is not None and trace is not None and check.status == "green", watch
            made.append((scheduler.cost.ends.probes, trace is golden.trace))
    assert made == [(2, False), (1, True)]


def test_a_golden_run_approves_the_code_that_it_was_recorded_of(tmp_path: Path) -> None:
    """A squashed branch brings a golden run and what others changed meanwhile, which nobody approved."""
    repo, trace = kit.start(tmp_path, case=kit.CASE + OBSERVE), made(tmp_path / "t", 1.0, 2.0)
    kit.edit(repo, "scale = 1.0\n", "scale = 3.0\n", "The branch")
    branch, code = repo.git("rev-parse", "HEAD"), _tree(repo)
    kit.edit(repo, "lr", "rate", "Meanwhile")
    lost = "f" * 40

    def brought(commit: str, tree: str) -> str:
        return approve(repo, "m2", text=f"outs:\n- md5: {commit}\nmeta:\n  commit: {commit}\n  tree: {tree}\n")

    for commit, tree in ((lost, _tree(repo)), (repo.git("rev-parse", "HEAD"), code)):
        approved = brought(commit, tree)
        status, kind, text = said(baseline_of(tonight(repo, trace)))
        assert (status, kind) == ("green", "approved") and approved[:10] in text
    brought(lost, "d" * 40)
    status, kind, text = said(baseline_of(tonight(repo, trace)))
    assert (status, kind) == ("not judged", "none") and f"that of {lost[:10]}, which is not here: fetch it" in text
    approve(repo, "m2", text="outs:\n- md5: x\nmeta:\n  owner: me\n")
    assert said(baseline_of(tonight(repo, trace)))[:2] == ("green", "approved"), "what is no note of ours says nothing"
    other = f"outs:\n- md5: {'e' * 32}.dir\n  hash: md5\nmeta:\n  content: {'f' * 32}.dir\n"
    approve(repo, "m2", text=f"{other}  commit: {branch}\n  tree: {code}\n")
    status, kind, text = said(baseline_of(tonight(repo, trace)))
    assert (status, kind) == ("green", "approved") and "names other content" in text, "what stood before still does"
    for commit in (branch, lost):  # one that was rebased has the code all the same
        assert _approved_code(tonight(repo, trace), brought(commit, code)) == (branch, "")


def test_numbers_of_code_that_no_commit_holds_are_not_judged(tmp_path: Path) -> None:
    """A golden run of uncommitted changes approves the commit that has them, before it or after it, and no other.

    One that does not say which code it is of approves the commit that brought it, and the night says so, unless another
    of that commit says it.
    """
    repo, trace = kit.start(tmp_path, case=kit.CASE + OBSERVE), made(tmp_path / "t", 1.0, 2.0)
    pointer = f"outs:\n- md5: {'e' * 32}.dir\n  hash: md5\nmeta:\n  content: {'e' * 32}.dir\n"
    repo.edit("train.py", "scale = 1.0\n", "scale = 3.0\n")
    ran = find_checkout(repo.root).ran(find_case(repo.root, None))
    repo.git("stash", "--quiet")
    approved = approve(repo, "m2", text=pointer)
    status, kind, text = said(baseline_of(tonight(repo, trace)))
    assert (status, kind) == ("green", "approved") and approved[:10] in text
    assert "; the golden run does not say which code it was recorded of (" in text
    approved = approve(repo, "m2", text=f"{pointer}  tree: {ran.tree}\n")
    status, kind, text = said(baseline_of(tonight(repo, trace)))
    assert (status, kind) == ("not judged", "none") and "`repro golden approve toy --reason ...`" in text
    assert f"{approved[:10]} brought a golden run that was recorded of changes that neither it" in text
    repo.git("stash", "pop", "--quiet")
    later = repo.commit("What ran")
    answer = baseline_of(tonight(repo, trace))
    assert said(answer)[:2] == ("green", "approved") and answer.baseline.commit == later
    approved = approve(repo, "m3", text=f"{pointer}  tree: {ran.tree}\n")
    assert baseline_of(tonight(repo, trace)).baseline.commit == approved
    record = repo.root / "golden/runs/m4/toy/run.json"  # which git itself may keep
    record.parent.mkdir(parents=True)
    for tree, status, unsaid in (("d" * 40, "not judged", False), (None, "green", True), (ran.tree, "green", False)):
        record.write_text(json.dumps({"chain": "c", "commit": None, "tree": tree}))
        repo.commit("Kept by git")
        outcome, _, text = said(baseline_of(tonight(repo, trace)))
        assert (outcome, "does not say which code" in text) == (status, unsaid)
    record.write_text(json.dumps({"chain": "d", "commit": None, "tree": ran.tree}))
    approve(repo, "m5", text=pointer)
    outcome, _, text = said(baseline_of(tonight(repo, trace)))
    assert outcome == "green" and "does not say which code" not in text


def test_a_merge_brings_what_no_side_has(tmp_path: Path) -> None:
    """What was recorded while two branches were merged is of that merge's code, or of none."""
    repo, trace = kit.start(tmp_path, case=kit.CASE + OBSERVE), made(tmp_path / "t", 1.0, 2.0)
    approve(repo, "m1")
    repo.git("checkout", "--quiet", "-b", "side", "HEAD~")
    approve(repo, "m2")
    repo.git("checkout", "--quiet", "main")
    pointer = f"outs:\n- md5: {'e' * 32}.dir\n  hash: md5\nmeta:\n  content: {'e' * 32}.dir\n"
    for tree, status in ((_tree(repo), "green"), ("d" * 40, "not judged")):
        repo.git("merge", "--quiet", "--no-ff", "--no-commit", "side")
        approve(repo, "m3", text=f"{pointer}  tree: {tree}\n")
        assert said(baseline_of(tonight(repo, trace)))[0] == status
        repo.git("reset", "--quiet", "--hard", "HEAD~")


def squashed(repo: Repo) -> tuple[str, str, str]:
    """A branch with a golden run of its own code, squashed into a main that had moved on: both, and the next commit."""
    repo.git("checkout", "--quiet", "-b", "branch")
    branch, code = kit.edit(repo, "lr=0.01", "lr=0.02", "The branch"), _tree(repo)
    approve(repo, "m2", text=f"outs:\n- md5: x\nmeta:\n  commit: {branch}\n  tree: {code}\n")
    repo.git("checkout", "--quiet", "main")
    kit.edit(repo, "scale = 1.0\n", "scale = 3.0\n", "Meanwhile")
    repo.git("merge", "--quiet", "--squash", "branch")
    approved = repo.commit("The branch, squashed")
    return branch, approved, kit.edit(repo, "torch.manual_seed(3)", "torch.manual_seed(4)", "Another seed")


@pytest.mark.parametrize(
    ("number", "good", "why"),
    [
        (1.0, True, ""),
        (3.0, True, "which approved its numbers, itself has others, from step 1, loss, loss"),
        (2.0, False, "which approved its numbers, itself has those of tonight, from step 1, loss, loss"),
        (None, False, "which approved them, fails: it fails"),
    ],
)
def test_a_search_begins_in_this_history(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: float | None, good: bool, why: str
) -> None:
    """Where a squash left behind the commit whose numbers count, the search begins at the one that approved them."""
    repo = kit.start(tmp_path, case=kit.CASE + OBSERVE)
    branch, approved, _ = squashed(repo)
    base, now = made(tmp_path / "base", 1.0, 1.0), made(tmp_path / "now", 1.0, 2.0)
    answers: dict[str, Any] = {branch: base, approved: Skip("it fails")}
    if number is not None:
        answers[approved] = made(tmp_path / "own", 1.0, number)
    monkeypatch.setattr(judge, "_replayed", lambda _, commit, **__: (answers[commit], False))
    answer = baseline_of(tonight(repo, now))
    assert said(answer)[:2] == ("changed", "approved") and answer.baseline.commit == branch
    assert answer.good == (approved if good else "") and why in answer.check.text
    repo.git("checkout", "--quiet", approved)
    text = baseline_of(tonight(repo, now)).check.text
    assert f"not bisected: {branch[:10]} is none that the tested one holds, and the tested one" in text
    repo.git("checkout", "--quiet", "main")
    machine = identity_of(find_case(repo.root, None), repo.root).machine
    golden(repo, tmp_path / "base", machine, commit=None, tree="d" * 40)
    answer = baseline_of(tonight(repo, now, machine=machine))
    assert said(answer)[:2] == ("changed", "golden")
    assert answer.good == (approved if good else "") and why in answer.check.text
    golden(repo, tmp_path / "base", machine, commit=None, tree=_tree(repo, "HEAD~"))
    assert baseline_of(tonight(repo, now, machine=machine)).good == approved, "it has the code"


@pytest.mark.whole
def test_a_night_after_a_squash_is_bisected(tmp_path: Path) -> None:
    """What came after the squash is named, and the squash itself as having other numbers than were approved."""
    short = re.sub(r"(save|resume) = .*\n", "", kit.CASE.replace("steps = 6", "steps = 3"))
    repo = kit.start(tmp_path, case=short + OBSERVE)
    branch, approved, culprit = squashed(repo)
    checkout, case = find_checkout(repo.root), find_case(repo.root, None)
    run = nightly_run_of(checkout, case, culprit, [], lambda _: None, Asked("again", "1", jobs=1))
    (check,) = [check for check in run.checks if check.name == "baseline"]
    assert check.status == "changed" and f"{approved[:10]}, which approved its numbers, itself has others" in check.text
    assert run.baseline.commit == branch and run.bisect is not None
    assert (run.bisect["range"], run.bisect["outcome"]) == (f"{approved[:10]}..{culprit[:10]}", "found")
    assert [c["commit"]["commit"] for c in run.culprits] == [culprit]
