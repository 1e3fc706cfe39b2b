"""Writing a trace: live as append-only files, then sealed into columns."""

from __future__ import annotations

import contextlib
import io
import math
import os
import struct
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from repro_golden.base.canonical import canonical_json, digest, parse_json, write_atomic
from repro_golden.base.errors import MachineFailureError, ReproError
from repro_golden.fingerprint.definition import SCHEME, reference, reference_word
from repro_golden.trace import columns, frames
from repro_golden.trace.model import DIGEST, METRIC, Header, Row, StepRecord, chain, root, to_checked_line
from repro_golden.trace.step import Step
from repro_golden.trace.step_log import STEPS, write_index

__all__ = ["TraceWriter", "digest_row", "metric_row", "seal"]

HEADER, RANK = "header.json", "rank-{:05d}"


def metric_row(phase: str, name: str, value: float) -> Row:
    """The row of a Python float: its 64 bits are the content, so NaN payloads and -0.0 are told apart."""
    raw = struct.pack("<d", value)
    finite = math.isfinite(value)
    magnitude = abs(value) if finite else 0.0
    return Row(
        phase,
        name,
        METRIC,
        (),
        reference_word(int.from_bytes(raw, "little")),
        int(not finite),
        magnitude,
        magnitude,
        raw,
        raw,
    )


def digest_row(phase: str, name: str, sha256: bytes) -> Row:
    """The row of a digest of something that lies elsewhere: its bytes are all that is known of it."""
    return Row(phase, name, DIGEST, (), reference(sha256), 0, 0.0, 0.0, sha256, sha256)


def _text(value: Mapping[str, Any]) -> Any:
    """The same as JSON that can be written: names of files and words of a command line may be no UTF-8."""
    return parse_json(canonical_json(value).encode(errors="replace"))


class TraceWriter:
    """The recorder's side of a trace directory: header, step log, and one append-only log for this rank.

    The rank's log is flushed before the step's line is, so a reader never meets a line whose rows are missing.

    Attributes:
        directory: Of the trace.
        step: Takes the signals of the step under way.
        steps: How many are written.
    """

    def __init__(self, directory: Path, header: Header, rank: int = 0, *, sealing: bool = False) -> None:
        """Start a trace in an empty or new directory.

        Args:
            directory: Where.
            header: What it is a trace of.
            rank: Whose rows these are.
            sealing: Write the columns beside the log, so that `seal` finds them when the trace was closed. It costs
                time in each step, and is for who waits for steps anyway.

        Raises:
            ReproError: the directory already holds a trace.
            MachineFailureError: it cannot be written.
        """
        if (directory / HEADER).exists():
            raise ReproError(f"{directory} already holds a trace: choose another folder or remove it")
        self.directory = directory
        write_atomic(directory / HEADER, to_checked_line(_text(header.to_mapping())))
        self.step = Step()
        self._first_step = header.first_step
        self._chain = digest("chain", SCHEME)
        self.steps = 0
        self._columns: columns.ColumnWriter | None = None
        try:
            # unbuffered: what write() returned from survives a kill of this process
            self._step_log: io.FileIO = (directory / STEPS).open("ab", buffering=0)
            with contextlib.ExitStack() as undo:
                undo.callback(self._step_log.close)
                self._log: io.FileIO = (directory / (RANK.format(rank) + ".log")).open("ab", buffering=0)
                if sealing:
                    self._columns = columns.ColumnWriter(directory / (RANK.format(rank) + ".parquet"))
                undo.pop_all()
        except OSError as error:
            raise MachineFailureError(f"cannot write a trace in {directory}: {error.strerror}") from error

    def add(self, row: Row) -> None:
        """Take one signal of the step under way; see `Step.add`."""
        self.step.add(row)

    def write(self, rows: Iterable[Row], shown: Mapping[str, float] = MappingProxyType({})) -> StepRecord:
        """Write the next step whole: `add` of each row, and `end_step` with the number that follows."""
        for row in rows:
            self.step.add(row)
        return self.end_step(self._first_step + self.steps, shown)

    def end_step(self, step: int, shown: Mapping[str, float] = MappingProxyType({})) -> StepRecord:
        """Write the step under way and return its record.

        Args:
            step: Its number.
            shown: Metrics that are not compared by bits. One that is, of the same name, stands.

        Raises:
            ReproError: nothing was observed.
            MachineFailureError: the disk is full.
        """
        rows, metrics = self.step.rows, self.step.metrics
        only = {name: value for name, value in shown.items() if name not in metrics}
        packed = self.step.end(step)
        if not rows:
            raise ReproError(f"step {step} observed nothing: the trainer must call observe in every step")
        step_root = root(rows)
        self._chain = chain(self._chain, step, step_root)
        record = StepRecord(step, step_root, self._chain, len(rows), digest(packed), metrics | only, tuple(only))
        self._append(self._log, packed)
        self._append(self._step_log, record.to_line().encode() + b"\n")
        if self._columns:
            with self._failing():
                self._columns.add(frames.payload_of(packed))
        self.steps += 1
        return record

    def close(self, end: Mapping[str, Any]) -> None:
        """Write the closing line, ``{"end": {...}}``, and sync to disk."""
        self._append(self._step_log, to_checked_line({"end": _text(end)}).encode() + b"\n")
        if self._columns:
            with self._failing():
                self._columns.close()
        for file in (self._log, self._step_log):
            os.fsync(file.fileno())
            file.close()

    def let_go(self) -> None:
        """Close the files as they are; after `close` there is nothing left to do."""
        if self._columns:
            self._columns.let_go()
        for file in (self._log, self._step_log):
            file.close()

    def _append(self, file: io.FileIO, raw: bytes) -> None:
        view = memoryview(raw)
        with self._failing():
            while view:
                view = view[file.write(view) or 0 :]

    @contextlib.contextmanager
    def _failing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise MachineFailureError(
                f"cannot write the trace in {self.directory}: {error.strerror}; the steps before stay readable"
            ) from error


def rewrite_header(directory: Path, header: Header) -> None:
    """Put another header in place of a trace's own: of a run whose length was not known before.

    Raises:
        MachineFailureError: it cannot be written.
    """
    write_atomic(directory / HEADER, to_checked_line(header.to_mapping()))


def seal(directory: Path) -> None:
    """Turn each rank's log into columns (whole steps only) and remove the log. Sealing twice is harmless.

    Lines of the step log whose rows were lost, and the closing line with them, go too.
    """
    for log in sorted(directory.glob("rank-*.log")):
        sealed = log.with_suffix(".parquet")
        if sealed.exists():  # written beside the log
            steps = sum(1 for _ in frames.FrameReader(log).payloads())
        else:
            try:
                steps = columns.write(sealed, frames.FrameReader(log).payloads())
            except OSError as error:
                raise MachineFailureError(f"cannot write {sealed}: {error}; free space and run again") from error
        _shorten(directory / STEPS, steps)
        write_index(directory)
        log.unlink()


def _shorten(step_log: Path, steps: int) -> None:
    lines = step_log.read_bytes().splitlines(keepends=True) if step_log.exists() else []
    recorded = [line for line in lines if not line.startswith(b'{"check"') or b'"end":' not in line]
    if len(recorded) > steps:
        write_atomic(step_log, b"".join(lines[:steps]))
