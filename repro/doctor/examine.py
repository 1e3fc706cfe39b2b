"""An examination: recognise what there is, try every rule that applies, and collect what they find."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from repro.doctor.artefacts.kinds import Launch, Log, Metrics, NotRead, Series
from repro.doctor.catalogue import catalogue
from repro.doctor.facts.launches import programmed
from repro.doctor.recognise import Seen, recognise
from repro.text import count
from repro_golden.base.checks import Finding, Found, Rule, Severity, Where
from repro_golden.base.errors import ReproError

__all__ = ["FAULT", "UNREADABLE", "Examination", "every_rule", "examine", "found_by", "look"]

UNREADABLE = Rule(
    "unreadable", "What is corrupt, or cannot be read", (), "error", "certain",
    "the trainer, or whatever reads it next, fails on it or takes it for something else",
    "write it again from its source",
    (), lambda: (),
)  # fmt: skip
"""Not in a file of its own: readers find it, not a function."""

FAULT = Rule(
    "rule-failed", "A rule that failed on what it read", (), "warning", "certain",
    "that rule says nothing of this artefact, so its absence below is no clean bill",
    "report it, with the artefact if it can be shared", (), lambda: (),
)  # fmt: skip

LEFT_OUT = Rule(
    "not-read", "What was left out of a folder: too large, too deep, or behind a link out of it", (), "note", "certain",
    "the rules say nothing of what they did not see",
    "name a smaller folder, single files, or what a link leads to", (), lambda: (),
)  # fmt: skip
"""Likewise."""

OTHER_PROGRAM = Rule(
    "other-program", "A launch of a program that is none of slime, Miles and Relax", (), "note", "certain",
    "the rules of those trainers are not tried on it, so their absence is no clean bill",
    "where it does start one of them, name a script or command line with the flags that it gives, or run the doctor in "
    "the checkout that holds its program",
    (), lambda: (),
)  # fmt: skip
"""Likewise: it is known before any rule is tried."""

OTHER_METRICS = Rule(
    "other-metrics", "A log without metrics as slime, Miles and Relax print them", (), "note", "certain",
    "the rules of those trainers' metrics are not tried on it, so their absence is no clean bill",
    "where the run has other files, name the log of the process that prints the metrics, the run's dumps, or a trace "
    "(`repro trace`)",
    (), lambda: (),
)  # fmt: skip
"""Likewise."""

_ORDER: tuple[Severity, ...] = ("error", "warning", "note")


@dataclass(frozen=True)
class Examination:
    """What was looked at, and what was found.

    Attributes:
        seen: Every path that was recognised.
        findings: Errors first, then warnings and notes, each in the order of the catalogue.
        tried: Ids of the rules that applied to something.
        more: What was given beside paths.
    """

    seen: Sequence[Seen]
    findings: Sequence[Finding]
    tried: Sequence[str]
    more: Sequence[object] = ()

    def of(self, severity: Severity) -> list[Finding]:
        """The findings of one severity."""
        return [finding for finding in self.findings if finding.severity == severity]


def every_rule() -> dict[str, Rule]:
    """The catalogue, and what is found while artefacts are read."""
    before = (UNREADABLE, FAULT, LEFT_OUT, OTHER_PROGRAM, OTHER_METRICS)
    return {**catalogue(), **{rule.id: rule for rule in before}}


def look(paths: Iterable[Path]) -> list[Seen]:
    """Recognise what the user names.

    Raises:
        ReproError: a path does not exist, or nothing below any of them is of a known kind.
    """
    seen: list[Seen] = []
    for path in paths:
        if not path.exists():
            raise ReproError(f"{path} does not exist: name a file or folder, or put a command line after --")
        seen += recognise(path)
    unknown = [entry for entry in seen if not entry.kind]
    if unknown and len(unknown) == len(seen):
        raise ReproError(f"cannot tell what {unknown[0].path} is: {_KNOWN}")
    return [entry if entry.kind else replace(entry, problem=f"cannot tell what it is: {_KNOWN}") for entry in seen]


_KNOWN = (
    "`repro doctor` knows launch scripts, checkpoints, dumps, traces, logs, a Ray session folder, config.json, prompt "
    "data and package lists"
)


def examine(
    seen: Sequence[Seen], more: Sequence[object] = (), *, only: Sequence[str] = (), ignore: Sequence[str] = ()
) -> Examination:
    """Try every rule on every combination of the artefacts that it needs.

    Args:
        seen: What was recognised.
        more: Artefacts that lie in no file: the machine, a command line, a reward function.
        only: Ids of the rules to try; none for all.
        ignore: Ids of rules to leave out.
    """
    artefacts = _distinct([*(artefact for entry in seen for artefact in entry.artefacts), *more])
    findings = [
        Finding.of(UNREADABLE, Found(entry.problem, Where(str(entry.path), item=entry.kind)))
        for entry in seen
        if entry.problem
    ]
    findings += [
        Finding.of(LEFT_OUT, Found(artefact.reason, Where(str(artefact.path))))
        for artefact in artefacts
        if isinstance(artefact, NotRead)
    ]
    others = [artefact for artefact in artefacts if isinstance(artefact, Launch) and not artefact.trainer]
    of_trainers = [artefact for artefact in artefacts if not isinstance(artefact, Launch) or artefact.trainer]
    if not only:  # what is asked for by name is tried on whatever is given
        for launch in others:
            started = launch.entry or "the command"
            message = f"{started} imports none of slime, Miles and Relax, and has no flag that only they have"
            findings.append(Finding.of(OTHER_PROGRAM, Found(message, Where(str(launch.path)))))
        logs = [artefact for artefact in artefacts if isinstance(artefact, Log)]
        if logs and not any(isinstance(artefact, Series) for artefact in artefacts):
            others_metrics = [artefact for artefact in artefacts if type(artefact) is Metrics]
            findings.append(Finding.of(OTHER_METRICS, _prints(logs, others_metrics)))
    tried = []
    for rule in catalogue().values():
        if (only and rule.id not in only) or rule.id in ignore:
            continue
        serving = artefacts if only or rule.any_program else of_trainers
        combinations = list(_combinations(rule.inputs, serving))
        if combinations:
            tried.append(rule.id)
        used = [_sole(kind, serving) for kind in rule.uses]
        for inputs in combinations:
            findings += _tried(rule, (*inputs, *used))
    findings = list(dict.fromkeys(findings))
    return Examination(seen, sorted(findings, key=lambda finding: _ORDER.index(finding.severity)), tried, more)


def _prints(logs: Sequence[Log], others: Sequence[Metrics]) -> Found:
    """One for all logs: a process that prints none stands beside one that does."""
    of = f"{count(len(logs), 'log')}: " if logs[1:] else ""
    if not others:
        return Found(f"{of}no line of metrics that can be read", Where(str(logs[0].path)))
    lines = count(sum(len(metrics.steps) for metrics in others), "line")
    text = f"{of}metrics of another trainer ({lines}): read is whether losses and gradient norms are finite"
    return Found(text, Where(str(others[0].path)))


def _tried(rule: Rule, arguments: tuple[object, ...]) -> Iterator[Finding]:
    """What a rule finds; a rule that fails is a finding about itself, and the others still speak."""
    try:
        for result in found_by(rule, arguments):
            yield Finding.of(rule, result)
    except ReproError as error:
        yield Finding.of(UNREADABLE, Found(str(error), Where(item=rule.id)))
    except Exception as error:  # noqa: BLE001 - artefacts are anything at all; one rule must not silence the others
        yield Finding.of(FAULT, Found(f"{rule.id}: {type(error).__name__}: {error}"[:300], Where(item=rule.id)))


def found_by(rule: Rule, arguments: Sequence[Any]) -> Iterator[Found]:
    """What a rule says of artefacts, and no more surely than what they start is known.

    A Python launcher's flags are those of all its branches, which need not run together. Of a script that starts one
    thing or another, by branches that nobody can decide, both are looked at, and what all ways share: what is wrong
    with one alone, or not with what they share, is possible.
    """
    launch = next((artefact for artefact in arguments[: len(rule.inputs)] if isinstance(artefact, Launch)), None)
    results, failed = _results(rule, arguments)
    others, also = _read_as(launch and launch.otherwise, launch, rule, arguments)
    shared, _ = _read_as(launch and launch.shared, launch, rule, arguments)
    sure = {_apart_from_numbers(rule, result) for result in (shared if launch and launch.shared else results)}
    # what other artefacts say too may be certain all the same
    unsure = launch is not None and ((programmed(launch) and set(rule.inputs) == {Launch}) or launch.doubted)
    for these, those, how in ((results, others, ""), (others, results, "not ")):
        faults = {_apart_from_numbers(rule, result) for result in those}
        for result in these:
            fault = _apart_from_numbers(rule, result)
            if launch and launch.otherwise and fault not in faults:
                result = result._replace(message=f"{result.message} (where a branch of the script is {how}taken)")
                yield _doubtful(rule, result)
            elif these is results:
                error = (result.severity or rule.severity) == "error"
                yield _doubtful(rule, result) if (error and unsure) or fault not in sure else result
    if failure := failed or also:
        raise failure


def _read_as(
    other: Launch | None, launch: Launch | None, rule: Rule, arguments: Sequence[Any]
) -> tuple[list[Found], Exception | None]:
    """What a rule says of another reading of a launch."""
    return _results(rule, [other if a is launch else a for a in arguments]) if other else ([], None)


def _results(rule: Rule, arguments: Sequence[Any]) -> tuple[list[Found], Exception | None]:
    """What a rule says, and how it failed after that."""
    results: list[Found] = []
    try:
        results.extend(rule.check(*arguments))
    except Exception as error:  # noqa: BLE001 - whoever tries the rule says so
        return results, error
    return results, None


def _apart_from_numbers(rule: Rule, result: Found) -> tuple[str, Severity]:
    """Equal for one fault in two readings, which may count other flags."""
    return re.sub(r"\d+", "", result.message), result.severity or rule.severity


def _doubtful(rule: Rule, result: Found) -> Found:
    """The same as no more than possible: an error is a warning."""
    severity = result.severity or rule.severity
    return result._replace(severity="warning" if severity == "error" else severity, certainty="possible")


def _distinct(artefacts: Sequence[object]) -> list[object]:
    """Each artefact once: the same file can be found below two of the paths."""
    distinct: dict[object, object] = {}
    for artefact in artefacts:
        path = getattr(artefact, "path", None)
        place = os.path.abspath(path) if path else id(artefact)  # noqa: PTH100 - a link is another name, and stays one
        which = getattr(artefact, "rollout_id", None), getattr(artefact, "argv", None)  # of several in one file
        distinct.setdefault((type(artefact), place, which), artefact)
    return list(distinct.values())


def _combinations(kinds: Sequence[type], artefacts: Sequence[object]) -> Iterator[tuple[object, ...]]:
    """One artefact for each kind, all of them different ones."""
    for combination in itertools.product(*([a for a in artefacts if isinstance(a, kind)] for kind in kinds)):
        if len({id(artefact) for artefact in combination}) == len(combination):
            yield combination


def _sole(kind: type, artefacts: Sequence[object]) -> object | None:
    matching = [artefact for artefact in artefacts if isinstance(artefact, kind)]
    return matching[0] if len(matching) == 1 else None
