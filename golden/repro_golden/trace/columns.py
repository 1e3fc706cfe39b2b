"""The sealed form of a rank's rows: Parquet, whole steps together in row groups of some thousand rows."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from repro_golden.base.bounded_parquet import bounded, table_of_group
from repro_golden.fingerprint.definition import Lanes
from repro_golden.trace import frames
from repro_golden.trace.model import Row

__all__ = ["ColumnReader", "ColumnWriter", "write"]

_ROWS, _BYTES = 1 << 12, 1 << 24
"""A row group is written when it has so many rows, or so many bytes of sketches and values. One step's are together.
Who looks at one step reads its group."""
_NUMBERS = [
    ("lanes", "V16"), ("nonfinite", "<i8"), ("absmax", "<f8"), ("l2", "<f8"), ("sketch", "<i8"), ("values", "<i8"),
]  # fmt: skip
"""`frames.NUMBERS` as numpy's dtype; both lanes are one value."""
_FIXED = ["lanes", "nonfinite", "absmax", "l2"]
_REPEATED = ["phase", "name", "dtype", "shape.list.element", "placement", "nonfinite"]
"""Columns whose values come many times: a dictionary of any other is a second copy."""
_ENCODINGS = {
    "step": "DELTA_BINARY_PACKED", "order": "DELTA_BINARY_PACKED",
    "absmax": "BYTE_STREAM_SPLIT", "l2": "BYTE_STREAM_SPLIT",
}  # fmt: skip
"""Numbers that rise, and floats, whose exponents lie together then."""


def _schema() -> Any:
    import pyarrow as pa

    text = pa.dictionary(pa.int32(), pa.string())
    return pa.schema(
        [
            ("step", pa.int64()),
            ("order", pa.int32()),
            ("phase", text),
            ("name", text),
            ("dtype", text),
            ("shape", pa.list_(pa.int64())),
            ("placement", pa.string()),
            ("lanes", pa.binary(16)),
            ("nonfinite", pa.int64()),
            ("absmax", pa.float64()),
            ("l2", pa.float64()),
            ("sketch", pa.binary()),
            ("values", pa.binary()),
        ]
    )


