"""Golden runs for the doctor, made without training: a real repository, a real trace, a real record."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import history_kit
import numpy as np
from conftest import Repo

from repro_golden.case.file import find_case
from repro_golden.case.identity import Identity
from repro_golden.fingerprint import reference
from repro_golden.store.golden import write_record
from repro_golden.store.rollouts import rollouts_of
from repro_golden.trace import Header, Row, TraceWriter, seal
from repro_golden.trace.writer import metric_row

__all__ = ["CASE", "PROOFS", "Rows", "column", "golden", "repository", "rows_of", "trace"]

CASE = history_kit.CASE.replace("proof_steps = 2", 'proof_steps = 2\nrollouts = "golden/rollouts/toy"').replace(
    "steps = 6", "steps = 4"
)
IDENTITY = {"host": {"cpu": "Test CPU 1"}, "environment": {"torch": "2.13.0"}, "layout": {"ranks": "1", "threads": "1"}}
STEPS = 4

PROOFS = [
    {"name": name, "passed": True, "detail": "as it should be"}
    for name in (
        "all values finite", "advantages are not constant", "gradients are not all zero", "parameters moved",
        "reproduced by a second process", "the recorder changes nothing", "one ULP in grad is seen",
        "one ULP in update is seen",
    )
]  # fmt: skip

Rows = Callable[[int], list[Row]]


def repository(folder: Path, case: str = CASE) -> Repo:
    """A repository with a case and its rollouts."""
    folder.mkdir(parents=True, exist_ok=True)
    repo = history_kit.start(folder, case=case)
    place = repo.root / "golden" / "rollouts" / "toy"
    place.mkdir(parents=True)
    (place / "0.bin").write_bytes(b"rollout")
    repo.commit("Rollouts")
    return repo


def column(phase: str, name: str, values: Any, dtype: str = "float32", *, kept: bool = True) -> Row:
    """The row of a tensor."""
    array = np.asarray(values, dtype=dtype)
    raw, wide = array.tobytes(), array.astype(np.float64).ravel()
    finite = wide[np.isfinite(wide)]
    largest = float(np.abs(finite).max(initial=0.0))
    length = float(np.sqrt((finite * finite).sum()))
    odd = int((~np.isfinite(wide)).sum())
    return Row(phase, name, dtype, array.shape, reference(raw), odd, largest, length, raw[:8], raw if kept else None)


def rows_of(step: int, **other: Any) -> list[Row]:
    """The signals of a step in which all is well.

    Args:
        step: Its number.
        other: Values for a signal or metric; None leaves it out.
    """
    rng = np.random.default_rng(100 + step)
    values: dict[str, Any] = {
        "loss": 0.5 + float(np.float32(rng.normal())), "grad_norm": float(np.float32(1 + rng.random())),
        "log_probs": -np.abs(rng.normal(size=96)), "advantages": np.tile([1.0, -1.0], 48), "grad": rng.normal(size=16),
        "update": np.arange(16) + step + 1,
    } | other  # fmt: skip
    rows = [column("input", "start/w", np.arange(16), kept=False)] if step == 0 else []
    for phase, name in (("forward", "log_probs"), ("forward", "advantages")):
        if values[name] is not None:
            rows.append(column(phase, name, values[name]))
    for name, phase in (("loss", "loss"), ("grad_norm", "grad")):
        if values[name] is not None:
            rows.append(metric_row(phase, name, float(values[name])))
    if values["grad"] is not None:
        rows.append(column("grad", "w", values["grad"], kept=False))
    return [*rows, column("update", "w", values["update"], kept=False)]


def trace(
    folder: Path, rows: Rows = rows_of, made: int = STEPS, header: Header | None = None, *, end: bool = True
) -> Path:
    """A sealed trace, or with `end` false one whose process was killed."""
    writer = TraceWriter(folder, header or Header({"name": "toy"}, "rollouts", {"kind": "command"}, IDENTITY, STEPS))
    for step in range(made):
        for row in rows(step):
            writer.add(row)
        writer.end_step(step)
    if end:
        writer.close({"reason": "finished"})
        seal(folder)
    else:
        writer.let_go()
    return folder


def golden(
    repo: Repo, rows: Rows = rows_of, made: int = STEPS, record: Mapping[str, Any] | None = None, machine: str = ""
) -> Path:
    """A golden run as `repro golden record` keeps one, but for DVC.

    Args:
        repo: Of `repository`.
        rows: The signals of each step.
        made: How many steps.
        record: What ``run.json`` says otherwise.
        machine: The folder; that of its identity by default.
    """
    case = find_case(repo.root, "toy")
    place = repo.root / (case.case.rollouts or "")
    digest = rollouts_of(case, place).digest
    folder = repo.root / "golden" / "runs" / (machine or Identity.from_mapping(IDENTITY).machine) / "toy"
    header = Header(case.canonical(), digest, {"kind": "command"}, IDENTITY, STEPS)
    trace(folder / "trace", rows, made, header)
    from repro_golden.trace import Trace

    facts: dict[str, Any] = {
        "case": case.canonical(), "chain": Trace(folder / "trace").chain, "steps": made, "rollouts": digest,
        "commit": repo.git("rev-parse", "HEAD"), "tree": None, "identity": IDENTITY,
        "recorded": {"by": "t", "at": "2026-11-22T01:00:00+00:00"}, "lock": [], "proofs": PROOFS, "states": [],
        "approved": None, "noise": None,
    }  # fmt: skip
    write_record(folder, facts | dict(record or {}))
    return folder
