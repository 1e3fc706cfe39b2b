"""What git writes into a worktree rests on settings, attributes and replaced objects: they are part of every key."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import Repo
from test_worktree_contents import files_of, library, taking_in

from repro_golden.repository.checkout import find_checkout
from repro_golden.repository.written import deciding, written_otherwise

ATTRIBUTES = "*.txt text eol=crlf\n"


def started(folder: Path, attributes: str = "native text") -> Repo:
    """A repository with a text file, one whose line ends are native, a link and a program."""
    repo = Repo(folder / "repo")
    repo.root.mkdir()
    repo.git("init", "--quiet", "--initial-branch=main")
    if attributes:
        (repo.root / ".gitattributes").write_text(f"{attributes}\n")
    for name in ("a.txt", "native", "run"):
        (repo.root / name).write_text("one\ntwo\n")
    (repo.root / "run").chmod(0o755)
    (repo.root / "link").symlink_to("a.txt")
    repo.commit("Start")
    return repo


def said(repo: Repo) -> tuple[str, ...]:
    """What decides there, beside a commit."""
    checkout = find_checkout(repo.root)
    return deciding(checkout.git, checkout.common)


DECIDES = [
    (("core.autocrlf=true",), True), (("core.autocrlf=input",), False), (("core.autocrlf=false",), False),
    (("core.eol=crlf",), True), (("core.eol=lf",), False), (("core.symlinks=false",), True),
    (("core.safecrlf=true",), False), (("core.fileMode=false",), False), (("core.ignoreCase=true",), False),
    (("filter.x.smudge=tr a-z A-Z",), False), (("core.autocrlf=input", "core.eol=crlf"), False),
    (("core.attributesFile={file}",), True),
]  # fmt: skip


@pytest.mark.parametrize(("settings", "decides"), DECIDES)
def test_settings_that_decide_what_git_writes(tmp_path: Path, settings: tuple[str, ...], decides: bool) -> None:
    """A setting is part of keys where a worktree has other files for it, and nowhere else."""
    repo = started(tmp_path)
    (tmp_path / "attributes").write_text(ATTRIBUTES)
    before = files_of(repo)
    assert said(repo) == () == tuple(written_otherwise(find_checkout(repo.root)))
    for setting in settings:
        name, _, value = setting.replace("{file}", str(tmp_path / "attributes")).partition("=")
        repo.git("config", name, value)
    assert ((files_of(repo) != before), said(repo) != ()) == (decides, decides)


def test_attributes_and_replaced_objects_decide_too(tmp_path: Path) -> None:
    """So do attributes that no commit holds, and blobs in the place of others; how files are compared does not."""
    repo = started(tmp_path)
    before, attributes = files_of(repo), repo.root / ".git" / "info" / "attributes"
    attributes.parent.mkdir(exist_ok=True)
    attributes.write_text("# text\n*.txt diff=words\n")
    assert (files_of(repo), said(repo)) == (before, ())
    attributes.write_text(ATTRIBUTES)
    with_attributes = said(repo)
    assert files_of(repo) != before and with_attributes
    attributes.unlink()
    (tmp_path / "other").write_text("three\n")
    other = repo.git("hash-object", "-w", str(tmp_path / "other"))
    repo.git("replace", repo.git("rev-parse", "HEAD:a.txt"), other)
    replaced = said(repo)
    assert files_of(repo) != before and replaced not in ((), with_attributes)
    repo.git("config", "core.useReplaceRefs", "false")
    assert (files_of(repo), said(repo)) == (before, ())


@pytest.mark.parametrize(
    ("lines", "tracked", "decides"),
    [
        ("*.txt ends", "[attr]ends text eol=crlf", True),  # a macro that the commit makes
        ('"a b" merge=union\n*.txt -diff linguist-generated=true filter=lfs', "", False),
        ("*.png binary\n*.bin -text", "", False),  # as git does it by itself
        ("*.txt -text", "*.txt text eol=crlf", True),
    ],
)
def test_which_attributes_of_ones_own_decide(tmp_path: Path, lines: str, tracked: str, decides: bool) -> None:
    """A word that is not known may be a macro; one that only keeps git from changing a file counts where it does."""
    repo = started(tmp_path, tracked)
    assert bool(repo.git("rev-list", "--all", "--", ".gitattributes")) == bool(tracked)
    before, attributes = files_of(repo), repo.root / ".git" / "info" / "attributes"
    attributes.parent.mkdir(exist_ok=True)
    attributes.write_text(f"{lines}\n")
    assert (files_of(repo) != before, said(repo) != ()) == (decides, decides)
    decided = said(repo)
    if tracked:
        (repo.root / ".gitattributes").unlink()
        repo.commit("They are in an earlier commit alone")
        assert said(repo) == decided, "which a search may check out"


def test_files_that_git_does_not_convert_have_no_other_ends(tmp_path: Path) -> None:
    """Those of LFS lie in the index as pointers; and what is left of a submodule is no repository."""
    repo = started(tmp_path)
    (repo.root / ".gitattributes").write_text("*.bin filter=x -text\n")
    repo.git("config", "filter.x.clean", "echo pointer")
    for name in ("w.bin", "a.txt"):
        (repo.root / name).write_bytes(b"x\r\ny\r\n" if name == "w.bin" else b"one\n")
    repo.commit("A pointer")
    checkout = find_checkout(repo.root)
    dead = repo.root / ".git" / "modules" / "dead"
    dead.mkdir(parents=True)
    (dead / "HEAD").write_text("ref: refs/heads/main\n")
    assert written_otherwise(checkout) == []
    (repo.root / "a.txt").write_bytes(b"one\r\n")
    assert len(written_otherwise(checkout)) == 1
    (dead / "objects").mkdir()
    assert said(repo) == ("modules/dead cannot be read",)


def test_a_submodule_s_own_settings(tmp_path: Path) -> None:
    """Of a submodule its own repository's settings and attributes decide."""
    inner, outer = library(tmp_path, "inner", "2.0"), library(tmp_path, "outer", "1.0")
    del inner
    repo = taking_in(tmp_path, outer)
    before = files_of(repo)
    assert said(repo) == ()
    Repo(repo.root / "at" / "outer").git("config", "core.autocrlf", "true")
    assert files_of(repo) != before and said(repo) == ("modules/part core.autocrlf=true",)


