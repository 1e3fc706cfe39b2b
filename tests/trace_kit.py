"""What the tests of traces share: rows to write, ways to write them, and all that a trace says."""

from __future__ import annotations

import shutil
import struct
from collections.abc import Sequence
from dataclasses import astuple, replace
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from repro_golden.fingerprint import Lanes, reference
from repro_golden.trace import PHASES, Header, Row, Trace, TraceWriter
from repro_golden.trace.writer import metric_row

RAM = next(iter(Path("/dev").glob("shm")), None)  # syncing to disk is what takes the time
HEADER = Header({"name": "t"}, "rollouts", {"kind": "core"}, {"host": {}}, steps=3)
WORD = st.integers(0, 2**64 - 1)
ANY_FLOAT = WORD.map(lambda bits: struct.unpack("<d", bits.to_bytes(8, "little"))[0])
NAN_WITH_PAYLOAD = struct.unpack("<d", (0xFFF8_0000_DEAD_BEEF).to_bytes(8, "little"))[0]
TEXT = st.text(max_size=8)

ROWS = st.one_of(
    st.builds(
        Row,
        phase=st.sampled_from(PHASES),
        name=TEXT,
        dtype=st.sampled_from(["float32", "bfloat16", "int64"]),
        shape=st.lists(st.integers(0, 2**40), max_size=3).map(tuple),
        lanes=st.builds(Lanes, WORD, WORD),
        nonfinite=st.integers(0, 2**40),
        absmax=ANY_FLOAT,
        l2=ANY_FLOAT,
        sketch=st.binary(max_size=20),
        values=st.none() | st.binary(max_size=20),
        placement=st.none() | TEXT,
    ),
    st.builds(metric_row, st.sampled_from(PHASES), TEXT, ANY_FLOAT | st.sampled_from([-0.0, NAN_WITH_PAYLOAD])),
)
KEYS = (lambda r: r.key, lambda r: r.name if r.dtype == "metric" else r.key)  # a metric has one place in a step
STEPS = st.lists(st.lists(ROWS, min_size=1, max_size=5, unique_by=KEYS), max_size=3)


def exact(value: Any) -> Any:
    """The value with every float as its bits, so that equality is that of bits."""
    if isinstance(value, float):
        return struct.pack("<d", value)
    if isinstance(value, dict):
        return {k: exact(v) for k, v in value.items()}
    if isinstance(value, Row):
        return exact(list(astuple(value)))
    return [exact(v) for v in value] if isinstance(value, (list, tuple)) else value


def content(trace: Trace) -> list[Any]:
    """All that a trace says of its steps."""
    return [
        exact([s.step, s.root, s.chain, s.signals, dict(s.metrics), trace.rows(i)]) for i, s in enumerate(trace.steps)
    ]


def write(directory: Path, steps: Sequence[Sequence[Row]], *, end: bool = True, **closing: object) -> Path:
    writer = TraceWriter(directory, HEADER)
    for number, rows in enumerate(steps):
        for row in rows:
            writer.add(row)
        writer.end_step(number)
    if end:
        writer.close({"reason": "finished", **closing})
    else:
        kill(writer)
    return directory


def kill(writer: TraceWriter) -> None:
    """Let go of the files as the death of the process does: without a closing line."""
    writer._log.close()
    writer._step_log.close()


def tensor_row(phase: str, name: str, values: bytes) -> Row:
    return Row(phase, name, "uint8", (len(values),), reference(values), 0, 3.5, 4.25, b"", values)


SMALL = [
    [metric_row("loss", "kl", k / 10 + 0.01), replace(tensor_row("grad", "w", bytes([k] * 5)), sketch=b"\1\2\3")]
    for k in range(3)
]


def copy(source: Path, target: Path, *, end: bool = True) -> Path:
    shutil.copytree(source, target)
    if not end:
        log = target / "steps.jsonl"
        log.write_bytes(b"".join(log.read_bytes().splitlines(keepends=True)[:-1]))
    return target


def check_prefix(directory: Path, whole: list[Any], count: int) -> None:
    trace = Trace(directory)
    assert content(trace) == whole[:count]
    assert trace.chain == (trace.steps[-1].chain if count else Trace(directory).chain)
