"""Shards that the index names, or that the numbering of the files promises, and that are not there."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator

from repro.doctor.artefacts.hf import INDEX
from repro.doctor.artefacts.kinds import HfCheckpoint
from repro.doctor.rule import Found, Rule, Where

__all__ = ["RULE"]

_NUMBERED = re.compile(r"(model.*?)-?(\d{5,6})-of-(\d{5,6})\.safetensors", re.ASCII)
_MOST = 8


def _check(checkpoint: HfCheckpoint) -> Iterator[Found]:
    there = set(checkpoint.shards)
    if checkpoint.index is not None:
        lost: dict[str, list[str]] = defaultdict(list)
        for tensor, file in checkpoint.index.items():
            if file not in there:
                lost[file].append(tensor)
        for file in sorted(lost)[:_MOST]:
            tensors = sorted(lost[file])
            more = f" and {len(tensors) - 2} more" if len(tensors) > 2 else ""
            said = f"{file[:200]} is missing, and {len(tensors)} tensors with it ({', '.join(tensors[:2])}{more})"
            yield Found(said, Where(str(checkpoint.path / INDEX), item=file[:200]))
        if len(lost) > _MOST:
            yield Found(
                f"{len(lost) - _MOST} more shards of the index are missing", Where(str(checkpoint.path / INDEX))
            )
        return
    groups: dict[tuple[str, str], set[int]] = defaultdict(set)
    for name in there:
        match = _NUMBERED.fullmatch(name)
        if match:
            groups[match[1], match[3]].add(int(match[2]))
    for (prefix, total), numbers in sorted(groups.items()):
        width, count = len(total), int(total)
        if 0 < count <= 100_000 and (missing := sorted(set(range(1, count + 1)) - numbers)):
            shown = ", ".join(f"{prefix}-{n:0{width}d}-of-{total}.safetensors" for n in missing[:3])
            more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
            said = f"{len(numbers)} of {count} shards are there, without {shown}{more}; there is no index either"
            yield Found(said, Where(str(checkpoint.path)))


RULE = Rule(
    "hf-shard-missing", "Shards that the index names, or that 'of NNNNN' promises, and that are not there",
    (HfCheckpoint,), "error", "certain",
    "the weights in them are missing: loading fails, or layers keep what they were initialised with",
    "fetch or convert the missing shard again, then count the .safetensors files against the names' 'of NNNNN'",
    ("slime guide: Debugging",), _check,
)  # fmt: skip
