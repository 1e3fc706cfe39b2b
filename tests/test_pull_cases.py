"""A pull request that changes or takes away the case that judges it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from conftest import Repo
from history_kit import CASE, edit, note, start
from nightly_kit import approve
from pull_kit import flat, pair, with_step

from repro.pulls.cases import PullCases
from repro.pulls.pair import PairResult
from repro_golden.case.file import Bound
from repro_golden.compare.renames import Renames
from repro_golden.repository.checkout import find_checkout

OBSERVE = "\n[observe]\nmetrics = ['loss=(?P<loss>\\S+)']\n"
BOUNDS = OBSERVE + '\n[compare]\nmode = "bounds"\n\n[compare.bounds.loss]\nrtol = {}\n'


def changed(repo: Repo, text: str | None, words: str = "Change the case") -> str:
    """A commit with another case file, or without it."""
    path = repo.root / "golden/cases/toy.toml"
    if text is None:
        path.unlink()
    else:
        path.write_text(text)
    return repo.commit(words)


def results(tmp_path: Path) -> dict[str, PairResult]:
    """One result of each verdict that says something of numbers."""
    a = flat(3, loss=1.0)
    b = with_step(1, a, loss=1.05)
    return {
        "identical": pair(tmp_path, a, a),
        "within": pair(tmp_path, a, b, {"loss": Bound(rtol=0.1)}),
        "moved": pair(tmp_path, a, b),
    }


@pytest.mark.parametrize(
    ("before", "after", "told", "verdicts"),
    [
        (CASE, "# words\n" + CASE, "", ("identical", "within", "moved")),
        (CASE, CASE.replace("10m", "20m"), "", ("identical", "within", "moved")),
        (CASE, CASE + 'pass_env = ["HF_TOKEN"]\n', "subject.pass_env", ("identical", "within", "moved")),
        (CASE, CASE + "[observe]\nactivations = ['x']\n", "observe.activations", ("identical", "within", "moved")),
        (CASE, CASE.replace("steps = 6", "steps = 1"), "case.steps 6 -> 1", ("unverifiable", "unverifiable", "moved")),
        (CASE, CASE.replace('path = "train.py"', 'path = "docs"'), "subject.path 'train.py' -> 'docs'",
         ("unverifiable", "unverifiable", "moved")),
        (CASE, CASE.replace("--steps 6", "--steps 6 --lr 2"), "subject.command",
         ("unverifiable", "unverifiable", "moved")),
        (CASE + BOUNDS.format(0.01), CASE + BOUNDS.format(10), "compare.bounds.loss.rtol 0.01 -> 10.0",
         ("unverifiable", "unverifiable", "moved")),
        (CASE + OBSERVE, CASE + BOUNDS.format(10), "compare.mode", ("identical", "unverifiable", "moved")),
        (CASE + OBSERVE, CASE, "observe.metrics", ("unverifiable", "unverifiable", "moved")),
        (CASE + 'pass_env = ["HF_TOKEN"]\n', CASE, "subject.pass_env", ("unverifiable", "unverifiable", "moved")),
        (CASE + BOUNDS.format(10), CASE + BOUNDS.format(0.1), "compare.bounds.loss.rtol 10.0 -> 0.1",
         ("identical", "within", "moved")),
        (CASE, CASE + '[mismatch]\nmax = 0.5\n', "mismatch.max", ("identical", "within", "moved")),
        (CASE, CASE + OBSERVE, "observe.metrics", ("unverifiable", "unverifiable", "moved")),
        (CASE + BOUNDS.format(0.1), CASE + BOUNDS.format(0.1).replace("+)']", "+)', 'step (?P<loss>[0-9]+)']"),
         "observe.metrics", ("unverifiable", "unverifiable", "moved")),
        (CASE, CASE + "[observe]\nignore = ['x']\n", "observe.ignore", ("unverifiable", "unverifiable", "moved")),
        (CASE, CASE.replace('"train.py"\n', '"./train.py"\n'), "", ("identical", "within", "moved")),
        (CASE.replace("command = ", "comand = "), CASE, "its file", ("unverifiable", "unverifiable", "moved")),
        (CASE + 'link = ["data"]\n', CASE, "subject.link", ("unverifiable", "unverifiable", "moved")),
        (CASE + 'check = "true"\n', CASE + 'check = "false"\n', "subject.check",
         ("unverifiable", "unverifiable", "moved")),
        (CASE + 'check = "true"\n', CASE, "subject.check", ("unverifiable", "unverifiable", "moved")),
        (CASE, CASE + 'check = "true"\n', "both ends are replayed without subject.check",
         ("identical", "within", "moved")),
    ],
)  # fmt: skip
def test_no_agreement_rests_on_a_case_that_head_changed(
    tmp_path: Path, before: str, after: str, told: str, verdicts: tuple[str, str, str]
) -> None:
    """What HEAD's case says is equal says nothing of what BASE's said; that numbers moved stays true, with a note.

    A pattern for one more metric may take the name of one that was judged: it is no mere growth.
    """
    repo = start(tmp_path, case=before)
    base = repo.git("rev-parse", "HEAD")
    head = changed(repo, after)
    cases = PullCases(find_checkout(repo.root), base, head)
    (tmp_path / "traces").mkdir()
    for (name, result), verdict in zip(results(tmp_path / "traces").items(), verdicts, strict=True):
        judged = cases.judged(result)
        assert judged.verdict == verdict, name
        assert told in " ".join(judged.notes) and bool(told) == (len(judged.notes) > len(result.notes))
        assert verdict != "unverifiable" or ("HEAD changes the case" in judged.reason and judged.compared is None)
    unknown = replace(pair(tmp_path / "traces", flat(2, loss=1.0), flat(2, loss=1.0)), case="new")
    assert cases.judged(unknown) == unknown, "BASE has no such case"


def test_a_check_that_head_brings_builds_nothing_for_its_own_pull_request(tmp_path: Path) -> None:
    """A note, since both ends are replayed as BASE asks: what agrees with it in place may be what it builds."""
    repo = start(tmp_path)
    base = repo.git("rev-parse", "HEAD")
    edit(repo, "scale = 1.0", "scale = 1.0 if os.path.exists('built') else 2.0", "Move the numbers")
    moved = changed(repo, CASE + "check = \"{python} -c \\\"open('built','w')\\\"\"\n")
    done = repo.repro("report", "pr", f"{base}..{moved}", "--json")
    (entry,) = json.loads(done.stdout)["results"]
    assert (done.returncode, entry["verdict"]) == (1, "moved"), "as whoever trains without the check would see"
    edit(repo, "1.0 if os.path.exists('built') else 2.0", "1.0", "As before")
    done = repo.repro("report", "pr", f"{base}..HEAD", "--json")
    (entry,) = json.loads(done.stdout)["results"]
    assert (done.returncode, entry["verdict"]) == (0, "identical"), entry
    assert "replayed without subject.check" in " ".join(entry["notes"])


def test_names_that_base_is_strict_of_are_judged_by_it(tmp_path: Path) -> None:
    """A HEAD that no longer asks for the same names, and renames one, does not agree; without a rename it does."""
    repo = start(tmp_path, case=CASE + '[compare]\nnames = "strict"\n')
    base = repo.git("rev-parse", "HEAD")
    cases = PullCases(find_checkout(repo.root), base, changed(repo, CASE))
    (tmp_path / "traces").mkdir()
    result = results(tmp_path / "traces")["identical"]
    assert cases.judged(result).verdict == "identical" and result.compared is not None
    drift = replace(result.compared.drift, renames=Renames(1, [("fc.weight", "proj.weight")]))
    assert cases.judged(replace(result, compared=replace(result.compared, drift=drift))).verdict == "unverifiable"


def test_a_case_that_head_lacks_or_alone_has_is_told(tmp_path: Path) -> None:
    """One that was taken away, and one of a HEAD that is not checked out, are not verifiable: exit 3, not silence."""
    repo = start(tmp_path)
    note(repo, "docs", "docs/words")
    base = repo.git("rev-parse", "HEAD")
    repo.git("checkout", "--quiet", "-b", "added")
    other = repo.root / "golden/cases/other.toml"
    other.write_text(CASE.replace('"toy"', '"other"'))
    repo.commit("Add a case")
    repo.git("checkout", "--quiet", "-b", "gone", base)
    gone = changed(repo, None)
    done = repo.repro("report", "pr", f"{base}..{gone}", "--json")
    assert done.returncode == 3, done.stdout + done.stderr
    (entry,) = json.loads(done.stdout)["results"]
    assert (entry["case"], entry["verdict"]) == ("toy", "unverifiable") and "HEAD takes" in entry["reason"]
    named = repo.repro("report", "pr", f"{base}..{gone}", "--case", "toy", "--json")
    assert named.returncode == 3 and json.loads(named.stdout)["results"] == [entry]
    repo.git("checkout", "--quiet", "main")
    done = repo.repro("report", "pr", f"{base}..added", "--json")
    entries = {entry["case"]: entry for entry in json.loads(done.stdout)["results"]}
    assert done.returncode == 3 and entries["toy"]["verdict"] == "identical"
    assert "check HEAD out" in entries["other"]["reason"]


def test_other_rollouts_and_a_linked_case_are_changes_too(tmp_path: Path) -> None:
    """Both ends are replayed from the checkout's rollouts; a case that is a link says what its target says."""
    case = CASE.replace("steps = 6", 'steps = 6\nrollouts = "golden/rollouts/x"')
    repo = start(tmp_path, case=case)
    pointer, link = repo.root / "golden/rollouts/x.dvc", repo.root / "golden/cases/toy.toml"
    pointer.parent.mkdir()
    pointer.write_text("outs: [1]\n")
    target = repo.root / "cases/toy.toml"
    target.parent.mkdir()
    link.rename(target)
    link.symlink_to("../../cases/toy.toml")
    base = repo.commit("Rollouts")
    result = results(tmp_path)["identical"]
    pointer.write_text("outs: [2]\n")
    other = repo.commit("Other rollouts")
    judged = PullCases(find_checkout(repo.root), base, other).judged(result)
    assert judged.verdict == "unverifiable" and "case.content of rollouts" in judged.reason
    target.write_text(case.replace("steps = 6", "steps = 1"))
    fewer = repo.commit("Fewer steps")
    judged = PullCases(find_checkout(repo.root), other, fewer).judged(result)
    assert judged.verdict == "unverifiable" and "case.steps 6 -> 1" in judged.reason


