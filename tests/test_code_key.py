"""The key of a subject's code: every change of it changes the key, and nothing else does, in range and checkout."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import warm_kit
from conftest import Repo
from history_kit import CASE, edit, note, start
from test_bad_input import only_line

from repro.nightly.nightly import Asked, nightly_run_of
from repro.pulls.pair import compare_commits
from repro_bisect.axes.commits import History
from repro_bisect.driver.session import Options, commits_of
from repro_golden.base.errors import ReproError
from repro_golden.case.file import Case, find_case
from repro_golden.repository.checkout import find_checkout
from repro_golden.repository.code_key import code_keys
from repro_golden.repository.git import rewritten

READS = ("--when", "exit", "-j", "1", "--", sys.executable, "-c")


def new(root: Path, form: str = "sha1") -> Repo:
    """A repository with a file of each kind, and a submodule's entry that is nowhere checked out."""
    repo = Repo(root)
    root.mkdir()
    repo.git("init", "--quiet", "--initial-branch=main", f"--object-format={form}")
    (root / "core").mkdir()
    for name in ("a.yaml", "train.sh", "core/train.py", "golden words"):
        (root / name).write_text(name)
    (root / "config.yaml").symlink_to("a.yaml")
    (root / "core" / "config.yaml").symlink_to("train.py")
    gitlink(repo, "1")
    return repo


def gitlink(repo: Repo, digit: str) -> None:
    """Commit everything, with a submodule at some commit."""
    repo.git("add", "--all")
    length = len(repo.git("hash-object", "-t", "tree", os.devnull))
    repo.git("update-index", "--add", "--cacheinfo", f"160000,{digit * length},sub")
    repo.git("commit", "--quiet", "--message", f"Submodule at {digit}")


def plain(path: Path) -> None:
    """Make a symlink a file with the symlink's own text: the same blob."""
    text = str(path.readlink())
    path.unlink()
    path.write_text(text)


def add_latin(root: Path) -> None:
    (root / os.fsdecode(b"caf\xe9.py")).write_text("")


def in_golden(root: Path, name: str, text: str = "", mode: int = 0o644) -> None:
    (root / "golden" / name).parent.mkdir(parents=True, exist_ok=True)
    (root / "golden" / name).write_text(text)
    (root / "golden" / name).chmod(mode)


CHANGES: dict[str, tuple[Callable[[Path], object], list[str], list[str]]] = {
    "link": (lambda root: plain(root / "config.yaml"), [".", "config.yaml"], ["core", "train.sh", "sub"]),
    "link below": (lambda root: plain(root / "core/config.yaml"), [".", "core", "core/config.yaml"], ["core/train.py"]),
    "mode": (lambda root: (root / "train.sh").chmod(0o755), [".", "train.sh", "config.yaml"], ["core"]),
    "mode below": (lambda root: (root / "core/train.py").chmod(0o755), [".", "./core/", "core/train.py"], ["train.sh"]),
    "begins with golden": (lambda root: (root / "golden words").write_text("x"), [".", "golden words"], ["core"]),
    "name": (lambda root: (root / "train.sh").rename(root / "run.sh"), ["."], ["core"]),
    "bytes": (add_latin, ["."], ["core"]),
    "golden": (lambda root: in_golden(root, "runs/machine/x.dvc"), ["golden"], [".", "core"]),
    "executable": (lambda root: in_golden(root, "runs/machine/x.dvc", mode=0o755), ["golden"], [".", "core"]),
    "kept by git": (lambda root: in_golden(root, "runs/machine/x/trace/header.json"), ["golden"], [".", "core"]),
    "case": (lambda root: in_golden(root, "cases/x.toml", '[case]\nname = "x"\n'), ["golden"], [".", "core"]),
    "rollouts": (lambda root: in_golden(root, "rollouts/x/index.json", '{"rollouts": []}'), ["golden"], [".", "core"]),
    "no case": (lambda root: in_golden(root, "cases/x.toml", "lr = 0.1"), [".", "golden"], ["core"]),
    "beside cases": (lambda root: in_golden(root, "cases/base.json"), [".", "golden"], ["core"]),
    "beside runs": (lambda root: in_golden(root, "runs/machine/x/data.json"), [".", "golden"], ["core"]),
    "beside rollouts": (lambda root: in_golden(root, "rollouts/x/prompts.txt"), [".", "golden"], ["core"]),
    "prompts": (lambda root: in_golden(root, "prompts.txt"), [".", "golden"], ["core"]),
    "package": (lambda root: in_golden(root, "model.py"), [".", "golden"], ["core"]),
    "package below": (lambda root: in_golden(root, "nets/small/model.py"), [".", "golden"], ["core"]),
    "dvc": (lambda root: (root / ".dvcignore").touch(), [".dvcignore"], [".", "core"]),
}  # fmt: skip


