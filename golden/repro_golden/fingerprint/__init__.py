"""128 bits that stand for a tensor's content; see `definition` for what they are.

What needs torch and numba is imported when it is first asked for: reading and comparing traces needs neither.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from repro_golden.fingerprint.definition import SCHEME, Lanes, add, bind, reference

if TYPE_CHECKING:
    from repro_golden.fingerprint.tensors import Scan, dtype_name, fingerprint, scan

__all__ = ["SCHEME", "Lanes", "Scan", "add", "bind", "dtype_name", "fingerprint", "reference", "scan"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from repro_golden.fingerprint import tensors

    return getattr(tensors, name)
