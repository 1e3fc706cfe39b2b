"""What runs have written over is put back whole, and a pip that is somebody else's is left alone."""

from __future__ import annotations

import contextlib
import shutil
import signal
from pathlib import Path

import pytest
from installs_kit import content, editable, flat, listed, put, removed, site_fixture, tree_fixture  # noqa: F401

from repro_golden.base.errors import MachineFailureError
from repro_golden.replay.children import CancelledError
from repro_golden.repository import leads
from repro_golden.repository.checkout import Place
from repro_golden.repository.leads import noted, settle
from repro_golden.repository.packages import projects, scripts_in
from repro_golden.subjects.environments import installs


@pytest.mark.parametrize("stage", range(4))
def test_a_pip_that_was_ended(tmp_path: Path, site: Path, tree: Path, stage: int) -> None:
    """Wherever it was as its run was ended, the user's package is whole, and nothing is left of what it had begun."""
    flat(site, Path("/home/me/mine"))
    before = content(site)

    def run() -> None:
        (site / "mine.pth").unlink()
        if stage:
            (site / "mine-0.1.dist-info").rename(site / "~ine-0.1.dist-info")
            (site / "__editable___mine_finder.py").unlink()
        if stage > 1:
            flat(site, tree)
            (site / "mine-0.1.dist-info" / "RECORD").unlink()
        if stage > 2:
            (site / "mine-0.1.dist-info" / "direct_url.json").unlink()
            shutil.rmtree(site / "~ine-0.1.dist-info")
        raise CancelledError

    with pytest.raises(CancelledError), installs.taken_back(["python"], Place(tree, home=tmp_path), {}):
        run()
    assert content(site) == before


@pytest.mark.parametrize("upgrade", [True, False])
@pytest.mark.parametrize("install", [True, False])
def test_a_pip_of_the_users_that_is_at_work(
    tmp_path: Path, site: Path, tree: Path, *, upgrade: bool, install: bool
) -> None:
    """As a run ends nothing of it is touched, nor what it has put aside, whatever the run installed of other names."""
    with noted(tmp_path / "notes", site, tree):
        (site / "mine-0.1.dist-info").rename(site / "~ine-0.1.dist-info")
        (site / "__editable__.mine-0.1.pth").unlink()
        if upgrade:
            put(site, "mine-0.2", {"mine.py": ""})
            (site / "mine-0.2.dist-info" / "RECORD").unlink()
        during = content(site)
        if install:
            put(site, "new-0.1", {"__editable__.new-0.1.pth": f"{tree}/src"}, tree)
    assert content(site) == during


