"""Two commits side by side: the verdict, what spares a replay, what makes it unverifiable, and what is measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from conftest import Repo
from history_kit import CASE, TRAIN, edit, note, start

from repro.pulls.pair import PairResult, compare_commits
from repro_bisect.axes.commits import History, resolve
from repro_bisect.driver.session import Options
from repro_golden.base.errors import ReproError
from repro_golden.case.file import find_case
from repro_golden.compare.coverage import only_bounds
from repro_golden.repository.checkout import find_checkout

SCALE = "scale = 1.0\n"
NOISE = "scale = 1.0 + int.from_bytes(os.urandom(2)) * 1e-6\n"
OBSERVE = "\n[observe]\nmetrics = ['loss=(?P<loss>\\S+)']\n"
BOUNDS = OBSERVE + '\n[compare]\nmode = "bounds"\n\n[compare.bounds.loss]\nrtol = 1e-3\n'


def pair(repo: Repo, base: str, head: str = "HEAD", *, name: bool = False) -> PairResult:
    """The result of a pair in a repository."""
    checkout = find_checkout(repo.root)
    comparison = compare_commits(
        checkout, find_case(repo.root, None), base, head, lambda _: None, Options(jobs=2), name=name
    )
    json.dumps(comparison.to_mapping(), allow_nan=False)  # whatever was found can be written
    return comparison


@pytest.mark.whole
def test_a_commit_that_moves_numbers_is_measured_and_named(tmp_path: Path) -> None:
    """The only commit of a range is the culprit; sizes are of whole tensors, and both sides say what they took."""
    repo = start(tmp_path, TRAIN, CASE + OBSERVE)
    base = repo.git("rev-parse", "HEAD")
    head = edit(repo, SCALE, "scale = 1.0 + 1e-6 * (step > 2)\n", "Scale later")
    comparison = pair(repo, base)
    assert (comparison.verdict, comparison.agrees, [c.commit.commit for c in comparison.culprits]) == (
        "moved",
        False,
        [head],
    )
    assert comparison.compared is not None
    divergence, plot_data = comparison.compared.drift.divergence, comparison.compared.plot_data
    assert divergence is not None
    assert plot_data is not None
    assert divergence.step == 3
    assert divergence.magnitude is not None
    assert divergence.magnitude.exact and divergence.magnitude.max_ulp
    assert plot_data.of["exact"] and not plot_data.histogram  # one number is no distribution
    assert all(
        spent is not None and len(spent.step_us) == 5 and spent.memory > 1 << 20 for spent in comparison.spent.values()
    )
    assert comparison.at.endswith("Z") and comparison.base.commit == base


def test_equal_code_is_not_replayed(tmp_path: Path) -> None:
    """A range that leaves the code as it was, or comes back to it, is identical, and no process trains."""
    repo = start(tmp_path)
    base = repo.git("rev-parse", "HEAD")
    note(repo, "words", "docs/words")
    edit(repo, SCALE, "scale = 2.0\n", "Scale")
    edit(repo, "scale = 2.0\n", SCALE, "Do not scale")
    for head, why in (("HEAD", "it changes nothing in train.py"), (base, "it adds no commit to its base")):
        comparison = pair(repo, base, head)
        assert comparison.verdict == "identical" and comparison.reason.startswith(why) and comparison.compared is None
    assert not (repo.root / ".git" / "repro" / "probes").exists()


def test_ends_that_are_exchanged_agree_in_nothing(tmp_path: Path) -> None:
    """Where HEAD lies behind BASE and the code is another, nothing was compared, and it is said how it would be."""
    repo = start(tmp_path)
    base = repo.git("rev-parse", "HEAD")
    head = edit(repo, SCALE, "scale = 2.0\n", "Scale")
    comparison = pair(repo, head, base)
    assert (comparison.verdict, comparison.compared) == ("unverifiable", None)
    assert comparison.reason.endswith(f"; {base[:10]}..{head[:10]} compares them")


def test_a_base_that_went_on_is_left_where_the_branch_did(tmp_path: Path) -> None:
    """What the base branch changed since then is not held against HEAD; the report says which commit served."""
    repo = start(tmp_path)
    fork = repo.git("rev-parse", "HEAD")
    repo.git("checkout", "--quiet", "-b", "side")
    note(repo, "words", "docs/words")
    repo.git("checkout", "--quiet", "main")
    edit(repo, SCALE, "scale = 2.0\n", "Scale on main")
    comparison = pair(repo, "main", "side")
    assert comparison.verdict == "identical" and comparison.base.commit == fork
    assert comparison.notes[0].startswith(f"compared with {fork[:10]}, where the branch left main")
    repo.git("checkout", "--quiet", "--orphan", "other")
    repo.commit("Another root")
    with pytest.raises(ReproError, match="no commit in common"):
        pair(repo, "main", "other")


def test_a_commit_that_a_shallow_clone_left_out(tmp_path: Path) -> None:
    """Of a revision that is not here it is said that the clone is shallow."""
    repo = start(tmp_path)
    note(repo, "one")
    repo.git("clone", "--quiet", "--depth=1", f"file://{repo.root}", str(tmp_path / "clone"))
    for root, told in ((tmp_path / "clone", r"this clone is shallow: `git fetch --unshallow`"), (repo.root, "first$")):
        with pytest.raises(ReproError, match=told):
            resolve(find_checkout(root), "HEAD~9")


def test_a_shallow_clone_that_left_commits_out_names_none(tmp_path: Path) -> None:
    """A commit whose parents are not here seems to add all that it holds: no search and no fork may rest on it."""
    repo = start(tmp_path / "whole")
    good = repo.git("rev-parse", "HEAD")
    repo.git("checkout", "--quiet", "-b", "side")
    for k in range(4):
        note(repo, f"side {k}")
    repo.git("checkout", "--quiet", "main")
    note(repo, "main", "docs/main")
    repo.git("merge", "--quiet", "--no-ff", "--message", "Merge", "side")
    for depth in (3, 4):
        clone = tmp_path / str(depth)
        repo.git("clone", "--quiet", "--depth", str(depth), repo.root.as_uri(), str(clone))
        checkout = find_checkout(clone)
        with pytest.raises(ReproError, match=r"shallow, and what came before .* `git fetch --unshallow` brings it"):
            History(checkout, f"{good}..HEAD", ["."])
        with pytest.raises(ReproError, match="shallow"):
            pair(Repo(clone), good)
    line = History(find_checkout(tmp_path / "3"), f"{good}..HEAD", ["."], first_parent=True)
    assert len(line.parents) == 2, "the line itself is whole"
    repo.git("clone", "--quiet", "--depth", "6", repo.root.as_uri(), str(tmp_path / "6"))
    assert len(History(find_checkout(tmp_path / "6"), f"{good}..HEAD", ["."]).parents) == 6, "what is left out is older"
    # as GitHub checks a pull request out: its merge and what that joins, whose parent is one of them
    repo.git("checkout", "--quiet", "-b", "pull")
    pull = note(repo, "pull")
    repo.git("checkout", "--quiet", "main")
    repo.git("merge", "--quiet", "--no-ff", "--message", "Merge the pull request", "pull")
    repo.git("clone", "--quiet", "--depth", "2", repo.root.as_uri(), str(tmp_path / "pull"))
    parents = History(find_checkout(tmp_path / "pull"), "HEAD^1..HEAD", ["."]).parents
    assert [len(before) for before in parents.values()] == [2, 1] and parents[pull] == [repo.git("rev-parse", "HEAD^1")]


@pytest.mark.whole
def test_bounds_judge_and_are_named_where_they_are_left(tmp_path: Path) -> None:
    """Bits may move within the case's bounds; the first metric that leaves one is what the verdict names."""
    repo = start(tmp_path, TRAIN, CASE + BOUNDS)
    base = repo.git("rev-parse", "HEAD")
    small = edit(repo, SCALE, "scale = 1.0 + 1e-6\n", "Scale a little")
    comparison = pair(repo, base, small)
    assert (
        comparison.verdict == "within"
        and comparison.agrees
        and comparison.compared
        and comparison.compared.drift.divergence
    )
    edit(repo, "scale = 1.0 + 1e-6\n", "scale = 1.0 if step < 2 else 1.5\n", "Scale much")
    comparison = pair(repo, base)
    assert comparison.verdict == "moved" and comparison.compared and comparison.compared.first
    assert (comparison.compared.first.kind, comparison.compared.first.signal, comparison.compared.first.step) == (
        "bound",
        "loss",
        2,
    )
    assert not comparison.culprits and comparison.commits == 2, "one of two, and nobody searched"
    assert comparison.compared.drift.looked == only_bounds(["loss"])


