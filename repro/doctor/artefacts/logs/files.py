"""Log files and folders of them, read once: the lines that rules look for, metrics, and printed arguments."""

from __future__ import annotations

import codecs
import functools
import gzip
import io
import json
import math
import os
import re
import shutil
import stat
import tempfile
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from repro.doctor.artefacts.kinds import Log, Metrics, Reader, Series
from repro.doctor.artefacts.logs.asides import MARKS, Samples
from repro.doctor.artefacts.logs.records import ANCHORS, losses_and_norms
from repro.doctor.artefacts.logs.scan import Scan, Taker, safe, scan
from repro_golden.base.errors import ReproError
from repro_golden.base.printed.lines import labelled

__all__ = ["log_files", "log_reader", "read_log", "session_reader"]

_HEAD = 64 << 10
_METRICS = 50_000
"""Lines of metrics that are kept of one log: the first in the form of slime and Miles; in others the first that are not
finite, and the last that are."""

_UNPACKED = 1 << 36
"""Bytes that a gzip file may unpack to."""

_FILES, _DEPTH = 5000, 5
"""Log files of one folder, and how far below it they are looked for."""

_ANCHORS = (": {'", ': {"')
"""What every line that `labelled` reads holds, and few others."""

_ARGUMENT = " ......"
_ARGUMENT_LINE = re.compile(r"(?:^|\s)([A-Za-z_]\w{0,99}) \.{6,} ?(.*)$")
_LABEL = re.compile(rb"(?:step|rollout|multi_turn|passrate|perf|eval) [0-9]{1,18}$")
_STEP = re.compile(r"(?:^|\s)step:(\d{1,18}) - ")
"""How verl begins the metrics of an optimizer step."""
_KEPT_PREFIXES = ("train/", "rollout/")

_NAME = re.compile(r"\.(?:log|out|err|stdout|stderr)(?:[.-]?\d+)*(?:\.gz)?$", re.IGNORECASE)
_MAYBE = re.compile(r"(?:^[^.]+|\.txt|\.\d+)(?:\.gz)?$", re.IGNORECASE)
_LIKE = re.compile(
    rb"^.{0,40}?\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d|^.{0,40}?\b(?:INFO|WARNING|ERROR|CRITICAL)\b"
    rb"|^Traceback \(most recent call last\):|^\(\w+ pid=\d+|(?:step|rollout) \d+: \{|^:(?:job_id|actor_name):"
    rb"|^\s*[\w.]+(?:Error|Exception|Warning): |\[rank\d+\]",
    re.MULTILINE,
)
_RAY_FILE = re.compile(
    r"(?:worker-|python-core-|job-driver-|raylet|gcs_server|monitor|log_monitor|runtime_env|dashboard)"
)
_RANK_NAME = re.compile(r"(?:^|[^a-z])rank[_-]?(\d{1,6})(?!\d)", re.IGNORECASE)
_RANK_LINE = re.compile(rb"(?:\[|[ _])rank(\d{1,6})\]|\bRANK=(\d{1,6})\b")
_MAGIC = (b"PK\x03\x04", b"\x7fELF", b"\x80\x02", b"\x80\x04", b"\x89HDF", b"PAR1", b"\x93NUMPY", b"SQLite format")


def read_log(path: Path, sought: Sequence[str], explained: Sequence[str] = ()) -> Log:
    """Read a log file, gzip or plain, once.

    Args:
        path: The file.
        sought: What to look for.
        explained: See `Log`.

    Raises:
        ReproError: it can not be read, or its gzip is corrupt.
    """
    numbers, samples = _Numbers(path), Samples()
    takers: dict[str, Taker] = dict.fromkeys(ANCHORS, numbers.others)
    takers |= dict.fromkeys(MARKS, samples.mark)
    takers |= dict.fromkeys(_ANCHORS, numbers.metrics) | {_ARGUMENT: numbers.argument}
    with _opened(path) as file:
        scanned = scan(_Bounded(file, path), sought, takers=takers, shown=samples.opened)
    return Log(
        path=path,
        size=scanned.size,
        lines=scanned.lines,
        hits={
            phrase: tuple(hit._replace(aside="shown") if samples.hold(hit.line, hit.text) else hit for hit in hits)
            for phrase, hits in scanned.hits.items()
        },
        counts=scanned.counts,
        series=numbers.series(),
        metrics=numbers.of_others(),
        rank=_rank(path),
        explained=tuple(explained),
        around=functools.partial(_around, path, scanned),
    )


