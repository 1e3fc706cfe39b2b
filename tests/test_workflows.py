"""The workflows for GitHub as they work: every shell step run by bash in a real repository with a real `origin`."""

from __future__ import annotations

import functools
import json
import re
import shutil
import threading
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from conftest import SOURCE, Repo
from history_kit import CASE, edit, note, start
from workflow_kit import ACTION, Job, Ran, run_script

TOY = "golden/cases/toy.toml"


def script(name: str, folder: Path, scratch: Path, **variables: str) -> Ran:
    """One script of the action, run in a folder as a step."""
    return run_script(f'bash "{ACTION / name}"', folder, scratch, variables)


@dataclass
class World:
    """A trainer's repository with a bare `origin`, and the jobs that run on it."""

    folder: Path
    repo: Repo
    origin: Path
    jobs: int = 0

    def push(self, *refs: str) -> None:
        """Push branches to `origin`; main by default."""
        self.repo.git("push", "--quiet", "--force", str(self.origin), *(refs or ("main",)))

    def git(self, *arguments: str) -> str:
        """One git command in `origin`."""
        return Repo(self.origin).git(*arguments)

    def job(self, file: str, name: str, **what: Any) -> Job:
        """One job that ran, in a folder of its own."""
        self.jobs += 1
        return Job(file, name, self.folder / f"job{self.jobs}", self.origin, **what).run()

    def uncheckable(self) -> str:
        """A commit on which the case's own check says that its code cannot be tested."""
        self.repo.edit(TOY, "timeout", 'check = "{python} missing.py"\ntimeout')
        return note(self.repo, "words")

    def files(self, branch: str) -> list[str]:
        """What a branch of `origin` holds."""
        return self.git("ls-tree", "-r", "--name-only", branch).splitlines()

    def pull(self, head: str, owner: str = "owner", **what: Any) -> Job:
        """The job that reports on a pull request of a commit to main of `origin`."""
        event = {
            "number": 7,
            "base": {"sha": self.git("rev-parse", "main")},
            "head": {"sha": head, "repo": {"full_name": f"{owner}/fork"}},
            "user": {"login": "somebody"},
        }
        github = {"event_name": "pull_request", "event": {"pull_request": event}}
        report = self.job("pr.yml", "report", github=github, **what)
        comment = {"artefacts": report.artefacts, "github": github, "needs": {"report": {"outputs": report.outputs}}}
        self.comment = functools.partial(self.job, "pr.yml", "comment", **comment)
        return report


@pytest.fixture
def world(tmp_path: Path) -> World:
    """One commit that is pushed."""
    case = CASE.replace("steps = 6", "steps = 2").replace("--steps 6", "--steps 2")
    repo = start(tmp_path, case=case + "\n[observe]\nmetrics = ['loss=(?P<loss>\\S+)']\n")
    origin = tmp_path / "origin.git"
    repo.git("clone", "--quiet", "--bare", str(repo.root), str(origin))
    return World(tmp_path, repo, origin)


@pytest.fixture
def github() -> Iterator[GitHub]:
    """A server that answers as GitHub's API does, as far as one is asked."""
    with GitHub() as server:
        yield server


