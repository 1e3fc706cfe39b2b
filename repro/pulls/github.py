"""GitHub: one comment of a pull request that is written anew, never a second time; and lines that a job is marked with.

Nothing else of GitHub is touched, no comment of somebody else is changed, and the token is in no message.
"""

from __future__ import annotations

import os
import re
import time
from dataclasses import dataclass, field
from typing import Any, Literal
from urllib.parse import urlsplit

from repro.console import command
from repro.pulls.github_pull import Pull
from repro.report.pieces import clean, cut
from repro_golden.base.errors import ReproError

__all__ = ["Posted", "PullComments", "annotation"]

API = "https://api.github.com"
LARGEST = 65_536
"""Characters of a comment at most."""
_PAGE, _TRIES = 100, 3
_TIMEOUT = (10, 30)
"""Seconds to connect, and between two bytes of an answer."""
_LONGEST_WAIT = 60
"""Seconds that GitHub may ask to wait before a call is tried again."""
_FORK = (
    "a pull request from a fork gets a token that can only read: keep the comment as an artifact and post it from a "
    "workflow_run job with `repro report post comment.md --pr NUMBER`; else give the job `pull-requests: write`"
)


def annotation(level: Literal["error", "warning", "notice"], title: str, text: str) -> None:
    """Mark a GitHub job with one line, where this is one; elsewhere nothing.

    It goes to stderr, which GitHub reads too, so that stdout stays what was asked for.

    Args:
        level: How bad it is.
        title: A few words.
        text: What happened.
    """
    if os.environ.get("GITHUB_ACTIONS") != "true":
        return
    data = text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")
    name = title.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A").replace(":", "%3A").replace(",", "%2C")
    command(f"::{level} title={name}::{data}")


@dataclass(frozen=True)
class Posted:
    """A comment on GitHub.

    Attributes:
        url: Its page.
        created: Whether it is new; else one that was there says something else now.
    """

    url: str
    created: bool


class _AgainError(ReproError):
    """A comment that may or may not have been posted."""


def _trusted(comment: dict[str, Any]) -> bool:
    """Whether a comment is a bot's, as those of jobs are, or of somebody who may write to the repository."""
    user = comment.get("user")
    bot = isinstance(user, dict) and user.get("type") == "Bot"
    return bot or comment.get("author_association") in ("OWNER", "MEMBER", "COLLABORATOR")


