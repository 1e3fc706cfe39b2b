"""Code of another working tree than the one under test is refused, wherever and whenever a process imports it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from conftest import Repo

from repro_golden.case.file import Case
from repro_golden.replay.children import ChildFailure, Run
from repro_golden.repository.checkout import Place
from repro_golden.subjects import exit_code, launch

TRAIN = """\
import sys
sys.path.insert(0, {place!r})
{early}
import torch
torch.manual_seed(0)
model = torch.nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(4):
    {late}
    optimizer.zero_grad()
    model(torch.randn(2, 3)).square().sum().backward()
    optimizer.step()
"""
LATE = "if step == 2: import lib.rate"


@pytest.fixture(autouse=True)
def _trees(tmp_path: Path) -> None:
    """A checkout with a package in src/, a worktree of it under test, and other ones."""
    repo = Repo(tmp_path / "home")
    (repo.root / "src" / "lib").mkdir(parents=True)
    for name in ("__init__", "rate"):
        (repo.root / "src" / "lib" / f"{name}.py").write_text("RATE = 1\n")
    repo.git("init", "--quiet", "--initial-branch=main")
    repo.commit("Start")
    for name in ("tree", "other"):
        repo.git("worktree", "add", "--quiet", "--detach", str(tmp_path / name))
    shutil.copytree(repo.root / "src", tmp_path / "free" / "src")
    repo.git("clone", "--quiet", str(repo.root), str(tmp_path / "clone"))
    (tmp_path / "tree" / "src" / "lib" / "rate.py").write_text("RATE = 2\n")  # of the commit under test
    (tmp_path / "alias").symlink_to(repo.root)


def case(**subject: object) -> Case:
    """Of a program that makes three steps."""
    command = {"kind": "command", "command": "{python} train.py", "path": "src", **subject}
    return Case.model_validate({"case": {"name": "toy", "steps": 3}, "subject": command})


def put(tmp_path: Path, source: str, *, early: str = "import lib.rate", late: str = "pass") -> Place:
    """The tree under test with a program that imports the package from somewhere."""
    place = Place(tmp_path / "tree", home=tmp_path / "home")
    (place.root / "train.py").write_text(TRAIN.format(place=str(tmp_path / source / "src"), early=early, late=late))
    return place


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("source", ["home", "alias", "other", "clone"])
def test_a_recorded_program(tmp_path: Path, source: str, late: bool) -> None:
    """Of the checkout, also through a symlink, of another worktree and of another clone; first or late imported."""
    place = put(tmp_path, source, **({"early": "", "late": LATE} if late else {}))
    with pytest.raises(ChildFailure, match=r"^lib.* was imported from another working tree, not from the commit"):
        launch(case(), place, [Run(3, trace=str(tmp_path / "t"))], tmp_path / "log")


@pytest.mark.parametrize("source", ["tree", "free", "same", "sibling"])
def test_code_that_is_meant(tmp_path: Path, source: str) -> None:
    """The tree's own, what no working tree holds, what is equal to the tree's, and another repository's."""
    place = put(tmp_path, "other" if source == "same" else source, late=LATE)
    if source == "same":
        shutil.copy(place.root / "src" / "lib" / "rate.py", tmp_path / "other" / "src" / "lib")
    if source == "sibling":
        shutil.copytree(tmp_path / "free", tmp_path / "sibling")
        Repo(tmp_path / "sibling").git("init", "--quiet")
        for repository, key in (("sibling", "remote.origin.url"), ("home", "submodule.lib.url")):
            Repo(tmp_path / repository).git("config", key, "https://example.com/lib")
    (result,) = launch(case(), place, [Run(3, trace=str(tmp_path / "t"))], tmp_path / "log")
    assert result.steps == 3


def test_programs_that_are_not_recorded(tmp_path: Path) -> None:
    """An exit code, a check and a crash before the first step say nothing of a commit whose code was not run."""
    place = put(tmp_path, "home")
    with pytest.raises(ChildFailure, match="lib"):
        exit_code(case(), place, tmp_path / "log")
    checked = case(check="{python} train.py", command="{python} -c 1")
    with pytest.raises(ChildFailure, match="lib"):
        exit_code(checked, place, tmp_path / "log")
    place = put(tmp_path, "home", early="import lib.rate; lib.rate.GONE")
    with pytest.raises(ChildFailure, match="lib"):
        launch(case(), place, [Run(3, trace=str(tmp_path / "t"))], tmp_path / "log")
    assert exit_code(case(), put(tmp_path, "tree"), tmp_path / "log") == 0


def test_a_test_of_the_users_own(tmp_path: Path) -> None:
    """What tests the commits may lie in the checkout and in none of them; a copy of what they have may not."""
    place = put(tmp_path, "tree")
    mine = tmp_path / "home" / "mine.py"
    mine.write_text("import sys; sys.exit(3)\n")
    assert exit_code(case(command=f"{{python}} {mine}"), place, tmp_path / "log") == 3
    (place.root / "mine.py").write_text("")
    with pytest.raises(ChildFailure, match=r"mine\.py was imported"):
        exit_code(case(command=f"{{python}} {mine}"), place, tmp_path / "log")


def test_a_checkout_with_anothers_code(tmp_path: Path) -> None:
    """A golden run of a checkout is not recorded of another one's code either."""
    place = put(tmp_path, "other")
    with pytest.raises(ChildFailure, match="lib"):
        launch(case(), Place(place.root), [Run(3, trace=str(tmp_path / "t"))], tmp_path / "log")
