"""Each rule of the doctor, on files that have its fault and on files that have not: `fixtures/doctor`."""

from __future__ import annotations

from pathlib import Path

import pytest
from doctor_dump_kit import found
from findings_kit import as_read, patients
from syrupy.assertion import SnapshotAssertion


def _named(folder: Path) -> str:
    return f"{folder.parent.name}-{folder.name}"


@pytest.mark.parametrize("folder", patients("faulty"), ids=_named)
def test_a_rule_finds_its_fault(folder: Path, monkeypatch: pytest.MonkeyPatch, snapshot: SnapshotAssertion) -> None:
    """In files as a user names them, with the place, the evidence, the reason and the cure."""
    monkeypatch.chdir(folder)
    rule = folder.parent.name
    assert as_read(rule, found(rule, *sorted(Path().iterdir())), folder) == snapshot


@pytest.mark.parametrize("folder", patients("sound"), ids=_named)
def test_a_rule_is_silent_without_its_fault(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the same files made right it is tried, and finds nothing."""
    monkeypatch.chdir(folder)
    assert not found(folder.parent.name, *sorted(Path().iterdir()))
