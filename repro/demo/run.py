"""The demo itself: hide a regression, record, verify, bisect, report, and only then open the answer and show it."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import os
import shlex
import shutil
import subprocess
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from repro.demo.history import Answer, Planned, make_history
from repro.initialise import initialise, trainer_source
from repro.live import line_of
from repro.report.bisect import cost_line, explanation, write_report
from repro_bisect.driver.commits import bisect_range
from repro_bisect.driver.result import BisectResult
from repro_bisect.driver.session import Options as BisectOptions
from repro_bisect.driver.session import commits_of
from repro_bisect.probe.progress import Event
from repro_golden.base.canonical import canonical_json, mapping_of, write_atomic
from repro_golden.base.errors import MachineFailureError, ReproError
from repro_golden.case.file import find_case
from repro_golden.repository.checkout import find_checkout
from repro_golden.runs.record import Options, record
from repro_golden.runs.verify import Verification, verify

__all__ = [
    "MARKER", "DemoResult", "checkout", "open_answer", "prepare_folder", "result_text", "run_demo", "seal_answer",
    "write_picture", "write_repository",
]  # fmt: skip

MARKER = ".repro-demo"
"""A file that says: this folder is a demo's and may be replaced by the next one."""
_CASE = "demo"

Say = Callable[[str], None]
_WIDTH = 104
_OK, _NO = "ok", "NO"


@dataclass(frozen=True)
class DemoResult:
    """What a demo did and found.

    Attributes:
        seed: Of the history.
        commits: How many lie between the golden run and HEAD.
        proofs: How many the golden run passed.
        verification: HEAD's replay against the golden run.
        bisect: The search.
        answer: The opened answer: commit, subject, kind, place, phase and first_step.
        sha256: Of the sealed answer.
        reports: Markdown and HTML.
        reproduce: The command that searches again.
        seconds: Wall time of everything.
    """

    seed: int
    commits: int
    proofs: int
    verification: Verification
    bisect: BisectResult
    answer: dict[str, Any]
    sha256: str
    reports: tuple[Path, ...]
    reproduce: str
    seconds: float

    @property
    def problem(self) -> str:
        """Why the demo failed, in one line; empty when the planted commit, step and phase were named."""
        bisect, planted = self.bisect, self.answer
        if self.verification.agrees:
            return "HEAD agrees with the golden run although a regression was planted"
        if bisect.outcome != "found" or bisect.culprit is None or bisect.divergence is None:
            return f"the bisect ended with {bisect.outcome!r} instead of a commit"
        if bisect.culprit.commit != planted["commit"]:
            return f"the bisect named {bisect.culprit.commit[:10]}, but {planted['commit'][:10]} was planted"
        if bisect.divergence.step != planted["first_step"]:
            return f"the first difference is at step {bisect.divergence.step}, but {planted['first_step']} was planted"
        if bisect.divergence.phase != planted["phase"]:
            return f"the first difference is in {bisect.divergence.phase}, but {planted['phase']} was planted"
        return ""

    def to_mapping(self) -> dict[str, Any]:
        """JSON types."""
        verdict = {"right": not self.problem, "problem": self.problem, "verify": self.verification}
        return mapping_of(self, "verification", reports=[str(path) for path in self.reports], **verdict)


def prepare_folder(folder: Path) -> None:
    """An empty folder with the demo's marker; an earlier demo's content is removed.

    Raises:
        ReproError: it holds something else, or is a file.
    """
    if folder.exists() and not folder.is_dir():
        raise ReproError(f"{folder} is a file: give --out another folder")
    if folder.exists() and any(folder.iterdir()):
        if not (folder / MARKER).is_file():
            raise ReproError(f"{folder} is not empty and no earlier demo's: empty it, or give --out another folder")
        for path in folder.iterdir():
            if path.name == MARKER:
                continue  # last of all, so that a demo that is killed here can be replaced too
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / MARKER).write_text("Written by `repro demo`, which replaces this folder.\n", encoding="utf-8")


