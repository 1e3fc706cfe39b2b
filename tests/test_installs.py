"""What runs install of their worktree among the user's packages is taken back, and a setup that does so is refused."""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import sys
import venv
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import Repo
from installs_kit import content, editable, flat, listed, put, removed, site_fixture, tree_fixture  # noqa: F401
from test_environments import toy

from repro_golden.base.errors import MachineFailureError, ReproError
from repro_golden.replay.children import CancelledError, ChildFailure
from repro_golden.repository import leads
from repro_golden.repository.checkout import Place, find_checkout
from repro_golden.repository.leads import noted, notes_of
from repro_golden.repository.worktrees import Worktrees
from repro_golden.subjects import exit_code
from repro_golden.subjects.environments import installs
from repro_golden.subjects.pythons import ran_in


def copied(site: Path, source: Path) -> None:
    """What `pip install` does with folders, of which one was never installed before."""
    put(site, "copy-0.2", {"copy/__init__.py": "0.2", "copy/sub/new.py": "", "../../../bin/copy": ""}, source)
    put(site, "new-0.1", {"new/__init__.py": ""}, source)


def exchanged(site: Path, source: Path) -> None:
    """It takes the place of a release that the worktree is the project of."""
    put(site, "dep-1.1", {"dep.py": "1.1"}, source)


@pytest.mark.parametrize("install", [editable, lambda *a: editable(*a, "0.2"), copied, exchanged, listed])
def test_what_a_run_installs_is_taken_back(
    tmp_path: Path, site: Path, tree: Path, install: Callable[[Path, Path], None]
) -> None:
    """The user's packages are what they were, whatever became of the run; it is noted that it did so."""
    (site / "easy-install.pth").write_text("/home/me/other\n")
    if install in (copied, exchanged):
        (tree / "setup.cfg").write_text(f"[metadata]\nname = {'Copy' if install is copied else 'Dep'}\n")
    before, place = content(site), Place(tree, home=tmp_path)
    for error in (None, ChildFailure("start", -1, "no", "log"), CancelledError()):

        def run(error: Exception | None = error) -> None:
            with installs.taken_back([sys.executable], place, {}):
                install(site, tree)
                if error:
                    raise error

        with pytest.raises(type(error)) if error else contextlib.nullcontext():
            run()
        assert content(site) == before
        assert not [folder for folder in site.rglob("*") if folder.is_dir() and not any(folder.iterdir())]
    assert installs.installed_by(place) and not installs.installed_by(Place(tree.parent / "other" / "tree"))


def test_runs_that_install_over_each_other(tmp_path: Path, site: Path, tree: Path) -> None:
    """The last of them puts back what was there before the first, and each says that its code was exchanged."""
    before, other = content(site), tree.parent.with_name("at-2") / "mine"
    shutil.copytree(tree, other)
    with noted(tmp_path / "state", site, other) as outer:
        editable(site, other)
        with noted(tmp_path / "state", site, tree) as inner:
            editable(site, tree)
        assert inner and content(site) != before
    assert outer and content(site) == before
    with noted(tmp_path / "state", site, tree) as idle:
        pass
    assert not idle


def test_what_a_killed_run_installed(tmp_path: Path, site: Path) -> None:
    """The next command that makes worktrees takes it back, with what a pip that was killed has put aside."""
    repo = Repo(tmp_path / "repo")
    repo.root.mkdir()
    repo.git("init", "--quiet")
    checkout, before = find_checkout(repo.root), content(site)
    worktrees = Worktrees(checkout)
    if not (child := os.fork()):
        root = worktrees._folder / "at-1" / "repo"
        root.mkdir(parents=True)
        (root / "setup.cfg").write_text("[metadata]\nname = mine")
        with noted(notes_of(checkout), site, root):
            (site / "mine-0.1.dist-info").rename(site / "~ine-0.1.dist-info")
            editable(site, root, "0.2")
            os._exit(9)
    os.waitpid(child, 0)
    assert content(site) != before
    Worktrees(checkout).close()
    assert content(site) == before
    worktrees.close()


