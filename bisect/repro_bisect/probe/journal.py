"""The journal: every finished probe of every bisect, so that a killed one resumes and later ones reuse its work.

It stores traces; verdicts are recomputed from them, so another baseline or another rule asks nothing anew.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import os
import uuid
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from repro_bisect.probe.answers import MOVED
from repro_golden.base.canonical import digest, digest_framed, frame, parse_json
from repro_golden.base.errors import MachineFailureError
from repro_golden.trace.model import RECORDER, checked, to_checked_line

__all__ = ["Entry", "Journal", "probe_key"]

FORMAT = 3
_RESERVED = 15
"""Numbers of replays up to this one are those that searches ask for by themselves."""


def probe_key(tree: str, rest: tuple[str, ...]) -> str:
    """The key of a probe: the hash of the subject's code, and what is `Around` it, which very many commits share."""
    return digest_framed(_ALL, frame(tree), _framed(rest))


_ALL = b"".join(map(frame, ("probe", str(FORMAT), str(RECORDER))))


@functools.lru_cache(maxsize=16)
def _framed(parts: tuple[str, ...]) -> bytes:
    return b"".join(map(frame, parts))


@dataclass(frozen=True)
class Entry:
    """One finished probe.

    Attributes:
        key: `probe_key`.
        run: 0 for the first replay of that key, 1 for the one that confirms it.
        commit: The commit it was made for; others with the same tree share it.
        skip: Why it could not be tested, or "" when it left a trace.
        steps: Whole steps in its trace.
        seconds: What it cost.
        folder: Name of its trace's folder, "" for a skip. Each probe has its own, so that nobody's is replaced.
        code: Exit code of the program, where that alone was asked for.
        diagnosis: What is known of why it could not be tested; "" where nothing is.
        undumped: Signals whose whole content was asked for and that are no tensors.
        search: Which search made it; "" in a journal from before that was kept.
        beside: Whether other probes of that search ran at the same time; False from before that was kept.
        made: See `Outcome`.
        pythons: What stands for the interpreters that it ran in beside those that its key holds, by their paths.
    """

    key: str
    run: int
    commit: str
    skip: str
    steps: int
    seconds: float
    folder: str
    code: int | None = None
    diagnosis: str = ""
    undumped: tuple[tuple[int, str, str], ...] = ()
    search: str = ""
    beside: bool = False
    made: tuple[str, ...] = ()
    pythons: Mapping[str, str] = field(default_factory=dict)


