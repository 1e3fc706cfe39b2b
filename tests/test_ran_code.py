"""The code that a golden run is recorded of, which no commit may have yet, and the commit that has it since."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import history_kit as kit
import pytest
from conftest import Repo
from doctor_golden_kit import golden, repository

from repro.nightly.lineage import recorded
from repro_golden.case.file import Case, find_case
from repro_golden.repository.checkout import Checkout, find_checkout
from repro_golden.repository.working import NOTHING, Ran, has_code
from repro_golden.store.golden import Store
from repro_golden.store.pulled import Noted, note, noted, pointer_of


def command(path: str = ".", words: str = "python train.py") -> Case:
    """A case of a command in a path."""
    subject = {"kind": "command", "command": words, "path": path}
    return Case.model_validate({"case": {"name": "toy", "steps": 2}, "subject": subject})


CASE = command()


@pytest.fixture
def repo(tmp_path: Path) -> Repo:
    """A program of two files, committed."""
    repo = Repo(tmp_path / "repo")
    (repo.root / "src").mkdir(parents=True)
    repo.git("init", "--quiet", "--initial-branch=main")
    (repo.root / "train.py").write_text("import src.net\n")
    (repo.root / "src/net.py").write_text("SIZE = 1\n")
    repo.commit("Start")
    return repo


def has(checkout: Checkout, ran: Ran, commit: str, case: Case = CASE) -> bool:
    """Whether a commit has the code that ran."""
    return has_code(checkout.git, commit, checkout.paths(case), ran.tree, ran.untracked.values())


def edited(repo: Repo) -> None:
    """Several files of code: one changed, one staged, one gone."""
    (repo.root / "train.py").write_text("import src.net, src.loss\n")
    (repo.root / "src/loss.py").write_text("LOSS = 1\n")
    repo.git("add", "src/loss.py")
    (repo.root / "src/net.py").unlink()


@pytest.mark.parametrize("path", [".", "train.py", "src"])
def test_what_ran_is_what_git_tracks_as_it_lies_there(repo: Repo, path: str) -> None:
    """Its key is that of the commit it was or becomes, whatever lies beside it, and the repository stays as it is."""
    checkout, case, head = find_checkout(repo.root), command(path), repo.git("rev-parse", "HEAD")
    (repo.root / "src/notes.txt").write_text("todo")
    ran = checkout.ran(case)
    assert (ran.commit, list(ran.untracked)) == (head, ["src/notes.txt"] if path != "train.py" else [])
    assert checkout.place(CASE).commit is None, "a worktree of the commit lacks what lies there"
    edited(repo)
    index, objects = (repo.root / ".git/index").read_bytes(), sorted((repo.root / ".git/objects").rglob("*"))
    ran = checkout.ran(case)
    assert (ran.commit, has(checkout, ran, head, case)) == ("", False)
    assert index == (repo.root / ".git/index").read_bytes()
    assert objects == sorted((repo.root / ".git/objects").rglob("*"))
    repo.git("commit", "--quiet", "--all", "--message", "What ran")
    assert has(checkout, ran, "HEAD", case) and checkout.ran(case).tree == ran.tree


def committed(repo: Repo, *words: str) -> None:
    repo.git("commit", "--quiet", *words, "--message", "Record")


def hooked(repo: Repo) -> None:
    """Under a hook that looks at what is committed."""
    hook = repo.root / ".git/hooks/pre-commit"
    hook.parent.mkdir(exist_ok=True)
    hook.write_text("#!/bin/sh\ngit stash list && git diff --cached --check\n")
    hook.chmod(0o755)
    repo.git("add", "--all")
    committed(repo)


def rebased(repo: Repo) -> None:
    repo.git("checkout", "--quiet", "-b", "side")
    repo.commit("Record")
    repo.git("checkout", "--quiet", "-b", "other", "HEAD~")
    repo.git("commit", "--quiet", "--allow-empty", "--message", "Meanwhile")
    repo.git("rebase", "--quiet", "other", "side")


def squashed(repo: Repo) -> None:
    repo.git("checkout", "--quiet", "-b", "side")
    repo.commit("Record")
    repo.git("checkout", "--quiet", "main")
    repo.git("merge", "--quiet", "--squash", "side")
    committed(repo)


def subset(repo: Repo) -> None:
    """The new module, and not the notes."""
    repo.git("add", "src/new.py")
    committed(repo, "--all")


@pytest.mark.parametrize(
    "commit", [lambda repo: repo.commit("All"), subset, hooked, rebased, squashed], ids=lambda f: f.__name__
)
def test_a_commit_made_afterwards_is_what_ran(repo: Repo, commit: Callable[[Repo], None]) -> None:
    """Recorded first and committed then, with new files or without them, amended, rebased or squashed."""
    checkout = find_checkout(repo.root)
    edited(repo)
    (repo.root / "src/new.py").write_text("NEW = 1\n")
    (repo.root / "notes.txt").write_text("todo")
    ran = checkout.ran(CASE)
    assert ran.commit == ""
    commit(repo)
    assert has(checkout, ran, "HEAD")
    repo.git("commit", "--quiet", "--amend", "--allow-empty", "--message", "Another message")
    assert has(checkout, ran, "HEAD")


def test_a_commit_of_anything_else_is_not_what_ran(repo: Repo) -> None:
    """Neither one that lacks a change, nor one whose new file is another than lay there."""
    checkout = find_checkout(repo.root)
    edited(repo)
    (repo.root / "src/new.py").write_text("NEW = 1\n")
    ran = checkout.ran(CASE)
    (repo.root / "src/new.py").write_text("NEW = 2\n")
    repo.git("stash", "--quiet", "--", "train.py")
    assert not has(checkout, ran, repo.commit("Without train.py"))
    repo.git("stash", "pop", "--quiet")
    assert not has(checkout, ran, repo.commit("With another new.py"))
    (repo.root / "src/new.py").write_text("NEW = 1\n")
    assert has(checkout, ran, repo.commit("What ran"))


def test_code_that_git_does_not_track_yet(repo: Repo) -> None:
    """A folder or a launch script that is new is what ran once it is committed; nothing equals code that is ignored."""
    checkout, folder, script = find_checkout(repo.root), command("new", "true"), command("src", "bash run.sh")
    (repo.root / ".gitignore").write_text("*.log\n")
    for name in ("new/train.py", "new/out.log", "run.sh"):
        (repo.root / name).parent.mkdir(exist_ok=True)
        (repo.root / name).write_text("x\n")
    ran, scripted = checkout.ran(folder), checkout.ran(script)
    assert (ran.tree, ran.commit, list(ran.untracked)) == (NOTHING, "", ["new/train.py"])
    assert not has(checkout, ran, "HEAD", folder), "that git has nothing of it is no agreement"
    repo.commit("Add them")
    assert has(checkout, ran, "HEAD", folder) and has(checkout, scripted, "HEAD", script)
    (repo.root / "new/out.log").unlink()
    assert checkout.ran(command("new/out.log")).untracked == {}


def test_what_is_hidden_from_git_ran_all_the_same(repo: Repo) -> None:
    """A file that git is told to take for unchanged counts as it lies there; one that is not checked out as it was."""
    checkout = find_checkout(repo.root)
    repo.git("update-index", "--assume-unchanged", "train.py")
    repo.git("update-index", "--skip-worktree", "src/net.py")
    (repo.root / "src/net.py").unlink()
    assert checkout.ran(CASE).commit == repo.git("rev-parse", "HEAD")
    (repo.root / "train.py").write_text("changed\n")
    assert checkout.ran(CASE).commit == ""


def test_a_submodule_with_changes_of_its_own_is_not_known(repo: Repo, tmp_path: Path) -> None:
    """Nothing stands for what it holds, so that nothing equals it: neither a commit nor a later look."""
    checkout = find_checkout(repo.root)
    lib = Repo(tmp_path / "lib")
    lib.root.mkdir()
    lib.git("init", "--quiet")
    (lib.root / "a.py").write_text("one\n")
    lib.commit("One")
    repo.git("-c", "protocol.file.allow=always", "submodule", "--quiet", "add", str(lib.root), "lib")
    repo.commit("Add lib")
    assert checkout.ran(CASE).commit == repo.git("rev-parse", "HEAD")
    (repo.root / "lib/a.py").write_text("two\n")
    assert checkout.ran(CASE).tree == checkout.ran(command("lib/a.py")).tree == ""
    assert checkout.ran(command("src")).commit


def test_a_submodule_that_is_not_checked_out_is_as_the_index_has_it(repo: Repo, tmp_path: Path) -> None:
    """A plain clone is what its commit says, also with changes that are committed later; other files there are not."""
    checkout, parts = find_checkout(repo.root), [Repo(tmp_path / "lib"), Repo(tmp_path / "deep")]
    for part in parts:
        part.root.mkdir()
        part.git("init", "--quiet")
        (part.root / "a.py").write_text("one\n")
        part.commit("One")
    lib, deep = parts
    add = ("-c", "protocol.file.allow=always", "submodule", "--quiet", "add")
    lib.git(*add, str(deep.root), "deep")
    lib.commit("Add deep")
    repo.git(*add, str(lib.root), "lib")
    head = repo.commit("Add lib")
    assert checkout.ran(CASE).commit == head, "of lib, deep is not checked out"
    repo.git("submodule", "--quiet", "deinit", "--force", "--all")
    ran = checkout.ran(CASE)
    assert ran.commit == checkout.ran(command("lib/a.py")).commit == head and has(checkout, ran, "HEAD")
    (repo.root / "train.py").write_text("changed\n")
    changed = checkout.ran(CASE)
    (repo.root / "lib").rmdir()
    assert checkout.ran(CASE).tree == changed.tree
    (repo.root / "lib").mkdir()
    assert has(checkout, changed, repo.commit("What ran"))
    (repo.root / "lib/a.py").write_text("my own\n")
    assert checkout.ran(CASE).tree == "" and "submodule" in checkout.ran(CASE).unknown


def test_no_key_stands_for_what_a_filter_would_rewrite(repo: Repo, tmp_path: Path) -> None:
    """A commit will have it otherwise, and no filter runs to tell how; as the index has it, it is known."""
    checkout = find_checkout(repo.root)
    trap = tmp_path / "ran"
    repo.git("config", "filter.strip.clean", f"touch {trap}; sed s/OUT//")
    (repo.root / ".gitattributes").write_text("*.ipynb filter=strip\n*.txt filter=unknown\n")
    for name in ("n.ipynb", "n.txt"):
        (repo.root / name).write_text("code OUT\n")
        os.utime(repo.root / name, (1e9, 1e9))  # so that git need not look at it again
    head = repo.commit("Add a notebook")
    trap.unlink()
    assert checkout.ran(CASE).commit == head
    (repo.root / "n.txt").write_text("more\n")
    assert checkout.ran(CASE).tree, "a filter that is not configured rewrites nothing"
    (repo.root / "n.ipynb").write_text("other code OUT\n")
    ran = checkout.ran(CASE)
    assert (ran.tree, ran.commit) == ("", "") and "n.ipynb" in ran.unknown and not trap.exists()
    assert checkout.ran(command("src")).commit == head, "it is none of that code"
    (repo.root / "n.ipynb").unlink()
    gone = checkout.ran(CASE)
    assert gone.tree and has(checkout, gone, repo.commit("Without it"))


def test_what_is_unmerged_is_known_only_beside_the_code(repo: Repo) -> None:
    """A conflict in a page of the docs hides neither the commit nor a change; one in the code is no commit's."""
    checkout, head = find_checkout(repo.root), repo.git("rev-parse", "HEAD")
    blob = repo.git("hash-object", "-w", "train.py")
    stages = "".join(f"100644 {blob} {stage}\tdocs/x.md\n" for stage in (1, 2, 3))
    (repo.root / "docs").mkdir()
    for here in (False, True):
        if here:
            (repo.root / "docs/x.md").write_text("<<<<<<<\n")
        subprocess.run(["git", "update-index", "--index-info"], cwd=repo.root, input=stages, text=True, check=True)
        assert checkout.ran(command("src")).commit == head
        ran = checkout.ran(CASE)
        assert (ran.tree, ran.unknown) == ("", "docs/x.md is not merged")
    (repo.root / "src/net.py").write_text("SIZE = 2\n")
    ran = checkout.ran(command("src"))
    assert ran.commit == "" and has(checkout, ran, repo.commit("Merge"), command("src"))


