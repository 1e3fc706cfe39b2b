"""128 bits that stand for a tensor's content; see `definition` for what they are.

What needs torch and numba is imported when it is first asked for: reading and comparing traces needs neither.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from repro_golden.fingerprint.definition import SCHEME, Lanes, add, bind, reference

if TYPE_CHECKING:
    from repro_golden.fingerprint.backends.cpu import content
    from repro_golden.fingerprint.collector import Collector, Pending
    from repro_golden.fingerprint.kinds import dtype_name
    from repro_golden.fingerprint.placement import Placement
    from repro_golden.fingerprint.share import Share, merge
    from repro_golden.fingerprint.tensors import fingerprint, fingerprints, scan, shares
    from repro_golden.fingerprint.views import Scan

_HOMES = {
    "collector": ("Collector", "Pending"),
    "kinds": ("dtype_name",),
    "placement": ("Placement",),
    "views": ("Scan",),
    "share": ("Share", "merge"),
    "backends.cpu": ("content",),
    "tensors": ("fingerprint", "fingerprints", "scan", "shares"),
}

__all__ = [
    "SCHEME",
    "Collector",
    "Lanes",
    "Pending",
    "Placement",
    "Scan",
    "Share",
    "add",
    "bind",
    "content",
    "dtype_name",
    "fingerprint",
    "fingerprints",
    "merge",
    "reference",
    "scan",
    "shares",
]


def __getattr__(name: str) -> Any:
    for home, names in _HOMES.items():
        if name in names:
            return getattr(importlib.import_module(f"repro_golden.fingerprint.{home}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
