"""The pages of docs/ as tests read them: blocks of code, the command lines in them, and pages that run.

A page that says ``<!-- runs: fast -->`` or ``<!-- runs: whole -->`` is run from its first block to its last, in an
empty folder: a block with a title is a file of that name, and of a ``console`` block ``$ command`` is typed and the
lines below it are what must be printed, as in tests/cmd (``...`` stands for any text or lines, ``? N`` for an exit
code). Numbers and commits are those of the machine that wrote the page: they count as equal.
"""

from __future__ import annotations

import re
import shlex
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import warm_kit
from conftest import SOURCE, environment
from transcript_kit import pattern, typed

PAGES = [SOURCE / "README.md", *sorted((SOURCE / "docs").rglob("*.md"))]
_FENCE = re.compile(r"^([ ]*)(```+)([^\n]*)\n(.*?)^\1\2[ ]*$", re.MULTILINE | re.DOTALL)
_RUNS = re.compile(r"^<!-- runs: (fast|whole) -->$", re.MULTILINE)
_NUMBER = re.compile(r"(?<![A-Za-z_])[0-9a-f]{7,40}\b|[-+]?\d+(?:\.\d+)?(?:e[-+]\d+)?")
_RULES = re.compile(r"#{2,}|\+{2,}|-{2,}|={2,}| {2,}")
IDENTITY = {f"GIT_{who}_{what}": "reader@example.org" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}


@dataclass(frozen=True)
class Block:
    """A block of code."""

    language: str
    title: str
    text: str


def name(page: Path) -> str:
    """A page's path in the repository."""
    return page.relative_to(SOURCE).as_posix()


def tier(page: Path) -> str:
    """In which tier a page is run; empty where it is not."""
    marked = _RUNS.search(page.read_text(encoding="utf-8"))
    return marked[1] if marked else ""


def blocks(text: str) -> list[Block]:
    """The blocks of code of a page, those inside of lists and quotes too."""
    blocks = []
    for match in _FENCE.finditer(text):
        language, _, rest = match[3].strip().partition(" ")
        title = re.search(r'title="([^"]+)"', rest)
        blocks.append(Block(language, title[1] if title else "", textwrap.dedent(match[4])))
    return blocks


def command_lines(text: str) -> Iterator[str]:
    """What the page tells its readers to type that begins with `repro`: in blocks, and inline."""
    for block in blocks(text):
        joined = re.sub(r"\\\n\s*", " ", block.text)
        for line in joined.splitlines():
            words = re.sub(r"^\s*(\$ |- run: |reproduce with: )?", "", line)
            words = re.sub(r"^([A-Z_]+=\S+ )+", "", words)
            if re.match(r"repro [a-z-]", words):
                yield from re.split(r" && (?=repro )", words)
    prose = _FENCE.sub("", text)
    yield from (" ".join(match[1].split()) for match in re.finditer(r"`(repro [a-z-][^`>]+)`", prose))


def masked(line: str) -> str:
    """A line without what differs between machines and days: numbers, commits, widths of columns and bars."""
    return _RULES.sub(" ", _NUMBER.sub("N", line)).rstrip()


def run(page: Path, folder: Path) -> list[tuple[str, str]]:
    """Do what a page says, in `folder`.

    Returns:
        Every command with what it printed.

    Raises:
        AssertionError: A command prints something else than the page shows, or exits otherwise.
    """
    environ = environment() | IDENTITY | {"COLUMNS": "120"}
    environ["PATH"] = f"{Path(sys.executable).parent}:{environ['PATH']}"
    ran = []
    for block in blocks(page.read_text(encoding="utf-8")):
        if block.title:
            (folder / block.title).parent.mkdir(parents=True, exist_ok=True)
            (folder / block.title).write_text(block.text, encoding="utf-8")
        elif block.language == "console":
            for command, expected, code in typed(block.text):
                repro = re.fullmatch(r"repro( [^|&;<>$`*?(){}]+)", command)  # nothing that a shell would read
                words = [sys.executable, "-m", "repro", *shlex.split(repro[1])] if repro else ["bash", "-c", command]
                done = warm_kit.run(words, folder, environ, 500, merged=True)
                ran.append((command, done.stdout))
                printed = "".join(f"{masked(line)}\n" for line in done.stdout.splitlines())
                while expected and not expected[-1]:
                    expected.pop()
                wanted = pattern([masked(line) for line in expected])
                assert wanted.match(printed), f"$ {command}\n{done.stdout}\nexpected:\n" + "\n".join(expected)
                assert done.returncode == code, f"$ {command}\n{done.stdout}"
    return ran
