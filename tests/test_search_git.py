from __future__ import annotations

import os
import random
import re
import subprocess
from pathlib import Path

import pytest

from repro_bisect.search.first_bad import Ambiguous, Dag, FirstBad, Search

Parents = dict[int, list[int]]


def history(rng: random.Random) -> Parents:
    """A dozen commits with merges and perhaps several roots; the last one contains them all."""
    n = rng.randrange(8, 16)
    parents: Parents = {0: []}
    for i in range(1, n):
        parents[i] = rng.sample(range(max(0, i - 4), i), min(i, rng.choice([0, 1, 1, 1, 2, 2])))
    heads = sorted(set(parents) - {p for ps in parents.values() for p in ps})
    return parents | {n: heads}


def git(repo: Path, *args: str, stdin: str | None = None, ok: bool = True) -> str:
    home = {"HOME": str(repo), "GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1", "PATH": os.environ["PATH"]}
    done = subprocess.run(
        ["git", *args], cwd=repo, input=stdin, env=home, text=True, capture_output=True, check=ok, timeout=60
    )
    return done.stdout


def import_history(repo: Path, parents: Parents) -> dict[int, str]:
    """Write the commits with `git fast-import` and return their hashes."""
    repo.mkdir()
    git(repo, "init", "-q")
    stream = []
    for i, links in parents.items():
        # A branch of its own for each, so that a commit without parents is a root.
        lines = [f"commit refs/heads/c{i}", f"mark :{i + 1}", f"committer T <t@example.org> {1700000000 + i} +0000"]
        lines += [f"data {len(str(i))}", str(i), *(f"from :{p + 1}" for p in links[:1])]
        stream += [*lines, *(f"merge :{p + 1}" for p in links[1:]), ""]
    git(repo, "fast-import", "--quiet", "--export-marks=marks", stdin="\n".join(stream))
    git(repo, "symbolic-ref", "HEAD", f"refs/heads/c{max(parents)}")  # bisect wants a HEAD that exists
    marks = (line.split() for line in (repo / "marks").read_text().splitlines())
    return {int(mark[1:]) - 1: name for mark, name in marks}


def git_bisect(repo: Path, bad: str, goods: list[str], codes: dict[str, int]) -> set[str]:
    """What `git bisect run` answers: the first bad commit, or all of its "only skipped commits left"."""
    (repo / "codes").mkdir()
    for name, code in codes.items():
        (repo / "codes" / name).write_text(str(code))
    (repo / "judge.sh").write_text('exit "$(cat "codes/$(git rev-parse BISECT_HEAD)")"\n')
    git(repo, "bisect", "start", "--no-checkout", bad, *goods)
    git(repo, "bisect", "run", "sh", "judge.sh", ok=False)  # its exit status is 2 when only skips are left
    return set(re.findall(r"^# (?:possible )?first bad commit: \[(\w+)\]", git(repo, "bisect", "log"), re.MULTILINE))


@pytest.mark.parametrize("skipping", ["", "for no reason", "for one reason"])
@pytest.mark.parametrize(
    "seed", [*range(6), 34, 36, *(pytest.param(s, marks=pytest.mark.campaign) for s in range(37, 150))]
)
def test_agrees_with_git(tmp_path: Path, seed: int, skipping: str) -> None:
    """`git bisect run` finds the same commit; around skips its list, which depends on test order, contains ours."""
    rng = random.Random(seed)
    parents = history(rng)
    names = import_history(tmp_path / "repo", parents)
    graph = {names[i]: [names[p] for p in links] for i, links in parents.items()}
    bad, goods = names[max(parents)], [names[g] for g in rng.sample(range(3), 2)]
    dag = Dag.between(graph, goods, bad)
    culprit = rng.choice(dag.order)

    def contains(commit: str) -> bool:
        return commit == culprit or any(map(contains, graph[commit]))

    skips = {c for c in dag.order[:-1] if skipping and rng.random() < 0.5}
    codes = {c: 125 if c in skips else int(contains(c)) for c in graph}
    theirs = git_bisect(tmp_path / "repo", bad, goods, codes)

    search = Search(dag, bad, goods)
    while search.answer is None:
        for commit in search.next(2):
            verdict = {0: "GOOD", 1: "BAD", 125: "SKIP"}[codes[commit]]
            search = search.with_verdict(commit, verdict, "exit 125" if skipping == "for one reason" else "")
    if isinstance(search.answer, FirstBad):
        ours = {search.answer.commit}
    else:
        assert isinstance(search.answer, Ambiguous)
        ours = set(search.answer.commits)
    assert culprit in ours and ours <= theirs
    if not skipping:
        assert ours == theirs == {culprit}
