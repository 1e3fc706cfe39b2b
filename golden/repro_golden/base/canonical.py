"""One byte string for one content: canonical JSON, exact floats, and files that are whole or absent."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import re
import struct
import tempfile
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, cast

from repro_golden.base.errors import MachineFailureError, ReproError
from repro_golden.base.files import read_regular

__all__ = [
    "atomic",
    "canonical_json",
    "check_format",
    "decode_float",
    "digest",
    "digest_framed",
    "encode_float",
    "frame",
    "jsonable",
    "mapping_of",
    "parse_json",
    "parse_toml",
    "read_json",
    "same_float",
    "write_atomic",
    "xxh3_128_hexdigest",
]


# -- xxh3_128, where it is installed: a recorder in a foreign environment needs none, only those who compare do

try:
    from xxhash import xxh3_128_hexdigest
except ImportError:

    def xxh3_128_hexdigest(input: bytes) -> str:  # type: ignore[misc]  # noqa: A002 - xxhash's own name for it
        """Raises ReproError."""
        del input
        raise ReproError("xxhash is not installed in this environment: pip install xxhash")


# -- one byte string for one content: canonical JSON, exact floats, and files that are whole or absent


def canonical_json(value: Any) -> str:
    """Sorted keys, no spaces, no NaN; equal values give equal text. Floats are their shortest exact repr."""
    try:
        return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None


def parse_json(text: str | bytes) -> Any:
    """A value of JSON that somebody else may have written.

    Raises:
        ValueError: it is none, or nested deeper than Python can follow.
    """
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None


def parse_toml(text: str) -> dict[str, Any]:
    """A document of TOML that somebody else may have written.

    Raises:
        ValueError: it is none, nested deeper than Python can follow, or holds a number longer than Python takes.
    """
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None


_TOO_DEEP = "it is nested too deeply"


def digest(*parts: bytes | str) -> str:
    """xxh3_128 over length-prefixed parts, as 32 hex digits. The prefix keeps ("ab","c") apart from ("a","bc")."""
    return digest_framed(*map(frame, parts))


def named_after(folder: Path) -> str:
    """The name of what is kept elsewhere for a folder, or that of a ``.git``: readable ASCII, no two are one."""
    folder = folder.parent if folder.name == ".git" else folder
    readable = re.sub(r"[^A-Za-z0-9._-]", "_", folder.name)[:246]  # a name is at most 255 bytes
    return f"{readable}-{digest(str(folder))[:8]}"


def digest_framed(*framed: bytes) -> str:
    """`digest` of parts that `frame` made already, which may lie together: what many digests share is framed once."""
    return xxh3_128_hexdigest(b"".join(framed))


_LENGTH = struct.Struct("<Q").pack


def frame(part: bytes | str) -> bytes:
    """A part of a `digest`, behind its length."""
    raw = part.encode(errors="surrogateescape") if isinstance(part, str) else part  # a file's name may be no text
    return _LENGTH(len(raw)) + raw


def encode_float(value: float) -> float | str:
    """A float as JSON: itself when finite, else its 64 bits in hex, since JSON has no NaN and NaN has payloads."""
    return value if math.isfinite(value) else struct.pack(">d", value).hex()


def decode_float(value: float | str) -> float:
    """The inverse of `encode_float`, bit for bit."""
    return cast("float", struct.unpack(">d", bytes.fromhex(value))[0]) if isinstance(value, str) else float(value)


def jsonable(value: Any) -> Any:
    """JSON types: of floats that are not finite the hex of their bits, of a dataclass `to_mapping` or its fields."""
    if hasattr(value, "to_mapping"):
        return value.to_mapping()
    if dataclasses.is_dataclass(value):
        return mapping_of(value)
    if isinstance(value, Mapping):
        return {str(k): jsonable(v) for k, v in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [jsonable(item) for item in value]
    return encode_float(value) if isinstance(value, float) else value


def mapping_of(result: Any, *without: str, **more: Any) -> dict[str, Any]:
    """A dataclass as `jsonable`: its fields but for some, and what is said beside them or in their place."""
    fields = {field.name: getattr(result, field.name) for field in dataclasses.fields(result)}
    return {name: jsonable(value) for name, value in (fields | more).items() if name not in without}


def same_float(a: float | None, b: float | None) -> bool:
    """Equal bits, or both absent: NaN equals NaN only with the same payload, and -0.0 is not 0.0."""
    if a is None or b is None:
        return a is b
    return struct.pack("<d", a) == struct.pack("<d", b)


def read_json(path: Path, what: str) -> dict[str, Any]:
    """Read a JSON object.

    Raises:
        ReproError: the file is missing, unreadable, or no JSON object; `what` says what it should have been.
    """
    try:
        value = parse_json(read_regular(path).decode("utf-8"))
    except FileNotFoundError:
        raise ReproError(f"no {what} at {path}") from None
    except (OSError, ValueError) as error:
        raise ReproError(f"{path} is not a readable {what}: {error}") from None
    if not isinstance(value, dict):
        raise ReproError(f"{path} is not a {what}: expected a JSON object")
    return value


def check_format(number: object, newest: int, what: str) -> None:
    """Refuse a format this version does not know.

    Raises:
        ReproError: newer than `newest`, or no format number.
    """
    if type(number) is not int or number < 1:  # bool is an int to isinstance
        raise ReproError(f"{what} has no format number, so repro did not write it or it is damaged: record it again")
    if number > newest:
        raise ReproError(f"{what} has format {number}, this repro reads up to {newest}: upgrade repro-harness")


def write_atomic(path: Path, content: bytes | str) -> Path:
    """Write a file so that a crash leaves either the old content or the new, never a part; return its path.

    Raises:
        MachineFailureError: the disk is full or the folder cannot be written.
    """
    with atomic(path) as file:
        file.write(content.encode() if isinstance(content, str) else content)
    return path


@contextlib.contextmanager
def atomic(path: Path) -> Iterator[IO[bytes]]:
    """A file beside it, which takes its place where what is done with it ends without an error.

    Raises:
        MachineFailureError: the disk is full or the folder cannot be written.
    """
    temporary = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        with os.fdopen(handle, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        Path(temporary).chmod(0o644)
        Path(temporary).replace(path)
    except OSError as error:
        raise MachineFailureError(f"cannot write {path}: {error.strerror}; free space or change permissions") from error
    finally:
        if temporary:
            with contextlib.suppress(OSError):
                Path(temporary).unlink(missing_ok=True)
