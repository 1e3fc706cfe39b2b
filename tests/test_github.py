"""The one comment of a pull request, against a server that answers as GitHub's REST API does; and a job's marks."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
import warm_kit
from conftest import environment

from repro.pulls.github import PullComments, annotation
from repro.pulls.github_pull import Pull, find_pull, find_token
from repro_golden.base.errors import ReproError

PULL = Pull("o/r", 7)
MARKER = "<!-- repro report pr: default -->"
BODY = f"{MARKER}\n\n**numbers moved** ü\n"


class GitHub(BaseHTTPRequestHandler):
    """The calls on comments of one repository's pull requests, as GitHub documents them."""

    TOKEN = "ghs_0123456789secret"  # noqa: S105 (of the server below)
    server: Server

    def _answer(self, status: int, data: Any, **headers: str) -> None:
        raw = data if isinstance(data, bytes) else json.dumps(data).encode()
        self.send_response(status)
        for name, value in ({"Content-Type": "application/json", "Content-Length": str(len(raw))} | headers).items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(raw)

    def _handle(self) -> None:
        served, url = self.server, urlsplit(self.path)
        served.calls.append((self.command, self.path))
        raw = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if served.failures:
            failure = served.failures.pop(0)
            if failure.get("late"):
                self._create(raw)  # the work is done, the answer is lost
            if failure["status"] == 0:
                self.close_connection = True
                return
            self._answer(failure["status"], failure.get("data", {"message": "Oops"}), **failure.get("headers", {}))
            return
        if self.headers.get("Authorization") != f"Bearer {GitHub.TOKEN}":
            self._answer(401, {"message": "Bad credentials"})
        elif url.path == "/repos/o/r/issues/7/comments" and self.command == "GET":
            self._list(url.query)
        elif served.read_only:
            self._answer(403, {"message": "Resource not accessible by integration"})
        elif url.path == "/repos/o/r/issues/7/comments" and self.command == "POST":
            self._answer(201, self._create(raw))
        elif (match := re.fullmatch(r"/repos/o/r/issues/comments/(\d+)", url.path)) and self.command == "PATCH":
            comment = next(c for c in served.comments if c["id"] == int(match[1]))
            comment["body"] = json.loads(raw)["body"]
            self._answer(200, comment)
        else:
            self._answer(404, {"message": "Not Found"})

    def _create(self, raw: bytes) -> dict[str, Any]:
        number = len(self.server.comments) + 1
        made = {"id": number, "body": json.loads(raw)["body"],
                "html_url": f"https://github.com/o/r/pull/7#issuecomment-{number}"}  # fmt: skip
        self.server.comments.append(made)
        return made

    def _list(self, query: str) -> None:
        asked = {k: int(v[0]) for k, v in parse_qs(query).items()}
        page, size = asked.get("page", 1), min(asked.get("per_page", 30), 100)
        left = len(self.server.comments) > page * size
        where = self.server.elsewhere or self.server.url
        link = f'<{where}/repos/o/r/issues/7/comments?per_page={size}&page={page + 1}>; rel="next"'
        headers = {"Link": link} if left and self.server.links else {}
        bot = {"user": {"login": "github-actions[bot]", "type": "Bot"}, "author_association": "NONE"}
        self._answer(200, [bot | c for c in self.server.comments[(page - 1) * size : page * size]], **headers)

    do_GET = do_POST = do_PATCH = _handle  # noqa: N815 (the names that http.server looks for)

    def log_message(self, *_: Any) -> None:
        """Say nothing."""


class Server(ThreadingHTTPServer):
    """The comments of o/r#7, and how the next calls fail."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), GitHub)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        self.comments: list[dict[str, Any]] = []
        self.failures: list[dict[str, Any]] = []
        self.calls: list[tuple[str, str]] = []
        self.read_only, self.links, self.elsewhere = False, True, ""

    def write(self, body: str = BODY, *, token: str = GitHub.TOKEN, pull: Pull = PULL) -> Any:
        """Write a comment there."""
        return PullComments(pull, token, self.url, pause=0.01).write(MARKER, body)


@contextmanager
def github() -> Iterator[Server]:
    """A server on a free port."""
    with Server() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture
def served() -> Iterator[Server]:
    """GitHub."""
    with github() as server:
        yield server


@pytest.fixture(autouse=True)
def _no_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test sees the job that it runs in."""
    for name in ("GITHUB_TOKEN", "GH_TOKEN", "GITHUB_REPOSITORY", "GITHUB_EVENT_PATH", "GITHUB_REF", "GITHUB_ACTIONS",
                 "GITHUB_API_URL", "GITHUB_SERVER_URL"):  # fmt: skip
        monkeypatch.delenv(name, raising=False)


