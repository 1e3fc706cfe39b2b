"""What repro says of a run, beside what is so."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

from planted_truth import Signals, first_difference

from repro_golden.compare.traces import compare
from repro_golden.trace import Trace

__all__ = ["STATE", "UNSHOWN", "Clean", "judged", "read_clean"]

Clean = tuple[Path, Signals]
"""The trace of the clean run, and what was so in it."""

STATE = "state: "
"""Begins the name of what is known to be so and is no signal."""

UNSHOWN = "not shown: "
"""Begins the name of what the trainer itself shows to nobody, and is no promise of the recorder's."""


def read_clean(place: Path) -> Clean:
    """What `judged` kept of the clean run in a folder."""
    return place / "trace", pickle.loads((place / "truth").read_bytes())  # noqa: S301 - our own


def judged(place: Path, signals: Signals, clean: Clean | None) -> dict[str, Any]:
    """Compare the trace in a folder with the clean one; of the clean one, keep what was so.

    Args:
        place: The run's folder, with its ``trace``.
        signals: What was so.
        clean: That of the clean run; None where this is it.
    """
    after = Trace(place / "trace")
    if clean is None:
        (place / "truth").write_bytes(pickle.dumps(signals))
        seen = {(s.step, r.phase, r.name) for k, s in enumerate(after.steps) for r in after.rows(k)}
        return {"unseen": sorted(map(str, signals.keys() - seen)), "more": sorted(map(str, seen - signals.keys()))}
    before = Trace(clean[0])
    comparison = compare(before, after)
    at = comparison.divergence
    shown, hidden = ([_of(side, unshown=which) for side in (clean[1], signals)] for which in (False, True))
    expected = first_difference(*shown)
    answer: dict[str, Any] = {"expected": expected, "equal": comparison.equal, "ended": comparison.ended}
    answer["unshown"] = first_difference(*hidden)
    answer["found"] = [at.step, at.phase, at.signal] if at else None
    if expected is not None:  # the first of them in the order in which they are observed
        rows = [row.name for row in before.rows(expected[0]) if row.phase == expected[1]]
        answer["first"] = next((name for name in rows if name.partition("@")[0] in expected[2]), None)
    return answer


def _of(signals: Signals, *, unshown: bool) -> Signals:
    return {key: value for key, value in signals.items() if key[2].startswith(UNSHOWN) == unshown}
