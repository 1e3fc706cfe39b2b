"""What git leaves out of a worktree: submodules and LFS content, without hooks, filters or network.

And what lies beside worktrees: the training states that several bisects share.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import Repo, environment
from history_kit import TRAIN, edit, note, start

from repro_bisect.probe.states import KEPT, States
from repro_golden.base.errors import AbsentError, MachineFailureError, ReproError
from repro_golden.repository.checkout import find_checkout
from repro_golden.repository.worktrees import Worktrees

COMMAND = ("--", sys.executable, "train.py", "--steps", "2")
ALLOW = ("-c", "protocol.file.allow=always")


def library(folder: Path, name: str, value: str) -> Repo:
    """A repository that is to be a submodule."""
    repo = Repo(folder / name)
    repo.root.mkdir()
    repo.git("init", "--quiet", "--initial-branch=main")
    (repo.root / "values.py").write_text(f"SCALE = {value}\n")
    repo.commit("Start")
    return repo


def with_submodule(folder: Path) -> tuple[Repo, Repo]:
    """A trainer that takes its scale from a submodule which has a submodule itself; both repositories."""
    inner, outer = library(folder, "inner", "1.0"), library(folder, "outer", "1.0")
    outer.git(*ALLOW, "submodule", "--quiet", "add", str(inner.root), "deep")
    outer.commit("Take inner in")
    train = TRAIN.replace("import torch\n", "import sys\nimport torch\nsys.path.insert(0, 'outer')\nimport values\n", 1)
    train = train.replace("scale = 1.0\n", "scale = values.SCALE\n")
    repo = start(folder, train.replace("import values\n", "import values\nimport deep.values\n"), None)
    repo.git(*ALLOW, "submodule", "--quiet", "add", str(outer.root), "outer")
    repo.git(*ALLOW, "submodule", "--quiet", "update", "--init", "--recursive")
    repo.commit("Take outer in")
    return repo, outer


@pytest.mark.whole
def test_a_submodule_that_moved_the_numbers(tmp_path: Path) -> None:
    """A commit that only moves a submodule's commit is found; the submodules' own files and hooks are left alone."""
    repo, outer = with_submodule(tmp_path)
    good = repo.git("rev-parse", "HEAD")
    note(repo, "one", "other")
    inside = repo.root / "outer"
    (outer.root / "values.py").write_text("SCALE = 1.0 + 1e-6\n")
    outer.commit("Scale")
    hook = repo.root / ".git" / "modules" / "outer" / "hooks" / "post-checkout"
    hook.parent.mkdir(exist_ok=True)
    Repo(inside).git("fetch", "--quiet", str(outer.root), "main")
    Repo(inside).git("checkout", "--quiet", "FETCH_HEAD")
    hook.write_text(f"#!/bin/sh\ntouch {tmp_path}/hook-ran\n")
    hook.chmod(0o755)
    culprit = repo.commit("Update outer")
    note(repo, "two", "other")
    before = {p: p.read_bytes() for p in (repo.root / ".git" / "modules").rglob("*") if p.is_file()}
    done = repo.repro("bisect", "--no-explain", f"{good}..HEAD", "--json", *COMMAND)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["culprit"]["commit"] == culprit, done.stderr
    assert {p: p.read_bytes() for p in (repo.root / ".git" / "modules").rglob("*") if p.is_file()} == before
    assert not (tmp_path / "hook-ran").exists()


def test_a_submodule_has_a_git_folder_of_its_own(tmp_path: Path) -> None:
    """Git and what looks for a root by it find the submodule, and nothing that is done there reaches the user's."""
    repo, _ = with_submodule(tmp_path)
    Repo(repo.root / "outer").git("tag", "v1")
    before = {p: p.read_bytes() for p in (repo.root / ".git" / "modules").rglob("*") if p.is_file()}
    commit, worktrees = repo.git("rev-parse", "HEAD"), Worktrees(find_checkout(repo.root))
    (tmp_path / "fix.patch").write_text("--- a/values.py\n+++ b/values.py\n@@ -1 +1 @@\n-SCALE = 1.0\n+SCALE = 2.0\n")
    with worktrees.at(commit, None) as place:
        assert not {"+", "-"} & {line[0] for line in Repo(place.root).git("submodule", "status").splitlines()}
        for path in ("outer", "outer/deep"):
            inside = Repo(place.root / path)
            assert inside.git("rev-parse", "--show-toplevel", "HEAD").splitlines() == [
                str(inside.root), Repo(repo.root / path).git("rev-parse", "HEAD")
            ]  # fmt: skip
            assert inside.git("status", "--porcelain") == ""
            inside.git("apply", str(tmp_path / "fix.patch"))
            assert (inside.root / "values.py").read_text() == "SCALE = 2.0\n"
            inside.git("stash")
            inside.git("stash", "apply")
            inside.git("checkout", "--quiet", "-b", "other")
            inside.commit("Theirs")
            inside.git("config", "user.name", "other")
            inside.git("clean", "-ffdx")
        assert Repo(place.root / "outer").git("describe", "--tags").startswith("v1-1-g")
    worktrees.close()
    assert {p: p.read_bytes() for p in (repo.root / ".git" / "modules").rglob("*") if p.is_file()} == before
    assert repo.git("status", "--porcelain") == ""


