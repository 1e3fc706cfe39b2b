"""The step log of a trace, its index, and what its last line says of a program's own order of steps.

The index has a head and three columns of fixed width. It says what the log beside it says, and holds a digest of it:
where both agree, the log is opened without reading its lines, and a step is found by its number. A log without an
index, one that was changed since, and one whose index is of format 2, is read line by line.

Rounds are what a closing line says of a rank's order: ``[[times, [[offset, number], ...]], ...]``. So many rounds in a
row had, for each of the trace's steps, the place of the program's own in the round, and the number of its optimizer.
"""

from __future__ import annotations

import bisect
import functools
import itertools
import struct
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, overload

from repro_golden.base.canonical import digest, parse_json, write_atomic, xxh3_128_hexdigest
from repro_golden.base.errors import ReproError
from repro_golden.base.files import open_regular, read_regular
from repro_golden.fingerprint.definition import SCHEME
from repro_golden.trace.model import StepRecord, closing

__all__ = ["INDEX", "STEPS", "IndexedSteps", "Order", "Rounds", "StepLog", "indexed", "write_index"]

STEPS, INDEX = "steps.jsonl", "steps.index"

_HEAD = struct.Struct("<8sQQ16s16s")
"""Magic, number of steps, where the log's closing line begins, digest of the log, digest of the columns."""
_COUNT = struct.Struct("<I")
"""An entry of the first two columns."""
_CHAIN = 16
"""Bytes of an entry of the third."""
_MAGIC = b"steps\x00\x00\x02"
_BROKEN = (ValueError, KeyError, TypeError, AttributeError, struct.error)

Rounds = Sequence[tuple[int, Sequence[Sequence[int]]]]


