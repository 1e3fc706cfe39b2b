"""Small records that the trainers leave beside their dumps: gradient norms, model hashes, CI history, result lists.

All of them are untrusted: sizes are bounded, and whatever is wrong with a file is one `ReproError`.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from repro_golden.base.errors import ReproError
from repro_golden.base.files import open_regular
from repro_golden.dumps.archive.reading import LIMIT, read_archive
from repro_golden.dumps.values import Tensor

__all__ = [
    "GradNorm",
    "ModelHash",
    "ci_history",
    "dashboard_columns",
    "digest_of",
    "grad_norm_name",
    "json_lines",
    "model_hash_name",
    "model_hashes",
    "number_of",
    "parsed",
    "read_grad_norm",
    "rollout_results",
]

_JSON_LIMIT = 1 << 30
"""Bytes of the longest JSON file, and of the longest line of one, that is read."""

_SMALL = 64 << 20

_GRAD_NORM = re.compile(r"grad[_-]?norms?(?![a-z])(.*)\.(?:pt|pth)", re.IGNORECASE)
_MODEL_HASH = re.compile(r"model_hash_tp([0-9]{1,6})_pp([0-9]{1,6})_dp([0-9]{1,6})_cp([0-9]{1,6})\.json")
_SHA256 = re.compile(r"[0-9a-fA-F]{64}")
_MARKERS = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


class GradNorm(NamedTuple):
    """Which update a gradient norm's file is of."""

    role: str
    rollout: int
    update: int


class ModelHash(NamedTuple):
    """Which rank a file of model hashes is of."""

    tp: int
    pp: int
    dp: int
    cp: int


def grad_norm_name(name: str, template: str | None = None) -> GradNorm | None:
    """What the name of a file of ``--ci-save-grad-norm`` says.

    Args:
        name: The file's.
        template: The name that the flag gives, with any of ``{role}``, ``{rollout_id}`` and ``{step_id}``. By default
            any name with ``grad_norm`` in it whose last two numbers are the rollout's and the update's.

    Returns:
        None for another file.
    """
    if template is None:
        default_match = _GRAD_NORM.search(name)
        numbers = re.findall(r"[0-9]{1,18}", default_match[1]) if default_match else []
        role = "critic" if default_match and "critic" in default_match[1].lower() else "actor"
        return GradNorm(role, int(numbers[-2]), int(numbers[-1])) if len(numbers) >= 2 else None
    groups = {
        "role": r"(?P<role>[a-z_]+)",
        "rollout_id": r"(?P<rollout>[0-9]{1,18})",
        "step_id": r"(?P<step>[0-9]{1,18})",
    }
    parts = re.split(r"\{(role|rollout_id|step_id)\}", template)
    seen: set[str] = set()
    pattern = ""
    for k, part in enumerate(parts):
        again = part in seen
        pattern += re.escape(part) if k % 2 == 0 else r"\w+" if again else groups[part]
        seen |= {part} if k % 2 else set()
    match = re.fullmatch(pattern, name)
    if match is None:
        return None
    fields = match.groupdict()
    return GradNorm(fields.get("role") or "actor", int(fields.get("rollout") or 0), int(fields.get("step") or 0))


def read_grad_norm(path: Path, limit: int = LIMIT) -> float:
    """The number that a file of ``--ci-save-grad-norm`` holds: a float, or a tensor of one element.

    Args:
        path: The file.
        limit: Most bytes of memory that reading may take; it never takes more than 64 MiB.

    Raises:
        ReproError: the file cannot be read, or holds something else.
    """
    value = read_archive(path, limit=min(limit, _SMALL))
    if isinstance(value, Tensor) and value.numel == 1 and not value.dtype.startswith("complex"):
        return float(value.floats().reshape(-1)[0])
    if isinstance(value, (np.ndarray, np.generic)) and np.asarray(value).size == 1:
        value = np.asarray(value).reshape(-1)[0].item()
    number = number_of(value)
    if number is None:
        raise ReproError(f"{path} holds a {type(value).__name__}, no gradient norm: record it again")
    return number


