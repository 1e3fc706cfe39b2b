"""What DVC's cache or a remote has lost, or damaged: it is told, mended from what is whole, and never thrown away."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from conftest import Repo

from repro_golden.base.errors import MachineFailureError
from repro_golden.store.dvc import Dvc
from repro_golden.store.pulled import is_whole, lacking

pytestmark = pytest.mark.usefixtures("warm_dvc")


class Kept:
    """A folder that real DVC keeps, with a remote that is a folder."""

    def __init__(self, folder: Path) -> None:
        self.repo, self.remote = Repo(folder / "repo"), folder / "remote"
        self.remote.mkdir()
        self.run = self.repo.root / "golden" / "runs" / "machine" / "case"
        (self.run / "trace").mkdir(parents=True)
        (self.run / "run.json").write_text("{}")
        (self.run / "trace" / "steps").write_text("1 2 3")
        self.repo.git("init", "--quiet")
        self.dvc, self.pointer = Dvc(self.repo.root), self.run.with_name("case.dvc")
        self.dvc.init()
        self.dvc.set_default_remote("kept", str(self.remote), local=False)
        self.dvc.add(self.run)
        self.cache = self.repo.root / ".dvc" / "cache"


@pytest.fixture
def kept(tmp_path: Path) -> Kept:
    """One."""
    return Kept(tmp_path)


def test_what_only_the_cache_lost_is_no_difference_and_is_pushed(kept: Kept) -> None:
    """The working tree is what the pointer stands for: it is not dirty, and goes to the remote whole, pulled or not."""
    shutil.rmtree(kept.cache)
    assert is_whole(kept.pointer) and not kept.dvc.dirty(kept.pointer)
    assert lacking(kept.pointer, kept.remote) != []
    kept.dvc.push(kept.pointer)
    assert lacking(kept.pointer, kept.remote) == []
    shutil.rmtree(kept.cache)
    kept.dvc.pull(kept.pointer)
    assert (kept.run / "trace" / "steps").read_text() == "1 2 3" and lacking(kept.pointer, kept.cache) == []


@pytest.mark.parametrize(
    "how", ["gone", *(pytest.param(how, marks=pytest.mark.whole) for how in ("other bytes", "empty"))]
)
def test_a_remote_that_lost_an_object_gets_it_again(kept: Kept, how: str) -> None:
    """To DVC a list stands for all that it names, and a file for its content: each object is looked at."""
    kept.dvc.push(kept.pointer)
    (lost,) = (p for p in (kept.remote / "files").rglob("*") if p.is_file() and p.read_bytes() == b"1 2 3")
    lost.chmod(0o644)
    lost.write_text("" if how == "empty" else "9 9 9")
    if how == "gone":
        lost.unlink()
    kept.dvc.push(kept.pointer)
    assert lost.read_text() == "1 2 3" and lacking(kept.pointer, kept.remote) == []


def test_what_is_nowhere_is_not_up_to_date(kept: Kept) -> None:
    """Neither cache nor tree nor remote has it: the push fails, and leaves no list at the remote that claims it."""
    shutil.rmtree(kept.cache)
    shutil.rmtree(kept.run)
    with pytest.raises(MachineFailureError, match=r"has lost golden/runs/machine/case, its remote has not .*`git rm "):
        kept.dvc.push(kept.pointer)
    assert not any(path.is_file() for path in kept.remote.rglob("*"))


@pytest.mark.whole
def test_what_the_remote_alone_has_is_there(kept: Kept) -> None:
    """A checkout that never pulled a run may push the others."""
    kept.dvc.push(kept.pointer)
    shutil.rmtree(kept.cache)
    shutil.rmtree(kept.run)
    assert kept.dvc.push(kept.pointer) == "Everything is up to date."
    next(p for p in (kept.remote / "files").rglob("*") if p.is_file() and p.suffix != ".dir").unlink()
    with pytest.raises(MachineFailureError, match="its remote has not all of it"):  # its list is there all the same
        kept.dvc.push(kept.pointer)


@pytest.mark.whole
def test_no_cure_throws_away_what_differs(kept: Kept) -> None:
    """A tree that differs, which the cache has not kept either, is dirty; a pull says so, and does not say --force."""
    kept.dvc.push(kept.pointer)
    shutil.rmtree(kept.cache)
    (kept.run / "run.json").write_text('{"mine": 1}')
    assert kept.dvc.dirty(kept.pointer) and not is_whole(kept.pointer)
    with pytest.raises(MachineFailureError, match="move it away") as refused:
        kept.dvc.pull(kept.pointer)
    assert "--force" not in str(refused.value) and (kept.run / "run.json").read_text() == '{"mine": 1}'


@pytest.mark.whole
def test_a_pull_keeps_an_edit_where_the_cache_is_a_link(kept: Kept) -> None:
    """An edit in place of a hard link is in the cache too: what is damaged there goes, and the file stays."""
    kept.dvc.run("config", "cache.type", "hardlink")
    kept.dvc.run("checkout", "--relink")
    kept.dvc.push(kept.pointer)
    edited = kept.run / "run.json"
    edited.chmod(0o644)
    edited.write_text('{"mine": 1}')
    with pytest.raises(MachineFailureError, match="move it away"):
        kept.dvc.pull(kept.pointer)
    assert edited.read_text() == '{"mine": 1}'


@pytest.mark.whole
def test_a_pointer_with_a_remote_of_its_own(kept: Kept, tmp_path: Path) -> None:
    """What goes elsewhere is not looked for in the default remote."""
    other = tmp_path / "other"
    (kept.remote / "files" / "md5").mkdir(parents=True)
    other.mkdir()
    kept.dvc.run("remote", "add", "other", str(other))
    kept.pointer.write_text(kept.pointer.read_text().replace("  path:", "  remote: other\n  path:"))
    kept.dvc.push(kept.pointer)
    assert lacking(kept.pointer, other) == []
