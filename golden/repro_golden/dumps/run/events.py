"""Miles' event log (``events/*.jsonl``): metrics, checksums of weights and optimizer state, advantages.

The files are read while they grow. Lines of checksums are long; only where they lie is kept, and they are read again
when they are asked for.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from repro_golden.base.canonical import canonical_json, same_float
from repro_golden.base.errors import ReproError
from repro_golden.base.files import open_regular
from repro_golden.dumps.archive.bounds import shown
from repro_golden.dumps.run.records import digest_of, number_of, parsed

__all__ = ["Event", "EventLog", "checksums", "engine_checksums", "witness_advantages"]

_KEPT = ("train_engine_local_weight_checksum", "inference_engine_weight_checksum", "train_advantage_computation")
_SKIPPED = (
    "witness_snapshot_param", "witness_allocate_id", "train_group_step_end", "cell_reconfigure",
)  # fmt: skip
_LINE = 1 << 30
_COUNTS = 10**18


@dataclass(frozen=True)
class Event:
    """Where one event lies.

    Attributes:
        kind: Its type.
        rollout: The rollout it belongs to; None before the first.
        attempt: How often the rollout's training had been started before.
        source: Of which process: ``component``, ``cell_index``, ``rank_within_cell``.
        path: The file.
        offset: Where its line begins, in bytes.
        length: Of its line, in bytes.
    """

    kind: str
    rollout: int | None
    attempt: int
    source: tuple[str, int, int]
    path: Path
    offset: int
    length: int

    def read(self) -> dict[str, Any]:
        """The whole event.

        Raises:
            ReproError: the file has changed since.
        """
        try:
            with open_regular(self.path) as file:
                file.seek(self.offset)
                raw = file.read(self.length)
        except OSError as error:
            raise ReproError(f"{self.path} cannot be read: {error.strerror}") from None
        value = parsed(raw, f"{self.path} at byte {self.offset}")
        if not isinstance(value, dict) or value.get("type") != self.kind:
            raise ReproError(f"{self.path} has changed under its reader: read it again")
        return value


@dataclass
class _File:
    path: Path
    offset: int = 0
    line: int = 0
    size: int = -1
    torn: bool = False


@dataclass
class EventLog:
    """All files of a folder of events.

    Attributes:
        folder: The folder; it need not exist yet.
        events: What was found so far, file by file.
        steps: Metrics by the update's number (``train/step``), as the trainer names them.
        rollouts: Metrics of rollouts by the rollout's number (``rollout/...`` and the like).
        problems: What is worth a warning.
    """

    folder: Path
    events: list[Event] = field(default_factory=list)
    steps: dict[int, dict[str, float]] = field(default_factory=dict)
    rollouts: dict[int, dict[str, float]] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._files: dict[Path, _File] = {}
        self._unknown: set[str] = set()
        self._attempts: dict[int, int] = {}
        self._told: dict[tuple[int, str], float] = {}  # the last value of each name

    @property
    def torn(self) -> list[Path]:
        """Files whose last line has no end yet."""
        return [file.path for file in self._files.values() if file.torn]

    def read(self) -> None:
        """Take the whole lines that were written since.

        Raises:
            ReproError: a line that is no event.
        """
        paths = sorted(self.folder.glob("**/*.jsonl")) if self.folder.is_dir() else []
        if any(self._was_put_back(path) for path in paths):  # Miles does so with a checkpoint's log when it resumes
            self.events, self.steps, self.rollouts = [], {}, {}
            self._files, self._attempts, self._told = {}, {}, {}
        for path in paths:
            file = self._files.setdefault(path, _File(path))
            try:
                size = path.stat().st_size
                if size != file.size:
                    self._more(file)
                    file.size = size
            except OSError as error:
                raise ReproError(f"{path} cannot be read: {error.strerror}") from None

    def _was_put_back(self, path: Path) -> bool:
        try:
            return path in self._files and path.stat().st_size < self._files[path].offset
        except OSError as error:
            raise ReproError(f"{path} cannot be read: {error.strerror}") from None

    def _more(self, file: _File) -> None:
        with open_regular(file.path) as stream:
            stream.seek(file.offset)
            while True:
                raw = stream.readline(_LINE)
                file.torn = bool(raw) and not raw.endswith(b"\n")
                if not raw or file.torn:
                    if len(raw) >= _LINE:
                        raise ReproError(f"{file.path} line {file.line + 1} is longer than {_LINE >> 20} MiB")
                    return
                file.line += 1
                if raw.strip():
                    self._take(file, raw)
                file.offset += len(raw)

    def _take(self, file: _File, raw: bytes) -> None:
        where = f"{file.path} line {file.line}"
        value = parsed(raw, where)
        kind = value.get("type") if isinstance(value, dict) else None
        if not isinstance(kind, str):
            raise ReproError(f"{where} is no event: it has no type")
        if kind == "metric":
            self._metrics(value, where)
        elif kind in _KEPT:
            rollout, attempt = _rollout_of(value, where)
            self.events.append(Event(kind, rollout, attempt, _source(value), file.path, file.offset, len(raw)))
        elif kind not in _SKIPPED and kind not in self._unknown:
            self._unknown.add(kind)
            self.problems.append(f"{file.path.name} has events of type {kind[:60]!r}, which are not read")

    def _metrics(self, value: Mapping[str, Any], where: str) -> None:
        metrics = value.get("metrics")
        if not isinstance(metrics, dict):
            raise ReproError(f"{where}: its metrics are no JSON object")
        # what is not finite is written as null
        numbers = {name: math.nan if v is None else number_of(v) for name, v in metrics.items()}
        values = {name: v for name, v in numbers.items() if v is not None}
        step, (rollout, attempt) = metrics.get("train/step"), _rollout_of(value, where)
        if type(step) is int:
            self._merge(self.steps, _count(step, "train/step", where), values, attempt)
        elif rollout is not None and "rollout/step" in metrics:
            self._merge(self.rollouts, rollout, values, attempt)

    def _merge(self, into: dict[int, dict[str, float]], number: int, values: dict[str, float], attempt: int) -> None:
        """Of several attempts the last one counts; what one of them tells again otherwise is ``NAME#1`` and so on."""
        key = number if into is self.steps else -1 - number
        if attempt > self._attempts.get(key, 0):
            into.pop(number, None)
            self._told = {place: value for place, value in self._told.items() if place[0] != key}
        self._attempts[key] = max(attempt, self._attempts.get(key, 0))
        if attempt == self._attempts[key]:
            known = into.setdefault(number, {})
            for name, value in values.items():
                last = self._told.get((key, name))
                if last is None or not same_float(last, value):
                    taken = known.keys() | (values.keys() - {name})
                    again = (f"{name}#{k}" for k in itertools.count(1))
                    known[next(free for free in itertools.chain([name], again) if free not in taken)] = value
                self._told[key, name] = value

    def of(self, kind: str, rollout: int | None) -> list[Event]:
        """The events of one type and rollout, of the last attempt that made any."""
        events = [event for event in self.events if event.kind == kind and event.rollout == rollout]
        last = max((event.attempt for event in events), default=0)
        return [event for event in events if event.attempt == last]