class GitHub(ThreadingHTTPServer):
    """Open pull requests and their comments, over HTTP."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Answer)
        self.pulls: list[dict[str, Any]] = []
        self.comments: list[dict[str, Any]] = []
        self.asked: list[str] = []

    def __enter__(self) -> GitHub:
        threading.Thread(target=self.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()
        self.server_close()

    @property
    def variables(self) -> dict[str, str]:
        """What a runner says of its server."""
        return {"GITHUB_API_URL": f"http://127.0.0.1:{self.server_address[1]}", "NO_PROXY": "127.0.0.1"}

    def open(self, number: int, sha: str, owner: str, branch: str) -> None:
        """Open a pull request."""
        head = {"sha": sha, "ref": branch, "user": {"login": owner}}
        self.pulls.append(
            {"number": number, "state": "open", "head": head, "base": {"repo": {"full_name": "owner/fork"}}}
        )


class _Answer(BaseHTTPRequestHandler):
    server: GitHub

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        query, parts = parse_qs(url.query), url.path.removeprefix("/repos/owner/fork/").split("/")
        self.server.asked.append(f"{url.path}?{url.query}")
        assert self.headers["Authorization"] == "Bearer the-token"
        if parts[0] == "pulls" and len(parts) == 1:
            heads = {f"{p['head']['user']['login']}:{p['head']['ref']}": p for p in self.server.pulls}
            self._say([heads[h] for h in query["head"] if h in heads])
        elif parts[0] == "pulls":
            (pull,) = [p for p in self.server.pulls if p["number"] == int(parts[1])]
            self._say(pull)
        elif parts[0] == "commits":  # of forks, GitHub says nothing here
            self._say(
                [p for p in self.server.pulls if p["head"]["sha"] == parts[1] and p["head"]["user"]["login"] == "owner"]
            )
        else:
            self._say(self.server.comments)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.comments.append({"id": len(self.server.comments) + 1, "path": self.path, "html_url": "x", **body})
        self._say(self.server.comments[-1], 201)

    def _say(self, answer: Any, code: int = 200) -> None:
        body = json.dumps(answer).encode()
        self.send_response(code)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


NIGHT: dict[str, Any] = {
    "inputs": {"bisect": False, "cases": "toy", "pages-branch": "gh-pages"},
    "github": {"event_name": "schedule"},
}


@pytest.mark.whole
def test_nights_are_kept_and_then_judged(world: World) -> None:
    """The first night starts both branches; the next goes on from it, survives a push in between, and fails last."""
    world.uncheckable()
    first = world.job("nightly.yml", "night", **NIGHT)
    assert first.outputs["exit-code"] in ("2", "3"), first.step("report").log
    assert first.status == ("success" if first.outputs["exit-code"] == "3" else "failure")
    (kept,) = world.files("repro-results")
    assert re.fullmatch(r"nights/[^/]+/toy/[^/]+\.json", kept)
    assert world.git("rev-list", "--count", "repro-results") == "2", "an empty commit, and the night"
    assert {"index.html", ".nojekyll", "repro-site.json"} <= set(world.files("gh-pages"))
    assert sorted(first.artefacts) == ["repro-nightly", "repro-site"]
    assert first.summary == (first.artefacts["repro-nightly"] / "report.md").read_text() and "toy" in first.summary
    tokens = {step.name for step in first.done if "the-token" in step.environment.values()}
    assert tokens == {"push", "pages"} and "the-token" not in "".join(step.log for step in first.done)

    other = Repo(world.folder / "other")
    world.repo.git("clone", "--quiet", "--branch", "repro-results", str(world.origin), str(other.root))
    world.repo.git("revert", "--no-edit", "HEAD")
    nan = edit(world.repo, "scale = 1.0", "scale = float('nan')", "Scale")
    world.push()

    def push_in_between(_: Job) -> None:
        (other.root / "nights" / "elsewhere").mkdir()
        (other.root / "nights" / "elsewhere" / "note.txt").write_text("another machine's night\n")
        other.commit("Another night")
        other.git("push", "--quiet", "origin", "repro-results")

    second = world.job("nightly.yml", "night", **NIGHT, before={"push": push_in_between})
    assert second.outputs == {"exit-code": "1", "verdict": "differs"}, second.step("report").log
    assert second.status == "failure" and second.step("verdict", -1).log == "exit code 1\n"
    assert [step.name for step in second.done if step.outcome == "failure"] == ["verdict"], "and nothing before it"
    assert "push 1 was refused" in second.step("push").log
    assert world.git("rev-parse", "repro-results~1") == other.git("rev-parse", "HEAD")
    (new,) = set(world.files("repro-results")) - {kept, "nights/elsewhere/note.txt"}
    assert json.loads(world.git("show", f"repro-results:{new}"))["commit"]["commit"] == nan
    assert {kept, "nights/elsewhere/note.txt"} < set(world.files("repro-results"))
    assert world.git("rev-list", "--count", "gh-pages") == "1"
    assert "::error title=toy" in second.step("report").log


def test_a_pull_request_of_the_repository_is_reported_and_commented(world: World, github: GitHub) -> None:
    """What cannot be judged is a warning, and a failure when strict; another job, with the token, posts that report."""
    world.repo.git("checkout", "--quiet", "-b", "topic")
    world.repo.edit(TOY, "timeout", 'env = { WORD = "1" }\ntimeout')
    head = note(world.repo, "words")
    world.push("topic")
    for strict, status in ((False, "success"), (True, "failure")):
        report = world.pull(head, inputs={"strict": strict})
        assert report.outputs == {"exit-code": "3", "verdict": "not verifiable"}, report.step("report").log
        assert report.status == status
        assert ("::warning title=repro::" in report.step("verdict").log) != strict
        assert "::warning title=toy" in report.step("report").log
        kept = (report.artefacts["repro-pr"] / "comment.md").read_text()
        assert report.summary == kept and "toy" in kept
        assert not any("the-token" in step.environment.values() for step in report.done)
    comment = world.comment(variables=github.variables)
    assert comment.status == "success", comment.step("post").log
    (posted,) = github.comments
    assert posted["path"] == "/repos/owner/fork/issues/7/comments" and posted["body"].strip() == kept.strip()


def test_a_pull_request_of_a_fork_is_commented_by_the_base(world: World, github: GitHub) -> None:
    """A fork's own run comments nothing; the base's run finds the pull request itself and posts the text alone."""
    world.repo.git("checkout", "--quiet", "-b", "topic")
    branch = "x$(touch${IFS}pwned)&state=closed"
    head = note(world.repo, "words", "README")
    world.push("topic:refs/pull/7/head")
    report = world.pull(head, owner="stranger")
    assert report.status == "success" and report.outputs == {"exit-code": "0", "verdict": "agrees"}
    assert report.summary and world.comment().status == "skipped"
    (report.artefacts["repro-pr"] / "number").write_text("1")  # a fork may write what it likes
    run = {
        "event": "pull_request", "id": 5, "head_sha": head, "head_branch": branch, "pull_requests": [],
        "head_repository": {"full_name": "stranger/fork", "owner": {"login": "stranger"}},
        "actor": {"login": "stranger"},
    }  # fmt: skip

    def comment(**more: Any) -> Job:
        what = {"event_name": "workflow_run", "event": {"workflow_run": run | more}}
        return world.job(
            "pr-comment.yml", "comment", github=what, artefacts=report.artefacts, variables=github.variables
        )

    nobody = comment()
    assert nobody.status == "success" and nobody.step("post").outcome == "skipped", "no such pull request"
    github.open(6, "0" * 40, "stranger", "old")
    github.open(7, head, "stranger", branch)
    assert comment().status == "success"
    (posted,) = github.comments
    assert posted["path"] == "/repos/owner/fork/issues/7/comments"
    assert posted["body"].strip() == (report.artefacts["repro-pr"] / "comment.md").read_text().strip()
    assert not list(world.folder.rglob("pwned")) and any("%24%28touch" in url for url in github.asked)
    assert comment(head_sha="1" * 40).step("post").outcome == "skipped", "the branch has moved on"
    assert comment(event="push").status == comment(head_repository={"full_name": "owner/fork"}).status == "skipped"
    github.open(8, head, "owner", "copy")
    assert comment().step("post").outcome == "skipped", "two pull requests with one commit"
    assert len(github.comments) == 1


def test_errors_fail_and_are_still_summed_up(world: World) -> None:
    """A case that does not exist, a commit that is not there, an unknown mode: exit code 2, and the log says why."""
    report = world.pull(world.git("rev-parse", "main"), inputs={"cases": "none $(touch pwned) *"})
    assert report.status == "failure" and report.outputs == {"exit-code": "2", "verdict": "error"}
    assert "no case 'none'" in report.step("report").log and "no report was written" in report.summary
    assert not list(world.folder.rglob("pwned"))
    given = {"CHECKOUT": ".", "BASE": "--output=x", "HEAD": "HEAD"}
    for mode, message in (("pr", "no such commit"), ("day", "mode is pr or nightly")):
        ran = script("report.sh", world.repo.root, world.folder / mode, MODE=mode, **given)
        assert ran.code == 2 and f"::error title=repro::{message}" in ran.log and not (world.repo.root / "x").exists()


@pytest.mark.parametrize(
    ("code", "strict", "ends"),
    [
        ("0", "", 0),
        ("1", "", 1),
        ("2", "", 2),
        ("3", "", 0),
        ("3", "false", 0),
        ("3", "true", 3),
        ("137", "", 137),
        ("", "", 2),
    ],
)
def test_the_exit_code_is_passed_on(code: str, strict: str, ends: int, tmp_path: Path) -> None:
    """Every exit code is the job's, but for 3, which is a warning unless `strict`; none at all is an error."""
    ran = script("verdict.sh", tmp_path, tmp_path / "scratch", EXIT_CODE=code, STRICT=strict)
    assert ran.code == ends and ("::warning" in ran.log) == (code == "3" and ends == 0)