class ColumnWriter:
    """Writes steps as they come. The file appears under its name only when it is complete."""

    def __init__(self, path: Path) -> None:
        """Raises OSError."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        self._path, self._temporary, self._schema = path, path.with_suffix(".part"), _schema()
        self._file = pa.OSFile(str(self._temporary), "wb")  # of a name with a colon Parquet would make an address
        self._writer = pq.ParquetWriter(
            self._file, self._schema, compression="zstd", use_dictionary=_REPEATED, column_encoding=_ENCODINGS
        )
        self._steps: list[tuple[dict[str, Any], memoryview, memoryview]] = []
        self._rows = self._bytes = 0

    def add(self, payload: bytes) -> None:
        """Take a whole step, as a frame holds it.

        Raises:
            OSError: it cannot be written.
        """
        step = frames.split(payload)
        self._steps.append(step)
        self._rows += len(step[0]["phase"])
        self._bytes += len(payload)
        if self._rows >= _ROWS or self._bytes >= _BYTES:
            self._flush()

    def _flush(self) -> None:
        import numpy as np
        import pyarrow as pa

        numbers = np.frombuffer(b"".join(part for _, part, _ in self._steps), dtype=_NUMBERS)
        table = {
            name: list(itertools.chain.from_iterable(head[name] for head, _, _ in self._steps))
            for name in frames.COLUMNS
        }
        counts = [len(head["phase"]) for head, _, _ in self._steps]
        columns: dict[str, Any] = {name: _fixed(numbers[name], self._schema.field(name).type) for name in _FIXED}
        steps = np.repeat(np.array([head["step"] for head, _, _ in self._steps], dtype="<i8"), counts)
        starts = np.cumsum([0, *counts[:-1]])
        orders = (np.arange(sum(counts)) - np.repeat(starts, counts)).astype("<i4")
        columns |= {"step": _fixed(steps, pa.int64()), "order": _fixed(orders, pa.int32())}
        columns |= {name: _repeated(table[name]) for name in ("phase", "name", "dtype")}
        texts = [(text or "").encode() for text in table["placement"]]
        there = np.array([text is not None for text in table["placement"]])
        columns["placement"] = _sized(
            pa.string(), np.array(list(map(len, texts))), pa.py_buffer(b"".join(texts)), there
        )
        sizes = np.fromiter(itertools.chain.from_iterable(table["shape"]), dtype="<i8")
        columns["shape"] = _sized(
            pa.list_(pa.int64()), np.array(list(map(len, table["shape"]))), _fixed(sizes, pa.int64())
        )
        # the sketch of each row is followed by its values
        lengths = np.stack([numbers["sketch"], np.maximum(numbers["values"], 0)], axis=1)
        raw = np.frombuffer(b"".join(part for _, _, part in self._steps), dtype=np.uint8)
        of_sketch = np.repeat(np.tile([True, False], len(numbers)), lengths.ravel())
        for k, (name, part) in enumerate((("sketch", raw[of_sketch]), ("values", raw[~of_sketch]))):
            there = numbers[name] != frames.ABSENT
            columns[name] = _sized(pa.binary(), lengths[:, k], pa.py_buffer(part), there)
        arrays = [columns[field.name] for field in self._schema]
        self._writer.write_table(pa.Table.from_arrays(arrays, schema=self._schema), row_group_size=self._rows or 1)
        self._steps, self._rows, self._bytes = [], 0, 0

    def close(self) -> None:
        """Write the rest, and give the file its name.

        Raises:
            OSError: it cannot be written.
        """
        if self._steps:
            self._flush()
        self._writer.close()
        self._file.close()
        self._temporary.replace(self._path)

    def let_go(self) -> None:
        """Remove what was written, unless it is complete."""
        self._writer.close()
        self._file.close()
        self._temporary.unlink(missing_ok=True)


# Arrays are made of their buffers: `pyarrow.array` imports pandas where it is installed.


def _fixed(values: Any, of: Any) -> Any:
    """An array of numbers, or of bytes of one length."""
    import numpy as np
    import pyarrow as pa

    return pa.Array.from_buffers(of, len(values), [None, pa.py_buffer(np.ascontiguousarray(values))])


def _sized(of: Any, lengths: Any, content: Any, there: Any = None) -> Any:
    """An array of texts, bytes or lists of these lengths, of which those that are not `there` are null."""
    import numpy as np
    import pyarrow as pa

    ends = np.zeros(len(lengths) + 1, dtype="<i4")
    np.cumsum(lengths, out=ends[1:])
    valid = None if there is None else pa.py_buffer(np.packbits(there, bitorder="little"))
    buffers, inside = [valid, pa.py_buffer(ends)], None
    if isinstance(content, pa.Array):
        inside = [content]
    else:
        buffers.append(content)
    return pa.Array.from_buffers(of, len(lengths), buffers, children=inside)


def _repeated(texts: list[str]) -> Any:
    """Texts of which few are distinct, by a dictionary."""
    import numpy as np
    import pyarrow as pa

    codes = {text: code for code, text in enumerate(dict.fromkeys(texts))}
    distinct = [text.encode() for text in codes]
    dictionary = _sized(pa.string(), np.array(list(map(len, distinct))), pa.py_buffer(b"".join(distinct)))
    indices = np.fromiter(map(codes.__getitem__, texts), dtype="<i4", count=len(texts))
    return pa.DictionaryArray.from_arrays(_fixed(indices, pa.int32()), dictionary)


def write(path: Path, payloads: Iterable[bytes]) -> int:
    """Write the whole steps of frames, and return how many.

    Raises:
        OSError: they cannot be written.
    """
    writer, count = ColumnWriter(path), 0
    try:
        for payload in payloads:
            writer.add(payload)
            count += 1
        writer.close()
    finally:
        writer.let_go()
    return count


class ColumnReader:
    """Reads steps of a file, and keeps the row group that it read last: the steps beside it are in it too."""

    def __init__(self, path: Path) -> None:
        """Raises FileNotFoundError, and what pyarrow raises for a damaged file."""
        self._file = bounded(path, ("placement", "sketch", "values"))
        groups = (self._file.metadata.row_group(k).num_rows for k in range(self._file.num_row_groups))
        self._first = [0, *itertools.accumulate(groups)]
        self._kept: tuple[int, Any] = (-1, None)

    def rows(self, first: int, count: int) -> list[Row]:
        """So many rows of one step, from the file's `first` on, in the order in which they were observed.

        Raises what pyarrow raises for a damaged file, and IndexError or ValueError for one of other rows.
        """
        group = bisect.bisect_right(self._first, first) - 1
        if self._kept[0] != group:
            self._kept = group, table_of_group(self._file, group)
        rows = self._kept[1].slice(first - self._first[group], count).to_pylist()
        return [
            Row(
                phase=r["phase"],
                name=r["name"],
                dtype=r["dtype"],
                shape=tuple(r["shape"]),
                lanes=Lanes.from_bytes(r["lanes"]),
                nonfinite=r["nonfinite"],
                absmax=r["absmax"],
                l2=r["l2"],
                sketch=r["sketch"],
                values=r["values"],
                placement=r["placement"],
            )
            for r in rows
        ]

    def shows(self, phase: str, name: str) -> bool:
        """Whether any row is of a signal; two columns are read for that."""
        import numpy as np

        for group in range(self._file.num_row_groups):
            for batch in self._file.read_row_group(group, columns=["phase", "name"]).to_batches():
                there = True
                for column, value in ((batch["phase"], phase), (batch["name"], name)):
                    # pyarrow's own comparison with a value imports pandas, which takes longer than all of this
                    same = [text == value for text in column.dictionary.to_pylist()]
                    there &= np.asarray(same, dtype=bool)[np.from_dlpack(column.indices)]
                if np.any(there):
                    return True
        return False

    def nonfinite(self) -> Iterator[tuple[int, str, str]]:
        """The rows of values that are not finite: number, phase and name. Groups without any are not read."""
        import pyarrow.compute as pc

        for group, first in enumerate(self._first[:-1]):
            about = self._file.metadata.row_group(group)
            (column,) = (c for c in map(about.column, range(about.num_columns)) if c.path_in_schema == "nonfinite")
            known = column.statistics
            if known is not None and known.has_min_max and known.max == 0:
                continue
            table = self._file.read_row_group(group, columns=["phase", "name", "nonfinite"])
            for number in pc.indices_nonzero(table["nonfinite"]).to_pylist():
                row = table.slice(number, 1).to_pylist()[0]
                yield first + number, row["phase"], row["name"]
