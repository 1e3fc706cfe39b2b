"""All rules of the doctor: every one in a module below `rules/`, each file a family of rules that belong together."""

from __future__ import annotations

import functools
import importlib
import pkgutil
from collections.abc import Mapping

from repro.doctor import rules
from repro_golden.base.checks import Rule

__all__ = ["SUBJECTS", "catalogue", "subject_of"]

SUBJECTS = ("step1", "flags", "environment", "checkpoints", "dumps", "data", "logs", "goldens")
"""The modules and folders of rules, in the order in which they are tried and listed."""


@functools.cache
def catalogue() -> Mapping[str, Rule]:
    """Rules by id, in the order of `SUBJECTS` and then of the alphabet."""
    by_id: dict[str, Rule] = {}
    for subject in SUBJECTS:
        package = importlib.import_module(f"{rules.__name__}.{subject}")
        files = pkgutil.iter_modules(getattr(package, "__path__", ()))
        modules = [package, *(importlib.import_module(f"{package.__name__}.{file.name}") for file in files)]
        every = [value for module in modules for value in vars(module).values() if isinstance(value, Rule)]
        every += [rule for module in modules for rule in getattr(module, "RULES", ())]
        for rule in sorted(every, key=lambda rule: rule.id):
            assert rule.id not in by_id, f"two rules are called {rule.id}"
            by_id[rule.id] = rule
            _SUBJECT[rule.id] = subject
    return by_id


_SUBJECT: dict[str, str] = {}


def subject_of(rule: Rule) -> str:
    """The subject that a rule is of; `reading` for what is found before any rule is tried."""
    catalogue()
    return _SUBJECT.get(rule.id, "reading")
