"""Whether what two points are compared by says something of their code: what else may have decided it.

A key holds what a case names (`probe.around`). What it does not name, as a file outside of git or the code
beside `subject.path`, may be another one when the next search, or a commit with the same key, is replayed. What BAD
changes may not have reached its program at all, and files that pin packages may differ where nothing installs them.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import PurePosixPath
from typing import Any

from repro_bisect.axes.axis import Varied, short
from repro_bisect.probe.answers import Answer, Code, unlike_before
from repro_bisect.probe.attempts import DisturbedError
from repro_bisect.probe.request import Request
from repro_bisect.probe.scheduler import Scheduler
from repro_golden.base.canonical import canonical_json, parse_toml
from repro_golden.base.errors import NotVerifiableError
from repro_golden.case.file import Case
from repro_golden.compare.traces import first_difference
from repro_golden.repository.code_key import same_beside
from repro_golden.repository.git import Git, GitFailedError
from repro_golden.repository.linked import in_few_words, what_decides
from repro_golden.store.golden import GoldenRun
from repro_golden.trace import Trace

__all__ = [
    "NOT_FOUND",
    "lost_of",
    "made_together",
    "not_installed",
    "refuse_changed_world",
    "refuse_disturbed",
    "refuse_explained",
    "refuse_lost",
    "refused",
]


def made_together(scheduler: Scheduler, these: Iterable[Request], those: Iterable[Request]) -> bool:
    """Whether one search made a replay of each of two sides."""
    searches = [
        {made.search for request in side if (made := scheduler.prober.made(request))} - {""} for side in (these, those)
    ]
    return not searches[0].isdisjoint(searches[1])


def refuse_changed_world(scheduler: Scheduler, pair: Sequence[tuple[str, Sequence[Request], Answer]]) -> None:
    """Two points are compared by what one search made, or each once more now, which must say the same again.

    Args:
        scheduler: Where replays run.
        pair: For both, what it is called, the replays that spoke for it, and what it is judged by.

    Raises:
        NotVerifiableError: a point has other numbers than before.
    """
    if made_together(scheduler, *(requests for _, requests, _ in pair)):
        return
    search = scheduler.prober.search
    old = [
        (name, requests[0], answer)
        for name, requests, answer in pair
        if not any((made := scheduler.prober.made(request)) and made.search == search for request in requests)
    ]
    scheduler.say(f"earlier searches replayed {' and '.join(name for name, _, _ in old)}: once more now")
    again = scheduler.ask(*(_bare(scheduler, request, answer) for _, request, answer in old))
    for (name, _, answer), now in zip(old, again, strict=True):
        if unlike := _unlike(answer, now, f"its replay now, of {name}"):
            raise _changed(name, unlike)


def refuse_disturbed(scheduler: Scheduler, *replays: tuple[Request, Answer]) -> None:
    """What contradicts itself, or others, was replayed beside other probes: is that the program's doing, or theirs?

    Exit codes are weighed as noisy ones are. Once a program has differed from itself alone, that is not asked again.

    Args:
        scheduler: Where replays run.
        replays: Replays of one point: what was asked for, and what came of it.

    Raises:
        DisturbedError: two replays that are alone agree, and one of these is another.
    """
    traces = [(request, answer) for request, answer in replays if isinstance(answer, Trace)]
    made = scheduler.prober.made
    beside = [answer for request, answer in traces if (by := made(request)) and by.beside]
    if not beside or scheduler.differs_alone:
        return
    request, answer = min(traces, key=lambda side: len(side[1].steps))
    scheduler.say(f"{short(request.point)} was replayed beside other probes: twice more, alone")
    now, again = (
        scheduler.ask(replace(_bare(scheduler, request, answer), alone=True))[0] for _ in range(2)
    )  # one after the other
    if _unlike(now, again, "a replay alone"):
        scheduler.differs_alone = True
    elif any(_unlike(now, answer, "a replay beside other probes") for answer in beside):
        raise DisturbedError(f"{short(request.point)} has other numbers alone than beside other probes")


def refuse_explained(scheduler: Scheduler, first: tuple[Request, Answer], again: tuple[Request, Answer]) -> None:
    """Two replays of one key differ: is that no noise, but what no commit holds, or other code than the key's?

    Another commit's code may have made one of them, or what changed between two searches. A golden run was made in a
    checkout, which may have what no worktree has.

    Args:
        scheduler: Where replays run.
        first: What was asked for, and what came of it.
        again: Likewise, later.

    Raises:
        DisturbedError: it is what ran beside them.
        NotVerifiableError: so it is: it says the same twice more, or each the same again at its own commit.
    """
    refuse_disturbed(scheduler, first, again)
    prober, history = scheduler.prober, scheduler.history
    if golden := prober.golden(first[0]):
        if not _unlike(again[1], _once_more(scheduler, *again), "another replay now"):
            raise _of_a_checkout(scheduler, golden, again[0].point, _unlike(first[1], again[1], "a replay of it"))
        return
    made, other = prober.made(first[0]), prober.made(again[0])
    if made is None or other is None or (made == other):
        return
    if made.commit == other.commit:
        (now,) = scheduler.ask(_bare(scheduler, *again))
        if not _unlike(now, _once_more(scheduler, again[0], now), "another replay now"):
            raise _changed(short(made.commit), _unlike(first[1], again[1], "its later replay"))
        return
    commits = [made.commit, other.commit]
    if not all(commit in (history.good, *history.parents) for commit in commits):
        return
    for commit, (request, answer) in zip(commits, (first, again), strict=True):
        at_home = replace(request, point=commit)
        if _unlike(answer, _once_more(scheduler, at_home, answer), "its replay now"):
            return
    names, paths = " and ".join(map(short, commits)), ", ".join(history.paths)
    same = f"{names} have the same code in {paths} and say otherwise, each of them again: what decides"
    if "." in history.paths:
        raise NotVerifiableError(f"{same} is in no file of theirs, but may be a commit's id, date or message")
    raise NotVerifiableError(f"{same} lies outside of {paths}; widen it (`--path`, or subject.path of the case)")


def _of_a_checkout(scheduler: Scheduler, golden: GoldenRun, point: str, unlike: str) -> NotVerifiableError:
    """The error for a point whose replays agree, and not with its golden run."""
    git, paths = scheduler.prober.git, ", ".join(scheduler.history.paths)
    why, of = what_decides(git, scheduler.case.subject.link), str(golden.record.get("commit"))
    if not same_beside(git, of, scheduler.history.commit(point)):
        why = (
            f"it was recorded at {short(of)}, which has other files outside of {paths}: widen that (`--path`, or "
            f"subject.path of the case) if they decide; else {why}"
        )
    return NotVerifiableError(
        f"two replays of {short(point)} agree, and its golden run, which was made in a checkout, does not ({unlike}): "
        + why
    )


def _changed(name: str, unlike: str) -> NotVerifiableError:
    return NotVerifiableError(
        f"{name} is not what it was when an earlier search replayed it ({unlike}): what no commit holds has changed "
        "since, or it does not reproduce itself; `--fresh` replays all of it anew"
    )


def _once_more(scheduler: Scheduler, request: Request, before: Answer) -> Answer:
    """What a replay says that nobody has made, over as many steps as one before made."""
    (now,) = scheduler.ask(_bare(scheduler, request, before))
    return now


def _bare(scheduler: Scheduler, request: Request, before: Answer) -> Request:
    """A new replay of as much, and of nothing beside it."""
    steps = request.steps
    if isinstance(before, Trace) and not scheduler.case.subject.told_steps:
        steps = min(steps, len(before.steps))
    return scheduler.prober.anew(
        replace(request, steps=steps, baseline=None, dump=(), keep=None, stage="confirmation", partial=True)
    )


def _unlike(before: Answer, now: Answer, name: str) -> str:
    """How an answer is another than an earlier one, as far as both go; '' where it is not."""
    if isinstance(before, Code) and isinstance(now, Code):
        return "" if bool(before.code) == bool(now.code) else f"it exited with {before.code}, and now with {now.code}"
    if not isinstance(before, Trace) or isinstance(now, Code):
        return f"{name} says something else"
    return unlike_before(before, now, len(before.steps), name, "it differs")


_SAID = "so that nothing can be said of it"


def refused(point: str, text: str) -> NotVerifiableError:
    """Of a point whose program ran without what the point changes."""
    return NotVerifiableError(f"{point}: {text}, {_SAID}")


def lost_of(scheduler: Scheduler, point: str, baseline: Trace | None, answer: Answer) -> str:
    """What of a point did not reach its program although BAD's shows it; '' where nothing is known to be lost."""
    axis = scheduler.history
    if not isinstance(axis, Varied) or baseline is None or not isinstance(answer, Trace):
        return ""
    parts = axis.changes_lost(point, scheduler.case, baseline.header, answer.header)
    return next((f"{part.text}, {_SAID}" for part in parts.values() if part.sure), "")


