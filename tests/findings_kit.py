"""What a rule says, as people read it, for a snapshot; `pytest --snapshot-update` writes what is meant to change."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from repro.doctor.catalogue import catalogue
from repro_golden.base.checks import Finding, Found

__all__ = ["as_read"]


def as_read(rule: str, found: Iterable[Finding | Found], folder: Path) -> str:
    """Each finding's severity, certainty, evidence, message and cure, as text; there must be one.

    Args:
        rule: Its id.
        found: What it said.
        folder: What lies here differs from run to run; it is called ``<here>``.
    """
    findings = [one if isinstance(one, Finding) else Finding.of(catalogue()[rule], one) for one in found]
    assert findings, f"{rule} finds nothing"
    assert {one.rule for one in findings} == {rule}
    assert all("\n" not in one.message and one.cure and one.why and str(one.where) for one in findings)
    text = "\n\n".join(f"{f.severity}, {f.certainty}: {f.where}\n{f.message}\nCure: {f.cure}" for f in findings)
    return text.replace(str(folder), "<here>")
