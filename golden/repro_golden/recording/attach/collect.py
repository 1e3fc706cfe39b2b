"""From the raw records of all ranks to one trace, also while they are written."""

from __future__ import annotations

import itertools
import json
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePath
from typing import Any

from repro_golden.base.errors import ReproError
from repro_golden.base.usage import slowest
from repro_golden.recording.attach.merging import merge_rows
from repro_golden.recording.attach.raw import SHOWN, number_of, take_dumps
from repro_golden.repository.git import state_of
from repro_golden.trace import Header, Row, StepRecord, TraceWriter, seal
from repro_golden.trace.checkpoints import checkpoint_content
from repro_golden.trace.families import BESIDE, family, file_of, plain
from repro_golden.trace.frames import FrameReader
from repro_golden.trace.model import METRIC, RECORDER
from repro_golden.trace.writer import digest_row

__all__ = ["Collected", "Gathering", "read_terminal"]


@dataclass(frozen=True)
class Collected:
    """What was made of the raw records.

    Attributes:
        steps: Whole steps that every rank recorded.
        ranks: How many ranks did.
        complete: Whether every rank said that it had ended, with as many steps.
        stopped: Whether every rank was ended because it had made the steps that were asked for.
        terminal: What the ranks' runs ended with (`process.terminal`), by rank and name.
        ignored: Metrics that were left out, because they measure time or the user said so.
        short: Why there may be fewer steps than were made; "" where nothing says so.
    """

    steps: int
    ranks: int
    complete: bool
    stopped: bool
    terminal: Mapping[str, str]
    ignored: Sequence[str] = ()
    short: str = ""


class _Rank:
    """The records of one rank, in an order that does not depend on which of several optimizers stepped first.

    Steps of different optimizers that follow each other are put in the order of their labels, up to where one of them
    steps again. The first optimizer's signals keep their names, the k-th other's begin with ``optimizer.k/``.

    Attributes:
        first: The label of the optimizer that stepped first; "" before its step, or of a recorder that has none.
    """

    def __init__(self, log: Path) -> None:
        self.log = log
        self.about = _read(log.with_suffix(".json"))
        self.first = ""
        self.ready: deque[tuple[str, list[Row]]] = deque()
        self.labels: set[str] = set()
        self.steps = 0
        self._frames = FrameReader(log)
        self._window: dict[str, list[Row]] = {}
        self._numbers: dict[str, int] = {}

    @property
    def end(self) -> dict[str, Any] | None:
        """What it said when it ended: ``steps`` and ``stopped``."""
        closing: dict[str, Any] | None = _read(self.log.with_suffix(".end"))
        return closing

    def read(self) -> None:
        """Take what was written since."""
        for _, rows, label in self._frames.more():
            self.steps += 1
            self.first = self.first or label
            self.labels.add(label)
            if not label:  # of a recorder that writes steps, and not those of optimizers
                self.ready.append((label, rows))
                continue
            if label in self._window:
                self.close()
            self._window[label] = rows
            if list(self._numbers) == [label]:  # one optimizer so far, and again: nothing to wait for
                self.close()

    def close(self) -> None:
        """No other optimizer's step belongs to those before.

        What lives beside the optimizers is theirs in common: as it was after the step that was made last, it stands
        with the one that is last in order. Of a file that was written after several of them, the last content counts.
        """
        beside: list[Row] = []
        for label, rows in self._window.items():
            common = [row for row in rows if family(row.phase, row.name) in BESIDE]
            anew = {file_of(row.phase, row.name) for row in rows}
            unchanged = [row for row in beside if file_of(row.phase, row.name) not in anew | {None}]
            beside = unchanged + common
            self._window[label] = [row for row in rows if family(row.phase, row.name) not in BESIDE]
        for place, (label, rows) in enumerate(sorted(self._window.items()), 1):
            number = self._numbers.setdefault(label, len(self._numbers))
            numbered = [_told_apart(row, f"optimizer.{number}/") for row in rows] if number else rows
            self.ready.append((label, numbered + beside if place == len(self._window) else numbered))
        self._window.clear()


def _told_apart(row: Row, prefix: str) -> Row:
    if row.name.startswith("start/"):
        return replace(row, name=f"start/{prefix}{row.name.removeprefix('start/')}")
    return replace(row, name=prefix + row.name) if row.phase in ("grad", "update") else row


def _of_training(number: int, row: Row) -> Row:
    """A row of the k-th training beside the first, as its name says: its numbers are other numbers too."""
    prefix = f"training.{number}/"
    if not number:
        return row
    before = next((word for word in (SHOWN, "start/") if row.name.startswith(word)), "")
    return replace(row, name=f"{before}{prefix}{row.name.removeprefix(before)}")