def refuse_lost(scheduler: Scheduler, baseline: Trace, last: Trace, *, agree: bool) -> list[str]:
    """Refuse a bad end of which a part neither shows in the process that trains nor moves any number.

    What does not show may have come another way, as by a file that a launch script writes. So where the numbers differ,
    the end is replayed without that part: what makes no difference is refused, what makes one is excused.

    Args:
        scheduler: Where probes run.
        baseline: GOOD's trace.
        last: BAD's.
        agree: Whether they agree.

    Returns:
        What is to be known of parts that may not have arrived.

    Raises:
        NotVerifiableError: there is such a part.
    """
    axis = scheduler.history
    if not isinstance(axis, Varied):
        return []
    bad, headers = axis.bad, (baseline.header, last.header)
    if agree:
        if (whole := axis.lost(bad, *headers)) is None:
            return []
        if whole.sure:
            raise refused(bad, whole.text)
        parts = {bad: whole}
    else:
        parts = axis.changes_lost(bad, scheduler.case, *headers)
        sure = [label for label, part in parts.items() if part.sure]
        if sure and _idle(scheduler, axis, sure):
            raise refused(bad, parts[sure[0]].text)
    axis.excuse(parts)
    notes = [f"{label}: {part.text}, under this name at least" for label, part in parts.items()]
    for text in notes:
        scheduler.say(text)
    return notes


