"""What a checkpoint's files hold, whatever bytes they are written with."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Collection
from pathlib import Path

__all__ = ["checkpoint_content"]


def checkpoint_content(folder: Path, without: Collection[str] = ()) -> dict[str, str]:
    """Content of a checkpoint by file: tensors by fingerprint, JSON by value, anything else by its bytes.

    So do a file of JSON lines and one that is broken, whatever they are called, and JSON that holds a NaN.

    Not that of ``.metadata`` beside torch's distributed checkpoints (``.distcp``), which numbers each saving at random,
    nor its SHA-256 in JSON.

    Args:
        folder: The checkpoint's.
        without: Names of files to leave out.
    """
    from repro_golden.base.canonical import canonical_json, digest

    files = sorted(p for p in folder.rglob("*") if p.is_file() and p.name not in without)
    random = [p for p in files if p.name == ".metadata" and any(p.parent.glob("*.distcp"))]
    digests = [hashlib.sha256(path.read_bytes()).hexdigest().encode() for path in random]
    found = {}
    for path in (p for p in files if p not in random):
        raw = path.read_bytes()
        with contextlib.suppress(Exception):  # what is not what its name says counts by its bytes
            if path.suffix == ".safetensors":
                from safetensors.torch import load

                from repro_golden.fingerprint import fingerprint

                tensors = {k: fingerprint(v) for k, v in load(raw).items()}
                texts = _metadata(raw)
                raw = canonical_json({"tensors": tensors, "metadata": texts} if texts else tensors).encode()
            elif path.suffix == ".json":
                known = raw
                for sha in digests:
                    known = known.replace(sha, b"")
                raw = canonical_json(json.loads(known)).encode()
        found[str(path.relative_to(folder))] = digest(raw)
    return found


def _metadata(raw: bytes) -> dict[str, str]:
    """What safetensors writes beside the tensors, in an order that chance decides; not whose tensors they are."""
    length = int.from_bytes(raw[:8], "little")
    texts: dict[str, str] = json.loads(raw[8 : 8 + length]).get("__metadata__", {})
    return {name: text for name, text in texts.items() if name != "format"}
