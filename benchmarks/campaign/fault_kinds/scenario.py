"""What is disturbed: a command, where it runs, what it leaves, and what is left over by one that did not end."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import nightly_kit
import ray_kit
import site_kit
import warm_kit
from attempts import Attempt, attempt
from conftest import Repo, _set_remote, environment
from history_kit import CASE, edit, note, start
from history_kit import TRAIN as STEPS

__all__ = ["Scenario", "finished_probes", "leftovers", "over_ray", "reports", "run", "scenarios"]

SECONDS = 240.0
PYTHON = sys.executable
TRAIN = """\
import os, sys, time
time.sleep(0.15)
with open(os.environ["RUNS"], "a") as file:
    file.write("run\\n")
sys.exit(scale != 1.0)
"""


@dataclass(frozen=True)
class Scenario:
    """A command that may be disturbed at any moment.

    Attributes:
        name: What it does.
        make: Makes a folder with a repository ``repo`` in it, in which the command can run.
        command: Its words.
        state: What it has made so far, of what must be as before or as after.
        answer: What it says, of what every run must say alike.
        again: Exit codes of a run after one that had finished.
        share: How many of a hundred disturbances are its own.
        lost: Runs of the program to its end that a kill may cost: the last one is made anew where it was not kept yet.
        variables: All of its environment; by default the user's.
        elsewhere: What it left at places that others share.
    """

    name: str
    make: Callable[[Path], object]
    command: Sequence[str]
    state: Callable[[Path], Any]
    answer: Callable[[Attempt, Path], Any]
    again: Sequence[int] = (0,)
    share: int = 10
    lost: int = 1
    variables: Mapping[str, str] = field(default_factory=environment)
    elsewhere: Callable[[], list[str]] = list

    def copied(self, whole: Path, place: Path) -> Path:
        """A copy of what `make` made, with a remote of its own."""
        shutil.rmtree(place, ignore_errors=True)
        shutil.copytree(whole, place, symlinks=True)
        if (place / "repo" / ".dvc" / "config").exists():
            _set_remote(Repo(place / "repo"), place / "remote")
        return place


def run(scenario: Scenario, place: Path, seconds: float = SECONDS) -> Attempt:
    """Run its command in a process that begins warm; after so many seconds it alone is killed."""
    variables = {**scenario.variables, "RUNS": str(place / "runs")}
    command = [PYTHON, "-m", "repro", *scenario.command]
    return attempt(
        scenario.command, place / "repo", seconds=seconds, room=None, alone=True,
        inside=lambda: warm_kit.become(command, variables),
    )  # fmt: skip


def leftovers(place: Path) -> list[str]:
    """What nobody will use or remove: worktrees, locks that are held, temporary files and folders."""
    root = place / "repo"
    state = root / ".git" / "repro"
    worktrees = [str(p.relative_to(place)) for p in (root / ".git" / "worktrees").glob("*")]
    worktrees += [str(p.relative_to(place)) for p in (state / "worktrees").glob("*") if p.is_dir()]
    for folder, names, files in os.walk(place):
        if "cache" in folder or "/.dvc/tmp" in folder:
            continue  # what DVC keeps of its own
        for name in (*names, *files):
            if (
                name.startswith((".new-", ".gone-"))
                or ".unfinished-" in name
                or ".earlier-" in name
                or name.endswith(".part")
            ):
                worktrees.append(str(Path(folder, name).relative_to(place)))
            if name in files and name.startswith(".") and len(name) > 30:
                worktrees.append(str(Path(folder, name).relative_to(place)))
    return sorted(set(worktrees))


def tree(folder: Path) -> dict[str, str]:
    """The files below a folder by name, with what they hold."""
    files = (p for p in sorted(folder.rglob("*")) if p.is_file())
    return {str(p.relative_to(folder)): hashlib.sha256(p.read_bytes()).hexdigest()[:16] for p in files}


# -- searches


def _history(folder: Path) -> None:
    """Eight commits, of which the sixth moves the exit code."""
    folder.mkdir(parents=True, exist_ok=True)
    repo = start(folder, "scale = 1.0\n" + TRAIN, None)
    for number in range(7):
        note(repo, f"note {number}") if number != 4 else edit(repo, "scale = 1.0\n", "scale = 2.0\n", "Scale")


def finished_probes(place: Path) -> int:
    """How many whole lines the journal has."""
    with contextlib.suppress(FileNotFoundError):
        return (place / "repo" / ".git" / "repro" / "journal.jsonl").read_bytes().count(b"\n")
    return 0


def _culprit(attempt: Attempt, _place: Path) -> Any:
    with contextlib.suppress(ValueError, KeyError, TypeError):
        return json.loads(attempt.out)["culprit"]["subject"]
    return f"exit code {attempt.code}: {attempt.text[-300:]}"


# -- reports on a pull request and on a night

COUNTED = """\
if runs := os.environ.get("RUNS"):
    with open(runs, "a") as file:
        file.write("run\\n")
