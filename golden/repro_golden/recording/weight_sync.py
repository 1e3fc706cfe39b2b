"""Whether weights arrived: what the trainer has against what the rollout engine holds, after every sync.

The trainer shows both sides (``sync`` of its interface); nothing is gathered. Every process fingerprints its own part,
the parts add up, and fused or sharded tensors of the engine are taken apart by their placements. Equality is exact.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from repro_golden.base.canonical import digest, write_atomic
from repro_golden.base.errors import ReproError
from repro_golden.fingerprint import fingerprint
from repro_golden.fingerprint.placement import read
from repro_golden.recording.rank_group import RankGroup
from repro_golden.recording.weight_pieces import Held, Piece, Whole, canonical_tensors, join, pieces

__all__ = ["Sync", "SyncJudge", "differing", "told"]

_VERSIONS = 8
"""Older versions of the weights whose fingerprints are remembered."""
_judges = itertools.count()


@dataclass(frozen=True)
class Sync:
    """One sync, as it went.

    Attributes:
        version: The weights' version.
        how: ``start``, ``tensor`` or ``disk``.
        seconds: How long it took, the judgement not counted.
        nbytes: Bytes of all canonical tensors.
        before: The version before it; None for the first.
        given: What the engine should hold, by canonical name.
        changed: The tensors that differ from the sync before, in order; all of the first.
        wrong: How many are not what they should be.
    """

    version: str
    how: str
    seconds: float
    nbytes: int
    before: str | None
    given: Mapping[str, Whole]
    changed: tuple[str, ...]
    wrong: int


class SyncJudge:
    """Sees every weight sync of a run, and raises on every process in `end` when weights did not arrive.

    Attributes:
        digest: A fingerprint over all canonical tensors that the engine holds, the same on every process; empty before
            the first sync.
        last: The last sync, on rank 0.
        number: How many syncs were begun.
    """

    def __init__(self, rank_group: RankGroup | None, say: Callable[[str], None], limit: int | None = None) -> None:
        """Judge for one process, or for each of several.

        Args:
            rank_group: The processes that call it alike; None for one alone.
            say: Receives the lines of `report`, on rank 0.
            limit: How many of the tensors that changed each report names; None reports nothing.
        """
        self._rank_group, self._say, self._limit = rank_group, say, limit
        self._rank = rank_group.rank if rank_group else 0
        self._judge, self.number = next(_judges), 0
        self.digest = ""
        self.last: Sync | None = None
        self._held_before: tuple[str, dict[str, str]] = ("", {})
        self._versions: list[tuple[str, dict[str, str]]] = []
        self._buffers: dict[str, tuple[str, str]] = {}
        self._open("", "")

    def alone(self) -> None:
        """From here on this process syncs by itself: the other ranks take no part."""
        self._rank_group = None

    def begin(self, version: str, how: str) -> None:
        """A sync begins: ``start`` (what the engine read itself, against the checkpoint), ``tensor`` or ``disk``."""
        self.number += 1
        self._open(version, how)

    def sent(self, tensors: Mapping[str, Tensor], placements: Mapping[str, Any] | None) -> None:
        """What this process has of the weights, in the engine's dtype; unchanged until `end`. Called once or more.

        Placements are by key; None where the tensors are whole, under canonical names. What is wrong with them is told
        by `end`, on every process.
        """
        self._sent.append((tensors, placements))
        self._read(lambda: self._given.extend(pieces(tensors, placements, self._holder)))

    def received(self, held: Held) -> None:
        """What one process of the engine holds; on rank 0 alone."""
        process = len(self._received)
        self._received.append(held)
        parts = {name: tensor for name, tensor in held.tensors.items() if name in held.placements}
        unplaced = {name: tensor for name, tensor in held.tensors.items() if name not in held.placements}
        holder = f"{{}} of engine process {process}"
        self._read(lambda: self._got.extend(pieces(parts, held.placements, holder)))
        self._read(lambda: self._own.extend(pieces(unplaced, None, holder)))

    def end(self, seconds: float) -> None:
        """The sync is over, after so many seconds.

        Raises:
            ReproError: on every process: weights did not arrive, or cannot be told, with their names and what is wrong.
        """
        first = self._agreed("sent", self._given, lambda sent: self._compare(sent, seconds))
        message, self.digest = first["message"], first["digest"]
        if first["doubtful"]:
            doubtful = frozenset(first["doubtful"])
            self._trouble.clear()
            casts: list[Piece] = []
            self._read(lambda: casts.extend(self._cast(doubtful)))
            message = self._agreed("casts", casts, self._explain)["message"]
        if self._limit is not None:
            for line in self.report(self._limit):
                self._say(line)
        self._open("", "")
        if message is not None:
            raise ReproError(message)

    def report(self, limit: int) -> list[str]:
        """Lines about the last sync, with at most `limit` of the tensors that changed; on rank 0, elsewhere none."""
        sync = self.last
        if sync is None:
            return []
        came = "all arrived" if not sync.wrong else f"{sync.wrong} did not arrive"
        since = "" if sync.before is None else f", {len(sync.changed)} changed since {sync.before!r}"
        lines = [
            f"weights {sync.version!r} ({sync.how}): {len(sync.given)} tensors, {sync.nbytes} bytes "
            f"in {sync.seconds:.3f} s{since}, {came}, digest {self.digest}"
        ]
        for name in sync.changed[:limit]:
            w = sync.given[name]
            lines.append(f"  {name} {w.dtype} {list(w.shape)} absmax {w.absmax!r} {w.fingerprint}")
        if len(sync.changed) > limit:
            lines.append(f"  and {len(sync.changed) - limit} more")
        return lines

    @property
    def _holder(self) -> str:
        return f"rank {self._rank} of the trainer" if self._how != "start" else "the checkpoint"

    def _open(self, version: str, how: str) -> None:
        self._version, self._how = version, how
        self._sent: list[tuple[Mapping[str, Tensor], Mapping[str, Any] | None]] = []
        self._received: list[Held] = []
        self._given: list[Piece] = []
        self._got: list[Piece] = []
        self._own: list[Piece] = []
        self._trouble: list[str] = []
        self._faults: _Faults | None = None
        self._kinds: list[tuple[str, str | None]] = []

    def _read(self, read: Callable[[], None]) -> None:
        """Read tensors; what is wrong with them must wait until every process can hear of it."""
        try:
            read()
        except ReproError as error:
            self._trouble.append(str(error))

    def _compare(self, pieces_given: list[Piece], seconds: float) -> dict[str, Any]:
        """On rank 0: whether both sides agree, and of which tensors more must be known."""
        given, parted_given = join(pieces_given)
        held, parted_held = join(self._got)
        parted = sorted([*parted_given.items(), *parted_held.items()])
        names = [name for name in differing(given, held) if name not in parted_given and name not in parted_held]
        before, old = self._held_before, self._versions[-1] if self._versions else None
        self._faults = faults = _Faults(given, held, self._how == "start", before, self._versions[:], self._value)
        self._kinds = [*parted, *((name, faults.kind(name)) for name in names)]
        buffers = self._changed_buffers()
        self._kinds += buffers
        now = {name: whole.fingerprint for name, whole in given.items()}
        changed = tuple(sorted(name for name, mark in now.items() if old is None or old[1].get(name) != mark))
        nbytes = sum(whole.nbytes for whole in given.values())
        self.last = Sync(
            self._version, self._how, seconds, nbytes, old[0] if old else None, given, changed, len(self._kinds)
        )
        self._versions = [*self._versions, (self._version, now)][-_VERSIONS:]
        self._held_before = (self._version, {name: whole.fingerprint for name, whole in held.items()})
        marks = sorted((name, whole.fingerprint) for name, whole in held.items())
        doubtful = [name for name, kind in self._kinds if kind is None]
        return {
            "message": None if doubtful else self._message(),
            "digest": digest("weights", *itertools.chain.from_iterable(marks)),
            "doubtful": doubtful,
        }

    def _explain(self, casts: list[Piece]) -> dict[str, Any]:
        """On rank 0: what is wrong with the tensors of which `_compare` could not tell."""
        assert self._faults is not None
        wholes, _ = join(casts)
        rounded: dict[str, dict[str, str]] = {dtype: {} for dtype in _CASTS}
        for key, whole in wholes.items():
            dtype, _, name = key.partition("/")
            rounded[dtype][name] = whole.fingerprint
        known = replace(self._faults, rounded=rounded)
        self._kinds = [(name, known.last(name) if kind is None else kind) for name, kind in self._kinds]
        return {"message": self._message()}

    def _message(self) -> str | None:
        """The line that every process raises; None where everything arrived."""
        kinds = [(name, kind or "") for name, kind in self._kinds]
        if not kinds:
            return None
        assert self.last is not None
        stale = {name for name, kind in kinds if kind.startswith("stale: the engine still")}
        if len(stale) > 1 and stale >= set(self.last.changed) and self._how != "start":
            lead = f"weights {self._version!r} did not arrive at all ({self._how})"
        elif self._how == "start":
            lead = f"weights {self._version!r} that the engine read itself are not those of its checkpoint"
        else:
            lead = f"weights {self._version!r} did not arrive whole ({self._how})"
        return f"{lead}: {told(kinds)}"

    def _changed_buffers(self) -> list[tuple[str, str]]:
        """The engine's own tensors that are no longer what they were when they were first seen, or no longer there."""
        here = {piece.holder for piece in self._own}
        changed = [
            (holder, f"a buffer that is gone since it was first seen (version {version!r})")
            for holder, (version, _) in self._buffers.items()
            if holder not in here
        ]
        for piece in self._own:
            mark = piece.share.fingerprint
            version, first = self._buffers.setdefault(piece.holder, (self._version, mark))
            if mark != first:
                zero = ", and is all zero" if piece.absmax == 0 and not piece.nonfinite else ""
                changed.append(
                    (piece.holder, f"a buffer that has changed since it was first seen (version {version!r}){zero}")
                )
        return changed

    def _value(self, name: str) -> Tensor | None:
        return canonical_tensors(self._received, {name}).get(name)

    def _cast(self, names: frozenset[str]) -> list[Piece]:
        """This process's part of what doubtful tensors would be if they had been rounded on the way."""
        casts: list[Piece] = []
        for tensors, placements in self._sent:
            for name, tensor in tensors.items():
                where = None if placements is None else {name: placements[name]}
                held = {name} if where is None else {part.name for part in read(where[name]).parts}
                if not held & names or not tensor.is_floating_point() or tensor.itemsize <= 2:
                    continue
                for dtype in _CASTS:
                    cast = tensor.to(getattr(torch, dtype)).to(tensor.dtype)
                    parts = pieces({name: cast}, where, self._holder)
                    casts += [replace(piece, name=f"{dtype}/{piece.name}") for piece in parts if piece.name in names]
        return casts

    def _agreed(self, what: str, parts: list[Piece], decide: Callable[[list[Piece]], dict[str, Any]]) -> dict[str, Any]:
        """What rank 0 makes of the pieces of all processes, on each of them."""
        mine = {"trouble": self._trouble, "pieces": [piece.to_json() for piece in parts]}

        def judged(every: list[dict[str, Any]]) -> dict[str, Any]:
            trouble = [line for entry in every for line in entry["trouble"]]
            if trouble:
                message = f"weights {self._version!r} cannot be compared: {trouble[0]}"
                return {"message": message, "digest": "", "doubtful": []}
            return decide([Piece.from_json(raw) for entry in every for raw in entry["pieces"]])

        if self._rank_group is None:
            return judged([mine])
        rank_group, word = self._rank_group, f"weights-{self._judge}-{self.number}-{what}"
        write_atomic(rank_group.raw / f"{word}.of-{rank_group.rank:05d}", json.dumps(mine))
        outcome: dict[str, Any] = rank_group.agreed(word, lambda: judged(_take(rank_group.raw, word)))
        return outcome