def problem(served: Server, **how: Any) -> str:
    """The line that a post fails with."""
    with pytest.raises(ReproError) as raised:
        served.write(**how)
    text = str(raised.value)
    assert "\n" not in text and GitHub.TOKEN not in text
    return text


def test_one_comment_is_posted_and_then_written_anew(served: Server) -> None:
    """The first call posts, later ones change that comment; those of others that quote the marker stay."""
    served.comments += [{"id": 1, "body": f"> {MARKER}"}, {"id": 2, "body": None}, {"id": 3, "body": f" {BODY}"}]
    first = served.write()
    assert (first.created, first.url) == (True, "https://github.com/o/r/pull/7#issuecomment-4")
    second = served.write(BODY + "more\n")
    assert (second.created, second.url) == (False, first.url)
    assert [c["body"] for c in served.comments[3:]] == [BODY + "more\n"] and served.comments[0]["body"] == f"> {MARKER}"
    gpu = "<!-- repro report pr: gpu -->"
    other = PullComments(PULL, GitHub.TOKEN, served.url + "/").write(gpu, gpu)
    assert other.created, "another key is another comment"


@pytest.mark.parametrize("links", [True, False])
def test_every_page_is_read(served: Server, links: bool) -> None:
    """The comment is found behind 250 others, by Link headers and, where a proxy drops these, by page numbers."""
    served.links = links
    served.comments += [{"id": n, "body": f"talk {n}"} for n in range(1, 251)]
    served.comments.append({"id": 251, "body": BODY, "html_url": "x"})
    assert not served.write(BODY + "new").created
    assert [method for method, _ in served.calls] == ["GET", "GET", "GET", "PATCH"]
    assert len(served.comments) == 251 and served.comments[-1]["body"] == BODY + "new"


def test_the_token_goes_nowhere_else(served: Server) -> None:
    """A link to another host is not followed, and a token is in no message even where the server repeats it."""
    with github() as other:
        served.elsewhere = other.url
        served.comments += [{"id": n, "body": "talk"} for n in range(1, 151)]
        assert "does not answer as GitHub does" in problem(served)
        assert other.calls == []
    served.failures = [{"status": 422, "data": {"message": f"bad\n{GitHub.TOKEN}\x1b"}}]
    assert "422 bad ***" in problem(served)
    assert GitHub.TOKEN not in repr(PullComments(Pull("o/r", 7), GitHub.TOKEN))


