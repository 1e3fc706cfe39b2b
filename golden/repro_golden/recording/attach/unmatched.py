"""What was asked for and never seen: a glob or a pattern that fits nothing guards nothing."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Sequence

from repro_golden.trace import Trace

__all__ = ["unmatched"]


def unmatched(trace: Trace, activations: Sequence[str], metrics: Sequence[str]) -> str:
    """In words, the globs of modules and patterns of metrics that fit nothing in a trace; '' where all do."""
    rows = [row for index in range(len(trace.steps)) for row in trace.rows(index)] if activations else []
    modules = {re.split(r"\.?output(?:\.|$)", row.name)[0] for row in rows if row.phase == "forward"}
    compared = {name for step in trace.steps for name in step.compared}
    none = [f"no module fits {glob!r}" for glob in activations if not fnmatch.filter(modules, glob)]
    for text in metrics:
        named = set(re.compile(text).groupindex) - {"name", "value"}
        if lost := sorted(named - compared):
            none.append(f"no number was found for {', '.join(lost)} by {text!r}")
    return ", ".join(none)