def _trainings(ranks: Sequence[_Rank]) -> list[list[_Rank]]:
    """The ranks of each of several trainings beside each other, such as an actor's and a critic's.

    A training is told by its process group, and put in order by the optimizer that steps first on its rank 0: of two
    with the same nobody could say in the next run which is which.

    Raises:
        ReproError: they are not several, each with its own.
    """
    numbers = [int(rank.about["rank"]) for rank in ranks]
    if len({*numbers}) == len(numbers):
        return [[*ranks]]
    groups: dict[str, list[_Rank]] = {}
    for rank in sorted(ranks, key=lambda rank: int(rank.about["rank"])):
        if not rank.first:
            rank.read()
        groups.setdefault(rank.about.get("group", ""), []).append(rank)
    whole = [[rank.about["rank"] for rank in group] == list(range(len(group))) for group in groups.values()]
    firsts = [group[0].first for group in groups.values()]
    if not all(whole) or "" in firsts or len({*firsts}) < len(firsts):
        twice = next(number for number in numbers if numbers.count(number) > 1)
        raise ReproError(
            f"{numbers.count(twice)} processes trained as rank {twice}, and nothing tells them apart: "
            "trace one program at a time"
        )
    return sorted(groups.values(), key=lambda group: group[0].first)


HeaderOf = Callable[[Mapping[str, Any], int], Header]
MoreRows = Callable[[int], Sequence[Row] | None]


