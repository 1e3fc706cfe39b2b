"""What several processes recorded as one trace: which of their trainings it is of, and the rows of its ranks as one's.

Replicas stand once, shares are added up, and what differs by rank is kept apart.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol, TypeVar

from repro_golden.base.errors import ReproError
from repro_golden.fingerprint.share import merge
from repro_golden.recording.attach.written.raw import NORM, number_of
from repro_golden.trace import Row
from repro_golden.trace.model import METRIC, RECORDER
from repro_golden.trace.writer import metric_row

__all__ = ["OtherRanksError", "all_asked_for", "merge_rows", "those_without_a_step", "told_of_all"]


class OtherRanksError(ReproError):
    """What trained were more ranks, or fewer, than the case asks for."""


def merge_rows(ranks: Sequence[Sequence[Row]], *, everywhere: bool = False) -> Iterator[Row]:
    """The rows of one step: one for each signal that all ranks agree on or hold shares of, else one for each rank.

    Args:
        ranks: What each of them has.
        everywhere: Whether what has no placement must be every rank's, as in process, where whoever holds a tensor
            that others lack says so by its placement. Foreign programs give none: there a signal may be a pipeline
            stage's alone.

    Raises:
        ReproError: shares that do not add up to a tensor.
    """
    by_signal: dict[tuple[str, str], list[tuple[int, Row]]] = {}
    for rank, rows in enumerate(ranks):
        for row in rows:
            by_signal.setdefault((row.phase, row.name), []).append((rank, row))
    for (phase, name), held in by_signal.items():
        if everywhere:
            lacking = _lacking(phase, name, by_signal, len(ranks))  # a whole tensor's placement counts here
            held = [(rank, _bare(row)) for rank, row in held]
        else:
            lacking = _foreign_lacking(phase, name, by_signal, len(ranks))
        rows = [row for _, row in held]
        if NORM in name and rows[0].dtype == METRIC:
            yield _norm(rows[0].phase, name, [number_of(row) for row in rows])
        elif _placed(rows) and not _parted(rows) and not lacking:
            yield _added(name, rows)
        elif len({row.fingerprint for row in rows}) == 1 and not lacking:
            yield rows[0]
        else:
            yield from _apart(name, held)


def _apart(name: str, held: Sequence[tuple[int, Row]]) -> Iterator[Row]:
    return (replace(row, name=f"{name}@{rank}") for rank, row in held)


def _bare(row: Row) -> Row:
    """A row as a trace has it: no placement where it is of the whole tensor."""
    return replace(row, placement=None) if row.placement is not None and row.whole else row


def _lacking(phase: str, name: str, held: Mapping[tuple[str, str], Sequence[tuple[int, Row]]], ranks: int) -> bool:
    """Whether a rank does not have a signal that it must have in process.

    What has no placement is every rank's. The gradient of a part of a weight is at least on the ranks that have the
    updated weight's part, and the other way round; a distributed optimizer cuts the two otherwise, and says so.
    """
    rows = held[phase, name]
    have = {rank for rank, _ in rows}
    if not _placed([row for _, row in rows]):
        return len(have) < ranks
    other = held.get(("update" if phase == "grad" else "grad", name), ()) if phase in ("grad", "update") else ()
    alike = {row.placement for _, row in rows} == {row.placement for _, row in other}
    return alike and not {rank for rank, _ in other} <= have


def _foreign_lacking(
    phase: str, name: str, held: Mapping[tuple[str, str], Sequence[tuple[int, Row]]], ranks: int
) -> bool:
    """The same of a foreign program: a rank that has a parameter has its gradient, and all skip a step or none does."""
    rows = held[phase, name]
    if _placed([row for _, row in rows]):
        return False
    if phase == "update" and name.rpartition("/")[2] == "skipped":
        return len(rows) < ranks
    owners = held.get(("update", name), ()) if phase == "grad" else ()
    return bool(owners) and len(rows) != len(owners)


def _placed(rows: Sequence[Row]) -> bool:
    return any(row.placement is not None for row in rows)


def _parted(rows: Sequence[Row]) -> bool:
    """Whether ranks that hold the same part of a tensor hold other bits of it."""
    held: dict[Any, Any] = {}
    for row in rows:
        share = row.share
        part, bits = (share.runs, share.edges) if share else (None, ())
        if held.setdefault(part, (row.lanes, bits)) != (row.lanes, bits):
            return True
    return False


def _norm(phase: str, name: str, parts: Sequence[float]) -> Row:
    """The norm of which ranks have the norms of their shards."""
    name, _, order = name.partition(NORM)
    p = float(order)
    if math.isinf(p):
        return metric_row(phase, name, max(parts))
    return metric_row(phase, name, math.fsum(abs(part) ** p for part in parts) ** (1 / p))


def _added(name: str, rows: Sequence[Row]) -> Row:
    shares = [row.share for row in rows]
    if any(share is None for share in shares):  # one rank may hold all of a small tensor, and others nothing of it
        full = [row for row, share in zip(rows, shares, strict=True) if share is None]
        if any(share is not None and share.runs for share in shares) or len({row.fingerprint for row in full}) > 1:
            raise ReproError(f"{name} is whole on one rank and sharded on another: trace one layout at a time")
        return full[0]
    whole = merge([share for share in shares if share is not None])
    if not whole.whole:
        raise ReproError(f"the ranks hold only a part of {name}: a rank is missing")
    distinct = list({row.placement: row for row in rows}.values())
    return replace(
        rows[0],
        lanes=whole.lanes,
        nonfinite=sum(r.nonfinite for r in distinct),
        absmax=max(r.absmax for r in distinct),
        l2=math.sqrt(math.fsum(r.l2**2 for r in distinct)),
        placement=None,
    )


class _Rank(Protocol):
    """The records of one rank, with what its process says of itself."""

    about: Any


R = TypeVar("R", bound=_Rank)


def _by_size(ranks: Sequence[R]) -> list[tuple[int, list[R]]]:
    """The trainings beside each other, each with the elements in what its optimizers hold: the largest first.

    A training is told by its process group.
    """
    groups: dict[str, list[R]] = {}
    for rank in ranks:
        groups.setdefault(str(rank.about.get("group", "")), []).append(rank)
    sized = [(sum(int(rank.about.get("size", 0)) for rank in group), group) for group in groups.values()]
    return sorted(sized, key=lambda training: training[0], reverse=True)


def _largest(ranks: Sequence[R], others: int) -> list[R]:
    """The ranks of one of several trainings beside each other: the actor's, where a critic's are the others.

    The one that is recorded is the largest: which of them begins first is chance.

    Raises:
        ReproError: nothing tells which one it is, or the others are not as many.
    """
    (size, first), *rest = _by_size(ranks)
    if not rest or size == rest[0][0]:
        raise ReproError(
            f"resources.other_ranks = {others}, but nothing tells which training is the one to record: "
            + (f"two have {size} elements each; trace one by a command of its own" if rest else "there is one alone")
        )
    if (count := len(ranks) - len(first)) != others:
        raise ReproError(f"{count} processes trained beside the largest training: resources.other_ranks = {others}")
    return first


def _one_at_a_time(ranks: Sequence[_Rank]) -> str:
    """How to go on where several processes trained as one rank."""
    (size, first), *rest = _by_size(ranks)
    if not rest or size == rest[0][0]:
        return "trace one training by a command of its own, or let one process make all"
    return (
        "trace one program at a time, or say in a case that another training runs beside it: "
        f"resources.other_ranks = {len(ranks) - len(first)}"
    )


def all_asked_for(ranks: Sequence[R], want: int | None, others: int) -> list[R]:
    """The records of each rank that there must be, by this recorder, of the code in question.

    Args:
        ranks: All that there are. Where as many as are asked for trained, those are they, whichever of the world's.
        want: How many must be; by default as many as each says its world has.
        others: Processes of other trainings beside it.

    Raises:
        ReproError: they are not there.
    """
    ranks = _largest(ranks, others) if others else [*ranks]
    present = sorted(rank.about["rank"] for rank in ranks)
    if any(rank.about["recorder"] != RECORDER for rank in ranks):
        raise ReproError("the program imports another version of repro_golden: use one in both environments")
    if len(set(present)) < len(present):
        twice = next(r for r in present if present.count(r) > 1)
        raise ReproError(f"{present.count(twice)} processes trained as rank {twice}: {_one_at_a_time(ranks)}")
    world = max(int(rank.about["world"]) for rank in ranks)
    want = want or world
    if len(present) > want:  # whichever of them were seen first
        made = len(present) if others else max(len(present), world)
        raise OtherRanksError(
            f"more ranks train than the {want} that {'are' if want > 1 else 'is'} asked for: "
            f"`--ranks {made}` before --, or ranks = {made} in [resources] of the case; less by those that only serve"
        )
    if len(present) < want:
        raise OtherRanksError(
            f"{len(present)} of {want} ranks recorded steps (missing: {sorted({*range(want)} - {*present})}, "
            f"found: {present}): resources.ranks (--ranks) says how many there must be, without those that only serve"
        )
    return ranks


def those_without_a_step(ranks: Sequence[_Rank], raised: str | None) -> dict[str, str]:
    """The ranks of the world that did not train, with why they were not looked at.

    Args:
        ranks: Those that did.
        raised: What ended a process that made no step, if anything did: it may have been one of the others.
    """
    world = max(int(rank.about["world"]) for rank in ranks)
    idle = sorted({*range(world)} - {rank.about["rank"] for rank in ranks})
    if not idle:
        return {}
    return {
        f"rank{'s' * (len(idle) > 1)} {', '.join(map(str, idle))}": "no training step was recorded there"
        + (f", and a process ended by {raised}" if raised else "")
    }


def told_of_all(ranks: Sequence[_Rank]) -> Mapping[str, Any]:
    """What the first rank says of itself; the layout has the ranks that train, as a case does, and not those beside."""
    about = ranks[0].about
    if "identity" not in about:
        return about  # type: ignore[no-any-return]
    identity = about["identity"]
    return {**about, "identity": {**identity, "layout": {**identity["layout"], "ranks": str(len(ranks))}}}