class StepLog:
    """Reads the lines of a step log, also while it grows, and checks that each continues the chain.

    Attributes:
        steps: The whole steps so far.
        offsets: Where each one's line begins, in bytes; then where the next would.
        end: The closing line's content; None where there is none yet.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._chain, self._lines = digest("chain", SCHEME), 0
        self.steps: list[StepRecord] = []
        self.offsets = [0]
        self.end: Mapping[str, Any] | None = None

    def more(self) -> None:
        """Read on from where the last call ended. A line without its newline was cut short, and is not there yet.

        Raises:
            ReproError: it cannot be read, or contradicts itself.
        """
        if self.end is not None:
            return
        try:
            with open_regular(self._path) as file:
                file.seek(self.offsets[-1])
                raw = file.read()
        except FileNotFoundError:
            return
        except OSError as error:
            raise ReproError(f"{self._path} cannot be read: {error.strerror}") from None
        for line in raw.split(b"\n")[:-1]:
            self._lines += 1
            try:
                text = line.decode("utf-8", errors="replace")
                self.end = closing(text)
                if self.end is not None:
                    return
                record = StepRecord.from_line(text, self._chain)
            except _BROKEN:
                raise ReproError(
                    f"{self._path} line {self._lines} is damaged or out of order: record the trace again"
                ) from None
            self._chain = record.chain
            self.steps.append(record)
            self.offsets.append(self.offsets[-1] + len(line) + 1)


def write_index(folder: Path) -> None:
    """Write the index of a trace's step log.

    Raises:
        ReproError: the log contradicts itself.
        MachineFailureError: the index cannot be written.
    """
    log = StepLog(folder / STEPS)
    log.more()
    lengths = [end - begin for begin, end in itertools.pairwise(log.offsets)]
    packed = b"".join(
        [
            *map(_COUNT.pack, lengths),
            *(_COUNT.pack(record.signals) for record in log.steps),
            *(bytes.fromhex(record.chain) for record in log.steps),
        ]
    )
    content = (folder / STEPS).read_bytes() if log.steps else b""
    head = _HEAD.pack(_MAGIC, len(log.steps), log.offsets[-1], _digest(content), _digest(packed))
    write_atomic(folder / INDEX, head + packed)


def indexed(folder: Path) -> tuple[IndexedSteps, Mapping[str, Any] | None] | None:
    """The steps and the closing line of a log by its index; None where none fits it."""
    try:
        raw = read_regular(folder / INDEX)
        magic, count, end, of_log, of_columns = _HEAD.unpack_from(raw)
        columns = memoryview(raw)[_HEAD.size :]
        log = read_regular(folder / STEPS)
        if magic != _MAGIC or len(columns) != count * (2 * _COUNT.size + _CHAIN) or _digest(columns) != of_columns:
            return None
        if _digest(log) != of_log:
            return None
        tail, whole, _ = log[end:].partition(b"\n")
        end_line = closing(tail.decode()) if whole else None
        return None if whole and end_line is None else (IndexedSteps(log, columns, count), end_line)
    except (OSError, ReproError, *_BROKEN):
        return None


def _digest(raw: bytes | memoryview) -> bytes:
    return bytes.fromhex(xxh3_128_hexdigest(raw))


class IndexedSteps(Sequence[StepRecord]):
    """The steps of a log that has an index; a line is read when its step is asked for."""

    def __init__(self, log: bytes, columns: memoryview, count: int) -> None:
        self._log, self._count = log, count
        self._lengths, self._signals = (columns[n * count * _COUNT.size :][: count * _COUNT.size] for n in (0, 1))
        self._chains = columns[2 * count * _COUNT.size :]
        self._every: list[StepRecord] | None = None

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> StepRecord: ...
    @overload
    def __getitem__(self, index: slice) -> list[StepRecord]: ...
    def __getitem__(self, index: int | slice) -> StepRecord | list[StepRecord]:
        """One step or several."""
        if self._every is not None:
            return self._every[index]
        numbers = range(len(self))[index]
        return self._step(numbers) if isinstance(numbers, int) else [self._step(number) for number in numbers]

    def __iter__(self) -> Iterator[StepRecord]:
        if self._every is None:  # who goes through them once mostly does so again
            self._every = [self._step(number) for number in range(len(self))]
        return iter(self._every)

    def first_row(self, index: int) -> int:
        """The number of a step's first row among those of the trace."""
        return self._rows[index]

    def chain(self, index: int) -> str:
        """The chain after a step."""
        return bytes(self._chains[index * _CHAIN :][:_CHAIN]).hex()

    @functools.cached_property
    def _rows(self) -> list[int]:
        return _sums(self._signals)

    @functools.cached_property
    def _offsets(self) -> list[int]:
        return _sums(self._lengths)

    def _step(self, index: int) -> StepRecord:
        begin, end = self._offsets[index : index + 2]
        try:
            return StepRecord.from_mapping(parse_json(self._log[begin : end - 1]), self.chain(index))
        except _BROKEN:  # whoever made both files up gets a line too
            raise ReproError(
                f"step {index} of a step log is not where its index says: record the trace again"
            ) from None


def _sums(column: memoryview) -> list[int]:
    """What comes before each entry, and all of them."""
    return list(itertools.accumulate((count for (count,) in _COUNT.iter_unpack(column)), initial=0))


class Order:
    """A rank's own order of steps."""

    def __init__(self, rounds: Rounds) -> None:
        self._rounds = rounds
        self._firsts = list(itertools.accumulate((times * len(order) for times, order in rounds), initial=0))

    @classmethod
    def read(cls, raw: Any) -> Order:
        """What a closing line says of a rank; nothing of what is in no such form."""
        try:
            rounds = [(int(times), [(int(offset), int(number)) for offset, number in order]) for times, order in raw]
        except (TypeError, ValueError):
            rounds = []
        return cls([(times, order) for times, order in rounds if times > 0 and order])

    def around(self, index: int) -> tuple[int, Sequence[Sequence[int]]] | None:
        """The index of the first step of the round that a step is of, and its order; None where nothing tells."""
        if not 0 <= index < self._firsts[-1]:
            return None
        entry = bisect.bisect_right(self._firsts, index) - 1
        first, order = self._firsts[entry], self._rounds[entry][1]
        return index - (index - first) % len(order), order
