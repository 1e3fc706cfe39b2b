"""The doctor where nobody asked: before a golden run is recorded, and on a probe that fails."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from examples_kit import at_most
from foreign_kit import make_fork
from hypothesis import given
from hypothesis import strategies as st

from repro.doctor.quiet import diagnosis

CRASH = """\
import sys
print("CUDA error: an illegal memory access was encountered", flush=True)
sys.exit(1)
"""


@pytest.mark.whole
def test_a_probe_that_fails_is_diagnosed(tmp_path: Path) -> None:
    """Beside why a commit is skipped stands what its log shows of the cause, also where that is known from before."""
    fork = make_fork(tmp_path, "entropy-gradient-inverted", commits=2)
    repo = fork.repo
    entry = repo.root / "train.py"
    before = repo.git("rev-parse", f"{fork.culprit}~1").strip()
    repo.git("checkout", "--quiet", "-b", "broken", before)
    whole = entry.read_text()
    entry.write_text(CRASH)
    broken = repo.commit("Break")
    done = repo.repro("bisect", "--no-explain", "-j", "1", f"{before}..{broken}", "--case", fork.case)
    assert done.returncode == 2, done.stdout + done.stderr
    assert "illegal-memory-access" in done.stderr.splitlines()[-1], "an end that cannot be tested"
    entry.write_text(whole)
    repo.git("checkout", fork.culprit, "--", ".")
    repo.commit("Mend, and change numbers")
    for _ in range(2):  # the second run takes its probes from the journal
        words = ("bisect", "--no-explain", "-j", "1", f"{before}..HEAD", "--case", fork.case)
        result = json.loads(repo.repro(*words, "--json").stdout)
        assert list(result["skips"]) == [broken]
        assert "illegal-memory-access" in result["diagnoses"][broken]
        assert "illegal-memory-access" not in result["skips"][broken], "equal causes keep equal text"
    assert result["cost"]["reused"] > 0 and "illegal-memory-access" in repo.repro(*words).stdout


@pytest.mark.whole
def test_a_recording_is_preceded_by_what_is_wrong_with_its_launch(tmp_path: Path) -> None:
    """What is wrong with the case's launch or code is told before the recording; else nothing is."""
    fork = make_fork(tmp_path, commits=0, flags=["--debug-determinism"])
    late = "model = get_model(provider)\ntorch.use_deterministic_algorithms(True)\n"
    (fork.repo.root / "slime" / "late.py").write_text(late)
    fork.repo.commit("Deterministic, they say")
    said = fork.repo.repro("golden", "record", fork.case)
    assert "doctor: " in said.stderr and "ghost-flag" in said.stderr, said.stderr
    assert "determinism-after-model" in said.stderr and "slime/late.py:2" in said.stderr, said.stderr
    clean = make_fork(tmp_path / "clean", commits=0)
    assert "doctor: error" not in clean.repo.repro("golden", "record", clean.case).stderr


@at_most(60)
@given(st.binary(max_size=300))
def test_any_log_is_taken(tmp_path_factory: object, content: bytes) -> None:
    """A log of any bytes gives a line or nothing, and no error."""
    path = tmp_path_factory.mktemp("log") / "log"  # type: ignore[attr-defined]
    path.write_bytes(content)
    assert "\n" not in diagnosis(path)