def test_a_submodule_whose_repository_is_in_use(tmp_path: Path) -> None:
    """Its refs are those that git tells, its settings those of the user's folder, its alternates as deep as git goes.

    Neither a lock, a link to nowhere nor what a fetch takes away meanwhile is copied.
    """
    repo = taking_in(tmp_path, library(tmp_path, "outer", "1.0"))
    kept = repo.root / ".git" / "modules" / "part"
    module = Repo(kept)
    module.git("config", "--unset", "core.worktree")
    module.git("tag", "packed")
    module.git("pack-refs", "--all")
    module.git("tag", "loose")
    module.git("symbolic-ref", "refs/remotes/origin/HEAD", "refs/remotes/origin/main")
    for number, folder in enumerate(("refs/heads", "refs/tags", "info")):
        (kept / folder / "gone.lock").symlink_to(tmp_path / f"nowhere{number}")
    (tmp_path / "settings").write_text("[core]\nautocrlf = true\nsplitIndex = true\n")
    module.git("config", f"includeIf.gitdir:{kept}.path", str(tmp_path / "settings"))
    stores = [kept / "objects", *(tmp_path / "a b" / f"store{number}" for number in range(6))]
    (tmp_path / "a b").mkdir()
    stores[0].rename(stores[-1])
    for store, other in itertools.pairwise(stores):
        (store / "info").mkdir(parents=True)
        (store / "info" / "alternates").write_text(f"{os.path.relpath(other, store)}\n")
    refs, before = module.git("for-each-ref"), {p: p.read_bytes() for p in kept.rglob("*") if p.is_file()}
    worktrees = Worktrees(find_checkout(repo.root))
    with worktrees.at(repo.git("rev-parse", "HEAD"), None) as place:
        inside = place.root / "at" / "outer"
        assert (inside / "values.py").read_bytes() == b"SCALE = 1.0\r\n"
        assert Repo(inside).git("for-each-ref") == refs and len(refs.splitlines()) > 4
        assert Repo(inside).git("symbolic-ref", "refs/remotes/origin/HEAD") == "refs/remotes/origin/main"
        done = subprocess.run(["git", "log", "-p"], cwd=inside, capture_output=True, check=True, env=environment())
        assert b"SCALE" in done.stdout and not done.stderr
    worktrees.close()
    assert {p: p.read_bytes() for p in kept.rglob("*") if p.is_file()} == before


