"""Data that git ignores: what misses it says so with the cure, `--link` puts it into worktrees, a write is noticed."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import Repo
from history_kit import TRAIN, start

from repro_bisect.probe.answers import Skip, unusable
from repro_golden.base.errors import ReproError
from repro_golden.case.file import Case
from repro_golden.repository.checkout import Place, find_checkout
from repro_golden.repository.git import Git
from repro_golden.repository.linked import Linked, beside_commits, leads_out, refuse_tracked, what_decides
from repro_golden.repository.worktrees import Worktrees
from repro_golden.subjects.missing import links_in, missing_from
from repro_golden.subjects.surroundings import outside_of

JUDGE = """\
import sys
from pathlib import Path
sys.exit(int(Path("value").read_text()) >= int(Path("data/limit").read_text()))
"""


@pytest.fixture
def judged(tmp_path: Path) -> tuple[Repo, list[str]]:
    """A program that is bad from a value on which ignored data says, and commits that count the value up from 0."""
    repo = Repo(tmp_path / "repo")
    (repo.root / "data").mkdir(parents=True)
    repo.git("init", "--quiet", "--initial-branch=main")
    (repo.root / ".gitignore").write_text("data\n")
    (repo.root / "data" / "limit").write_text("2")
    (repo.root / "judge.py").write_text(JUDGE)
    commits = []
    for n in range(4):
        (repo.root / "value").write_text(f"{n}\n")
        commits.append(repo.commit(f"value {n}"))
    return repo, commits


BY_EXIT = ("bisect", "--no-explain", "HEAD~3..HEAD", "-j", "1", "--when", "exit")
RUN = ("--", sys.executable, "judge.py")


def test_ignored_data_in_a_search(judged: tuple[Repo, list[str]]) -> None:
    """An exit code for want of ignored data is no verdict; the printed command finds the commit; data is in the key."""
    repo, commits = judged
    done = repo.repro(*BY_EXIT, *RUN)
    message = done.stderr.splitlines()[-1]
    assert done.returncode == 2, done.stderr
    assert "data/limit is in your checkout, where git ignores it" in message and "`--link data/`" in message
    assert "choose another end" not in message
    words = shlex.split(message.partition("; run ")[2])
    assert words[-3:] == list(RUN) and words[words.index("--link") + 1] == "data"
    again = [*words[1:-3], "--json", *RUN]
    for limit, reused in (("2", False), ("2", True), ("3", False)):
        (repo.root / "data" / "limit").write_text(limit)
        data = json.loads(repo.repro(*again).stdout)
        assert data["culprit"]["commit"] == commits[int(limit)]
        assert "--link data --" in data["reproduce"]
        assert (data["cost"]["probes"] == 0, data["cost"]["reused"] > 0) == (reused, reused)
    assert (repo.root / "data" / "limit").read_text() == "3" and not repo.git("status", "--short")


def test_what_a_program_makes_is_no_missing_input(tmp_path: Path) -> None:
    """A file that GOOD's run makes, and that the checkout has of an earlier run, is a commit's own to miss."""
    repo = Repo(tmp_path / "repo")
    (repo.root / "out").mkdir(parents=True)
    repo.git("init", "--quiet", "--initial-branch=main")
    (repo.root / ".gitignore").write_text("out\n")
    (repo.root / "out" / "model.txt").write_text("earlier")
    commits = []
    for name in ("model", "model", "last", "last"):
        write = f"from pathlib import Path\nPath('out').mkdir()\nPath('out/{name}.txt').touch()\n"
        (repo.root / "train.py").write_text(f"{write}open('out/model.txt')\n# {len(commits)}\n")
        commits.append(repo.commit(name))
    for jobs in ("2", "1"):  # the second one takes GOOD's run from the journal
        again = repo.repro(*BY_EXIT, "-j", jobs, "--json", "--", sys.executable, "train.py")
        assert json.loads(again.stdout)["culprit"]["commit"] == commits[2], again.stderr
    assert (repo.root / "out" / "model.txt").read_text() == "earlier"


def test_a_run_that_writes_into_linked_data(judged: tuple[Repo, list[str]]) -> None:
    """A write into a linked file in place ends the search with its name, and its probe is in no journal."""
    repo, _ = judged
    writes = "open('data/limit', 'a').write(' ')"
    done = repo.repro(*BY_EXIT, "--link", "data", "--", sys.executable, "-c", writes)
    assert done.returncode == 2
    assert "data/limit of your checkout" in done.stderr and "was changed" in done.stderr
    assert not (repo.root / ".git" / "repro" / "journal.jsonl").exists()


@pytest.mark.parametrize(
    ("link", "why"), [("nowhere", "there is no nowhere"), ("judge.py", "git tracks judge.py"), ("..", "is not below")]
)
def test_what_cannot_be_linked(judged: tuple[Repo, list[str]], link: str, why: str) -> None:
    """Neither what is not there, nor what every commit has for itself, nor what lies elsewhere."""
    done = judged[0].repro(*BY_EXIT, "--link", link, *RUN)
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 2 if link != ".." else 1), done.stderr
    assert why in done.stderr


def test_what_is_compiled_cannot_be_linked(judged: tuple[Repo, list[str]]) -> None:
    """An extension module is of no commit's sources; where no commit has any, and in an environment, it is data."""
    repo, _ = judged
    for name in ("data/kern.cpython-311-x86_64-linux-gnu.so", "data/libother.so", ".venv/lib/other.so"):
        touch(repo, name)
    touch(repo, ".venv/pyvenv.cfg")
    Linked(Git(repo.root), ["data"])
    touch(repo, "kern.pyx")
    repo.git("add", "kern.pyx")
    Linked(Git(repo.root), [".venv", "data/libother.so"])
    with pytest.raises(ReproError, match=r"^data/kern.*\.so was compiled in your checkout.* in each commit's worktree"):
        Linked(Git(repo.root), ["data"])


