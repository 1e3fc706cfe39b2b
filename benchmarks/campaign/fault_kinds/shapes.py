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
        found = json.loads(done.out).get("culprit") or {} if done.out else {}
        after = repo.git("status", "--porcelain"), repo.git("for-each-ref"), repo.git("stash", "list")
        right = found.get("subject") == "Culprit" and done.code == 0 and before == after and not done.fault()
        promise.judge(right, f"{name}, commit {at} of {commits}: {found.get('subject')}, {done.text[-300:]}")
    promise.figures = {"shapes": str(len(names))}
    yield promise


def _made(
    folder: Path, commits: int, at: int, file: str = "program.txt", change: Callable[[Repo, int], None] | None = None
) -> Repo:
    """So many commits after the first, of which one makes the value another."""
    repo = start(folder, case=None)
    path = repo.root / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("value = 1\n")
    repo.commit("Value")
    for number in range(1, commits + 1):
        if number == at:
            path.write_text(path.read_text().replace("value = 1", "value = 2"))
            repo.commit("Culprit")
            continue
        if change:
            change(repo, number)
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
    repo = _made(folder, commits, at)
    repo.git("sparse-checkout", "set", "notes")
    return repo, "program.txt"


def _submodule(folder: Path, commits: int, at: int) -> tuple[Repo, str]:
    inner = library(folder, "inner", "1.0")
    repo = _made(folder, commits, at)
    repo.git(*ALLOW, "submodule", "--quiet", "add", str(inner.root), "inner")
    repo.git("commit", "--quiet", "--amend", "--no-edit")
    return repo, "program.txt"


def _large(folder: Path, commits: int, at: int) -> tuple[Repo, str]:
    return _made(folder, commits, at, change=lambda repo, number: lfs(repo, b"content %d" % number)), "program.txt"


def _worktree(folder: Path, commits: int, at: int) -> tuple[Repo, str]:
    repo = _made(folder, commits, at)
    repo.git("worktree", "add", "--quiet", "--detach", str(folder / "other"))
    return Repo(folder / "other"), "program.txt"


def _crlf(folder: Path, commits: int, at: int) -> tuple[Repo, str]:
    def change(repo: Repo, number: int) -> None:
        (repo.root / ".gitattributes").write_text(f"*.txt text eol=crlf\n# {number}\n")

    repo = _made(folder, commits, at, change=change)
    repo.git("config", "core.autocrlf", "true")
    return repo, "program.txt"


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
