"""The extras of the distribution: which modules each brings, and the one line that is said where they are missing."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Mapping
from importlib.machinery import ModuleSpec

from repro_golden.base.errors import ReproError

__all__ = ["EXTRAS", "MissingExtraError", "lacking", "of_import", "require"]

EXTRAS: Mapping[str, tuple[str, ...]] = {
    "report": ("altair", "jinja2", "requests", "vl_convert"),
    "golden": ("dvc",),
    "trainer": ("torch",),
    "doctor": ("ahocorasick_rs", "jinja2", "tree_sitter", "tree_sitter_bash"),
    "fast": ("llvmlite", "numba"),
    "ray": ("ray",),
    "tensorboard": ("tensorboard",),
}
"""Modules that repro's own processes import, by extra. Those of a trainer (megatron, sglang, gpu) are named by it."""


class MissingExtraError(ReproError):
    """What was asked for needs an extra that is not installed; the line says which, and how pip brings it."""


def lacking(*extras: str) -> list[str]:
    """The modules of these extras that are not installed. Nothing is imported."""
    names = dict.fromkeys(name for extra in extras for name in EXTRAS[extra])
    return [name for name in names if not _installed(name)]


def require(what: str, *extras: str) -> None:
    """Go on only where everything of these extras is installed.

    Args:
        what: What needs them, as the beginning of a sentence.
        extras: Keys of `EXTRAS`.

    Raises:
        MissingExtraError: something is missing.
    """
    needed = [extra for extra in extras if lacking(extra)]
    if needed:
        raise MissingExtraError(_line(what, lacking(*needed), needed))


def of_import(error: ImportError, what: str = "this") -> MissingExtraError | None:
    """The line to say for a module that could not be imported; None for one that no extra brings."""
    name = (error.name or "").partition(".")[0]
    for extra, modules in EXTRAS.items():
        if name in modules and not _installed(name):
            return MissingExtraError(_line(what, lacking(extra), [extra]))
    return None


def _line(what: str, modules: list[str], extras: list[str]) -> str:
    missing = f"{', '.join(modules)} (not installed for {sys.executable})"
    return f"{what} needs {missing}: pip install 'repro-harness[{','.join(extras)}]'"


def _installed(name: str) -> bool:
    """Whether a module would be found; a mere folder of that name where we were started is none."""
    try:
        spec: ModuleSpec | None = importlib.util.find_spec(name)
    except ValueError:  # it was put into sys.modules by hand
        return True
    return spec is not None and spec.origin is not None