@pytest.mark.parametrize(
    ("file", "text", "ours"),
    [
        ("csrc/other.cpp", "", False), ("csrc/other.cpp", "PYBIND11_MODULE(kern, m) {", True),
        ("csrc/other.c", "PyMODINIT_FUNC PyInit_kern(void)", True), ("csrc/kern.cu", "", True),
        ("src/lib.rs", "#[pymodule]\nfn kern(m: &Bound<PyModule>)", True),
        ("setup.py", "Extension('kern', ['a.c'])", True), ("setup.py", "Extension('pkg.kern', ['a.c'])", False),
        ("setup.py", 'Extension("flash.kern", ["a.c"])', True), ("train.py", "import kern", False),
        ("CMakeLists.txt", "pybind11_add_module( kern a.cpp)", True), ("lib/flash/__init__.py", "", True),
        ("setup.py", "CppExtension(f'{NAME}_ops', ['a.c'])", True), ("setup.py", "Extension(name=NAME)", True),
        ("CMakeLists.txt", "pybind11_add_module(${PROJECT_NAME} a.cpp)", True),
        ("setup.py", "class Built(Extension): pass\nExtension('other', [])", False),
    ],
)  # fmt: skip
def test_what_somebody_else_compiled(judged: tuple[Repo, list[str]], file: str, text: str, ours: bool) -> None:
    """A module that nothing of the repository's makes is data, whatever the repository compiles beside it."""
    repo, _ = judged
    for name, content in (("csrc/a.c", ""), (file, text)):
        touch(repo, name, content)
        repo.git("add", name)
    touch(repo, "data/flash/kern.cpython-311-x86_64-linux-gnu.so")
    with pytest.raises(ReproError, match="was compiled in your checkout") if ours else contextlib.nullcontext():
        Linked(Git(repo.root), ["data"])


def touch(repo: Repo, name: str, text: str = "") -> None:
    """Make a file in a checkout."""
    (repo.root / name).parent.mkdir(parents=True, exist_ok=True)
    (repo.root / name).write_text(text)


# -- worktrees


@contextlib.contextmanager
def worktree(repo: Repo, *link: str, commit: str = "HEAD") -> Iterator[Place]:
    """A worktree of a commit with what is linked."""
    checkout = find_checkout(repo.root)
    with contextlib.closing(Worktrees(checkout, link)) as made, made.at(repo.git("rev-parse", commit), None) as place:
        yield place


@pytest.fixture
def mixed(tmp_path: Path) -> Repo:
    """A folder with files that git tracks beside ignored ones, and a link to a folder elsewhere."""
    repo = Repo(tmp_path / "repo")
    (repo.root / "data" / "deep").mkdir(parents=True)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "shard").write_text("shard")
    repo.git("init", "--quiet", "--initial-branch=main")
    (repo.root / ".gitignore").write_text("*.txt\nlinks\n")
    (repo.root / "data" / "loader.py").write_text("old")
    (repo.root / "data" / "deep" / "a.txt").write_text("a")
    (repo.root / "data" / "links").symlink_to(tmp_path / "elsewhere")
    (repo.root / "data" / "round.txt").symlink_to(".")
    repo.commit("Start")
    (repo.root / "data" / "loader.py").write_text("new")
    (repo.root / "data" / "later.py").write_text("new")
    repo.commit("Later")
    return repo