def number_of(value: Any) -> float | None:
    """A Python number as a float; None for anything else, bools among it, and for integers beyond a float."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        return float(value)
    except OverflowError:
        return None


def model_hash_name(path: Path) -> tuple[int, ModelHash] | None:
    """The iteration (the rollout after which it was saved) and the rank of a file of model hashes; None for another."""
    match = _MODEL_HASH.fullmatch(path.name)
    folder = re.fullmatch(r"iter_([0-9]{1,18})", path.parent.name)
    return (int(folder[1]), ModelHash(*map(int, match.groups()))) if match and folder else None


def model_hashes(path: Path, limit: int = LIMIT) -> dict[str, bytes]:
    """The SHA-256 of each layer's parameters, by the layer's name, in a file of ``--ci-save-model-hash``.

    Raises:
        ReproError: no JSON object of hashes; a file that is written in part is none either.
    """
    value = parsed(_text(path, limit), str(path))
    if not isinstance(value, dict) or not value:
        raise ReproError(f"{path} holds no model hashes: expected a JSON object of layers")
    digests = {name: digest_of(text) for name, text in value.items()}
    if bad := next((name for name, raw in digests.items() if raw is None), None):
        raise ReproError(f"{path}: {bad[:80]!r} has no SHA-256 in hex")
    return {name: raw for name, raw in digests.items() if raw is not None}


def digest_of(value: Any) -> bytes | None:
    """The bytes of a SHA-256 in hex; None for anything else."""
    return bytes.fromhex(value) if isinstance(value, str) and _SHA256.fullmatch(value) else None


def ci_history(path: Path, limit: int = LIMIT) -> dict[str, list[tuple[int, float]]]:
    """Miles' CI history: by metric the steps and numbers of one process, NaN and infinities included.

    Points without a step are left out.

    Raises:
        ReproError: a line that is no series.
    """
    metrics: dict[str, list[tuple[int, float]]] = {}
    for number, line in json_lines(path, limit):
        name, series = (line.get("metric"), line.get("series")) if isinstance(line, dict) else (None, None)
        if not isinstance(name, str) or not isinstance(series, list):
            raise ReproError(f"{path} line {number} is no series of a metric")
        points = metrics.setdefault(name, [])
        for point in series:
            step, value = point if isinstance(point, list) and len(point) == 2 else (None, ...)
            held = _MARKERS.get(value) if isinstance(value, str) else number_of(value)
            if held is None or not (step is None or type(step) is int):
                raise ReproError(f"{path} line {number}: a point of {name[:80]!r} is no step with a number")
            if step is not None:
                points.append((step, held))
    return metrics


def dashboard_columns(path: Path, limit: int = LIMIT, *, names: Collection[str] | None = None) -> dict[str, list[Any]]:
    """The columns of a Parquet file of Miles' dashboard: ``sample_index``, lengths, ``tokens``, ``loss_mask``, ...

    Read a few rows at a time: a file states its encoded size, and what repeats takes next to none of it.

    Args:
        path: The file.
        limit: Most bytes of memory that its values may take.
        names: Which columns; by default all. Those that hold neither numbers nor lists of numbers are left out.

    Raises:
        ReproError: it is no Parquet file, damaged or too large.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    beyond = ReproError(
        f"{path} needs more than {limit} bytes of memory to read: --limit SIZE raises the bound if the file is yours"
    )
    try:
        with open_regular(path) as raw, pq.ParquetFile(raw) as file:
            wanted = [
                field.name
                for field in file.schema_arrow
                if (names is None or field.name in names) and _numeric(field.type)
            ]
            if len(set(wanted)) < len(wanted):
                raise ReproError(f"{path} has two columns of one name: record it again")
            value_count = _values_told(file.metadata, set(wanted))
            if max(value_count, file.metadata.num_rows * max(len(wanted), 1)) * _VALUE > limit:
                raise beyond
            columns: dict[str, list[Any]] = {name: [] for name in wanted}
            taken = 0
            for batch in file.iter_batches(_BATCH, columns=wanted, use_threads=False) if wanted else ():
                # eight bytes at most in the file's form, and an object each in Python's
                taken += batch.nbytes * _VALUE
                if taken > limit * 8:
                    raise beyond
                for name, column in zip(batch.schema.names, batch.columns, strict=True):
                    columns[name] += column.to_pylist()
            return columns
    except MemoryError:
        raise ReproError(f"{path} needs more memory than there is: read it on a larger machine") from None
    except (OSError, pa.ArrowException, ValueError, OverflowError) as error:
        raise ReproError(f"{path} is no readable Parquet file: {_short(error)}") from None


_BATCH = 16
"""Rows that are decoded at once."""

_VALUE = 40
"""Bytes that a number takes as Python's object, and its place in a list."""


def _short(error: Exception) -> str:
    return (str(error).splitlines() or [repr(error)])[0][:120]


def _numeric(kind: Any) -> bool:
    """Whether a column holds numbers, or lists of lists of them: of text, one entry may be as long as it likes."""
    import pyarrow as pa

    while pa.types.is_list(kind) or pa.types.is_large_list(kind):
        kind = kind.value_type
    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind))


def _values_told(metadata: Any, names: Collection[str]) -> int:
    """How many values the columns have by what the file says."""
    count = 0
    for k in range(metadata.num_row_groups):
        group = metadata.row_group(k)
        for column in map(group.column, range(group.num_columns)):
            if column.path_in_schema.partition(".")[0] in names:
                count += max(column.num_values, 0)
    return count


def rollout_results(path: Path, limit: int = LIMIT) -> list[dict[str, Any]]:
    """The samples of a JSON-lines file of Relax's rollout results.

    Raises:
        ReproError: a line that is no JSON object.
    """
    samples = []
    for number, line in json_lines(path, limit):
        if not isinstance(line, dict):
            raise ReproError(f"{path} line {number} is no sample: expected a JSON object")
        samples.append(line)
    return samples


def json_lines(path: Path, limit: int = LIMIT) -> Iterator[tuple[int, Any]]:
    """The values of a JSON-lines file with the numbers of their lines, from 1; empty lines are left out.

    Raises:
        ReproError: missing, too large, or a line that is no JSON.
    """
    for number, line in enumerate(_text(path, limit).split("\n"), 1):
        if line.strip():
            yield number, parsed(line, f"{path} line {number}")


def parsed(text: str | bytes, what: str) -> Any:
    """JSON, in which NaN and infinities are numbers as Python writes them.

    Raises:
        ReproError: it is none, or nested too deeply.
    """
    try:
        return json.loads(text)
    except (ValueError, RecursionError, MemoryError) as error:
        message = str(error) if isinstance(error, ValueError) else type(error).__name__
        raise ReproError(f"{what} is no JSON ({message[:120]})") from None


def _text(path: Path, limit: int = LIMIT) -> str:
    most = min(limit, _JSON_LIMIT)
    try:
        with open_regular(path) as file:
            raw = file.read(most + 1)
        if len(raw) > most:
            raise ReproError(f"{path} is longer than {most} bytes, of which no more are read")
        return raw.decode("utf-8")
    except OSError as error:
        raise ReproError(f"{path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ReproError(f"{path} is no text in UTF-8") from None
