"""Git as users have set it up: no setting, filter, odd name or sparse checkout changes a verdict or runs a program."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import Repo, environment
from history_kit import note, start
from test_bad_input import only_line
from test_code_key import command
from test_worktree_contents import files_of, lfs, library, taking_in

from repro.nightly.lineage import lineage
from repro_bisect.axes.commits import History
from repro_bisect.explain.source import read_diff
from repro_golden.base.errors import MachineFailureError, ReproError
from repro_golden.repository.checkout import find_checkout
from repro_golden.repository.git import Git, state_of
from repro_golden.store.dvc import Dvc

LATIN = os.fsdecode(b"caf\xe9.py")


def hostile(repo: Repo, spy: Path) -> Callable[[], list[str]]:
    """Set everything that changes what git prints or runs programs; what ran is told by what is returned."""
    spy.mkdir()

    def program(name: str) -> str:
        path = spy / name
        path.write_text(f"#!/bin/sh\ntouch '{spy}/ran-{name}'\nexit 1\n")
        path.chmod(0o755)
        return str(path)

    settings = {
        "core.fsmonitor": program("fsmonitor"), "core.hooksPath": str(spy / "hooks"), "core.pager": program("pager"),
        "diff.external": program("external"), "gpg.program": program("gpg"), "log.showSignature": "true",
        "log.decorate": "full", "log.date": "raw", "log.follow": "true", "log.showRoot": "false",
        "log.diffMerges": "remerge", "format.pretty": "raw", "i18n.logOutputEncoding": "ISO-8859-1",
        "color.ui": "always", "color.diff": "always", "color.status": "always", "diff.noprefix": "true",
        "diff.mnemonicPrefix": "true", "diff.renames": "false", "diff.orderFile": "/nowhere", "diff.relative": "true",
        "core.quotePath": "true", "status.showUntrackedFiles": "no", "diff.ignoreSubmodules": "all",
        "submodule.recurse": "true", "filter.broken.clean": program("clean"), "filter.broken.smudge": program("smudge"),
        "filter.broken.process": program("process"), "filter.broken.required": "true", "core.untrackedCache": "true",
    }  # fmt: skip
    (spy / "hooks").mkdir()
    for hook in ("post-checkout", "reference-transaction", "post-index-change", "pre-commit"):
        (spy / "hooks" / hook).write_text(f"#!/bin/sh\ntouch '{spy}/ran-{hook}'\n")
        (spy / "hooks" / hook).chmod(0o755)
    for name, value in settings.items():
        repo.git("config", name, value)
    return lambda: sorted(path.name for path in spy.glob("ran-*"))


def odd_commit(repo: Repo) -> str:
    """A commit whose file, author and message are in Latin-1, said nowhere, and which is signed with nonsense."""
    (repo.root / LATIN).write_text("x = 1\n")
    repo.git("add", "--all")
    tree, parent = repo.git("write-tree"), repo.git("rev-parse", "HEAD")
    text = (
        f"tree {tree}\nparent {parent}\nauthor Andr\xe9 <a@example.invalid> 1700000000 +0000\n"
        "committer Andr\xe9 <a@example.invalid> 1700000000 +0000\n"
        "gpgsig -----BEGIN PGP SIGNATURE-----\n \n nonsense\n -----END PGP SIGNATURE-----\n\nCaf\xe9\n"
    )
    made = subprocess.run(
        ["git", "hash-object", "-t", "commit", "-w", "--stdin", "--literally"],
        cwd=repo.root, input=text.encode("latin-1"), capture_output=True, check=True, env=environment(),
    )  # fmt: skip
    commit = made.stdout.decode().strip()
    repo.git("reset", "--quiet", "--hard", commit)
    return commit


def test_a_search_under_any_settings(tmp_path: Path) -> None:
    """Whatever a user has configured, the culprit is named with its author, subject and files; no program is run."""
    repo = start(tmp_path, case=None)
    good = repo.git("rev-parse", "HEAD")
    (repo.root / ".gitattributes").write_text("train.py filter=broken\n")
    note(repo, "one", "words")
    note(repo, "two", "words")
    culprit = odd_commit(repo)
    ran = hostile(repo, tmp_path / "spy")
    bad = repo.git("rev-parse", "HEAD")
    program = "import os, sys; sys.exit(any(name.startswith('caf') for name in os.listdir()))"
    for file in tmp_path.glob("spy/ran-*"):
        file.unlink()
    done = repo.repro(
        "bisect", "--no-explain", f"{good}..{bad}", "--when", "exit", "--json", "--", sys.executable, "-c", program
    )
    assert done.returncode == 0, done.stderr
    entry = json.loads(done.stdout)["culprit"]
    assert (entry["commit"], entry["subject"]) == (culprit, "Caf\ufffd")
    assert entry["author"].startswith("Andr\ufffd <a@")
    assert entry["diffstat"].splitlines()[-1] == " 1 file changed, 1 insertion(+)"
    assert "caf" in entry["diffstat"]
    assert ran() == []


def test_what_is_read_of_a_history_under_any_settings(tmp_path: Path) -> None:
    """Facts of commits, diffs and a case's past are the same with and without a user's settings."""
    repo = start(tmp_path, case=None)
    good = repo.git("rev-parse", "HEAD")
    repo.edit("train.py", "scale = 1.0\n", "scale = 2.0\n")
    repo.git("mv", "train.py", "moved.py")
    repo.commit("Geändert")
    odd_commit(repo)
    runs = repo.root / "golden" / "runs" / "m" / "toy.dvc"
    runs.parent.mkdir(parents=True)
    runs.write_text("outs")
    bad = repo.commit("Approve")
    checkout = find_checkout(repo.root)

    def read() -> object:
        history = History(checkout, f"{good}..{bad}", ["."])
        infos = [history.info(commit) for commit in (good, *history.parents)]
        diff = read_diff(checkout, good, f"{bad}~2")
        past = lineage(checkout, "toy", bad)
        return infos, history.subjects([good, *history.parents]), dict(diff.before), dict(diff.after), past

    before = read()
    ran = hostile(repo, tmp_path / "spy")
    assert read() == before
    assert ran() == []
    assert "Geändert" in str(before)
    assert "train.py" in str(before[2]) and "moved.py" in str(before[3])  # type: ignore[index]


# -- the working tree


def test_a_working_tree_under_any_settings(tmp_path: Path) -> None:
    """Whether files were changed is found without a filter, fsmonitor or hook, and without a write to the index."""
    repo = start(tmp_path, case=None)
    (repo.root / ".gitattributes").write_text("*.py filter=broken\n")
    (repo.root / LATIN).write_text("x")
    head = repo.commit("One")
    ran = hostile(repo, tmp_path / "spy")
    index = repo.root / ".git" / "index"
    os.utime(repo.root / "train.py", (1, 1))  # git must look at its content
    before = index.read_bytes()
    checkout = find_checkout(repo.root)
    assert checkout.place(command(".")).commit == head
    (repo.root / "train.py").write_text("changed")
    assert checkout.place(command(".")).commit is None
    assert index.read_bytes() == before
    assert ran() == []


def test_the_state_of_a_folder_under_any_settings(tmp_path: Path) -> None:
    """What a loaded package's code is, changes told apart, is the same whatever a user has git compare with."""
    repo = start(tmp_path, case=None)
    (repo.root / ".gitattributes").write_text("*.py diff=shown\n")
    head = repo.commit("One")

    def read() -> list[str]:
        told = []
        for text in ("one", "two"):
            (repo.root / "train.py").write_text(text)
            told.append(state_of(repo.root))
        return told

    before = read()
    ran = hostile(repo, tmp_path / "spy")
    for name in ("textconv", "command"):
        repo.git("config", f"diff.shown.{name}", str(tmp_path / "spy" / "external"))
    assert read() == before
    assert [told.partition("+")[0] for told in before] == [head, head]
    assert len({head, *before}) == 3
    assert ran() == []


