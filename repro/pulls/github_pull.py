"""Which pull request a command is about, what its comment there is found by, and the token that it is written with."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from repro.report.pieces import clean
from repro_golden.base.credentials import unreadable
from repro_golden.base.errors import ReproError
from repro_golden.repository.git import Git, GitFailedError

__all__ = ["MARKER", "Pull", "find_pull", "find_token", "marker", "marker_of"]

MARKER = re.compile(r"<!-- repro report pr: ([A-Za-z0-9][A-Za-z0-9._/-]{0,63}) -->")
"""The first line of every comment: by it the comment is found and written anew, not posted again."""


def marker(key: str) -> str:
    """The first line of the comments of one workflow.

    Raises:
        ReproError: the key would not stay hidden.
    """
    line = f"<!-- repro report pr: {key} -->"
    if not MARKER.fullmatch(line) or "--" in key:
        raise ReproError(f"--key {key!r} does not serve: write letters, digits and single . _ / - (at most 64)")
    return line


def marker_of(text: str) -> str | None:
    """The marker that a comment starts with; None where it starts with none."""
    match = MARKER.match(text)
    return match[0] if match else None


@dataclass(frozen=True)
class Pull:
    """A pull request.

    Attributes:
        repository: ``OWNER/NAME``.
        number: Its number.
    """

    repository: str
    number: int

    def __str__(self) -> str:
        return f"{self.repository}#{self.number}"


def find_pull(folder: Path, repository: str | None, number: int | None) -> Pull:
    """The pull request that is meant: what was given, else what the GitHub job is about, else the remote ``origin``.

    Args:
        folder: Where the command runs.
        repository: ``OWNER/NAME``, where it was given.
        number: Where it was given.

    Raises:
        ReproError: it cannot be told, with the flag that tells it.
    """
    name = repository or os.environ.get("GITHUB_REPOSITORY") or _of_remote(folder)
    if not name:
        raise ReproError("no GitHub repository is known here: name it with --repo OWNER/NAME")
    if not re.fullmatch(r"[A-Za-z0-9_.-]+/[A-Za-z0-9_.-]+", name) or ".." in name:
        raise ReproError(f"{clean(name)!r} is no GitHub repository: write OWNER/NAME")
    pull_number = number or _of_event() or _of_ref()
    if pull_number is None:
        raise ReproError("no pull request is known here: name it with --pr NUMBER")
    return Pull(name, pull_number)


def _of_remote(folder: Path) -> str | None:
    try:
        url = Git(folder).text("config", "--get", "remote.origin.url")
    except GitFailedError:
        return None
    host = urlsplit(os.environ.get("GITHUB_SERVER_URL", "https://github.com")).hostname or "github.com"
    match = re.fullmatch(
        rf"(?:\w+://(?:[^@/]+@)?|[\w.-]+@){re.escape(host)}(?::\d+/|[:/])([^/]+/[^/]+?)(?:\.git)?/?", url
    )
    return match[1] if match else None


def _of_event() -> int | None:
    path = os.environ.get("GITHUB_EVENT_PATH")
    try:
        event = json.loads(Path(path).read_text(encoding="utf-8")) if path else None
    except (OSError, ValueError):
        return None
    for key in ("pull_request", "issue"):
        part = event.get(key) if isinstance(event, dict) else None
        if isinstance(part, dict) and type(part.get("number")) is int:
            return int(part["number"])
    return None


def _of_ref() -> int | None:
    match = re.fullmatch(r"refs/pull/([1-9]\d*)/(?:merge|head)", os.environ.get("GITHUB_REF", ""))
    return int(match[1]) if match else None


_TOKENS = ("GITHUB_TOKEN", "GH_TOKEN", "GITHUB_ENTERPRISE_TOKEN", "GH_ENTERPRISE_TOKEN")


def find_token() -> str:
    """The token of ``GITHUB_TOKEN`` or ``GH_TOKEN``, else that which ``gh`` is logged in with.

    Both variables are gone from this process afterwards: nothing that it starts gets them, git included.

    Raises:
        ReproError: there is none, or it is no token.
    """
    token = next((value for name in _TOKENS if (value := os.environ.get(name, "").strip())), "")
    if not token and shutil.which("gh"):
        try:
            done = subprocess.run(["gh", "auth", "token"], capture_output=True, text=True, timeout=20, check=False)
        except (OSError, subprocess.TimeoutExpired):
            done = None
        token = done.stdout.strip() if done and done.returncode == 0 else ""
    for name in _TOKENS:
        os.environ.pop(name, None)
    unreadable()
    if not token:
        raise ReproError("no token for GitHub: set GITHUB_TOKEN (or GH_TOKEN), or log in with `gh auth login`")
    if not re.fullmatch(r"[\x21-\x7e]+", token):
        raise ReproError("GitHub's token holds spaces or line breaks: set GITHUB_TOKEN to the token alone")
    return token
