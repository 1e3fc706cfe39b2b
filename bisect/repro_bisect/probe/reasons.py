"""Why a commit is skipped, in words that the journal keeps."""

from __future__ import annotations

import re

from repro_golden.base.clean import without_colours
from repro_golden.replay.children import ChildFailure
from repro_golden.repository.git import Git
from repro_golden.repository.linked import leads_out

__all__ = [
    "ABSENT",
    "MOVED",
    "OTHER_CODE",
    "OTHER_RANKS",
    "depends_on_the_question",
    "kind_of",
    "made_before",
    "reason_of",
]

ABSENT = "lacks what it needs"
OTHER_CODE = "does not run its own code"
OTHER_RANKS = "trains on other ranks than are asked for"
_OUT_OF_TIME = "runs out of time"
_CRASHES = "crashes at step"
_FAILS = re.compile(r"fails after (\d+) steps?:")
_UNRECORDED = "is not recorded whole from step"
MOVED = "has other numbers in another recording"
"""Of a recording that is to be made anew."""
_OF_ONE_RUN = re.compile(r"(?!\W*\d{1,3}\W*(?:\s|$))\S*\d\S*")
"""Words with a number in them: addresses, times, process ids, temporary files. Not an exit code, nor a small count."""


def reason_of(failure: ChildFailure, git: Git) -> str:
    """The reason that a failure is, with what the child said, and what to write for a path that leads out.

    Args:
        failure: The failure.
        git: In the root of the user's checkout.
    """
    what = {
        "import": "does not import",
        "contract": "offers another contract",
        "build": "does not build the trainer",
        "load": "does not load the state",
        "start": "ends before its first update",
        "step": f"fails after {failure.step} step{'s' * (failure.step > 1)}" if failure.step else f"{_CRASHES} 0",
        "record": f"{_UNRECORDED} {failure.step}",
        "timeout": _OUT_OF_TIME,
        "other": OTHER_CODE,
        "ranks": OTHER_RANKS,
        "absent": ABSENT,
    }[failure.stage]
    return without_colours(f"{what}: {failure.message}{leads_out(git, failure.message)}")


def depends_on_the_question(reason: str) -> bool:
    """Whether asking again may have another answer.

    With another number of steps it takes other time, or ends before a crash; what was not here may have been fetched.
    """
    return made_before(reason) > 0 or reason.startswith((_OUT_OF_TIME, _CRASHES, _UNRECORDED, MOVED, ABSENT))


def made_before(reason: str) -> int:
    """How many steps were made before the failure that is the reason; 0 for other reasons."""
    match = _FAILS.match(reason)
    return int(match[1]) if match else 0


def kind_of(reason: str) -> str:
    """A reason without what may be another in each run."""
    return _OF_ONE_RUN.sub("#", reason)