def test_a_filter_that_fails_is_no_traceback(tmp_path: Path) -> None:
    """`golden verify` gets past a file that git itself cannot read, to what it has to say: there is no golden run."""
    repo = start(tmp_path)
    (repo.root / ".gitattributes").write_text("*.py filter=broken\n")
    repo.commit("Filter")
    ran = hostile(repo, tmp_path / "spy")
    (repo.root / "train.py").write_text("changed")
    done = repo.repro("golden", "verify", "toy")
    assert done.returncode == 3
    assert "no golden run" in only_line(done)
    assert ran() == []


def test_an_untracked_file_is_a_change(tmp_path: Path) -> None:
    """Also for a user whose git does not show them; what recording itself writes is none where all is the subject."""
    repo = start(tmp_path, case=None)
    head = repo.git("rev-parse", "HEAD")
    repo.git("config", "status.showUntrackedFiles", "no")
    checkout = find_checkout(repo.root)
    (repo.root / "golden").mkdir()
    (repo.root / "golden" / "check.json").touch()
    assert checkout.place(command(".")).commit == head
    (repo.root / LATIN).touch()
    assert checkout.place(command(".")).commit is None
    (repo.root / LATIN).unlink()
    (repo.root / "golden" / "train.py").touch()
    repo.commit("Train in golden")
    (repo.root / "golden" / "train.py").write_text("changed")
    assert checkout.place(command("golden/train.py")).commit is None


