"""What one process knows of a tensor's fingerprint, and how the shares of all of them become the whole's.

A share is a sum over the whole words that its runs of bytes cover. A run that begins or ends inside a word carries
those bytes raw: whoever holds the other bytes of the word lets it be completed. Nothing is ever assumed: bytes that
are missing leave a share, bytes that come twice must agree, and what overlaps otherwise is refused.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from repro_golden.base.canonical import parse_json
from repro_golden.base.errors import ReproError
from repro_golden.fingerprint.definition import Lanes, add, bind, reference_word

__all__ = ["Edge", "Run", "Share", "complete", "merge", "union"]


class Run(NamedTuple):
    """`repeats` runs of `length` bytes of the canonical content, the first at `start`, `stride` bytes apart."""

    start: int
    length: int
    stride: int = 0
    repeats: int = 1


class Edge(NamedTuple):
    """Bytes of a word that is not whole here: ``content[at : at + len(raw)]``."""

    at: int
    raw: bytes


@dataclass(frozen=True)
class Share:
    """The part of a canonical tensor's fingerprint that some of its bytes give.

    Attributes:
        dtype: torch's name.
        shape: The canonical shape.
        nbytes: Bytes of the canonical content.
        lanes: Sum over the words that are whole here.
        runs: Which bytes it covers.
        edges: The bytes of words that are not whole here.
    """

    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    lanes: Lanes
    runs: tuple[Run, ...]
    edges: tuple[Edge, ...] = field(default=())

    @property
    def whole(self) -> bool:
        """Whether it covers every byte."""
        return not self.nbytes or self.runs == (Run(0, self.nbytes),)

    @property
    def fingerprint(self) -> str:
        """The canonical tensor's fingerprint.

        Raises:
            ReproError: bytes are missing.
        """
        if not self.whole:
            covered = sum(run.length * run.repeats for run in self.runs)
            raise ReproError(
                f"{covered} of {self.nbytes} bytes of a tensor of shape {list(self.shape)} are here: merge the shares "
                "of all ranks first"
            )
        return bind(self.lanes, self.dtype, self.shape)

    def cover_text(self) -> str:
        """Runs and edges as one canonical line of JSON: with the lanes, all there is to know of the share."""
        edges = [[e.at, e.raw.hex()] for e in self.edges]
        cover = {"edges": edges, "nbytes": self.nbytes, "runs": [list(run) for run in self.runs]}
        return json.dumps(cover, separators=(",", ":"), sort_keys=True)

    @classmethod
    def from_cover(cls, dtype: str, shape: tuple[int, ...], lanes: Lanes, text: str) -> Share:
        """The inverse of `cover_text`; ValueError, KeyError or TypeError on anything else."""
        raw = parse_json(text)
        runs, edges = (
            tuple(Run(*run) for run in raw["runs"]),
            tuple(Edge(at, bytes.fromhex(b)) for at, b in raw["edges"]),
        )
        share = cls(dtype, shape, raw["nbytes"], lanes, runs, edges)
        ends = [r.start + (r.repeats - 1) * r.stride + r.length for r in runs] + [e.at + len(e.raw) for e in edges]
        numbers = [share.nbytes, *itertools.chain(*runs), *(e.at for e in edges)]
        count = math.prod(shape)
        if not all(type(n) is int and n >= 0 for n in numbers) or max(ends, default=0) > share.nbytes:
            raise ValueError("a share's cover reaches outside its content")
        if share.nbytes not in {count * item for item in (1, 2, 4, 8, 16)} or share.cover_text() != text:
            raise ValueError("a share's cover is not that of its shape")
        return share


def merge(shares: Iterable[Share]) -> Share:
    """The share that several give together: the whole tensor's, once every byte is there.

    Shares over the same bytes are replicas: they must agree, and count once.

    Raises:
        ReproError: no shares, shares of different tensors, replicas that differ, or shares that overlap otherwise.
    """
    every = list(shares)
    if not every:
        raise ReproError("there are no shares to merge")
    if len({(s.dtype, s.shape, s.nbytes) for s in every}) > 1:
        raise ReproError("these are shares of tensors of different dtype or shape: compare those first")
    distinct: dict[tuple[Run, ...], Share] = {}
    for share in every:
        first = distinct.setdefault(share.runs, share)
        if (first.lanes, first.edges) != (share.lanes, share.edges):
            raise ReproError(
                f"two ranks hold the same part of a tensor of shape {list(share.shape)} and it differs between them: "
                "replicas have parted"
            )
    runs = union([run for share in distinct.values() for run in share.runs])
    lanes, edges = complete(every[0].nbytes, [e for share in distinct.values() for e in share.edges])
    total = add([lanes, *(share.lanes for share in distinct.values())])
    return Share(every[0].dtype, every[0].shape, every[0].nbytes, total, runs, edges)


def complete(nbytes: int, edges: Iterable[Edge]) -> tuple[Lanes, tuple[Edge, ...]]:
    """The lanes of the words that these bytes make whole, and the bytes that are left, joined where they touch.

    No byte may be given twice; `merge` has made sure of that.
    """
    words: dict[int, list[Edge]] = {}
    for edge in sorted(edges):
        pieces = words.setdefault(edge.at // 8, [])
        if pieces and pieces[-1].at + len(pieces[-1].raw) == edge.at:
            pieces[-1] = Edge(pieces[-1].at, pieces[-1].raw + edge.raw)
        else:
            pieces.append(edge)
    lanes, left = [], []
    for word, pieces in words.items():
        if pieces[0].at == word * 8 and len(pieces[0].raw) == min(8, nbytes - word * 8):
            lanes.append(reference_word(int.from_bytes(pieces[0].raw, "little"), word))
        else:
            left += pieces
    return add(lanes), tuple(left)


def union(runs: Iterable[Run]) -> tuple[Run, ...]:
    """The bytes of all runs together, in one form for each set of bytes.

    Raises:
        ReproError: a byte lies in two runs.
    """
    runs = _side_by_side([run for run in runs if run.length and run.repeats])
    if len(runs) == 1 and runs[0].length < runs[0].stride:
        return tuple(runs)
    starts = ((run.start + k * run.stride, run.length) for run in runs for k in range(run.repeats))
    stretches: list[tuple[int, int]] = []
    stop = -1
    for start, length in sorted(starts):
        if start < stop:
            raise ReproError(
                f"two shares both hold byte {start} of a tensor and are not replicas: a placement is wrong"
            )
        if start == stop:
            stretches[-1] = (stretches[-1][0], stretches[-1][1] + length)
        else:
            stretches.append((start, length))
        stop = start + length
    return tuple(_strided(stretches))


def _side_by_side(runs: Iterable[Run]) -> list[Run]:
    """The same bytes in fewer runs: columns that touch are one, and rows without gaps a single stretch."""
    joined: list[Run] = []
    for run in sorted(runs, key=lambda run: (run.stride, run.repeats, run.start)):
        last = joined[-1] if joined else None
        if last and last[2:] == run[2:] and last.start + last.length == run.start:
            joined[-1] = last._replace(length=last.length + run.length)
        else:
            joined.append(run)
    return [Run(r.start, r.length * r.repeats) if r.length == r.stride or r.repeats == 1 else r for r in joined]


def _strided(stretches: Sequence[tuple[int, int]]) -> Iterator[Run]:
    """Equal stretches at equal distances as one `Run`."""
    first: tuple[int, int] | None = None
    before = stride = count = 0
    for start, length in stretches:
        gap = start - before
        before = start
        if first and length == first[1] and (count == 1 or gap == stride):
            stride, count = gap, count + 1
            continue
        if first:
            yield Run(*first, stride, count)
        first, stride, count = (start, length), 0, 1
    if first:
        yield Run(*first, stride, count)