class Journal:
    """Append-only lines under ``$GIT_COMMON_DIR/repro``, each fsynced; several processes may write at once.

    Attributes:
        folder: Where it lies.
        search: What stands for whoever has it open in the entries that they make.
    """

    def __init__(
        self,
        folder: Path,
        *,
        fresh: bool = False,
        alone: bool = False,
        are: Callable[[Mapping[str, str]], bool] = lambda _: True,
    ) -> None:
        """Open the journal; lines that a crash cut short, or that a newer version wrote, are passed over.

        Args:
            folder: Where it lies.
            fresh: Know nothing of what was found before.
            alone: Know nothing of what was found beside other probes.
            are: Says whether interpreters are what they were for an entry; where they are not it is not found.
        """
        self.folder = folder
        self.search = uuid.uuid4().hex[:16]
        self._file = folder / "journal.jsonl"
        self._entries: dict[tuple[str, int], Entry] = {}
        self._are = are
        if fresh:
            return
        with contextlib.suppress(FileNotFoundError):
            for line in self._file.read_text(encoding="utf-8", errors="replace").splitlines():
                with contextlib.suppress(ValueError, TypeError, KeyError, AttributeError):
                    raw = checked(parse_json(line))  # older lines carry no digest of themselves
                    if raw.pop("format") == FORMAT:
                        raw["undumped"] = tuple(tuple(signal) for signal in raw.get("undumped", ()))
                        entry = Entry(**raw | {"made": tuple(raw["made"])})
                        if not (alone and entry.beside):
                            self._entries[entry.key, entry.run] = entry

    def __len__(self) -> int:
        """Finished probes that it knows."""
        return len(self._entries)

    def count(self, keys: Collection[str]) -> int:
        """How many finished probes there are of these keys, without those that are to be made anew."""
        known = [entry for entry in self._entries.values() if entry.key in keys and entry.skip != MOVED]
        return sum(self._are(entry.pythons) for entry in known)

    def find(self, key: str, run: int) -> Entry | None:
        """The newest finished probe of a key, if its trace is still there."""
        entry = self._entries.get((key, run))
        if entry and entry.folder and not (self.trace_path(entry) / "steps.jsonl").exists():
            return None
        return entry if entry and self._are(entry.pythons) else None

    def ran_in(self, case: str) -> list[str]:
        """The interpreters that probes of a case said they ran in; see `met`."""
        entry = self._entries.get((_case_key(case), 0))
        return [python for python in sorted(entry.pythons) if Path(python).exists()] if entry else []

    def met(self, case: str, pythons: Iterable[str]) -> None:
        """Keep that probes of a case, by its digest, ran in interpreters: the next search looks at them first."""
        known = self.ran_in(case)
        both = dict.fromkeys([*known, *pythons], "")
        if len(both) > len(known):
            self.add(Entry(_case_key(case), 0, "", MOVED, 0, 0.0, "", search=self.search, pythons=both), None)

    def unused_run(self, key: str) -> int:
        """A number of no replay of a key, whoever made it, and that no search asks for by itself."""
        return 1 + max([_RESERVED, *self.runs(key)])

    def runs(self, key: str) -> list[int]:
        """The numbers of a key's finished probes."""
        return sorted(run for known, run in list(self._entries) if known == key)  # other threads add to them

    def trace_path(self, entry: Entry) -> Path:
        """Where the trace of a probe lies: below the journal, or where its entry says, if that is a whole path."""
        return self.folder / "probes" / entry.folder

    def drop(self, made: Iterable[tuple[str, int]]) -> None:
        """Have finished probes, by key and number, be made anew when they are asked for again."""
        for key, run in list(made):
            self.add(Entry(key, run, "", MOVED, 0, 0.0, "", search=self.search), None)

    def disown(self) -> None:
        """`drop` all that whoever has it open has made beside other probes."""
        self.drop(made for made, entry in self._entries.items() if entry.beside and entry.search == self.search)

    def add(self, entry: Entry, trace: Path | None, *, lasting: bool = True) -> None:
        """Keep a finished probe: its trace first, then its line.

        Args:
            entry: What was found.
            trace: Of it, to be moved.
            lasting: Whether later searches may use it too; else only who asks this journal does.

        Raises:
            MachineFailureError: the disk is full.
        """
        try:
            if trace is not None:
                target = self.trace_path(entry)
                target.parent.mkdir(parents=True, exist_ok=True)
                _to_disk(trace)
                trace.rename(target)
                _to_disk(target.parent, inside=False)
            if not lasting:
                self._entries[entry.key, entry.run] = entry
                return
            line = to_checked_line({"format": FORMAT, **asdict(entry)}).encode() + b"\n"
            self.folder.mkdir(parents=True, exist_ok=True)
            with self._file.open("a+b") as file:
                fcntl.flock(file, fcntl.LOCK_EX)
                size = file.seek(0, os.SEEK_END)
                if size and os.pread(file.fileno(), 1, size - 1) != b"\n":  # what a crash cut short
                    line = b"\n" + line
                file.write(line)
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise MachineFailureError(
                f"cannot write the journal {self._file}: {error.strerror}; free space, then run the same command again"
            ) from error
        self._entries[entry.key, entry.run] = entry


def _case_key(case: str) -> str:
    return digest("ran in", case)


def _to_disk(folder: Path, *, inside: bool = True) -> None:
    """Wait until a folder, and the files in it, would outlive a power cut."""
    for path in [*(folder.rglob("*") if inside else ()), folder]:
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
