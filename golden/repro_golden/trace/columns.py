"""The sealed form of a rank's rows: Parquet, one row group per step, so that one step is read without the others."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from repro_golden.fingerprint.definition import Lanes
from repro_golden.trace.model import Row

__all__ = ["read_step", "write"]


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


def write(path: Path, steps: Iterable[tuple[int, list[Row]]]) -> None:
    """Write whole steps; row group k holds the k-th of them. The file appears under its name only when complete."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    schema = _schema()
    temporary = path.with_suffix(".part")
    with pq.ParquetWriter(temporary, schema, compression="zstd") as writer:
        for step, rows in steps:
            columns = {
                "step": [step] * len(rows),
                "order": list(range(len(rows))),
                "shape": [list(r.shape) for r in rows],
                "lanes": [r.lanes.to_bytes() for r in rows],
            }
            for name in ("phase", "name", "dtype", "placement", "nonfinite", "absmax", "l2", "sketch", "values"):
                columns[name] = [getattr(r, name) for r in rows]
            arrays = [pa.array(columns[field.name], field.type) for field in schema]
            writer.write_table(pa.Table.from_arrays(arrays, schema=schema), row_group_size=max(1, len(rows)))
    temporary.replace(path)


def read_step(path: Path, index: int) -> tuple[int, list[Row]]:
    """Step number and rows of the `index`-th row group, in the order they were observed."""
    from repro_golden.base.bounded_parquet import open_bounded, rows_of_group

    with open_bounded(path, ("placement", "sketch", "values")) as file:
        rows = rows_of_group(file, index)
    return (rows[0]["step"] if rows else -1), [
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
