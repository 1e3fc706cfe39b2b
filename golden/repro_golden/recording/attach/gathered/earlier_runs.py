"""When runs were under way, and of which code: a file that was changed meanwhile may hold what that code made.

Each run of a command is noted beside what else is kept of its repository, as it begins and as it ends, with the files
that it touched. Its processes tell what they read and write (`earlier`); whose that may be is judged when it has ended.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from repro_golden.base.errors import ReproError
from repro_golden.case.file import Case
from repro_golden.recording.attach.code.earlier import FILES, OTHERS
from repro_golden.repository.checkout import Place, find_checkout

__all__ = ["Code", "among_others", "noted", "read_in"]

_LOG = "runs.jsonl"
_MOST = 1 << 19
"""Bytes of the log's end that are kept: hundreds of runs, tens of those that touch very many files."""
_LONGEST = 3600
"""Seconds for which a run counts of which no end is noted: it goes on, or was killed."""
_FILES = 200
"""Files that a run has touched and that are noted."""
_READ = "read"
"""In the folder of raw records, once the program has ended: the files that other code may have written, as JSON."""


@dataclass(frozen=True)
class Code:
    """What runs.

    Attributes:
        key: Stands for its code and for its case.
        name: What people call it.
    """

    key: str
    name: str


@dataclass(frozen=True)
class _Run:
    """A run as the log has it.

    Attributes:
        name: Its own.
        key: That of its code.
        code: What people call that.
        began: Seconds since the epoch.
        ended: Likewise; None as long as it has not.
        files: What it touched after it had begun, with the time of the last change.
    """

    name: str
    key: str
    code: str
    began: float
    ended: float | None = None
    files: dict[str, float] = field(default_factory=dict)

    def changed(self, file: str, moment: float, began: float) -> bool:
        """Whether it may have been what changed a file that a run read which began at a moment."""
        ended = min(began, self.began + _LONGEST) if self.ended is None else self.ended
        if not self.began <= moment <= ended:
            return False
        return moment < began or self.files.get(file) == moment  # else the other run may have changed it itself


@contextlib.contextmanager
def among_others(raw: Path, place: Place, case: Case) -> Iterator[None]:
    """Note that a program runs in the block, and which files it reads that other code may have written (`read_in`).

    Args:
        raw: Folder of its processes' raw records.
        place: Where its code lies; without a checkout nothing is noted.
        case: Its case.
    """
    with contextlib.ExitStack() as exits:
        with contextlib.suppress(ReproError):
            state = find_checkout(place.root).state
            # with changes of its own a working tree is what it is while this process lives
            code = place.tree or place.commit or f"changed {os.getpid()}"
            name = place.commit[:10] if place.commit else "a working tree with changes"
            exits.enter_context(noted(raw, state, Code(f"{code} {case.digest}", name)))
        yield


@contextlib.contextmanager
def noted(raw: Path, state: Path, code: Code) -> Iterator[None]:
    """The same, for code of a repository; what cannot be noted is not.

    Args:
        raw: Folder of its processes' raw records.
        state: Folder of what is kept of the repository.
        code: The program's.
    """
    log, run = state / _LOG, _Run(uuid.uuid4().hex[:12], code.key, code.name, time.time())
    others = [other for other in _runs(log) if other.key != code.key]
    under_way = [other.began for other in others if other.ended is None and other.began > run.began - _LONGEST]
    times = {"began": run.began, "open": min([run.began, *under_way])}
    with contextlib.suppress(OSError):  # a full disk is told of by what fails for it
        spans = [(other.began, other.ended) for other in others if other.ended is not None]
        (raw / OTHERS).write_text(json.dumps(times | {"spans": spans}), encoding="utf-8")
        _append(log, run)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            read, files = _touched(raw, run.began)
            _append(log, _Run(run.name, run.key, run.code, run.began, time.time(), files))
            others = [other for other in _runs(log) if other.key != code.key]
            whose = {
                file: dict.fromkeys(other.code for other in others if other.changed(file, moment, run.began))
                for file, moment in read.items()
            }
            names = {
                file: " and ".join(_called(name, code) for name in names) for file, names in whose.items() if names
            }
            (raw / _READ).write_text(json.dumps(names), encoding="utf-8")


def read_in(raw: Path) -> dict[str, str]:
    """The files that a program read and that were last changed while other code ran, with whose that was."""
    with contextlib.suppress(OSError, ValueError):  # the disk was full
        names: dict[str, str] = json.loads((raw / _READ).read_text(encoding="utf-8"))
        return {file.encode(errors="backslashreplace").decode(): names[file] for file in sorted(names)}
    return {}


def _called(name: str, code: Code) -> str:
    return f"{name} with other settings" if name == code.name else name


def _touched(raw: Path, began: float) -> tuple[dict[str, float], dict[str, float]]:
    """What processes told: the files that were read, and all that was touched since a run began, with their times."""
    read, files = dict[str, float](), dict[str, float]()
    for line in (line for path in sorted(raw.glob(FILES)) for line in _lines(path)):
        if not (isinstance(line, list) and len(line) == 2 and isinstance(line[0], str)):
            continue
        file, moment = line
        if isinstance(moment, float):
            read[file] = min(moment, read.get(file, moment))  # another process may have read what this run then wrote
        else:  # when it was written is known now
            with contextlib.suppress(OSError):
                moment = Path(file).stat().st_ctime
        if isinstance(moment, float) and moment >= began and len(files) < _FILES:
            files[file] = moment
    return read, files


def _runs(log: Path) -> list[_Run]:
    """The runs of a log, each once; a damaged line is none."""
    runs = dict[str, _Run]()
    for line in _lines(log):
        if isinstance(line, dict) and line.keys() == _Run.__dataclass_fields__.keys():
            run = _Run(**line)
            texts = isinstance(run.name, str) and isinstance(run.key, str) and isinstance(run.code, str)
            times = isinstance(run.began, float) and isinstance(run.ended, (float, type(None)))
            if texts and times and isinstance(run.files, dict):
                runs[run.name] = run
    return list(runs.values())


def _lines(path: Path) -> Iterator[Any]:
    """The values of a file of JSON lines, without those that are cut short."""
    with contextlib.suppress(OSError):
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            with contextlib.suppress(ValueError):
                yield json.loads(line)


def _append(log: Path, run: _Run) -> None:
    line = json.dumps(vars(run))
    with log.open("a", encoding="utf-8") as file:
        file.write(f"{line}\n")
    if log.stat().st_size > 2 * _MOST:
        part = log.with_suffix(f".{os.getpid()}-{run.name}")
        rest = log.read_text(encoding="utf-8", errors="replace")[-_MOST:].partition("\n")[2] or f"{line}\n"
        part.write_text(rest, encoding="utf-8")
        part.replace(log)
