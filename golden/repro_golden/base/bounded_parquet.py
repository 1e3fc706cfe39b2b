"""Parquet files that somebody else may have made: read as far as their rows stand in some proportion to the file.

A few KiB can hold gigabytes of zeros or of nulls, and a dictionary one value for a billion rows. What is recorded of a
run does not: the fingerprint of each row alone takes sixteen bytes that do not compress.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from repro_golden.base.errors import ReproError
from repro_golden.base.files import open_regular

__all__ = ["batches", "bounded", "open_bounded", "table_of_group"]

_LEAST, _TIMES = 256 << 20, 256
"""Rows may take so many bytes, or so many times the file's own."""
_ROW = 64
"""Bytes that a row takes at least once it is in Python."""


@contextmanager
def open_bounded(path: Path) -> Iterator[Any]:
    """`bounded`, closed in the end."""
    with bounded(path) as file:
        yield file


def bounded(path: Path, texts: Sequence[str] | None = None) -> Any:
    """A `pyarrow.parquet.ParquetFile` whose values of bytes and text stay in their dictionaries, and how large it is.

    Args:
        path: The file.
        texts: Its columns of bytes and text, where that is known; else its schema is read for them.

    Raises:
        ReproError: it is no regular file.
        Exception: many kinds, where it is damaged.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    with open_regular(path):  # a pipe would wait for ever
        pass
    native = pa.OSFile(str(path))  # of a name with a colon Parquet would make an address
    if texts is None:
        texts = [f.name for f in pq.read_schema(native) if pa.types.is_binary(f.type) or pa.types.is_string(f.type)]
    file = pq.ParquetFile(native, read_dictionary=list(texts))
    file.path, file.most = path, max(_LEAST, _TIMES * path.stat().st_size)
    return file


def table_of_group(file: Any, index: int) -> Any:
    """The rows of a row group, as a table.

    Raises:
        ReproError: they take more memory than such a file has reason to.
    """
    group = file.metadata.row_group(index)
    _check(file, group.num_rows * _ROW + group.total_byte_size)
    table = file.read_row_group(index)
    _check(file, sum(_size(column) for column in table.columns))
    return table


def batches(file: Any, size: int) -> Iterator[list[dict[str, Any]]]:
    """All rows, so many at a time.

    Raises:
        ReproError: a row group or a batch takes more memory than such a file has reason to.
    """
    for index in range(file.metadata.num_row_groups):
        _check(file, file.metadata.row_group(index).total_byte_size)
        for batch in file.iter_batches(batch_size=size, row_groups=[index]):
            _check(file, sum(_size(column) for column in batch.columns))
            yield batch.to_pylist()


def _size(column: Any) -> int:
    """Bytes of a column once each row has a value of its own."""
    import pyarrow as pa
    import pyarrow.compute as pc

    pieces = column.chunks if isinstance(column, pa.ChunkedArray) else [column]
    total = 0
    for piece in pieces:
        total += piece.nbytes
        if pa.types.is_dictionary(piece.type):
            lengths = pc.binary_length(piece.dictionary)
            total += pc.sum(lengths.take(piece.indices)).as_py() or 0
    return total


def _check(file: Any, size: int) -> None:
    if size > file.most:
        raise ReproError(
            f"{file.path} would take {size >> 20} MiB, which no recording of its size does: write or record it again"
        )
