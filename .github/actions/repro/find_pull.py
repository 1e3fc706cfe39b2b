"""Finds the pull request that a finished workflow run was for, by what GitHub says and never by what the run wrote.

Reads GITHUB_API_URL, GITHUB_REPOSITORY, TOKEN and, of the run, HEAD_SHA, HEAD_OWNER, HEAD_BRANCH and PULLS (the event's
list, as JSON; it is empty for forks). Writes `number` to GITHUB_OUTPUT: empty unless exactly one open pull request of
this repository has HEAD_SHA as its newest commit. Standard library alone: it runs before anything is installed.
"""

from __future__ import annotations

import json
import os
import re
import sys
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

__all__ = ["main"]


def _get(path: str) -> Any:
    """The answer to one GET below this repository; None where there is nothing.

    Raises:
        urllib.error.HTTPError: GitHub refused, other than by 404 and 422 (unknown commit).
    """
    request = urllib.request.Request(  # noqa: S310 the address is the runner's own variable
        f"{os.environ['GITHUB_API_URL']}/repos/{os.environ['GITHUB_REPOSITORY']}/{path}",
        headers={
            "Accept": "application/vnd.github+json",
            "Authorization": f"Bearer {os.environ['TOKEN']}",
            "X-GitHub-Api-Version": "2022-11-28",
        },
    )
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:  # noqa: S310
            return json.load(answer)
    except urllib.error.HTTPError as error:
        if error.code in (404, 422):
            return None
        raise


def _candidates(sha: str) -> list[dict[str, Any]]:
    """Pull requests that may be the one: of the event, of the commit, of the fork's branch."""
    numbers = [int(entry["number"]) for entry in json.loads(os.environ.get("PULLS") or "null") or []]
    pulls = [_get(f"pulls/{number}") for number in numbers]
    pulls += _get(f"commits/{sha}/pulls?per_page=100") or []
    head = f"{os.environ['HEAD_OWNER']}:{os.environ['HEAD_BRANCH']}"
    pulls += _get(f"pulls?{urllib.parse.urlencode({'state': 'open', 'head': head, 'per_page': 100})}") or []
    return [pull for pull in pulls if pull]


def main() -> int:
    """Find the number and write it.

    Returns:
        0, also where there is none; 2 where GitHub could not be asked.
    """
    sha = os.environ["HEAD_SHA"]
    if not re.fullmatch(r"[0-9a-f]{40,64}", sha):
        print("::error title=repro::the run has no commit")
        return 2
    try:
        candidates = _candidates(sha)
    except (urllib.error.URLError, TimeoutError, ValueError) as error:
        print(f"::error title=repro::GitHub could not be asked for the pull request: {type(error).__name__}")
        return 2
    repository = os.environ["GITHUB_REPOSITORY"].lower()
    numbers = {
        int(pull["number"])
        for pull in candidates
        if pull["state"] == "open"
        and pull["head"]["sha"] == sha
        and pull["base"]["repo"]["full_name"].lower() == repository
    }
    if len(numbers) != 1:
        print(f"::notice title=repro::{len(numbers)} open pull requests have this commit as their newest: no comment")
    with Path(os.environ["GITHUB_OUTPUT"]).open("a", encoding="utf-8") as output:
        output.write(f"number={numbers.pop() if len(numbers) == 1 else ''}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
