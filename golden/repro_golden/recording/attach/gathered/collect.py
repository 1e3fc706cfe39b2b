"""From the raw records of all ranks to one trace, also while they are written."""

from __future__ import annotations

import itertools
import json
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePath
from typing import Any

from repro_golden.base.canonical import same_float
from repro_golden.base.errors import ReproError
from repro_golden.base.machine.usage import slowest
from repro_golden.recording.attach.base.rounds import Rounds, read, written
from repro_golden.recording.attach.gathered.earlier_runs import read_in
from repro_golden.recording.attach.gathered.merging import all_asked_for, merge_rows, those_without_a_step, told_of_all
from repro_golden.recording.attach.gathered.unseen import unseen_for
from repro_golden.recording.attach.written.order import IN_ORDER, At, take_dumps, told_apart
from repro_golden.recording.attach.written.raw import SHOWN, number_of
from repro_golden.repository.git import state_of
from repro_golden.trace import Header, Row, StepRecord, TraceWriter, seal
from repro_golden.trace.checkpoints import checkpoint_content
from repro_golden.trace.families import BESIDE, family, file_of, plain
from repro_golden.trace.frames import FrameReader
from repro_golden.trace.model import METRIC
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

    Steps of different optimizers that follow each other are put in the order of their labels, round by round
    (`rounds`). The first optimizer's signals keep their names, the k-th other's begin with ``optimizer.k/``.
    """

    def __init__(self, log: Path) -> None:
        self.log = log
        self.about = _read(log.with_suffix(".json"))
        self.ready: deque[tuple[str, list[Row]]] = deque()
        self.labels: set[str] = set()
        self.steps = 0
        self.rounds: list[tuple[int, list[list[int]]]] = []  # see `order`
        self._frames = FrameReader(log)
        self._rounds = Rounds()
        self._window: dict[str, tuple[int, list[Row]]] = {}
        self._numbers: dict[str, int] = {}

    @property
    def dumps(self) -> str:
        """Its folder among those of dumps (`records.tap`)."""
        return f"{self.about['rank']:05d}-{self.about.get('pid', 0)}"

    @property
    def end(self) -> dict[str, Any] | None:
        """What it said when it ended: ``steps``, ``stopped``; of a foreign program also ``over`` and ``failed``."""
        closing: dict[str, Any] | None = _read(self.log.with_suffix(".end"))
        return closing

    def read(self) -> None:
        """Take what was written since."""
        for step, rows, text in self._frames.more():
            self.steps += 1
            labels, anew = read(text)
            label = written(sorted(labels), anew=False)
            self.labels.add(label)
            if not label:  # of a recorder that writes steps, and not those of optimizers
                self.ready.append((label, rows))
                self._ordered(IN_ORDER)
                continue
            begins, closes = self._rounds.step(labels, anew=anew)
            if begins:
                self.close()
            self._window[label] = step, rows
            if closes:
                self.close()

    def close(self) -> None:
        """No other optimizer's step belongs to those before.

        What lives beside the optimizers is theirs in common: as it was after the step that was made last, it stands
        with the one that is last in order. Of a file that was written after several of them, the last content counts.
        """
        beside: list[Row] = []
        for label, (step, rows) in self._window.items():
            common = [row for row in rows if family(row.phase, row.name) in BESIDE]
            anew = {file_of(row.phase, row.name) for row in rows}
            unchanged = [row for row in beside if file_of(row.phase, row.name) not in anew | {None}]
            beside = unchanged + common
            self._window[label] = step, [row for row in rows if family(row.phase, row.name) not in BESIDE]
        order, first = [], min((step for step, _ in self._window.values()), default=0)
        for place, (label, (step, rows)) in enumerate(sorted(self._window.items()), 1):
            number = self._numbers.setdefault(label, len(self._numbers))
            numbered = [replace(r, name=told_apart(r.phase, r.name, number)) for r in rows] if number else rows
            self.ready.append((label, numbered + beside if place == len(self._window) else numbered))
            order.append([step - first, number])
        if order:
            self._ordered(order)
        self._window.clear()

    def _ordered(self, order: list[list[int]]) -> None:
        """Note the order of a round."""
        times, last = self.rounds.pop() if self.rounds else (0, order)
        if last != order:
            self.rounds.append((times, last))
            times = 0
        self.rounds.append((times + 1, order))


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
        others: Processes of other trainings beside it: see `merging.largest`.
        unread: What of `more` was seen and is not looked at, with why.
        dump: Signals whose whole content the ranks were asked for, as the trace names them.
        planted: What some of them were to change, as they meet it.
        root: Where the program runs.
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
        others: int = 0,
        unread: Callable[[], Mapping[str, str]] = dict,
        dump: Sequence[At] = (),
        planted: Sequence[At] = (),
        root: Path = Path(),
    ) -> None:
        self._raw, self._out, self._header, self._want, self._more = raw, out, header, ranks, more
        self._most, self._others, self._unread = most, others, unread
        self._dump, self._planted, self._first, self._root = dump, planted, 0, root
        self._ranks: list[_Rank] = []
        self._writer: TraceWriter | None = None
        self._files, self._ending, self._filled = files, False, False
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
        self._refuse()
        if not self._ranks:
            ranks = self._find()
            want = self._wanted(ranks) + self._others if ranks else 1
            # those that are asked for may be others than the first, which is known in the end
            if len(ranks) < want or (len(ranks) == want and not self._others and not _of_the_first(ranks)):
                return []
            self._open(ranks)
        records = []
        for rank in self._ranks:
            rank.read()
        # the last step waits for the files
        least = 1 if self._files is None or self._ending else 2
        while all(len(rank.ready) >= least for rank in self._ranks) and not self._parted() and not self._enough():
            if not self._ending and len(self._ranks) > 1 and any(map(_of_end, self._heads())):
                break  # the other ranks may go on: see `_fill_up`
            more = self._more(self.steps)
            if more is None:
                break
            labels, step = zip(*(rank.ready.popleft() for rank in self._ranks), strict=True)
            if self._ending and not any(rank.ready for rank in self._ranks):
                self._saved |= _files_in(itertools.chain(*step))
                more = [*more, *self._written()]
            records.append(self._write(step, more, in_process=not any(labels)))
        return records

    def finish(self, command: Sequence[str], code: int, reason: str = "finished") -> Collected:
        """Write what is left, close the trace where it is whole, and seal it.

        Args:
            command: What ran, for the message.
            code: Its exit code.
            reason: Why it ended, for the trace's closing line.

        Raises:
            ReproError: no step, a rank is missing, nothing was planted, or see `poll`.
        """
        if not self._ranks:
            self._open(self._find(whole=False), command, code)
        if reason != "diverged":  # else it was cut: of what came behind, parts may be missing
            self._refuse()
            all_asked_for(self._find(), self._want, self._others)  # a process may have begun to train when others had
            for rank in self._ranks:
                rank.read()
                rank.close()
            self._ending, self._filled = True, code == 0 and self._fill_up()
            self.poll()
        if self._writer is None:
            raise self._none_whole(code)
        steps, records = self._writer.steps, [rank.end for rank in self._ranks]
        whole = [rank.steps for rank in self._ranks if rank.end and rank.end["steps"] == rank.steps]
        least = max(whole, default=0) if self._filled else min(whole, default=0)
        complete = len(whole) == len(records) and (steps == least == max(whole) or (self._enough() and steps <= least))
        stopped = all(end and end["stopped"] for end in records)
        terminal = read_terminal(self._raw)
        if complete and self._planted and reason != "diverged" and not any(self._raw.glob("planted-*")):
            step, phase, name = self._planted[0]
            raise ReproError(
                f"nothing was planted in {name} ({phase}) of the step that is made as number {step}: it was not met, "
                "as if optimizers stepped in another order than in the golden run; have them step in one order"
            )
        if complete or reason == "diverged":
            closing = {"reason": reason, "ranks": len(self._ranks), "exit": code, "stopped": stopped}
            closing["spent"] = slowest([end["spent"] for end in records if end and "spent" in end])
            closing["machine"] = sorted({name for end in records if end for name in end.get("machine", ())})
            closing["modules"] = sorted({name for end in records if end for name in end["modules"]})
            places = {name: folder for end in records if end for name, folder in end.get("places", {}).items()}
            closing["sources"] = {name: state for name, folder in places.items() if (state := state_of(Path(folder)))}
            notes = map(_read, sorted(self._raw.glob("note-*.json")))
            unread = [_UNTOLD if note is None else note for note in notes]
            unread += [end.get("unread", {}) for end in records if end]
            seen = {name: why for notes in unread for name, why in notes.items()}
            seen |= {**self._unread(), **those_without_a_step(self._ranks, self._note("raised-*"))}
            if self._others:
                seen["a training beside it"] = f"resources.other_ranks = {self._others}"
            closing["unread"] = {name: why for name, why in seen.items() if _plain_file(name) not in self._bytes}
            closing |= {"earlier": earlier} if (earlier := read_in(self._raw)) else {}
            orders = [rank.rounds for rank in self._ranks]
            if any(order != IN_ORDER for rounds in orders for _, order in rounds):
                closing["rounds"] = orders if any(rounds != orders[0] for rounds in orders) else orders[:1]
            self._writer.close(closing | ({"terminal": terminal} if terminal else {}))
        folders = sorted((self._raw / "dumps" / rank.dumps, rank.rounds) for rank in self._ranks)
        take_dumps(folders, self._out, self._first, self._dump)
        self._writer.let_go()
        seal(self._out)
        ignored = sorted({name for end in records if end for name in end.get("ignored", ())})
        unequal = "" if self._filled else self._of_unequal_ranks()
        short = "" if reason == "diverged" else self._failed() or unequal or self._cut(complete)
        return Collected(steps, len(self._ranks), complete, stopped, terminal, ignored, short)

    def close(self) -> None:
        """Let go of the trace's files, whatever became of it."""
        if self._writer:
            self._writer.let_go()

    def _refuse(self) -> None:
        if refused := next(iter(sorted(self._raw.glob("refused-*"))), None):
            raise ReproError(refused.read_text(encoding="utf-8"))

    def _written(self) -> list[Row]:
        """Rows of the files that a program which ended by itself has saved and the recorder has not seen it save."""
        records = [rank.end for rank in self._ranks]
        if self._files is None or not all(end and not end["stopped"] for end in records):
            return []
        stamps = _stamps(self._files)
        content = checkpoint_content(self._files, self._saved)
        content = {name: value for name, value in content.items() if stamps.get(name) != self._given.get(name, ())}
        self._bytes = {PurePath(name).name for name in content}
        return [digest_row("update", f"saved/{name}", value.encode()) for name, value in sorted(content.items())]

    def _failed(self) -> str:
        """What a recorder that ended before its program said of that; "" without one."""
        return self._note("failed-*")

    def _note(self, pattern: str) -> str:
        """The first that a process wrote: a launcher fails after the program that it started."""
        written = sorted(self._raw.glob(pattern), key=lambda path: (path.stat().st_mtime_ns, path))
        notes = (path.read_text(encoding="utf-8") for path in written)
        return next((note for note in notes if note), "")

    def _of_unequal_ranks(self) -> str:
        """What is wrong where ranks recorded different numbers of steps; "" where they did not, or were to stop."""
        made = {rank.about["rank"]: rank.steps for rank in self._ranks}
        if self._enough() or len({*made.values()}) == 1:
            return ""
        unknown = any(rank.end and rank.end.get("failed", False) is None for rank in self._ranks)
        fix = "; end them by sys.exit(CODE): that of a raised SystemExit is not known" if unknown else ""
        steps = ", ".join(f"{made[k]} on rank {k}" for k in sorted(made))
        return f"ranks recorded different numbers of steps: {steps}{fix}"

    def _fill_up(self) -> bool:
        """Whether some ranks made more steps than others, and none was lost; in those, others have only their end.

        A program may train on unequal shares of its data, as with DDP's `Join`.
        """
        made, records = [rank.steps for rank in self._ranks], [rank.end for rank in self._ranks]
        whole = [end["steps"] for end in records if end and end.get("over") and end["failed"] is False]
        if whole != made or len({*made}) == 1:
            return False
        for rank in self._ranks:
            if short := max(made) - rank.steps:
                label, rows = rank.ready.pop() if rank.ready else ("", [])
                late = [row for row in rows if _is_late(row)]
                rank.ready += [(label, [row for row in rows if not _is_late(row)])] * bool(rows)
                rank.ready += [*[("", list[Row]())] * (short - 1), ("", late)]
        return True

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
        labels = {rank.ready[0][0] for rank in self._ranks} - {""}
        return len(labels) > 1 and all(rank.labels == self._ranks[0].labels for rank in self._ranks)

    def _heads(self) -> Iterator[Row]:
        """The rows of the step that is next."""
        return (row for rank in self._ranks for row in rank.ready[0][1])

    def _find(self, *, whole: bool = True) -> list[_Rank]:
        ranks = [_Rank(log) for log in sorted(self._raw.glob("rank-*.log"))]
        return [rank for rank in ranks if rank.about or not whole]

    def _wanted(self, ranks: Sequence[_Rank]) -> int:
        return self._want or max(int(rank.about["world"]) for rank in ranks)

    def _open(self, ranks: list[_Rank], command: Sequence[str] = ("the program",), code: int = 0) -> None:
        if not ranks and code and not self._failed():
            raised = self._note("raised-*") or "its own output says why"
            raise ReproError(f"{command[0]} failed before its first optimizer step (exit code {code}): {raised}")
        if not ranks:
            why = self._failed() or self._note("idle-*") or unseen_for(command, self._root)
            raise ReproError(f"no optimizer step was seen in {command[0]} (exit code {code}): {why}")
        if not all(rank.about for rank in ranks):
            raise self._none_whole(code)
        self._ranks = all_asked_for(ranks, self._want, self._others)

    def _write(self, ranks: Sequence[Sequence[Row]], more: Sequence[Row], *, in_process: bool) -> StepRecord:
        if self._writer is None:
            seen = (max if self._filled else min)(rank.steps for rank in self._ranks)
            seen = seen if self._most is None else min(seen, self._most)
            header = self._header(told_of_all(self._ranks), seen)
            self._writer, self._first = TraceWriter(self._out, header, sealing=True), header.first_step
        rows = itertools.chain(merge_rows(ranks, everywhere=in_process), more)
        compared, shown = [], dict[str, float]()
        for row in rows:
            if not row.name.startswith(SHOWN):
                compared.append(row)
            elif row.dtype == METRIC:
                shown[row.name.removeprefix(SHOWN)] = number_of(row)
        self._saved |= _files_in(itertools.chain(*ranks))
        return self._writer.write(_under_other_names(compared), shown)