def test_what_the_index_hides_is_a_change(tmp_path: Path) -> None:
    """A file that a sparse checkout leaves out, or that git was told to take for unchanged, is not the commit's."""
    repo = start(tmp_path, case=None)
    note(repo, "one", "part/one.py")
    head = note(repo, "two", "rest/two.py")
    checkout = find_checkout(repo.root)
    assert checkout.place(command(".")).commit == head
    repo.git("sparse-checkout", "set", "part")
    assert checkout.place(command(".")).commit is None
    assert checkout.place(command("part")).commit == head
    repo.git("sparse-checkout", "disable")
    repo.git("update-index", "--assume-unchanged", "train.py")
    (repo.root / "train.py").write_text("changed")
    assert checkout.place(command(".")).commit is None


def test_a_submodule_that_was_changed_is_a_change(tmp_path: Path) -> None:
    """Also in a file, by a new one, by a filter of its own that fails, and where its folder is empty."""
    repo = taking_in(tmp_path, library(tmp_path, "outer", "1.0"))
    head = repo.git("rev-parse", "HEAD")
    inside = repo.root / "at" / "outer"
    repo.git("config", "submodule.part.ignore", "all")
    ran = hostile(Repo(inside), tmp_path / "spy")
    checkout = find_checkout(repo.root)
    paths = (".", "at", "at/outer", "at/outer/values.py")
    assert [checkout.place(command(path)).commit for path in (*paths, "train.py")] == [head] * 5
    (inside / "golden").touch()
    assert [checkout.place(command(path)).commit for path in (*paths, "train.py")] == [None] * 4 + [head]
    (inside / "golden").unlink()
    (inside / "values.py").write_text("SCALE = 3.0\n")
    assert [checkout.place(command(path)).commit for path in paths] == [None] * 4
    assert ran() == []
    repo.git("submodule", "--quiet", "deinit", "--force", "at/outer")
    assert [checkout.place(command(path)).commit for path in paths] == [None] * 4


def test_a_file_that_lfs_keeps_is_not_changed(tmp_path: Path) -> None:
    """Its content in the place of its pointer is the commit's; other content, or another mode, is a change."""
    repo = start(tmp_path, case=None)
    lfs(repo, b"content")
    head = repo.commit("Data")
    repo.git("config", "filter.lfs.clean", "false")
    repo.git("config", "filter.lfs.required", "true")
    checkout, file = find_checkout(repo.root), repo.root / "data.bin"
    file.write_bytes(b"content")
    assert checkout.place(command(".")).commit == head
    file.chmod(0o755)
    assert checkout.place(command(".")).commit is None
    file.chmod(0o644)
    file.write_bytes(b"changed")
    assert checkout.place(command(".")).commit is None


