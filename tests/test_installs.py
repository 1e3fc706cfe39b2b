"""A setup that installs into the user's own Python is refused, and what led to their code leads there again."""

from __future__ import annotations

import shutil
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
    monkeypatch.setattr(installs, "asked", lambda *_, **__: [str(place), str(tmp_path / "none yet")])
    put(place, "mine-0.1", {"__editable__.mine-0.1.pth": "/home/me/src"}, '{"url": "/home/me/src"}')
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


@pytest.mark.parametrize("error", [None, ChildFailure("build", -1, "no", "log"), CancelledError()])
@pytest.mark.parametrize("version", ["0.1", "0.2"])
def test_an_installation_that_leads_to_a_worktree(tmp_path: Path, site: Path, version: str, error: Exception) -> None:
    """The user's editable installation leads where it did, whatever became of the setup, which is refused."""
    before, away = content(site), str(tmp_path / "tree" / "src")

    def install() -> None:
        with installs.left_alone(sys.executable, "pip", tmp_path / "tree", {}):
            shutil.rmtree(site / "mine-0.1.dist-info")
            (site / "__editable__.mine-0.1.pth").unlink()
            put(site, f"mine-{version}", {f"__editable__.mine-{version}.pth": away}, f'{{"url": "{away}"}}')
            if error:
                raise error

    with pytest.raises(type(error) if error else ReproError) as raised:
        install()
    if not error:
        assert str(raised.value).startswith("subject.setup (pip) changes ") and f"mine-{version}" in str(raised.value)
    after = content(site)
    assert after["__editable__.mine-0.1.pth"] == "/home/me/src"
    assert not [name for name, text in after.items() if away in text and not name.endswith(".json")]
    assert version == "0.2" or {**after, "mine-0.1.dist-info/RECORD": ""} == {**before, "mine-0.1.dist-info/RECORD": ""}


def test_what_somebody_installs_meanwhile_is_not_touched(tmp_path: Path, site: Path) -> None:
    """Who it is of is not known: it is named, and stays. Each setup is looked at, also one whose text was harmless."""
    (site / "own.pth").write_text("/home/me/repro/worktrees/of/mine")
    for version in ("1.0", "1.1"):
        files = {"tool.py": version, "tool.pth": "/home/me/tool", "__editable__.mine-0.1.pth": f"/home/me/{version}"}
        with pytest.raises(ReproError, match=f"tool-{version}"), installs.left_alone("python", "x", tmp_path / "t", {}):
            put(site, f"tool-{version}", files)
        assert (site / "__editable__.mine-0.1.pth").read_text() == f"/home/me/{version}"
        assert ((site / "tool.py").read_text(), (site / "tool.pth").read_text()) == (version, "/home/me/tool")
        assert (site / "own.pth").read_text() == "/home/me/repro/worktrees/of/mine"
        with installs.left_alone("python", "x", tmp_path / "t", {}):
            (site / "__pycache__").mkdir(exist_ok=True)


@pytest.mark.usefixtures("site")
def test_a_setup_does_as_it_likes_with_the_worktrees_python(tmp_path: Path) -> None:
    """One that is there already, as from the setup before, is no other probe's and nobody's."""
    with installs.left_alone(str(tmp_path / "tree" / "env" / "bin" / "python"), "pip", tmp_path / "tree", {}):
        put(tmp_path / "env" / "site-packages", "tool-1.0", {"tool.py": ""})


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
    for path in repo.root.rglob("x.pth"):
        path.unlink()
    own = f"{{python}} -m venv --without-pip env && env/bin/python {install}"
    case = toy(own, lock=[], python="env", command="{python} -c 'import sys; sys.exit(\"/tree/\" not in sys.prefix)'")
    assert exit_code(case, place, tmp_path / "log") == 0