def _rollout_of(value: Mapping[str, Any], where: str) -> tuple[int | None, int]:
    """An event's rollout, None before the first, and attempt, which a metric may leave open.

    Raises:
        ReproError: they are no counts.
    """
    rollout, attempt = value.get("rollout_id"), value.get("attempt")
    return (
        None if rollout is None else _count(rollout, "rollout_id", where),
        0 if attempt is None else _count(attempt, "attempt", where),
    )


def _count(value: Any, name: str, where: str) -> int:
    if type(value) is not int or not 0 <= value < _COUNTS:
        raise ReproError(f"{where}: {name} is {shown(value)}, no count")
    return value


def _source(value: Mapping[str, Any]) -> tuple[str, int, int]:
    source = value.get("source")
    if not isinstance(source, dict):
        return "", 0, 0
    cell, rank = source.get("cell_index"), source.get("rank_within_cell")
    return str(source.get("component", "")), cell if type(cell) is int else 0, rank if type(rank) is int else 0


def checksums(event: Event) -> dict[str, bytes]:
    """The SHA-256 of each tensor of a rank after an update.

    Parameters stand under their names, buffers under ``buffer/NAME``, optimizer state under ``NAME/exp_avg`` and the
    like, and what an optimizer holds beside it (learning rates, betas) as one digest, ``optimizer.K/param_groups``.

    Raises:
        ReproError: it is no such event.
    """
    value = event.read()
    state = value.get("state")
    if not isinstance(state, dict):
        raise ReproError(f"{event.path} at byte {event.offset}: a checksum event without state")
    digests: dict[str, bytes] = {}
    for prefix, part in (("", "param_hashes"), ("buffer/", "buffer_hashes")):
        _put(digests, prefix, state.get(part) or {}, event)
    optimizers = state.get("optimizer_hashes")
    for number, optimizer in enumerate(optimizers if isinstance(optimizers, list) else ()):
        if isinstance(optimizer, dict):
            _optimizer(digests, number, optimizer, event)
    return digests