def run_demo(seed: int, folder: Path, say: Say) -> DemoResult:
    """Do the whole job in `folder`.

    Raises:
        ReproError: the folder or the machine does not serve, or a golden run was refused.
    """
    began = time.monotonic()
    folder = folder.resolve()
    prepare_folder(folder)
    root = folder / "repository"
    good, commits, digest = _hide(seed, root, folder / "answer.json")
    say(f"a history of {commits} commits after {good[:10]}; one of them lowers a precision")
    say(f"the answer is sealed in {_shown(folder)}/answer.json (sha256 {digest[:16]})")

    checkout(root, good, detach=True)
    for wrote in initialise(root, "first", str(folder / "remote")):
        say(f"wrote {wrote}")
    repository = find_checkout(root)
    case = find_case(root, _CASE)
    _, proofs = record(repository, case, Options(), say)

    checkout(root, "main")
    verification = verify(repository, case, say)
    say(f"HEAD: {verification.comparison.divergence or 'agrees with the golden run'}")

    def watch(event: Event) -> None:
        if event.text:
            say(line_of(event))

    spec = f"{good[:10]}..main"
    options = BisectOptions(explain=True)
    result = bisect_range(repository, case, commits_of(repository, case, spec, options), watch, options)
    command = f"cd {shlex.quote(_shown(root))} && repro bisect {spec} --case {_CASE}"
    reports = tuple(write_report(result, folder, command))
    answer = open_answer(folder / "answer.json", digest)
    seconds = time.monotonic() - began
    return DemoResult(
        seed, commits, len(proofs), verification, result, answer, digest, reports, command, round(seconds, 3)
    )


def _hide(seed: int, root: Path, path: Path) -> tuple[str, int, str]:
    """Write repository and sealed answer: first commit, commits after it, and the seal. The answer stays behind."""
    history = make_history(trainer_source(), seed)
    ids = write_repository(root, history.commits)
    return ids[0], len(ids) - 1, seal_answer(history.answer(ids), path)


def _shown(path: Path) -> str:
    """A path as the user would type it."""
    here = Path.cwd()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)


# -- planned commits as a git repository, by plumbing alone: no hooks, no filters, nobody's configuration


def write_repository(root: Path, commits: Sequence[Planned]) -> list[str]:
    """Make a repository with these commits, the last being ``main``.

    Args:
        root: Its folder, which must not exist.
        commits: Parents before children.

    Returns:
        The commits' ids. Equal commits give equal ids.

    Raises:
        MachineFailureError: git failed.
    """
    root.mkdir(parents=True)
    # An empty template has no hooks to copy.
    _git(root, "init", "--quiet", "--template=", "--object-format=sha1", "--initial-branch=main")
    for key, value in (("core.autocrlf", "false"), ("core.hooksPath", os.devnull), ("gc.auto", "0")):
        _git(root, "config", key, value)
    marks = root / ".git" / "demo-marks"
    stream = b"".join(_commit(number, commit) for number, commit in enumerate(commits, 1)) + b"done\n"
    _git(root, "fast-import", "--quiet", "--done", "--date-format=raw", f"--export-marks={marks}", stdin=stream)
    ids = dict(line.split() for line in marks.read_text(encoding="ascii").splitlines())
    marks.unlink()
    return [ids[f":{number}"] for number in range(1, len(commits) + 1)]


def checkout(root: Path, commit: str, *, detach: bool = False) -> None:
    """Check a commit out; untracked files stay.

    Raises:
        MachineFailureError: git failed.
    """
    _git(root, "checkout", "--quiet", *(["--detach"] if detach else []), commit)


def _commit(number: int, commit: Planned) -> bytes:
    """One commit of a fast-import stream. Its tree is the first parent's with the changes on top."""
    who = f"{commit.author[0]} <{commit.author[1]}> {commit.date} +0000"
    head = [f"commit refs/heads/main\nmark :{number}\nauthor {who}\ncommitter {who}\n".encode()]
    head.append(_data(f"{commit.subject}\n"))
    for word, parent in zip(("from", "merge"), commit.parents, strict=False):
        head.append(f"{word} :{parent + 1}\n".encode())
    for path, text in commit.changes.items():
        head += [f"M {'100755' if path.endswith('.sh') else '100644'} inline {path}\n".encode(), _data(text)]
    return b"".join(head)


def _data(text: str) -> bytes:
    raw = text.encode()
    return b"data %d\n%b\n" % (len(raw), raw)