def test_a_folder_of_both(mixed: Repo) -> None:
    """What git tracks is each commit's own, or not there; the rest is there by its links, through links to folders."""
    with worktree(mixed, "data/", commit="HEAD~1") as place:
        data = place.root / "data"
        assert (data / "loader.py").read_text() == "old" and not (data / "later.py").exists()
        assert sorted(path.name for path in data.rglob("*")) == ["a.txt", "deep", "links", "loader.py", "round.txt",
                                                                "shard"]  # fmt: skip
        assert (data / "links" / "shard").read_text() == "shard" and not (data / "links").is_symlink()


def test_what_stays_in_the_worktree(mixed: Repo) -> None:
    """Files that are made, replaced, renamed and removed in linked folders leave the checkout as it was."""
    with worktree(mixed, "data") as place:
        deep = place.root / "data" / "deep"
        (deep / "cache.txt").write_text("made")
        (deep / "new").write_text("b")
        (deep / "new").replace(deep / "a.txt")
        (place.root / "data" / "links" / "shard").unlink()
    data = mixed.root / "data"
    assert [path.name for path in (data / "deep").iterdir()] == ["a.txt"]
    assert (data / "deep" / "a.txt").read_text() == "a" and (data / "links" / "shard").read_text() == "shard"


@pytest.mark.parametrize("how", ["was changed", "was made", "was removed"])
def test_what_reaches_the_checkout(mixed: Repo, how: str) -> None:
    """A file of the checkout that is written, made or removed meanwhile is named, also if its time is set back."""
    file = mixed.root / "data" / "deep" / ("b.txt" if how == "was made" else "a.txt")
    with contextlib.ExitStack() as exits:
        exits.enter_context(pytest.raises(ReproError, match=rf"data/deep/{file.name} of your checkout.* {how}"))
        exits.enter_context(worktree(mixed, "data"))
        if how == "was removed":
            file.unlink()
        else:
            before = file.stat().st_mtime if file.exists() else 0.0
            file.write_text("x")
            os.utime(file, (before, before))


def test_a_commits_symlink_is_not_followed(mixed: Repo, tmp_path: Path) -> None:
    """Where a commit has a symlink in the place of a linked folder, nothing is made behind it."""
    mixed.git("rm", "--quiet", "-r", "--cached", "data")
    (mixed.root / "data").rename(mixed.root / "kept")
    (mixed.root / "data").symlink_to(tmp_path / "elsewhere")
    mixed.git("add", "data")
    mixed.git("commit", "--quiet", "--message", "A link")
    (mixed.root / "data").unlink()
    mixed.git("rm", "--quiet", "--cached", "data")
    (mixed.root / "kept").rename(mixed.root / "data")
    with worktree(mixed, "data") as place:
        assert (place.root / "data").is_symlink()
    assert [path.name for path in (tmp_path / "elsewhere").iterdir()] == ["shard"]


# -- a probe's key, and what decides it


def case(command: str = "a", **subject: Any) -> Case:
    """A command's case."""
    raw = {"case": {"name": "x", "steps": 1}, "subject": {"kind": "command", "command": command, **subject}}
    return Case.model_validate(raw)


def test_linked_data_is_part_of_the_key(tmp_path: Path) -> None:
    """Its content is, and so is that it is linked at all; the case itself stays the one that golden runs know."""
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "x").write_text("1")
    linked, named = case(link=["data/"]), case("a {root}/data")
    assert linked.digest == case().digest
    before = outside_of(linked, tmp_path)
    assert before == outside_of(case(link=["data"]), tmp_path)
    assert before not in ([], outside_of(named, tmp_path), outside_of(case(), tmp_path))
    (tmp_path / "data" / "x").write_text("2")
    assert outside_of(linked, tmp_path) != before


@pytest.mark.parametrize("link", ["", ".", ".git", ".git/config", "..", "a/../..", "/data"])
def test_links_that_no_case_may_have(link: str) -> None:
    """All of the checkout, git's own folder and what lies elsewhere are no data of it."""
    with pytest.raises(ValueError, match=r"must (name|be)"):
        case(link=[link])