@pytest.mark.whole
def test_noise_is_told_apart(tmp_path: Path) -> None:
    """HEAD that does not reproduce itself is flaky; BASE that does not makes the answer unverifiable."""
    repo = start(tmp_path)
    base = repo.git("rev-parse", "HEAD")
    noisy = edit(repo, SCALE, NOISE, "Add noise")
    comparison = pair(repo, base)
    assert (
        comparison.verdict == "flaky"
        and comparison.compared
        and "two replays of HEAD differ" in comparison.compared.flaky
    )
    edit(repo, NOISE, SCALE + "    # quiet\n", "Take noise away")
    comparison = pair(repo, noisy)
    assert comparison.verdict == "unverifiable" and comparison.reason.startswith("BASE does not reproduce itself")


def later(calls: Path, after: int, scale: str) -> str:
    """Code whose scale is another once it made so many steps, in whatever runs; a run makes six."""
    count = f"(open({str(calls)!r}, 'a').write('x'), os.stat({str(calls)!r}).st_size)[1]"
    return f"scale = {scale} if {count} > {after} else 1.0\n"


def noisy(repo: Repo, noise: str) -> PairResult:
    """A pair of a BASE that is noise and a HEAD that moves the numbers."""
    base = edit(repo, SCALE, noise, "Noise")
    edit(repo, noise, "scale = 1.25\n", "Scale")
    return pair(repo, base)


