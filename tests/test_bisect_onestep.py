"""Probes that train one step from a saved state: what they need, when they are refused, and what they spare."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from conftest import Repo
from examples_kit import at_most
from history_kit import CASE, TRAIN, edit, note, start
from hypothesis import given
from hypothesis import strategies as st

from repro_bisect.probe.states import KEPT, States
from repro_golden.replay.child import _States

SCALE, MOVED = "scale = 1.0\n", "scale = 1.0 + 1e-6 * (step >= 4)\n"


def bisect(repo: Repo, good: str, *arguments: str) -> tuple[dict[str, Any], str]:
    """JSON and progress of a bisect that ends well."""
    done = repo.repro("bisect", "--no-explain", f"{good}..HEAD", "--json", *arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout), done.stderr


@pytest.mark.whole
def test_a_command_that_saves_itself_is_probed_by_one_step(tmp_path: Path) -> None:
    """With save and resume each probe trains the divergent step alone; one that cannot load the state is no SKIP."""
    repo = start(tmp_path)
    good = repo.git("rev-parse", "HEAD")
    note(repo, "one")
    edit(repo, '["model"]', '["net"]', "Read another key")  # cannot load the state, trains as before
    edit(repo, '["net"]', '["model"]', "Read the old key")
    culprit = edit(repo, SCALE, MOVED, "Warm up")
    for n in range(3):
        note(repo, f"after {n}")
    result, progress = bisect(repo, good, "-j", "1")
    assert result["culprit"]["commit"] == culprit, progress
    assert result["one_step"] is True
    assert (result["divergence"]["step"], result["divergence"]["phase"]) == (4, "grad")
    assert result["skips"] == {}
    search = result["cost"]["search"]
    straight = 5 if any(c != culprit and "Read" in s for c, s in result["subjects"].items()) else 0
    # four steps to make the state, one each to show that it serves both ends, one for each probe
    assert search["steps"] <= 4 + 2 + (search["probes"] - 3) + straight
    # everything is known now but the confirming replays
    again, _ = bisect(repo, good, "-j", "1")
    assert again["cost"]["search"]["steps"] == 0
    assert again["culprit"]["commit"] == culprit


@pytest.mark.whole
def test_state_outside_the_checkpoint_is_detected(tmp_path: Path) -> None:
    """A trainer that keeps something beside its checkpoint is found out, said so, and served by straight probes."""
    train = TRAIN.replace("scale = 1.0\n", "scale = 1.0 + hidden\n    hidden += 1e-3\n")
    repo = start(tmp_path, train)
    good = repo.git("rev-parse", "HEAD")
    note(repo, "one")
    culprit = edit(repo, "scale = 1.0 + hidden\n", "scale = 1.0 + hidden + 1e-6 * (step >= 4)\n", "Warm up")
    note(repo, "two")
    result, progress = bisect(repo, good, "-j", "2")
    assert result["culprit"]["commit"] == culprit, progress
    assert result["one_step"] is False
    assert "makes another step: probes train from step 0" in progress


@pytest.mark.campaign
def test_a_change_that_loading_hides_is_found_by_straight_probes(tmp_path: Path) -> None:
    """Where BAD's own one step is not that of its straight run, the state is not used."""
    train = TRAIN.replace("first, hidden = 0, 0.0\n", "first, hidden = 0, 0.0\ngrown = 0\n").replace(
        "scale = 1.0\n", "grown += 1\n    scale = 1.0\n"
    )
    repo = start(tmp_path, train)
    good = repo.git("rev-parse", "HEAD")
    culprit = edit(repo, SCALE, "scale = 1.0 + 1e-6 * (grown > 4)\n", "Count the steps")  # from the process's start
    note(repo, "two")
    note(repo, "three")
    result, progress = bisect(repo, good, "-j", "1")
    assert result["culprit"]["commit"] == culprit, progress
    assert result["one_step"] is False
    assert "BAD started from the state before step 4 makes another step" in progress


@pytest.mark.whole
def test_the_built_in_trainer_starts_from_its_golden_state(recorded: Repo) -> None:
    """A golden run's own state serves without any step to make it; the search trains one step for each probe."""
    repo, good = recorded, recorded.git("rev-parse", "HEAD")
    line = '            metrics = self._train_step(t, update, reference["log_probs"], observe)\n'
    moved = "            if self._step >= 1:\n                for w in engines.policy.optimizer.main.values():\n"
    moved += "                    w.data.mul_(1 + 1e-6)\n"
    for n in range(2):
        note(repo, f"before {n}", "core/repro_core/data/task.py")
    repo.edit("core/repro_core/train/trainer.py", line, moved + line)
    culprit = repo.commit("Warm up")
    for n in range(2):
        note(repo, f"after {n}", "core/repro_core/data/task.py")
    result, progress = bisect(repo, good, "-j", "1")
    assert result["culprit"]["commit"] == culprit, progress
    assert result["one_step"] is True
    assert result["divergence"]["step"] == 1
    assert "making GOOD's state" not in progress
    search = result["cost"]["search"]
    assert search["steps"] == search["probes"], "each of them trained one step"


@at_most(50)
@given(st.lists(st.integers(0, 40), unique=True), st.integers(0, 60), st.integers(1, 9))
def test_states_keep_to_their_budget_and_stay_spread(
    tmp_path_factory: pytest.TempPathFactory, steps: list[int], budget: int, size: int
) -> None:
    """Saved states never outgrow the budget; what is kept is the newest and a spread of those before it."""
    folder = tmp_path_factory.mktemp("states")

    class Subject:
        def save(self, path: str) -> None:
            Path(path).mkdir()
            (Path(path) / "state").write_bytes(b"x" * size)

    states = _States({step: folder / str(step) for step in steps}, budget, None)
    for step in range(41):
        states.save(Subject(), step)
    kept = sorted(int(path.name) for path in folder.iterdir())
    assert len(kept) * size <= budget
    assert len(kept) == min(len(steps), budget // size)
    assert not kept or kept[-1] == max(steps)


def test_states_of_a_repository_keep_to_a_budget(tmp_path: Path) -> None:
    """Beyond the budget the least recently used states go, and never those that somebody holds."""
    held = States(tmp_path, "held")
    (held.at(1)).mkdir()
    (held.at(1) / "state").write_bytes(b"x" * 100)
    for name in ("old", "new"):
        states = States(tmp_path, name)
        states.at(3).mkdir()
        (states.at(3) / "state").write_bytes(b"x" * 100)
        assert states.steps() == [3]
        states.close(1_000)
    States(tmp_path, "last").close(200 // KEPT)
    held.close(1_000)
    assert {path.name for path in tmp_path.iterdir()} >= {"held", "new"}
    assert not (tmp_path / "old").exists()


def test_save_and_resume_go_together(tmp_path: Path) -> None:
    """A case with one of them, or without {checkpoint}, is refused in one line."""
    for old, new in (('resume = "{python} train.py --load {checkpoint}"\n', ""), ("--save {checkpoint}", "--save x")):
        folder = tmp_path / (new or "none")
        folder.mkdir()
        repo = start(folder, case=CASE.replace(old, new))
        note(repo, "one")
        done = repo.repro("bisect", "--no-explain", "HEAD~1..HEAD")
        assert done.returncode == 2
        assert "save and resume" in done.stderr
