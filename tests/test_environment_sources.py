"""Where the packages of an environment come from: what its key stands for, and when it is built anew."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from conftest import Repo
from test_environments import COUNT, locked, toy, using, wheel

from repro_golden.case.file import Case
from repro_golden.replay.children import ChildFailure
from repro_golden.repository.checkout import Place, find_checkout
from repro_golden.subjects.environments.builds import put_alone
from repro_golden.subjects.environments.cache import forget
from repro_golden.subjects.environments.origins import uv_switches

UV_LOCK = """\
version = 1

[[package]]
name = "mine"
source = { editable = "." }

[[package]]
name = "member"
source = { virtual = "member" }

[[package]]
name = "hashed"
source = { path = "hashed.whl" }
wheels = [{ filename = "hashed.whl", hash = "sha256:00" }]

[[package]]
name = "otherhash"
source = { path = "other.whl" }
wheels = [{ filename = "other.whl" }]
"""


@pytest.fixture
def repo(tmp_path: Path) -> Repo:
    """A repository with a lock file and no trainer."""
    return locked(tmp_path)


UV = """\
#!/bin/sh
cd "$4" && find . -type f | sort > "$UV_PROJECT_ENVIRONMENT/seen"
(cd "${UV_FIND_LINKS:-.}" && find . -name "*.whl") > "$UV_PROJECT_ENVIRONMENT/links"
echo "$PWD" | grep -q repro-lock-
"""
"""Says what it finds in the project's folder, and where it is told to find packages."""


def by_uv(folder: Path, *lock: str, **env: str) -> Case:
    """A case whose uv only looks around."""
    (folder / "bin").mkdir(exist_ok=True)
    (folder / "bin" / "uv").write_text(UV)
    (folder / "bin" / "uv").chmod(0o755)
    variables = {"PATH": f"{folder}/bin:{os.environ['PATH']}", **env}
    return toy("uv", lock=["uv.lock", *lock], env=variables, shell=False)


@pytest.fixture
def locked_by_uv(repo: Repo) -> Repo:
    """A project with packages of its own, a member and a folder of packages, of which the lock file hashes one."""
    files = {
        "uv.lock": UV_LOCK, "pyproject.toml": "[tool.uv]\nfind-links = ['wheels']\n", "src/mine.py": "", "README": "",
        "member/pyproject.toml": "", "member/code.py": "", "wheels/a.whl": "one", "hashed.whl": "", "other.whl": "",
    }  # fmt: skip
    for name, text in files.items():
        (repo.root / name).parent.mkdir(exist_ok=True)
        (repo.root / name).write_text(text)
    repo.commit("Lock")
    return repo


def test_a_build_has_what_is_named_alone(locked_by_uv: Repo, tmp_path: Path) -> None:
    """However an installer is told to read files of a commit, it finds none but those that the key stands for."""
    place, always = Place(locked_by_uv.root), {"hashed.whl", "member/pyproject.toml", "pyproject.toml", "uv.lock"}

    def seen(*lock: str, name: str = "seen", **env: str) -> set[str]:
        with using(by_uv(tmp_path, *lock, **env), place) as environment:
            return {line.removeprefix("./") for line in (environment.folder / name).read_text().split()}

    assert seen() == always
    assert seen("wheels") == {*always, "wheels/a.whl"}
    assert seen("wheels", name="links", UV_FIND_LINKS="{root}/wheels") == {"a.whl"}
    (place.root / "uv.toml").touch()
    with pytest.raises(ChildFailure, match=r"uv takes settings from uv\.toml: add it to subject\.lock"):
        seen()
    assert seen("uv.toml") == {*always, "uv.toml"}


def test_packages_of_the_repository_are_part_of_the_key(locked_by_uv: Repo, tmp_path: Path) -> None:
    """Commits with other packages in a folder that is named have environments of their own."""
    case, place = by_uv(tmp_path, "wheels"), Place(locked_by_uv.root)
    assert case.paths(["src"]) == ["src", "uv.lock", "wheels"]
    with using(case, place) as first:
        pass
    (place.root / "wheels" / "a.whl").write_text("two")
    with using(case, place) as second:
        assert second.key != first.key


def test_a_path_that_leads_back_is_refused(locked_by_uv: Repo, tmp_path: Path) -> None:
    """What is named by its path in the checkout would be today's at every commit; a comment names nothing."""
    root = locked_by_uv.root
    with (
        pytest.raises(ChildFailure, match=r"UV_FIND_LINKS names \.: write a path that is relative"),
        using(by_uv(tmp_path, UV_FIND_LINKS=f"{root}/wheels"), Place(root)),
    ):
        pass
    (tmp_path / "alone").mkdir()
    (root / "lock").write_text(f"a==1  # via -r {root}/requirements.in\n")
    put_alone(root, ["lock"], tmp_path / "alone", uv=False)
    (root / "lock").write_text(f"a @ file://{root}/other.whl\n")
    with pytest.raises(ValueError, match=r"lock names .*: write a path that is relative"):
        put_alone(root, ["lock"], tmp_path / "alone", uv=False)


@pytest.mark.whole
@pytest.mark.parametrize(
    "line", ["-f wheels", '--find-links "wheels"', "--find-links \\\n  wheels", "wheels/a.whl", "-e ."]
)
def test_pip_finds_what_is_named_alone(repo: Repo, line: str) -> None:
    """A requirement that leads to what is not named does not build, however it is written."""
    (repo.root / "wheels").mkdir()
    wheel(repo.root / "wheels", "a", "1", {"a.py": ""})
    (repo.root / "lock").write_text(f"--no-index\n{line}\n" + ("a\n" if "f" in line else ""))
    with (
        pytest.raises(ChildFailure, match=r"it had what subject\.lock names alone: add what it reads"),
        using(toy("pip", shell=False), Place(repo.root)),
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