@pytest.mark.parametrize("form", ["sha1", "sha256"])
def test_what_changes_a_key(tmp_path: Path, form: str) -> None:
    """Content, name, kind and mode of any entry change the key of what holds it, and of nothing else."""
    for name, (change, changed, same) in CHANGES.items():
        repo = new(tmp_path / name.replace(" ", "-"), form)
        base = repo.git("rev-parse", "HEAD")
        change(repo.root)
        gitlink(repo, "1")
        paths = [*changed, *same]
        history = [History(find_checkout(repo.root), f"{base}..HEAD", [path]) for path in paths]
        differ = [path for path, h in zip(paths, history, strict=True) if h.tree(h.good) != h.tree(h.bad)]
        assert differ == changed, name


def test_a_submodule_is_an_entry(tmp_path: Path) -> None:
    """A submodule's other commit changes the key of the submodule, of what lies inside it, and of what holds it."""
    repo = new(tmp_path / "repo")
    base = repo.git("rev-parse", "HEAD")
    gitlink(repo, "2")
    for path, moves in (("sub", True), ("sub/train.py", True), (".", True), ("core", False)):
        history = History(find_checkout(repo.root), f"{base}..HEAD", [path])
        keys = [history.tree(history.good), history.tree(history.bad)]
        assert None not in keys and (keys[0] != keys[1]) == moves, path
    checkout = find_checkout(repo.root)
    keys = [code_keys(checkout.git, [base], [path]).of(base) for path in ("sub", "sub/a", "sub/b")]
    assert len({*keys}) == 3, "two files of one submodule are two"


@pytest.mark.parametrize("form", ["sha1", "sha256"])
def test_the_key_is_git_s_own(tmp_path: Path, form: str) -> None:
    """A folder's key is its tree's id; the whole repository's is the id of its tree without what recording writes."""
    repo = new(tmp_path / "repo", form)
    head, git = repo.git("rev-parse", "HEAD"), find_checkout(repo.root).git
    whole = repo.git("rev-parse", "HEAD^{tree}")
    assert code_keys(git, [head], ["."]).of(head) == whole
    assert code_keys(git, [head], ["core"]).of(head) == repo.git("rev-parse", "HEAD:core")
    in_golden(repo.root, "cases/x.toml", "[case]\n")
    for name in ("golden/check.json", "golden/dvc.yaml", ".dvc", ".dvcignore"):
        (repo.root / name).write_text("x")
    gitlink(repo, "1")
    head = repo.git("rev-parse", "HEAD")
    assert repo.git("rev-parse", "HEAD^{tree}") != whole
    assert code_keys(git, [head], ["."]).of(head) == whole
    (repo.root / "golden" / "model.py").write_text("x")
    gitlink(repo, "1")
    package = repo.git("rev-parse", "HEAD")
    for name in ("cases/x.toml", "check.json", "dvc.yaml"):
        repo.git("rm", "--quiet", "--cached", f"golden/{name}")
    repo.git("rm", "--quiet", "--cached", ".dvc", ".dvcignore")
    repo.git("commit", "--quiet", "--message", "The package alone")
    alone = repo.git("rev-parse", "HEAD")
    assert code_keys(git, [package], ["."]).of(package) == repo.git("rev-parse", f"{alone}^{{tree}}") != whole


def test_a_checkout_and_a_range_agree(tmp_path: Path) -> None:
    """The key of a clean working tree is that of its commit in a range, for every kind of path."""
    repo = new(tmp_path / "repo")
    repo.git("rm", "--quiet", "--cached", "sub")
    repo.git("commit", "--quiet", "--message", "No submodule")
    add_latin(repo.root)
    head = repo.commit("Latin")
    checkout = find_checkout(repo.root)
    for path in (".", "./", "core", "core/", "core/train.py", "config.yaml", "train.sh"):
        place = checkout.place(command(path))
        assert place.commit == head, path
        assert place.tree == History(checkout, "HEAD~1..HEAD", [path]).tree(head), path


