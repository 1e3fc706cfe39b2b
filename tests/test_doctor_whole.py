"""The doctor on whole folders: what is in order raises no error, and what is corrupt is a finding, never a crash."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from conftest import Repo
from examples_kit import at_most
from foreign_kit import make_fork, run_program, usual_flags
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rollout_dump_kit import full_dump, plain_dump

from repro.doctor.examine import FAULT, Examination, every_rule, examine, look
from repro_golden.base.systems import SYSTEMS
from repro_golden.dumps.rollout.files import RolloutDump, write_rollout_dump


def examined(*paths: Path) -> Examination:
    """An examination in which no rule failed."""
    report = examine(look(paths))
    assert not [finding for finding in report.findings if finding.rule == FAULT.id], report.findings
    return report


@pytest.mark.parametrize("system", SYSTEMS)
def test_a_clean_run_raises_no_error(tmp_path: Path, system: Any) -> None:
    """A fork's launch script, case, rollouts, and all that its run dumps and prints: no finding is an error."""
    fork = make_fork(tmp_path, commits=0, system=system)
    details = tmp_path / "details"
    flags = [*usual_flags((), 1), "--load-debug-rollout-data", f"{fork.rollouts}/{{rollout_id}}.pt"]
    printed = run_program(fork.repo.root, system, [*flags, "--debug-train-only", "--dump-details", str(details)])
    (tmp_path / "train.log").write_text(printed)
    report = examined(fork.repo.root, details, tmp_path / "train.log")
    kinds = {hit.kind for hit in report.seen}
    assert {"launch script", "case", "log"} <= kinds, kinds
    assert not report.of("error"), report.of("error")
    assert len(report.tried) > 40


@pytest.mark.parametrize("dumps", [{0: plain_dump}, {0: full_dump}, {3: full_dump}, {0: plain_dump, 1: full_dump}])
@pytest.mark.parametrize("system", SYSTEMS)
def test_clean_dumps_raise_no_error(
    tmp_path: Path, system: Any, dumps: Mapping[int, Callable[..., RolloutDump]]
) -> None:
    """Dumps with the fewest and with every field of their system: as the first, a later one alone, and both."""
    for number, made in dumps.items():
        size = {} if made is full_dump else {"groups": 4, "each": 4}
        write_rollout_dump(tmp_path / "rollout_data" / f"{number}.pt", made(system, rollout_id=number, **size))
    report = examined(tmp_path)
    assert not report.of("error"), report.of("error")


@pytest.mark.whole
def test_a_clean_golden_run_raises_no_error(recorded: Repo) -> None:
    """The repository of a recorded golden run of the built-in trainer."""
    report = examined(recorded.root)
    assert "golden run" in {hit.kind for hit in report.seen}
    assert not report.of("error"), report.of("error")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of small artefacts of many kinds."""
    root = tmp_path_factory.mktemp("many")
    fork = make_fork(root, commits=0)
    details = root / "details"
    flags = [*usual_flags((), 1), "--load-debug-rollout-data", f"{fork.rollouts}/{{rollout_id}}.pt"]
    printed = run_program(fork.repo.root, "slime", [*flags, "--debug-train-only", "--dump-details", str(details)])
    (root / "train.log").write_text(printed)
    shutil.copy(fork.repo.root / "scripts" / "run.sh", root / "run.sh")
    (root / "prompts.jsonl").write_text('{"prompt": "one", "label": "1"}\n{"prompt": "two", "label": "2"}\n')
    (root / "requirements.txt").write_text("numpy==1.26.4\ntorch==2.9.0\n")
    (root / "config.json").write_text('{"model_type": "qwen2", "num_hidden_layers": 2}\n')
    shutil.rmtree(root / "fork")
    return root


def _files(root: Path) -> Iterator[Path]:
    yield from sorted(path for path in root.rglob("*") if path.is_file())


@settings(at_most(40), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 2**32))
def test_corrupt_artefacts_are_findings(folder: Path, tmp_path_factory: pytest.TempPathFactory, seed: int) -> None:
    """Files cut short, with bytes changed, emptied or exchanged give findings; nothing is raised and no rule fails."""
    draw = random.Random(seed)
    root = tmp_path_factory.mktemp("corrupt")
    shutil.copytree(folder, root / "many")
    files = list(_files(root / "many"))
    for path in draw.sample(files, min(3, len(files))):
        content = bytearray(path.read_bytes())
        how = draw.randrange(4)
        if how == 0:
            del content[draw.randrange(len(content) + 1) :]
        elif how == 1 and content:
            for _ in range(draw.randint(1, 20)):
                content[draw.randrange(len(content))] = draw.randrange(256)
        elif how == 2:
            content = bytearray(draw.choice(files).read_bytes())
        else:
            content = bytearray(draw.randbytes(draw.randrange(200)))
        path.write_bytes(bytes(content))
    report = examined(root)
    assert all(finding.rule in every_rule() and finding.rule != FAULT.id for finding in report.findings)
    assert all("\n" not in hit.message for hit in report.findings), report.findings
    shutil.rmtree(root)