class Gathering:
    """Makes a trace of the raw records of a program's ranks, also while they are written.

    Args:
        raw: Folder of the raw records.
        out: The trace's folder.
        header: The trace's header, from what rank 0 says of itself and the number of steps seen so far.
        ranks: How many ranks must record; by default as many as each says its world has.
        more: Rows of a step beside the recorder's, by its number from 0; None as long as they are not there.
        files: Folder of files that the program saves, which are part of its last step; not what lies there before.
        most: Steps that were asked for. Where several optimizers step in turn the ranks go on to the end of a round,
            since the order in it is known then.
    """

    def __init__(
        self,
        raw: Path,
        out: Path,
        header: HeaderOf,
        ranks: int | None,
        more: MoreRows = lambda _: (),
        files: Path | None = None,
        most: int | None = None,
    ) -> None:
        self._raw, self._out, self._header, self._want, self._more = raw, out, header, ranks, more
        self._most = most
        self._ranks: list[_Rank] = []
        self._sizes: list[int] = []  # how many of them each training has
        self._writer: TraceWriter | None = None
        self._first_step = 0
        self._files, self._ending = files, False
        self._given = _stamps(files)
        self._saved: set[str] = set()
        self._bytes: set[str] = set()  # files that were read after the program's end

    @property
    def steps(self) -> int:
        """How many were written."""
        return self._writer.steps if self._writer else 0

    def poll(self) -> list[StepRecord]:
        """Write the steps that all ranks have recorded since.

        Raises:
            ReproError: a rank twice, another recorder's records, or shares that do not add up.
        """
        if refused := next(iter(sorted(self._raw.glob("refused-*"))), None):
            raise ReproError(refused.read_text(encoding="utf-8"))
        if not self._ranks:
            ranks = self._find()
            if not ranks or len(ranks) < self._wanted(ranks) or not _told(ranks):
                return []
            self._open(ranks)
        records = []
        for rank in self._ranks:
            rank.read()
        # the last step waits for the files
        least = 1 if self._files is None or self._ending else 2
        while all(len(rank.ready) >= least for rank in self._ranks) and not self._parted() and not self._enough():
            more = self._more(self.steps)
            if more is None:
                break
            labels, step = zip(*(rank.ready.popleft() for rank in self._ranks), strict=True)
            if self._ending and not any(rank.ready for rank in self._ranks):
                self._saved |= _files_in(itertools.chain(*step))
                more = [*more, *self._written()]
            records.append(self._write(step, more, behind_the_door=not any(labels)))
        return records

    def finish(self, command: Sequence[str], code: int, reason: str = "finished") -> Collected:
        """Write what is left, close the trace where it is whole, and seal it.

        Args:
            command: What ran, for the message.
            code: Its exit code.
            reason: Why it ended, for the trace's closing line.

        Raises:
            ReproError: no step, or a rank is missing, or see `poll`.
        """
        if not self._ranks:
            self._open(self._find(whole=False), command, code)
        self.poll()
        if reason != "diverged":  # else the last round is none: it was cut
            self._check(self._find())  # a process may have begun to train when others had
            for rank in self._ranks:
                rank.close()
        self._ending = True
        self.poll()
        if self._writer is None:
            raise self._none_whole(code)
        steps, ends = self._writer.steps, [rank.end for rank in self._ranks]
        whole = [rank.steps for rank in self._ranks if rank.end and rank.end["steps"] == rank.steps]
        complete = len(whole) == len(ends) and all(steps == made or (self._enough() and steps < made) for made in whole)
        terminal = read_terminal(self._raw)
        if complete or reason == "diverged":
            closing = {"reason": reason, "ranks": len(self._ranks), "exit": code}
            closing["spent"] = slowest([end["spent"] for end in ends if end and "spent" in end])
            closing["modules"] = sorted({name for end in ends if end for name in end["modules"]})
            places = {name: folder for end in ends if end for name, folder in end.get("places", {}).items()}
            closing["sources"] = {name: state for name, folder in places.items() if (state := state_of(Path(folder)))}
            unread = [*(_read(path) or {} for path in sorted(self._raw.glob("note-*.json")))]
            unread += [end.get("unread", {}) for end in ends if end]
            seen = {name: why for notes in unread for name, why in notes.items()}
            closing["unread"] = {name: why for name, why in seen.items() if _plain_file(name) not in self._bytes}
            self._writer.close(closing | ({"terminal": terminal} if terminal else {}))
        take_dumps(self._raw, self._out)
        self._writer.let_go()
        seal(self._out)
        stopped = all(end and end["stopped"] for end in ends)
        ignored = sorted({name for end in ends if end for name in end.get("ignored", ())})
        short = "" if reason == "diverged" else self._failed() or self._of_unequal_ranks() or self._cut(complete)
        return Collected(steps, len(self._ranks), complete, stopped, terminal, ignored, short)

    def close(self) -> None:
        """Let go of the trace's files, whatever became of it."""
        if self._writer:
            self._writer.let_go()

    def _written(self) -> list[Row]:
        """Rows of the files that a program which ended by itself has saved and the recorder has not seen it save."""
        ends = [rank.end for rank in self._ranks]
        if self._files is None or not all(end and not end["stopped"] for end in ends):
            return []
        stamps = _stamps(self._files)
        content = checkpoint_content(self._files, self._saved)
        content = {name: value for name, value in content.items() if stamps.get(name) != self._given.get(name, ())}
        self._bytes = {PurePath(name).name for name in content}
        return [digest_row("update", f"saved/{name}", value.encode()) for name, value in sorted(content.items())]

    def _failed(self) -> str:
        """What a recorder that ended before its program said of that; "" without one."""
        notes = (path.read_text(encoding="utf-8") for path in sorted(self._raw.glob("failed-*")))
        return next((note for note in notes if note), "")

    def _of_unequal_ranks(self) -> str:
        """What is wrong where ranks recorded different numbers of steps; "" where they did not, or were to stop."""
        made = [rank.steps for rank in self._ranks]
        if self._enough() or len({*made}) == 1:
            return ""
        told = ", ".join(f"{steps} on rank {rank.about['rank']}" for steps, rank in zip(made, self._ranks, strict=True))
        return f"ranks recorded different numbers of steps: {told}"

    def _cut(self, complete: bool) -> str:
        """What is wrong where a process did not say that it had ended; "" where all did, or made all that was asked."""
        if complete or self._enough():
            return ""
        return "a process ended without a word (os._exit, or a signal), and its last step with it"

    def _none_whole(self, code: int) -> ReproError:
        why = self._failed() or "it ended in its first, or a line on stderr says why"
        return ReproError(f"no step was recorded whole (exit code {code}): {why}")

    def _enough(self) -> bool:
        """Whether as many steps as were asked for are written."""
        return self._most is not None and self.steps >= self._most

    def _parted(self) -> bool:
        """Whether ranks with the same optimizers have stepped different ones: the rest of a recording that was cut."""
        labels = {rank.ready[0][0] for rank in self._ranks}
        return len(labels) > 1 and all(rank.labels == self._ranks[0].labels for rank in self._ranks)

    def _find(self, *, whole: bool = True) -> list[_Rank]:
        ranks = [_Rank(log) for log in sorted(self._raw.glob("rank-*.log"))]
        return [rank for rank in ranks if rank.about or not whole]

    def _wanted(self, ranks: Sequence[_Rank]) -> int:
        return self._want or max(int(rank.about["world"]) for rank in ranks)

    def _open(self, ranks: list[_Rank], command: Sequence[str] = ("the program",), code: int = 0) -> None:
        if not ranks:
            raise ReproError(
                f"no optimizer step was seen in {command[0]} (exit code {code}): does it train with torch.optim, "
                "in a Python that reads PYTHONPATH?"
            )
        if not all(rank.about for rank in ranks):
            raise self._none_whole(code)
        self._check(ranks)
        trainings = _trainings(ranks)
        self._ranks = [rank for training in trainings for rank in training]
        self._sizes = [len(training) for training in trainings]

    def _check(self, ranks: Sequence[_Rank]) -> None:
        """Refuse records that are not one of each rank that there must be, by this recorder, of the code in question.

        Raises:
            ReproError: they are not.
        """
        present = sorted(rank.about["rank"] for rank in ranks)
        if any(rank.about["recorder"] != RECORDER for rank in ranks):
            raise ReproError("the program imports another version of repro_golden: use one in both environments")
        want = self._wanted(ranks)
        if len(set(present)) < len(present):
            twice = next(r for r in present if present.count(r) > 1)
            if len(present) != want:
                raise ReproError(
                    f"{present.count(twice)} processes trained as rank {twice}: trace one program at a time, or "
                    "say how many processes train in all (--ranks; in a case resources.other_ranks: a critic's)"
                )
            _trainings(ranks)
        elif present != list(range(want)):
            missing = sorted(set(range(want)) - set(present))
            raise ReproError(
                f"{len(present)} of {want} ranks recorded steps (missing: {missing or 'none'}, found: {present}): "
                "resources.ranks and other_ranks (--ranks) say how many there must be"
            )
        if outside := next((rank.about["outside"] for rank in ranks if rank.about["outside"]), None):
            module = next((m for m in outside if m != "__main__"), outside[0])
            raise ReproError(
                f"{module} was imported from your checkout, not from the commit under test (an editable "
                "installation?): name the folder of the code, relative to the root, in subject.env.PYTHONPATH"
            )

    def _write(self, ranks: Sequence[Sequence[Row]], more: Sequence[Row], *, behind_the_door: bool) -> StepRecord:
        if self._writer is None:
            seen = min([rank.steps for rank in self._ranks] + ([self._most] if self._most is not None else []))
            header = self._header(self._ranks[0].about, seen)
            self._writer, self._first_step = TraceWriter(self._out, header, sealing=True), header.first_step
        metrics, others = set[str](), set[tuple[str, str]]()
        rest = iter(ranks)
        merged = (
            _of_training(number, row)
            for number, size in enumerate(self._sizes)
            for row in merge_rows(list(itertools.islice(rest, size)), everywhere=behind_the_door)
        )
        for row in itertools.chain(merged, more):
            if row.name.startswith(SHOWN):
                if row.dtype == METRIC:
                    self._writer.show(row.name.removeprefix(SHOWN), number_of(row))
                continue
            if row.dtype == METRIC and row.name in metrics:
                continue  # a number that the program logs under the name of one that was read
            if row.dtype == METRIC:
                metrics.add(row.name)
            while (row.phase, row.name) in others:  # what the program shows under the name of what was read
                row = replace(row, name=f"{row.name}.again")
            others.add((row.phase, row.name))
            self._writer.add(row)
        self._saved |= _files_in(itertools.chain(*ranks))
        return self._writer.end_step(self._first_step + self._writer.steps)


