"""pytest's plugin: the fixture `golden`, by its other name `repro_golden`, and ``--golden-record``.

    def test_numerics(golden):
        golden.verify("tiny")

A verification is a `repro` process of its own: pytest's imports nothing of it, and its variables and signals stay as
they are. Every pytest of an environment with repro loads this module, so it imports nothing else.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

__all__ = ["Golden", "golden", "pytest_addoption", "repro_golden"]

_AGREES, _DIFFERS, _NOT_VERIFIABLE = 0, 1, 3
_BUSY, _KNOWN, _RECORD = "is being recorded by", "already has a golden run", "`repro golden record"
"""What a recording says that another process makes, or that was made before; and the cure where there is none."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--golden-record``."""
    parser.getgroup("repro", "golden runs").addoption(
        "--golden-record", action="store_true", help="Record golden runs that tests verify and this machine has not."
    )


class Golden:
    """The golden runs of the repository that a test lies in.

    Nothing replaces a golden run: that is for ``repro golden approve``, which asks why.
    """

    def __init__(self, folder: Path, *, record: bool) -> None:
        self._folder, self._record = folder, record

    def verify(self, case: str) -> None:
        """Replay a case on the working tree and compare it with its golden run, signal by signal.

        The test fails where they differ or a run failed, with what the command says. It is skipped where nothing can be
        compared: the golden run is of another machine, or there is none; ``--golden-record`` records it first.

        Args:
            case: Its name.
        """
        __tracebackhide__ = True
        if case.startswith("-"):
            pytest.fail(f"{case!r} is no case's name", pytrace=False)
        code, output = self._repro("golden", "verify", case)
        if code == _NOT_VERIFIABLE and self._record:
            done, record_output = self._repro("golden", "record", case)
            while done and _BUSY in record_output:  # by another worker's test
                time.sleep(1)
                done, record_output = self._repro("golden", "record", case)
            if _KNOWN not in record_output:
                code, output = done, record_output
            if code == _AGREES or (_KNOWN in record_output and _RECORD in output):
                code, output = self._repro("golden", "verify", case)
        if code == _NOT_VERIFIABLE:
            pytest.skip(f"not verifiable here: {output}")
        if code != _AGREES:
            fix = f"\nmeant so? repro golden approve {case} --reason ..." if code == _DIFFERS else ""
            pytest.fail(f"{output}{fix}", pytrace=False)

    def _repro(self, *argv: str) -> tuple[int, str]:
        """One command's exit code, and what it says: its answer, or why there is none."""
        with _started([sys.executable, "-P", "-m", "repro", *argv], self._folder) as process:
            answer, lines = process.communicate()
        return process.returncode, (answer.strip() or lines.strip().rpartition("\n")[2]).removeprefix("repro: ")


@contextmanager
def _started(command: Sequence[str], folder: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that ends, with all that it started, before a test that is interrupted does."""
    process = subprocess.Popen(
        command, cwd=folder, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()  # at which it ends its children
            process.communicate()


@pytest.fixture
def repro_golden(request: pytest.FixtureRequest) -> Golden:
    """Golden runs of this repository, also where `golden` is another plugin's: ``repro_golden.verify("tiny")``."""
    return Golden(request.path.parent, record=request.config.getoption("golden_record"))


@pytest.fixture
def golden(request: pytest.FixtureRequest, repro_golden: Golden) -> Any:
    """Golden runs of this repository: ``golden.verify("tiny")``; or what another plugin gives under this name."""
    try:
        return request.getfixturevalue("golden")  # that which this one overrides, by the order of loading alone
    except pytest.FixtureLookupError as missing:
        if missing.argname != "golden":  # of the other plugin's own
            raise
        return repro_golden
