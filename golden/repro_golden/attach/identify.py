"""The identity of a program's environment, asked of its own Python before anything is trained."""

from __future__ import annotations

import json
import os
from importlib import metadata

__all__ = ["say"]


def say(threads: int, ranks: int) -> None:
    """Print the identity that a process here would have, and the packages it could import, as one line of JSON."""
    from repro_golden.identity import collect

    packages = {f"{d.metadata['Name']}=={d.version}" for d in metadata.distributions()}
    found = collect(os.environ, threads=threads, ranks=ranks).to_mapping()
    print(json.dumps({"identity": found, "packages": sorted(packages, key=str.lower)}))
