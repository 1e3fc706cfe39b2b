"""The workflows for GitHub as they are written: linters, pins, permissions, and what the documentation shows."""

from __future__ import annotations

import functools
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import SOURCE
from workflow_kit import ACTION, WORKFLOWS, actionlint, evaluate, read_yaml, run_steps_of, substitute

OURS = ("nightly.yml", "pr.yml", "pr-comment.yml")


@functools.cache
def workflow(name: str) -> Any:
    """One of our workflows."""
    return read_yaml((WORKFLOWS / name).read_text())


def action() -> Any:
    """The composite action."""
    return read_yaml((ACTION / "action.yml").read_text())


def lint(files: list[Path]) -> dict[Path, list[str]]:
    """What actionlint says; a test that cannot have it is skipped."""
    try:
        return actionlint(files)
    except OSError as error:
        pytest.skip(f"actionlint could not be installed: {error}")


def schema(*files: Path, kind: str = "workflows") -> str:
    """What GitHub's own JSON schema says, as check-jsonschema carries it; empty where all is well."""
    pytest.importorskip("check_jsonschema", reason="check-jsonschema is not installed")
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", f"vendor.github-{kind}", *map(str, files)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout if done.returncode else ""


def test_the_linters_accept_every_workflow_and_the_action() -> None:
    """GitHub's schemas and actionlint have nothing to say about any file."""
    files = sorted(WORKFLOWS.glob("*.yml"))
    assert {file.name for file in files} >= set(OURS)
    assert schema(*files) == "" and schema(ACTION / "action.yml", kind="actions") == ""
    assert lint(files) == {file: [] for file in files}


BREAKS = {
    "runs_on": ("    runs-on: ${{", "    runs_on: x\n    runs-on: ${{"),
    "result-branch": ("${{ inputs.results-branch }}", "${{ inputs.result-branch }}"),
    "sight": ("${{ steps.site.outputs.site != '' }}", "${{ steps.sight.outputs.site != '' }}"),
    "workflow_commit": ("${{ job.workflow_sha }}", "${{ job.workflow_commit }}"),
    "elsewhere": ("${{ secrets.remote-environment }}", "${{ secrets.elsewhere }}"),
}


def test_the_linters_refuse_a_broken_workflow(tmp_path: Path) -> None:
    """An unknown key, an unknown input, step, property or secret is told; a schema knows the key alone."""
    text = (WORKFLOWS / "nightly.yml").read_text()
    files = {tmp_path / f"{key}.yml": key for key in BREAKS}
    for file, key in files.items():
        assert BREAKS[key][0] in text
        file.write_text(text.replace(*BREAKS[key], 1))
    assert "runs_on" in schema(tmp_path / "runs_on.yml") and schema(tmp_path / "sight.yml") == ""
    for file, messages in lint(list(files)).items():
        assert any(files[file] in message for message in messages), file


def test_nothing_is_interpolated_into_a_script() -> None:
    """Every `run:` is one command without an expression; every script stops at its first error."""
    for document in [*(workflow(name) for name in OURS), action()]:
        for step in run_steps_of(document):
            assert re.fullmatch(
                r'(bash|python3) ("\$GITHUB_ACTION_PATH/\w+\.sh"|harness/\.github/actions/repro/\w+\.(sh|py))',
                step["run"],
            ), step["run"]
            assert step["shell"] == "bash"
            script = (ACTION / Path(step["run"].split()[1].strip('"')).name).read_text()
            for name in step.get("env", {}):
                assert name in script or (name == "TOKEN" and "token.sh" in script), f"{name} is never read"
    for script in ACTION.glob("*.sh"):
        lines = [line for line in script.read_text().splitlines() if line and not line.startswith("#")]
        assert lines[0] == "set -euo pipefail", script
        assert not re.search(r"\beval\b", script.read_text())
        subprocess.run(["bash", "-n", str(script)], check=True)


def test_actions_are_pinned_and_keep_no_token() -> None:
    """Every foreign action has a major version; no checkout leaves the token in a file."""
    for document in [*(workflow(name) for name in OURS), action()]:
        groups = [document["runs"]] if "runs" in document else document["jobs"].values()
        for step in (step for group in groups for step in group["steps"] if "uses" in step):
            if step["uses"] != "./harness/.github/actions/repro":
                assert re.fullmatch(r"actions/[a-z-]+@v[1-9]\d*", step["uses"])
            if step["uses"].startswith("actions/checkout"):
                assert step["with"]["persist-credentials"] is False


