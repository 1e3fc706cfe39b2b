"""Files of a Megatron checkpoint: all there, and as long as they should be."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from repro.doctor.artefacts.kinds import MegatronCheckpoint
from repro.doctor.facts.checkpoints.launches import folder_of
from repro.doctor.rule import Found, Rule, Severity, Where

__all__ = ["RULE"]

_RANK = re.compile(r"mp_rank_(\d{2,})((?:_\d{3,})*)/", re.ASCII)
_NEEDED = (".metadata", "common.pt", "metadata.json")
_MOST = 8


def _check(checkpoint: MegatronCheckpoint) -> Iterator[Found]:
    newest = max(checkpoint.files, default=None)
    for iteration, files in sorted(checkpoint.files.items()):
        folder = folder_of(checkpoint, iteration)
        found = list(_broken(files, checkpoint.extents.get(iteration)))
        for name, what in found[:_MOST]:
            severity: Severity | None = None if iteration in (newest, *checkpoint.extents) else "warning"
            yield Found(f"{folder.name}/{name} {what}", Where(str(folder / name)), severity)
        if len(found) > _MOST:
            yield Found(f"{folder.name} has {len(found) - _MOST} more such files", Where(str(folder)))
    for name, why in sorted(checkpoint.damage.items()):
        lost = "cut short" in why or "is empty" in why or "breaks off" in why
        already = any(
            name.endswith(f"/{one}") and not size for files in checkpoint.files.values() for one, size in files.items()
        )
        if not already:
            yield Found(
                f"{name} cannot be read: {why}", Where(str(checkpoint.path / name)), None if lost else "warning"
            )


def _broken(files: Mapping[str, int], extents: Mapping[str, int] | None) -> Iterator[tuple[str, str]]:
    """Files of one iteration and what is wrong with each."""
    distributed = any(name.endswith(".distcp") for name in files)
    for name in sorted(files):
        needed = name in _NEEDED or name.endswith("/model_optim_rng.pt") or (extents and name in extents)
        if not files[name] and needed:
            yield name, "has 0 bytes"
    if distributed and ".metadata" not in files:
        yield ".metadata", "is missing beside its .distcp files: the save was interrupted before its end"
    for name, end in sorted((extents or {}).items()):
        if name not in files:
            yield name, "is missing, and .metadata names it"
        elif 0 < files[name] < end:
            yield name, f"has {files[name]} bytes, and .metadata says that it has at least {end}"
    yield from _ranks(files)


def _ranks(files: Mapping[str, int]) -> Iterator[tuple[str, str]]:
    """Ranks that are missing in the grid of ``mp_rank_TT_PPP``."""
    found: set[tuple[int, ...]] = set()
    for name in files:
        match = _RANK.match(name)
        if match:
            found.add((int(match[1]), *(int(part) for part in match[2].split("_")[1:])))
    lengths = {len(rank) for rank in found}
    if len(lengths) != 1 or len(found) > 100_000:
        return
    sizes = [max(rank[axis] for rank in found) + 1 for axis in range(lengths.pop())]
    total = 1
    for size in sizes:
        total *= size
    if total > 100_000 or total == len(found):
        return
    for flat in range(total):
        rank: list[int] = []
        for size in reversed(sizes):
            rank.insert(0, flat % size)
            flat //= size
        if tuple(rank) not in found:
            name = f"mp_rank_{rank[0]:02d}" + "".join(f"_{part:03d}" for part in rank[1:])
            yield name, f"is missing: the other ranks make a grid of {' x '.join(map(str, sizes))}"


RULE = Rule(
    "checkpoint-truncated", "Files of a Megatron checkpoint that are missing, empty or too short",
    (MegatronCheckpoint,), "error", "certain",
    "loading fails, on some ranks only and after minutes, or reads what is not there",
    "copy the iteration again from where it is whole, or go back to an older one with --ckpt-step",
    ("slime guide: Troubleshooting", "THUDM/slime@624b824a8 slime/backends/megatron_utils/checkpoint.py:95"), _check,
)  # fmt: skip