def _idle(scheduler: Scheduler, axis: Varied, labels: list[str]) -> bool:
    """Whether BAD's numbers are the same without some of its changes, to the last step."""
    less = axis.beside(axis.bad, scheduler.case, labels)
    if less is None:
        return False
    scheduler.say(f"{' + '.join(labels)} does not show in the process that trains: replaying BAD with and without it")
    steps = scheduler.case.steps
    asked = [Request(point, steps, stage="ends", full=True) for point in (axis.bad, less)]
    a, b = scheduler.ask(*asked)
    if not (isinstance(a, Trace) and isinstance(b, Trace)):
        return False
    return first_difference(a, b) is None and len(a.steps) == len(b.steps)


NOT_FOUND = re.compile(r"No module named|cannot import name|ImportError|ModuleNotFoundError")
"""What a program says that lacks a package, or has another version of it."""
_PINNING = re.compile(
    r"requirements[^/]*\.txt|(?:uv|poetry|pdm|pixi|Pipfile|conda)[.-]?lock(?:\.ya?ml)?|environment\.ya?ml|pyproject\.toml"
)
_PIN = re.compile(r'^([\w.-]+)==([^\s;#\\,]+)|^name = "([^"]+)"\nversion = "([^"]+)"', re.MULTILINE)
_DEPENDENCIES = ("dependencies", "optional-dependencies", "dependency-groups", "dev-dependencies", "group", "requires")


def not_installed(case: Case, git: Git, good: str, bad: str) -> str:
    """What differs between two commits and was not installed, with the cure, in one line; '' where nothing is.

    Args:
        case: The case; one with `setup` installs what it needs.
        git: In the repository.
        good: The one commit.
        bad: The other.
    """
    program = case.subject.program
    if program is None or program.setup or good == bad:
        return ""
    changed = git.names("diff-tree", "-r", "-z", "--name-only", "--no-renames", good, bad)
    names, moved = list[str](), dict[str, tuple[str, str]]()
    for name in changed:
        path = PurePosixPath(name)
        if not _PINNING.fullmatch(path.name) or path.parts[0] in ("doc", "docs"):
            continue
        before, after = (_text(git, commit, name) for commit in (good, bad))
        if path.name != "pyproject.toml" or _dependencies(before) != _dependencies(after):
            names.append(name)
            old, new = _pins(before), _pins(after)
            pairs = {package: (release, new.get(package, "")) for package, release in old.items()}
            moved |= {package: pair for package, pair in pairs.items() if pair[0] != pair[1]}
    if not names:
        return ""
    alone = next(iter(moved.items())) if len(moved) == 1 else None
    releases = f", or `--package {alone[0]}=={alone[1][0]}..{alone[1][1]}`" if alone and alone[1][1] else ""
    verb = "differ" if len(names) > 1 else "differs"
    return (
        f"{in_few_words(names)} {verb} between the ends, and only the command may install it: setup and lock of a case "
        f"build what each commit asks for{releases}"
    )


def _text(git: Git, commit: str, name: str) -> str:
    with contextlib.suppress(GitFailedError):
        return git("cat-file", "blob", f"{commit}:{name}").decode(errors="replace")
    return ""


def _pins(text: str) -> dict[str, str]:
    return {name or other: first or second for name, first, other, second in _PIN.findall(text)}


def _dependencies(text: str) -> str:
    """What of a pyproject.toml says which packages are needed."""
    try:
        raw = parse_toml(text)
    except ValueError:
        return text
    tool = raw.get("tool")
    tables = [raw, raw.get("project"), *(tool.values() if isinstance(tool, Mapping) else ())]
    dependencies: list[Any] = [{k: t[k] for k in _DEPENDENCIES if k in t} for t in tables if isinstance(t, Mapping)]
    return canonical_json(dependencies)
