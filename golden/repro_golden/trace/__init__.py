"""A trace: all signals of one run, in order, with a root per step and a chain over steps."""

from __future__ import annotations

from repro_golden.trace.model import FORMAT, PHASES, Header, NotFinite, Row, StepRecord, dump_path
from repro_golden.trace.reader import Trace, read_dump
from repro_golden.trace.writer import TraceWriter, rewrite_header, seal

__all__ = [
    "FORMAT",
    "PHASES",
    "Header",
    "NotFinite",
    "Row",
    "StepRecord",
    "Trace",
    "TraceWriter",
    "dump_path",
    "read_dump",
    "rewrite_header",
    "seal",
]
