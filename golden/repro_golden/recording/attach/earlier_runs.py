"""When runs were under way, and of which code: a file that was changed meanwhile may hold what that code made.

Each run of a command is noted beside what else is kept of its repository. Processes of later runs tell what they read
of such files (`earlier`).
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from repro_golden.base.errors import ReproError
from repro_golden.case.file import Case
from repro_golden.recording.attach.earlier import MET, SPANS
from repro_golden.repository.checkout import Place, find_checkout

__all__ = ["Code", "among_others", "noted", "prepare", "read_in"]

_LOG = "runs.jsonl"
_MOST = 1 << 16
"""Bytes of the log's end that are kept: some 500 runs."""


@dataclass(frozen=True)
class Code:
    """What runs.

    Attributes:
        key: Stands for its code and for its case.
        name: What people call it.
    """

    key: str
    name: str


@contextlib.contextmanager
def among_others(raw: Path, place: Place, case: Case) -> Iterator[None]:
    """Note that a program runs in the block, whose processes are told when other code ran (`prepare`, `noted`).

    Args:
        raw: Folder of their raw records.
        place: Where its code lies; without a checkout nothing is noted.
        case: Its case.
    """
    with contextlib.ExitStack() as exits:
        with contextlib.suppress(ReproError):
            state = find_checkout(place.root).state
            # with changes of its own a working tree is what it is while this process lives
            code = place.tree or place.commit or f"changed {os.getpid()}"
            name = place.commit[:10] if place.commit else "a working tree with changes"
            known = Code(f"{code} {case.digest}", name)
            prepare(raw, state, known)
            exits.enter_context(noted(state, known))
        yield


@contextlib.contextmanager
def noted(state: Path, code: Code) -> Iterator[None]:
    """Note that code runs in the block, whatever becomes of it.

    Args:
        state: Folder of what is kept of a repository.
        code: The code.
    """
    began = time.time()
    try:
        yield
    finally:
        with contextlib.suppress(OSError):  # a full disk is told of by what failed for it
            _append(state / _LOG, json.dumps([began, time.time(), code.key, code.name]))


def _append(log: Path, line: str) -> None:
    with log.open("a", encoding="utf-8") as file:
        file.write(f"{line}\n")
    if log.stat().st_size > 2 * _MOST:
        part = log.with_suffix(f".{os.getpid()}")
        part.write_text(log.read_text(encoding="utf-8")[-_MOST:].partition("\n")[2], encoding="utf-8")
        part.replace(log)


def prepare(raw: Path, state: Path, code: Code) -> None:
    """Tell the processes of a program when other code ran.

    Args:
        raw: Folder of their raw records.
        state: Folder of what is kept of the repository.
        code: The program's.
    """
    if not (state / _LOG).exists():
        return
    others = list[tuple[float, float, str]]()
    for line in (state / _LOG).read_text(encoding="utf-8").splitlines():
        with contextlib.suppress(ValueError):  # cut short
            began, ended, key, name = json.loads(line)
            if key != code.key:
                others.append((began, ended, f"{name} with other settings" if name == code.name else name))
    if others:
        (raw / SPANS).write_text(json.dumps(others), encoding="utf-8")


def read_in(raw: Path) -> dict[str, str]:
    """The files that a program read and that were last changed while other code ran, with whose that was."""
    files = dict[str, str]()
    for path in sorted(raw.glob(MET)):
        for line in path.read_text(encoding="utf-8").splitlines():
            with contextlib.suppress(ValueError):  # cut short
                files.update(json.loads(line))
    return dict(sorted(files.items()))
