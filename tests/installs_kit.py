"""Folders of packages for tests, what a worktree's installers leave in them, and what they hold."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from repro_golden.subjects.environments import installs


@pytest.fixture(name="site")
def site_fixture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of packages: an editable one of the user's checkout, a copy of another folder, and a release."""
    place = tmp_path / "env" / "lib" / "python" / "site-packages"
    monkeypatch.setattr(installs, "asked", lambda *_, **__: [str(place), str(tmp_path / "none yet")])
    monkeypatch.setattr(installs, "_known", {})
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    put(place, "mine-0.1", {"__editable__.mine-0.1.pth": "/home/me/src", "../../../bin/mine": "0.1"}, "/home/me/src")
    put(place, "copy-0.1", {"copy/__init__.py": "0.1", "copy/old.py": ""}, "/home/me/copy")
    put(place, "dep-1.0", {"dep.py": "1.0"})
    return place


@pytest.fixture(name="tree")
def tree_fixture(tmp_path: Path) -> Path:
    """A worktree."""
    root = tmp_path / "repro" / "worktrees" / "of" / "process" / "at-1" / "mine"
    root.mkdir(parents=True)
    (root / "setup.cfg").write_text("[metadata]\nname = Mine\n")
    return root


def put(site: Path, what: str, files: dict[str, str], source: str | Path = "") -> None:
    """What an installer leaves of a package; an earlier one of its name goes."""
    for about in site.glob(f"{what.partition('-')[0]}-*.dist-info"):
        for line in (about / "RECORD").read_text().splitlines():
            (site / line.partition(",")[0]).unlink(missing_ok=True)
        about.rmdir()
    url = json.dumps({"dir_info": {"editable": True}, "url": f"file://{source}"})
    files = files | ({f"{what}.dist-info/direct_url.json": url} if source else {})
    record = f"{what}.dist-info/RECORD"
    for name, text in (files | {record: "".join(f"{name},,\n" for name in [*files, record])}).items():
        (site / name).parent.mkdir(parents=True, exist_ok=True)
        (site / name).write_text(text)


def editable(site: Path, source: Path, version: str = "0.1") -> None:
    """What `pip install -e` does."""
    put(site, f"mine-{version}", {f"__editable__.mine-{version}.pth": f"{source}/src"}, source)


def flat(site: Path, source: Path) -> None:
    """What `pip install -e` makes of a flat layout: a finder, and a list that imports it at each start."""
    files = {"__editable___mine_finder.py": f"PATH = {str(source)!r}", "mine.pth": "import __editable___mine_finder"}
    put(site, "mine-0.1", files, source)


def listed(site: Path, source: Path) -> None:
    """What `setup.py develop` and a script that takes itself away again leave."""
    (site / "easy-install.pth").write_text(f"/home/me/other\n{source}/src\n")
    (site / "mine.egg-link").write_text(f"{source}/src\n")
    shutil.rmtree(site / "mine-0.1.dist-info")


def content(site: Path) -> dict[str, str]:
    """All files of an environment."""
    top = site.parents[2]
    return {str(path.relative_to(top)): path.read_text() for path in top.rglob("*") if path.is_file()}


def removed(site: Path, name: str) -> None:
    """What `pip uninstall` does."""
    put(site, f"{name}-9", {})
    shutil.rmtree(site / f"{name}-9.dist-info")
