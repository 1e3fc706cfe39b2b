"""Which lines of some files a program runs: those that a change touched, and that may ask torch for nothing.

A schedule, a shuffled order, the choice of an optimizer: what such lines decide is computed with elsewhere, and no
stack of an operation holds them.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from repro_golden.base.machine.audit import hear

__all__ = ["LinesRun", "files_in"]

_STALE = 100_000
"""Lines that a function runs again, after which it is left alone: what is new there later is missed."""


def files_in(path: str) -> list[str]:
    """The files that a JSON file lists."""
    files: list[str] = json.loads(Path(path).read_text(encoding="utf-8"))
    return files


class LinesRun:
    """Notes each line of the files once, in the order in which they first run, until `end`.

    Of frames that are under way when it begins it sees what is still to run. Other tracers, a debugger's or a coverage
    tool's, keep their place: then nothing is noted.

    Args:
        root: The checkout.
        files: Paths in it.
    """

    def __init__(self, root: str, files: Iterable[str]) -> None:
        self._files = {f"{root.rstrip('/')}/{file}": file for file in files}
        self._ran: dict[str, dict[int, None]] = {}
        self._known: dict[str, str] = {}
        self._again: Counter[CodeType] = Counter()
        self._on = bool(self._files) and not _traced()
        self._begun = False
        if not self._on:
            return
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            if self._file(frame.f_code.co_filename):
                frame.f_trace = self._line
                self._begin()
            frame = frame.f_back
        if self._imported():
            self._begin()
        if not self._begun:  # tracing makes imports of other packages half as long again, so it waits for the files
            hear({"exec": self._executes})

    def _executes(self, code: Any) -> None:
        if self._on and not self._begun and isinstance(code, CodeType) and self._file(code.co_filename):
            self._begin()

    def _begin(self) -> None:
        if self._begun or _traced():
            self._on = self._begun  # another tracer came first
            return
        self._begun = True
        threading.settrace(self._call)
        sys.settrace(self._call)

    def _imported(self) -> list[str]:
        paths = [getattr(module, "__file__", None) for module in list(sys.modules.values())]
        return [file for path in paths if isinstance(path, str) and (file := self._file(path))]

    def end(self) -> dict[str, list[int]] | None:
        """Lines by file, of files that were imported or run; None where nothing was noted.

        A file of which no line ran since it began has none.
        """
        if not self._on:
            return None
        self._on = False
        if sys.gettrace() == self._call:
            sys.settrace(None)
        if threading.gettrace() == self._call:
            threading.settrace(None)
        return {file: list(self._ran.get(file, ())) for file in dict.fromkeys([*self._ran, *self._imported()])}

    def _file(self, name: str) -> str:
        known = self._known.get(name)
        if known is None:
            known = self._known[name] = self._files.get(os.path.abspath(name), "")  # noqa: PTH100 - a script may have moved
        return known

    def _call(self, frame: FrameType, event: str, argument: Any) -> Any:
        del event, argument
        code = frame.f_code
        return self._line if self._file(code.co_filename) and self._again[code] < _STALE else None

    def _line(self, frame: FrameType, event: str, argument: Any) -> Any:
        del argument
        if event == "line":
            code, line = frame.f_code, frame.f_lineno
            lines = self._ran.setdefault(self._file(code.co_filename), {})
            if line in lines:
                self._again[code] += 1
                frame.f_trace_lines = self._again[code] < _STALE
            lines[line] = None
        return self._line if self._on else None


def _traced() -> bool:
    return sys.gettrace() is not None or threading.gettrace() is not None
