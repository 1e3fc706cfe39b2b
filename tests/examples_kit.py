"""How many examples a property is tried with.

On a change 25, the same ones everywhere; in the whole tier 200, others each time, and those that failed once again.
"""

from __future__ import annotations

from hypothesis import settings

FAST, WHOLE = "fast", "whole"

# no limit of time on a busy machine, and in the fast tier no luck
settings.register_profile(FAST, deadline=None, derandomize=True, max_examples=25)
settings.register_profile(WHOLE, deadline=None, max_examples=200, print_blob=True)


def at_most(examples: int) -> settings:
    """The tier's number of examples, or this one where each is dear."""
    return settings(max_examples=min(examples, settings().max_examples))