@dataclass(frozen=True)
class PullComments:
    """The comments of a pull request.

    Attributes:
        pull: The pull request.
        token: What it is written with.
        api: Where GitHub's REST API is.
        pause: Seconds before a second try; each further one waits twice as long.
    """

    pull: Pull
    token: str = field(repr=False)
    api: str = field(default_factory=lambda: os.environ.get("GITHUB_API_URL") or API)
    pause: float = 1.0

    def write(self, marker: str, body: str) -> Posted:
        """Write the comment that starts with a marker: anew where it is there already, else for the first time.

        Args:
            marker: The line that it is found by, which `body` starts with.
            body: Markdown.

        Raises:
            ReproError: GitHub does not take it, or cannot be reached.
        """
        if len(body) > LARGEST:
            raise ReproError(f"the comment has {len(body)} characters, GitHub takes {LARGEST}: shorten it")
        if not re.match(r"https?://[^/]", self.api):
            raise ReproError(f"GITHUB_API_URL is {clean(self.api)!r}: set it to an address such as {API}")
        with self._session() as session:
            for attempt in range(_TRIES):
                if attempt:
                    time.sleep(self.pause * 2 ** (attempt - 1))
                number = self._find(session, marker)
                try:
                    return self._write(session, number, body)
                except _AgainError:
                    # the answer was lost, the comment perhaps not: it is looked for before it is posted again
                    if attempt == _TRIES - 1:
                        raise
        raise AssertionError("the last try returns or raises")

    def _session(self) -> Any:
        import requests
        from requests.adapters import HTTPAdapter
        from urllib3.util import Retry

        class Patient(Retry):
            """Waits as long as GitHub asks, within reason."""

            def get_retry_after(self, response: Any) -> float | None:
                asked = super().get_retry_after(response)
                return None if asked is None else min(asked, _LONGEST_WAIT)

        session = requests.Session()
        retries = Patient(
            total=_TRIES, backoff_factor=self.pause, status_forcelist=(429, 500, 502, 503, 504),
            allowed_methods=("GET", "PATCH"), raise_on_status=False,
        )  # fmt: skip
        for scheme in ("https://", "http://"):
            session.mount(scheme, HTTPAdapter(max_retries=retries))
        session.headers.update(
            {"Accept": "application/vnd.github+json", "X-GitHub-Api-Version": "2022-11-28", "User-Agent": "repro"}
        )
        # as a function, because requests prefers what ~/.netrc says to a header
        session.auth = self._authorized
        return session

    def _authorized(self, request: Any) -> Any:
        request.headers["Authorization"] = f"Bearer {self.token}"
        return request

    def _find(self, session: Any, marker: str) -> int | None:
        """The id of the oldest comment that starts with the marker and is no stranger's: anybody can write the line."""
        first = f"{self.api.rstrip('/')}/repos/{self.pull.repository}/issues/{self.pull.number}/comments"
        url, page, seen = f"{first}?per_page={_PAGE}&page=1", 1, set[str]()
        while url not in seen:
            seen.add(url)
            response = self._call(session, "GET", url)
            comments = self._json(response)
            if not isinstance(comments, list):
                raise self._strange()
            for comment in comments:
                if not isinstance(comment, dict) or type(comment.get("id")) is not int:
                    raise self._strange()
                if str(comment.get("body") or "").startswith(marker) and _trusted(comment):
                    return int(comment["id"])
            page += 1
            following = response.links.get("next", {}).get("url", "")
            if not following and len(comments) == _PAGE and "link" not in response.headers:
                following = f"{first}?per_page={_PAGE}&page={page}"  # a proxy may drop the header
            if not following:
                return None
            if urlsplit(following)[:2] != urlsplit(self.api)[:2]:  # the token goes nowhere else
                raise self._strange()
            url = following
        return None

    def _write(self, session: Any, number: int | None, body: str) -> Posted:
        base = f"{self.api.rstrip('/')}/repos/{self.pull.repository}/issues"
        if number is None:
            response = self._call(session, "POST", f"{base}/{self.pull.number}/comments", {"body": body})
        else:
            response = self._call(session, "PATCH", f"{base}/comments/{number}", {"body": body})
        answer = self._json(response)
        if not isinstance(answer, dict):
            raise self._strange()
        return Posted(clean(str(answer.get("html_url") or "")), number is None)

    def _call(self, session: Any, method: str, url: str, data: dict[str, str] | None = None) -> Any:
        """One call; whatever goes wrong is one line."""
        import requests

        again = _AgainError if method == "POST" else ReproError
        try:
            response = session.request(method, url, json=data, timeout=_TIMEOUT, allow_redirects=method == "GET")
        except requests.RequestException as error:
            host, why = urlsplit(self.api).netloc.rpartition("@")[2], type(error).__name__
            raise again(
                f"GitHub ({host}) cannot be reached ({why}): check the network, or GITHUB_API_URL, and post again"
            ) from None
        status = int(response.status_code)
        if 200 <= status < 300:
            return response
        raise (again if status == 429 or status >= 500 else ReproError)(self._refusal(response, status))

    def _refusal(self, response: Any, status: int) -> str:
        """Why GitHub did not do it, and what helps."""
        try:
            message = str(response.json().get("message", ""))
        except (ValueError, AttributeError):
            message = ""
        answer = cut(clean(message), 200).replace(self.token, "***")
        answer = f"{status} {answer}".rstrip()
        if status == 429 or response.headers.get("x-ratelimit-remaining") == "0" or "rate limit" in answer.lower():
            return f"GitHub takes no more calls for now ({answer}): wait, and post again"
        if status == 401:
            return f"GitHub does not accept the token ({answer}): set GITHUB_TOKEN to a valid one"
        if status == 403:
            return f"the token may not comment on {self.pull} ({answer}): {_FORK}"
        if status in (404, 410):
            return f"GitHub shows no pull request {self.pull} ({answer}): check --repo, --pr and the token's rights"
        if status == 422:
            return f"GitHub does not take the comment on {self.pull} ({answer}): check the file"
        if status >= 500:
            return f"GitHub failed {_TRIES} times or more ({answer}): post again later"
        if 300 <= status < 400:
            return f"{self.pull.repository} has moved ({answer}): give its new name with --repo"
        return f"GitHub refused the comment on {self.pull} ({answer}): check --repo and --pr"

    def _json(self, response: Any) -> Any:
        try:
            return response.json()
        except ValueError:
            raise self._strange() from None

    def _strange(self) -> ReproError:
        host = urlsplit(self.api).netloc.rpartition("@")[2]
        return ReproError(f"{host} does not answer as GitHub does: check GITHUB_API_URL")
