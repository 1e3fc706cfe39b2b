"""Rules about groups, indices, versions of the weights, and how samples ended."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from repro_golden.base.checks import Found, rule
from repro_golden.dumps.rollout.checks.inputs import EMPTY, GROUPS, SAMPLE, STALE, Batch, TrainBatch, noted, said
from repro_golden.dumps.values import same

__all__ = ["RULES"]

_VERSIONS = 5
"""Versions of the weights that are named; the others are counted."""


@rule(
    id="duplicated-index",
    title="Samples that are there twice",
    severity="error",
    certainty="certain",
    why="rows are joined on it across ranks, and a sample that is there twice counts twice",
    fix="give each sample its own index, and siblings of one execution one rollout_id",
    sources=(SAMPLE,),
)
def _duplicated(batch: TrainBatch) -> Iterator[Found]:
    first: dict[Any, int] = {}
    for number, sample in enumerate(batch.samples):
        key = (sample["group_index"], sample["index"], sample.get("rollout_id"))
        if sample["index"] is None:
            continue
        at = first.setdefault(key, number)
        if at == number:
            continue
        # siblings of one execution share all three, and differ in their tokens
        if key[2] is None or same(sample["tokens"], batch.samples[at]["tokens"]):
            which = f"index {said(key[1])} of group {said(key[0])}"
            yield noted(number, "index", f"{which} is there twice: also sample {at}")


def _groups(batch: Batch) -> dict[Any, set[Any]]:
    """The executions of each group: a sample, or several that share a rollout_id."""
    groups: dict[Any, set[Any]] = defaultdict(set)
    for number, sample in enumerate(batch.samples):
        if sample["group_index"] is not None:
            shared = sample.get("rollout_id")
            groups[sample["group_index"]].add(("sample", number) if shared is None else ("execution", shared))
    return groups


@rule(
    id="group-size",
    title="Groups of another size than --n-samples-per-prompt",
    severity="error",
    certainty="certain",
    why="advantages are relative to the group, and some code cuts the batch by its size",
    fix="look at filters, and at --load-debug-rollout-data-subsample, which cuts groups",
    sources=(GROUPS,),
)
def _group_size(batch: TrainBatch) -> Iterator[Found]:
    unknown = [number for number, sample in enumerate(batch.samples) if sample["group_index"] is None]
    if batch.group_size is not None and unknown:
        of = f"{len(unknown)} of {len(batch.samples)} samples have no number of their group"
        fits = len(batch.samples) % batch.group_size == 0
        text = "its size is not known" if fits else f"{len(batch.samples)} are no multiple of {batch.group_size}"
        yield noted(unknown[0], "group_index", f"{of}: {text}")._replace(severity="warning" if fits else None)
    for group, members in _groups(batch).items():
        if batch.group_size is not None and len(members) != batch.group_size:
            first = next(n for n, s in enumerate(batch.samples) if s["group_index"] == group)
            yield noted(first, "group_index", f"group {said(group)} has {len(members)} samples, not {batch.group_size}")


@rule(
    id="group-sizes",
    title="Groups of several sizes",
    severity="warning",
    certainty="certain",
    why="advantages are relative to the group, and some code cuts the batch by its size",
    fix="look at filters, and at --load-debug-rollout-data-subsample, which cuts groups",
    sources=(GROUPS,),
)
def _group_sizes(batch: TrainBatch) -> Iterator[Found]:
    sizes = Counter(len(members) for members in _groups(batch).values())
    if batch.group_size is None and len(sizes) > 1:
        listed = ", ".join(f"{count} of {size}" for size, count in sorted(sizes.items()))
        yield noted(None, "group_index", f"groups differ in size: {listed}")


@rule(
    id="scattered-group",
    title="Groups whose samples do not stand together",
    severity="warning",
    certainty="likely",
    why="rewards that are normalised by position mix groups",
    fix="sort the samples by index",
    sources=(GROUPS,),
)
def _scattered(batch: TrainBatch) -> Iterator[Found]:
    seen: list[Any] = []
    for number, sample in enumerate(batch.samples):
        group = sample["group_index"]
        if group is None or (seen and seen[-1] == group):
            continue
        if group in seen:
            yield noted(number, "group_index", f"group {said(group)} goes on here, after others")
        seen.append(group)


@rule(
    id="versions-in-sample",
    title="Responses that were sampled with several weights",
    severity="note",
    certainty="certain",
    why="a response that was sampled with several weights is off-policy from the switch on",
    fix="expected of partial and asynchronous rollouts; --mask-offpolicy-in-partial-rollout masks the older part",
    sources=(STALE,),
)
def _versions_in_sample(batch: TrainBatch) -> Iterator[Found]:
    for number, versions in batch.column("weight_versions"):
        if isinstance(versions, list) and len(distinct := {said(v) for v in versions}) > 1:
            yield noted(number, "weight_versions", f"sampled with the weights {_listed(distinct)}")


@rule(
    id="versions-in-batch",
    title="A rollout that was sampled with several weights",
    severity="warning",
    certainty="certain",
    why="part of the batch was sampled with older weights",
    fix="expected of asynchronous rollouts alone; else look at the weight update",
    sources=(STALE,),
)
def _versions(batch: TrainBatch) -> Iterator[Found]:
    counts = Counter(v for _, versions in batch.column("weight_versions") for v in set(map(said, versions)))
    if len(counts) > 1:
        named = {version: f"{version} ({count} sample{'s' if count > 1 else ''})" for version, count in counts.items()}
        yield noted(None, "weight_versions", f"the batch was sampled with weights {_listed(counts, named)}")


def _listed(versions: Iterable[str], named: Mapping[str, str] | None = None) -> str:
    """The first few versions in the order of their numbers, and how many there are."""
    ordered = sorted(versions, key=_place)
    listed = ", ".join((named or {}).get(version, version) for version in ordered[:_VERSIONS])
    more = len(ordered) - _VERSIONS
    return f"{listed} and {more} more ({len(ordered)} versions)" if more > 0 else listed


def _place(version: str) -> tuple[int, int, str]:
    """Where a version stands: numbers by size, then other names by their letters."""
    digits = version.strip("'\"")
    return (0, int(digits), version) if digits.isdecimal() and len(digits) < 20 else (1, 0, version)


@rule(
    id="unfinished",
    title="Samples that are aborted, failed or pending",
    severity="warning",
    certainty="certain",
    why="an aborted, failed or pending sample is trained on as it is",
    fix="filter it, or set remove_sample",
    sources=(SAMPLE,),
)
def _unfinished(batch: TrainBatch) -> Iterator[Found]:
    for number, sample in enumerate(batch.samples):
        if sample["status"] in ("aborted", "failed", "pending"):
            suffix = "" if sample["remove_sample"] else " and is not removed"
            yield noted(number, "status", f"the sample is {sample['status']}{suffix}")


@rule(
    id="truncated",
    title="A rollout most of whose responses are truncated",
    severity="note",
    certainty="certain",
    why="most responses hit the limit of length",
    fix="look at --rollout-max-response-len, --rollout-stop and the chat template",
    sources=(SAMPLE,),
)
def _truncated(batch: Batch) -> Iterator[Found]:
    count = sum(sample["status"] == "truncated" for sample in batch.samples)
    if 2 * count > len(batch.samples):
        yield noted(None, "status", f"{count} of {len(batch.samples)} samples are truncated")


@rule(
    id="empty-response",
    title="Responses without a token",
    severity="warning",
    certainty="certain",
    why="there is nothing to train on, and some code divides by the length",
    fix="look at samples that were aborted before the first token",
    sources=(EMPTY,),
)
def _empty_response(batch: Batch) -> Iterator[Found]:
    for number, sample in enumerate(batch.samples):
        if sample["response_length"] == 0:
            yield noted(number, "response_length", f"the response has no token (status {sample['status']})")


@rule(
    id="removed",
    title="Samples that a filter removed",
    severity="note",
    certainty="certain",
    why="they take their place in the batch and teach nothing",
    fix="nothing, where a filter means it",
    sources=(SAMPLE,),
)
def _removed(batch: TrainBatch) -> Iterator[Found]:
    count = sum(bool(sample["remove_sample"]) for sample in batch.samples)
    if count:
        yield noted(None, "remove_sample", f"{count} of {len(batch.samples)} samples are trained with a mask of zeros")


RULES = (
    _duplicated,
    _group_size,
    _group_sizes,
    _scattered,
    _versions_in_sample,
    _versions,
    _unfinished,
    _truncated,
    _empty_response,
    _removed,
)