@pytest.mark.parametrize(
    ("command", "refused"),
    [
        ("python {root}/data/loader.py", "data/loader.py"), ("a --file={root}/data//loader.py", "data/loader.py"),
        ("a {root}/src", "src"), ("a {root}/src/../src/", "src"), ("a {root}/data", ""),
        ("a {root}/data/deep/a.txt", ""),
        ("a {root} {root}/ {root}/../x {root}/nowhere", ""),
    ],
)  # fmt: skip
def test_code_of_the_checkout_is_refused(mixed: Repo, command: str, refused: str) -> None:
    """`{root}/X` is an error where git tracks X, or all of X, and none where X is data."""
    (mixed.root / "src" / "__pycache__").mkdir(parents=True)
    (mixed.root / "src" / "train.py").touch()
    mixed.git("add", "src")
    (mixed.root / "src" / "__pycache__" / "train.pyc").touch()
    for asked in (case(command), case(env={"DATA": command.split()[-1]})):
        if not refused:
            refuse_tracked(Git(mixed.root), asked)
            continue
        with pytest.raises(ReproError, match=rf"every commit would run that one.* write {refused} instead"):
            refuse_tracked(Git(mixed.root), asked)


def test_other_spellings_of_the_checkout(mixed: Repo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A path through a link, and a program that PATH finds, are the checkout's too; what git ignores there is data."""
    (tmp_path / "alias").symlink_to(mixed.root)
    tool = mixed.root / "data" / "loader.py"
    tool.chmod(0o755)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "load").symlink_to(tool)
    theirs = os.environ["PATH"]
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{tool.parent}:{theirs}")
    for words in (f"a {tmp_path}/alias/data/loader.py", "sh -c 'load && true'", "loader.py"):
        with pytest.raises(ReproError, match=r"write data/loader\.py instead"):
            refuse_tracked(Git(mixed.root), case(words))
    for words in (f"a {tmp_path}/alias/data/deep/a.txt", "sh -c true", "data", "a loader.py", "sh -c 'a loader.py'"):
        refuse_tracked(Git(mixed.root), case(words))
    monkeypatch.setenv("PATH", f":.:{theirs}")
    monkeypatch.chdir(tool.parent)
    refuse_tracked(Git(mixed.root), case("loader.py"))  # a worktree has its own there


# -- what programs print of a file that is not there

FAILURES = {
    "python": "{python} -c \"open('data/deep/a.txt')\"",
    "python, from below a folder": "cd src && {python} -c \"open('../data/deep/a.txt')\"",
    "python, with its own folder": "cd src && {python} -c \"open('own.txt')\"",
    "python, absolute": "{python} -c \"import os; open(os.path.abspath('data/deep/a.txt'), 'rb')\"",
    "python, a folder": "{python} -c \"import os; os.listdir('data/deep')\"",
    "python, a script": "{python} data/deep/a.txt",
    "cat": "cat data/deep/a.txt",
    "ls": "ls data/deep/a.txt",
    "the shell": "exec < data/deep/a.txt",
    "a program": "./data/deep/a.txt",
    "bash": "bash -c '. data/deep/a.txt'",
    "sh": ". ./data/deep/a.txt",
    "numpy": "{python} -c \"import numpy; numpy.loadtxt('data/deep/a.txt')\"",
    "numpy, a file of its own": "{python} -c \"import numpy; numpy.load('data/deep/a.txt')\"",
    "torch": "{python} -c \"import torch; torch.load('data/deep/a.txt')\"",
    "torch, in C++": "{python} -c \"import torch; torch.jit.load('data/deep/a.txt')\"",
    "torch, mapped": "{python} -c \"import torch; torch.UntypedStorage.from_file('data/deep/a.txt', False, 1)\"",
    "safetensors": "{python} -c \"import safetensors; safetensors.safe_open('data/deep/a.txt', 'np')\"",
}


@pytest.mark.parametrize("torch", [False, pytest.param(True, marks=pytest.mark.whole)])
def test_messages_of_a_missing_file(mixed: Repo, torch: bool) -> None:
    """The path is recognised in what Python, shells, numpy, torch and safetensors print, however it is written."""
    (mixed.root / "src").mkdir()
    (mixed.root / "src" / "code.py").touch()
    (mixed.root / "src" / "own.txt").touch()
    mixed.git("add", "src")
    mixed.git("commit", "--quiet", "--message", "Code")
    with worktree(mixed) as place:
        for command in [text for name, text in FAILURES.items() if ("torch" in name) == torch]:
            shell = ["/bin/sh", "-c", command.replace("{python}", sys.executable)]
            done = subprocess.run(shell, cwd=place.root, capture_output=True, text=True, check=False)
            assert done.returncode, command
            missing = missing_from(place, done.stderr, [])
            assert links_in(missing) == ["src/own.txt" if "own.txt" in command else "data/deep/"], done.stderr
            assert "git ignores it" in missing
            assert missing_from(Place(mixed.root), done.stderr, []) == ""
            assert missing_from(place, done.stderr, ["data", "src"]) == ""