def _git(root: Path, *arguments: str, stdin: bytes = b"") -> None:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("GIT_")}
    environment |= {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1"}
    done = subprocess.run(["git", *arguments], cwd=root, env=environment, input=stdin, capture_output=True, check=False)
    if done.returncode != 0:
        stderr = " ".join(done.stderr.decode(errors="replace").split())[:300]
        raise MachineFailureError(f"`git {arguments[0]}` failed: {stderr}")


# -- the sealed answer: written before the search begins, opened after its verdict


def seal_answer(answer: Answer, path: Path) -> str:
    """Write the answer so that no eye or grep reads it by accident; its SHA-256 is returned."""
    raw = canonical_json(asdict(answer)).encode()
    digest = hashlib.sha256(raw).hexdigest()
    sealed = {"sealed": base64.b64encode(zlib.compress(raw, 9)).decode(), "sha256": digest}
    write_atomic(path, canonical_json(sealed) + "\n")
    return digest


def open_answer(path: Path, digest: str) -> dict[str, Any]:
    """The answer's fields.

    Args:
        path: What `seal_answer` wrote.
        digest: What it returned.

    Raises:
        ReproError: the file is not the one that was sealed.
    """
    try:
        raw = zlib.decompress(base64.b64decode(json.loads(path.read_text(encoding="utf-8"))["sealed"]))
    except (OSError, ValueError, KeyError, TypeError, zlib.error):
        raw = b""
    if hashlib.sha256(raw).hexdigest() != digest:
        raise ReproError(f"{path} was changed since it was sealed: run the demo again")
    answer: dict[str, Any] = json.loads(raw)
    return answer


def result_text(result: DemoResult, folder: Path) -> Text:
    """The verdict, the opened answer beside it, and where the reports lie."""
    bisect = result.bisect
    out = Text()
    if bisect.culprit and bisect.divergence:
        d = bisect.divergence
        out.append(f"{bisect.culprit.commit[:10]}", style="bold yellow")
        out.append(f'  "{bisect.culprit.subject}"', style="bold")
        out.append("  moved the numbers\n")
        _row(out, "first at", f"step {d.step}, phase {d.phase}, signal {d.name}")
        _row(out, "by", str(d.magnitude or d.detail))
    else:
        out.append(f"no commit was named: {bisect.outcome}\n", style="bold red")
    if text := explanation(bisect):
        _row(out, "and", text)
    out.append("\n")
    _comparison(out, result)
    out.append("\n")
    _row(out, "golden run", f"{result.verification.steps} steps at {bisect.good[:10]}, {result.proofs} proofs passed")
    _row(out, "bisect", cost_line(bisect))
    for path in (*result.reports, folder / "demo.svg"):
        _row(out, "report" if path.name.startswith("report") else "picture", str(folder / path.name))
    _row(out, "reproduce", result.reproduce)
    out.append("\n")
    if result.problem:
        out.append(f"WRONG: {result.problem}", style="bold red")
    else:
        out.append(f"RIGHT: the planted commit, at the planted step, in {result.seconds:.0f} s", style="bold green")
    return out


def _comparison(out: Text, result: DemoResult) -> None:
    planted, culprit, d = result.answer, result.bisect.culprit, result.bisect.divergence
    rows = [
        ("commit", culprit.commit[:10] if culprit else "-", str(planted["commit"])[:10]),
        ("first step", str(d.step) if d else "-", str(planted["first_step"])),
        ("first phase", d.phase if d else "-", str(planted["phase"])),
    ]
    out.append(f"{'':14}{'found':14}{'sealed answer':16}\n", style="dim")
    for name, actual, wanted in rows:
        same = actual == wanted
        out.append(f"  {name:12}{actual:14}{wanted:16}")
        out.append(f"{_OK if same else _NO}\n", style="green" if same else "bold red")
    _row(out, "planted", f"{planted['kind']}, {planted['place']}")


def _row(out: Text, name: str, value: str) -> None:
    out.append(f"  {name:12}", style="dim")
    out.append(f"{value}\n")


def write_picture(text: Text, title: str, path: Path) -> None:
    """The text as a terminal's picture (SVG); equal texts give equal pictures."""
    console = Console(record=True, width=_WIDTH, file=io.StringIO(), force_terminal=True, color_system="truecolor")
    console.print(text, soft_wrap=False)
    path.write_text(console.export_svg(title=title, unique_id="repro-demo"), encoding="utf-8")
