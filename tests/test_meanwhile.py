"""What a search rests on is changed under it: its probes serve no later search, and what was changed is told."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import flaky_kit
import pytest
from conftest import Repo
from flaky_kit import Told

from repro_bisect.predicates.predicates import Bitwise
from repro_bisect.probe.around import watched_rollouts
from repro_bisect.probe.executors import Outcome, Task
from repro_bisect.probe.executors.local import Local
from repro_bisect.probe.journal import Entry, Journal
from repro_bisect.probe.prober import Prober
from repro_golden.case.file import Case
from repro_golden.repository.checkout import Checkout, find_checkout
from repro_golden.store.rollouts import RolloutFiles
from repro_golden.subjects.surroundings import found_outside
from repro_golden.subjects.watched import Watched

JUDGE = """\
import sys
from pathlib import Path
import ours
count = Path({count!r})
count.write_text(count.read_text() + "x")
if len(count.read_text()) == 2:
    Path(ours.__file__).write_text("X = 2\\n")
sys.exit(int(Path("value").read_text()) * ours.X > 3)
"""
"""A program that edits a library of its environment in its second run."""


def environment(folder: Path, how: str) -> tuple[str, Path]:
    """A Python, and the module of a library of it: in a folder that a .pth file names, or in a package."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder / "venv")], check=True)
    site = next((folder / "venv" / "lib").glob("python*")) / "site-packages"
    if how == "linked":
        (folder / "lib").mkdir()
        (site / "ours.pth").write_text(f"{folder / 'lib'}\n")
        module = folder / "lib" / "ours.py"
    else:
        (site / "ours-1.dist-info").mkdir()
        (site / "ours-1.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: ours\nVersion: 1\n")
        (site / "ours-1.dist-info" / "RECORD").write_text("ours.py,sha256=x,6\nours-1.dist-info/RECORD,,\n")
        module = site / "ours.py"
    module.write_text("X = 1\n")
    return str(folder / "venv" / "bin" / "python"), module


@pytest.mark.parametrize("how", ["linked", "package"])
def test_a_library_edited_under_a_search(tmp_path: Path, how: str) -> None:
    """Once it is put back, a search answers right, by none of the probes that were made meanwhile."""
    python, module = environment(tmp_path, how)
    repo = Repo(tmp_path / "repo")
    repo.root.mkdir()
    repo.git("init", "--quiet", "--initial-branch=main")
    count = tmp_path / "count"
    count.write_text("")
    (repo.root / "judge.py").write_text(JUDGE.format(count=str(count)))
    commits = []
    for value in range(5):
        (repo.root / "value").write_text(f"{value}\n")
        commits.append(repo.commit(f"value {value}"))

    def bisect() -> dict[str, Any]:
        command = ("bisect", "HEAD~4..HEAD", "--quick", "--json", "-j", "1", "--when", "exit", "--", python, "judge.py")
        done = repo.repro(*command)
        assert done.returncode == 0, done.stderr
        answer: dict[str, Any] = json.loads(done.stdout)
        return answer

    first = bisect()
    assert first["culprit"]["commit"] == commits[2]
    assert f"{module} was changed meanwhile" in first["remarks"]
    module.write_text("X = 1\n")
    second = bisect()
    assert (second["culprit"]["commit"], second["cost"]["reused"]) == (commits[4], 1), "GOOD's run was before it"
    assert not second["remarks"]
    third = bisect()
    assert (third["culprit"]["commit"], third["cost"]["probes"]) == (commits[4], 0)


