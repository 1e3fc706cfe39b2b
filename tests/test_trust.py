"""State that a pull request's code could have written serves no run of a branch."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from conftest import Repo

from repro.__main__ import main
from repro_golden.base.trust import folder_of, trust_of
from repro_golden.case.file import Case
from repro_golden.replay.children import base_environment
from repro_golden.repository.checkout import find_checkout

JOB = {"GITHUB_ACTIONS": "true", "GITHUB_RUN_ID": "7", "GITHUB_RUN_ATTEMPT": "1"}
MAIN = JOB | {"GITHUB_EVENT_NAME": "schedule", "GITHUB_REF": "refs/heads/main"}
PULL = JOB | {"GITHUB_EVENT_NAME": "pull_request", "GITHUB_REF": "refs/pull/5/merge"}


def test_whose_code_runs() -> None:
    """A branch, a pull request and a run whose code may be anybody's are told apart; outside CI there is but one."""
    assert trust_of({}) == "" == trust_of({"CI": "true", "GITHUB_REF": "refs/heads/main"})
    dispatched = MAIN | {"GITHUB_EVENT_NAME": "workflow_dispatch"}
    assert trust_of(MAIN) == trust_of(dispatched) == "ref refs/heads/main"
    other = MAIN | {"GITHUB_REF": "refs/heads/other"}
    asked = MAIN | {"GITHUB_EVENT_NAME": "pull_request_target"}
    later = asked | {"GITHUB_RUN_ID": "8"}
    fork = {"GITLAB_CI": "true", "CI_MERGE_REQUEST_IID": "5", "CI_MERGE_REQUEST_SOURCE_PROJECT_PATH": "a/b"}
    branch = {"GITLAB_CI": "true", "CI_COMMIT_REF_NAME": "main"}
    every = [{}, MAIN, other, PULL, PULL | {"GITHUB_REF": "refs/pull/6/merge"}, asked, later, fork, branch]
    every += [MAIN | {"REPRO_TRUST": "mine"}]
    keys = [folder_of(trust_of(environ)) for environ in every]
    assert len(set(keys)) == len(keys)
    assert all(Path(key).name == key and not key.startswith(".") for key in keys)


def test_a_fork_is_part_of_the_key(tmp_path: Path) -> None:
    """The event names the repository that a pull request comes from."""
    event = tmp_path / "event.json"
    event.write_text(json.dumps({"pull_request": {"head": {"repo": {"full_name": "fork/r"}}}}))
    assert trust_of(PULL | {"GITHUB_EVENT_PATH": str(event)}) == "pull 5 of fork/r"
    assert trust_of(PULL) == "pull 5 of an unknown repository"


def test_state_of_a_pull_request_is_not_read_for_main(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """What a pull request's run left, the next run of that request uses, and no run of main does."""
    repo = Repo(tmp_path / "repo")
    repo.root.mkdir()
    repo.git("init", "--quiet", "--initial-branch=main")
    repo.commit("Start")
    (repo.root / "value").write_text("1\n")
    repo.commit("Bad")

    monkeypatch.chdir(repo.root)

    def probes(job: dict[str, str]) -> int:
        for name in [n for n in os.environ if n.startswith(("GITHUB_", "CI_", "GITLAB_", "REPRO_TRUST"))]:
            monkeypatch.delenv(name)
        for name, value in job.items():
            monkeypatch.setenv(name, value)
        capfd.readouterr()
        command = ("--when", "exit", "--", "sh", "-c", "! test -e value")
        assert main(["bisect", "--no-explain", "HEAD~1..HEAD", "--json", *command]) == 0
        count: int = json.loads(capfd.readouterr().out)["cost"]["probes"]
        return count

    assert probes(PULL) > 0 and probes(PULL) == 0
    assert probes(MAIN) > 0 and probes(MAIN) == 0
    assert probes({}) > 0
    folders = {path.name for path in (repo.root / ".git" / "repro" / "trust").iterdir()}
    assert folders == {folder_of(trust_of(job)) for job in (PULL, MAIN)}


def test_a_child_knows_whose_code_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What CI says is not handed on to a program, but a repro that it runs keeps its state at the same place."""
    for name, value in MAIN.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("REPRO_TRUST", raising=False)
    repo = Repo(tmp_path)
    repo.git("init", "--quiet")
    here = find_checkout(tmp_path)
    case = Case.model_validate({"case": {"name": "x", "steps": 1}, "subject": {"kind": "command", "command": "a"}})
    told = base_environment(case)
    assert not any(name.startswith("GITHUB_") for name in told)
    assert trust_of(told) == here.trust == "ref refs/heads/main"
    assert here.state.is_relative_to(here.common / "repro" / "trust")
