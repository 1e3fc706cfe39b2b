"""pytest's plugin and pre-commit's hook, as another repository has them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from conftest import SOURCE, Repo, environment
from history_kit import CASE, edit, start

TWICE = "import pytest\n\n@pytest.mark.parametrize('n', [1, 2])\ndef test_toy(golden, n):\n    golden.verify('toy')\n"


def code_of(case: str) -> str:
    """A test that verifies a case."""
    return f"def test_{case.strip('-')}(golden):\n    golden.verify({case!r})\n"


def pytest_of(repo: Repo, *cases: str, options: Sequence[str] = ()) -> subprocess.CompletedProcess[str]:
    """The answer of pytest to tests that each verify a case."""
    (repo.root / "test_numerics.py").write_text("".join(map(code_of, cases)) or TWICE)
    command = [sys.executable, "-m", "pytest", "-q", "-rs", "-W", "error", *options]
    return subprocess.run(
        [*command, "test_numerics.py"], cwd=repo.root, env=environment(), capture_output=True, text=True, check=False
    )


def test_the_plugin_imports_pytest_alone() -> None:
    """Every pytest of an environment with repro loads it: beside pytest it brings its own module and no library."""
    code = (
        "import sys, pytest, subprocess; before = set(sys.modules); import repro.pytest_plugin;"
        "more = {name.split('.')[0] for name in set(sys.modules) - before}; print(more - set(sys.stdlib_module_names))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=SOURCE)
    assert done.stdout == "{'repro'}\n"


def test_a_golden_run_that_is_not_there_is_no_pass(fork: Repo) -> None:
    """Where nothing can be compared a test is skipped with the reason; without such a case it fails in one line."""
    done = pytest_of(fork, "mini", "nope", "--help")
    assert "2 failed, 1 skipped" in done.stdout and "no golden run of mini for this machine" in done.stdout, done.stdout
    assert "'--help' is no case's name" in done.stdout
    assert "no case 'nope'" in done.stdout and "Traceback" not in done.stdout, done.stdout


@pytest.mark.parametrize("how", ["before", "after", "conftest"])
def test_another_fixture_of_that_name_is_given_way_to(tmp_path: Path, how: str) -> None:
    """A plugin's `golden`, loaded before ours or after it, is what its tests get, and so is a conftest's."""
    fixture = "import pytest\n\n@pytest.fixture\ndef golden(request):\n    return request.param * 2\n"
    (tmp_path / "other.py").write_text(fixture)
    (tmp_path / "conftest.py").write_text({"after": "pytest_plugins = ['other']", "conftest": fixture}.get(how, ""))
    (tmp_path / "test_it.py").write_text(
        "import pytest\n\n@pytest.mark.parametrize('golden', [2], indirect=True)\n"
        "def test_it(golden, repro_golden):\n    assert golden == 4 and repro_golden.verify\n"
    )
    command = [sys.executable, "-m", "pytest", "-q", *(["-p", "other"] if how == "before" else [])]
    variables = environment() | {"PYTHONPATH": os.pathsep.join([str(tmp_path), environment().get("PYTHONPATH", "")])}
    done = subprocess.run(command, cwd=tmp_path, env=variables, capture_output=True, text=True, check=False)
    assert "1 passed" in done.stdout, done.stdout


@pytest.mark.whole
def test_golden_runs_are_recorded_when_asked_and_guard_a_test_and_a_push(tmp_path: Path) -> None:
    """--golden-record records what is missing and replaces nothing; a change fails the test, and the hook of a push."""
    repo = start(tmp_path, case=CASE)
    assert repo.repro("init", "--remote", str(tmp_path / "remote")).returncode == 0
    assert "1 skipped" in pytest_of(repo, "toy").stdout
    done = pytest_of(repo, options=["--golden-record", "-n", "2"])  # both record: one waits for the other
    assert "2 passed" in done.stdout, done.stdout
    repo.commit("Record")
    (pointer,) = repo.root.glob("golden/runs/*/toy.dvc")
    recorded, hook = pointer.read_bytes(), hook_of(tmp_path)
    assert verified_by(repo, hook).returncode == 0
    edit(repo, "scale = 1.0", "scale = 1.0 + 1e-6", "Scale")
    done = pytest_of(repo, "toy", options=["--golden-record"])
    assert done.returncode == 1 and "toy: differs at step 0" in done.stdout, done.stdout
    assert "repro golden approve toy" in done.stdout and pointer.read_bytes() == recorded
    done = verified_by(repo, hook)
    assert done.returncode == 1 and "toy: differs at step 0" in done.stdout, done.stdout


def hook_of(folder: Path) -> Repo:
    """A repository that offers the hook as this one does."""
    hooks = Repo(folder / "hooks")
    hooks.root.mkdir()
    hooks.git("init", "--quiet")
    (hooks.root / ".pre-commit-hooks.yaml").write_text((SOURCE / ".pre-commit-hooks.yaml").read_text())
    hooks.commit("Hooks")
    return hooks


def verified_by(repo: Repo, hook: Repo) -> subprocess.CompletedProcess[str]:
    """What pre-commit says before a push; its `repro` is the first on PATH, as in an active environment."""
    scripts = repo.root.parent / "bin"
    scripts.mkdir(exist_ok=True)
    (scripts / "repro").write_text(f'#!/bin/sh\nexec {sys.executable} -m repro "$@"\n')
    (scripts / "repro").chmod(0o755)
    variables = environment() | {"PATH": f"{scripts}{os.pathsep}{os.environ['PATH']}"}
    variables["PRE_COMMIT_HOME"] = str(repo.root.parent / "pre-commit")
    command = [sys.executable, "-m", "pre_commit", "try-repo", hook.root, "repro-verify", "--hook-stage", "pre-push"]
    return subprocess.run(
        [*map(str, command), "--all-files"], cwd=repo.root, env=variables, capture_output=True, text=True, check=False
    )
