"""Rules about groups, indices, versions of the weights, and how samples ended."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from repro_golden.dumps.rollout.check_rules import Batch, Found, Rule, said
from repro_golden.dumps.values import same

__all__ = ["RULES"]

_VERSIONS = 5
"""Versions of the weights that are named; the others are counted."""


def _duplicated(batch: Batch) -> Iterator[Found]:
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
            yield Found(number, "index", f"{which} is there twice: also sample {at}")


def _groups(batch: Batch) -> dict[Any, set[Any]]:
    """The executions of each group: a sample, or several that share a rollout_id."""
    found: dict[Any, set[Any]] = defaultdict(set)
    for number, sample in enumerate(batch.samples):
        if sample["group_index"] is not None:
            shared = sample.get("rollout_id")
            found[sample["group_index"]].add(("sample", number) if shared is None else ("execution", shared))
    return found


def _group_size(batch: Batch) -> Iterator[Found]:
    for group, members in _groups(batch).items():
        if batch.group_size is not None and len(members) != batch.group_size:
            first = next(n for n, s in enumerate(batch.samples) if s["group_index"] == group)
            yield Found(first, "group_index", f"group {said(group)} has {len(members)} samples, not {batch.group_size}")


def _group_sizes(batch: Batch) -> Iterator[Found]:
    sizes = Counter(len(members) for members in _groups(batch).values())
    if batch.group_size is None and len(sizes) > 1:
        listed = ", ".join(f"{count} of {size}" for size, count in sorted(sizes.items()))
        yield Found(None, "group_index", f"groups differ in size: {listed}")


def _scattered(batch: Batch) -> Iterator[Found]:
    seen: list[Any] = []
    for number, sample in enumerate(batch.samples):
        group = sample["group_index"]
        if group is None or (seen and seen[-1] == group):
            continue
        if group in seen:
            yield Found(number, "group_index", f"group {said(group)} goes on here, after others")
        seen.append(group)


def _versions_in_sample(batch: Batch) -> Iterator[Found]:
    for number, versions in batch.column("weight_versions"):
        if isinstance(versions, list) and len(found := {said(v) for v in versions}) > 1:
            yield Found(number, "weight_versions", f"sampled with the weights {_listed(found)}")


def _versions(batch: Batch) -> Iterator[Found]:
    found = Counter(v for _, versions in batch.column("weight_versions") for v in set(map(said, versions)))
    if len(found) > 1:
        named = {version: f"{version} ({count} sample{'s' if count > 1 else ''})" for version, count in found.items()}
        yield Found(None, "weight_versions", f"the batch was sampled with weights {_listed(found, named)}")


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


def _unfinished(batch: Batch) -> Iterator[Found]:
    for number, sample in enumerate(batch.samples):
        if sample["status"] in ("aborted", "failed", "pending"):
            kept = "" if sample["remove_sample"] else " and is not removed"
            yield Found(number, "status", f"the sample is {sample['status']}{kept}")


def _truncated(batch: Batch) -> Iterator[Found]:
    count = sum(sample["status"] == "truncated" for sample in batch.samples)
    if 2 * count > len(batch.samples):
        yield Found(None, "status", f"{count} of {len(batch.samples)} samples are truncated")


def _empty_response(batch: Batch) -> Iterator[Found]:
    for number, sample in enumerate(batch.samples):
        if sample["response_length"] == 0:
            yield Found(number, "response_length", f"the response has no token (status {sample['status']})")


def _removed(batch: Batch) -> Iterator[Found]:
    count = sum(bool(sample["remove_sample"]) for sample in batch.samples)
    if count:
        yield Found(None, "remove_sample", f"{count} of {len(batch.samples)} samples are trained with a mask of zeros")


RULES = (
    Rule(
        "duplicated-index",
        "error",
        "rows are joined on it across ranks, and a sample that is there twice counts twice",
        "give each sample its own index, and siblings of one execution one rollout_id",
        _duplicated,
        evaluation=False,
    ),
    Rule(
        "group-size",
        "error",
        "advantages are relative to the group, and some code cuts the batch by its size",
        "look at filters, and at --load-debug-rollout-data-subsample, which cuts groups",
        _group_size,
        evaluation=False,
    ),
    Rule(
        "group-sizes",
        "warning",
        "advantages are relative to the group, and some code cuts the batch by its size",
        "look at filters, and at --load-debug-rollout-data-subsample, which cuts groups",
        _group_sizes,
        evaluation=False,
    ),
    Rule(
        "scattered-group",
        "warning",
        "rewards that are normalised by position mix groups",
        "sort the samples by index",
        _scattered,
        evaluation=False,
    ),
    Rule(
        "versions-in-sample",
        "note",
        "a response that was sampled with several weights is off-policy from the switch on",
        "expected of partial and asynchronous rollouts; --mask-offpolicy-in-partial-rollout masks the older part",
        _versions_in_sample,
        evaluation=False,
    ),
    Rule(
        "versions-in-batch",
        "warning",
        "part of the batch was sampled with older weights",
        "expected of asynchronous rollouts alone; else look at the weight update",
        _versions,
        evaluation=False,
    ),
    Rule(
        "unfinished",
        "warning",
        "an aborted, failed or pending sample is trained on as it is",
        "filter it, or set remove_sample",
        _unfinished,
        evaluation=False,
    ),
    Rule(
        "truncated",
        "note",
        "most responses hit the limit of length",
        "look at --rollout-max-response-len, --rollout-stop and the chat template",
        _truncated,
    ),
    Rule(
        "empty-response",
        "warning",
        "there is nothing to train on, and some code divides by the length",
        "look at samples that were aborted before the first token",
        _empty_response,
    ),
    Rule(
        "removed",
        "note",
        "they take their place in the batch and teach nothing",
        "nothing, where a filter means it",
        _removed,
        evaluation=False,
    ),
)
