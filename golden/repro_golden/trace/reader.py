"""Reading a trace: the step log at once, rows only when asked for."""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Mapping
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from repro_golden.base.canonical import check_format, digest, read_json
from repro_golden.base.errors import ReproError
from repro_golden.base.files import read_regular
from repro_golden.fingerprint.definition import SCHEME, reference_in_pieces
from repro_golden.trace import columns, frames
from repro_golden.trace.model import Header, Row, StepRecord, chain, checked, dump_path, from_checked_line, root
from repro_golden.trace.writer import HEADER, STEPS

__all__ = ["Trace", "read_dump"]


class Trace:
    """A trace directory, finished or cut off.

    Attributes:
        header: What it is a trace of.
        steps: The whole steps it holds, in order. A line cut short by a kill, and a step whose rows are not all there,
            do not count.
        end: The recorder's closing line (why it stopped), or None when it never got that far.
    """

    def __init__(self, directory: Path) -> None:
        """Open a trace.

        Raises:
            ReproError: no trace, a newer format, or a step log that contradicts itself.
        """
        self.directory = directory
        raw = read_json(directory / HEADER, "trace header")
        check_format(raw.get("format"), 1, f"the trace {directory}")
        scheme = raw.get("scheme") if raw.get("recorder") != 1 else "a draft of psum128"
        if scheme != SCHEME:
            raise ReproError(f"{directory} has fingerprints of {scheme}, this repro compares {SCHEME}: record it again")
        try:
            self.header = Header.from_mapping(checked(raw))
        except (KeyError, TypeError, ValueError) as error:
            raise ReproError(f"{directory / HEADER} is damaged ({error}): record the trace again") from None
        self.steps, self.end = self._read_steps()

    @property
    def modules(self) -> frozenset[str] | None:
        """Top-level modules that the run's processes had loaded at their end; None where nobody said."""
        names = (self.end or {}).get("modules")
        return None if names is None else frozenset(map(str, names))

    @property
    def sources(self) -> Mapping[str, str]:
        """Of each module that the run loaded from a git tree beside its own code: the tree's commit and changes."""
        return dict((self.end or {}).get("sources", {}))

    def _read_steps(self) -> tuple[list[StepRecord], Mapping[str, Any] | None]:
        path = self.directory / STEPS
        try:
            lines = read_regular(path).decode("utf-8", errors="replace").split("\n")
        except FileNotFoundError:
            return [], None
        except OSError as error:
            raise ReproError(f"{path} cannot be read: {error.strerror}") from None
        steps: list[StepRecord] = []
        previous = digest("chain", SCHEME)
        for number, line in enumerate(lines[:-1], 1):  # what follows the last newline is a line cut short
            try:
                raw = from_checked_line(line)
                if "end" in raw:
                    return self._whole(steps, raw["end"])
                record = StepRecord.from_line(line)
            except (ValueError, KeyError, TypeError, AttributeError, struct.error):
                raise ReproError(f"{path} line {number} is damaged: record the trace again") from None
            previous = chain(previous, record.step, record.root)
            if previous != record.chain:
                raise ReproError(f"{path} line {number} does not continue the chain: the log was edited or damaged")
            steps.append(record)
        return self._whole(steps, None)

    def _whole(
        self, steps: list[StepRecord], end: Mapping[str, Any] | None
    ) -> tuple[list[StepRecord], Mapping[str, Any] | None]:
        """The steps whose rows are there; what lost rows did not end well, whatever its closing line says."""
        available = len(steps) if self._log is None else len(self._log)
        return (steps, end) if available >= len(steps) else (steps[:available], None)

    @property
    def complete(self) -> bool:
        """Whether the run made every step it was meant to make."""
        return len(self.steps) == self.header.steps and self.end is not None

    @property
    def chain(self) -> str:
        """The chain after the last step; of a trace without steps, the chain's start."""
        return self.steps[-1].chain if self.steps else digest("chain", SCHEME)

    @cached_property
    def _log(self) -> dict[int, list[Row]] | None:
        """Rows of an unsealed trace by step; None when it is sealed."""
        path = self.directory / "rank-00000.log"
        if not path.exists():
            return None
        return dict(frames.read_frames(path))

    def rows(self, index: int) -> list[Row]:
        """The signals of the `index`-th step of `steps`, in the order they were observed.

        Raises:
            ReproError: the rows are missing, or are not those that the step's root stands for.
        """
        return list(_rows(self, index))

    def row(self, index: int, phase: str, name: str) -> Row | None:
        """One signal of one step, or None when it was not observed."""
        return next((r for r in self.rows(index) if r.phase == phase and r.name == name), None)

    def name_of(self, phase: str, name: str) -> str:  # noqa: ARG002 - a trace under other names knows more
        """The name under which the program showed a signal: its own, unless the trace is seen under a baseline's."""
        return name


def read_dump(trace: Trace, step: int, row: Row) -> bytes | None:
    """The whole content of a signal, where it was dumped; None where it was not, or is no longer what the row says."""
    try:
        content = dump_path(trace.directory, step, row.phase, trace.name_of(row.phase, row.name)).read_bytes()
    except OSError:
        return None
    bits = re.search(r"\d+", row.dtype)  # a hash of whole words does not see a cut inside the last one
    if bits and len(content) != math.prod(row.shape) * max(1, int(bits[0]) // 8):
        return None
    known = row.placement is not None or reference_in_pieces(content) == row.lanes
    return content if known else None


@lru_cache(maxsize=64)
def _rows(trace: Trace, index: int) -> tuple[Row, ...]:
    record = trace.steps[index]
    if trace._log is not None:
        rows = trace._log.get(record.step, [])
    else:
        path = trace.directory / "rank-00000.parquet"
        try:
            _, rows = columns.read_step(path, index)
        except FileNotFoundError:
            raise ReproError(f"{trace.directory} has no rows: run `repro golden pull`, or record it again") from None
        except ReproError:
            raise
        except Exception as error:  # noqa: BLE001 - pyarrow raises many kinds for a damaged file
            raise ReproError(f"{path} is damaged: {type(error).__name__}; pull or record it again") from None
    try:
        same = root(rows) == record.root and digest(frames.pack(record.step, rows)) == record.content
    except Exception:  # noqa: BLE001 - a damaged file gives rows of anything: no phase, a number out of range, no text
        same = False
    if not same:
        raise ReproError(f"step {record.step} of {trace.directory} does not match its root: its rows were changed")
    return tuple(rows)