def test_no_job_that_runs_a_pull_request_may_write() -> None:
    """Permissions are the least: writing is for the jobs that run nothing of a pull request."""
    allowed = {
        ("nightly.yml", "night"): {"contents": "write"},
        ("pr.yml", "report"): {"contents": "read"},
        ("pr.yml", "comment"): {"contents": "read", "pull-requests": "write"},
        ("pr-comment.yml", "comment"): {"actions": "read", "contents": "read", "pull-requests": "write"},
    }
    by_job = {(name, job): spec["permissions"] for name in OURS for job, spec in workflow(name)["jobs"].items()}
    assert by_job == allowed and all(workflow(name)["permissions"] == {} for name in OURS)
    for (name, job), permissions in by_job.items():
        if permissions.get("pull-requests") == "write":
            checkouts = [
                s for s in workflow(name)["jobs"][job]["steps"] if s.get("uses", "").startswith("actions/checkout")
            ]
            assert [s["with"]["repository"] for s in checkouts] == ["${{ job.workflow_repository }}"]
    secret = [
        (str(step.get("id")), key)
        for step in action()["runs"]["steps"]
        for key, value in step.get("env", {}).items()
        if "remote-environment" in value
    ]
    assert secret == [("pull", "REMOTE_ENVIRONMENT")]


def test_both_ways_to_start_a_workflow_take_the_same_inputs() -> None:
    """A run by hand has the defaults of a call, and the action knows every input that a workflow gives it."""
    for name in ("nightly.yml", "pr.yml"):
        called, by_hand = (workflow(name)["on"][key]["inputs"] for key in ("workflow_call", "workflow_dispatch"))
        assert called == {key: value for key, value in by_hand.items() if key not in ("base", "head")}
        for job in workflow(name)["jobs"].values():
            for step in job["steps"]:
                if step.get("uses", "").startswith("./"):
                    assert set(step["with"]) <= set(action()["inputs"])


def test_the_lines_of_the_documentation_are_right(tmp_path: Path) -> None:
    """Each example of docs/how-to/ci.md is five lines long, lints, gives known inputs and enough permissions."""
    text = (SOURCE / "docs" / "how-to" / "ci.md").read_text()
    examples = [block for block in re.findall(r"```yaml\n(.*?)```", text, re.DOTALL) if "\njobs:" in block]
    files = [tmp_path / f"{i}.yml" for i in range(len(examples))]
    for file, example in zip(files, examples, strict=True):
        file.write_text(example)
    assert lint(files) == {file: [] for file in files} and schema(*files) == ""
    seen = set()
    for example in examples:
        (job,) = read_yaml(example)["jobs"].values()
        name = re.fullmatch(r"OWNER/REPO/\.github/workflows/([\w-]+\.yml)@main", job["uses"])[1]
        seen.add(name)
        assert len(example[example.index("jobs:") :].splitlines()) == 5
        assert set(job["with"]) <= set(workflow(name)["on"]["workflow_call"]["inputs"])
        needed: dict[str, str] = {}
        for spec in workflow(name)["jobs"].values():
            needed |= {k: v for k, v in spec["permissions"].items() if needed.get(k) != "write"}
        assert job["permissions"] == {k: v for k, v in needed.items() if (k, v) != ("contents", "read")} | (
            {"contents": needed["contents"]}
        )
    assert seen == set(OURS)


def test_the_resolver_refuses_what_it_does_not_know() -> None:
    """Contexts, functions and comparisons that the kit does not know are errors and not empty texts."""
    context = {"inputs": {"a": "x", "b": True}, "github": {"event": {}}}
    assert (
        substitute("-${{ inputs.a }}-${{ inputs.b && 'it''s' || '' }}-${{ github.event.none }}", context) == "-x-it's-"
    )
    for text in (
        "inputs.c",
        "env.X",
        "github.actor",
        "hashFiles('x')",
        "inputs.a > 1",
        "inputs.b == 'true'",
        "inputs.a inputs.a",
    ):
        with pytest.raises(ValueError, match=r"unknown|not understood|only texts|left over"):
            evaluate(text, context)
