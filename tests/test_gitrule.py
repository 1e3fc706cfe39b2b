"""What `git bisect run` would have cost, and the log it goes on from, against git itself."""

from __future__ import annotations

import random
import re
from pathlib import Path

import pytest
from test_search_git import git, git_bisect, history, import_history

from repro_bisect.axes.gitrule import git_log, git_tests
from repro_golden.repository.git import Git


@pytest.mark.parametrize("skipping", [0.0, 0.3, 0.7])
@pytest.mark.parametrize("seed", [*range(6), *(pytest.param(seed, marks=pytest.mark.whole) for seed in range(6, 40))])
def test_tests_are_counted_as_git_makes_them(tmp_path: Path, seed: int, skipping: float) -> None:
    """On lines and on merges, around skips too, the number of tests is git's own."""
    rng = random.Random(seed)
    parents = history(rng) if seed % 2 else {i: [i - 1] if i else [] for i in range(rng.randrange(20, 60))}
    names = import_history(tmp_path / "repo", parents)
    graph = {names[i]: [names[p] for p in links] for i, links in parents.items()}
    bad, good = names[max(parents)], names[0]
    listed = git(tmp_path / "repo", "rev-list", "--parents", "--topo-order", f"{good}..{bad}").splitlines()
    between = {commit: before for commit, *before in (line.split() for line in listed)}
    culprit = rng.choice(list(between))

    def contains(commit: str) -> bool:
        return commit == culprit or any(map(contains, graph[commit]))

    skips = {commit for commit in between if commit != bad and rng.random() < skipping}
    codes = {commit: 125 if commit in skips else int(contains(commit)) for commit in graph}
    git_bisect(tmp_path / "repo", bad, [good], codes)
    log = git(tmp_path / "repo", "bisect", "log")
    theirs = len(re.findall(r"^git bisect (?:good|bad|skip) ", log, re.MULTILINE))
    verdicts = {commit: {125: "SKIP", 1: "BAD", 0: "GOOD"}[codes[commit]] for commit in between}
    after = {commit for commit in between if contains(commit)}
    assert git_tests(Git(tmp_path / "repo"), good, between, after, verdicts) == theirs


def test_what_nobody_tried_between_skips_is_not_counted_on(tmp_path: Path) -> None:
    """Git would try the middle, which nobody did, between two that are skipped: no number is given."""
    names = import_history(tmp_path / "repo", {i: [i - 1] if i else [] for i in range(17)})
    parents = {names[i]: [names[i - 1]] for i in range(16, 0, -1)}
    after = {names[i] for i in range(14, 17)}
    git_here = Git(tmp_path / "repo")
    assert git_tests(git_here, names[0], parents, after, {names[7]: "SKIP", names[9]: "SKIP"}) is None
    assert git_tests(git_here, names[0], parents, after, {names[7]: "SKIP", names[9]: "GOOD"}) == 4


def test_git_goes_on_from_the_log(tmp_path: Path) -> None:
    """`git bisect replay` takes the log, and git knows from it what we knew."""
    names = import_history(tmp_path / "repo", {i: [i - 1] if i else [] for i in range(9)})
    verdicts = {
        names[0]: "GOOD",
        names[8]: "BAD",
        names[4]: "GOOD",
        names[6]: "SKIP",
        names[5]: "BAD",
        names[7]: "FLAKY",
    }
    subjects = {name: f"number {i}" for i, name in names.items()}
    (tmp_path / "log").write_text(git_log(names[0], names[8], verdicts, subjects))
    git(tmp_path / "repo", "bisect", "replay", str(tmp_path / "log"))
    assert f"{names[5]} is the first bad commit" in git(tmp_path / "repo", "bisect", "next")
