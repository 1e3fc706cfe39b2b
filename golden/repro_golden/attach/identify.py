"""The identity of a program's environment, asked of its own Python before anything is trained."""

from __future__ import annotations

import json
import os
import re
from importlib import metadata

__all__ = ["importable", "say"]


def importable() -> list[str]:
    """``name==version`` of every package that this process could import, by name.

    Of two copies of one package the first on the search path is that which is imported.
    """
    found: dict[str, str] = {}
    for one in metadata.distributions():
        if name := one.metadata["Name"]:
            found.setdefault(re.sub("[-_.]+", "-", name).lower(), f"{name}=={one.version}")
    return sorted(found.values(), key=str.lower)


def say(threads: int, ranks: int) -> None:
    """Print the identity that a process here would have, and the packages it could import, as one line of JSON."""
    from repro_golden.identity import collect

    found = collect(os.environ, threads=threads, ranks=ranks).to_mapping()
    print(json.dumps({"identity": found, "packages": importable()}))
