"""The instrument: rollouts, fingerprints, traces, comparison, replay and the golden store.

A program that wants to be seen better may say so itself: `observe` and `column` do nothing until it is recorded
(`repro trace`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__ = ["column", "observe"]

_sink: Callable[[str, str, Any], None] | None = None
"""Where a recorder in this process takes signals; set by `attach.session`."""
_settle: Callable[[], None] | None = None
"""Makes the recording of this process whole for now; set by `attach.session`."""


def observe(name: str, value: Any, phase: str = "forward") -> None:
    """Record a tensor or a float as a signal of the training step under way.

    Args:
        name: The signal's name; once in a step and phase.
        value: A tensor of any shape, or a float for a metric.
        phase: ``input``, ``forward``, ``loss``, ``grad`` or ``update``.
    """
    if _sink is not None:
        _sink(phase, name, value)


def column(name: str, values: Any) -> None:
    """Record a column with one value per token, such as ``log_probs``: a 1-d tensor, of which all values are kept."""
    if _sink is not None:
        _sink("forward", name, values)
