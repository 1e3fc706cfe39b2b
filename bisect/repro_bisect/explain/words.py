"""An explanation in words, and in figures that were measured."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from repro_bisect.explain.cause import Cause
from repro_bisect.explain.result import Explained, Size
from repro_golden.compare.renames import aligned
from repro_golden.compare.traces import Divergence
from repro_golden.recording.operations.stream import Operation
from repro_golden.trace import Trace
from repro_golden.trace.tensor_difference import decode, measure, ulp_histogram

__all__ = ["UNSEEN", "differing_inputs", "only_the_environment", "sentence", "size_of"]

UNSEEN = "no recorded operation differs: what made the difference was not seen"


def differing_inputs(divergence: Divergence, traces: tuple[Trace, Trace]) -> str:
    """What of a step's inputs differs, where it is they that do; else empty."""
    signal = divergence.signal
    if divergence.phase != "input":
        return ""
    if signal.startswith("start/"):
        return f"the weights that the run starts from ({signal.removeprefix('start/')})"
    sides = []
    for trace in (traces[0], aligned(*traces).trace):
        index = next(i for i, record in enumerate(trace.steps) if record.step == divergence.step)
        row = trace.row(index, "input", signal)
        sides.append((row.dtype, row.shape, row.values) if row else None)
    a, b = sides
    if a is None or b is None:
        return f"the data of the step ({signal} is there on one side only)"
    if a[:2] == b[:2] and a[2] is not None and b[2] is not None and a[2]:
        item = len(a[2]) // math.prod(a[1])
        elements = [Counter(raw[k : k + item] for k in range(0, len(raw), item)) for raw in (a[2], b[2])]
        if elements[0] == elements[1]:
            return f"the order of the data of the step ({signal} holds the same elements in another order)"
    return f"the data of the step ({signal})"


def only_the_environment(changes: Sequence[str]) -> str:
    """That it, and no code, differs: the first part by name."""
    more = f" and {len(changes) - 1} more" if len(changes) > 1 else ""
    return f"only the environment differs ({changes[0]}{more})"


def size_of(pair: tuple[Operation, Operation], raw: tuple[bytes, bytes]) -> Size:
    """The first results of two operations, compared whole; those of two dtypes by their values."""
    values = [operation.outputs[0] for operation in pair]
    dtypes = (values[0].dtype, values[1].dtype)
    total = math.prod(values[0].shape)
    where = pair[0].name + (f" in {pair[0].module}" if pair[0].module else "")
    if dtypes[0] == dtypes[1]:
        return Size(where, measure(dtypes[0], *raw, total), ulp_histogram(dtypes[0], *raw), dtypes)
    wide = [decode(dtype, data).astype("<f8").tobytes() for dtype, data in zip(dtypes, raw, strict=True)]
    difference = measure("float64", wide[0], wide[1], total)
    return Size(where, replace(difference, max_ulp=None), (), dtypes)


def sentence(cause: Cause, inputs: str, gap: tuple[str, str] | None, told: Sequence[Explained | None]) -> str:
    """The answer in one sentence."""
    main = cause.operation
    order = told if cause.side == "before" else told[::-1]
    at = next((f" at {side.place}" for side in order if side and side.place), "")
    if inputs:
        return f"the step begins with other values: {inputs}; the difference comes from {main.name}{at}"
    if gap:
        return (
            f"what {gap[1]} read was written after {gap[0]} by no recorded operation: what wrote it was not seen, as "
            "kernels of extensions and of custom autograd functions and collectives are not"
        )
    simple = {
        "inputs": f"{main.name}{at} reads a value from outside of torch, or from before the step, that differs",
        "random": f"{main.name}{at} draws other random numbers: the generator's stream differs",
        "operation": f"{main.name}{at} reads the same bits with the same arguments, and makes others",
    }
    if cause.kind in simple:
        return simple[cause.kind]
    a, b = cause.before, cause.after
    if a is None or b is None:
        return f"{main.name}{at} is {'made only after the change' if a is None else 'no longer made'}"
    if cause.kind == "arguments":
        return f"{main.name}{at} is given other arguments: ({a.arguments}) became ({b.arguments})"
    if a.name == b.name:
        return f"{main.name}{at} reads other values than before"
    other = a.name if cause.side == "after" else b.name
    return f"{main.name}{at} stands where {other} {'stood' if cause.side == 'after' else 'stands now'}"
