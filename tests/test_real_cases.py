"""The cases of real regressions: each says what is searched, where that is said, and by which driver."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
from conftest import SOURCE

HERE = SOURCE / "benchmarks" / "real"
CASES = sorted((HERE / "cases").glob("*.toml"))
KINDS = ("regression", "fix", "silent change", "revert", "release")


@pytest.fixture(scope="module")
def real() -> ModuleType:
    """The script."""
    spec = importlib.util.spec_from_file_location("real", HERE / "real.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("path", CASES, ids=lambda path: path.stem)
def test_a_case_says_what_it_is(path: Path, real: ModuleType) -> None:
    """Two ends, the culprit, a page of upstream's that names it, and a driver that parses."""
    case = real.read(path)
    assert {"good", "bad", "culprit", "kind", "what", "says", "driver"} <= case.keys()
    assert ("repository" in case) != ("package" in case)
    assert case["kind"].startswith(KINDS)
    assert case["says"].startswith("https://")
    tree = ast.parse((HERE / "drivers" / case["driver"]).read_text())
    assert ast.get_docstring(tree)


def test_a_driver_starts_in_the_environment_that_is_named(real: ModuleType, tmp_path: Path) -> None:
    """By its interpreter, or by its launcher where it has one."""
    python = str(tmp_path / "python")
    assert real.launcher({}, python) == [python]
    case = {"launch": ["torchrun", "--nproc-per-node", "2"]}
    assert real.launcher(case, python) == ["torchrun", "--nproc-per-node", "2"]
    (tmp_path / "torchrun").touch()
    assert real.launcher(case, python) == [str(tmp_path / "torchrun"), "--nproc-per-node", "2"]


def test_a_page_holds_what_was_measured(real: ModuleType) -> None:
    """Right, wrong and failed alike; a release has no rival in git."""
    cases = {path.stem: real.read(path) for path in CASES[:3]}
    about = {"date": "2026-11-25", "commit": "abc", "machine": "a machine", "torch": "2"}
    ours = {"outcome": "found", "culprit": "f" * 40, "right": True, "first": [0, "loss", "loss"], "processes": 9,
            "steps": 20, "seconds": 30.0, "commits": 5, "text": "a | b", "line": "a.py:1"}  # fmt: skip
    git = {"outcome": "found", "culprit": "e" * 40, "right": False, "processes": 4, "steps": 8, "seconds": 10.0}
    measured = [{"ours": ours, "git": git}, {"ours": ours}, {"ours": {"outcome": "error", "error": "it broke"}}]
    kept = {name: {"about": about, **found} for name, found in zip(cases, measured, strict=True)}
    page = real.page(cases, kept)
    assert "named the right commit in 2" in page and "right in 0 of 1" in page
    assert "ffffffffff (right)" in page and "eeeeeeeeee (wrong): 4, 8, 10" in page and "error: it broke" in page
    assert "a \\| b" in page and "| processes | 9 | 4 |" in page