def command(path: str, **more: str) -> Case:
    """A case of a command in a path."""
    subject = {"kind": "command", "command": "true", "path": path, **more}
    return Case.model_validate({"case": {"name": "toy", "steps": 2}, "subject": subject})


LINKED = ["src", "src/train.py", "link.py"]
"""Paths that are a symlink, or pass through one."""


def linked(root: Path) -> tuple[Repo, list[str]]:
    """Commits that change a folder behind symlinks, a word elsewhere, nothing but a recording, and the folder again."""
    repo = Repo(root)
    root.mkdir()
    repo.git("init", "--quiet", "--initial-branch=main")
    for name in ("real/train.py", "core/a.py", "closed/a.py"):
        (root / name).parent.mkdir()
        (root / name).write_text("one")
    for link, target in (
        ("src", "real"), ("link.py", "src/train.py"), ("core/lib", "../real"), ("core/up", ".././real/train.py"),
        ("closed/b.py", "a.py"), ("closed/absolute", "/etc"), ("closed/away", "../../x"),
    ):  # fmt: skip
        (root / link).symlink_to(target)
    (root / "hidden").mkdir()
    (root / "hidden" / "to").symlink_to("../closed")
    (root / "hidden" / "b").symlink_to("to/../real")  # by its letters it stays, and it does not
    commits = [repo.commit("One")]
    for name in ("real/train.py", "word", "golden/runs/machine/run.dvc", "real/train.py"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(str(len(commits)))
        commits.append(repo.commit(name))
    return repo, commits


@pytest.mark.parametrize("path", [*LINKED, "core", "core/lib", "core/up", "hidden"])
def test_code_behind_a_symlink(tmp_path: Path, path: str) -> None:
    """Where a path is a symlink, passes through one or holds one that leads away, all of a commit is its code.

    Its key is the same in every range and in a checkout, also after a recording was committed.
    """
    repo, commits = linked(tmp_path / "repo")
    checkout = find_checkout(repo.root)
    history = History(checkout, f"{commits[0]}..HEAD", [path])
    keys = [history.tree(commit) for commit in commits]
    assert None not in keys and len(set(keys)) == 4 and keys[2] == keys[3]
    later = History(checkout, f"{commits[2]}..{commits[4]}", [path])
    assert [later.tree(commit) for commit in commits[2:]] == keys[2:]
    assert checkout.place(command(path)).tree == keys[-1]
    (repo.root / "real" / "train.py").write_text("not committed")
    assert checkout.place(command(path)).tree is None


def test_symlinks_that_stay_inside(tmp_path: Path) -> None:
    """Links inside the subject's paths, or to what is in no commit, leave the key that of the paths."""
    repo, commits = linked(tmp_path / "repo")
    git = find_checkout(repo.root).git
    keys = code_keys(git, commits, ["closed"])
    assert {keys.of(commit) for commit in commits} == {repo.git("rev-parse", "HEAD:closed")}
    keys = code_keys(git, commits, ["src", "real"])
    assert keys.of(commits[2]) == keys.of(commits[1]) != keys.of(commits[0])
    keys = code_keys(git, commits, ["."])
    assert keys.of(commits[2]) == keys.of(commits[3]) != keys.of(commits[1])


def test_symlinks_that_come_and_go(tmp_path: Path) -> None:
    """A commit counts as a whole where a link leads away in it, wherever in the range that is."""
    repo, commits = linked(tmp_path / "repo")
    (repo.root / "core" / "lib").unlink()
    (repo.root / "core" / "up").unlink()
    after = [repo.commit("No links")]
    (repo.root / "real" / "train.py").write_text("more")
    after.append(repo.commit("More"))
    history = History(find_checkout(repo.root), f"{commits[0]}..HEAD", ["core"])
    keys = [history.tree(commit) for commit in (*commits, *after)]
    assert len(set(keys)) == 5 and keys[-1] == keys[-2] == repo.git("rev-parse", "HEAD:core")


def test_a_symlink_into_what_is_recorded(tmp_path: Path) -> None:
    """Code that leads into golden/ counts with it."""
    repo, _ = linked(tmp_path / "repo")
    (repo.root / "src").unlink()
    (repo.root / "src").symlink_to("golden")
    commits = [repo.commit("To golden")]
    (repo.root / "golden" / "runs" / "machine" / "run.dvc").write_text("other")
    commits.append(repo.commit("Record"))
    for path in ("src", "src/runs/machine/run.dvc", "."):
        keys = code_keys(find_checkout(repo.root).git, commits, [path])
        assert keys.of(commits[0]) != keys.of(commits[1]), path


def test_nothing_behind_a_symlink(tmp_path: Path) -> None:
    """A misspelt path behind a symlink is as absent as any other."""
    repo, _ = linked(tmp_path / "repo")
    with pytest.raises(ReproError, match=r"^src/trian.py is neither in"):
        History(find_checkout(repo.root), "HEAD~1..HEAD", ["src/trian.py"]).require(["src/trian.py"])


def test_a_pull_request_behind_a_symlink(tmp_path: Path) -> None:
    """A change of what a subject's path leads to is no pull request that changes nothing."""
    repo, _ = linked(tmp_path / "repo")
    for path in ("src", "core"):
        history = commits_of(find_checkout(repo.root), command(path), "HEAD~1..HEAD", Options())
        assert history.tree(history.good) != history.tree(history.bad)


# -- what has no code


def with_case(tmp_path: Path, path: str) -> Repo:
    """Two commits of a repository whose case names a path."""
    repo = Repo(tmp_path / "repo")
    repo.root.mkdir()
    repo.git("init", "--quiet", "--initial-branch=main")
    file = repo.root / "golden" / "cases" / "toy.toml"
    file.parent.mkdir(parents=True)
    file.write_text(CASE.replace('path = "train.py"', f'path = "{path}"'))
    (repo.root / "requirements.txt").write_text("")
    note(repo, "one")
    note(repo, "two")
    return repo


@pytest.mark.parametrize("place", ["", "src"])
def test_attributes_above_the_code_are_code(tmp_path: Path, place: str) -> None:
    """What decides line ends from above a narrowed path changes its key; where there is none the key is git's own."""
    repo = Repo(tmp_path / "r")
    (repo.root / "src" / "code").mkdir(parents=True)
    repo.git("init", "--quiet", "--initial-branch=main")
    (repo.root / "src" / "code" / "data.txt").write_text("a\nb\n")
    (repo.root / "notes").write_text("1")
    first = note(repo, "1")
    (repo.root / "notes").write_text("2")
    other = note(repo, "2")
    (repo.root / place / ".gitattributes").write_text("*.txt text eol=crlf\n")
    repo.git("add", "--all")
    last = note(repo, "3")
    keys = code_keys(find_checkout(repo.root).git, [first, other, last], ["src/code"])
    assert keys.of(first) == keys.of(other) == repo.git("rev-parse", f"{first}:src/code") != keys.of(last)


def test_a_file_that_a_filter_writes_is_named(tmp_path: Path) -> None:
    """No filter runs where a commit is put in place: whoever trusts in one is told; Git LFS and none at all are not."""
    repo = Repo(tmp_path / "r")
    (repo.root / "src").mkdir(parents=True)
    repo.git("init", "--quiet", "--initial-branch=main")
    (repo.root / "src" / "rate.txt").write_text("lr=1\n")
    (repo.root / ".gitattributes").write_text("*.txt filter=louder\n*.bin filter=lfs\n")
    repo.commit("Start")
    git = find_checkout(repo.root).git
    assert rewritten(git, ["src"]) == ""
    repo.git("config", "filter.lfs.process", "git-lfs filter-process")
    repo.git("config", "filter.louder.smudge", "cat")
    assert rewritten(git, ["."]) == ""
    repo.git("config", "filter.louder.smudge", "sed s/1/2/")
    assert rewritten(git, ["src"]).startswith("src/rate.txt is written by the filter louder in your checkout")
    assert rewritten(git, ["."]) == rewritten(git, ["src"]) and rewritten(git, ["golden"]) == ""


def test_a_path_that_nothing_has_is_an_error(tmp_path: Path) -> None:
    """A misspelt subject.path is no pull request without changes, no range, no night and no checkout: one line says so.

    The line names the path and what to correct.
    """
    repo = with_case(tmp_path, "trian.py")
    checkout, case = find_checkout(repo.root), find_case(repo.root, "toy")
    locked = command("trian.py", setup="pip")  # a lock file that is there makes no misspelt path right
    for ask in (
        lambda: compare_commits(checkout, case, "HEAD~1", "HEAD", print, Options()),
        lambda: compare_commits(checkout, case, "HEAD", "HEAD", print, Options()),
        lambda: commits_of(checkout, case, "HEAD~1..HEAD", Options()),
        lambda: commits_of(checkout, case, "HEAD~1..HEAD", Options(paths=["trian.py"])),
        lambda: commits_of(checkout, locked, "HEAD~1..HEAD", Options()),
        lambda: checkout.place(case),
        lambda: checkout.place(locked),
    ):
        with pytest.raises(ReproError, match=r"^trian.py is neither in .*: correct subject.path") as caught:
            ask()
        assert caught.value.exit_code == 2
    run = nightly_run_of(checkout, case, repo.git("rev-parse", "HEAD"), [], print, Asked("", "1"))
    assert [(check.status, check.text.partition(" is ")[0]) for check in run.checks] == [("error", "trian.py")]
    assert repo.repro("init").returncode == 0
    for arguments in (("report", "pr", "HEAD~1..HEAD"), ("bisect", "HEAD~1..HEAD"), ("golden", "record", "toy")):
        done = repo.repro(*arguments)
        assert done.returncode == 2
        assert "trian.py" in (done.stdout if "pr" in arguments else only_line(done))


def test_a_path_at_one_end_is_a_change(tmp_path: Path) -> None:
    """Code that one end alone has was changed, also where a lock file is at both."""
    repo = with_case(tmp_path, "later.py")
    note(repo, "three", "later.py")
    checkout, case = find_checkout(repo.root), command("later.py", setup="pip")
    for spec in ("HEAD~1..HEAD", "HEAD~2..HEAD"):
        history = commits_of(checkout, case, spec, Options())
        assert history.tree(history.good) != history.tree(history.bad)
    assert checkout.place(case).tree == history.tree(history.bad)


def test_code_that_no_commit_has_is_no_commit_s(tmp_path: Path) -> None:
    """A subject that git ignores has neither commit nor key, so that nothing equals it."""
    repo = with_case(tmp_path, "build")
    (repo.root / ".gitignore").write_text("build\n")
    repo.commit("Ignore")
    (repo.root / "build").mkdir()
    place = find_checkout(repo.root).place(find_case(repo.root, "toy"))
    assert (place.commit, place.tree) == (None, None)


# -- verdicts


def names(repo: Repo, culprit: str, program: str) -> None:
    """A search whose program fails from `culprit` on names it."""
    last = len(repo.git("rev-list", "HEAD").split()) - 1
    done = repo.repro("bisect", "--no-explain", f"HEAD~{last}..HEAD", "--json", *READS, program)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["culprit"]["commit"] == culprit, done.stderr


def searched(root: Path, change: Callable[[Path], object]) -> tuple[Repo, str]:
    """A history in which one commit makes a change, beside which others change words; and that commit."""
    repo = Repo(root)
    root.mkdir()
    repo.git("init", "--quiet", "--initial-branch=main")
    (root / "a.yaml").write_text("a")
    (root / "train.sh").write_text("true")
    (root / "config.yaml").symlink_to("a.yaml")
    for text in ("one", "two", "three"):
        note(repo, text, "words")
    change(root)
    culprit = repo.commit("Tidy")
    for text in ("four", "five"):
        note(repo, text, "words")
    return repo, culprit


def test_a_culprit_that_changes_no_blob(tmp_path: Path) -> None:
    """A commit that only makes a symlink a file, or only takes a file's right to run, is the one that is named."""
    repo, culprit = searched(tmp_path / "link", lambda root: plain(root / "config.yaml"))
    names(repo, culprit, "import os, sys; sys.exit(not os.path.islink('config.yaml'))")
    repo, culprit = searched(tmp_path / "mode", lambda root: (root / "train.sh").chmod(0o755))
    names(repo, culprit, "import os, sys; sys.exit(os.access('train.sh', os.X_OK))")


TRAIN = """\
import os, torch
model = torch.nn.Linear(2, 1)
torch.nn.init.constant_(model.weight, 0.5)
torch.nn.init.constant_(model.bias, 0.0)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1 if os.path.islink("config.yaml") else 0.2)
for step in range(2):
    optimizer.zero_grad()
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
"""


@pytest.mark.whole
def test_a_pull_request_that_changes_no_blob(tmp_path: Path) -> None:
    """`report pr` of a symlink that became a file says that it moved the numbers, and by which commit."""
    repo, _ = searched(tmp_path / "repo", Path.touch)
    (repo.root / "train.py").write_text(TRAIN)
    case = repo.root / "golden" / "cases" / "toy.toml"
    case.parent.mkdir(parents=True)
    case.write_text('[case]\nname = "toy"\nsteps = 2\n[subject]\nkind = "command"\ncommand = "{python} train.py"\n')
    repo.commit("Train")
    plain(repo.root / "config.yaml")
    culprit = repo.commit("Tidy")
    done = repo.repro("report", "pr", "HEAD~1..HEAD", "--json")
    assert done.returncode == 1, done.stderr + done.stdout
    (result,) = json.loads(done.stdout)["results"]
    assert result["verdict"] == "moved"
    assert [finding["commit"]["commit"] for finding in result["culprits"]] == [culprit]


def test_what_lies_beside_golden_runs_is_code(tmp_path: Path) -> None:
    """Of what lies untracked in golden/ only what recording writes leaves a checkout its commit."""
    repo = with_case(tmp_path, "one")
    file = repo.root / "golden" / "cases" / "toy.toml"
    file.write_text(CASE.replace('path = "train.py"', 'path = "."'))
    commit = repo.commit("All of it")
    checkout, case = find_checkout(repo.root), find_case(repo.root, "toy")
    (repo.root / "golden" / "check.json").write_text("{}")
    assert checkout.place(case).commit == commit
    for name in ("prompts.txt", "nets/small/model.py", "cases/base.json", "cases/base.toml", "runs/data.json"):
        (repo.root / "golden" / name).parent.mkdir(parents=True, exist_ok=True)
        (repo.root / "golden" / name).write_text("")
        assert checkout.place(case).commit is None
        (repo.root / "golden" / name).unlink()
    assert checkout.place(case).commit == commit


def test_tracked_data_in_golden_is_replayed(tmp_path: Path) -> None:
    """A pull request that changes nothing but a file that the program reads in golden/ is no agreement."""
    repo = start(tmp_path, case=None)
    data = repo.root / "golden" / "prompts.txt"
    data.parent.mkdir()
    data.write_text("1.0")
    edit(repo, "scale = 1.0\n", "scale = float(open('golden/prompts.txt').read())\n", "Read")
    data.write_text("7.0")
    repo.commit("Other prompts")
    done = repo.repro("report", "pr", "HEAD~1..HEAD", "--json", "--", sys.executable, "train.py", "--steps", "2")
    (result,) = json.loads(done.stdout)["results"]
    assert result["verdict"] == "moved", done.stderr


def test_data_where_recording_writes_is_code(tmp_path: Path) -> None:
    """A search names the commit that changes a file of the program's own in golden/cases, where no case has to be."""
    repo = Repo(tmp_path / "repo")
    in_golden(repo.root, "cases/base.json", "0")
    repo.git("init", "--quiet", "--initial-branch=main")
    for text in ("one", "two"):
        note(repo, text)
    in_golden(repo.root, "cases/base.json", "1")
    culprit = repo.commit("Other data")
    note(repo, "three")
    names(repo, culprit, "import sys; sys.exit(int(open('golden/cases/base.json').read()))")


def test_a_script_that_the_case_names_is_code(tmp_path: Path) -> None:
    """What the command starts counts, also where the path holds something else; its numbers are no files."""
    repo = start(tmp_path, case=None)
    (repo.root / "src").mkdir()
    (repo.root / "src" / "model.py").write_text("")
    (repo.root / "configs").mkdir()
    (repo.root / "configs" / "small.yaml").write_text("")
    file = repo.root / "golden" / "cases" / "toy.toml"
    file.parent.mkdir(parents=True)
    command = 'command = "{python} train.py --steps 2"\ncheck = "test 0.1 -a -f=configs/small.yaml"'
    file.write_text(f'[case]\nname = "toy"\nsteps = 2\n[subject]\nkind = "command"\n{command}\npath = "src"\n')
    repo.commit("Narrow")
    checkout, case = find_checkout(repo.root), find_case(repo.root, "toy")
    assert checkout.paths(case) == ["src", "configs/small.yaml", "train.py"]
    edit(repo, "scale = 1.0\n", "scale = 2.0\n", "The script")
    assert warm_kit.called(compare_commits)(checkout, case, "HEAD~1", "HEAD", print, Options(jobs=1)).verdict == "moved"