@pytest.mark.whole
def test_a_submodule_that_was_never_initialised(tmp_path: Path) -> None:
    """It stays an empty folder, as in the user's own checkout, and refuses no range of a program that is without it."""
    repo, _ = with_submodule(tmp_path)
    clone = Repo(tmp_path / "clone")
    repo.git("clone", "--quiet", "--no-recurse-submodules", str(repo.root), str(clone.root))
    (clone.root / "train.py").write_text(
        TRAIN.replace("import torch\n", "import os, torch\nassert not os.listdir('outer')\n")
    )
    clone.commit("Do without it")
    culprit = edit(clone, "model(x) * scale", "model(x) * scale * 1.001", "Scale more")
    done = clone.repro("bisect", "--no-explain", "HEAD~1..HEAD", "--json", *COMMAND)
    assert json.loads(done.stdout)["culprit"]["commit"] == culprit, done.stderr
    (clone.root / "outer" / "values.py").write_text("SCALE = 1.0")  # there, and in no submodule's repository
    worktrees = Worktrees(find_checkout(clone.root))
    with pytest.raises(ReproError, match="the submodule outer is not here"), worktrees.at(culprit, None):
        pass
    worktrees.close()


@pytest.mark.campaign
def test_a_submodule_commit_that_is_not_here_is_refused(tmp_path: Path) -> None:
    """Without the submodules that the program needs, or with a commit of one that was never fetched: one line each."""
    repo, outer = with_submodule(tmp_path)
    clone = Repo(tmp_path / "clone")
    repo.git("clone", "--quiet", "--no-recurse-submodules", str(repo.root), str(clone.root))
    note(clone, "one", "other")
    done = clone.repro("bisect", "--no-explain", "HEAD~1..HEAD", *COMMAND)
    assert done.returncode == 2
    assert "No module named 'values'" in done.stderr.splitlines()[-1]
    (outer.root / "values.py").write_text("SCALE = 2.0\n")
    unknown = outer.commit("Never fetched")
    repo.git("update-index", "--cacheinfo", f"160000,{unknown},outer")
    repo.git("commit", "--quiet", "--message", "Update outer")
    done = repo.repro("bisect", "--no-explain", "HEAD~1..HEAD", *COMMAND)
    assert done.returncode == 2
    assert f"commit {unknown[:10]} of the submodule outer is not here" in done.stderr.splitlines()[-1]


def test_a_commit_that_lacks_a_submodules_commit_is_a_skip(tmp_path: Path) -> None:
    """Within a range it is gone around, as one that fails: nobody may ever have it again."""
    repo, _ = with_submodule(tmp_path)
    good, here = repo.git("rev-parse", "HEAD"), repo.git("rev-parse", "HEAD:outer")
    for commit in ("1" * 40, here):
        repo.git("update-index", "--cacheinfo", f"160000,{commit},outer")
        repo.git("commit", "--quiet", "--message", "Update outer")
    gone = repo.git("rev-parse", "HEAD~1")
    culprit = edit(repo, "values.SCALE\n", "2 * values.SCALE\n", "Twice")
    done = repo.repro("bisect", "--no-explain", "--quick", "-j", "1", f"{good}..HEAD", *COMMAND)
    assert done.returncode == 0 and f"{culprit[:10]} moved the numbers" in done.stdout, done.stderr
    done = repo.repro("bisect", "--no-explain", "--quick", "-j", "1", f"{good}..{gone}", *COMMAND)
    last = done.stderr.splitlines()[-1]
    assert done.returncode == 2 and "commit 1111111111 of the submodule outer is not here" in last, done.stderr


def test_submodules_that_lie_elsewhere(tmp_path: Path) -> None:
    """Those that were made in a linked worktree are found, and so is one that keeps its git folder in itself.

    What is not in that is refused with the command that fetches it there.
    """
    repo, outer = with_submodule(tmp_path)
    clone = Repo(tmp_path / "clone")
    repo.git("clone", "--quiet", "--no-recurse-submodules", str(repo.root), str(clone.root))
    linked = Repo(tmp_path / "linked")
    clone.git("worktree", "add", "--quiet", "--detach", str(linked.root))
    linked.git(*ALLOW, "submodule", "--quiet", "update", "--init", "--recursive")
    commit = linked.git("rev-parse", "HEAD")
    with contextlib.closing(Worktrees(find_checkout(linked.root))) as worktrees, worktrees.at(commit, None) as place:
        assert (place.root / "outer" / "deep" / "values.py").is_file()
    clone.git(*ALLOW, "clone", "--quiet", str(outer.root), "outer")
    assert files_of(clone)["outer/values.py"] == b"SCALE = 1.0\n"
    clone.git("rm", "--quiet", "--cached", ".gitmodules")
    clone.git("update-index", "--cacheinfo", f"160000,{'1' * 40},outer")
    clone.git("commit", "--quiet", "--message", "Another, without .gitmodules")
    why = "commit 1111111111 of the submodule outer is not here: `git -C outer fetch` in your checkout"
    with pytest.raises(AbsentError, match=why):
        files_of(clone)


