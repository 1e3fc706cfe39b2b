"""What a kind of subject adds to the run of a command: to its environment and command line, and to its rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from repro_golden.base.errors import ReproError
from repro_golden.compare.traces import jsonable
from repro_golden.recording.attach.collect import Collected
from repro_golden.recording.attach.settings import Settings
from repro_golden.trace import Header, Row, StepRecord, TraceWriter, seal

__all__ = ["Addition", "Written"]


class Addition(Protocol):
    """What is added to one run."""

    recorder: bool
    """Whether the recorder looks at the program's steps; without it `rows` are all there is."""

    def settings(self, settings: Settings) -> Settings:
        """What the program's processes are told."""

    def variables(self, found: Mapping[str, str]) -> dict[str, str]:
        """The program's environment."""

    def rows(self, step: int) -> Sequence[Row] | None:
        """The rows of a step, by its number from 0, beside the recorder's; None as long as they are not there.

        Raises:
            ReproError: they can never be.
        """

    def ended(self, code: int) -> None:
        """The program has ended, with this exit code: what is not there now will not come.

        Raises:
            ChildFailure: it was not what it was asked to be.
        """

    def about(self) -> dict[str, Any]:
        """What a trace's header tells of it."""


class Written:
    """Makes a trace of what a program writes by itself; to `command` what `Gathering` is to a recorder's records.

    Args:
        out: The trace's folder.
        header: Makes the trace's header, once its first step is there.
        addition: Whose rows they are.
        steps: How many of them are wanted.
    """

    def __init__(self, out: Path, header: Callable[[], Header], addition: Addition, steps: int) -> None:
        self._out, self._header, self._addition, self._wanted = out, header, addition, steps
        self._writer: TraceWriter | None = None
        self._first = 0
        self._last: Sequence[Row] = ()

    @property
    def steps(self) -> int:
        """How many were written."""
        return self._writer.steps if self._writer else 0

    def poll(self) -> list[StepRecord]:
        """Write the steps that are there since.

        Raises:
            ReproError: see `Addition.rows`.
        """
        records = []
        while self.steps < self._wanted and (rows := self._addition.rows(self.steps)) is not None:
            if self._writer is None:
                header = self._header()
                self._writer, self._first = TraceWriter(self._out, header), header.first_step
            for row in rows:
                self._writer.add(row)
            records.append(self._writer.end_step(self._first + self.steps))
            self._last = rows
        return records

    def finish(self, command: Sequence[str], code: int, reason: str = "finished") -> Collected:
        """Write what is left, close the trace and seal it.

        Raises:
            ReproError: no step is there, or the program ended well and wrote less than it should.
        """
        try:
            self.poll()
        except ReproError:
            if self.steps == 0 or code == 0:
                raise  # else what it wrote before it failed counts, and why it failed says more
        if self._writer is None:
            raise ReproError(f"{command[0]} (exit code {code}) wrote no train dump of a whole step")
        terminal = {f"{row.phase} {row.name}": row.fingerprint for row in self._last}
        self._writer.close(jsonable({"reason": reason, "ranks": 1, "exit": code, "terminal": terminal}))
        seal(self._out)
        return Collected(self.steps, 1, complete=True, stopped=True, terminal=terminal)

    def close(self) -> None:
        """Let go of the trace's files, whatever became of it."""
        if self._writer:
            self._writer.let_go()
