"""Traces and golden runs of ours, and golden values as Megatron-LM keeps them."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from repro.doctor.artefacts.bounded_json import read_object
from repro.doctor.artefacts.kinds import Golden, GoldenValues, Reader, Series, TraceRun
from repro_golden.base.canonical import check_format
from repro_golden.base.errors import ReproError
from repro_golden.trace import Trace

__all__ = ["FOREIGN_GOLDEN", "GOLDEN", "TRACE"]

_HEADER = 1 << 24
"""Bytes of a header or of a record; real ones have some ten thousand."""
_STEPS = 1 << 31
"""Bytes of a step log, of some hundreds a step."""
_HEAD = 1 << 16
_NEEDED = ("chain", "case", "identity", "recorded", "proofs", "rollouts")

_BROKEN = (
    ArithmeticError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
    AttributeError,
    struct.error,
    MemoryError,
)
"""What bytes of any kind make of code that expects those of a recorder."""


def _holds(path: Path, *keys: bytes) -> bool:
    """Whether a regular file is small enough for JSON of ours, and holds all of the keys."""
    try:
        if not path.is_file() or path.stat().st_size > _HEADER:
            return False
        raw = path.read_bytes()
    except (OSError, ValueError):
        return False
    return all(key in raw for key in keys)


# -- traces


def _trace(folder: Path) -> Trace:
    """Open a trace that may hold anything.

    Raises:
        ReproError: it is none, or damaged.
    """
    for name, limit in (
        ("header.json", _HEADER),
        ("steps.jsonl", _STEPS),
        ("steps.index", _STEPS),
        ("rank-00000.log", None),
    ):
        path = folder / name
        try:
            # a pipe would be waited on for ever
            if path.exists() and not path.is_file():
                raise ReproError(f"{path} is no regular file: record the trace again")
            if limit and path.exists() and path.stat().st_size > limit:
                raise ReproError(f"{path} is larger than any trace's: record the trace again")
        except OSError as error:
            raise ReproError(f"{path} cannot be read: {error.strerror}") from None
    try:
        return Trace(folder)
    except OSError as error:
        raise ReproError(f"{folder} cannot be read: {error.strerror}") from None
    except _BROKEN as error:
        raise ReproError(f"{folder} is damaged ({type(error).__name__}): record the trace again") from None


def _read_trace(path: Path) -> Iterator[object]:
    trace = _trace(path)
    yield TraceRun(path, trace)
    yield _series(path, trace)


def _series(path: Path, trace: Trace) -> Series:
    """The metrics of a trace; those that a trainer logs once for a rollout apart."""
    steps: dict[int, dict[str, float]] = {}
    rollouts: dict[int, dict[str, float]] = {}
    for record in trace.steps:
        step_metrics = {name: value for name, value in record.metrics.items() if not name.startswith("rollout/")}
        if isinstance(record.step, int):
            steps[record.step] = {name.removeprefix("train/"): value for name, value in step_metrics.items()}
        if len(step_metrics) < len(record.metrics):
            rollouts[len(rollouts)] = {
                name.removeprefix("rollout/"): value
                for name, value in record.metrics.items()
                if name not in step_metrics
            }
    return Series(path, steps, rollouts, flags=_flags(trace.header.case))


def _flags(case: Any) -> dict[str, str]:
    """The plain settings of the built-in trainer, under the names that they have in the field."""
    subject = case.get("subject") if isinstance(case, Mapping) else None
    config = subject.get("config") if isinstance(subject, Mapping) else None
    if not isinstance(config, Mapping):
        return {}
    return {str(k): str(v) for k, v in config.items() if isinstance(v, bool | int | float | str) and len(str(v)) < 200}


# -- golden runs


def _is_golden(path: Path) -> bool:
    try:
        return (path / "trace").is_dir() and _holds(path / "run.json", b'"chain"', b'"proofs"')
    except (OSError, ValueError):
        return False


def _read_golden(path: Path) -> Iterator[object]:
    from repro_golden.store.golden import RUN_FORMAT

    record = read_object(path / "run.json", _HEADER)
    check_format(record.get("format"), RUN_FORMAT, f"the golden run {path}")
    if lost := [key for key in _NEEDED if key not in record]:
        raise ReproError(f"{path}/run.json is damaged (no {lost[0]}): `dvc checkout {path}.dvc` brings it back")
    trace = _trace(path / "trace")
    golden = Golden(path, trace, record, _root(path))
    yield golden
    metrics: dict[str, dict[int, float]] = {}
    for number, step in enumerate(trace.steps):
        for name, value in step.metrics.items():
            metrics.setdefault(name, {})[step.step if isinstance(step.step, int) else number] = value
    yield GoldenValues(path, metrics, golden)
    yield _series(path, trace)


def _root(path: Path) -> Path | None:
    """The repository whose golden run this is; None for a folder that only lies in one."""
    from repro_golden.repository.checkout import find_checkout

    try:
        root = find_checkout(path.resolve()).root.resolve()
        return root if path.resolve().is_relative_to(root / "golden" / "runs") else None
    except (ReproError, OSError, ValueError):
        return None


# -- other projects' golden values


def _is_foreign(path: Path) -> bool:
    try:
        if path.suffix != ".json" or not path.is_file():
            return False
        with path.open("rb") as file:
            head = file.read(_HEAD)
    except (OSError, ValueError):
        return False
    return head.lstrip()[:1] == b"{" and all(
        word in head for word in (b'"start_step"', b'"step_interval"', b'"values"')
    )


def _read_foreign(path: Path) -> Iterator[GoldenValues]:
    raw = read_object(path)
    metrics: dict[str, dict[int, float]] = {}
    for name, table in raw.items():
        values = table.get("values") if isinstance(table, dict) else None
        if not isinstance(values, dict):
            raise ReproError(f"{path}: {json.dumps(name)[:80]} has no values by step: write the golden values again")
        steps = [step for step in values if step.isascii() and step.isdecimal() and len(step) < 19]
        metrics[name] = {int(step): _number(values[step]) for step in steps}
    yield GoldenValues(path, metrics)


def _number(value: Any) -> float:
    """A golden value; NaN for what is no number (Megatron writes the text ``nan`` for a step without one)."""
    try:
        return float(value) if isinstance(value, int | float | str) else math.nan
    except (ValueError, OverflowError):
        return math.nan


TRACE = Reader("trace", lambda path: _holds(path / "header.json", b'"recorder"', b'"scheme"'), _read_trace)
GOLDEN = Reader("golden run", _is_golden, _read_golden)
FOREIGN_GOLDEN = Reader("golden values", _is_foreign, _read_foreign)
