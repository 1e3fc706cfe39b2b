"""Command-line transcripts: what a user types and sees, kept as files in tests/cmd.

A file's first line names the fixture it runs in; `transcript_kit` says what its other lines mean.
"""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import Repo, environment
from transcript_kit import pattern, typed

TRANSCRIPTS = sorted((Path(__file__).parent / "cmd").glob("*.txt"))


@pytest.mark.whole
@pytest.mark.parametrize("path", TRANSCRIPTS, ids=lambda p: p.stem)
def test_transcript(path: Path, request: pytest.FixtureRequest) -> None:
    """The commands print what the transcript shows and exit as it says."""
    fixture, _, text = path.read_text().partition("\n")
    repo: Repo = request.getfixturevalue(fixture.removeprefix("fixture: "))
    for command, expected, code in typed(text):
        words = shlex.split(command)
        program = [sys.executable, "-m", "repro"] if words[0] == "repro" else [words[0]]
        done = subprocess.run(
            [*program, *words[1:]], cwd=repo.root, env=environment() | {"COLUMNS": "100"}, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False,
        )  # fmt: skip
        while expected and not expected[-1]:
            expected.pop()
        assert pattern(expected).match(done.stdout), f"$ {command}\n{done.stdout}\nexpected:\n" + "\n".join(expected)
        assert done.returncode == code, done.stdout


def test_there_are_transcripts() -> None:
    """The folder is read at all."""
    assert len(TRANSCRIPTS) >= 2
