"""128 bits that stand for a tensor's content; see `definition` for what they are."""

from __future__ import annotations

from repro_golden.fingerprint.definition import SCHEME, Lanes, add, bind, reference
from repro_golden.fingerprint.tensors import Scan, dtype_name, fingerprint, scan

__all__ = ["SCHEME", "Lanes", "Scan", "add", "bind", "dtype_name", "fingerprint", "reference", "scan"]
