"""Prompt data: JSONL and parquet files whose rows are what a policy is asked. Read as slime's and Miles' loaders do."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from repro.doctor.artefacts.kinds import PromptData, Reader
from repro_golden.base.bounded_parquet import batches, open_bounded
from repro_golden.base.errors import ReproError
from repro_golden.base.files import open_regular

__all__ = ["LABELS", "LONGEST", "PROMPTS", "PROMPT_KEYS", "is_conversation"]

PROMPT_KEYS = ("prompt", "input", "messages", "text", "question", "problem", "instruction", "query", "conversations")
"""What fields of prompts are commonly called."""

LABELS = ("label", "answer", "ground_truth", "solution", "target", "reward_model", "expected_answer")
"""What fields of labels are commonly called."""

LONGEST = 64 << 20
"""Bytes of a line. A longer one is not read."""

_HEAD = 1 << 18
_LINES = 20
_OTHER = (
    {"type", "timestamp"}, {"response", "reward"}, {"response", "status"}, {"metric", "value"}, {"format", "root"},
)  # fmt: skip
"""Keys of lines that are events, results and records."""


def is_conversation(value: object) -> bool:
    """Whether a value is a list of messages."""
    return isinstance(value, list) and bool(value) and all(isinstance(m, Mapping) and "role" in m for m in value)


def _is_prompt(row: object) -> bool:
    if not isinstance(row, Mapping) or any(keys <= row.keys() for keys in _OTHER):
        return False
    if any(isinstance(row.get(key), str) or is_conversation(row.get(key)) for key in PROMPT_KEYS):
        return True
    labelled = any(key in row for key in LABELS) and any(isinstance(value, str) for value in row.values())
    return labelled or any(is_conversation(value) for value in row.values())


def _fits(path: Path) -> bool:
    if path.suffix not in (".jsonl", ".parquet") or not path.is_file():
        return False
    if path.suffix == ".parquet":
        return _fits_columns(path)
    try:
        with open_regular(path) as file:
            head = file.read(_HEAD)
    except ReproError:
        return False
    rows = []
    lines = head.split(b"\n")
    for raw in lines[:_LINES] if len(head) < _HEAD else lines[:-1][:_LINES]:
        try:
            rows.append(json.loads(raw.decode("utf-8-sig")))
        except (ValueError, RecursionError):
            continue  # one broken line does not make it another file
    return any(_is_prompt(row) for row in rows)


def _fits_columns(path: Path) -> bool:
    try:
        names = set(_parquet(path).schema_arrow.names)
    except ReproError:
        # damaged: where it would be prompts, its name says so
        return any(word in path.stem.lower() for word in ("prompt", "train", "test", "data"))
    known = names & {*PROMPT_KEYS} or names & {*LABELS}
    return bool(known) and not any(keys <= names for keys in _OTHER)


def _read(path: Path) -> Iterable[PromptData]:
    if path.suffix == ".parquet":
        _parquet(path)  # damage is told at once
        return (PromptData(path, functools.partial(_parquet_rows, path)),)
    return (PromptData(path, functools.partial(_lines, path)),)


# -- JSONL


def _lines(path: Path) -> Iterator[tuple[int, Mapping[str, Any] | str]]:
    try:
        with open_regular(path) as file:
            yield from _rows(file)
    except OSError as error:
        raise ReproError(f"{path} cannot be read: {error.strerror or error}") from None


def _rows(file: BinaryIO) -> Iterator[tuple[int, Mapping[str, Any] | str]]:
    number = 0
    while raw := file.readline(LONGEST + 1):
        number += 1
        if len(raw) > LONGEST:
            while raw and not raw.endswith(b"\n"):
                raw = file.readline(LONGEST)
            yield number, f"the line is longer than {LONGEST >> 20} MiB"
        elif raw.strip():
            yield number, _parsed(raw)


def _parsed(raw: bytes) -> Mapping[str, Any] | str:
    try:
        row = json.loads(raw.decode())
    except UnicodeDecodeError as error:
        return f"byte {error.start} is no UTF-8"
    except json.JSONDecodeError as error:
        return f"no JSON: {error.msg} at character {error.pos}"
    except (ValueError, RecursionError):
        return "no JSON that Python reads: a number of thousands of digits, or thousands of brackets"
    return row if isinstance(row, Mapping) else f"a {type(row).__name__}, no object"


# -- parquet


def _parquet(path: Path) -> Any:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with open_regular(path):  # a pipe would wait for ever
            return pq.ParquetFile(pa.OSFile(str(path)))  # a name with a colon is no address
    except OSError as error:
        raise ReproError(f"{path} cannot be read: {error.strerror or _line(error)}") from None
    except (pa.ArrowException, ValueError, MemoryError) as error:
        raise ReproError(f"{path} is no whole parquet file ({_line(error)}): write it again") from None


def _parquet_rows(path: Path) -> Iterator[tuple[int, Mapping[str, Any] | str]]:
    import pyarrow as pa

    number = 0
    try:
        with open_bounded(path) as file:
            for rows in batches(file, 1024):
                for row in rows:
                    number += 1
                    yield number, row
    except (pa.ArrowException, OSError, ValueError, OverflowError, MemoryError) as error:
        raise ReproError(f"{path} breaks off after row {number} ({_line(error)}): write it again") from None


def _line(error: BaseException) -> str:
    return "".join(c if c.isprintable() else " " for c in str(error))[:120]


PROMPTS = Reader("prompt data", _fits, _read)
