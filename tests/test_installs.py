"""A setup that installs into the user's own Python is refused, and what it put there is taken away again."""

from __future__ import annotations

import sys
import venv
from pathlib import Path

import pytest
from conftest import Repo
from test_environments import toy

from repro_golden.base.errors import ReproError
from repro_golden.replay.children import CancelledError, ChildFailure
from repro_golden.repository.checkout import Place
from repro_golden.subjects import exit_code, installs


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of packages: an editable one of the user's checkout, and a release."""
    place = tmp_path / "env" / "site-packages"
    place.mkdir(parents=True)
    monkeypatch.setattr(installs, "asked", lambda *_, **__: [str(place)])
    monkeypatch.setattr(installs, "_harmless", set())
    put(place, "mine-0.1", {"mine.pth": "/home/me/src", "../bin/mine": "start"}, '{"dir_info": {"editable": true}}')
    put(place, "dep-1.0", {"dep.py": "1.0"})
    return place


def put(site: Path, what: str, files: dict[str, str], about: str = "") -> None:
    """What an installer leaves of a package."""
    files = files | ({f"{what}.dist-info/direct_url.json": about} if about else {})
    record = f"{what}.dist-info/RECORD"
    for name, text in (files | {record: "".join(f"{name},,\n" for name in [*files, record])}).items():
        (site / name).parent.mkdir(parents=True, exist_ok=True)
        (site / name).write_text(text)


def content(folder: Path) -> dict[str, str]:
    """All files below a folder."""
    return {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}


def run(site: Path, gone: str, files: dict[str, str], what: str, error: Exception | None = None) -> None:
    """A setup that exchanges a package for another version, and adds one."""
    with installs.left_alone(sys.executable, "pip", site, {}):
        for path in [*files, *(str(path) for path in (site / f"{gone}.dist-info").iterdir())]:
            (site / path).unlink()
        put(site, what, files, "{}")
        put(site, "new-1", {"new/__init__.py": ""})
        if error:
            raise error


@pytest.mark.parametrize("error", [None, ChildFailure("build", -1, "no", "log"), CancelledError()])
def test_what_a_setup_installs_is_taken_away(site: Path, error: Exception | None) -> None:
    """The user's editable installation is back as it was, with its programs, and a new package is gone."""
    before, other = content(site.parent), {"mine.pth": "/worktree/src", "../bin/mine": "other"}
    with pytest.raises(CancelledError if isinstance(error, CancelledError) else ReproError) as raised:
        run(site, "mine-0.1", other, "mine-0.2", error)
    if not isinstance(error, CancelledError):
        assert str(raised.value).startswith("subject.setup (pip) changes mine-0.1, mine-0.2, new-1 in ")
    assert content(site.parent) == before
    assert not (site / "new").exists()


def test_a_release_that_moved_stays(site: Path) -> None:
    """What nobody can put back is not taken away either: it is named."""
    with pytest.raises(ReproError, match=r"\(dep-1\.0, dep-1\.1 could not be put back: install it again\)"):
        run(site, "dep-1.0", {"dep.py": "1.1"}, "dep-1.1")
    assert (site / "dep.py").read_text() == "1.1"
    assert not (site / "new").exists()


def test_a_setup_that_builds_in_the_worktree(site: Path) -> None:
    """One that leaves packages alone is looked at once; a failure of its own is the commit's."""
    with pytest.raises(ChildFailure), installs.left_alone(sys.executable, "make", site, {}):
        raise ChildFailure("build", -1, "no", "log")
    with installs.left_alone(sys.executable, "make", site, {}):
        (site / "__pycache__").mkdir()
    assert installs._harmless == {(sys.executable, "make")}


def test_a_python_of_the_worktrees_own(tmp_path: Path) -> None:
    """A setup may make one there and install into it; that of the checkout, which each worktree runs, is left alone."""
    repo = Repo(tmp_path / "repo")
    repo.root.mkdir()
    repo.git("init", "--quiet", "--initial-branch=main")
    repo.commit("Start")
    venv.create(repo.root / "env", symlinks=True)
    (tmp_path / "tree").mkdir()
    place = Place(tmp_path / "tree", home=repo.root)
    install = '-c \'import site; open(site.getsitepackages()[0] + "/x.pth", "w")\''
    with pytest.raises(ReproError, match=r"changes x\.pth in .*/repo/env/bin/python"):
        exit_code(toy(f"{{python}} {install}", lock=[], python="env"), place, tmp_path / "log")
    assert not list(repo.root.rglob("x.pth"))
    own = f"{{python}} -m venv --without-pip env && env/bin/python {install}"
    case = toy(own, lock=[], python="env", command="{python} -c 'import sys; sys.exit(\"/tree/\" not in sys.prefix)'")
    assert exit_code(case, place, tmp_path / "log") == 0