class _Numbers:
    """Gathers metrics and arguments from lines."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._steps: dict[int, dict[str, float]] = {}
        self._rollouts: dict[int, dict[str, float]] = {}
        self._lines: dict[tuple[str, int], int] = {}
        self._flags: dict[str, str] = {}
        self._read = 0
        self._finite: OrderedDict[int, dict[str, float]] = OrderedDict()
        self._not_finite: dict[int, dict[str, float]] = {}
        self._seen = 0

    def metrics(self, number: int, line: bytes) -> None:
        """A line that may be a labelled one."""
        at = min((at for at in (line.find(a.encode()) for a in _ANCHORS) if at >= 0), default=-1)
        # colours that lost their escape character may stand between the label and its number
        if at < 0 or not (_LABEL.search(line, max(at - 40, 0), at) or b"m" in line[max(at - 8, 0) : at]):
            at = line.rfind(b" - ")
            if at < 0 or not re.match(rb" - (?:critic-)?\w+ \d+: \{", line[at : at + 60]):
                return
        if self._read >= _METRICS:
            return
        self._read += 1
        text = line.decode("utf-8", "replace").rstrip("\r").rpartition("\r")[2]
        record = labelled(text)
        if record is None:
            return
        self._seen = number
        kind = "step" if record.label == "step" else "rollout"
        table = self._steps if kind == "step" else self._rollouts
        row = table.setdefault(record.number, {})
        for name, value in record.metrics.items():
            for prefix in _KEPT_PREFIXES:
                name = name.removeprefix(prefix)
            if record.role == "critic" and not name.startswith("critic-"):
                name = f"critic-{name}"
            row.setdefault(name, value)  # where a run was started again below itself, the first one
        self._lines.setdefault((record.label, record.number), number)

    def others(self, number: int, line: bytes) -> None:
        """A line that may hold a loss or a gradient norm in another form."""
        if number == self._seen:
            return
        self._seen = number
        text = line.decode("utf-8", "replace").rstrip("\r").rpartition("\r")[2]
        metrics = losses_and_norms(text)
        if metrics and (match := _STEP.search(text)):
            self._lines.setdefault(("step", int(match[1])), number)
        if metrics and all(map(math.isfinite, metrics.values())):
            self._finite[number] = metrics
            if len(self._finite) > _METRICS:
                self._finite.popitem(last=False)
        elif metrics and len(self._not_finite) < _METRICS:
            self._not_finite[number] = metrics

    def argument(self, _number: int, line: bytes) -> None:
        """A line that may be one of Megatron's arguments."""
        match = _ARGUMENT_LINE.search(safe(line))
        if match and len(self._flags) < 5000:
            self._flags.setdefault(match[1], match[2].strip())

    def series(self) -> Series:
        """All of them."""
        return Series(self._path, self._steps, self._rollouts, self._lines, self._flags)

    def of_others(self) -> Metrics:
        """Those of lines in other forms."""
        return Metrics(self._path, dict(sorted((self._finite | self._not_finite).items())), flags=self._flags)


class _Bounded:
    """A stream whose errors are one line of ours."""

    def __init__(self, file: io.RawIOBase | gzip.GzipFile, path: Path) -> None:
        self._file, self._path, self._left = file, path, _UNPACKED

    def readinto(self, buffer: memoryview, /) -> int:
        try:
            count = self._file.readinto(buffer) or 0
        except (OSError, EOFError, zlib.error) as error:
            raise ReproError(f"{self._path} cannot be read to its end: {_reason(error)}") from None
        self._left -= count
        if self._left < 0 and isinstance(self._file, gzip.GzipFile):
            raise ReproError(f"{self._path} unpacks to more than {_UNPACKED >> 30} GiB")
        return count


def _reason(error: BaseException) -> str:
    return getattr(error, "strerror", None) or safe(str(error).encode("utf-8", "replace"))


@contextmanager
def _opened(path: Path) -> Iterator[io.RawIOBase | gzip.GzipFile]:
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise ReproError(f"{path} is no file")
        raw = path.open("rb", buffering=0)
    except (OSError, ValueError) as error:
        raise ReproError(f"cannot read {path}: {_reason(error)}") from None
    with raw:
        head = raw.read(2) or b""
        raw.seek(0)
        if head == b"\x1f\x8b":
            with gzip.GzipFile(fileobj=io.BufferedReader(raw, 1 << 20)) as packed:
                yield packed
        elif head in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):  # as some shells write what they redirect
            with tempfile.TemporaryFile(buffering=0) as text:
                buffered = io.BufferedReader(raw)
                shutil.copyfileobj(codecs.EncodedFile(buffered, "utf-8", "utf-16", "replace"), text)
                buffered.detach()
                text.seek(0)
                yield text
        else:
            yield raw


