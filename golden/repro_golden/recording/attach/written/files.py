"""The files that a process writes: the content of those of torch and safetensors by step, the names of the others."""

from __future__ import annotations

import contextlib
import functools
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import PurePath
from typing import Any

from repro_golden.recording.attach.base.by_identity import ByIdentity, id_of
from repro_golden.recording.attach.written.places import Bytes, Place, bytes_in
from repro_golden.recording.attach.written.saving import MADE_UP, Written, below, content

__all__ = ["Files"]


class _Content:
    """What was saved, which is read at once and asked for later.

    Attributes:
        left_out: What of it is not looked at, in words.
        is_empty: Whether nothing of it is looked at.
        thread: Who speaks for it: the thread that saved it, or one that has waited for its end since; None where it is
            part of the first step, whoever makes that.
        in_turn: Whether the program decides when it was saved, and not chance.
    """

    def __init__(self, value: Any, thread: threading.Thread | None) -> None:
        from repro_golden.trace.signals import Signals

        tensors, self.left_out = content(value)
        self.is_empty = not tensors
        self.thread, self.in_turn = thread, threading.current_thread() is threading.main_thread()
        self._signals: Any = Signals()
        if tensors:
            self._signals.take("update", "", tensors)

    @functools.cached_property
    def rows(self) -> list[Any]:
        """Its rows, with the names that they have in the file."""
        rows: list[Any] = self._signals.rows()
        del self._signals
        return rows

    @property
    def bits(self) -> tuple[Any, ...]:
        """What it is sorted by in memory, where chance may decide on the order: by what it is, and by its bits."""
        return tuple((row.name, row.dtype, row.shape) for row in self.rows), tuple(row.fingerprint for row in self.rows)


@dataclass
class _Memory:
    """What was saved in memory.

    Attributes:
        held: What it is.
        parts: All that is in the same memory, by its place there.
        bytes: What these are known by, where the program writes them to a file.
        by: The thread.
    """

    held: _Content
    parts: Mapping[int, _Content]
    bytes: Bytes | None
    by: int


