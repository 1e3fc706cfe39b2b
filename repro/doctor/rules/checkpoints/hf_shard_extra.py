"""Files of weights that the index does not name: leftovers of another conversion."""

from __future__ import annotations

import re
from collections.abc import Iterator

from repro.doctor.artefacts.hf import INDEX
from repro.doctor.artefacts.kinds import HfCheckpoint
from repro.doctor.rule import Found, Rule, Where

__all__ = ["RULE"]

_TOTAL = re.compile(r"-of-(\d{5,6})\.safetensors$", re.ASCII)


def _check(checkpoint: HfCheckpoint) -> Iterator[Found]:
    totals = sorted({match[1] for name in checkpoint.shards if (match := _TOTAL.search(name))})
    if checkpoint.index is None:
        if len(totals) > 1:
            said = f"shards of several conversions lie here: of {', of '.join(totals)}"
            yield Found(said, Where(str(checkpoint.path)), cure="keep the shards of one conversion and its index")
        return
    extra = sorted(set(checkpoint.shards) - set(checkpoint.index.values()))
    if extra:
        shown = ", ".join(extra[:4]) + (f" and {len(extra) - 4} more" if len(extra) > 4 else "")
        files = f"{len(checkpoint.shards)} safetensors files, and the index names {len(set(checkpoint.index.values()))}"
        yield Found(f"not in the index: {shown} ({files})", Where(str(checkpoint.path / INDEX), item=extra[0]))


RULE = Rule(
    "hf-shard-extra", "Shards that the index does not name", (HfCheckpoint,), "warning", "certain",
    "a loader that takes every file reads another conversion's weights, and one that goes by the index leaves them out",
    "delete them if they are left over from another conversion, or write the index again",
    ("slime guide: Debugging",), _check,
)  # fmt: skip