def lfs(repo: Repo, content: bytes, *, here: bool = True) -> None:
    """Write a file as Git LFS keeps it: a pointer in git, and the content in its own store if it is here."""
    point(repo, content)
    if here:
        keep(repo.root / ".git", content)


def point(repo: Repo, content: bytes) -> None:
    """Write the pointer of a file that Git LFS keeps."""
    oid = hashlib.sha256(content).hexdigest()
    pointer = f"version https://git-lfs.github.com/spec/v1\noid sha256:{oid}\nsize {len(content)}\n"
    (repo.root / "data.bin").write_text(pointer)
    (repo.root / ".gitattributes").write_text("*.bin filter=lfs diff=lfs merge=lfs -text\n")


def keep(folder: Path, content: bytes, storage: str = "lfs") -> None:
    """Put content where Git LFS keeps it below a git folder."""
    oid = hashlib.sha256(content).hexdigest()
    store = folder / storage / "objects" / oid[:2] / oid[2:4]
    store.mkdir(parents=True, exist_ok=True)
    (store / oid).write_bytes(content)


def test_lfs_content_is_put_in_its_place(tmp_path: Path) -> None:
    """A worktree has the content of each commit's LFS files; what was never fetched is refused with the cure.

    So it is from another store that a setting names.
    """
    repo = start(tmp_path, case=None)
    lfs(repo, b"first" * 1000)
    first = repo.commit("First")
    lfs(repo, b"second" * 1000)
    second = repo.commit("Second")
    lfs(repo, b"third", here=False)
    third = repo.commit("Third")
    worktrees = Worktrees(find_checkout(repo.root))
    try:
        for commit, content in ((first, b"first" * 1000), (second, b"second" * 1000)):
            with worktrees.at(commit, None) as place:
                assert (place.root / "data.bin").read_bytes() == content
        with pytest.raises(ReproError, match="git lfs fetch --all"), worktrees.at(third, None):
            pass
        for storage in ("elsewhere", str(tmp_path / "shared")):  # a relative one lies in the git folder
            keep(repo.root / ".git", b"third", storage)
            repo.git("config", "lfs.storage", storage)
            with worktrees.at(third, None) as place:
                assert (place.root / "data.bin").read_bytes() == b"third"
    finally:
        worktrees.close()
    assert not repo.worktrees


def taking_in(folder: Path, outer: Repo, name: str = "part") -> Repo:
    """A repository with a submodule at a path of another name than its own."""
    repo = start(folder, case=None)
    repo.git(*ALLOW, "submodule", "--quiet", "add", "--name", name, str(outer.root), "at/outer")
    repo.git(*ALLOW, "submodule", "--quiet", "update", "--init", "--recursive")
    repo.commit("Take outer in")
    return repo


def files_of(repo: Repo, commit: str = "HEAD") -> dict[str, bytes]:
    """What a worktree of a commit holds."""
    worktrees = Worktrees(find_checkout(repo.root))
    try:
        with worktrees.at(repo.git("rev-parse", commit), None) as place:
            ps = [p for p in place.root.rglob("*") if p.is_file() and p.name != ".git"]
            return {str(p.relative_to(place.root)): p.read_bytes() for p in ps}
    finally:
        worktrees.close()