def test_a_pip_that_is_at_work_after_a_death(
    tmp_path: Path, site: Path, tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whose it is nobody knows: where files move nothing is touched until it has ended."""
    monkeypatch.setattr(leads.time, "sleep", lambda _: (site / "mine-0.2.dist-info").mkdir())
    aside = site / "~ine-0.1.dist-info"
    with contextlib.suppress(CancelledError), installs.taken_back(["python"], Place(tree, home=tmp_path), {}):
        (site / "mine-0.1.dist-info").rename(aside)
        raise CancelledError
    assert aside.exists() and not (site / "mine-0.1.dist-info").exists()


def test_a_pip_that_was_ended_where_nothing_stood(tmp_path: Path, site: Path, tree: Path) -> None:
    """What it had begun is gone, with the line that imports what is gone."""
    removed(site, "mine")
    before = content(site)
    with noted(tmp_path / "notes", site, tree):
        flat(site, tree)
        (site / "mine-0.1.dist-info" / "RECORD").unlink()
        (site / "mine-0.1.dist-info" / "direct_url.json").unlink()
    assert content(site) == before


def test_one_that_is_killed_as_it_puts_back(
    tmp_path: Path, site: Path, tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next goes on, though nothing leads to a worktree any more."""
    before = content(site)
    with monkeypatch.context() as patch:
        patch.setattr(leads, "_put_back", lambda *_: signal.default_int_handler(signal.SIGINT, None))
        with pytest.raises(KeyboardInterrupt), noted(tmp_path / "notes", site, tree):
            editable(site, tree)
    assert not (site / "mine-0.1.dist-info").exists()
    settle(tmp_path / "notes")
    assert content(site) == before


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_a_copy_that_breaks_off(
    tmp_path: Path, site: Path, tree: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    """No part of a file stands for the file, and the next goes on; so it does with a file that is not the copy's."""
    before, copy = content(site), shutil.copy2

    def broken(_: Path, to: Path, **__: bool) -> None:
        Path(to).touch()
        raise error

    with contextlib.suppress(MachineFailureError, KeyboardInterrupt), noted(tmp_path / "notes", site, tree):
        editable(site, tree)
        monkeypatch.setattr(shutil, "copy2", broken)
    monkeypatch.setattr(shutil, "copy2", copy)
    assert not (site.parents[2] / "bin" / "mine").exists()
    (site.parents[2] / "bin" / "mine").touch()
    settle(tmp_path / "notes")
    assert content(site) == before


def test_a_project_of_another_name(tmp_path: Path, site: Path, tree: Path) -> None:
    """What it has written over is the user's again, unless the user has removed that package meanwhile."""
    (tree / "dep.py").touch()
    before = content(site)
    for remove in (False, True):
        with noted(tmp_path / "notes", site, tree):
            if remove:
                removed(site, "dep")
                before = content(site)
            put(site, "renamed-1.0", {"dep.py": "of a commit"}, tree)
        assert content(site) == before


def test_what_the_user_upgrades_while_runs_overlap(tmp_path: Path, site: Path, tree: Path) -> None:
    """The newer package comes back: one that stands at a run's begin and is of no worktree is the user's."""
    with noted(tmp_path / "notes", site, tree):
        put(site, "mine-0.2", {"mine.py": "0.2"})
        (site / "mine-0.2.dist-info" / "direct_url.json").unlink(missing_ok=True)
        newer = content(site)
        with noted(tmp_path / "notes", site, tree):
            editable(site, tree)
    assert content(site) == newer


def test_what_setup_py_develop_had_of_the_users(tmp_path: Path, site: Path, tree: Path) -> None:
    """The link to the user's own checkout is there again, and its line in the list."""
    removed(site, "mine")
    (site / "mine.egg-link").write_text("/home/me/mine\n.")
    (site / "easy-install.pth").write_text("/home/me/mine\n")
    before = content(site)
    with noted(tmp_path / "state", site, tree):
        (site / "mine.egg-link").write_text(f"{tree}\n.")
        (site / "easy-install.pth").write_text(f"{tree}\n")
    assert content(site) == before


@pytest.mark.parametrize("egg", [True, False])
def test_what_setup_py_install_had_of_the_users(tmp_path: Path, site: Path, tree: Path, *, egg: bool) -> None:
    """A package of either form is there again, with its scripts and its line in the list of all."""
    removed(site, "mine")
    place = site / "mine-0.1-py3.egg"
    about, module = (place / "EGG-INFO", place / "mine.py") if egg else (site / "mine-0.1.egg-info", site / "mine.py")
    script = site.parents[2] / "bin" / "run"
    about.mkdir(parents=True)
    script.parent.mkdir(exist_ok=True)
    (about / "PKG-INFO").write_text("Name: mine")
    module.write_text("0.1")
    script.write_text("#!python\n# EASY-INSTALL-ENTRY-SCRIPT: 'mine==0.1','console_scripts','run'\n")
    (site / "easy-install.pth").write_text("./mine-0.1-py3.egg\n" if egg else "/home/me/other\n")
    (about / "top_level.txt").write_text("mine\n")
    before = content(site)
    with noted(tmp_path / "state", site, tree):
        script.unlink()
        module.unlink()
        shutil.rmtree(place if egg else about)
        (site / "easy-install.pth").write_text("" if egg else "/home/me/other\n")
        editable(site, tree)
    assert content(site) == before


def test_the_scripts_of_setup_py_develop(tmp_path: Path, site: Path, tree: Path) -> None:
    """They go with the link to the worktree, and no other package's do."""
    bin_, before = site.parents[2] / "bin", content(site)
    with noted(tmp_path / "state", site, tree):
        for name in ("mine", "miner"):
            (bin_ / f"{name}-run").write_text(f"#!python\n# EASY-INSTALL-DEV-SCRIPT: '{name}==0.2','run.py'\n")
        listed(site, tree)
    (site / "easy-install.pth").unlink()
    (bin_ / "miner-run").unlink()
    assert content(site) == before


@pytest.mark.parametrize("what", ["dep-1.0", "dep-2.0", "dep-3.egg"])
def test_what_says_nothing_of_its_folder(tmp_path: Path, site: Path, tree: Path, what: str) -> None:
    """A wheel from a folder and `setup.py install` stay as they are, and the user is told of them."""
    (tree / "setup.cfg").write_text("[metadata]\nname = dep")
    with pytest.raises(MachineFailureError, match=rf"{what}.* came or changed"), noted(tmp_path / "n", site, tree):
        (site / what).mkdir() if "egg" in what else put(site, what, {"dep.py": "2", "new.py": ""})
    with noted(tmp_path / "n", site, tree):
        pass


@pytest.mark.parametrize("cut", [CancelledError, KeyboardInterrupt])
def test_a_run_that_was_ended_says_so(tmp_path: Path, site: Path, tree: Path, cut: type[BaseException]) -> None:
    """Whoever ends it knows that by its type; of a package that came meanwhile the next run tells, once."""

    def run() -> None:
        with noted(tmp_path / "n", site, tree, (CancelledError, KeyboardInterrupt)):
            put(site, "mine-0.2", {"mine.py": ""})
            raise cut

    with pytest.raises(cut):
        run()
    with pytest.raises(MachineFailureError, match=r"mine-0\.2.* came or changed"), noted(tmp_path / "n", site, tree):
        pytest.fail("no run goes on over it")
    with noted(tmp_path / "n", site, tree):
        pass


def test_other_packages_are_asked_for_their_lists_alone(
    tmp_path: Path, site: Path, tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a run installs is taken back at a cost that is that of the project's package, however many others stand."""
    for number in range(30):
        put(site, f"other{number}-1.0", {f"other{number}/{name}.py": "" for name in "abcdefgh"})
    before, asked, resolve = content(site), list[Path](), Path.resolve
    monkeypatch.setattr(Path, "resolve", lambda path, **how: (asked.append(path), resolve(path, **how))[1])
    with noted(tmp_path / "n", site, tree):
        put(site, "mine-0.1", {f"mine/{number}.py": "" for number in range(30)}, tree)
    assert content(site) == before and len(asked) < 30


def test_the_names_of_a_project_are_its_own(tmp_path: Path, site: Path) -> None:
    """Those of an index, a contract or a dependency are none: a package of such a name would be copied at each run."""
    (tmp_path / "tree" / "old").mkdir(parents=True)
    tables = {"project": "A.b", "[tool.poetry.source]": "torch", "tool.poetry": "c", "tool.poetry.scripts": "d"}
    text = "".join(f'[{table}]\nversion = "1"\n  name = "{name}"\n' for table, name in tables.items())
    (tmp_path / "tree" / "pyproject.toml").write_text(f"[build-system]\nrequires = []\n{text}")
    (tmp_path / "tree" / "setup.cfg").write_text("[metadata]\n# name = no\nname: e\n[options]\nname = f\n")
    (tmp_path / "tree" / "old" / "setup.py").write_text("# name='torch'\nsetup(version='1', name='g', x=name)\n")
    assert projects(tmp_path / "tree")[0] == {"a-b", "c", "e", "g"}
    (site.parents[2] / "bin" / "g").write_bytes(b"\x7fELF EASY-INSTALL-DEV-SCRIPT: 'g==1'")
    assert not [*scripts_in(site, {"g"})]