class Files:
    """Of what is written to a file in one step, the last content counts, under the name that the file has in the end.

    What the threads that train save belongs to the step in which they do; what another one does, to that in which one
    of them has waited for its end, or else to the last: any other is chance.

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
        self._others = Written(out, self._moved, self._copied, self._emptied)

    def forget(self, *, trained: bool = False) -> None:
        """Begin anew, in the child of a fork.

        Args:
            trained: Whether its parent has made steps. What its parent's threads were at does not go on in it, so it
                reads no tensors.
        """
        self._trained = trained or self._trained
        # by path and place in the file, in the order of their first writing
        self._written: dict[str, dict[int, _Content]] = {}
        # the same of all steps, those last written at the end
        self._known: dict[str, dict[int, _Content]] = {}
        self._memory: list[_Memory] = []
        self._streams = ByIdentity[_Memory]()  # the last of each
        self._unread: dict[str, str] = {}  # by their names in the trace
        self._noted: dict[str, str] = {}  # the same by path, of a process that has made no step
        self._ended = False

    @property
    def unread(self) -> dict[str, str]:
        """What was seen and not read, and why."""
        late = [(_name(path), held) for path, parts in list(self._written.items()) for held in list(parts.values())]
        late += [("memory", memory.held) for memory in self._memory]
        return (
            self._unread
            | {f"saved/{name}": _LATE[held.thread in (None, threading.main_thread())] for name, held in late}
            | {f"file {name}": "written by other means than torch.save" for name in self._others.names}
        )

    def take(self, place: Place, value: Any, *, recording: bool) -> None:
        """The program has saved something by torch or safetensors.

        Args:
            place: Where.
            value: What.
            recording: Whether this process has made a step.
        """
        name, path = _name(place.path) if place.path else "", place.path
        if name and self._ignored(f"saved/{name}"):
            self._others.paths.pop(path, None)
            return
        if not recording and path:
            self._note({**self._noted, path: "another process wrote it"})
        if not recording and self._trained:
            return
        if not path and len(self._memory) >= _MOST:
            self._unread["more of saved/memory"] = f"it came behind {_MOST:,} others of its step"
            return
        thread = threading.current_thread()
        held = _Content(value, None if thread is threading.main_thread() and not recording else thread)
        if not path and held.left_out and held.is_empty:  # as when a tensor is pickled
            self._unread["saved/memory"] = held.left_out
            return
        if path:
            self._others.paths.pop(path, None)
            self._put(path, place, held)
            return
        at, before = place.at or 0, self._streams.get(place.stream)
        parts = {other: part for other, part in before.parts.items() if other < at} if before else {}
        memory = _Memory(held, {**parts, at: held}, place.bytes, threading.get_ident())
        self._memory.append(memory)
        with contextlib.suppress(TypeError):  # a class that cannot be referred to weakly, or no stream
            self._streams.put(place.stream, memory)

    def begin(self) -> None:
        """This process makes its first step, which what it wrote before is part of."""
        if self._noted and not self._trained:
            self._note({})

    def joined(self, thread: threading.Thread) -> None:
        """A thread has ended, and this one has waited for it."""
        for held in self._waiting():
            if held.thread is thread:
                held.thread = threading.current_thread()

    def end(self) -> None:
        """The program has ended by itself, and all its threads but those that it never waits for."""
        self._ended = True

    def rows(self, trains: Callable[[int], bool]) -> list[Any]:
        """What was written in the step; the k-th one more of a name, in another folder, is ``name.k``.

        Args:
            trains: Whether a thread of a number is one that trains.
        """

        def due(held: _Content) -> bool:
            thread = held.thread
            return thread is None or (self._ended and not thread.daemon) or trains(thread.ident or 0)

        loose = self._named([memory for memory in self._memory if due(memory.held)])
        self._memory = [memory for memory in self._memory if not due(memory.held)]
        names: Counter[str] = Counter()
        rows = []
        for path, parts in sorted(self._written.items(), key=self._order):
            now = {at: held for at, held in sorted(parts.items()) if due(held)}
            if not now:
                continue
            if left := {at: held for at, held in parts.items() if at not in now}:
                self._written[path] = left
            else:
                self._written.pop(path, None)  # another thread may have renamed it
            name = _name(path)
            again = f".{names[name]}" if names[name] else ""
            names[name] += 1
            places = sorted({*self._known.get(path, ()), *parts})
            for at, held in now.items():
                inner = f"part.{place}/" if (place := places.index(at)) else ""
                rows += [replace(row, name=f"saved/{name}{again}/{inner}{row.name}") for row in held.rows]
            self._tell(name, now.values())
        for place, held in enumerate(sorted((held for held in loose if held.rows), key=lambda held: held.bits)):
            name = f"memory.{place}" if place else "memory"
            rows += [replace(row, name=f"saved/{name}/{row.name}") for row in held.rows]
        self._tell("memory", loose)
        return rows

    @staticmethod
    def _order(written: tuple[str, dict[int, _Content]]) -> tuple[Any, ...]:
        """What files stand in the order of: of what they hold, where threads decide which is written first.

        Files of one name, in folders that have a made-up one, are told apart by it.
        """
        parts = written[1].values()
        return () if all(held.in_turn for held in parts) else tuple(held.bits for held in parts)

    def _named(self, memories: list[_Memory]) -> list[_Content]:
        """Put what lies in memory to the files that the same thread has written it to; what is in none of them."""
        known = {(memory.bytes, memory.by): memory for memory in memories if memory.bytes}
        sizes = {held.size for held, _ in known}
        placed = set[int]()
        for path, by in list(self._others.paths.items()) if known else ():
            there = bytes_in(path, sizes)
            if there and (memory := known.get((there, by))):
                self._others.paths.pop(path, None)
                self._known.pop(path, None)
                placed |= {id_of(held) for held in memory.parts.values()}
                for at, held in () if self._ignored(f"saved/{_name(path)}") else memory.parts.items():
                    self._put(path, Place(path, at, at + 1), held)
        return [memory.held for memory in memories if id_of(memory.held) not in placed]

    def _tell(self, name: str, contents: Iterable[_Content]) -> None:
        if why := ", ".join(sorted({held.left_out for held in contents if held.left_out})):
            self._unread[f"saved/{name}"] = why

    def _waiting(self) -> list[_Content]:
        """What was saved since the step before."""
        parts = [held for parts in list(self._written.values()) for held in list(parts.values())]
        return parts + [memory.held for memory in self._memory]

    def _put(self, path: str, place: Place, held: _Content) -> None:
        """Something stands in a file now, in place of what was there."""
        known = self._known.pop(path, {})
        at = max(known, default=-1) + 1 if place.at is None else place.at
        for parts in (known, self._written.setdefault(path, {})):
            for gone in [other for other in parts if at <= other < place.end]:
                del parts[gone]
            parts[at] = held
        self._remember(path, known)

    def _remember(self, path: str, parts: dict[int, _Content]) -> None:
        """What a path holds; a path that has it for long is forgotten in time."""
        self._known.pop(path, None)
        self._known[path] = parts
        if len(self._known) > _KNOWN:
            self._known.pop(next(iter(self._known)))

    def _moved(self, before: str, after: str) -> None:
        """The program renames a file or folder; notes follow it."""

        def now(path: str) -> str:
            return after + path[len(before) :] if below(path, before) else path

        for path in [path for path in tuple(self._known) if below(path, before)]:
            self._written.pop(path, None)
            known = self._known.pop(path, {})
            self._written[now(path)] = dict(known)
            self._remember(now(path), known)
            if why := self._unread.pop(f"saved/{_name(path)}", ""):
                self._unread[f"saved/{_name(now(path))}"] = why
        moved = {now(path): why for path, why in self._noted.items()}
        if moved != self._noted:
            self._note(moved)

    def _copied(self, before: str, after: str) -> bool:
        """The program copies or links a file or a folder of files that it has written: they are there twice."""
        copied = [path for path in tuple(self._known) if below(path, before)]
        for path in copied:
            now = after + path[len(before) :]
            self._written[now] = dict(self._known[path])
            self._remember(now, dict(self._known[path]))
            self._others.paths.pop(now, None)
        return bool(copied)

    def _emptied(self, path: str) -> None:
        """The program begins to write a file anew."""
        self._known.pop(path, None)
        self._written.pop(path, None)

    def _note(self, noted: dict[str, str]) -> None:
        """Say at once what is written by a process that may never make a step, and may end without a word."""
        self._noted = noted
        self._keep({f"saved/{_name(path)}": why for path, why in noted.items()})


_KNOWN = 200
"""Files whose content is remembered, in case that they are renamed, copied or linked, or get more."""
_MOST = 1_000
"""Values in memory that are looked at in a step."""
_LATE = ("another thread wrote it", "it belongs to no step")
"""Why something is not looked at, by whether the main thread wrote it."""


def _name(path: str) -> str:
    """A file's name in the trace: ``last.pt``, or ``best:last.pt`` in a folder, unless that is called by a time."""
    folder, name = PurePath(path).parent, PurePath(path).name
    here = ""
    with contextlib.suppress(OSError):  # it was removed
        here = os.getcwd()  # noqa: PTH109 - as text
    plain = str(folder) == here or not folder.name or MADE_UP.search(folder.name)
    return (name if plain else f"{folder.name}:{name}").encode("utf-8", "replace").decode("utf-8")