@pytest.mark.whole
@pytest.mark.parametrize(
    ("bounds", "after", "scale", "told"),
    [
        ("", 6, "1.5", "two replays of HEAD differ"),
        (BOUNDS, 6, "1.5", "two replays of HEAD differ"),
        (BOUNDS, 8, "exit()", "a second replay of HEAD ends after 2 steps"),
    ],
)
def test_a_head_that_agrees_by_chance_does_not(tmp_path: Path, bounds: str, after: int, scale: str, told: str) -> None:
    """Its second replay is another, or ends earlier: what agrees now and then does not agree, within bounds either."""
    repo = start(tmp_path, TRAIN, CASE + bounds)
    base = repo.git("rev-parse", "HEAD")
    edit(repo, SCALE, later(tmp_path / "calls", after, scale), "Now and then")
    comparison = pair(repo, base)
    assert comparison.verdict == "flaky" and comparison.compared
    assert told in comparison.compared.flaky


@pytest.mark.whole
def test_a_third_replay_of_base_that_is_another_is_the_verdict(tmp_path: Path) -> None:
    """What BASE makes a third time is no note beside "moved": it is not reproducible here, whoever HEAD is."""
    comparison = noisy(start(tmp_path, TRAIN, CASE + OBSERVE), later(tmp_path / "calls", 12, "1.5"))
    assert (comparison.verdict, comparison.agrees, comparison.culprits, comparison.notes) == (
        "unverifiable",
        False,
        (),
        [],
    )
    assert comparison.reason.startswith(
        "not reproducible here: a third replay of BASE differs from the first two at step 0"
    )


@pytest.mark.whole
@pytest.mark.parametrize(
    ("nth", "scale", "verdict"), [(2, "1.5", "unverifiable"), (3, "1.5", "unverifiable"), (3, "1.000001", "moved")]
)
def test_a_base_that_leaves_its_own_bounds_judges_nothing(tmp_path: Path, nth: int, scale: str, verdict: str) -> None:
    """Where replays of BASE are farther apart than the bounds, HEAD is not blamed by them; nearer, bounds judge."""
    comparison = noisy(start(tmp_path, TRAIN, CASE + BOUNDS), later(tmp_path / "calls", 6 * (nth - 1), scale))
    assert comparison.verdict == verdict
    if verdict == "unverifiable":  # it is noticed in whichever replay comes first
        assert "BASE" in comparison.reason or "has other numbers alone" in comparison.reason
    else:
        assert "bounds alone are judged" in comparison.notes[0]


@pytest.mark.whole
def test_a_side_that_crashes_is_never_equal(tmp_path: Path) -> None:
    """HEAD that does not run is an error in one line; BASE that crashes on its way is no baseline, not an equal one."""
    repo = start(tmp_path)
    base = repo.git("rev-parse", "HEAD")
    broken = edit(repo, "import torch\n", "import torch\nimport no_such_module\n", "Import what is not there")
    with pytest.raises(ReproError, match=r"HEAD cannot be tested: .*no_such_module"):
        pair(repo, base)
    repo.git("reset", "--quiet", "--hard", base)
    crash = "loss.backward()\n    assert step < 3\n"
    short = edit(repo, "loss.backward()\n", crash, "Crash at step 3")
    edit(repo, crash, f"{crash}    # still\n", "Crash at step 3 all the same")
    comparison = pair(repo, short)
    assert (
        comparison.verdict == "unverifiable"
        and "BASE cannot be tested" in comparison.reason
        and "\n" not in comparison.reason
    )
    comparison = pair(repo, base, short)
    assert comparison.verdict == "moved" and comparison.compared and comparison.compared.drift.divergence is None
    assert broken != short


@pytest.mark.campaign
def test_every_commit_that_moved_them_is_named(tmp_path: Path) -> None:
    """With `name`, each of two planted commits is found and explained, and what lies between is not."""
    repo = start(tmp_path)
    base = repo.git("rev-parse", "HEAD")
    rate_commit = edit(repo, "lr=0.01", "lr=0.0100001", "Learn faster")
    note(repo, "words")
    scale_commit = edit(repo, SCALE, "scale = 1.0 + 1e-6\n", "Scale")
    comparison = pair(repo, base, name=True)
    assert [culprit.commit.commit for culprit in comparison.culprits] == [rate_commit, scale_commit]
    assert all(culprit.explanation for culprit in comparison.culprits) and comparison.bisect and not comparison.unnamed
