"""Modules that came from the user's checkout although a worktree is under test. The standard library alone."""

from __future__ import annotations

import os
import sys

__all__ = ["outside"]

_KEPT = ("site-packages", "dist-packages", f"{os.sep}.git{os.sep}")
"""An environment inside the checkout is none of its code."""


def outside(home: str | None, place: str | None) -> list[str]:
    """Names of this process's modules that lie in the checkout `home` and not in `place`, the code under test.

    An editable installation brings such modules, or a launch that names the checkout by its path. None where both are
    the same, or are not known.
    """
    if home is None or place is None or home == place:
        return []
    home, place = home.rstrip(os.sep) + os.sep, place.rstrip(os.sep) + os.sep
    found = []
    for name, module in list(sys.modules.items()):
        file = str(getattr(module, "__file__", None) or "")
        if file.startswith(home) and not file.startswith(place) and not any(part in file for part in _KEPT):
            found.append(name)
    return sorted(found)