def _take(folder: Path, word: str) -> list[dict[str, Any]]:
    """What all ranks wrote, in their order; gone afterwards."""
    paths = sorted(folder.glob(f"{word}.of-*"))
    contents = [json.loads(path.read_text(encoding="utf-8")) for path in paths]
    for path in paths:
        path.unlink()
    return contents


# -- what is wrong with a tensor that did not arrive. Each kind is decided by fingerprints: nothing is guessed


_CASTS = ("bfloat16", "float16")
"""Narrower dtypes that a tensor may have been rounded to on its way."""

_SHOWN = 3


@dataclass(frozen=True)
class _Faults:
    """Both sides of one sync, and what is known from before it.

    Attributes:
        given: What the engine should hold, by canonical name: of the trainer, or of a checkpoint on disk.
        held: What it holds.
        start: Whether `given` is the checkpoint that the engine read itself.
        before: The version that the engine held before, and the fingerprints.
        versions: Older versions and the fingerprints that they had in the trainer, the latest last.
        rounded: By dtype, the fingerprints that `given` has once it was cast to that dtype and back.
        value: Makes a held tensor whole.
    """

    given: Mapping[str, Whole]
    held: Mapping[str, Whole]
    start: bool
    before: tuple[str, Mapping[str, str]]
    versions: Sequence[tuple[str, Mapping[str, str]]]
    value: Callable[[str], Tensor | None]
    rounded: Mapping[str, Mapping[str, str]] = field(default_factory=dict)

    def kind(self, name: str) -> str | None:
        """What is wrong with one tensor, as far as it is known without `rounded`; None where nothing of that fits."""
        given, held = self.given.get(name), self.held.get(name)
        if given is None:
            return (
                "not in the checkpoint, though the engine has it"
                if self.start
                else "never sent: the engine has it, the trainer did not send it"
            )
        if held is None:
            return f"never arrived: {self._given}, and the engine has no such tensor"
        if held.dtype != given.dtype:
            return f"another dtype: {given.dtype} {self._given}, {held.dtype} in the engine"
        if held.shape != given.shape:
            return f"another shape: {list(given.shape)} {self._given}, {list(held.shape)} in the engine"
        stale = self._stale(name, held.fingerprint)
        if stale is not None:
            return stale + (", which is all zero" if held.zero else "")
        if held.zero:
            return "all zero in the engine"
        return self._of_another(given, held) or self._transposed(name, given)

    def last(self, name: str) -> str:
        """What is wrong with one for which `kind` gave None."""
        given, held = self.given[name], self.held[name]
        for dtype, prints in self.rounded.items():
            if prints.get(name) == held.fingerprint:
                return f"rounded to {dtype} on the way: send it as {given.dtype}"
        if held.nonfinite > given.nonfinite:
            return f"{held.nonfinite} NaN or infinite elements in the engine, {given.nonfinite} {self._given}"
        return f"other values: absmax {given.absmax!r} {self._given}, {held.absmax!r} in the engine"

    @property
    def _given(self) -> str:
        return "in the checkpoint" if self.start else "sent"

    def _stale(self, name: str, held: str) -> str | None:
        version, before = self.before
        if before.get(name) == held:
            return f"stale: the engine still holds what it held before, version {version!r}"
        for version, prints in reversed(self.versions):
            if prints.get(name) == held:
                return f"stale: the engine holds that of version {version!r}"
        return None

    def _of_another(self, given: Whole, held: Whole) -> str | None:
        same = [name for name, whole in self.given.items() if whole.fingerprint == held.fingerprint]
        if not same or given.zero:
            return None
        return f"sent to another name: the engine holds {same[0]} in its place" + (
            f" (and {len(same) - 1} more)" if len(same) > 1 else ""
        )

    def _transposed(self, name: str, given: Whole) -> str | None:
        if len(given.shape) != 2:
            return None
        value = self.value(name)
        if value is None or fingerprint(value.reshape(value.shape[::-1]).T) != given.fingerprint:
            return None
        return "transposed, or sent as the memory of a tensor that is not contiguous: send a contiguous copy"


def differing(given: Mapping[str, Whole], held: Mapping[str, Whole]) -> list[str]:
    """The canonical tensors that are not the same on both sides, in order."""
    names = sorted(given.keys() | held.keys())
    return [
        name
        for name in names
        if name not in given or name not in held or given[name].fingerprint != held[name].fingerprint
    ]


def told(kinds: Iterable[tuple[str, str]]) -> str:
    """Names and what is wrong with each, as part of a line: names of one kind together, a few of each."""
    by_kind: dict[str, list[str]] = {}
    for name, kind in kinds:
        by_kind.setdefault(kind, []).append(name)
    parts = []
    for kind, names in list(by_kind.items())[:_SHOWN]:
        more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
        parts.append(f"{', '.join(names[:_SHOWN])}{more}: {kind}")
    left = sum(len(names) for names in list(by_kind.values())[_SHOWN:])
    return "; ".join(parts) + (f"; and {left} more tensors" if left else "")
