"""What comes of a probe, what it says, and why a commit is skipped."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from repro_bisect.predicates.predicates import Own, Predicate, first_violation
from repro_golden.base.clean import without_colours
from repro_golden.base.errors import NotVerifiableError, ReproError, UnjudgedError
from repro_golden.compare.traces import Divergence, first_difference
from repro_golden.recording.attach.written.raw import RECORDER_FAILED
from repro_golden.recording.operations.stream import Stream
from repro_golden.replay.children import ChildFailure
from repro_golden.repository.git import Git
from repro_golden.repository.linked import LEADS_OUT, leads_out
from repro_golden.subjects.missing import names_fix
from repro_golden.trace import Trace

__all__ = [
    "ABSENT", "MOVED", "UNTESTABLE", "UNTESTABLE_CODE", "Answer", "Code", "Recording", "Skip",
    "depends_on_the_question", "differ_twice", "is_told", "judge", "kind_of", "reason_of", "trace_of", "unlike_before",
    "unusable",
]  # fmt: skip

UNTESTABLE_CODE = 125
"""By which a commit says that it cannot be tested, as it would to `git bisect run`."""
_NO_MODULE = re.compile(r"ModuleNotFoundError: No module named '(\w+)[\w.]*'(?! in )")
UNTESTABLE = f"exit {UNTESTABLE_CODE}"
ABSENT = "lacks what it needs"
_OTHER_CODE = "does not run its own code"
_ELSEWHERE = "does not run in its own environment"
_OTHER_RANKS = "trains on other ranks than are asked for"
_OUT_OF_TIME = "runs out of time"
_CRASHES = "crashes at step"
_FAILS = re.compile(r"fails after (\d+) steps?:")
_UNRECORDED = "is not recorded whole from step"
MOVED = "has other numbers in another recording"
"""Of a recording that is to be made anew."""
_OF_ONE_RUN = re.compile(r"(?!\W*\d{1,3}\W*(?:\s|$))\S*\d\S*")
"""Words with a number in them: addresses, times, process ids, temporary files. Not an exit code, nor a small count."""


@dataclass(frozen=True)
class Skip:
    """A commit that cannot be tested, and why.

    Attributes:
        reason: In one line. Equal causes give equal text: the search presumes by it.
        unready: It failed where a start from step 0 may not: the state it was to start from may not be for it.
        diagnosis: What is known of such a failure, in one line; '' where nothing is.
    """

    reason: str
    unready: bool = False
    diagnosis: str = field(default="", compare=False)


@dataclass(frozen=True)
class Code:
    """The exit code of a program that was judged by nothing else."""

    code: int


@dataclass(frozen=True)
class Recording:
    """A replay whose last step was recorded operation by operation.

    Attributes:
        trace: Its trace. With more than 64 MiB beside it, it is not journalled, and goes when the prober closes.
        streams: The operations, of each rank.
        seconds: What it took.
        key: Under which it is journalled; "" where it is not.
        run: Likewise.
        lasting: Whether all was as it is in keys while it was made.
        beside: Whether other probes ran at the same time.
        pythons: See `Outcome.pythons`.
    """

    trace: Trace
    streams: Sequence[Stream]
    seconds: float = 0.0
    key: str = ""
    run: int = 0
    lasting: bool = True
    beside: bool = False
    pythons: Sequence[str] = ()


Answer: TypeAlias = Trace | Code | Skip
"""What came of a probe."""


def judge(predicate: Predicate, baseline: Trace, trace: Trace, bound: int) -> Divergence | Skip | None:
    """The first violation by a probe within the first `bound` steps: its presence means BAD.

    A `Skip` where the probe has fewer steps than that and is good as far as it goes, or where the predicate cannot
    judge it, so that it proves nothing.
    """
    wanted = min(bound, len(baseline.steps))
    short = Skip(f"it ends after {len(trace.steps)} of {wanted} steps, good as far as it goes")
    if len(trace.steps) < wanted and isinstance(predicate, Own):
        return short
    try:
        violation = first_violation(predicate, baseline, trace, bound)
    except UnjudgedError as error:
        return Skip(str(error))
    return short if violation is None and len(trace.steps) < wanted else violation


def trace_of(answer: Answer, name: str) -> Trace:
    """The trace of a commit that must have one.

    Raises:
        ReproError: it cannot be tested.
    """
    if not isinstance(answer, Trace):
        raise ReproError(unusable(name, answer))
    return answer


def unusable(name: str, answer: Answer) -> str:
    """Why a commit that is needed does not serve, in one line."""
    why = f"exit {answer.code}" if isinstance(answer, Code) else "it left no trace"
    why = answer.reason if isinstance(answer, Skip) else why
    known = f" ({answer.diagnosis})" if isinstance(answer, Skip) and answer.diagnosis else ""
    end = name.startswith(("GOOD", "BAD")) and not is_told(why)
    other_end = "; choose another end for the range" if end else ""
    if end and (module := _NO_MODULE.search(why)):  # which an older commit may have had itself
        other_end = f"; install {module[1]} if it is a package of others, or choose another end for the range"
    if end and (made := _made_before(why)):  # which of both helps, only who knows the program can tell
        other_end = f"; `--steps {made}` (in a case, `steps`) ends before that; or choose another end for the range"
    return f"{name} cannot be tested: {why}{known}{other_end}"


def is_told(reason: str) -> bool:
    """Whether the reason of a skip names its cause, and the cure."""
    names_cause = names_fix(reason) or LEADS_OUT in reason or RECORDER_FAILED in reason
    return names_cause or reason.startswith((_OTHER_CODE, _ELSEWHERE, _OTHER_RANKS, ABSENT))


def differ_twice(first: Trace, again: Trace, name: str, asked: int | None = None) -> Divergence | None:
    """Where two replays of one point differ; None where they are the same.

    Args:
        first: The first.
        again: The second.
        name: Of what.
        asked: Steps that the second was asked for; None for all.

    Raises:
        NotVerifiableError: they agree, but one ends by itself before the other.
    """
    if differs := first_difference(first, again):
        return differs
    made = [len(trace.steps) for trace in (first, again)]
    if min(made[0], asked or made[0]) != min(made[1], asked or made[1]):
        raise NotVerifiableError(f"two replays of {name} make {made[0]} and {made[1]} steps: give both the same to do")
    return None


def unlike_before(first: Trace, again: Answer, steps: int, name: str, differ: str) -> str:
    """How a later replay of a point is another than its first one over so many steps; '' where it is not.

    Args:
        first: The first one.
        again: The later one.
        steps: Steps that were asked for.
        name: What the later one is called.
        differ: Begins what is said where a signal differs.
    """
    if not isinstance(again, Trace):
        return unusable(name, again).partition(";")[0]
    if differs := first_difference(first, again):
        return f"{differ} at {differs}"
    if len(again.steps) < min(steps, len(first.steps)):
        return f"{name} ends after {len(again.steps)} steps"
    return ""


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
        "other": _OTHER_CODE,
        "elsewhere": _ELSEWHERE,
        "ranks": _OTHER_RANKS,
        "absent": ABSENT,
    }[failure.stage]
    return without_colours(f"{what}: {failure.message}{leads_out(git, failure.message)}")


def depends_on_the_question(reason: str) -> bool:
    """Whether asking again may have another answer.

    With another number of steps it takes other time, or ends before a crash; what was not here may have been fetched.
    """
    return _made_before(reason) > 0 or reason.startswith((_OUT_OF_TIME, _CRASHES, _UNRECORDED, MOVED, ABSENT))


def _made_before(reason: str) -> int:
    """How many steps were made before the failure that is the reason; 0 for other reasons."""
    match = _FAILS.match(reason)
    return int(match[1]) if match else 0


def kind_of(reason: str) -> str:
    """A reason without what may be another in each run."""
    return _OF_ONE_RUN.sub("#", reason)
