"""The repository's own golden run, in a fresh clone."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

from conftest import Repo, environment

ROOT = Path(__file__).parent.parent


def test_a_fresh_clone_pulls_and_verifies_its_golden_run(tmp_path: Path) -> None:
    """`repro golden pull` fetches from the remote inside the repository; verify agrees here, or names why it cannot."""
    clone = ["git", "clone", "--quiet", "--no-hardlinks", str(ROOT), str(tmp_path / "clone")]
    subprocess.run(clone, check=True, env=environment())
    repo = Repo(tmp_path / "clone")
    assert repo.repro("golden", "pull").returncode == 0
    (run,) = (repo.root / "golden" / "runs").glob("*/tiny-grpo/run.json")
    assert all(proof["passed"] for proof in json.loads(run.read_text())["proofs"])
    done = repo.repro("golden", "verify", "tiny-grpo")
    if done.returncode == 0:
        assert "agrees: 12 steps" in done.stdout
    else:  # another machine: the difference is named
        assert done.returncode == 3, done.stdout + done.stderr
        assert any(part in done.stderr for part in ("host ", "environment ", "layout "))


def test_the_remote_in_the_repository_stays_small() -> None:
    """What git carries of golden data is under 5 MB."""
    remote = [p for p in (ROOT / "golden" / "remote").rglob("*") if p.is_file()]
    assert 0 < sum(p.stat().st_size for p in remote) < 5_000_000