def test_a_submodule_has_every_file_as_it_was_committed(tmp_path: Path) -> None:
    """Neither export-ignore, export-subst nor a filter that only the submodule's own configuration has changes a file.

    Nothing in its repository changes, and its folder need not be in the checkout.
    """
    inner, outer = library(tmp_path, "inner", "2.0"), library(tmp_path, "outer", "1.0")
    outer.git(*ALLOW, "submodule", "--quiet", "add", "--name", "the inner one", str(inner.root), "deep")
    content = {
        ".gitattributes": b"hidden.py export-ignore\nversion.py export-subst\n*.py filter=mangle\n",
        "hidden.py": b"HIDDEN = 1\n",
        "version.py": b"VERSION = '$Format:%H$'\n",
        "run.sh": b"#!/bin/sh\n",
    }
    for name, text in content.items():
        (outer.root / name).write_bytes(text)
    (outer.root / "run.sh").chmod(0o755)
    (outer.root / "link").symlink_to("hidden.py")
    outer.commit("More")
    repo = taking_in(tmp_path, outer)
    kept = repo.root / ".git" / "modules" / "part"
    for setting in ("smudge", "process", "clean"):
        Repo(kept).git("config", f"filter.mangle.{setting}", f"touch {tmp_path}/filter-ran; cat")
    Repo(kept).git("config", "filter.mangle.required", "true")
    shutil.rmtree(repo.root / "at")
    before = {p: p.read_bytes() for p in kept.rglob("*") if p.is_file()}
    files = files_of(repo)
    assert {name: files[f"at/outer/{name}"] for name in content} == content
    assert files["at/outer/link"] == content["hidden.py"]
    assert files["at/outer/deep/values.py"] == b"SCALE = 2.0\n"
    assert not (tmp_path / "filter-ran").exists()
    assert {p: p.read_bytes() for p in kept.rglob("*") if p.is_file()} == before


def test_a_user_whose_commands_go_into_submodules(tmp_path: Path) -> None:
    """submodule.recurse, and submodules that another commit has not, keep no worktree from being made."""
    repo = taking_in(tmp_path, library(tmp_path, "outer", "1.0"))
    repo.git("config", "submodule.recurse", "true")
    assert files_of(repo)["at/outer/values.py"] == b"SCALE = 1.0\n"
    assert "at/outer/values.py" not in files_of(repo, "HEAD~1")


def test_an_empty_list_of_submodules(tmp_path: Path) -> None:
    """The empty .gitmodules that is left where the last submodule was removed means none."""
    repo = taking_in(tmp_path, library(tmp_path, "outer", "1.0"))
    repo.git("rm", "--quiet", "at/outer")
    assert (repo.root / ".gitmodules").read_text() == ""
    repo.commit("Do without outer")
    assert set(files_of(repo)) == {".gitmodules", "train.py"}


def test_a_damaged_list_of_submodules_is_one_line(tmp_path: Path) -> None:
    """What git cannot read is an error of one line, and no traceback."""
    repo = taking_in(tmp_path, library(tmp_path, "outer", "1.0"))
    (repo.root / ".gitmodules").write_text("[submodule\n")
    repo.git("add", ".gitmodules")
    tree = repo.git("write-tree")
    commit = repo.git("commit-tree", "-p", "HEAD", "-m", "Damage", tree)
    with pytest.raises(MachineFailureError, match=r"git config` failed: .*bad config") as caught:
        files_of(repo, commit)
    assert "\n" not in str(caught.value)


def test_lfs_content_in_a_submodule(tmp_path: Path) -> None:
    """A submodule's LFS files come from its own store; what is not there is refused with where to fetch it."""
    outer = library(tmp_path, "outer", "1.0")
    point(outer, b"content" * 1000)
    outer.commit("Data")
    repo = taking_in(tmp_path, outer)
    with pytest.raises(ReproError, match=r"at/outer/data\.bin is not here: `git lfs fetch --all` in at/outer brings"):
        files_of(repo)
    keep(repo.root / ".git" / "modules" / "part", b"content" * 1000)
    assert files_of(repo)["at/outer/data.bin"] == b"content" * 1000


