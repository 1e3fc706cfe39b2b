"""The sealed answer: written before the search begins, opened after its verdict."""

from __future__ import annotations

import base64
import hashlib
import json
import zlib
from pathlib import Path
from typing import Any

from repro.demo.history import Answer
from repro_golden.base.canonical import canonical_json, write_atomic
from repro_golden.base.errors import ReproError

__all__ = ["open_answer", "seal_answer"]


def seal_answer(answer: Answer, path: Path) -> str:
    """Write the answer so that no eye or grep reads it by accident; its SHA-256 is returned."""
    raw = canonical_json(answer.to_mapping()).encode()
    digest = hashlib.sha256(raw).hexdigest()
    sealed = {"sealed": base64.b64encode(zlib.compress(raw, 9)).decode(), "sha256": digest}
    write_atomic(path, canonical_json(sealed) + "\n")
    return digest


def open_answer(path: Path, digest: str) -> dict[str, Any]:
    """The answer's fields.

    Args:
        path: What `seal_answer` wrote.
        digest: What it returned.

    Raises:
        ReproError: the file is not the one that was sealed.
    """
    try:
        raw = zlib.decompress(base64.b64decode(json.loads(path.read_text(encoding="utf-8"))["sealed"]))
    except (OSError, ValueError, KeyError, TypeError, zlib.error):
        raw = b""
    if hashlib.sha256(raw).hexdigest() != digest:
        raise ReproError(f"{path} was changed since it was sealed: run the demo again")
    answer: dict[str, Any] = json.loads(raw)
    return answer
