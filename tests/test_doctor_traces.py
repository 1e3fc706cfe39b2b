"""Traces under the doctor, and whatever bytes stand where a trace or a golden run should."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from doctor_dump_kit import found
from doctor_golden_kit import column, golden, repository, rows_of, trace
from examples_kit import at_most
from hypothesis import given
from hypothesis import strategies as st

from repro.doctor.artefacts.kinds import Reader
from repro.doctor.artefacts.traces import FOREIGN_GOLDEN, GOLDEN, TRACE
from repro.doctor.catalogue import catalogue, subject_of
from repro.doctor.examine import FAULT, examine
from repro_golden.base.errors import ReproError
from repro_golden.trace.writer import metric_row

Folders = pytest.TempPathFactory


# -- traces


def test_traces_that_ended_early(tmp_path: Path) -> None:
    """Killed, or ended by itself before its last step: "trace-incomplete"."""
    (finding,) = found("trace-incomplete", trace(tmp_path / "killed", made=2, end=False))
    assert "2 of 4 steps" in finding.message and "killed" in finding.message and finding.where.line == 2
    (finding,) = found("trace-incomplete", trace(tmp_path / "early", made=3))
    assert "early" in finding.message


@pytest.mark.parametrize(
    ("row", "severity"),
    [
        (column("forward", "attention.mask", [-np.inf, 1.0], kept=False), "warning"),
        (column("forward", "values", [np.nan, 1.0]), "error"),
        (column("update", "v", [np.inf, 1.0], kept=False), "error"),
    ],
)
def test_signals_that_are_not_finite(tmp_path: Path, row: Any, severity: str) -> None:
    """Gradients, parameters and columns are errors; an activation may be a mask: "trace-not-finite"."""
    (finding,) = found("trace-not-finite", trace(tmp_path, lambda step: [*rows_of(step), row]))
    assert finding.severity == severity and finding.where.item.endswith(f"{row.phase} {row.name}")


def test_metrics_that_are_not_finite(tmp_path: Path) -> None:
    """The first step and metric are named, with the line of the step log: "trace-not-finite"."""

    def rows(step: int) -> Any:
        return rows_of(step, loss=float("inf"), grad_norm=float("nan")) if step > 1 else rows_of(step)

    (finding,) = found("trace-not-finite", trace(tmp_path, rows))
    assert finding.where.line == 3 and "at step 2, and 1 more" in finding.message


def test_numbers_of_a_trace(tmp_path: Path) -> None:
    """A trace and a golden run give their metrics by step, and what is logged once a rollout apart."""

    def rows(step: int) -> Any:
        return [
            *rows_of(step),
            metric_row("loss", "train/kl", 0.25),
            metric_row("loss", "rollout/raw_reward", step / 2),
        ]

    run, series = TRACE.read(trace(tmp_path, rows))
    assert series.steps[2]["kl"] == 0.25 and "raw_reward" not in series.steps[2]
    assert series.rollouts == {k: {"raw_reward": k / 2} for k in range(4)}
    assert run.path == series.path == tmp_path


# -- anything at all

SMALL = [b"", b"{}", b"[]", b"null", b"\xff\xfe", b'{"format": 1e400}', b'{"a": ' * 2000]


@pytest.fixture(scope="module")
def golden_run(tmp_path_factory: Folders) -> Path:
    """A sound golden run."""
    return golden(repository(tmp_path_factory.mktemp("one")))


FILES = ("run.json", "trace/header.json", "trace/steps.jsonl", "trace/rank-00000.parquet")


@at_most(60)
@given(st.sampled_from(FILES), st.data())
def test_damaged_golden_runs(golden_run: Path, tmp_path_factory: Folders, name: str, data: st.DataObject) -> None:
    """Whatever bytes a file holds, a golden run is read or refused in one line, and no rule fails on it."""
    folder = tmp_path_factory.mktemp("bad") / "toy"
    shutil.copytree(golden_run, folder)
    path = folder / name
    raw = path.read_bytes()
    at = data.draw(st.integers(0, len(raw) - 1))
    how = data.draw(st.sampled_from(["cut", "flip", "other"]))
    flipped = raw[:at] + bytes([raw[at] ^ (1 << data.draw(st.integers(0, 7)))]) + raw[at + 1 :]
    path.write_bytes({"cut": raw[:at], "flip": flipped, "other": data.draw(st.sampled_from(SMALL))}[how])
    _never_raises(folder)


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**400), 10**400) | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=4,
)


@given(st.sampled_from(["run.json", "trace/header.json"]), st.data())
def test_records_of_any_types(golden_run: Path, tmp_path_factory: Folders, name: str, data: st.DataObject) -> None:
    """Any JSON value in any place of a record or header."""
    folder = tmp_path_factory.mktemp("odd") / "toy"
    shutil.copytree(golden_run, folder)
    record = json.loads((folder / name).read_text())
    key = data.draw(st.sampled_from(sorted(record)))
    inner = record[key] if isinstance(record[key], dict) and record[key] and data.draw(st.booleans()) else None
    if inner is not None:
        inner[data.draw(st.sampled_from(sorted(inner)))] = data.draw(_JSON)
    else:
        record[key] = data.draw(_JSON)
    (folder / name).write_text(json.dumps(record))
    _never_raises(folder)


def _read(reader: Reader, path: Path) -> list[object]:
    """What a reader gives of a path before it refuses the rest in one line."""
    artefacts: list[object] = []
    refusal = ""
    if reader.fits(path):
        try:
            for artefact in reader.read(path):
                artefacts.append(artefact)  # noqa: PERF402 - what comes before a refusal counts
        except ReproError as error:
            refusal = str(error)
    assert "\n" not in refusal
    return artefacts


def _never_raises(folder: Path) -> None:
    artefacts = [*_read(GOLDEN, folder), *_read(TRACE, folder / "trace")]
    rules = [rule.id for rule in catalogue().values() if subject_of(rule) == "goldens"]
    wrong = [finding for finding in examine([], artefacts, only=rules).findings if finding.rule == FAULT.id]
    assert not wrong, wrong


@at_most(60)
@given(st.dictionaries(st.text(max_size=4), _JSON | st.fixed_dictionaries({"values": _JSON}), max_size=3))
def test_golden_values_of_any_types(tmp_path_factory: Folders, tables: dict[str, Any]) -> None:
    """Golden values are read or refused in one line, whatever JSON they are."""
    path = tmp_path_factory.mktemp("values") / "golden.json"
    path.write_text(json.dumps({**tables, "lm loss": {"start_step": 1, "step_interval": 1, "values": {"1": "nan"}}}))
    assert FOREIGN_GOLDEN.fits(path)
    artefacts = _read(FOREIGN_GOLDEN, path)
    findings = examine([], artefacts, only=("golden-vacuous", "golden-rounded")).findings
    assert not [finding for finding in findings if finding.rule == FAULT.id], findings


def test_files_that_are_none(tmp_path: Path) -> None:
    """Pipes, loops of links and folders in the place of files are not waited for."""
    for name in ("header.json", "run.json"):
        os.mkfifo(tmp_path / name)
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    for path in (tmp_path, tmp_path / "loop", tmp_path / "header.json", tmp_path / "nothing"):
        assert not any(reader.fits(path) for reader in (GOLDEN, TRACE, FOREIGN_GOLDEN))
    folder = trace(tmp_path / "trace")
    (folder / "steps.jsonl").unlink()
    os.mkfifo(folder / "steps.jsonl")
    with pytest.raises(ReproError, match="no regular file"):
        list(TRACE.read(folder))
