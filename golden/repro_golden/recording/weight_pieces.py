"""What the processes of a trainer or of an engine hold of each canonical tensor, as fingerprints that add up."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from repro_golden.base.canonical import decode_float, encode_float
from repro_golden.base.errors import ReproError
from repro_golden.fingerprint import Lanes, Share, dtype_name, merge
from repro_golden.fingerprint.placement import read
from repro_golden.fingerprint.share import Run
from repro_golden.trace.signals import collector

__all__ = ["Held", "Piece", "Whole", "canonical_tensors", "join", "pieces"]


class Held(Protocol):
    """What one process of an engine holds: `repro_core.rollout.engine.HeldWeights`.

    Attributes:
        tensors: Parameters and buffers by the engine's own names.
        placements: Which canonical tensors each holds, as plain data; one without is the engine's own buffer.
    """

    @property
    def tensors(self) -> Mapping[str, Tensor]: ...  # noqa: D102 - the attributes above
    @property
    def placements(self) -> Mapping[str, Any]: ...  # noqa: D102 - as above


@dataclass(frozen=True)
class Piece:
    """What one tensor of one process gives to the fingerprint of a canonical one.

    Attributes:
        name: The canonical tensor's.
        holder: Who holds it, for messages: ``rank 1``, ``lm_head.weight of engine process 0``.
        share: Its part of the fingerprint.
        nonfinite: Elements that are NaN or infinite.
        absmax: Largest finite magnitude.
    """

    name: str
    holder: str
    share: Share
    nonfinite: int
    absmax: float

    def to_json(self) -> list[Any]:
        """JSON types."""
        share = self.share
        cover = None if share.whole else share.cover_text()
        tail = [share.nbytes, *share.lanes, cover, self.nonfinite, encode_float(self.absmax)]
        return [self.name, self.holder, share.dtype, list(share.shape), *tail]

    @classmethod
    def from_json(cls, raw: Sequence[Any]) -> Piece:
        """The inverse of `to_json`."""
        name, holder, dtype, shape, nbytes, a, b, cover, nonfinite, absmax = raw
        if cover is None:
            share = _whole(dtype, tuple(shape), nbytes, Lanes(a, b))
        else:
            share = Share.from_cover(dtype, tuple(shape), Lanes(a, b), cover)
        return cls(name, holder, share, nonfinite, decode_float(absmax))


@dataclass(frozen=True)
class Whole:
    """A canonical tensor, of the pieces that all processes hold.

    Attributes:
        dtype: torch's name.
        shape: Its shape.
        fingerprint: 32 hex digits over content, dtype and shape.
        nbytes: Bytes of its content.
        nonfinite: Elements that are NaN or infinite.
        absmax: Largest finite magnitude.
    """

    dtype: str
    shape: tuple[int, ...]
    fingerprint: str
    nbytes: int
    nonfinite: int
    absmax: float

    @property
    def zero(self) -> bool:
        """Whether every element is 0."""
        return bool(self.nbytes) and self.absmax == 0 and not self.nonfinite


def pieces(tensors: Mapping[str, Tensor], placements: Mapping[str, Any] | None, holder: str) -> list[Piece]:
    """Read tensors where they lie, in one pass.

    Args:
        tensors: By the holder's own names.
        placements: What each holds, by the same names; None where tensors are whole and named canonically.
        holder: Who holds them; ``{}`` in it becomes the tensor's own name.

    Raises:
        ReproError: a placement does not fit its tensor.
    """
    if not tensors:
        return []
    reader = collector()
    reader.add(list(tensors.values()), None if placements is None else [placements[name] for name in tensors])
    collected = []
    for (name, tensor), scans in zip(tensors.items(), reader.finish().result(), strict=True):
        for scan in scans:
            share = scan.share or _whole(dtype_name(tensor.dtype), tuple(tensor.shape), tensor.nbytes, scan.lanes)
            collected.append(Piece(scan.name or name, holder.format(name), share, scan.nonfinite, scan.absmax))
    return collected


def join(every: Iterable[Piece]) -> tuple[dict[str, Whole], dict[str, str]]:
    """The canonical tensors by name, and those that cannot be told, each with the reason."""
    by_name: dict[str, list[Piece]] = {}
    for piece in every:
        by_name.setdefault(piece.name, []).append(piece)
    wholes: dict[str, Whole] = {}
    untold: dict[str, str] = {}
    for name, held in by_name.items():
        try:
            wholes[name] = _joined(held)
        except ReproError as error:
            untold[name] = str(error)
    return wholes, untold


def canonical_tensors(held: Iterable[Held], only: Container[str] | None = None) -> dict[str, Tensor]:
    """Copies of canonical tensors on the CPU, put together from the parts that processes hold; without gradients.

    Args:
        held: What each process holds; what has no placement is no part of a canonical tensor.
        only: Names of those to make; all by default.

    Raises:
        ReproError: a placement is none.
    """
    canonical: dict[str, Tensor] = {}
    for process in held:
        for local_name, placement in process.placements.items():
            parts = [(part.name or local_name, part) for part in read(placement).parts]
            wanted = [(name, part) for name, part in parts if only is None or name in only]
            if not wanted:
                continue
            local = process.tensors[local_name].detach().cpu().contiguous()
            for name, part in wanted:
                whole = canonical.setdefault(name, torch.zeros(part.shape, dtype=local.dtype, device="cpu"))
                mine = local.as_strided(part.size, part.step, local.storage_offset() + part.start)
                whole.as_strided(part.size, part.to, part.at).copy_(mine)
    return canonical


def _whole(dtype: str, shape: tuple[int, ...], nbytes: int, lanes: Lanes) -> Share:
    return Share(dtype, shape, nbytes, lanes, (Run(0, nbytes),))


def _joined(held: Sequence[Piece]) -> Whole:
    """One tensor.

    Raises:
        ReproError: copies of the same part differ, or parts are missing.
    """
    copies: dict[tuple[Run, ...], Piece] = {}
    for piece in held:
        _same(copies.setdefault(piece.share.runs, piece), piece)
    whole = [piece for piece in copies.values() if piece.share.whole]
    parts = [piece for piece in copies.values() if piece.share.runs and not piece.share.whole]
    if not whole and not parts:
        raise ReproError("no element of it is held: a process is missing")
    total = (whole[0].share if whole else None, merge([piece.share for piece in parts]) if parts else None)
    if total[0] and total[1] and total[1].whole:  # one has all of it, others have parts of it
        _same(whole[0], Piece(parts[0].name, parts[0].holder, total[1], 0, 0.0))
    share, counted = (total[0], whole[:1]) if total[0] else (total[1], parts)
    assert share is not None
    if not share.whole:
        raise ReproError("only a part of it is held: a process is missing")
    absmax = max(piece.absmax for piece in counted)
    nonfinite = sum(piece.nonfinite for piece in counted)
    return Whole(share.dtype, share.shape, share.fingerprint, share.nbytes, nonfinite, absmax)


def _same(piece: Piece, other: Piece) -> None:
    """Raise ReproError unless two holders of the same part hold the same bits of it."""
    a, b = piece.share, other.share
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        looks = " and ".join(f"{s.dtype} {list(s.shape)}" for s in (a, b))
        raise ReproError(f"{piece.holder} and {other.holder} hold it as {looks}")
    if a.runs == b.runs and (a.lanes, a.edges) != (b.lanes, b.edges):
        raise ReproError(f"{piece.holder} and {other.holder} hold different copies of it")