def _files_in(rows: Iterable[Row]) -> set[str]:
    """Names of the files whose content is among the rows."""
    names = (plain(row.name).split("/") for row in rows if family(row.phase, row.name) == "saved")
    return {_plain_file(parts[1]) for parts in names}


def _stamps(folder: Path | None) -> dict[str, tuple[int, ...]]:
    """What tells of each file of a folder that it is written again: a state that a run starts from is not."""
    if folder is None:
        return {}
    facts = {str(path.relative_to(folder)): path.stat() for path in folder.rglob("*") if path.is_file()}
    return {name: (f.st_ino, f.st_size, f.st_mtime_ns, f.st_ctime_ns) for name, f in facts.items()}


def _plain_file(name: str) -> str:
    """A file's own name, of that in the trace or of a note: without its folder."""
    return name.removeprefix("file ").removeprefix("saved/").rpartition(":")[2]


def read_terminal(raw: Path) -> dict[str, str]:
    """What the runs of all ranks ended with, by rank and name."""
    ends = [
        ("-".join(path.stem.split("-")[:2]), name, value)  # without a process's number
        for path in raw.glob("rank-*.terminal")
        for name, value in (_read(path) or {}).items()
    ]
    told: dict[str, str] = {}
    for rank, name, value in sorted(ends):
        key = f"{rank}/{name}"
        while key in told:
            key += ".again"
        told[key] = value
    return told


def _told(ranks: Sequence[_Rank]) -> bool:
    """Whether it is known which training each of several processes of one rank belongs to: each has made a step."""
    if len({rank.about["rank"] for rank in ranks}) == len(ranks):
        return True
    for rank in ranks:
        rank.read()
    return all(rank.first for rank in ranks)


def _read(path: Path) -> Any:
    """The JSON of a file; None where the disk was full or the process killed before it was whole."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