def test_what_somebody_installs_meanwhile_is_not_touched(tmp_path: Path, site: Path, tree: Path) -> None:
    """Who it is of is not known: it stays, and a setup beside which it came is refused."""
    (site / "own.pth").write_text("/home/me/repro/worktrees/of/mine")
    for version in ("1.0", "1.1"):
        files = {"tool.py": version, "tool.pth": "/home/me/tool", "__editable__.mine-0.1.pth": f"/home/me/{version}"}
        place = Place(tree, home=tmp_path)
        guards = installs.taken_back(["python"], place, {}), installs.left_alone("python", "x", tree, {})
        with pytest.raises(ReproError, match=f"tool-{version}"), guards[0], guards[1]:
            put(site, f"tool-{version}", files)
        assert (site / "__editable__.mine-0.1.pth").read_text() == f"/home/me/{version}"
        assert ((site / "tool.py").read_text(), (site / "tool.pth").read_text()) == (version, "/home/me/tool")
        assert (site / "own.pth").read_text() == "/home/me/repro/worktrees/of/mine"
        with installs.left_alone("python", "x", tree, {}):
            (site / "__pycache__").mkdir(exist_ok=True)
    with noted(tmp_path / "state", site, tree):
        editable(site, Path("/home/me/newer"), "0.3")
    assert not (site / "mine-0.1.dist-info").exists()


@pytest.mark.parametrize("name", ["mine", "copy", "setuptools"])
@pytest.mark.parametrize("install", [False, True])
def test_what_the_user_uninstalls_meanwhile_stays_away(
    tmp_path: Path, site: Path, tree: Path, name: str, *, install: bool
) -> None:
    """Of no other package a file comes back, nor of the project's own where no run installed it."""
    put(site, "setuptools-80", {"distutils-precedence.pth": "import _distutils_hack", "_distutils_hack.py": ""})
    with noted(tmp_path / "state", site, tree) as packages:
        removed(site, name)
        after = content(site)
        if install:
            put(site, "new-0.1", {"__editable__.new-0.1.pth": f"{tree}/src"}, tree)
    assert bool(packages) == install
    if not install or name != "mine":
        assert content(site) == after