def _around(path: Path, scanned: Scan, first: int, last: int) -> list[str]:
    """Lines `first` to `last` of a file, at most a thousand, each cut as `safe` does."""
    first, last = max(first, 1), min(last, scanned.lines, first + 999)
    line, offset = max((mark for mark in scanned.marks if mark[0] <= first), default=(1, 0))
    lines: list[str] = []
    try:
        with _opened(path) as file:
            stream = io.BufferedReader(file, 1 << 18) if isinstance(file, io.RawIOBase) else file
            stream.seek(offset)
            while line <= last:
                piece = stream.readline(_HEAD)
                if not piece:
                    break
                if line >= first:
                    lines.append(safe(piece))
                while piece and not piece.endswith(b"\n"):
                    piece = stream.readline(_HEAD)
                line += 1
    except (OSError, EOFError, zlib.error) as error:
        raise ReproError(f"{path} cannot be read again: {_reason(error)}") from None
    return lines


def _rank(path: Path) -> int | None:
    """Of the process, by the file's name or the prefixes of its first lines; None where they name several."""
    named = _RANK_NAME.search(path.name)
    if named:
        return int(named[1])
    ranks = {int(m[1] or m[2]) for m in _RANK_LINE.finditer(_head(path))}
    return ranks.pop() if len(ranks) == 1 else None


def _head(path: Path) -> bytes:
    """The first 64 KiB, unpacked; empty where they can not be read."""
    try:
        with _opened(path) as file:
            return file.read(_HEAD) or b""
    except (OSError, EOFError, zlib.error, ReproError):
        return b""


def _fits(path: Path) -> bool:
    if not path.is_file():
        return False
    named, maybe = _NAME.search(path.name), _MAYBE.search(path.name)
    if not named and not maybe:
        return False
    head = _head(path)
    if head.startswith(_MAGIC) or head.count(b"\0") * 4 > len(head):
        return False
    if named:
        return True
    return bool(not head.startswith(b"#!") and not _is_json(head) and _LIKE.search(head))


def _is_json(head: bytes) -> bool:
    first = head.lstrip().partition(b"\n")[0]
    if first[:1] not in (b"{", b"["):
        return False
    try:
        json.loads(first)
    except (ValueError, RecursionError):
        return first.strip() in (b"{", b"[")
    return True


def _artefacts(log: Log) -> Iterator[object]:
    yield log
    if log.series.steps or log.series.rollouts:
        yield log.series
    if log.metrics.steps:
        yield log.metrics


def log_files(folder: Path) -> list[Path]:
    """The log files below a folder, at most 5000, none through links to folders; rotated ones too."""
    paths: list[Path] = []
    depth = len(folder.parts)
    for root, folders, files in os.walk(folder):
        if len(Path(root).parts) - depth >= _DEPTH:
            folders.clear()
        folders.sort()
        for name in sorted(files):
            path = Path(root, name)
            if _NAME.search(name) and _fits(path):
                paths.append(path)
                if len(paths) == _FILES:
                    return paths
    return paths


def _names(path: Path) -> list[str]:
    try:
        with os.scandir(path) as entries:
            return [entry.name for entry, _ in zip(entries, range(20_000), strict=False)]
    except OSError:
        return []


def _fits_session(path: Path) -> bool:
    if not path.is_dir():
        return False
    logs = path / "logs"
    inside = _names(logs) if logs.is_dir() else _names(path) if path.name == "logs" else []
    return any(_RAY_FILE.match(name) and _NAME.search(name) for name in inside)


def log_reader(read: Callable[[Path], Log]) -> Reader:
    """Of files, by what reads one of them."""
    return Reader("log", _fits, lambda path: _artefacts(read(path)))


def session_reader(read: Callable[[Path], Log]) -> Reader:
    """Of the folders of Ray's sessions, likewise."""

    def all_of(folder: Path) -> Iterator[object]:
        failed: list[ReproError] = []
        for file in log_files(folder):
            try:
                yield from _artefacts(read(file))
            except ReproError as error:
                failed.append(error)
        if failed:  # only now, so that one file does not hide the others
            raise failed[0]

    return Reader("Ray session", _fits_session, all_of)