def test_the_token_is_ours_whatever_netrc_says(served: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A login of ~/.netrc for the same host does not replace the token."""
    (tmp_path / "netrc").write_text("machine 127.0.0.1 login a password b\n")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    assert served.write().created


def test_refusals_name_the_cure(served: Server) -> None:
    """401, 403 of a fork, 404, 422, a rate limit, a moved repository and nonsense are one line each."""
    assert "does not accept the token (401 Bad credentials): set GITHUB_TOKEN" in problem(served, token="wr" + "ong")
    assert "no pull request o/x#7 (404 Not Found): check --repo" in problem(served, pull=Pull("o/x", 7))
    served.read_only = True
    text = problem(served)
    assert "403 Resource not accessible by integration" in text and "fork" in text and "workflow_run" in text
    assert "`repro report post comment.md --pr NUMBER`" in text
    served.failures = [{"status": 422, "data": {"message": "Validation Failed"}}]
    assert "does not take the comment on o/r#7 (422 Validation Failed)" in problem(served)
    served.failures = [{"status": 403, "headers": {"X_RateLimit_Remaining": "0"}}]
    assert "takes no more calls" in problem(served)
    for data in ({"message": "no list"}, [{"body": BODY}], b"<html>"):
        served.failures = [{"status": 200, "data": data}]
        assert "does not answer as GitHub does: check GITHUB_API_URL" in problem(served)
    served.read_only = False
    served.failures = [{"status": 200, "data": []}, {"status": 307, "headers": {"Location": "/elsewhere"}}]
    assert "has moved" in problem(served), "a POST that is redirected would become a GET"
    assert "GitHub takes 65536" in problem(served, body=BODY + "x" * 65_536)
    assert served.comments == []


def test_failures_of_the_moment_are_tried_again(served: Server) -> None:
    """5xx, 429 and lost connections are tried again; a comment whose answer was lost is not posted twice."""
    served.failures = [{"status": 502}, {"status": 429, "headers": {"Retry_After": "0"}}, {"status": 0}]
    assert served.write().created and len(served.calls) == 5
    served.failures = [{"status": 200, "data": served.comments}, {"status": 503}]
    assert not served.write().created
    served.comments.clear()
    for lost in ({"status": 502, "late": True}, {"status": 0, "late": True}):
        served.comments.clear()
        served.failures = [{"status": 200, "data": []}, lost]
        assert not served.write(BODY + "again").created, "it was found instead"
        assert [c["body"] for c in served.comments] == [BODY + "again"]
    served.failures = [{"status": 500}] * 20
    assert "GitHub failed" in problem(served) and len(served.failures) > 10
    served.failures = [{"status": 200, "data": []}, {"status": 500}] * 3
    assert "GitHub failed" in problem(served) and served.failures == []


def test_no_network_is_one_line() -> None:
    """A server that is not there, or no address at all, is one line that names what to check."""
    with github() as server:
        url = server.url
    with pytest.raises(ReproError, match=r"GitHub \(127.0.0.1:\d+\) cannot be reached \(ConnectionError\): check"):
        PullComments(Pull("o/r", 7), "t", url, pause=0.001).write(MARKER, BODY)
    with pytest.raises(ReproError, match="GITHUB_API_URL is 'ftp:x'"):
        PullComments(Pull("o/r", 7), "t", "ftp:x").write(MARKER, BODY)


def test_the_pull_request_is_what_the_job_is_about(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Flags come first, then the job's event, then its ref; the repository may be that of the remote origin."""
    with pytest.raises(ReproError, match="--repo OWNER/NAME"):
        find_pull(tmp_path, None, 3)
    monkeypatch.setenv("GITHUB_REPOSITORY", "o/r")
    with pytest.raises(ReproError, match="--pr NUMBER"):
        find_pull(tmp_path, None, None)
    monkeypatch.setenv("GITHUB_REF", "refs/heads/7")
    with pytest.raises(ReproError, match="--pr NUMBER"):
        find_pull(tmp_path, None, None)
    monkeypatch.setenv("GITHUB_REF", "refs/pull/7/merge")
    assert find_pull(tmp_path, None, None) == Pull("o/r", 7)
    event = tmp_path / "event.json"
    monkeypatch.setenv("GITHUB_EVENT_PATH", str(event))
    for text, number in (("{", 7), ("[]", 7), ('{"pull_request": {"number": 8}}', 8), ('{"issue": {"number": 9}}', 9),
                         ('{"pull_request": {"number": "8"}}', 7)):  # fmt: skip
        event.write_text(text)
        assert find_pull(tmp_path, None, None).number == number
    assert find_pull(tmp_path, "a/b", 1) == Pull("a/b", 1)
    for name in ("a", "a/b/c", "a/..", "a/b c", "../x"):
        with pytest.raises(ReproError, match="OWNER/NAME"):
            find_pull(tmp_path, name, 1)


@pytest.mark.parametrize(("url", "name"), [
    ("git@github.com:o/r.git", "o/r"), ("https://github.com/o/r", "o/r"), ("https://t0ken@github.com/o/r.git/", "o/r"),
    ("ssh://git@github.com:22/o/r.git", "o/r"), ("https://gitlab.com/o/r.git", None), ("/srv/github.com/o/r", None),
    ("https://evil.example/github.com/o/r", None),
])  # fmt: skip
def test_the_remote_is_used_where_it_is_githubs(tmp_path: Path, url: str, name: str | None) -> None:
    """The remote's address gives the repository in every form that GitHub hands out, and no other host's does."""
    for command in (["init", "-q"], ["remote", "add", "origin", url]):
        subprocess.run(["git", *command], cwd=tmp_path, check=True, env=environment())
    if name:
        assert find_pull(tmp_path, None, 1) == Pull(name, 1)
    else:
        with pytest.raises(ReproError, match="--repo"):
            find_pull(tmp_path, None, 1)


@pytest.mark.skipif(shutil.which("gh") is None, reason="GitHub's command line, gh, is not installed")
def test_the_token_that_gh_is_logged_in_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a variable it is gh's own; where gh is logged in nowhere there is none, and a variable comes first."""
    monkeypatch.setenv("GH_CONFIG_DIR", str(tmp_path))
    with pytest.raises(ReproError, match="gh auth login"):
        find_token()
    (tmp_path / "hosts.yml").write_text("github.com:\n    user: x\n    oauth_token: gho_x\n    git_protocol: https\n")
    assert find_token() == "gho_x"
    monkeypatch.setenv("GH_TOKEN", "second")
    assert find_token() == "second"


def test_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """GITHUB_TOKEN, then GH_TOKEN; none, or one that no header can hold, is one line."""
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ReproError, match="set GITHUB_TOKEN"):
        find_token()
    monkeypatch.setenv("GH_TOKEN", "second\n")
    assert find_token() == "second"
    monkeypatch.setenv("GITHUB_TOKEN", "se cret\nx")
    with pytest.raises(ReproError, match="spaces or line breaks") as raised:
        find_token()
    assert "se cret" not in str(raised.value)


