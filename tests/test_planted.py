"""Histories of the built-in trainer with changes planted by seed: the numeric changelog lists exactly those."""

from __future__ import annotations

import random
from pathlib import Path

import mutations_kit
import pytest
from explain_kit import guarded

from repro_bisect.driver.history import history_of
from repro_bisect.driver.session import Options, commits_of
from repro_golden.case.file import find_case
from repro_golden.repository.checkout import find_checkout


def history_with(root: Path, seed: int, count: int) -> tuple[str, list[str]]:
    """A history of `count` planted changes among as many harmless ones; where it starts, and the planted commits.

    Each change takes the place of the one before it, so no two neighbours have the same numbers.
    """
    repo, rng = guarded(root), random.Random(seed)
    start, planted = repo.git("rev-parse", "HEAD"), []
    folder, last = repo.root / "core" / "repro_core", None
    for number, change in enumerate(mutations_kit.effective(seed, count)):
        for note in range(rng.randrange(3)):
            file = folder / rng.choice(["rl/kl.py", "data/task.py", "model/hf.py"])
            if last is None or file.relative_to(folder).as_posix() != last.path:
                file.write_text(f"{file.read_text()}\n# Note {number}.{note}.\n")
                repo.commit("A note")
        if last is not None:
            repo.git("checkout", "--quiet", start, "--", f"core/repro_core/{last.path}")
        (folder / change.path).write_text(change.after)
        planted.append(repo.commit(f"{change.kind} in {change.path}"))
        last = change
    return start, planted


@pytest.mark.campaign
@pytest.mark.parametrize(("seed", "count"), [(11, 6), (12, 44)])
def test_the_changelog_lists_exactly_the_planted_commits(tmp_path: Path, seed: int, count: int) -> None:
    """Among harmless commits, every planted change is a row, in order, and nothing else is; each has a size."""
    start, planted = history_with(tmp_path / "guarded", seed, count)
    checkout = find_checkout(tmp_path / "guarded")
    case, options = find_case(checkout.root, None), Options(jobs=2)
    axis = commits_of(checkout, case, f"{start}..HEAD", options)
    history = history_of(checkout, case, axis, lambda _: None, options)
    assert [(row.kind, row.commit.commit) for row in history.rows] == [("change", commit) for commit in planted]
    assert all(row.against_previous.divergence is not None for row in history.rows if row.against_previous)