def test_what_is_missing_for_another_reason(mixed: Repo) -> None:
    """A path that is in no checkout, one that only other commits have, and a line that tells of no path say nothing."""
    (mixed.root / "new.py").touch()
    with worktree(mixed, commit="HEAD~1") as place:
        for line in ("'nowhere/x.txt'", "'data/later.py'", "'data/loader.py'", "''", "'.git/config'", "'/'"):
            assert missing_from(place, f"FileNotFoundError: No such file or directory: {line}", []) == "", line
        assert missing_from(place, "loss of data/deep/a.txt is nan", []) == ""
        assert "commit it if it is code" in missing_from(place, "python: can't open file 'new.py'", [])


def test_a_module_that_the_checkout_alone_has_built(mixed: Repo) -> None:
    """An extension that was built in the checkout is no path to link: it is to be built at each commit."""
    (mixed.root / ".gitignore").write_text("*.so\nbuild/\n")
    for name in ("build/lib/kern.cpython-311-x86_64-linux-gnu.so", "src/pkg/_C.so"):
        (mixed.root / name).parent.mkdir(parents=True)
        (mixed.root / name).touch()
    with worktree(mixed) as place:
        message = "ModuleNotFoundError: No module named 'kern'"
        assert missing_from(place, message, []) == "", "a copy is not what the program imports"
        (mixed.root / "kern.cpython-311-x86_64-linux-gnu.so").touch()
        missing = missing_from(place, message, [])
        assert missing.startswith("kern is built in your checkout (kern.cpython-311-x86_64-linux-gnu.so, ")
        assert "build_ext" in missing and not links_in(missing)
        error = unusable("GOOD", Skip(f"ends before its first update: {message} ({missing})"))
        assert "choose another end" not in error
        message = "ImportError: cannot import name '_C' from 'pkg' (/tmp/at/tree/src/pkg/__init__.py)"
        assert missing_from(place, message, []).startswith("pkg._C is built in your checkout (src/pkg/_C.so, ")
        assert missing_from(place, "ModuleNotFoundError: No module named 'wandb'", []) == ""


def test_a_path_out_of_a_worktree_is_told_as_it_lies_beside_the_checkout(mixed: Repo) -> None:
    """Also one that Python has made absolute, of its script or from a file's own folder."""
    git = Git(mixed.root)
    (mixed.root.parent / "drive.py").touch()
    tree = f"/x/worktrees/disk-1/{mixed.root.name}"
    write = f"leads out of a worktree, which lies elsewhere than your checkout: write {mixed.root.parent / 'drive.py'}"
    for path, out in (
        ("../drive.py", "../drive.py"), (f"{tree}/../drive.py", "../drive.py"),
        (f"{tree}/data/../../drive.py", "../../drive.py"),
    ):  # fmt: skip
        message = f"python: can't open file '{path}': [Errno 2] No such file or directory"
        assert leads_out(git, message) == f"; {out} {write}"
    for path in (f"{tree}/data/../drive.py", "/x/other/../drive.py", f"{tree}/../nowhere.py"):
        assert leads_out(git, f"No such file or directory: '{path}'") == "", path


def test_an_empty_folder_may_decide(tmp_path: Path) -> None:
    """It is named among what no worktree has, and can be linked as well as a file."""
    repo = start(tmp_path, TRAIN, None)
    (repo.root / "logs").mkdir()
    (repo.root / "__pycache__").mkdir()
    git = Git(repo.root)
    assert beside_commits(git) == ["logs/"] and "--link logs/" in what_decides(git, [])
    with worktree(repo, "logs") as place:
        assert (place.root / "logs").is_dir()
    assert beside_commits(git, ["logs"]) == []


def test_what_recording_wrote_decides_nothing(tmp_path: Path) -> None:
    """A folder in golden/ of a checkout counts where more is in it than golden runs."""
    repo = start(tmp_path, TRAIN, None)
    touch(repo, "golden/cases/more.json")
    repo.commit("Golden")
    touch(repo, "golden/runs/machine/toy/run.json")
    git = Git(repo.root)
    assert beside_commits(git) == []
    touch(repo, "golden/runs/machine/data/seed")
    assert beside_commits(git) == ["golden/runs/"]
