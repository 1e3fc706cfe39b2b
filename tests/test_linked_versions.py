"""Linked data of which each commit names its own by DVC's files: no commit is judged by another's."""

from __future__ import annotations

import contextlib
import json
import shutil
import sys
from pathlib import Path

import dvc_kit
import pytest
from conftest import Repo
from history_kit import CASE, TRAIN, note
from history_kit import start as toy
from test_dvc_stages import dvc
from test_linked import JUDGE, case, worktree

from repro_golden.base.errors import AbsentError, ReproError
from repro_golden.repository.checkout import find_checkout
from repro_golden.repository.dvc_files import beside, named
from repro_golden.repository.git import Git
from repro_golden.repository.worktrees import Worktrees
from repro_golden.store.golden import Store


@pytest.fixture
def repo(tmp_path: Path) -> Repo:
    """An empty repository with DVC."""
    made = Repo(tmp_path / "repo")
    dvc_kit.start(made)
    made.git("init", "--quiet", "--initial-branch=main")
    return made


BY_EXIT = ("bisect", "--no-explain", "-j", "1", "--when", "exit", "--json")


def test_the_commit_that_changes_the_data_is_named(repo: Repo) -> None:
    """Each commit is judged by its own data: the one that begins to read it is not blamed for what it became later."""
    (repo.root / "judge.py").write_text("import sys\n")
    dvc_kit.add(repo, "data/limit", "9")
    good = repo.commit("Start")
    (repo.root / "value").write_text("5\n")
    (repo.root / "judge.py").write_text(JUDGE)
    repo.commit("Read the limit")
    dvc_kit.add(repo, "data/limit", "1")
    culprit = repo.commit("Another limit")
    note(repo, "one")
    for link in ("data", "data/limit"):
        done = repo.repro(*BY_EXIT, f"{good}..HEAD", "--link", link, "--", sys.executable, "judge.py")
        assert json.loads(done.stdout)["culprit"]["commit"] == culprit, done.stderr
    in_place = "import sys; sys.exit(int(open(sys.argv[1]).read()) < 5)"
    done = repo.repro(*BY_EXIT, f"{good}..HEAD", "--", sys.executable, "-c", in_place, "{root}/data/limit")
    assert done.returncode == 2 and "GOOD cannot be tested: lacks what it needs: data/limit is not what" in done.stderr


def test_a_folder_of_another_commit(repo: Repo) -> None:
    """Its files are those that the commit names, read only by their links; what they name alike is the checkout's."""
    dvc_kit.add(repo, "data/set", {"a": "1", "deep/b": "2"})
    dvc_kit.add(repo, "data/same", "same")
    first = repo.commit("First")
    dvc_kit.add(repo, "data/set", {"a": "3", "c": "4"})
    dvc_kit.add(repo, "data/new", "new")
    repo.commit("Second")
    (repo.root / "data" / "new.dvc").unlink()
    (repo.root / "data" / "new").unlink()
    third = repo.commit("Third")

    def files(commit: str, *link: str) -> dict[str, str]:
        with worktree(repo, *link, commit=commit) as place:
            data = place.root / "data"
            paths = [path for path in data.rglob("*") if path.is_file() and path.suffix != ".dvc"]
            return {path.relative_to(data).as_posix(): path.read_text() for path in paths if path.name[0] != "."}

    assert files(first, "data") == {"set/a": "1", "set/deep/b": "2", "same": "same"}
    assert files(f"{first}~0", "data/set/a") == {"set/a": "1"}
    assert files(third, "data") == {"set/a": "3", "set/c": "4", "same": "same"}
    assert files(f"{third}~1", "data") == {"set/a": "3", "set/c": "4", "same": "same", "new": "new"}
    with contextlib.ExitStack() as exits:
        exits.enter_context(pytest.raises(ReproError, match="was changed"))
        place = exits.enter_context(worktree(repo, "data", commit=first))
        file = (place.root / "data" / "set" / "a").resolve()
        file.chmod(0o644)
        file.write_text("5")


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ("lost", "not in DVC's cache: `dvc fetch --all-commits data/x` brings it"),
        ("unnamed", "data/derived, which is linked beside it, is named by none"),
        ("gone", r"neither is here: `dvc pull data/x`"),
    ],
)
def test_data_that_is_not_here(repo: Repo, how: str, why: str) -> None:
    """A commit whose data cannot be had, or may have decided what lies beside it, is not run on other data."""
    dvc_kit.add(repo, "data/x", "1")
    repo.commit("First")
    dvc_kit.add(repo, "data/x", "2")
    (repo.root / "code.py").touch()
    repo.commit("Second")
    if how == "lost":
        next((repo.root / ".dvc/cache/files/md5").glob("c4/ca4238a0b923820dcc509a6f75849b")).unlink()
    if how == "unnamed":
        (repo.root / "data" / "derived").touch()
    if how == "gone":
        (repo.root / "data" / "x").unlink()
        with pytest.raises(ReproError, match=r"nothing of data is here .* `dvc pull data` brings it"):
            Worktrees(find_checkout(repo.root), ["data"])
        (repo.root / "data" / "other").touch()
    with worktree(repo, "data"):
        pass
    with pytest.raises(AbsentError, match=why), worktree(repo, "data", commit="HEAD~1"):
        pass