def test_files_that_were_written_otherwise(tmp_path: Path) -> None:
    """A checkout whose line ends are older than the settings has other files than a worktree."""
    repo = started(tmp_path)
    repo.git("config", "core.autocrlf", "true")
    (repo.root / "a.txt").unlink()
    repo.git("checkout", "--", "a.txt")
    repo.git("config", "core.autocrlf", "false")
    assert said(repo) == ()
    assert written_otherwise(find_checkout(repo.root)) != []


def test_a_search_under_other_line_ends(tmp_path: Path) -> None:
    """Probes of files with other line ends answer no search; those of the same ones do."""
    repo = Repo(tmp_path / "repo")
    repo.root.mkdir()
    repo.git("init", "--quiet", "--initial-branch=main")
    (repo.root / "judge.py").write_text("import sys; sys.exit(len(open('data.txt', 'rb').read()) > 12)\n")
    commits = []
    for lines in range(3, 8):
        (repo.root / "data.txt").write_text("x\n" * lines)
        commits.append(repo.commit(f"{lines} lines"))

    def bisect(crlf: bool) -> dict[str, Any]:
        repo.git("config", "core.autocrlf", str(crlf).lower())
        program = (sys.executable, "judge.py")
        done = repo.repro("bisect", "HEAD~4..HEAD", "--quick", "--json", "-j", "1", "--when", "exit", "--", *program)
        assert done.returncode == 0, done.stderr
        answer: dict[str, Any] = json.loads(done.stdout)
        return answer

    answers = [bisect(crlf) for crlf in (True, False, True)]
    assert [answer["culprit"]["commit"] for answer in answers] == [commits[2], commits[4], commits[2]]
    assert [answer["cost"]["reused"] > 0 for answer in answers] == [False, False, True]
