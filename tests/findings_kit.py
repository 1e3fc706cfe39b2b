"""The patients of the doctor's rules, and what rules say as people read it (`pytest --snapshot-update` writes that)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from repro.doctor.catalogue import catalogue
from repro.doctor.examine import FAULT, UNREADABLE, examine, found_by
from repro_golden.base.checks import Finding, Found

__all__ = ["PATIENTS", "as_read", "patients", "told", "tried"]

PATIENTS = Path(__file__).parent / "fixtures" / "doctor"
"""By rule: folders `faulty*`, in which it must find something, and `sound*`, in which it must find nothing."""


def patients(kind: str) -> list[Path]:
    """The folders of one kind, of every rule that has some."""
    return sorted(PATIENTS.glob(f"*/{kind}*"))


def tried(*artefacts: object) -> Sequence[Finding]:
    """What all rules find in artefacts; none may fail."""
    findings = examine((), artefacts).findings
    assert not {FAULT.id, UNREADABLE.id} & {finding.rule for finding in findings}, findings
    return findings


def told(name: str, *artefacts: object) -> list[Finding]:
    """What a rule finds, by its id; what it could use beside and was not given is None."""
    rule = catalogue()[name]
    given = [*artefacts, *[None] * (len(rule.inputs) + len(rule.uses) - len(artefacts))]
    return [Finding.of(rule, finding) for finding in found_by(rule, given)]


def as_read(rule: str, outcomes: Iterable[Finding | Found], folder: Path) -> str:
    """Each finding as text, whole; there must be one.

    Args:
        rule: Its id.
        outcomes: What it said.
        folder: What lies here differs from run to run; it is called ``<here>``.
    """
    findings = [
        outcome if isinstance(outcome, Finding) else Finding.of(catalogue()[rule], outcome) for outcome in outcomes
    ]
    assert findings, f"{rule} finds nothing"
    assert {hit.rule for hit in findings} == {rule}
    assert all(
        "\n" not in finding.message and finding.fix and finding.why and str(finding.where) for finding in findings
    )
    return "\n\n".join(map(_text, findings)).replace(str(folder), "<here>")


def _text(finding: Finding) -> str:
    sample = "" if finding.where.sample is None else f" (sample {finding.where.sample})"
    return (
        f"{finding.rule}: {finding.severity}, {finding.certainty}: {finding.where}{sample}\n{finding.message}\n"
        f"Why: {finding.why}\nCure: {finding.fix}"
    )
