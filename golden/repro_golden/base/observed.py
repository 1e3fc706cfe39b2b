"""What is read of each step, in the words that cases, flags, headers and the recorder share."""

from __future__ import annotations

import re
from collections.abc import Collection

__all__ = ["ALL_SIGNALS", "SIGNALS", "bounded", "state_after", "tellings"]

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


def tellings(metric: str, *sides: Collection[str]) -> list[str]:
    """The names under which sides tell a metric: ``loss``, ``loss#1`` when told again, ``loss@0`` of one rank of many.

    ``pass@1`` is a rank's ``pass`` only where a side does not tell ``pass`` itself.

    Args:
        metric: Its name.
        sides: The names, or mappings by name, of one step of each.
    """
    telling = re.compile(rf"{re.escape(metric)}(?:#.*?)?(@\d+)?")
    names = []
    for name in dict.fromkeys(name for side in sides for name in side):
        match = telling.fullmatch(name)
        if match and (match[1] is None or any(name[: match.start(1)] not in side for side in sides)):
            names.append(name)
    return names


def bounded(metrics: Collection[str], *sides: Collection[str]) -> dict[str, str]:
    """By whose bound each name is judged that sides tell: that of its own, or of the metric that it is a telling of.

    Args:
        metrics: Those that have a bound.
        sides: See `tellings`.
    """
    return {name: metric for metric in metrics for name in tellings(metric, *sides)} | {m: m for m in metrics}
