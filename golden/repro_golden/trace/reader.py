"""Reading a trace: the step log at once, rows only when asked for."""

from __future__ import annotations

import bisect
import copy
import itertools
import math
import re
from collections.abc import Mapping, Sequence
from functools import cached_property, lru_cache, partial
from pathlib import Path
from typing import Any

from repro_golden.base.canonical import check_format, digest, read_json
from repro_golden.base.errors import ReproError
from repro_golden.fingerprint.definition import SCHEME, reference_in_pieces
from repro_golden.trace import columns, frames
from repro_golden.trace.families import is_norm, masks, optimizer_of, skipped
from repro_golden.trace.model import FORMAT, Header, NotFinite, Row, StepRecord, checked, dump_path, root
from repro_golden.trace.step_log import STEPS, IndexedSteps, Order, StepLog, indexed
from repro_golden.trace.writer import HEADER

__all__ = ["Trace", "read_dump"]


class Trace:
    """A trace directory, finished or cut off.

    Attributes:
        header: What it is a trace of.
        steps: The whole steps it holds, in order. A line cut short by a kill, and a step whose rows are not all there,
            do not count.
        end: The recorder's closing line (why it stopped), or None when it never got that far.
    """

    _told: tuple[Any, Order] | None = None  # what the closing line had of it, as read

    def __init__(self, directory: Path) -> None:
        """Open a trace.

        Raises:
            ReproError: no trace, a newer format, or a step log that contradicts itself.
        """
        self.directory = directory
        raw = read_json(directory / HEADER, "trace header")
        check_format(raw.get("format"), FORMAT, f"the trace {directory}")
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

    def _read_steps(self) -> tuple[Sequence[StepRecord], Mapping[str, Any] | None]:
        if self._frames is None and (by_index := indexed(self.directory)):
            return by_index
        self._step_log.more()  # lines first: the rows of each are there before it is
        if self._log is not None and self._frames is not None:
            self._log.update((step, rows) for step, rows, _ in self._frames.more())
        steps = self._step_log.steps
        # what lost rows did not end well, whatever its closing line says
        if self._log is not None and len(self._log) < len(steps):
            return steps[: len(self._log)], None
        return steps, self._step_log.end

    def until(self, count: int) -> Trace:
        """The same trace as far as its first `count` steps: how its program ended is no part of those."""
        if count >= len(self.steps):
            return self
        part = copy.copy(self)
        vars(part).pop("_first_rows", None)
        part.steps = list(self.steps[:count])
        if self.end is not None:
            part.end = {key: value for key, value in self.end.items() if key not in ("exit", "spent", "stopped")}
        return part

    def more(self) -> None:
        """Read on, of a trace that was being written when it was opened.

        Raises:
            ReproError: its step log contradicts itself.
        """
        if self._frames is not None:
            self.steps, self.end = self._read_steps()

    @property
    def complete(self) -> bool:
        """Whether the run made every step it was meant to make."""
        return len(self.steps) == self.header.steps and self.end is not None

    @property
    def chain(self) -> str:
        """The chain after the last step; of a trace without steps, the chain's start."""
        return self.steps[-1].chain if self.steps else digest("chain", SCHEME)

    @cached_property
    def _columns(self) -> columns.ColumnReader:
        """The rows of a sealed trace."""
        return columns.ColumnReader(self.directory / "rank-00000.parquet")

    @cached_property
    def _first_rows(self) -> list[int]:
        """The number of each step's first row among those of a sealed trace without an index."""
        return list(itertools.accumulate((record.signals for record in self.steps), initial=0))

    @cached_property
    def _step_log(self) -> StepLog:
        return StepLog(self.directory / STEPS)

    @cached_property
    def _frames(self) -> frames.FrameReader | None:
        """The rows of an unsealed trace; None when it is sealed."""
        path = self.directory / "rank-00000.log"
        return frames.FrameReader(path) if path.exists() else None

    @cached_property
    def _log(self) -> dict[int, list[Row]] | None:
        """Likewise, those that were read, by step."""
        return None if self._frames is None else {}

    def rows(self, index: int) -> list[Row]:
        """The signals of the `index`-th step of `steps`, in the order they were observed.

        Raises:
            ReproError: the rows are missing, or are not those that the step's root stands for.
        """
        return list(_rows(self, index))

    def as_made(self, index: int) -> list[int]:
        """The steps of the round of several optimizers that a step is of, by index, as the program made them.

        One alone where nothing tells: in a program of one optimizer, and where each rank has an order of its own.
        """
        orders = (self.end or {}).get("rounds")
        if self._told is None or self._told[0] is not orders:
            self._told = (orders, Order.read(orders[0] if isinstance(orders, list) and len(orders) == 1 else None))
        whole_round = self._told[1].around(index)
        if whole_round is None:
            return [index]
        first, order = whole_round
        places = sorted(range(len(order)), key=lambda place: order[place][0])
        return [first + place for place in places if first + place < len(self.steps)]

    def row(self, index: int, phase: str, name: str) -> Row | None:
        """One signal of one step, or None when it was not observed."""
        return next((r for r in self.rows(index) if r.phase == phase and r.name == name), None)

    def shows(self, phase: str, name: str) -> bool:
        """Whether any step has a signal; True where that cannot be told without reading all rows."""
        if self._log is not None:
            return any(row.phase == phase and row.name == name for rows in self._log.values() for row in rows)
        try:
            return self._columns.shows(phase, name)
        except Exception:  # noqa: BLE001 - pyarrow raises many kinds for a damaged file; who reads rows is told
            return True

    def first_nonfinite(self) -> NotFinite | None:
        """What is NaN or infinite first that should not be (`nonfinite`): a signal, or a number that was printed.

        Raises:
            ReproError: the rows are missing or damaged.
        """
        signal = self._first_nonfinite_signal()
        printed = (NotFinite(r.step, "", name) for i, r in enumerate(self.steps) for name in self.nonfinite_numbers(i))
        every = [bad for bad in (signal, next(printed, None)) if bad is not None]
        return min(every, key=lambda bad: bad.step, default=None)

    def nonfinite(self, index: int) -> list[Row]:
        """The signals of a step that are NaN or infinite and should not be.

        Buffers are left out, and modules and files that may hold some: a mask of attention is infinite on purpose. So
        are gradients, and their norm, that a scaler found so and made no step of, where it made others: it looks for
        its scale in that way. Where it made later ones, and no optimizer stepped meanwhile, so is all that was told of
        that step. A run that has ended with more skipped steps than it ever had in a row may have lost its scale.

        Raises:
            ReproError: the rows are missing or damaged.
        """
        return [row for row in self.rows(index) if row.nonfinite and not self._on_purpose(index, row.phase, row.name)]

    def nonfinite_numbers(self, index: int) -> list[str]:
        """Likewise the metrics of a step, also those that are in no row.

        Raises:
            ReproError: the rows are missing or damaged.
        """
        return [name for name in self.steps[index].nonfinite if not self._on_purpose(index, "", name)]

    def _on_purpose(self, index: int, phase: str, name: str) -> bool:
        if masks(phase, name):
            return True
        made, left_out = _made(self, index)
        if is_norm(name):  # whose it is, its name does not always say
            return any(_unscaled(self, index, optimizer) for optimizer in left_out)
        if phase in ("", "loss"):
            return bool(made) and all(_unscaled(self, index, optimizer, later=True) for optimizer in made)
        return phase == "grad" and _unscaled(self, index, optimizer_of(name))

    def _first_nonfinite_signal(self) -> NotFinite | None:
        if self._log is not None:
            bad = ((record.step, row) for i, record in enumerate(self.steps) for row in self.nonfinite(i))
            return next((NotFinite(step, row.phase, row.name) for step, row in bad), None)
        try:
            rows = (row for row in self._columns.nonfinite() if row[0] < self._row_count)
            first = next((row for row in rows if not self._on_purpose(self._step_at(row[0]), *row[1:])), None)
        except ReproError:
            raise
        except ImportError as error:  # of this Python, and no damage
            raise ReproError(f"{self.directory} cannot be read here: {error}; install what is lacking") from None
        except FileNotFoundError:
            raise ReproError(f"{self.directory} has no rows: run `repro golden pull`, or record it again") from None
        except Exception as error:  # noqa: BLE001 - pyarrow raises many kinds for a damaged file
            path, kind = self.directory / "rank-00000.parquet", type(error).__name__
            raise ReproError(f"{path} is damaged: {kind}; pull or record it again") from None
        return None if first is None else NotFinite(self.steps[self._step_at(first[0])].step, *first[1:])

    @property
    def _row_count(self) -> int:
        if isinstance(self.steps, IndexedSteps):
            return self.steps.first_row(len(self.steps) - 1) + self.steps[-1].signals if self.steps else 0
        return self._first_rows[-1]

    def _step_at(self, row: int) -> int:
        """The index of the step that a row of a sealed trace belongs to."""
        first = self.steps.first_row if isinstance(self.steps, IndexedSteps) else self._first_rows.__getitem__
        return bisect.bisect_right(range(len(self.steps)), row, key=first) - 1

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


