"""Whose code a run of CI runs. What one leaves behind serves none that trusts another.

A pull request's code could have written whatever its run left, so a later run of a branch must not use it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path

from repro_golden.base.canonical import digest

__all__ = ["VARIABLE", "folder_of", "trust_of"]

VARIABLE = "REPRO_TRUST"
"""Names whose code this is, and wins over what CI says. Our own children get it."""

_OWN = ("push", "schedule", "workflow_dispatch", "repository_dispatch", "merge_group", "release", "create")
"""Events of GitHub that run the code of the branch or tag that they are of."""


def trust_of(environ: Mapping[str, str]) -> str:
    """Whose code runs here: of a branch, of a pull request, or of this run alone; '' outside CI.

    Args:
        environ: Our environment: `REPRO_TRUST`, or what GitHub Actions and GitLab CI set.
    """
    if named := environ.get(VARIABLE, "").strip():
        return named
    if environ.get("GITHUB_ACTIONS") == "true":
        return _of_github(environ)
    if environ.get("GITLAB_CI") == "true":
        return _of_gitlab(environ)
    return ""


def _of_github(environ: Mapping[str, str]) -> str:
    event, ref = environ.get("GITHUB_EVENT_NAME", ""), environ.get("GITHUB_REF", "")
    if event in _OWN and ref and not ref.startswith("refs/pull/"):
        return f"ref {ref}"
    if event.startswith("pull_request") and event != "pull_request_target" and ref.startswith("refs/pull/"):
        return f"pull {ref.split('/')[2]} of {_head(environ)}"
    # such as workflow_run, whose code may be anybody's
    return f"run {environ.get('GITHUB_RUN_ID', '')} {environ.get('GITHUB_RUN_ATTEMPT', '')}"


def _head(environ: Mapping[str, str]) -> str:
    """The repository that a pull request comes from."""
    try:
        event = json.loads(Path(environ.get("GITHUB_EVENT_PATH", "")).read_text(encoding="utf-8"))
        return str(event["pull_request"]["head"]["repo"]["full_name"])
    except (OSError, ValueError, KeyError, TypeError):
        return "an unknown repository"


def _of_gitlab(environ: Mapping[str, str]) -> str:
    if number := environ.get("CI_MERGE_REQUEST_IID"):
        return f"pull {number} of {environ.get('CI_MERGE_REQUEST_SOURCE_PROJECT_PATH', 'an unknown repository')}"
    if name := environ.get("CI_COMMIT_REF_NAME"):
        return f"ref {name}"
    return f"run {environ.get('CI_JOB_ID', '')}"


def folder_of(trust: str) -> str:
    """The name of the folder for what runs of one trust keep: readable, and no two are one."""
    return f"{re.sub(r'[^A-Za-z0-9]+', '-', trust).strip('-')[:40]}-{digest('trust', trust)[:8]}"