def test_data_that_came_later_is_not_there(repo: Repo) -> None:
    """A commit of before `dvc add` has none, as git and DVC would have it; what did not change is there as ever."""
    dvc_kit.add(repo, "data/x", "1")
    first = repo.commit("First")
    dvc_kit.add(repo, "data/y", "2")
    repo.commit("Second")
    dvc_kit.add(repo, "data/z", "3")  # in no commit yet
    for link in ("data", "data/x"):
        with worktree(repo, link, commit=first) as place:
            assert (place.root / "data" / "x").read_text() == "1" and not (place.root / "data" / "y").exists()


def test_the_form_of_dvc_2_and_the_folder_of_a_stage(repo: Repo) -> None:
    """An md5 of DVC 2 names what that of DVC 3 does, and a stage's outputs lie where it works."""
    pointer = repo.root / "data" / "x.dvc"
    dvc_kit.add(repo, "data/x", "1")
    new = pointer.read_text()
    assert new.count("  hash: md5\n") == 1
    pointer.write_text(new.replace("  hash: md5\n", ""))
    (repo.root / "dvc.yaml").write_text("stages:\n  train:\n    cmd: true\n    wdir: sub\n    outs: [m]\n")
    lock = "schema: '2.0'\nstages:\n  train:\n    outs:\n    - path: m\n      hash: md5\n      md5: {}\n"
    (repo.root / "dvc.lock").write_text(lock.format("1" * 32))
    old = repo.commit("DVC 2")
    pointer.write_text(new)
    (repo.root / "dvc.lock").write_text(lock.format("2" * 32))
    repo.commit("DVC 3")
    assert named(Git(repo.root), ["sub"]) == {"sub/m": "2" * 32}
    with worktree(repo, "data", commit=old) as place:
        assert (place.root / "data" / "x").read_text() == "1"


def test_what_names_data_is_code(repo: Repo) -> None:
    """Commits that name other data have another key, also where the code is a folder elsewhere; others have the same.

    Data of which no commit says anything is no change of the checkout, and a pointer that is in no commit is one.
    """
    (repo.root / "src").mkdir()
    (repo.root / "src" / "train.py").touch()
    dvc_kit.add(repo, "data/deep/x", "1")
    repo.commit("First")
    checkout = find_checkout(repo.root)
    for asked in (case(path="src", link=["data"]), case(path="src", link=["data/deep/x"]),
                  case("python src/train.py {root}/data/deep/x", path="src")):  # fmt: skip
        before = checkout.place(asked).tree
        note(repo, "elsewhere")
        assert checkout.place(asked).tree == before
        dvc_kit.add(repo, "data/deep/x", before or "")
        assert checkout.place(asked).commit is None
        repo.commit("Other data")
        assert checkout.place(asked).tree not in (None, before)
    (repo.root / "data" / "unnamed").touch()
    linked = case(path="src", link=["data"])
    assert checkout.place(linked).tree
    (repo.root / "data" / "y.dvc").touch()
    assert checkout.place(linked).commit is None
    assert "data" in beside(["data/deep/x"]) or "data.dvc" in beside(["data/deep/x"])