def _unscaled(trace: Trace, index: int, optimizer: str, *, later: bool = False) -> bool:
    """Whether a scaler skipped an optimizer's step, which its gradients had too large a scale for.

    It made a later one then, or may yet, or, unless that is asked for, the run has ended soon after one that it made:
    which step is the last is chance.
    """
    if optimizer not in _made(trace, index)[1]:
        return False
    if trace.end is None or index < _last_made(trace, optimizer):
        return True
    return not later and _may_end_so(trace, optimizer)


@lru_cache(maxsize=64)
def _last_made(trace: Trace, optimizer: str) -> int:
    """The index of the last step that an optimizer made and no scaler left out, of a whole trace; -1 without one."""
    backwards = ((index, *_made(trace, index)) for index in reversed(range(len(trace.steps))))
    return next((index for index, made, left_out in backwards if optimizer in made - left_out), -1)


@lru_cache(maxsize=64)
def _may_end_so(trace: Trace, optimizer: str) -> bool:
    """Whether a whole trace ends with as few steps left out as it had in a row before, or with one."""
    steps = [optimizer in left_out for made, left_out in map(partial(_made, trace), range(len(trace.steps)))
             if optimizer in made]  # fmt: skip
    *before, last = [len(list(group)) if out else 0 for out, group in itertools.groupby(steps)]
    return bool(before) and last <= max(1, *before)


