"""What is read of each step, in the words that cases, flags, headers and the recorder share."""

from __future__ import annotations

__all__ = ["ALL_SIGNALS", "SIGNALS", "state_after"]

ALL_SIGNALS = "full"
"""Everything: the default."""
SIGNALS = r"full|light(:[1-9][0-9]{0,8})?"
"""All that can be asked for. ``light:N``: optimizer state after each N-th step alone."""
_EVERY = 16
"""N of ``light``."""


def state_after(signals: str, step: int) -> bool:
    """Whether optimizer state is read after a step of this number."""
    kind, _, every = signals.partition(":")
    return kind == ALL_SIGNALS or (step + 1) % int(every or _EVERY) == 0
