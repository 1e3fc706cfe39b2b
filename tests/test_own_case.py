"""The repository's own golden runs, in a fresh clone."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

from conftest import Repo, environment

from repro_golden.case.identity import collect

ROOT = Path(__file__).parent.parent


def test_a_fresh_clone_pulls_and_verifies_its_golden_runs(tmp_path: Path) -> None:
    """`repro golden pull` fetches from the remote inside of it; verify of each case agrees or says why."""
    clone = ["git", "clone", "--quiet", "--no-hardlinks", str(ROOT), str(tmp_path / "clone")]
    subprocess.run(clone, check=True, env=environment())
    repo = Repo(tmp_path / "clone")
    assert repo.repro("golden", "pull").returncode == 0
    records: dict[str, list[dict[str, Any]]] = {}
    for path in sorted((repo.root / "golden" / "runs").glob("*/*/run.json")):
        if "~" not in path.parent.name:  # what was replaced is kept beside it
            records.setdefault(path.parent.name, []).append(json.loads(path.read_text()))
    assert "tiny-grpo" in records
    here = collect({}, threads=1)
    for case, runs in records.items():
        assert all(proof["passed"] for run in runs for proof in run["proofs"])
        done = repo.repro("golden", "verify", case)
        same_host = any(r["identity"]["host"] == here.host for r in runs)
        same_torch = any(r["identity"]["environment"]["torch build"] == here.environment["torch build"] for r in runs)
        if same_host and same_torch:  # then nothing may stand in the way
            assert done.returncode == 0 and f"agrees: {runs[0]['steps']} steps" in done.stdout, done.stderr
        else:  # another machine: the difference is named
            assert done.returncode == 3, done.stdout + done.stderr
            assert any(part in done.stderr for part in ("host ", "environment ", "layout "))


def test_the_remote_in_the_repository_stays_small() -> None:
    """What git carries of golden data is under 5 MB."""
    remote = [p for p in (ROOT / "golden" / "remote").rglob("*") if p.is_file()]
    assert 0 < sum(p.stat().st_size for p in remote) < 5_000_000