def test_what_changes_no_number_is_no_change(tmp_path: Path) -> None:
    """Neither caches of code, times of access, what no package brought and is no code, nor the same content anew."""
    python, module = environment(tmp_path, "package")
    repo = Repo(tmp_path / "repo")
    repo.root.mkdir()
    repo.git("init", "--quiet")
    command = {"kind": "command", "command": f"{python} judge.py"}
    case = Case.model_validate({"case": {"name": "x", "steps": 1}, "subject": command})
    local = Local(find_checkout(repo.root), case, None, 1)
    watched = Watched(lambda again: local.surroundings(case, again=again))
    (module.parent / "__pycache__").mkdir()
    (module.parent / "__pycache__" / "ours.cpython.pyc").write_text("")
    (module.parent / "notes.log").write_text("")
    os.utime(module, ns=(1, module.stat().st_mtime_ns))
    assert watched.stand() == (0, True)
    module.write_text("X = 1\n")
    assert watched.stand() == (0, True)
    module.write_text("X = 3\n")
    assert watched.stand() == (1, False)
    repo.git("config", "core.autocrlf", "true")
    assert watched.stand() == (2, False)
    local.close()
    assert watched.changed == {str(module), "what git writes into a worktree"}


@pytest.mark.parametrize("edited", [False, True])
def test_a_state_made_over_changed_rollouts(tmp_path: Path, edited: bool) -> None:
    """A state that was made while the rollouts were edited is not kept, and neither is its probe."""
    (case, identity), rollouts, kept = flaky_kit.experiment(), tmp_path / "rollouts", tmp_path / "kept"
    for folder in (rollouts, kept):
        folder.mkdir()
    (rollouts / "0").write_text("1")

    def run(_: Task, folder: Path) -> Outcome:
        if edited:
            (rollouts / "0").write_text("2")
        (folder / "states" / "2").mkdir(parents=True)
        return Outcome()

    axis = flaky_kit.Points({"b": ["a"]}, "a", "b")
    watched = watched_rollouts(case, RolloutFiles(rollouts))
    prober = Prober(Checkout(tmp_path, tmp_path / "git"), case, axis, watched, identity, Told(run), Bitwise())
    prober.make_state(axis.good, 2, kept, None)
    prober.close()
    assert [path.name for path in kept.iterdir()] == ([] if edited else ["2"])
    assert prober.changed == ([str(rollouts / "0")] if edited else [])


@pytest.mark.parametrize("how", ["written", "put there", "led elsewhere", "behind a link"])
def test_data_changed_under_a_search(tmp_path: Path, how: str) -> None:
    """What a case names is told from what it was, also by files that are old; the same content, written anew, is not.

    Caches of code do not count.
    """
    data, old, linked = tmp_path / "data", tmp_path / "old", tmp_path / "linked"
    for folder, text in ((data / "__pycache__", ""), (data, "1"), (old, "2"), (linked, "1")):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "a").write_text(text)
    (data / "behind").symlink_to(linked)
    current = tmp_path / "current"
    current.symlink_to(data)
    time.sleep(0.02)
    subject = {"kind": "command", "command": f"a {current}/a {data}"}
    case = Case.model_validate({"case": {"name": "x", "steps": 1}, "subject": subject})
    outside = Watched(lambda _: found_outside(case, tmp_path / "repo"))
    (data / "__pycache__" / "a.pyc").write_text("1")
    assert outside.stand() == (0, True)
    (data / "a").write_text("1")
    assert outside.stand() == (0, True)
    places = {"written": data / "a", "put there": data / "b", "led elsewhere": current, "behind a link": linked / "a"}
    if how == "led elsewhere":
        current.unlink()
        current.symlink_to(old)
    else:
        places[how].write_text("2")
    assert outside.stand() == (1, False)
    assert [Path(changed).resolve() for changed in outside.changed] == [places[how].resolve()]
    if how == "led elsewhere":
        current.unlink()
        current.symlink_to(data)
        assert outside.stand() == (2, True)


def test_what_a_search_must_not_leave_to_the_next(tmp_path: Path) -> None:
    """A probe that is not lasting is known to its own journal alone."""
    entry = Entry("key", 0, "commit", "", 0, 1.0, "", code=1)
    journal = Journal(tmp_path)
    journal.add(entry, None, lasting=False)
    assert (journal.find("key", 0), Journal(tmp_path).find("key", 0)) == (entry, None)
    journal.add(entry, None)
    assert Journal(tmp_path).find("key", 0) == entry
