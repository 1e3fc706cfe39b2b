"""Where the packages of an environment come from: what its key stands for, and when it is built anew."""

from __future__ import annotations

from pathlib import Path

import pytest
from conftest import Repo
from test_environments import COUNT, locked, toy, using

from repro_golden.replay.children import ChildFailure
from repro_golden.repository.checkout import Place, find_checkout
from repro_golden.subjects.environments.builds import pip_options
from repro_golden.subjects.environments.cache import forget
from repro_golden.subjects.environments.origins import uv_switches


@pytest.fixture
def repo(tmp_path: Path) -> Repo:
    """A repository with a lock file and no trainer."""
    return locked(tmp_path)


@pytest.mark.parametrize("line", ["-f wheels", "--find-links=./wheels", "--extra-index-url wheels", "-i file:wheels"])
def test_packages_of_the_repository_are_named(repo: Repo, line: str) -> None:
    """A folder of packages decides an environment as a lock file does: it is one, or a line says that it is to be."""
    (repo.root / "wheels").mkdir()
    (repo.root / "wheels" / "a-1-py3-none-any.whl").write_bytes(b"one")
    (repo.root / "lock").write_text(f"{line}\na\n")
    with pytest.raises(ValueError, match=r"lock takes packages from wheels: add it to subject.lock"):
        pip_options(repo.root, ["lock"])
    assert pip_options(repo.root, ["lock", "wheels"]) == ["-r", "lock"]
    case = toy("touch {out}/x", lock=["lock", "wheels"])
    assert case.paths(["src"]) == ["src", "lock", "wheels"]
    with using(case, Place(repo.root)) as first:
        pass
    (repo.root / "wheels" / "a-1-py3-none-any.whl").write_bytes(b"two")
    with using(case, Place(repo.root)) as second:
        assert second.key != first.key


@pytest.mark.parametrize("place", ["wheels", "{root}/wheels"])
def test_packages_that_a_variable_names_are_named(repo: Repo, place: str) -> None:
    """So it is with a folder that PIP_FIND_LINKS names; one outside of the repository is like any index."""
    (repo.root / "wheels").mkdir()
    case = toy("pip", env={"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": place}, shell=False)
    with (
        pytest.raises(ChildFailure, match=r"PIP_FIND_LINKS takes packages from wheels: add it to subject.lock"),
        using(case, Place(repo.root)),
    ):
        pass


def test_environments_are_built_anew_where_nothing_known_is_used(repo: Repo) -> None:
    """`--fresh` forgets those that nobody uses."""
    case, state = toy(COUNT + "touch {out}/x"), find_checkout(repo.root).state
    with using(case, Place(repo.root)):
        forget(state)
    with using(case, Place(repo.root)):
        pass
    assert (repo.root / "made").read_text() == "x\n"
    forget(state)
    with using(case, Place(repo.root)):
        assert (repo.root / "made").read_text() == "x\nx\n"


def test_what_a_project_tells_uv_is_part_of_its_environment(tmp_path: Path) -> None:
    """Which groups are installed stands beside uv.lock; what else the project says changes nothing."""
    project = tmp_path / "pyproject.toml"
    assert uv_switches(tmp_path, "uv.lock") == {}
    project.write_text("[project]\nname = 'mine'\n")
    assert uv_switches(tmp_path, "uv.lock") == {}
    project.write_text("[tool.uv]\ndefault-groups = ['dev']\n")
    assert uv_switches(tmp_path, "uv.lock") == {"default-groups": ["dev"]}