def test_a_linked_worktree_has_its_own_code(repo: Repo, tmp_path: Path) -> None:
    """What lies in it ran, whatever the main checkout has."""
    repo.git("worktree", "add", "--quiet", "-b", "side", str(tmp_path / "side"))
    there, side = find_checkout(tmp_path / "side"), Repo(tmp_path / "side")
    (repo.root / "train.py").write_text("elsewhere\n")
    assert there.ran(CASE).commit == repo.git("rev-parse", "HEAD")
    edited(side)
    ran = there.ran(CASE)
    assert ran.commit == "" and has(there, ran, side.commit("What ran"))


def test_of_a_runs_own_files_what_it_left_is_known(repo: Repo) -> None:
    """A log that it wrote may be committed with it; a file that was changed meanwhile is not what lay there."""
    checkout = find_checkout(repo.root)
    (repo.root / "src/new.py").write_text("NEW = 1\n")
    (repo.root / "notes.txt").write_text("todo")
    before = checkout.ran(CASE)
    (repo.root / "loss.txt").write_text("0.1\n")
    (repo.root / "src/new.py").write_text("NEW = 2\n")
    after = checkout.ran(CASE)
    assert before.tree == after.tree
    kept = {name: after.untracked[name] for name in ("loss.txt", "notes.txt")}
    assert before.beside(after) == sorted(kept.values())
    (repo.root / "train.py").write_text("changed while it was recorded\n")
    assert checkout.ran(CASE).tree != before.tree, "whatever lies beside it"