READ_ONLY = """\
import os, sys
from pathlib import Path
from repro_golden.repository.worktrees import Worktrees
from repro_golden.repository.checkout import find_checkout
worktrees = Worktrees(find_checkout(Path(sys.argv[1])))
with worktrees.at(sys.argv[2], None) as place:
    (place.root / "made" / "below").mkdir(parents=True)
    (place.root / "made" / "below" / "file").touch()
    (place.root / "made" / "link").symlink_to(sys.argv[3])
    for name, mode in (("made/below", 0o500), ("made", 0o000), ("", 0o500)):
        (place.root / name).chmod(mode)
    try:
        (place.root / "another").touch()
        sys.exit("this user may write everywhere")
    except PermissionError:
        pass
worktrees.close()
"""


def test_a_worktree_with_read_only_folders_is_removed(tmp_path: Path) -> None:
    """Folders that a trainer made read-only go with their worktree, and so does git's note; what links name stays."""
    repo = start(tmp_path, case=None)
    (tmp_path / "elsewhere").mkdir(mode=0o500)
    mortal = []  # the superuser's right to write everywhere is given up
    if os.geteuid() == 0:
        if not shutil.which("setpriv"):
            pytest.skip("root may write everywhere, and setpriv is not here")
        mortal = ["setpriv", "--bounding-set", "-dac_override,-dac_read_search", "--inh-caps", "-all"]
    head = repo.git("rev-parse", "HEAD")
    command = [*mortal, sys.executable, "-c", READ_ONLY, str(repo.root), head, str(tmp_path / "elsewhere")]
    done = subprocess.run(command, capture_output=True, text=True, env=environment(), check=False)
    assert done.returncode == 0, done.stderr
    assert not repo.worktrees
    assert len(repo.git("worktree", "list").splitlines()) == 1
    assert (tmp_path / "elsewhere").stat().st_mode & 0o777 == 0o500


HAMMER = """\
import random, sys, tempfile
from pathlib import Path
from repro_bisect.probe.states import States, keep
base, seed, rounds = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
choose = random.Random(seed)
for _ in range(rounds):
    states = States(base, choose.choice(("one", "two")))
    with tempfile.TemporaryDirectory(dir=base.parent) as made:
        for step in (1, 2):
            (Path(made) / str(step)).mkdir()
            for part in range(5):
                (Path(made) / str(step) / str(part)).write_text("state")
        keep(Path(made), states.folder)
    for _ in range(3):
        assert states.steps() == [1, 2], "a state that is held is gone"
        for step in (1, 2):
            assert len(list(states.at(step).iterdir())) == 5, "a state is half gone"
    states.close(0)
"""


@pytest.mark.whole
def test_bisects_that_finish_together(tmp_path: Path) -> None:
    """Processes that open, fill and remove the same states at once: nobody fails, or sees a state that is half gone."""
    commands = [[sys.executable, "-c", HAMMER, str(tmp_path / "states"), str(seed), "300"] for seed in range(3)]
    hammers = [subprocess.Popen(c, stderr=subprocess.PIPE, text=True, env=environment()) for c in commands]
    errors = [hammer.communicate()[1] for hammer in hammers]
    assert [hammer.returncode for hammer in hammers] == [0, 0, 0], "\n".join(errors)
    States(tmp_path / "states", "last").close(0)
    assert [path.name for path in (tmp_path / "states").iterdir()] == ["last"]


def test_the_least_recently_used_states_go_first(tmp_path: Path) -> None:
    """Beyond the budget the oldest go, those that are held stay, and what a killed process was removing goes too."""
    for age, key in enumerate(("held", "old", "young")):
        states = States(tmp_path, key)
        states.at(1).mkdir()
        (states.at(1) / "state").write_bytes(bytes(100))
        states.close(1000)
        os.utime(tmp_path / key, (age, age))
    (tmp_path / ".gone-rest").mkdir()
    (tmp_path / ".gone-rest" / "state").write_bytes(bytes(100))
    held = States(tmp_path, "held")
    os.utime(tmp_path / "held", (0, 0))
    States(tmp_path, "new").close(200 // KEPT)
    assert {path.name for path in tmp_path.iterdir()} == {"held", "young", "new"}
    assert held.steps() == [1]
    held.close(1000)
