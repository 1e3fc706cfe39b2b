"""Where packages are from, as installers note it beside them (PEP 610).

This runs inside foreign programs, from their start on: the standard library alone, and little of that.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

__all__ = ["notes"]


def notes(site: str) -> Sequence[str]:
    """The files with such notes in a folder of packages, by name."""
    try:
        names = [name for name in os.listdir(site) if name.endswith(".dist-info")]  # noqa: PTH208
    except OSError:
        return ()
    paths = [os.path.join(site, name, "direct_url.json") for name in sorted(names)]  # noqa: PTH118
    return [path for path in paths if os.path.exists(path)]  # noqa: PTH110
