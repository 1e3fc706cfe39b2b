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
    content = {}
    for path in (p for p in files if p not in random):
        raw = path.read_bytes()
        with contextlib.suppress(Exception):  # what is not what its name says counts by its bytes
            if path.suffix == ".safetensors":
                tensors = _fingerprints(raw)
                texts = _metadata(raw)
                raw = canonical_json({"tensors": tensors, "metadata": texts} if texts else tensors).encode()
            elif path.suffix == ".json":
                known = raw
                for sha in digests:
                    known = known.replace(sha, b"")
                raw = canonical_json(json.loads(known)).encode()
        content[str(path.relative_to(folder))] = digest(raw)
    return content


def _fingerprints(raw: bytes) -> dict[str, str]:
    """Fingerprints of a file's tensors by name; in an environment without torch by the definition, more slowly."""
    try:
        from safetensors.torch import load
    except ImportError:
        from safetensors import deserialize

        from repro_golden.fingerprint.definition import bind, reference_in_pieces

        return {
            name: bind(reference_in_pieces(tensor["data"]), _TORCH[tensor["dtype"]], tensor["shape"])
            for name, tensor in deserialize(raw)  # type: ignore[no-untyped-call]
        }
    from repro_golden.fingerprint import fingerprint

    return {name: fingerprint(tensor) for name, tensor in load(raw).items()}


_TORCH = {
    "BF16": "bfloat16", "BOOL": "bool", "C64": "complex64", "F16": "float16", "F32": "float32", "F64": "float64",
    "F8_E4M3": "float8_e4m3fn", "F8_E4M3FNUZ": "float8_e4m3fnuz", "F8_E5M2": "float8_e5m2",
    "F8_E5M2FNUZ": "float8_e5m2fnuz", "I16": "int16", "I32": "int32", "I64": "int64", "I8": "int8", "U16": "uint16",
    "U32": "uint32", "U64": "uint64", "U8": "uint8",
}  # fmt: skip
"""safetensors' dtypes that its own reader for torch knows, and torch's names of them."""


def _metadata(raw: bytes) -> dict[str, str]:
    """What safetensors writes beside the tensors, in an order that chance decides; not whose tensors they are."""
    length = int.from_bytes(raw[:8], "little")
    texts: dict[str, str] = json.loads(raw[8 : 8 + length]).get("__metadata__", {})
    return {name: text for name, text in texts.items() if name != "format"}