def test_a_long_report_is_cut_and_a_break_is_no_answer(world: World) -> None:
    """Of more than GitHub's 1 MiB of summary whole lines stay; 1 without a report is Python's own break, an error."""
    folder = world.folder / "bin"
    folder.mkdir()
    tool = folder / "repro"  # leaves what a very long report would be, or breaks

    def report(program: str) -> Ran:
        tool.write_text(f"#!/bin/bash\n{program}\n")
        tool.chmod(0o755)
        variables = {"MODE": "pr", "BASE": "main", "HEAD": "main", "CHECKOUT": ".", "PATH": f"{folder}:/usr/bin:/bin"}
        return script("report.sh", world.repo.root, world.folder, **variables)

    ran = report("yes 'ü, a line of a report' | head -c 3000000 >\"$4/comment.md\"; exit 1")
    assert ran.code == 0 and ran.outputs["exit-code"] == "1" and 999_000 < len(ran.summary.encode()) < 2**20
    lines = ran.summary.splitlines()
    assert set(lines[:-3]) == {"ü, a line of a report"} and lines[-1] == "Cut here: the whole is in the artefact."
    ran = report("exit 1")
    assert ran.code == 0 and ran.outputs["exit-code"] == "2" and "no report was written" in ran.summary


def test_branches_of_code_are_never_written(world: World) -> None:
    """A branch of code given as that of results or of the page is refused and stays as it was."""
    before = world.git("for-each-ref")
    (world.folder / "work").mkdir()
    world.repo.git("clone", "--quiet", str(world.origin), str(world.folder / "work" / "code"))
    given = {"CHECKOUT": "code", "RESULTS": "results", "SITE": "site", "TOKEN": ""}
    (world.folder / "work" / "site").mkdir()
    for name, branch in (("restore.sh", "main"), ("pages.sh", "main"), ("restore.sh", "--x"), ("pages.sh", "a..b")):
        ran = script(name, world.folder / "work", world.folder, BRANCH=branch, **given)
        assert ran.code != 0 and ("::error title=repro::" in ran.log or "not a valid branch name" in ran.log), ran.log
    assert world.git("for-each-ref") == before


