"""What a checkpoint's files hold, whatever bytes they are written with."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection
from pathlib import Path

__all__ = ["checkpoint_content"]


def checkpoint_content(folder: Path, without: Collection[str] = ()) -> dict[str, str]:
    """Content of a checkpoint by file: tensors by fingerprint, JSON by value, anything else by its bytes.

    Not that of ``.metadata`` beside torch's distributed checkpoints (``.distcp``), which numbers each saving at random,
    nor its SHA-256 in JSON.

    Args:
        folder: The checkpoint's.
        without: Names of files to leave out.
    """
    from repro_golden.canonical import canonical_json, digest

    files = sorted(p for p in folder.rglob("*") if p.is_file() and p.name not in without)
    random = [p for p in files if p.name == ".metadata" and any(p.parent.glob("*.distcp"))]
    digests = [hashlib.sha256(path.read_bytes()).hexdigest().encode() for path in random]
    found = {}
    for path in (p for p in files if p not in random):
        raw = path.read_bytes()
        if path.suffix == ".safetensors":
            from safetensors.torch import load

            from repro_golden.fingerprint import fingerprint

            raw = canonical_json({k: fingerprint(v) for k, v in load(raw).items()}).encode()
        elif path.suffix == ".json":
            for known in digests:
                raw = raw.replace(known, b"")
            raw = canonical_json(json.loads(raw)).encode()
        found[str(path.relative_to(folder))] = digest(raw)
    return found