def test_marks_of_a_job(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """In a GitHub job one line on stderr that no text can break out of; elsewhere nothing."""
    annotation("error", "t", "x")
    assert capsys.readouterr() == ("", "")
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    annotation("warning", "a,b: 5%\n", "50% of\r\n::error::x, y: z")
    out, err = capsys.readouterr()
    assert out == "" and err == "::warning title=a%2Cb%3A 5%25%0A::50%25 of%0D%0A::error::x, y: z\n"


def post(folder: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """The command, outside any repository."""
    clear = {k: v for k, v in environment().items() if not k.startswith(("GITHUB_", "GH_"))}
    return warm_kit.run([sys.executable, "-m", "repro", "report", "post", *arguments], folder, clear | variables)


def test_a_comment_that_was_written_before_is_posted(served: Server, tmp_path: Path) -> None:
    """`repro report post FILE` posts and then updates, without a repository at hand, and refuses any other file."""
    file = tmp_path / "comment.md"
    file.write_text(BODY)
    job = {"GITHUB_TOKEN": GitHub.TOKEN, "GITHUB_API_URL": served.url, "GITHUB_REPOSITORY": "o/r"}
    done = post(tmp_path, "comment.md", "--pr", "7", **job)
    assert (done.returncode, done.stdout) == (0, "posted: https://github.com/o/r/pull/7#issuecomment-1\n"), done.stderr
    file.write_text(BODY + "more\n")
    done = post(tmp_path, "comment.md", "--pr", "7", "--repo", "o/r", "--json", **job)
    assert json.loads(done.stdout) == {
        "comment": "https://github.com/o/r/pull/7#issuecomment-1", "created": False, "pr": 7, "repository": "o/r",
    }  # fmt: skip
    assert [c["body"] for c in served.comments] == [BODY + "more\n"]
    file.write_bytes(b"words\xff")
    (tmp_path / "other.md").write_text("words")
    for name, words in (("comment.md", "not UTF-8"), ("none.md", "cannot read"), ("other.md", "does not begin as")):
        done = post(tmp_path, name, "--pr", "7", **job)
        assert done.returncode == 2 and words in done.stderr and len(done.stderr.splitlines()) == 1
    assert len(served.comments) == 1


def test_a_strangers_comment_is_left_alone() -> None:
    """Who copies the marker into a comment of their own gets no report under their name; a maintainer's is kept up."""
    stranger = {"id": 1, "body": BODY, "user": {"login": "x", "type": "User"}, "author_association": "CONTRIBUTOR"}
    with github() as served:
        served.comments.append(dict(stranger))
        assert served.write(BODY + "first").created and not served.write(BODY + "second").created
        assert served.comments[0] == stranger and served.comments[1]["body"] == BODY + "second"
        served.comments[:] = [dict(stranger), stranger | {"id": 2, "author_association": "MEMBER"}]
        assert not served.write(BODY + "third").created and served.comments[1]["body"] == BODY + "third"