@pytest.mark.parametrize("spoil", ["long", "wide", "bytes", "link", "folder", "missing", "number"])
def test_an_artefact_is_text_of_limited_size_or_nothing(spoil: str, tmp_path: Path) -> None:
    """What is no plain file of UTF-8 with at most 65,536 characters is refused before anything reads it."""
    (tmp_path / "artefact").mkdir()
    file = tmp_path / "artefact" / "comment.md"
    content = {"long": b"x" * 65_537, "wide": "ü".encode() * 65_537, "bytes": b"\xff\xfe", "number": b"x"}
    if spoil in content:
        file.write_bytes(content[spoil])
    elif spoil == "link":
        (tmp_path / "secret").write_text("of the runner")
        file.symlink_to(tmp_path / "secret")
    elif spoil == "folder":
        file.mkdir()
    number = "7; touch pwned" if spoil == "number" else "7"
    ran = script("post.sh", tmp_path, tmp_path / "scratch", FOLDER="artefact", NUMBER=number, GITHUB_REPOSITORY="o/r")
    assert ran.code == 2 and "not posted" in ran.log and not (tmp_path / "pwned").exists()


@pytest.mark.whole
def test_golden_runs_are_pulled_or_missed_with_a_warning(tmp_path: Path) -> None:
    """With a remote they are there afterwards; without one, or where it fails, the job goes on and says so."""
    repo = Repo(tmp_path / "repo")
    shutil.copytree(SOURCE / "golden", repo.root / "golden", ignore=shutil.ignore_patterns("repro_golden", "tiny-grpo"))
    repo.git("init", "--quiet")
    assert script("pull.sh", repo.root, tmp_path / "a", CHECKOUT=".").log == "no golden runs to pull\n"
    repo.commit("Golden runs")
    ran = script("pull.sh", repo.root, tmp_path / "b", CHECKOUT=".")
    assert ran.code == 0 and "::warning title=repro::there are golden runs, but no DVC remote" in ran.log
    shutil.copytree(SOURCE / ".dvc", repo.root / ".dvc", ignore=shutil.ignore_patterns("cache", "tmp", "config.local"))
    ran = script("pull.sh", repo.root, tmp_path / "c", CHECKOUT=".", REMOTE_ENVIRONMENT="\nA_KEY=a=b c\r\n")
    assert ran.code == 0 and "pointers:" in ran.log and "::add-mask::a=b c\n" in ran.log
    assert list(repo.root.glob("golden/rollouts/tiny-grpo/*"))
    shutil.rmtree(repo.root / "golden" / "rollouts" / "tiny-grpo")
    shutil.rmtree(repo.root / "golden" / "remote")
    shutil.rmtree(repo.root / ".dvc" / "cache", ignore_errors=True)
    ran = script("pull.sh", repo.root, tmp_path / "d", CHECKOUT=".")
    assert ran.code == 0 and "::warning title=repro::golden runs were not pulled" in ran.log
    ran = script("pull.sh", repo.root, tmp_path / "e", CHECKOUT=".", REMOTE_ENVIRONMENT="the secret alone")
    assert ran.code == 2 and "secret alone" not in ran.log