@lru_cache(maxsize=4096)
def _made(trace: Trace, index: int) -> tuple[frozenset[str], frozenset[str]]:
    """The optimizers of which a step has gradients, and those whose step was skipped."""
    rows = trace.rows(index)
    return frozenset(optimizer_of(row.name) for row in rows if row.phase == "grad"), frozenset(skipped(rows))


@lru_cache(maxsize=64)
def _rows(trace: Trace, index: int) -> tuple[Row, ...]:
    record = trace.steps[index]
    if trace._log is not None:
        rows = trace._log.get(record.step, [])
    else:
        path = trace.directory / "rank-00000.parquet"
        try:
            first = trace.steps.first_row(index) if isinstance(trace.steps, IndexedSteps) else trace._first_rows[index]
            rows = trace._columns.rows(first, record.signals)
        except FileNotFoundError:
            raise ReproError(f"{trace.directory} has no rows: run `repro golden pull`, or record it again") from None
        except ReproError:
            raise
        except ImportError as error:  # of this Python, and no damage
            raise ReproError(f"{trace.directory} cannot be read here: {error}; install what is lacking") from None
        except Exception as error:  # noqa: BLE001 - pyarrow raises many kinds for a damaged file
            raise ReproError(f"{path} is damaged: {type(error).__name__}; pull or record it again") from None
    try:
        same = root(rows) == record.root and digest(frames.pack(record.step, rows)) == record.content
    except Exception:  # noqa: BLE001 - a damaged file gives rows of anything: no phase, a number out of range, no text
        same = False
    if not same:
        raise ReproError(f"step {record.step} of {trace.directory} does not match its root: its rows were changed")
    return tuple(rows)