def test_many_or_large_files_beside_it_are_not_noted(repo: Repo) -> None:
    """Outputs that nobody ignores are neither read nor listed; what git tracks is known all the same."""
    checkout = find_checkout(repo.root)
    with (repo.root / "big.bin").open("wb") as file:
        os.truncate(file.fileno(), 2 << 20)
    (repo.root / "little.txt").write_text("x")
    assert list(checkout.ran(CASE).untracked) == ["little.txt"]
    for number in range(300):
        (repo.root / f"{number}.out").write_text("x")
    assert checkout.ran(CASE).untracked == {} and checkout.ran(CASE).commit


# -- what is written of it


def test_a_pointer_says_what_ran(tmp_path: Path) -> None:
    """Also where no commit was; one that says its content and no code is of unknown code, an old one says nothing."""
    pointer = tmp_path / "toy.dvc"
    old = f"outs:\n- md5: {'e' * 32}.dir\n  hash: md5\n"

    def written(record: dict[str, object]) -> Noted | None:
        pointer.write_text(old)
        note(pointer, record)
        return noted(pointer.read_text())

    assert written({"commit": "c" * 40, "tree": "d" * 40}) == Noted("c" * 40, "d" * 40)
    assert written({"commit": None, "tree": "d" * 40}) == Noted("", "d" * 40)
    assert written({"commit": None, "tree": NOTHING, "untracked": ["ab", "cd"]}) == Noted(
        "", NOTHING, frozenset({"ab", "cd"})
    )
    assert written({"commit": None, "tree": None}) == Noted()
    assert noted(old) is None and noted(f"{old}meta:\n  owner: me\n") is None
    assert noted(f"{old}meta:\n  commit: {'c' * 40}\n  tree: {'d' * 40}\n") == Noted("c" * 40, "d" * 40), "an older one"


