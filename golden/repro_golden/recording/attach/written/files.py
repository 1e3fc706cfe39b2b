"""The files that a process writes: the content of those of torch and safetensors by step, the names of the others."""

from __future__ import annotations

import contextlib
import functools
import os
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import PurePath
from typing import Any

from repro_golden.recording.attach.written.saving import MADE_UP, Written, below, content

__all__ = ["Files"]


class _Content:
    """What a file holds, which is read at once and asked for later."""

    def __init__(self, tensors: Mapping[str, Any]) -> None:
        from repro_golden.trace.signals import Signals

        self._signals: Any = Signals()
        if tensors:
            self._signals.take("update", "", tensors)

    @functools.cached_property
    def rows(self) -> list[Any]:
        """Its rows, with the names that they have in the file."""
        rows: list[Any] = self._signals.rows()
        del self._signals
        return rows


class Files:
    """Of what is written to a file in one step, the last content counts, under the name that the file has in the end.

    Args:
        out: The recorder's own folder.
        note: Keeps what is not read, by name, at once and in place of what it was told before.
        ignored: Whether a file of a name is none to look at.
    """

    def __init__(
        self,
        out: str,
        note: Callable[[Mapping[str, str]], None],
        ignored: Callable[[str], bool] = lambda _: False,
    ) -> None:
        self._keep, self._ignored = note, ignored
        self._trained = False
        self.forget()
        self._others = Written(out, self._moved, self._copied)

    def forget(self, *, trained: bool = False) -> None:
        """Begin anew, in the child of a fork.

        Args:
            trained: Whether its parent has made steps. What its parent's threads were at does not go on in it, so it
                reads no tensors.
        """
        self._trained = trained or self._trained
        self._written: dict[str, _Content] = {}  # by path, in the order of their first writing
        self._known: dict[str, _Content] = {}  # the same of all steps, those last written at the end
        self._unread: dict[str, str] = {}  # by their names in the trace
        self._noted: dict[str, str] = {}  # the same by path, of a process that has made no step

    @property
    def unread(self) -> dict[str, str]:
        """What was seen and not read, and why."""
        return self._unread | {f"file {name}": "it is not torch's" for name in self._others.names}

    def take(self, path: str, value: Any, *, recording: bool, own: bool) -> None:
        """The program has written a file by torch or safetensors.

        Args:
            path: Where; '' where that is no file.
            value: What.
            recording: Whether this process has made a step.
            own: Whether the thread that wrote it is the one that trains.
        """
        name = _name(path) if path else ""
        if name and self._ignored(f"saved/{name}"):
            self._others.paths.discard(path)
            return
        if not recording and path:
            self._note({**self._noted, path: "another process wrote it"})
            if self._trained:
                return
        if not name or not own:
            self._unread[f"saved/{name or 'memory'}"] = "it was written by another thread" if name else "no file"
            return
        self._others.paths.discard(path)
        tensors, left_out = content(value)
        if left_out:
            self._unread[f"saved/{name}"] = left_out
        self._put(path, _Content(tensors))  # in place of what the step wrote there before

    def begin(self) -> None:
        """This process makes its first step, which what it wrote before is part of."""
        if self._noted and not self._trained:
            self._note({})

    def rows(self) -> list[Any]:
        """What was written in the step; the k-th one more of a name, in another folder, is ``name.k``."""
        written, self._written = self._written, {}
        names: Counter[str] = Counter()
        rows = []
        for path, held in written.items():
            name = _name(path)
            again = f".{names[name]}" if names[name] else ""
            names[name] += 1
            rows += [replace(row, name=f"saved/{name}{again}/{row.name}") for row in held.rows]
        return rows

    def _put(self, path: str, held: _Content) -> None:
        """What a path holds now; a path that has it for long is forgotten in time."""
        self._written[path] = held
        self._known.pop(path, None)
        self._known[path] = held
        if len(self._known) > _KNOWN:
            self._known.pop(next(iter(self._known)))

    def _moved(self, before: str, after: str) -> None:
        """The program renames a file or folder; notes follow it."""

        def now(path: str) -> str:
            return after + path[len(before) :] if below(path, before) else path

        for path in [path for path in tuple(self._known) if below(path, before)]:
            self._written.pop(path, None)
            self._put(now(path), self._known.pop(path))
            if why := self._unread.pop(f"saved/{_name(path)}", ""):
                self._unread[f"saved/{_name(now(path))}"] = why
        moved = {now(path): why for path, why in self._noted.items()}
        if moved != self._noted:
            self._note(moved)

    def _copied(self, before: str, after: str) -> None:
        """The program copies or links a file or a folder of files that it has written: they are there twice."""
        for path in [path for path in tuple(self._known) if below(path, before)]:
            self._put(after + path[len(before) :], self._known[path])
            self._others.paths.discard(after)

    def _note(self, noted: dict[str, str]) -> None:
        """Say at once what is written by a process that may never make a step, and may end without a word."""
        self._noted = noted
        self._keep({f"saved/{_name(path)}": why for path, why in noted.items()})


_KNOWN = 200
"""Files whose content is remembered, in case that they are renamed, copied or linked."""


def _name(path: str) -> str:
    """A file's name in the trace: ``last.pt``, or ``best:last.pt`` in a folder, unless that is called by a time."""
    folder, name = PurePath(path).parent, PurePath(path).name
    here = ""
    with contextlib.suppress(OSError):  # it was removed
        here = os.getcwd()  # noqa: PTH109 - as text
    plain = str(folder) == here or not folder.name or MADE_UP.search(folder.name)
    return (name if plain else f"{folder.name}:{name}").encode("utf-8", "replace").decode("utf-8")