def test_data_that_no_commit_names(repo: Repo) -> None:
    """Linked content that is not what its pointer names is refused, with the cure; so is a pointer with conflicts."""
    dvc_kit.add(repo, "data/x", "1")
    dvc_kit.add(repo, "data/set", {"a": "1"})
    repo.commit("Data")
    store = Store(repo.root)
    for link in ("data", "data/x", "data/set/a"):
        store.refuse_other_data(case(link=[link]))
    (repo.root / "data" / "set" / "a").write_text("2")
    store.refuse_other_data(case(link=["data/x"]))
    for asked in (case(link=["data"]), case(link=["data/set/a"]), case("a {root}/data/set/a")):
        with pytest.raises(ReproError, match=r"data/set is not the content .*`dvc checkout data/set` brings that back"):
            store.refuse_other_data(asked)
    (repo.root / "data" / "x.dvc").write_text("<<<<<<< HEAD\n")
    with pytest.raises(ReproError, match=r"data/x\.dvc has merge conflicts"):
        store.refuse_other_data(case(link=["data/x"]))


def test_what_dvc_itself_writes(repo: Repo) -> None:
    """Files, folders, names that are quoted or folded, other folders and stages' outputs: all are read as DVC means."""
    (repo.root / "data" / "set").mkdir(parents=True)
    long = "a: " + "name that is folded " * 6 + "'end"
    for name in ("data/x", f"data/{long}", "data/set/a", "data/\u00fc"):
        (repo.root / name).write_text(name)
    shutil.rmtree(repo.root / ".dvc")
    stage = ["stage", "add", "--quiet", "--run", "-n", "make", "-o", "data/made", "echo 1 > data/made"]
    for line in (["init", "--quiet"], ["add", "--quiet", "data/x", "data/set", f"data/{long}", "data/\u00fc"], stage):
        done = dvc(repo, *line)
        assert done.returncode == 0, done.stderr
    names = named(Git(repo.root), ["data"])
    assert set(names) == {"data/x", "data/set", f"data/{long}", "data/\u00fc", "data/made"}
    assert not Store(repo.root).dvc.differing(names)
    (repo.root / ".dvcignore").write_text("*.tmp\n")
    (repo.root / "data" / "set" / "b.tmp").touch()
    assert not Store(repo.root).dvc.differing(names)
    (repo.root / "data" / "made").write_text("2")
    assert Store(repo.root).dvc.differing(names) == ["data/made"]


READS = TRAIN.replace("import torch\n", "import torch\nSEED = int(open('data/seed').read())\n").replace(
    "seed(3)", "seed(SEED)"
)


def test_commands_on_data_of_commits(tmp_path: Path) -> None:
    """What only names other data moves the numbers; where the old data is gone, nothing is said to agree.

    On data that no commit names nothing is recorded, verified or searched.
    """
    repo = toy(tmp_path, READS, CASE.replace("steps = 6", "steps = 1") + 'link = ["data/"]\n')
    dvc_kit.start(repo)
    dvc_kit.add(repo, "data/seed", "3")
    base = repo.commit("Data")
    dvc_kit.add(repo, "data/seed", "4")
    repo.commit("Other data")
    for verdict, code in (("moved", 1), ("unverifiable", 3)):
        done = repo.repro("report", "pr", f"{base}..HEAD", "--json")
        result = json.loads(done.stdout)["results"][0]
        assert (done.returncode, result["verdict"]) == (code, verdict), done.stderr
        for kept in (repo.root / ".dvc" / "cache" / "files").rglob("*"):
            if kept.is_file() and kept.read_text() == "3":
                kept.unlink()
        shutil.rmtree(repo.root / ".git" / "repro")
    assert "lacks what it needs: data/seed is not what it is in your checkout" in result["reason"]
    (repo.root / "data" / "seed").write_text("5")
    for command in (["golden", "record"], ["golden", "verify"], ["bisect", f"{base}..HEAD", "--case"]):
        done = repo.repro(*command, "toy")
        message = done.stderr.splitlines()[-1]
        assert done.returncode == 2 and "data/seed is not the content that DVC's files name for it" in message, message