@pytest.mark.usefixtures("warm_dvc")
def test_dvc_reads_a_pointer_that_says_what_lay_beside(tmp_path: Path) -> None:
    """The store keeps such a run, and DVC takes its pointer for its own."""
    repo = repository(tmp_path)
    store = Store(repo.root)
    store.dvc.init()
    record = {"commit": "c" * 40, "tree": "d" * 40, "untracked": ["0123456789abcdef", "1123456789abcdef"]}
    store.keep(golden(repo, record=record, machine="staged"), "m", "toy")
    pointer = pointer_of(store.run_path("m", "toy"))
    code = noted(pointer.read_text())
    assert code is not None and code.untracked == frozenset(record["untracked"])
    store.refuse_dirty(store.run_path("m", "toy"))
    assert recorded(find_checkout(repo.root), "toy", repo.commit("Golden")) == [code]


@pytest.mark.whole
def test_a_golden_run_says_what_ran(tmp_path: Path) -> None:
    """A note beside it hides neither the commit nor that code is changed meanwhile; `next` names what to commit."""
    repo = kit.start(tmp_path, case=kit.CASE.replace('path = "train.py"', 'path = "."'))
    (repo.root / "notes.txt").write_text("todo")
    assert repo.repro("init", "--remote", str(tmp_path / "remote")).returncode == 0
    repo.git("add", "--all", ".dvc", ".dvcignore", "golden", "train.py")
    repo.git("commit", "--quiet", "--allow-empty", "--message", "Prepare")
    done = repo.repro("golden", "record", "toy")
    assert "next: git add golden && git commit;" in done.stdout and "not tracked: notes.txt;" in done.stdout, (
        done.stderr
    )
    (pointer,) = (repo.root / "golden/runs").glob("*/toy.dvc")
    code = noted(pointer.read_text())
    assert code and code.commit == repo.git("rev-parse", "HEAD") and len(code.untracked) == 1
    repo.edit("train.py", "lr=0.01", "lr=0.02")
    done = repo.repro("golden", "approve", "toy", "--reason", "faster")
    assert "next: git add golden train.py && git commit;" in done.stdout, done.stderr
    code = noted(pointer.read_text())
    repo.git("commit", "--quiet", "--all", "--message", "Faster")
    checkout, case = find_checkout(repo.root), find_case(repo.root, "toy")
    assert code and not code.commit and code.tree == checkout.ran(case).tree
    repo.edit("train.py", "first, hidden = 0, 0.0\n", "first, hidden = 0, 0.0\nopen('log.txt', 'a').write('x')\n")
    (repo.root / "log.txt").write_text("x")
    repo.git("add", "train.py", "log.txt")
    done = repo.repro("golden", "approve", "toy", "--reason", "log")
    assert done.returncode == 2 and "changed while it was recorded (log.txt, train.py)" in done.stderr
