"""Shapes that a repository may have: the same search gives the same culprit in each."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

from attempts import attempt
from conftest import Repo
from history_kit import note, start
from promise import Asked, Promise
from test_worktree_contents import ALLOW, lfs, library

__all__ = ["promises"]

PROGRAM = ["sh", "-c", "grep -q 'value = 1' {0}"]
WHOLE = 60


def promises(asked: Asked) -> Iterator[Promise]:
    """One promise over all shapes, each at commits drawn anew."""
    promise = Promise("A search names the same commit in every shape of a repository")
    draw, names = asked.random("shapes"), asked.some(list(SHAPES), "shapes")
    for number in range(asked.count(WHOLE, least=len(names))):
        name = names[number % len(names)]
        folder = asked.work / "shapes" / str(number)
        folder.mkdir(parents=True)
        commits = draw.randrange(4, 10)
        at = draw.randrange(1, commits)
        repo, file = SHAPES[name](folder, commits, at)
        before = repo.git("status", "--porcelain"), repo.git("for-each-ref"), repo.git("stash", "list")
        command = ["bisect", "--when", "exit", "--no-explain", "--json", f"HEAD~{commits}..HEAD", "--"]
        done = attempt([*command, *(word.format(file) for word in PROGRAM)], repo.root, seconds=240, room=None)
        culprit = json.loads(done.out).get("culprit") or {} if done.out else {}
        after = repo.git("status", "--porcelain"), repo.git("for-each-ref"), repo.git("stash", "list")
        right = culprit.get("subject") == "Culprit" and done.code == 0 and before == after and not done.fault()
        promise.judge(right, f"{name}, commit {at} of {commits}: {culprit.get('subject')}, {done.text[-300:]}")
    promise.figures = {"shapes": str(len(names))}
    yield promise


def _made(
    folder: Path, commits: int, at: int, file: str = "program.txt", write: Callable[[Repo, str], None] | None = None
) -> Repo:
    """So many commits after the first, of which one makes the value another.

    Args:
        folder: Where the repository lies.
        commits: How many.
        at: Which of them is the culprit.
        file: What holds the value.
        write: Writes it; by default as a plain file.
    """
    repo = start(folder, case=None)

    def plain(repo: Repo, text: str) -> None:
        path = repo.root / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    write = write or plain
    write(repo, "value = 1\n")
    repo.commit("Value")
    for number in range(1, commits + 1):
        if number == at:
            write(repo, "value = 2\n")
            repo.commit("Culprit")
        else:
            note(repo, f"note {number}", f"notes/{number}.txt")
    return repo


def _plain(folder: Path, commits: int, at: int) -> tuple[Repo, str]:
    return _made(folder, commits, at), "program.txt"


def _shallow(folder: Path, commits: int, at: int) -> tuple[Repo, str]:
    repo = _made(folder, commits, at)
    repo.git("clone", "--quiet", f"--depth={commits + 1}", f"file://{repo.root}", str(folder / "clone"))
    return Repo(folder / "clone"), "program.txt"


def _partial(folder: Path, commits: int, at: int) -> tuple[Repo, str]:
    repo = _made(folder, commits, at)
    repo.git("config", "uploadpack.allowFilter", "true")
    repo.git("clone", "--quiet", "--filter=blob:none", f"file://{repo.root}", str(folder / "clone"))
    return Repo(folder / "clone"), "program.txt"


def _sparse(folder: Path, commits: int, at: int) -> tuple[Repo, str]:
    """What the program reads lies outside of what is checked out."""
    repo = _made(folder, commits, at, file="code/program.txt")
    repo.git("sparse-checkout", "set", "notes")
    assert not (repo.root / "code").exists()
    return repo, "code/program.txt"


def _submodule(folder: Path, commits: int, at: int) -> tuple[Repo, str]:
    """The value is the submodule's, of which the culprit takes another commit."""
    inner = library(folder, "inner", "1")

    def write(repo: Repo, text: str) -> None:
        if not (repo.root / "inner").exists():
            repo.git(*ALLOW, "submodule", "--quiet", "add", str(inner.root), "inner")
        (inner.root / "values.py").write_text(text)
        commit = inner.commit(text)
        repo.git(*ALLOW, "-C", "inner", "fetch", "--quiet", "origin")
        repo.git("-C", "inner", "checkout", "--quiet", commit)

    return _made(folder, commits, at, write=write), "inner/values.py"


def _large(folder: Path, commits: int, at: int) -> tuple[Repo, str]:
    """Git holds a pointer to the value."""
    return _made(folder, commits, at, write=lambda repo, text: lfs(repo, text.encode() * 1000)), "data.bin"


def _worktree(folder: Path, commits: int, at: int) -> tuple[Repo, str]:
    repo = _made(folder, commits, at)
    repo.git("worktree", "add", "--quiet", "--detach", str(folder / "other"))
    return Repo(folder / "other"), "program.txt"


def _crlf(folder: Path, commits: int, at: int) -> tuple[Repo, str]:
    """The program is good with the line ends alone that its attributes ask for."""

    def write(repo: Repo, text: str) -> None:
        (repo.root / ".gitattributes").write_text("*.txt text eol=crlf\n")
        (repo.root / "program.txt").write_text(text)

    repo = _made(folder, commits, at, write=write)
    return repo, "program.txt && grep -q \"$(printf '\\r')\" program.txt"


def _renamed(folder: Path, commits: int, at: int) -> tuple[Repo, str]:
    def change(repo: Repo, number: int) -> None:
        repo.git("mv", f"dir-{number - 1}" if (repo.root / f"dir-{number - 1}").exists() else "dir-0", f"dir-{number}")

    repo = start(folder, case=None)
    (repo.root / "dir-0").mkdir()
    (repo.root / "dir-0" / "program.txt").write_text("value = 1\n")
    repo.commit("Value")
    for number in range(1, commits + 1):
        change(repo, number)
        if number == at:
            (repo.root / f"dir-{number}" / "program.txt").write_text("value = 2\n")
        repo.commit("Culprit" if number == at else f"move {number}")
    return repo, "dir-*/program.txt"


def _odd(folder: Path, commits: int, at: int) -> tuple[Repo, str]:
    return _made(folder, commits, at, file='-n \'ü\t"*$x"/prö gram.txt'), "./-n*/pr*gram.txt"


def _bare_names(folder: Path, commits: int, at: int) -> tuple[Repo, str]:
    repo = _made(folder, commits, at)
    for name in ("HEAD~1", "-x", "program.txt"):
        repo.git("update-ref", f"refs/heads/{name}", "HEAD") if name != "HEAD~1" else repo.git("tag", "v1", "HEAD~1")
    return repo, "program.txt"


SHAPES: dict[str, Callable[[Path, int, int], tuple[Repo, str]]] = {
    "plain": _plain, "shallow": _shallow, "partial": _partial, "sparse": _sparse, "submodule": _submodule,
    "LFS": _large, "a linked worktree": _worktree, "CRLF": _crlf, "renamed folders": _renamed, "odd names": _odd,
    "branches named as files": _bare_names,
}  # fmt: skip
