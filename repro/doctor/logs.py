"""Readers of logs, each searched in one pass for what all rules look for."""

from __future__ import annotations

from pathlib import Path

from repro.doctor.artefacts.kinds import Log
from repro.doctor.artefacts.logs.files import log_reader, read_log, session_reader
from repro.doctor.catalogue import catalogue

__all__ = ["LOG", "RAY_SESSION", "explained", "phrases", "read"]


def phrases() -> tuple[str, ...]:
    """What all rules that read logs look for."""
    rules = [rule for rule in catalogue().values() if Log in (*rule.inputs, *rule.uses)]
    return tuple(dict.fromkeys(phrase for rule in rules for phrase in rule.phrases))


def explained() -> tuple[str, ...]:
    """What rules of severity error look for, and say more about than a traceback does."""
    rules = [rule for rule in catalogue().values() if rule.severity == "error" and Log in rule.inputs]
    return tuple(dict.fromkeys(phrase for rule in rules for phrase in rule.phrases))


def read(path: Path) -> Log:
    """A log file, searched for all of it.

    Raises:
        ReproError: it can not be read, or its gzip is corrupt.
    """
    return read_log(path, phrases(), explained())


LOG, RAY_SESSION = log_reader(read), session_reader(read)
