"""What `git bisect run` would have cost, and the log it goes on from, against git itself."""

from __future__ import annotations

import random
import re
from pathlib import Path

import pytest
from test_search_git import git, git_bisect, history, import_history

from repro_bisect.search.dag import Dag
from repro_bisect.search.gitrule import git_log, git_probes


@pytest.mark.parametrize("seed", range(8))
def test_tests_are_counted_as_git_makes_them(tmp_path: Path, seed: int) -> None:
    """On lines and on merges the number of tests is git's, or one beside it where git breaks a tie otherwise."""
    rng = random.Random(seed)
    parents = history(rng) if seed % 2 else {i: [i - 1] if i else [] for i in range(rng.randrange(20, 60))}
    names = import_history(tmp_path / "repo", parents)
    graph = {names[i]: [names[p] for p in links] for i, links in parents.items()}
    bad, good = names[max(parents)], names[0]
    dag = Dag.between(graph, [good], bad)
    culprit = rng.choice(dag.order)

    def contains(commit: str) -> bool:
        return commit == culprit or any(map(contains, graph[commit]))

    assert git_bisect(tmp_path / "repo", bad, [good], {c: int(contains(c)) for c in graph}) == {culprit}
    log = git(tmp_path / "repo", "bisect", "log")
    theirs = len(re.findall(r"^git bisect (?:good|bad) ", log, re.MULTILINE))
    ours = git_probes(graph, good, bad, culprit, [])
    assert ours is not None
    assert abs(ours - theirs) <= 1


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