"""
SHORT = (
    CASE.replace("steps = 6", "steps = 2")
    .replace("proof_steps = 2", "proof_steps = 1")
    .replace("--steps 6", "--steps 2")
)


def _moved(folder: Path) -> Repo:
    """Four commits after one that another machine approved, of which the second moves the numbers."""
    folder.mkdir(parents=True, exist_ok=True)
    repo = start(folder, STEPS + COUNTED, SHORT)
    nightly_kit.approve(repo, "elsewhere")
    note(repo, "note 0")
    edit(repo, "    scale = 1.0\n", "    scale = 1.5\n", "Scale")
    note(repo, "note 1")
    note(repo, "note 2")
    return repo


def _said_of(attempt: Attempt, _place: Path) -> Any:
    """The verdict of each case, and the commits that are named for it."""
    with contextlib.suppress(ValueError, KeyError, TypeError):
        answer = json.loads(attempt.out)
        results = answer.get("results") or answer["nights"]
        return [
            (
                finding.get("verdict") or finding["status"],
                [culprit["commit"]["subject"] for culprit in finding["culprits"]],
            )
            for finding in results
        ]
    return f"exit code {attempt.code}: {attempt.text[-300:]}"


def _runs(place: Path) -> Any:
    """The status of the nights that are kept, of which every one can be read; two alike count as one."""
    from repro.nightly.records import NightlyRuns

    return {nightly_run.status for nightly_run in NightlyRuns(place / "repo" / "golden" / "nights").read()}


def reports() -> list[Scenario]:
    """Commands that replay and search, and say it to others."""
    pr = ["report", "pr", "--bisect", "--json", "-j", "1", "HEAD~4..HEAD"]
    nightly_run = ["report", "nightly", "--json", "-j", "1"]
    return [
        Scenario("report pr", _moved, pr, lambda _place: None, _said_of, (1,), share=6),
        Scenario(
            "report nightly", _moved, nightly_run, _runs, _said_of, (1,), share=6, lost=4
        ),  # three are always made anew
    ]


# -- golden runs


def _toy(folder: Path) -> Repo:
    folder.mkdir(parents=True, exist_ok=True)
    repo = start(folder, STEPS + COUNTED, SHORT)
    _said(repo, "init", "--remote", str(folder / "remote"))
    repo.commit("DVC")
    return repo


def _recorded(folder: Path) -> Repo:
    repo = _toy(folder)
    _said(repo, "golden", "record")
    repo.commit("Record")
    return repo


def _to_approve(folder: Path) -> None:
    edit(_recorded(folder), "    scale = 1.0\n", "    scale = 1.5\n", "Scale")


def _said(repo: Repo, *words: str) -> str:
    done = attempt(words, repo.root, seconds=SECONDS, room=None,
                   inside=lambda: warm_kit.become([PYTHON, "-m", "repro", *words], environment()))  # fmt: skip
    assert done.code == 0, done.text
    return done.out.decode()


def _runs(place: Path) -> Any:
    """The chain of each golden run that can be opened, as the store opens it."""
    from repro_golden.base.errors import ReproError
    from repro_golden.store.golden import Store

    root = place / "repo"
    chains = {}
    for folder in (root / "golden" / "runs").glob("*/*"):
        if folder.is_dir():
            try:
                golden = Store(root).load(folder.parent.name, folder.name)
                chains[folder.name] = golden.trace.chain
            except ReproError as error:
                chains[folder.name] = str(error)
    return chains.get("toy")


def _exit_and_chain(attempt: Attempt, place: Path) -> Any:
    return _runs(place) if attempt.code in (0, 2) else attempt.text[-300:]


def _verdict(attempt: Attempt, _place: Path) -> Any:
    return attempt.code, attempt.out.decode().splitlines()[:1]


# -- pages and remotes


def _site(folder: Path) -> None:
    (folder / "repo").mkdir(parents=True)
    site_kit.write(folder / "repo" / "golden" / "nights", [site_kit.nightly_run("demo", number=n) for n in range(2)])
    repo = Repo(folder / "repo")
    repo.git("init", "--quiet")
    _said(repo, "report", "publish", "--out", "site")
    site_kit.write(folder / "repo" / "golden" / "nights", site_kit.nightly_runs(3, cases=1, machines=1, days=12))


def _published(place: Path) -> Any:
    return tree(place / "repo" / "site")


def _pushed(attempt: Attempt, place: Path) -> Any:
    """Every object of the remote is what its name says, and how many there are."""
    if attempt.code:
        return attempt.text[-300:]
    return _torn(place) or len(_objects(place))


def _objects(place: Path) -> list[Path]:
    return [p for p in (place / "remote").rglob("*") if p.is_file() and len(p.name.partition(".")[0]) == 30]


def _torn(place: Path) -> Any:
    """Objects of the remote that are not what their names say, of which there may be none at any moment."""
    digests = ((p.name, hashlib.md5(p.read_bytes(), usedforsecurity=False).hexdigest()) for p in _objects(place))
    return [name for name, digest in digests if digest[2:] != name[:30]]


SEARCH = ["bisect", "--when", "exit", "--no-explain", "-j", "1", "--json"]
SEARCHED = ["HEAD~7..HEAD", "--", PYTHON, "train.py"]


def scenarios() -> list[Scenario]:
    """Every command that is disturbed in each way."""
    approve = ["golden", "approve", "--reason", "x"]
    publish = ["report", "publish", "--out", "site"]
    return [
        Scenario("bisect", _history, [*SEARCH, *SEARCHED], lambda _place: None, _culprit, share=30),
        Scenario("report publish", _site, publish, _published, lambda a, p: _published(p) or a.text, share=20),
        Scenario("golden push", lambda f: _recorded(f), ["golden", "push"], _torn, _pushed, share=8),
        Scenario("golden verify", lambda f: _recorded(f), ["golden", "verify"], _runs, _verdict, share=8),
        Scenario("golden record", lambda f: _toy(f), ["golden", "record"], _runs, _exit_and_chain, (0, 2), share=8),
        Scenario("golden approve", _to_approve, approve, _runs, _exit_and_chain, (0, 2), share=8),
    ]  # fmt: skip


@contextlib.contextmanager
def over_ray(place: Path) -> Iterator[Scenario]:
    """The same search on a cluster that is there for as long, which is told where the place's runs are counted."""
    with ray_kit.cluster(RUNS=str(place / "runs")) as node:
        yield Scenario(
            "bisect --ray", _history, [*SEARCH, "--ray", node.address, *SEARCHED], lambda _place: None, _culprit,
            share=6, variables=ray_kit.variables(place.parent),
            elsewhere=lambda: [] if ray_kit.until(lambda: not node.left()) else node.left(),
        )  # fmt: skip
