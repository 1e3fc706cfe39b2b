"""Golden values that were rounded on their way into the file."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from repro.doctor.artefacts.kinds import Golden, GoldenValues
from repro.doctor.facts.goldens import damage, is_schedule, rows
from repro.doctor.facts.rounding import narrow_dtype, rounded_decimals, rounded_digits
from repro.doctor.rule import Found, Rule, Where

__all__ = ["RULE"]

_COLUMNS = ("log_probs", "old_log_probs", "ref_log_probs", "rollout_log_probs", "entropy", "values")
_ENOUGH = 64
"""Different values of a column, of which some would need the bits that are all zero."""
_WIDE = ("float32", "float64")


def _check(values: GoldenValues) -> Iterator[Found]:
    found: dict[str, list[str]] = {}
    for name, steps in values.metrics.items():
        finite = [value for value in steps.values() if np.isfinite(value)]
        if is_schedule(name) or len(finite) < 2:
            continue
        decimals, digits = rounded_decimals(finite), rounded_digits(finite)
        if decimals is not None:
            found.setdefault(f"{decimals} decimals", []).append(name)
        elif digits is not None:
            found.setdefault(f"{digits} significant digits", []).append(name)
    for how, names in found.items():
        listed = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
        value = next(iter(values.metrics[names[0]].values()))
        yield Found(
            f"rounded to {how}: {listed}",
            Where(str(values.path), item=names[0], value=f"{value!r}"),
            certainty="likely",
        )
    if values.golden is not None:
        yield from _columns(values.golden)


def _columns(golden: Golden) -> Iterator[Found]:
    """Columns of wide floats whose values all fit a narrow dtype, in the last step."""
    from repro_golden.trace.tensor_difference import decode

    if damage(golden.trace) or not golden.trace.steps:
        return
    for row in rows(golden.trace, len(golden.trace.steps) - 1):
        if row.values is None or row.dtype not in _WIDE or row.name.partition("@")[0].split(".")[0] not in _COLUMNS:
            continue
        values = np.unique(decode(row.dtype, row.values))
        values = values[np.isfinite(values) & (values != 0)]
        if len(values) >= _ENOUGH and (dtype := narrow_dtype(values)):
            yield Found(
                f"all {len(values)} different values of {row.name} ({row.dtype}) are values of {dtype}",
                Where(str(golden.path / "trace"), item=f"{row.phase} {row.name}", value=f"{values[0]!r}"),
                certainty="likely",
                cure="keep the column in fp32 from the softmax on; where the program means to round, nothing",
            )


RULE = Rule(
    id="golden-rounded",
    title="Golden values that were rounded",
    inputs=(GoldenValues,),
    severity="warning",
    certainty="likely",
    why="what changes by less than the rounding passes unseen, and what lies at its edge fails for nothing",
    cure="keep all bits: print a metric with repr() or float.hex(), not with :.5f; `repro golden record` keeps the "
    "bits of "
    "every signal itself",
    sources=("NVIDIA/Megatron-LM tests/functional_tests (golden values of 5 decimals until 2026-09)",),
    check=_check,
)
