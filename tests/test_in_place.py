"""Packages in place and packages that were changed in place are known by what they hold."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import pytest
from conftest import SOURCE

from repro_golden.recording.attach.code.identify import Built, build, marked


def test_code_in_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package installed from a folder in place counts by that folder's code, unless commits decide it."""
    site, code = tmp_path / "site-packages", tmp_path / "code"
    (site / "tiny-1.0.dist-info").mkdir(parents=True)
    code.mkdir()
    (code / "tiny.py").write_text("A = 1\n")
    (site / "tiny-1.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: tiny\nVersion: 1.0\n")
    link = {"url": code.as_uri(), "dir_info": {"editable": True}}
    (site / "tiny-1.0.dist-info" / "direct_url.json").write_text(json.dumps(link))
    monkeypatch.setattr(sys, "path", [str(site)])
    builds = []
    for text in ("A = 1\n", "A = 12\n"):
        (code / "tiny.py").write_text(text)
        build.cache_clear()
        builds.append((build(tmp_path / "repo").digest, build(tmp_path / "code").digest))
    build.cache_clear()
    (here, under), (here_after, under_after) = builds
    assert here != here_after and under == under_after


def test_our_own_code_in_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkout of repro that is imported in place is not looked at: the recorder's version stands for it."""
    site, other = tmp_path / "site-packages", tmp_path / "other"
    for folder in (site, other):
        folder.mkdir()
    (other / "tiny.py").write_text("A = 1\n")
    folders = [SOURCE, *(SOURCE / part for part in ("core", "golden", "bisect")), other]
    (site / "all.pth").write_text("".join(f"{folder}\n" for folder in folders))
    monkeypatch.setattr(sys, "path", [str(site)])
    build.cache_clear()
    marks = build(tmp_path / "repo").marks
    build.cache_clear()
    assert str(other / "tiny.py") in marks
    assert not [place for place in marks if place.endswith(".py") and SOURCE in Path(place).parents]


LISTED = "sha256=Bu289DNhZaJx5lJAJaZDnDyqMkb9B5bxFncieXB6UyU"
"""Of ``A = 1`` in a list of files."""


def test_packages_that_were_changed_in_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was written into an installed package since, lies beside all of them, or is named by a .pth file, counts.

    What lies in two places with other times and the same content is one.
    """

    def install(name: str) -> Path:
        site = tmp_path / name / "site-packages"
        (site / "tiny-1.0.dist-info").mkdir(parents=True)
        (site / "tiny.py").write_text("A = 1\n")
        (site / "tiny-1.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: tiny\nVersion: 1.0\n")
        (site / "tiny.json").write_text("A = 1\n")
        listed = "".join(f"{name},{LISTED},6\n" for name in ("tiny.json", "tiny.py"))
        (site / "tiny-1.0.dist-info" / "RECORD").write_text(f"{listed}tiny-1.0.dist-info/RECORD,,\n")
        return site

    before = dict[Path, Built]()

    def ask(site: Path) -> str:
        monkeypatch.setattr(sys, "path", [str(site)])
        build.cache_clear()
        old, new = before.get(site), build(tmp_path / "repo")
        assert old is None or old.digest == new.digest or marked(old.marks) != old.marks, "no search would notice"
        before[site] = new
        return new.digest

    time.sleep(0.02)
    site, twin = install("one"), install("two")
    (tmp_path / "linked").mkdir()
    for place in (site, twin):
        os.utime(place / "tiny.py", ns=(1, 1))
        os.utime(place / "tiny.json", ns=(1, 1))
    builds = [ask(site)]
    assert ask(twin) == builds[0]
    changes = [
        site / "tiny.py",
        site / "loose.py",
        site / "some.pth",
        tmp_path / "linked" / "code.py",
        site / "tiny.json",
    ]
    for path, text in zip(changes, ("A = 2\n", "", f"{tmp_path / 'linked'}\n", "", "A = 3\n"), strict=True):
        path.write_text(text)
        os.utime(path, (time.time() + 5, time.time() + 5))
        builds.append(ask(site))
    build.cache_clear()
    assert len(set(builds)) == 6
    (site / "loose.py").write_text("")
    (site / "tiny.py").write_text("A = 3\n")
    os.utime(site / "tiny.py", ns=(1, 1))
    assert ask(site) not in builds, "a copy that keeps an older time"
    (site / "tiny.py").unlink()
    assert ask(site) not in builds
    (twin / "tiny.py").write_text("A = 2\n")
    os.utime(twin / "tiny.py", (time.time() + 50, time.time() + 50))
    assert ask(twin) == builds[1]
    (twin / "large.so").write_bytes(bytes((1 << 24) + 1))
    with (twin / "tiny-1.0.dist-info" / "RECORD").open("a") as record:
        record.write(f"large.so,sha256=x,{(1 << 24) + 1}\n")
    os.link(twin / "large.so", tmp_path / "shared")  # as an installer does that shares files: the time of change is new
    os.utime(twin / "large.so", ns=(1, 1))
    alone = ask(twin)
    os.link(twin / "large.so", tmp_path / "once more")
    assert ask(twin) == alone
    (twin / "large.so").write_bytes(bytes((1 << 24) + 2))
    assert ask(twin) != alone
    build.cache_clear()