def test_a_folder_that_cannot_be_written(
    tmp_path: Path, site: Path, tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No run can install there, so nothing is noted; what an administrator removes is no error."""
    monkeypatch.setattr(installs.os, "access", lambda path, mode: path != site or mode != os.W_OK)
    with installs.taken_back(["python"], Place(tree, home=tmp_path), {}):
        removed(site, "mine")
        editable(site, tree)
    assert "mine-0.1.dist-info" in {path.name for path in site.iterdir()}


def of_clone(tree: Path, name: str) -> Path:
    """A worktree of another clone of the project."""
    other = tree.parents[3] / name / "process" / "at-2" / "mine"
    shutil.copytree(tree, other)
    return other


@pytest.mark.parametrize("install", [editable, flat])
@pytest.mark.parametrize("first", [True, False])
def test_two_clones_that_install_at_once(
    tmp_path: Path, site: Path, tree: Path, install: Callable[[Path, Path], None], *, first: bool
) -> None:
    """The user's package is back when the clone has ended whose package stands; each tells its own alone."""
    before, other = content(site), of_clone(tree, "other")
    stack, other_stack = contextlib.ExitStack(), contextlib.ExitStack()
    ours = stack.enter_context(noted(tmp_path / "notes", site, tree))
    install(site, tree)
    idle = other_stack.enter_context(noted(tmp_path / "notes", site, of_clone(tree, "third")))
    theirs = other_stack.enter_context(noted(tmp_path / "notes", site, other))
    install(site, other)
    for each in (stack, other_stack) if first else (other_stack, stack):
        each.close()
        assert (content(site) == before) is (each is other_stack or not first)
    assert content(site) == before
    assert theirs and not ours and not idle


@pytest.mark.parametrize("named", ["", "python/setup.cfg", "third_party/deep/mine/setup.py"])
@pytest.mark.parametrize("install", [editable, flat])
def test_a_project_of_any_layout(
    tmp_path: Path, site: Path, tree: Path, named: str, install: Callable[[Path, Path], None]
) -> None:
    """The user's editable package is back where the project is not in the root, and where nothing says its name."""
    (tree / "setup.cfg").unlink()
    if named:
        (tree / named).parent.mkdir(parents=True)
        (tree / named).write_text("[metadata]\nname = mine" if "cfg" in named else "setup(name='mine')")
    install(site, Path("/home/me/mine"))
    before = content(site)
    with noted(tmp_path / "notes", site, tree):
        install(site, tree / Path(named).parent)
    assert content(site) == before


@pytest.mark.parametrize("named", ["python/pyproject.toml", "dep.py", "src/dep.py"])
def test_a_release_that_a_project_is_of(tmp_path: Path, site: Path, tree: Path, named: str) -> None:
    """It is known by its name in any folder, or by a module beside the project's files where the name is made."""
    (tree / named).parent.mkdir(exist_ok=True)
    (tree / named).write_text('[project]\nname = "dep"\n')
    put(site, "big-1.0", {"big.py": "1" * leads._ANY})
    before = content(site)
    with noted(tmp_path / "notes", site, tree):
        exchanged(site, tree)
    assert content(site) == before


def test_a_script_that_uninstalls_what_it_installs(tmp_path: Path, site: Path, tree: Path) -> None:
    """What an earlier run has installed over comes back, also where a later one installs nothing in its place."""
    before = content(site)
    for install in (True, False):
        with noted(tmp_path / "notes", site, tree):
            removed(site, "mine")
            if install:
                editable(site, tree)
        assert content(site) == before


def test_a_folder_of_packages_that_an_installer_makes(tmp_path: Path, site: Path, tree: Path) -> None:
    """A user's own is gone again, while what is not of a worktree stays; one in the worktree is the run's own."""
    home, packages = Path(installs._sites("python", {}, tree)[1]), tree / "own"
    assert not home.exists()
    for dependency in (False, True):
        with installs.taken_back(["python"], Place(tree, home=tmp_path), {}):
            flat(home, tree)
            if dependency:
                put(home, "tool-1.0", {"tool.py": ""})
        assert sorted(path.name for path in home.glob("*")) == ["tool-1.0.dist-info", "tool.py"] * dependency
        assert home.exists() == dependency and site.exists()
    installs._known[("python", None, None, None)].append(packages)
    with installs.taken_back(["python"], Place(tree, home=tmp_path), {}):
        editable(packages, tree)
    assert (packages / "mine-0.1.dist-info").exists()


def test_files_that_others_share(tmp_path: Path, site: Path, tree: Path) -> None:
    """Of a list of folders only our lines go, and what another package has of the same path stays."""
    put(site, "foo-1.0", {"tests/__init__.py": "", "tests/helper.py": "", "foo.py": ""})
    before = content(site)
    with noted(tmp_path / "state", site, tree):
        put(site, "mine-0.2", {"tests/__init__.py": "", "tests/own.py": "", "mine.py": ""}, tree)
        (site / "easy-install.pth").write_text(f"{tree}\n/home/me/tool\n")
    assert content(site) == before | {"lib/python/site-packages/easy-install.pth": "/home/me/tool\n"}


def test_a_release_of_which_nothing_was_kept(tmp_path: Path, site: Path, tree: Path) -> None:
    """What took its place is gone as a whole, and the user is told what to install again."""
    files = {"dep.py": "1.1", "x.pth": "import __editable___x", "__editable___x.py": f"{tree}/x"}
    with pytest.raises(MachineFailureError, match="over dep in"), noted(tmp_path / "notes", site, tree):
        put(site, "dep-1.1", files, tree)
    assert not [*site.glob("*dep*"), *site.glob("*x*")]


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
    setup = f"{{python}} -m venv --without-pip env && env/bin/python {install}"
    case = toy(setup, lock=[], python="env", command="{python} -c 'import sys; sys.exit(\"/tree/\" not in sys.prefix)'")
    assert exit_code(case, place, tmp_path / "log") == 0


def test_an_environment_that_a_variable_names(tmp_path: Path, tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a run installs there is taken back too, though no word tells of it: `uv run` takes it so, and says so."""
    repo = Repo(tmp_path / "repo")
    repo.root.mkdir()
    repo.git("init", "--quiet", "--initial-branch=main")
    repo.commit("Start")
    venv.create(tmp_path / "env", symlinks=True)
    python, place = str(tmp_path / "env" / "bin" / "python"), Place(tree, home=repo.root)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("UV_PROJECT_ENVIRONMENT", str(tmp_path / "env"))
    install = 'import os, site; open(site.getsitepackages()[0] + "/mine.pth", "w").write(os.getcwd() + "/src")'
    case = toy("", lock=[], command=f"sh -c '$UV_PROJECT_ENVIRONMENT/bin/python -c \"$0\"' {shlex.quote(install)}")
    assert exit_code(case, place, tmp_path / "log") == 0
    assert installs.installed_by(place) == "mine.pth" and not [*(tmp_path / "env").rglob("mine.pth")]
    assert ran_in(place) == [python]


@pytest.mark.parametrize("what", ["another version", "gone", "new", "the project's own"])
def test_another_package_that_a_run_changes(tmp_path: Path, site: Path, tree: Path, what: str) -> None:
    """What was there and is another then ends the command, also where the run fails; what is new is no other's."""
    for error in (None, ChildFailure("start", -1, "no", "log")):
        put(site, "dep-1.0", {"dep.py": "1.0"})
        refused = what in ("another version", "gone")
        how = MachineFailureError if refused else type(error) if error else None
        line = f"dep 1.0 {'went' if what == 'gone' else 'became 1.1'} in .* while 1a2b3c4d5e ran.*install again"
        place = Place(tree, "1a2b3c4d5e6f", home=tmp_path)
        with (
            pytest.raises(how, match=line if refused else None) if how else contextlib.nullcontext(),
            installs.taken_back([sys.executable], place, {}),
        ):
            if what == "gone":
                removed(site, "dep")
            elif what == "the project's own":
                put(site, "mine-0.2", {"__editable__.mine-0.2.pth": f"{tree}/src"}, tree)
            else:
                put(site, "dep-1.1" if refused else "other-1.1", {"dep.py": "1.1"})
            if error:
                raise error


def test_a_run_that_was_ended_may_have_changed_a_package(tmp_path: Path, site: Path, tree: Path) -> None:
    """The next one says so: it is compared with what was there first."""
    put(site, "dep-1.0", {"dep.py": "1.0"})
    place = Place(tree, "1a2b3c4d5e6f", home=tmp_path)
    with contextlib.suppress(CancelledError), installs.taken_back([sys.executable], place, {}):
        removed(site, "dep")
        raise CancelledError
    with (
        pytest.raises(MachineFailureError, match=r"dep 1\.0 went in"),
        installs.taken_back([sys.executable], place, {}),
    ):
        pass


def test_what_no_numbers_rest_on_may_change(tmp_path: Path, site: Path, tree: Path) -> None:
    """Installers, what an interrupted install left, another spelling; and all that `uv run` brings to each commit's."""
    place = Place(tree, home=tmp_path)
    for name in ("pip-1.0", "~ep-1.0"):
        put(site, name, {})
    (site / "q-1.0.egg-info").mkdir()
    with installs.taken_back([sys.executable], place, {}):
        removed(site, "pip")
        put(site, "pip-2.0", {})
        for path in site.glob("~ep*"):
            shutil.rmtree(path)
        (site / "q-1.0.egg-info").rename(site / "q-1.0-py3.11.egg-info")
    put(site, "dep-1.0", {"dep.py": "1.0"})
    for variables in ({"UV_PROJECT_ENVIRONMENT": str(site.parent)}, {}):
        with (
            contextlib.nullcontext() if variables else pytest.raises(MachineFailureError, match=r"dep 1\.0 went"),
            installs.taken_back([sys.executable], place, variables),
        ):
            removed(site, "dep")
        put(site, "dep-1.0", {"dep.py": "1.0"})


def test_an_environment_of_ours_that_a_run_changes(tmp_path: Path) -> None:
    """It is built anew for the next run: nobody finds what the other one left there."""
    repo = Repo(tmp_path / "repo")
    repo.root.mkdir()
    repo.git("init", "--quiet", "--initial-branch=main")
    (repo.root / "lock").touch()
    repo.commit("Start")
    (tmp_path / "log").touch()
    install = 'site=$(python -c "import site; print(site.getsitepackages()[0])")'
    setup = f"{sys.executable} -m venv --without-pip {{out}}; cd {{out}}/lib/python*/site-packages; mkdir d-1.dist-info"
    case = toy(setup, command=f"{install}; mv $site/d-1.dist-info $site/d-2.dist-info")
    worktrees = Worktrees(find_checkout(repo.root))
    for _ in range(2):
        with (
            worktrees.at(repo.git("rev-parse", "HEAD"), None) as place,
            pytest.raises(MachineFailureError, match=r"d 1 became 2 in .* all others run with: let setup"),
        ):
            exit_code(case, place, tmp_path / "log")
    worktrees.close()
