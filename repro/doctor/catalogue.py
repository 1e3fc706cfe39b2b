"""All rules of the doctor: every module below `rules/` that has a `RULE`, or several `RULES`."""

from __future__ import annotations

import functools
import importlib
import pkgutil
from collections.abc import Mapping

from repro.doctor import rules
from repro.doctor.rule import Rule

__all__ = ["SUBJECTS", "catalogue", "subject_of"]

SUBJECTS = ("step1", "flags", "environment", "checkpoints", "dumps", "data", "logs", "goldens")
"""The folders of rules, in the order in which they are tried and listed."""


@functools.cache
def catalogue() -> Mapping[str, Rule]:
    """Rules by id, in the order of `SUBJECTS` and then of their files' names."""
    found: dict[str, Rule] = {}
    for subject in SUBJECTS:
        package = importlib.import_module(f"{rules.__name__}.{subject}")
        for name in sorted(module.name for module in pkgutil.iter_modules(package.__path__)):
            module = importlib.import_module(f"{package.__name__}.{name}")
            for rule in getattr(module, "RULES", None) or (module.RULE,):
                assert rule.id not in found, f"two rules are called {rule.id}"
                found[rule.id] = rule
                _SUBJECT[rule.id] = subject
    return found


_SUBJECT: dict[str, str] = {}


def subject_of(rule: Rule) -> str:
    """The folder that a rule lies in; `reading` for what is found before any rule is tried."""
    catalogue()
    return _SUBJECT.get(rule.id, "reading")