# -- worktrees


@pytest.mark.parametrize("how", [("--no-cone",), ("--cone",), ("--cone", "--sparse-index")])
def test_a_worktree_of_a_sparse_checkout_holds_every_file(tmp_path: Path, how: tuple[str, ...]) -> None:
    """Probes see all of a commit, whatever the user's own checkout leaves out; that one stays as it is."""
    repo = start(tmp_path, case=None)
    note(repo, "one", "part/one.py")
    note(repo, "two", "rest/two.py")
    repo.git("sparse-checkout", "set", *how, "part")
    left = sorted(str(path) for path in repo.root.glob("[!.]*"))
    assert not (repo.root / "rest").exists()
    assert set(files_of(repo)) == {"train.py", "part/one.py", "rest/two.py"}
    repo.git("config", "extensions.worktreeConfig", "true")
    repo.git("config", "--worktree", "core.sparseCheckout", "true")
    assert set(files_of(repo)) == {"train.py", "part/one.py", "rest/two.py"}
    assert sorted(str(path) for path in repo.root.glob("[!.]*")) == left


# -- git itself


def test_what_git_cannot_do_is_one_line(tmp_path: Path) -> None:
    """A damaged repository, a bare one and none at all are each told in one line, and so is a missing tree."""
    repo = start(tmp_path, case=None)
    with pytest.raises(ReproError, match="not inside a git repository"):
        find_checkout(tmp_path)
    repo.git("clone", "--quiet", "--bare", str(repo.root), str(tmp_path / "bare"))
    with pytest.raises(ReproError, match="bare repository"):
        find_checkout(tmp_path / "bare")
    tree = repo.git("rev-parse", "HEAD^{tree}")
    (repo.root / ".git" / "objects" / tree[:2] / tree[2:]).unlink()
    with pytest.raises(MachineFailureError, match="git cat-file` failed") as caught:
        find_checkout(repo.root).place(command("."))
    assert "\n" not in str(caught.value)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)  # noqa: S301 - a worker sends it
    (repo.root / ".git" / "config").write_text("[core\n")
    with pytest.raises(MachineFailureError, match="bad config") as caught:
        find_checkout(repo.root)
    assert "\n" not in str(caught.value)


def test_only_one_place_starts_git() -> None:
    """No module but git's own starts git, so that none forgets the settings."""
    source = Path(__file__).parent.parent
    # identify runs in the Pythons of programs, with the standard library alone
    allowed = {
        ("repository", "git.py"),
        ("repository", "git_environment.py"),
        ("demo", "run.py"),
        ("code", "identify.py"),
    }
    for folder in ("golden", "bisect", "repro"):
        for path in (source / folder).rglob("*.py"):
            text = path.read_text()
            assert path.parts[-2:] in allowed or ("import git\n" not in text and '["git"' not in text), path


def test_git_s_options_prevail(tmp_path: Path) -> None:
    """Neutral settings stand above the repository's, and variables that change what git prints are not handed on."""
    repo = start(tmp_path, case=None)
    repo.git("config", "core.fsmonitor", "true")
    assert Git(repo.root).text("config", "core.fsmonitor") == "false"


def test_what_dvc_cannot_do_is_told(tmp_path: Path) -> None:
    """Its own reason is, and the cure where it is known: an index that a sparse checkout cut short."""
    repo = Repo(tmp_path / "repo")
    for folder in ("a", "b/c"):
        (repo.root / folder).mkdir(parents=True)
        (repo.root / folder / "file").touch()
    repo.git("init", "--quiet")
    repo.commit("Files")
    repo.git("sparse-checkout", "set", "--cone", "--sparse-index", "a")
    assert find_checkout(repo.root).is_sparse
    with pytest.raises(MachineFailureError, match=r"sdir.*`git sparse-checkout reapply --no-sparse-index`"):
        Dvc(repo.root).init()