def _optimizer(digests: dict[str, bytes], number: int, optimizer: Mapping[str, Any], event: Event) -> None:
    names, held = optimizer.get("param_names"), optimizer.get("state_dict")
    if not isinstance(names, dict) or not isinstance(held, dict):
        raise ReproError(f"{event.path} at byte {event.offset}: an optimizer without param_names or state_dict")
    states = held.get("state")
    for index, state in (states if isinstance(states, dict) else {}).items():
        name = names.get(str(index), f"optimizer.{number}/{index}")
        if isinstance(state, dict):
            _put(digests, f"{name}/", state, event)
    for key, value in held.items():
        if key != "state":
            digests[f"optimizer.{number}/{key}"] = _digest(value)


def _put(digests: dict[str, bytes], prefix: str, hashes: Any, event: Event) -> None:
    if not isinstance(hashes, dict):
        raise ReproError(f"{event.path} at byte {event.offset}: hashes must be a JSON object")
    for name, text in hashes.items():
        raw = digest_of(text)
        digests[prefix + name] = _digest(text) if raw is None else raw


def _digest(value: Any) -> bytes:
    """Of what the trainer wrote as it is: numbers are no hashes, and yet may change."""
    try:
        return hashlib.sha256(canonical_json(value).encode()).digest()
    except (ValueError, RecursionError):  # NaN has no JSON
        return hashlib.sha256(repr(value).encode()).digest()


def engine_checksums(event: Event) -> list[dict[str, bytes]]:
    """By rollout engine the hash of each of its tensors.

    Raises:
        ReproError: it is no such event.
    """
    engines = event.read().get("engine_checksums")
    if not isinstance(engines, list):
        raise ReproError(f"{event.path} at byte {event.offset}: an event without engine_checksums")
    by_engine: list[dict[str, bytes]] = []
    for hashes in engines:
        digests: dict[str, bytes] = {}
        _put(digests, "", hashes, event)
        by_engine.append(digests)
    return by_engine


def witness_advantages(events: Sequence[Event]) -> dict[tuple[str, int, int], list[tuple[int, list[float]]]]:
    """Advantages as ranks computed them: by rank the witness number of each sample and its part's values.

    Raises:
        ReproError: they are no such events.
    """
    by_rank: dict[tuple[str, int, int], list[tuple[int, list[float]]]] = {}
    for event in events:
        value = event.read()
        advantages, ids = value.get("advantages"), value.get("witness_ids")
        if not isinstance(advantages, list) or not isinstance(ids, list) or len(advantages) != len(ids):
            raise ReproError(
                f"{event.path} at byte {event.offset}: advantages and witness_ids must be lists of samples"
            )
        for part, witness in zip(advantages, ids, strict=True):
            numbers = [math.nan if v is None else number_of(v) for v in part] if isinstance(part, list) else [None]
            number = witness[0] if isinstance(witness, list) and witness else -1
            if any(v is None for v in numbers) or type(number) is not int:
                raise ReproError(f"{event.path} at byte {event.offset}: advantages must be numbers")
            by_rank.setdefault(event.source, []).append((number, [v for v in numbers if v is not None]))
    return by_rank
