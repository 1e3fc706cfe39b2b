"""The trace that a probe left, and what lies beside it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from repro_bisect.probe.executors import Signal
from repro_bisect.probe.request import Request
from repro_golden.trace import Trace, dump_path

__all__ = ["dumped", "ended_itself", "trace_in", "undumped"]


def trace_in(folder: Path) -> Trace | None:
    """The trace in a folder; None where no step was made."""
    if not (folder / "steps.jsonl").exists():
        return None
    trace = Trace(folder)
    return trace if trace.steps else None


def dumped(trace: Path, signals: Sequence[Signal]) -> list[Signal]:
    """Those of the signals whose whole content lies beside a trace."""
    return [signal for signal in signals if dump_path(trace, *signal).exists()]


def undumped(trace: Path, asked: Request) -> tuple[Signal, ...]:
    """Those whose whole content was asked for, and does not lie there."""
    return tuple(sorted(set(asked.dump) - set(dumped(trace, asked.dump))))


def ended_itself(trace: Trace) -> bool:
    """Whether a program made fewer steps than it was asked for and ended well: it would again."""
    end = trace.end or {}
    return len(trace.steps) < trace.header.steps and end.get("reason") == "finished" and end.get("exit") == 0