def test_no_case_goes_unseen(tmp_path: Path) -> None:
    """One that HEAD takes from a folder that is a link, or that is here all the same, and a golden run without any."""
    repo = start(tmp_path, case=None)
    folder, link = repo.root / "kept", repo.root / "golden/cases"
    folder.mkdir()
    link.parent.mkdir()
    link.symlink_to("../kept")
    for name in ("toy", "other"):
        (folder / f"{name}.toml").write_text(CASE.replace('"toy"', f'"{name}"'))
    base = repo.commit("Cases")
    (folder / "toy.toml").unlink()
    gone, checkout = repo.commit("Take one away"), find_checkout(repo.root)
    cases = PullCases(checkout, base, gone)
    assert cases.names == ["other", "toy"] and "HEAD takes golden/cases/toy.toml away" in cases.absent("toy")
    (folder / "toy.toml").write_text(CASE)
    assert "HEAD takes" in PullCases(checkout, base, gone).absent("toy"), "it is no case of HEAD's"
    approve(repo, "m1", case="lost")
    cases = PullCases(checkout, base, base)
    assert cases.names == ["lost", "other", "toy"] and [cases.absent(name) for name in ("other", "toy")] == ["", ""]
    assert cases.absent("lost") == "it has a golden run, and no case: bring golden/cases/lost.toml back"


def test_only_what_the_branch_did_to_its_case_counts(tmp_path: Path) -> None:
    """What main did to the case since the branch left it is not the branch's change."""
    repo = start(tmp_path)
    repo.git("checkout", "--quiet", "-b", "side")
    edit(repo, "lr=0.01", "lr=0.02", "Learn faster")
    repo.git("checkout", "--quiet", "main")
    changed(repo, CASE.replace("steps = 6", "steps = 2"))
    result = results(tmp_path)["identical"]
    checkout = find_checkout(repo.root)
    assert PullCases(checkout, "main", "side").judged(result) == result
    assert PullCases(checkout, "side", "main").judged(result).verdict == "unverifiable"
