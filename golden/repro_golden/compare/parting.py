"""Whether a replay that is under way has left its baseline, so that it need go no further."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from repro_golden.base.errors import ReproError
from repro_golden.compare.renames import aligned, first_other_chain
from repro_golden.trace import StepRecord, Trace

__all__ = ["Parting"]


class Parting:
    """Told of every step that was written.

    Steps are told apart by their roots, of which names are a part. Where one differs, rows are looked at once: a replay
    in which signals were only renamed makes all of its steps, and is judged when it has.

    Args:
        baseline: Folder of the baseline's trace; None for a replay without one.
        trace: Folder of the trace that is being written; None where nothing is.
    """

    def __init__(self, baseline: str | None, trace: str | None) -> None:
        self._baseline = Trace(Path(baseline)) if baseline and trace else None
        self._trace = Path(trace or "")
        self._roots = {record.step: record.root for record in self._baseline.steps} if self._baseline else {}

    def seen(self, records: Iterable[StepRecord]) -> bool:
        """Whether one of the steps that were just written differs from the baseline's by more than names."""
        if all(self._roots.get(record.step, record.root) == record.root for record in records):
            return False
        if self._only_renamed():
            self._roots = {}
            return False
        return True

    def _only_renamed(self) -> bool:
        assert self._baseline is not None, "without one there are no roots"
        try:
            trace = Trace(self._trace)
            if trace.header.first_step != self._baseline.header.first_step:
                return False
            return first_other_chain(self._baseline, aligned(self._baseline, trace).trace) is None
        except ReproError:  # rows that cannot be read here: the whole is judged by who can, or who says so
            return True