def _under_other_names(rows: Iterable[Row]) -> Iterator[Row]:
    """Rows without two of one name: a program may show what was read under names that were taken."""
    metrics, others = dict[str, float](), set[tuple[str, str]]()
    for row in rows:
        if row.dtype == METRIC:  # the program may log a number under the name of one that was read
            number = number_of(row)
            if same_float(metrics.get(row.name), number):
                continue
            if row.name in metrics:
                row = replace(row, name=f"{row.name}#logged")
            metrics[row.name] = number
        while (row.phase, row.name) in others:  # what the program shows under the name of what was read
            row = replace(row, name=f"{row.name}.again")
        others.add((row.phase, row.name))
        yield row


def _of_the_first(ranks: Sequence[_Rank]) -> bool:
    return {rank.about["rank"] for rank in ranks} == set(range(len(ranks)))


def _is_late(row: Row) -> bool:
    """Whether it may be of what a rank did when it had made its last step."""
    return _of_end(row) or family(row.phase, row.name) == "saved"


def _of_end(row: Row) -> bool:
    return row.name.startswith("end/")


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
    rows = [
        ("-".join(path.stem.split("-")[:2]), name, value)  # without a process's number
        for path in raw.glob("rank-*.terminal")
        for name, value in (_read(path) or {}).items()
    ]
    terminal: dict[str, str] = {}
    for rank, name, value in sorted(rows):
        key = f"{rank}/{name}"
        while key in terminal:  # of another training's rank
            key += ".again"
        terminal[key] = value
    return terminal


_UNTOLD = {"what a process could not tell": "its note was not written whole"}


def _read(path: Path) -> Any:
    """The JSON of a file; None where the disk was full or the process killed before it was whole."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