@pytest.mark.whole
def test_repro_is_installed_into_an_environment_of_its_own(tmp_path: Path) -> None:
    """The trainer's setup runs, then one pip installs what was asked for, and later steps find it on PATH."""
    wheel = tmp_path / "repro_harness-9-py3-none-any.whl"
    info = "repro_harness-9.dist-info"
    files = {
        "repro_small.py": "def main():\n    print('repro, version 9')\n",
        f"{info}/METADATA": "Metadata-Version: 2.1\nName: repro-harness\nVersion: 9\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/entry_points.txt": "[console_scripts]\nrepro = repro_small:main\n",
    }
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
        archive.writestr(f"{info}/RECORD", "".join(f"{name},,\n" for name in [*files, f"{info}/RECORD"]))
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "requirements.txt").write_text("# nothing\n")
    ran = script(
        "install.sh", tmp_path, tmp_path / "scratch", CHECKOUT="code", PYTHON_VERSION="3.11",
        INSTALL=f"--no-index --find-links {tmp_path} repro-harness", REQUIREMENTS="requirements.txt",
        SETUP="echo \"$PIP_EXTRA_INDEX_URL\" >prepared; touch 'a b'", TORCH_INDEX="https://index.invalid",
    )  # fmt: skip
    assert ran.code == 0 and "repro, version 9" in ran.log, ran.log
    assert (tmp_path / "code" / "prepared").read_text() == "https://index.invalid\n" and (
        tmp_path / "code" / "a b"
    ).exists()
    path = (tmp_path / "scratch" / "files" / "GITHUB_PATH").read_text().strip()
    assert path == str(tmp_path / "scratch" / "temp" / "repro-venv" / "bin") and (Path(path) / "repro").exists()
