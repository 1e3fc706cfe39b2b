"""What a kind of subject adds to the run of a command: to its environment and command line, and to its rows."""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from repro_golden.base.canonical import jsonable
from repro_golden.base.errors import ReproError
from repro_golden.recording.attach.base.settings import Settings
from repro_golden.recording.attach.gathered.collect import Collected
from repro_golden.trace import Header, Row, StepRecord, TraceWriter, seal

__all__ = ["Addition", "Parsed", "Written", "read_parsers"]


class Addition(Protocol):
    """What is added to one run."""

    recorder: bool
    """Whether the recorder looks at the program's steps; without it `rows` are all there is."""

    def settings(self, settings: Settings) -> Settings:
        """What the program's processes are told."""

    def variables(self, environment: Mapping[str, str]) -> dict[str, str]:
        """The program's environment."""

    def rows(self, step: int) -> Sequence[Row] | None:
        """The rows of a step, by its number from 0, beside the recorder's; None as long as they are not there.

        Raises:
            ReproError: they can never be.
        """

    def ended(self, code: int) -> None:
        """The program has ended, with this exit code: what is not there now will not come.

        Raises:
            ChildFailure: it was not what it was asked to be.
        """

    def unread(self) -> dict[str, str]:
        """What of the rows was seen and is not looked at, with why."""

    def about(self) -> dict[str, Any]:
        """What a trace's header tells of it."""


class Written:
    """Makes a trace of what a program writes by itself; to `command` what `Gathering` is to a recorder's records.

    Args:
        out: The trace's folder.
        header: Makes the trace's header, once its first step is there.
        addition: Whose rows they are.
        steps: How many of them are wanted.
    """

    def __init__(self, out: Path, header: Callable[[], Header], addition: Addition, steps: int) -> None:
        self._out, self._header, self._addition, self._wanted = out, header, addition, steps
        self._writer: TraceWriter | None = None
        self._last: Sequence[Row] = ()

    @property
    def steps(self) -> int:
        """How many were written."""
        return self._writer.steps if self._writer else 0

    def poll(self) -> list[StepRecord]:
        """Write the steps that are there since.

        Raises:
            ReproError: see `Addition.rows`.
        """
        records = []
        while self.steps < self._wanted and (rows := self._addition.rows(self.steps)) is not None:
            if self._writer is None:
                self._writer = TraceWriter(self._out, self._header(), sealing=True)
            records.append(self._writer.write(rows))
            self._last = rows
        return records

    def finish(self, command: Sequence[str], code: int, reason: str = "finished") -> Collected:
        """Write what is left, close the trace and seal it.

        Raises:
            ReproError: no step is there, or the program ended well and wrote less than it should.
        """
        try:
            self.poll()
        except ReproError:
            if self.steps == 0 or code == 0:
                raise  # else what it wrote before it failed counts, and why it failed says more
        if self._writer is None:
            raise ReproError(f"{command[0]} (exit code {code}) wrote no train dump of a whole step")
        terminal = {f"{row.phase} {row.name}": row.fingerprint for row in self._last}
        closing = {"reason": reason, "ranks": 1, "exit": code, "terminal": terminal, "unread": self._addition.unread()}
        self._writer.close(jsonable(closing))
        seal(self._out)
        return Collected(self.steps, 1, complete=True, stopped=True, terminal=terminal)

    def close(self) -> None:
        """Let go of the trace's files, whatever became of it."""
        if self._writer:
            self._writer.let_go()


# -- whether a trainer took the flags that it was given, by what its own parsers say (`attach.entry`)
# slime's parser ignores flags that it does not know, so a misspelt one, or one that a commit does not have yet, would
# pass for a run that it never was.

_ENGINE = ("--sglang-", "--router-")
"""Flags of the rollout engine, which no parser looks at where nothing is sampled (slime/utils/arguments.py:1607)."""


@dataclass(frozen=True)
class Parsed:
    """What the processes at a trainer's entry points made of their command lines.

    Attributes:
        processes: How many there were.
        refused: Of the flags that were added: those that no parser has, or that came to another value, and why.
        ignored: Flags of the user's own that no parser has, with the nearest one that there is, or ''.
        overridden: Variables that had other values than asked for, with theirs.
        given: What the first of them was started with (`entry.variables_given`) and its command line; empty where that
            is not known.
    """

    processes: int
    refused: Mapping[str, str] = field(default_factory=dict)
    ignored: Mapping[str, str] = field(default_factory=dict)
    overridden: Mapping[str, str] = field(default_factory=dict)
    given: Mapping[str, Any] = field(default_factory=dict)


_UNKNOWN = "no parser of it has this flag"


def read_parsers(
    folder: Path, added: Sequence[Sequence[str]], variables: Mapping[str, str], more: Sequence[str] = ()
) -> Parsed:
    """Read what parsers said.

    Args:
        folder: Where they wrote it; one file for each process.
        added: The flags that were added, each with its value if it has one.
        variables: Those that were asked for.
        more: Words that were added for the user: their flags must be known, whatever becomes of their values.
    """
    refused: dict[str, str] = {}
    ignored: dict[str, str] = {}
    overridden: dict[str, str] = {}
    given: Mapping[str, Any] = {}
    files = sorted(folder.glob("parsers-*.jsonl"))
    parsed = 0
    for path in files:
        first, *records = _lines(path)
        parsers = [record for record in records if "options" in record]
        if not parsers:
            continue  # a launcher that reads no command line of its own
        parsed += 1
        given = given or first.get("given", {})
        known = {option for parser in parsers for option in parser["options"]}
        loose = any(parser["abbreviates"] for parser in parsers)
        for flag, *value in added:
            if why := _refusal(flag, value, parsers, known):
                refused.setdefault(flag, why)
        for flag in (word.partition("=")[0] for word in more if word.startswith("--")):
            if flag not in known:
                near = difflib.get_close_matches(flag, sorted(known), 1)
                refused.setdefault(flag, _UNKNOWN + (f": did you mean {near[0]}?" if near else ""))
        for flag in first["own"]:
            if flag.startswith(_ENGINE):
                continue
            if flag not in known and not (loose and any(option.startswith(flag) for option in known)):
                near = difflib.get_close_matches(flag, sorted(known), 1)
                ignored.setdefault(flag, near[0] if near else "")
        for name, asked in variables.items():
            if (has := first["variables"].get(name)) != asked:
                overridden.setdefault(name, "" if has is None else has)
    return Parsed(parsed, refused, ignored, overridden, given)


def _refusal(flag: str, value: Sequence[str], parsers: Sequence[Mapping[str, Any]], known: set[str]) -> str:
    """Why a flag took no effect; '' where it did."""
    if flag not in known:
        return _UNKNOWN
    values = [parser["values"][flag] for parser in parsers if flag in parser["values"]]
    if not value:
        # a flag without a value is a switch; one that says another thing is left to the trainer
        return "" if values[-1] is not False else "it came to nothing"
    return "" if values[-1] == value[0] else f"it came to {values[-1]!r}"


def _lines(path: Path) -> list[dict[str, Any]]:
    """The lines that are whole: the process may be writing its last."""
    records = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            records.append(json.loads(line))
        except ValueError:
            break
    return records or [{"own": [], "variables": {}}]
