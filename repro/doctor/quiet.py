"""The doctor where nobody asked for it: before a golden run is recorded, and on the log of what failed.

It says nothing but errors, never stops what it looks at, and fails in silence, as without its extra: nobody asked for
it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from repro_golden.base.checks import Certainty
from repro_golden.base.errors import ReproError
from repro_golden.base.extras import lacking

if TYPE_CHECKING:
    from repro_golden.base.checks import Finding
    from repro_golden.case.file import Case
    from repro_golden.repository.checkout import Checkout

__all__ = ["before_recording", "diagnosis"]

_OF_FAILURES = "logs"
"""The subject of the rules that speak of why something failed."""


def diagnosis(log: Path, verdict: str = "") -> str:
    """What the log of a failed run shows of its cause, in one line; '' where no rule knows it.

    Args:
        log: It.
        verdict: What is said of the failure anyway: an exception that stands there is not told again.
    """
    if lacking("doctor"):
        return ""
    from repro.doctor.artefacts.kinds import Series
    from repro.doctor.catalogue import catalogue, subject_of
    from repro.doctor.examine import examine
    from repro.doctor.logs import LOG
    from repro.doctor.recognise import Seen
    from repro.doctor.show import brief

    try:
        seen = Seen(log, LOG.name, list(LOG.read(log)))
    except (ReproError, OSError):
        return ""
    rules = [rule.id for rule in catalogue().values() if subject_of(rule) == _OF_FAILURES]
    errors = [finding for finding in examine([seen], only=rules).of("error") if not _repeats(finding, verdict)]
    series = [artefact for artefact in seen.artefacts if isinstance(artefact, Series)]
    began = min((line for each in series for line in each.lines.values()), default=0)
    # a run that made a step has not died of how it began
    errors = [e for e in errors if e.certainty == "certain" or (e.where.line or math.inf) > began]
    if not errors:
        return ""
    # the surest, and of those the first in the log: what dies of it on other ranks comes later
    cause = min(errors, key=lambda e: (get_args(Certainty).index(e.certainty), e.where.line or math.inf))
    # the log goes with the probe: its line is evidence, its path is not
    stripped = dataclasses.replace(cause, where=dataclasses.replace(cause.where, path="", line=None))
    return "; ".join(brief([stripped]))


def _repeats(finding: Finding, verdict: str) -> bool:
    """Whether a finding says no more than the exception that a verdict ends with."""
    _, colon, rest = finding.message.partition(": ")
    return bool(colon) and rest.rstrip(". ") in verdict


def before_recording(checkout: Checkout, case: Case) -> list[str]:
    """The errors in a case's launch, data and surroundings, in a line each."""
    from repro.doctor.show import brief

    if lacking("doctor"):
        return []
    try:
        findings = _of_case(checkout.root, case)
    except (ReproError, OSError):
        return []
    return brief((finding for finding in findings if finding.severity == "error"), limit=5)


def _of_case(root: Path, case: Case) -> Sequence[Finding]:
    from repro.doctor.artefacts.case import artefacts_of
    from repro.doctor.artefacts.machine import machine_of
    from repro.doctor.examine import examine

    if not case.subject.program:
        return []  # the built-in trainer is no launch
    artefacts = list(artefacts_of(case, root))
    python = case.subject.own_python
    if python and "{" not in python:  # repro's own interpreter says little of what a launch script starts
        with contextlib.suppress(ReproError):
            artefacts.append(machine_of(python))
    return examine([], artefacts).findings
