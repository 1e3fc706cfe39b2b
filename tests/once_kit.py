"""What is dear to make, made once for all processes of a test run."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

__all__ = ["once"]


def once(tmp_path_factory: pytest.TempPathFactory, name: str, make: Callable[[Path], None]) -> Path:
    """A folder made by the first process that asks, shared by all of them."""
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if os.environ.get("PYTEST_XDIST_WORKER") else base
    with (shared / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (shared / name / "done").exists():
            shutil.rmtree(shared / name, ignore_errors=True)
            (shared / name).mkdir()
            make(shared / name)
            (shared / name / "done").touch()
    return shared / name
