"""What a comparison with TensorBoard's event files left out, and why one compared nothing, in words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from repro.text import count

if TYPE_CHECKING:
    from repro_golden.compare.tensorboard import EventsComparison

__all__ = ["all_agree", "left_out", "nothing_common"]


def left_out(comparison: EventsComparison, a: str, b: str) -> list[str]:
    """What was not compared, a line for each kind: metrics of one side alone, and steps at which one side has them.

    Args:
        comparison: Of both sides.
        a: What the baseline is called.
        b: What the other side is.
    """
    notes = [
        f"only in {side}: {', '.join(names)}" for side, names in zip((a, b), comparison.alone, strict=True) if names
    ]
    alike: dict[tuple[int, int], list[str]] = {}
    for metric, counts in comparison.apart.items():
        alike.setdefault(counts, []).append(metric)
    for counts, metrics in alike.items():
        parts = [f"{count(n, 'step')} of {side} alone" for side, n in zip((a, b), counts, strict=True) if n]
        notes.append(f"not compared: {', '.join(metrics)} at {' and '.join(parts)}")
    return notes


def nothing_common(
    comparison: EventsComparison,
    a: Mapping[int, Mapping[str, float]],
    b: Mapping[int, Mapping[str, float]],
    names: tuple[str, str],
    offset: int,
) -> str:
    """Why nothing was compared: what each side has, and what may help.

    Args:
        comparison: Of both sides.
        a: The baseline, values by step and name.
        b: The other side, likewise.
        names: What they are called.
        offset: The number that the events gave to a trace's step 0.
    """
    if not comparison.apart:  # no name means the same
        texts = [f"{who} has {', '.join(of) or 'no metric'}" for who, of in zip(names, comparison.alone, strict=True)]
        return "; ".join(texts)
    steps = [
        f"{who} has {f'steps {min(of)} to {max(of)}' if of else 'no step'}"
        for who, of in zip(names, (a, b), strict=True)
    ]
    return (
        f"{', '.join(steps)}, with --offset {offset}: try another (the number that event files give to step 0), or "
        "events that were logged at each step"
    )


def all_agree(offset: int) -> str:
    """That values agree where steps are numbered otherwise."""
    return f"all values that both have agree with --offset {offset}: do the events number their steps so?"
