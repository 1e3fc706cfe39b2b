"""The noise of a subject that does not reproduce itself: how far each metric moves when nothing has changed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from repro_golden.base.canonical import encode_float
from repro_golden.trace import Trace

__all__ = ["measure_noise"]


def measure_noise(runs: Sequence[Trace]) -> dict[str, Any]:
    """Largest spread of each metric over equal runs, at any step.

    Args:
        runs: Two or more traces of one case on one code and machine.

    Returns:
        ``runs`` and ``spread``: per metric max - min over the runs at its worst step, in fp64; a metric that was ever
        not finite, or absent from a run, has an infinite spread.
    """
    spread: dict[str, float] = {}
    for index in range(min(len(run.steps) for run in runs)):
        for name in runs[0].steps[index].metrics:
            values = [run.steps[index].metrics.get(name, math.nan) for run in runs]
            width = max(values) - min(values) if all(map(math.isfinite, values)) else math.inf
            spread[name] = max(spread.get(name, 0.0), width)
    return {"runs": len(runs), "spread": {name: encode_float(v) for name, v in sorted(spread.items())}}
